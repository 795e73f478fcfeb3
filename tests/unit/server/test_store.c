/*
 * Which rounds a part remembers as closed, against a model; and that all that a job was charged
 * comes back.
 */
#include "double.h"
#include "server/job/store.h"

/* A model of a part's memory: all rounds ever closed. */
TEST(closed_rounds_are_exact_in_the_window)
{
	static bool closed[2000];
	uint64_t state = 1, newest = 0;
	struct part part = { 0 };

	ASSERT_TRUE(!part_is_closed(&part, 1));
	for (unsigned i = 0; i < 20000 && newest < ARRAY_SIZE(closed) - 200; i++) {
		uint64_t low = newest > 60 ? newest - 60 : 1, round;

		state = state * 6364136223846793005ull + 1442695040888963407ull;
		/* Mostly near, now and then a jump of up to 130. */
		round = low + (state >> 33) % ((state >> 20) % 50 ? 62 : 190);
		if (part_is_closed(&part, round)) {
			ASSERT_TRUE(closed[round]);
			continue;
		}
		part_close(&part, round);
		closed[round] = true;
		newest = MAX(newest, round);
		for (uint64_t r = 1; r <= newest + 2; r++) {
			bool known = r + PART_WINDOW >= newest;

			ASSERT_TRUE(part_is_closed(&part, r) == (known ? closed[r] : true));
		}
	}
	ASSERT_INT(newest, >, 1000);
}

#define MEMORY (256u << 10)

/* Whatever a peer says, without a single contribution, is charged before it is held, and refused with words beyond its share. */
TEST(a_peer_holds_what_it_is_charged_for)
{
	_cleanup_(far_freep) struct far *far = far_new(&(struct far_options){
		.memory = MEMORY, .max_jobs = 1000000, .max_tensors = 1000000 });
	static const uint32_t on_one[] = { 1 };
	struct layout layout = far_layout("job", 1, on_one);
	const struct quota *memory = &far->accounts.total[ACCOUNT_MEMORY];
	struct asked *asked = NULL;
	uint64_t before;
	char name[64];

	/* Tensors and their names. */
	far_form(far, &layout);
	before = quota_used(memory);
	ASSERT_INT(before, >, 0);
	for (unsigned i = 0; !asked || !asked->status; i++) {
		ASSERT_INT(i, <, MEMORY / 64);
		(void)snprintf(name, sizeof(name), "%063u", i);
		asked = far_declare(far, 0, &layout, 0, name, DTYPE_FLOAT32, 1, 0);
		far_wait(far, asked);
	}
	far_expect(far, asked, -EDQUOT, "is over its share (user_share, 100 %)");
	/* Whatever user the peer has named. */
	ASSERT_CONTAINS(asked->text, "peers from ");
	ASSERT_INT(quota_used(memory), >, MEMORY - MEMORY / 8);
	far_lose(far, 0);
	while (far_n_jobs(far))
		ASSERT_OK(loop_turn(far->loop, 0));
	ASSERT_EQ(quota_used(memory), 0);

	/* Rounds that it says have failed, with the longest texts, of tensors that nobody knows. */
	layout.job = 0;
	far_form(far, &layout);
	memset(name, 'x', sizeof(name) - 1);
	for (unsigned i = 0; i < MEMORY / 64; i++)
		far_notice(far, 0, DATA_FAIL_ROUND, layout.job, 1 + i / 16, 1 + i % 16, 0, 5, name);
	far_expect(far, far_declare(far, 0, &layout, 0, name, DTYPE_FLOAT32, 1, 0), -EDQUOT,
		   "is over its share");
	ASSERT_INT(quota_used(memory), >, MEMORY - MEMORY / 8);

	/* Jobs of which no more is known than that there are many ranks. */
	for (unsigned i = 0;; i++) {
		struct layout other = far_layout("other", 64, NULL);

		ASSERT_INT(i, <, 1000);
		other.job = 77 + i;
		asked = far_attach(far, 1, &other, 0, FAR_INSTANCE + i);
		far_wait(far, asked);
		if (asked->status)
			break;
	}
	far_expect(far, asked, -EDQUOT, "job other: ");
}

/* However a job ends, all that was charged to it is given back, and the next job can have its quota. */
TEST(nothing_stays_charged)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct quota *quota = job_quota_take(1 << 20, &far->accounts.contributions);
	struct layout layout = far_layout("job", 2, NULL);

	ASSERT_TRUE(quota);
	job_quota_give(quota);
	for (unsigned way = 0; way < 4; way++) {
		struct data_header h;

		layout.job = 0;
		far_form(far, &layout);
		ASSERT_EQ(quota_used(quota), 0);
		for (uint32_t i = 0; i < 20; i++) {
			h = far_push(&layout, 1, 1 + i / 5, i % 2);
			h.part = i % 5;
			h.len = h.part_len = h.total = 64;
			(void)far_call(
				far, h.node, &h,
				"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef");
			ASSERT_INT(quota_used(quota), >, 0);
		}
		if (way == 0)
			far_lose(far, 0);
		else if (way == 1)
			far_notice(far, 0, DATA_FAIL_JOB, layout.job, 0, 0, 0, EIO, NULL);
		else
			for (uint32_t i = 0; i < 2; i++)
				far_notice(far, i, DATA_LEAVE, layout.job, 0, 0, i, 0, NULL);
		ASSERT_EQ(far_n_jobs(far), 0);
		ASSERT_EQ(quota_used(quota), 0);
	}
	ASSERT_TRUE(job_quota_take(1 << 20, &far->accounts.contributions) == quota);
	job_quota_give(quota);
}

/* One that is still charged stays out of use: a result may be on its way. */
TEST(charged_quotas_are_not_used_again)
{
	struct quota *a = job_quota_take(100, NULL), *b;

	ASSERT_OK(quota_charge(a, 1));
	job_quota_give(a);
	b = job_quota_take(50, NULL);
	ASSERT_TRUE(a != b);
	job_quota_give(b);
	quota_release(a, 1);
	ASSERT_TRUE(job_quota_take(10, NULL) == a);
	ASSERT_EQ(a->limit, 10);
	job_quota_give(a);
}
