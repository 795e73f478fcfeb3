/* DECLARE at the home of a job: keys, disagreement, limits, deadlines. */
#include "double.h"

#define FAR _cleanup_(far_freep) struct far *far

static const uint32_t two_each[] = { 2, 2, 2 };

TEST(keys_and_places)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, two_each);
	uint64_t a, b, c, d, start;

	far_form(far, &layout);
	a = far_tensor(far, &layout, "a", DTYPE_FLOAT32, 1000, &start);
	ASSERT_EQ(start, 0);
	b = far_tensor(far, &layout, "b", DTYPE_FLOAT64, 3, &start);
	ASSERT_EQ(start, 4032); /* 4000, on a boundary of 64 */
	c = far_tensor(far, &layout, "c", DTYPE_FLOAT64, ELEMENTS_VARIABLE, &start);
	ASSERT_EQ(start, 4032 + 64);
	d = far_tensor(far, &layout, "d", DTYPE_INT8, 0, &start);
	ASSERT_EQ(start, 4032 + 64 + 65536); /* unknown size: one stripe */
	ASSERT_TRUE(a && a != b && b != c && c != d && a != d);
	/* Declared again it is the same. */
	ASSERT_TRUE(far_tensor(far, &layout, "a", DTYPE_FLOAT32, 1000, &start) == a);
	ASSERT_EQ(start, 0);
}

TEST(order_does_not_matter)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct asked *a0, *b0, *a1, *b1;

	far_form(far, &layout);
	a0 = far_declare(far, 0, &layout, 0, "a", DTYPE_FLOAT32, 1, 0);
	b1 = far_declare(far, 1, &layout, 1, "b", DTYPE_FLOAT32, 1, 1);
	far_expect_waiting(far, a0);
	far_expect_waiting(far, b1);
	b0 = far_declare(far, 0, &layout, 0, "b", DTYPE_FLOAT32, 1, 0);
	far_expect(far, b0, 0, NULL);
	far_expect(far, b1, 0, NULL);
	far_expect_waiting(far, a0);
	a1 = far_declare(far, 1, &layout, 1, "a", DTYPE_FLOAT32, 1, 1);
	far_expect(far, a1, 0, NULL);
	far_expect(far, a0, 0, NULL);
	ASSERT_TRUE(a0->answer.key == a1->answer.key && a0->answer.key != b0->answer.key);
}

TEST(disagreement_names_both)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, two_each);
	struct asked *a, *b;
	const char *text =
		"tensor t: rank 2 declares 200 elements of float32, rank 0 declares 100 of "
		"float32";

	far_form(far, &layout);
	a = far_declare(far, 0, &layout, 0, "t", DTYPE_FLOAT32, 100, 0);
	b = far_declare(far, 1, &layout, 1, "t", DTYPE_FLOAT32, 200, 2);
	far_expect(far, a, -EINVAL, text);
	far_expect(far, b, -EINVAL, text);
	/* Whoever comes later hears the same, however right it is. */
	far_expect(far, far_declare(far, 0, &layout, 0, "t", DTYPE_FLOAT32, 100, 0), -EINVAL, text);
	far_expect(far, far_declare(far, 2, &layout, 2, "t", DTYPE_FLOAT32, 100, 4), -EINVAL, text);
	/* Then all know, and may try again. */
	ASSERT_TRUE(far_tensor(far, &layout, "t", DTYPE_FLOAT32, 100, NULL) != 0);
	far_expect(far, far_declare(far, 1, &layout, 1, "t", DTYPE_INT32, 100, 3), -EINVAL,
		   "rank 3 declares 100 elements of int32, rank 0 declares 100 of float32");
	far_expect(far, far_declare(far, 1, &layout, 1, "t", DTYPE_FLOAT32, ELEMENTS_VARIABLE, 3),
		   -EINVAL, "rank 3 declares variable elements");
}

TEST(shapes_differ)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, two_each);
	const char *text = "tensor t: rank 5 declares 25x4 elements of float32, rank 2 declares "
			   "4x25 of float32";
	struct asked *a, *b;

	far_form(far, &layout);
	a = far_declare_shaped(far, 0, &layout, 0, "t", NULL, 0);
	b = far_declare_shaped(far, 1, &layout, 1, "t", "4x25", 2);
	far_expect_waiting(far, b);
	far_expect(far, far_declare_shaped(far, 2, &layout, 2, "t", "25x4", 5), -EINVAL, text);
	far_expect(far, a, -EINVAL, text);
	far_expect(far, b, -EINVAL, text);

	a = far_declare_shaped(far, 0, &layout, 0, "t", "4x25", 0);
	b = far_declare_shaped(far, 1, &layout, 1, "t", "4x25", 2);
	far_expect(far, far_declare_shaped(far, 2, &layout, 2, "t", NULL, 5), 0, NULL);
	far_expect(far, a, 0, NULL);
	far_expect(far, b, 0, NULL);
	/* Also when all know it. */
	far_expect(far, far_declare_shaped(far, 1, &layout, 1, "t", "25x4", 3), -EINVAL,
		   "rank 3 declares 25x4 elements of float32, rank 0 declares 4x25");
	far_expect(far, far_declare_shaped(far, 1, &layout, 1, "t", NULL, 3), 0, NULL);
}

TEST(repeats_are_refused)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct asked *a;

	far_form(far, &layout);
	a = far_declare(far, 0, &layout, 0, "t", DTYPE_FLOAT32, 1, 0);
	far_expect(far, far_declare(far, 0, &layout, 0, "t", DTYPE_FLOAT32, 1, 0), -EALREADY,
		   "declared it already");
	far_expect_waiting(far, a);
	far_expect(far, far_declare(far, 1, &layout, 1, "t", DTYPE_FLOAT32, 1, 0), 0, NULL);
	far_expect(far, a, 0, NULL);
}

TEST(strangers_are_refused)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL), other = layout;

	far_form(far, &layout);
	far_expect(far, far_declare(far, 4, &layout, 0, "t", DTYPE_FLOAT32, 1, 0), -EACCES,
		   "end4 does not speak for node 0");
	far_expect(far, far_declare(far, 0, &layout, 1, "t", DTYPE_FLOAT32, 1, 0), -EACCES, NULL);
	far_expect(far, far_declare(far, 0, &layout, 2, "t", DTYPE_FLOAT32, 1, 0), -EPROTO,
		   "no node 2");
	other.job = layout.job + 1;
	far_expect(far, far_declare(far, 0, &other, 0, "t", DTYPE_FLOAT32, 1, 0), -EPROTO,
		   "no such job");
}

TEST(malformed_declarations_are_refused)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 1, NULL);
	struct data_header junk = { .op = DATA_DECLARE, .len = 2 };
	char name[TENSOR_NAME_MAX + 2];

	far_form(far, &layout);
	memset(name, 'n', sizeof(name));
	name[sizeof(name) - 1] = 0;
	far_expect(far, far_declare(far, 0, &layout, 0, name, DTYPE_FLOAT32, 1, 0), -EINVAL, "255");
	name[TENSOR_NAME_MAX] = 0;
	far_expect(far, far_declare(far, 0, &layout, 0, name, DTYPE_FLOAT32, 1, 0), 0, NULL);
	far_expect(far, far_declare(far, 0, &layout, 0, "", DTYPE_FLOAT32, 1, 0), -EINVAL, "255");
	far_expect(far, far_declare(far, 0, &layout, 0, "a\x01", DTYPE_FLOAT32, 1, 0), -EINVAL,
		   "control characters");
	far_expect(far, far_declare(far, 0, &layout, 0, "\xe2\x80\xae", DTYPE_FLOAT32, 1, 0),
		   -EINVAL, "control characters");
	far_expect(far, far_declare(far, 0, &layout, 0, "t", 11, 1, 0), -EINVAL, "type 11");
	far_expect(far, far_declare(far, 0, &layout, 0, "t", DTYPE_FLOAT64, 1ull << 61, 0), -EINVAL,
		   "too many");
	memset(name, '1', sizeof(name));
	name[TENSOR_SHAPE_MAX + 1] = 0;
	far_expect(far, far_declare_shaped(far, 0, &layout, 0, "t", name, 0), -EINVAL, "1 to 63");
	name[TENSOR_SHAPE_MAX] = 0;
	far_expect(far, far_declare_shaped(far, 0, &layout, 0, "t", name, 0), 0, NULL);
	far_expect(far, far_declare_shaped(far, 0, &layout, 0, "t", "", 0), -EINVAL, "1 to 63");
	far_expect(far, far_declare_shaped(far, 0, &layout, 0, "t", "2\n3", 0), -EINVAL, "1 to 63");
	junk.job = layout.job;
	far_expect(far, far_call(far, 0, &junk, "\x0a\xff"), -EPROTO, "not a TensorDeclare");
}

TEST(tensors_are_limited)
{
	FAR = far_new(&(struct far_options){ .max_tensors = 2 });
	struct layout layout = far_layout("job", 1, NULL);

	far_form(far, &layout);
	(void)far_tensor(far, &layout, "a", DTYPE_FLOAT32, 1, NULL);
	(void)far_tensor(far, &layout, "b", DTYPE_FLOAT32, 1, NULL);
	(void)far_tensor(far, &layout, "a", DTYPE_FLOAT32, 1, NULL);
	far_expect(far, far_declare(far, 0, &layout, 0, "c", DTYPE_FLOAT32, 1, 0), -EDQUOT,
		   "max_tensors");
}

TEST(deadline_names_the_missing)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, two_each);
	struct asked *a, *b;

	layout.request_timeout_ms = 60;
	far_form(far, &layout);
	a = far_declare(far, 0, &layout, 0, "t", DTYPE_FLOAT32, 1, 0);
	b = far_declare(far, 2, &layout, 2, "t", DTYPE_FLOAT32, 1, 4);
	far_expect(far, a, -ETIMEDOUT,
		   "job job: tensor t: ranks 2, 3 have not declared it within 0.06 s");
	far_expect(far, b, -ETIMEDOUT, NULL);
	far_expect(far, far_declare(far, 1, &layout, 1, "t", DTYPE_FLOAT32, 1, 2), -ETIMEDOUT,
		   "ranks 2, 3 have not declared it");
	ASSERT_TRUE(far_tensor(far, &layout, "t", DTYPE_FLOAT32, 1, NULL) != 0);
}

TEST(leaving_ends_the_wait)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, two_each);
	struct asked *a, *both;

	far_form(far, &layout);
	both = far_declare(far, 1, &layout, 1, "both", DTYPE_FLOAT32, 1, 2);
	a = far_declare(far, 0, &layout, 0, "t", DTYPE_FLOAT32, 1, 0);
	far_notice(far, 1, DATA_LEAVE, layout.job, 0, 0, 1, 0, NULL);
	far_expect(far, a, -EPIPE, "tensor t: ranks 2, 3 have left the job");
	far_expect(far, far_declare(far, 0, &layout, 0, "u", DTYPE_FLOAT32, 1, 0), -EPIPE,
		   "tensor u: ranks 2, 3 have left the job");
	/* Who has left cannot speak, what it said before still counts. */
	far_expect(far, far_declare(far, 1, &layout, 1, "v", DTYPE_FLOAT32, 1, 2), -ENOTCONN,
		   "node 1 has left");
	far_expect_waiting(far, both);
	far_expect(far, far_declare(far, 2, &layout, 2, "both", DTYPE_INT8, 1, 4), -EINVAL,
		   "rank 4 declares 1 elements of int8");
	far_expect(far, both, -EINVAL, NULL);
}
