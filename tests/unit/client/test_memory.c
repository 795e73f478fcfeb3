/* Memory that is shared with the fake daemon: allocated, imported, staged, freed while in use. */
#include "fake.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define MIB (UINT64_C(1) << 20)

TEST(alloc)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_open(fake);
	struct bps_memory *a, *b;
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	char *data;

	ASSERT_OK(bps_memory_alloc(client, 1, &a));
	ASSERT_OK(bps_memory_alloc(client, 0, &b));
	ASSERT_EQ(bps_memory_len(a), page);
	ASSERT_EQ(bps_memory_len(b), page);
	data = bps_memory_data(a);
	for (size_t i = 0; i < page; i++)
		ASSERT_EQ(data[i], 0);
	memset(data, 1, page);
	bps_memory_free(a);
	bps_memory_free(b);
	fake_await(fake, &fake->told.n_unshares, 2);
	ASSERT_FAILS(bps_memory_alloc(client, SIZE_MAX, &a), ENOMEM, "more than there can be");
	ASSERT_TRUE(bps_memory_alloc(client, SIZE_MAX / 4, &a) < 0);
	ASSERT_EQ(told(fake)->n_shares, 2);
	ASSERT_FAILS(bps_memory_alloc(client, 1, NULL), EINVAL, "NULL");
	ASSERT_TRUE(!bps_memory_data(NULL) && !bps_memory_len(NULL));
}

TEST(a_child_of_fork_has_a_copy)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_open(fake);
	_cleanup_(bps_memory_freep) struct bps_memory *kept = NULL, *gone = NULL;
	char *data;
	pid_t pid;
	int status;

	ASSERT_OK(bps_memory_alloc(client, 3 * MIB, &kept));
	ASSERT_OK(bps_memory_alloc(client, 1, &gone));
	bps_memory_free(TAKE_PTR(gone));
	data = bps_memory_data(kept);
	memset(data, 1, 3 * MIB);
	pid = fork();
	ASSERT_TRUE(pid >= 0);
	if (!pid) {
		bool same = data[0] == 1 && data[3 * MIB - 1] == 1;

		memset(data, 2, 2 * MIB);
		_exit(same && data[0] == 2 && data[3 * MIB - 1] == 1 ? 7 : 1);
	}
	ASSERT_EQ(waitpid(pid, &status, 0), pid);
	ASSERT_TRUE(WIFEXITED(status));
	ASSERT_EQ(WEXITSTATUS(status), 7);
	for (size_t i = 0; i < 3 * MIB; i += 4096)
		ASSERT_EQ(data[i], 1);
}

TEST(daemon_that_refuses_memory)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_open(fake);
	_cleanup_(bps_memory_freep) struct bps_memory *memory = NULL;

	FAKE_SET(fake, share_status, -EDQUOT);
	ASSERT_FAILS(bps_memory_alloc(client, 1, &memory), EDQUOT, "limit of a session");
	FAKE_SET(fake, share_status, 0);
	ASSERT_OK(bps_memory_alloc(client, 1, &memory));
}

TEST(import)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	struct bps_submit_params params = { .size = sizeof(params), .operation = BPS_PUSH_PULL };
	struct bps_request *request;
	struct bps_memory *memory;
	int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	char *data;

	ASSERT_OK(ftruncate(fd, 8192));
	data = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	ASSERT_OK(bps_memory_import(client, fd, data, 8192, &memory));
	ASSERT_TRUE(bps_memory_data(memory) == data && bps_memory_len(memory) == 8192);
	ASSERT_TRUE(fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK);
	fd_close(fd);

	ASSERT_OK(bps_tensor_declare(client, "t", BPS_UINT8, 4096, &tensor));
	memset(data, 4, 4096);
	params.input = data;
	params.output = data + 4096;
	ASSERT_OK(bps_submit(tensor, &params, &request));
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	ASSERT_EQ(data[8191], 5);
	ASSERT_EQ(told(fake)->n_shares, 1);
	bps_request_free(request);

	/* Still mapped afterwards: it is the caller's. */
	bps_memory_free(memory);
	fake_await(fake, &fake->told.n_unshares, 1);
	data[0] = 1;
	ASSERT_OK(munmap(data, 8192));
}

TEST(imports_that_do_not_fit)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_open(fake);
	_cleanup_(fd_closep) int unsealable = memfd_create("test", MFD_CLOEXEC);
	_cleanup_(fd_closep) int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
	struct bps_memory *memory;
	char *data;

	ASSERT_OK(ftruncate(unsealable, 4096));
	data = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, unsealable, 0);
	ASSERT_FAILS(bps_memory_import(client, unsealable, data, 4096, &memory), EPERM, "sealed");
	ASSERT_FAILS(bps_memory_import(client, file, data, 4096, &memory), EPERM, "sealed");
	ASSERT_FAILS(bps_memory_import(client, unsealable, data, 4097, &memory), EINVAL,
		     "fewer than");
	ASSERT_FAILS(bps_memory_import(client, unsealable, data + 1, 4, &memory), EINVAL, "page");
	ASSERT_FAILS(bps_memory_import(client, unsealable, NULL, 4, &memory), EINVAL, "empty");
	ASSERT_FAILS(bps_memory_import(client, -1, data, 4, &memory), EBADF, "import");
	ASSERT_FAILS(bps_memory_import(client, unsealable, data, 4, NULL), EINVAL, "NULL");
	ASSERT_EQ(told(fake)->n_shares, 0);
	ASSERT_OK(munmap(data, 4096));
}

static struct bps_request *push_pull(struct bps_tensor *tensor, const void *input, void *output)
{
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_PUSH_PULL,
		.input = input,
		.output = output,
	};
	struct bps_request *request;

	if (bps_submit(tensor, &params, &request))
		test_fail(__FILE__, __LINE__, "submit: %s", bps_error());
	return request;
}

TEST(memory_is_not_copied)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	struct bps_memory *memory[20];
	struct bps_request *request;

	ASSERT_OK(bps_tensor_declare(client, "t", BPS_UINT8, 100, &tensor));
	for (unsigned i = 0; i < ARRAY_SIZE(memory); i++)
		ASSERT_OK(bps_memory_alloc(client, 4096, &memory[i]));
	for (unsigned i = 0; i < ARRAY_SIZE(memory); i++) {
		char *data = bps_memory_data(memory[i]);

		memset(data + 10, (int)i, 100);
		request = push_pull(tensor, data + 10, data + 2000);
		ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
		ASSERT_EQ(data[2000], i + 1);
		ASSERT_EQ(data[2099], i + 1);
		ASSERT_EQ(data[2100], 0);
		ASSERT_EQ(told(fake)->entry.input_buffer, i + 1);
		ASSERT_EQ(told(fake)->entry.input_offset, 10);
		ASSERT_EQ(told(fake)->entry.output_offset, 2000);
		bps_request_free(request);
	}
	/* No staging area was needed. */
	ASSERT_EQ(told(fake)->n_shares, ARRAY_SIZE(memory));
	/* A range that begins inside and ends outside is no range of it. */
	for (unsigned i = 1; i < ARRAY_SIZE(memory); i += 2)
		bps_memory_free(memory[i]);
	for (unsigned i = 0; i < ARRAY_SIZE(memory); i += 2) {
		request = push_pull(tensor, bps_memory_data(memory[i]), bps_memory_data(memory[i]));
		ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
		bps_request_free(request);
		bps_memory_free(memory[i]);
	}
	fake_await(fake, &fake->told.n_unshares, ARRAY_SIZE(memory));
}

TEST(memory_freed_under_a_request)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	_cleanup_(bps_request_freep) struct bps_request *request = NULL;
	struct bps_memory *memory;

	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_tensor_declare(client, "t", BPS_UINT8, 100, &tensor));
	ASSERT_OK(bps_memory_alloc(client, 4096, &memory));
	request = push_pull(tensor, bps_memory_data(memory), bps_memory_data(memory));
	bps_memory_free(memory);
	fake_await(fake, &fake->told.n_entries, 1);
	ASSERT_EQ(told(fake)->n_unshares, 0);
	fake_complete(fake, 0, 0, NULL); /* which would fault without the memory */
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	fake_await(fake, &fake->told.n_unshares, 1);
}

TEST(memory_shared_by_two_requests)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	struct bps_request *a, *b;
	struct bps_memory *memory;

	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_tensor_declare(client, "t", BPS_UINT8, 100, &tensor));
	ASSERT_OK(bps_memory_alloc(client, 4096, &memory));
	a = push_pull(tensor, bps_memory_data(memory), bps_memory_data(memory));
	b = push_pull(tensor, (char *)bps_memory_data(memory) + 1000,
		      (char *)bps_memory_data(memory) + 2000);
	bps_memory_free(memory);
	fake_await(fake, &fake->told.n_entries, 2);
	fake_complete(fake, 0, 0, NULL);
	ASSERT_OK(bps_request_wait(a, BPS_FOREVER));
	ASSERT_EQ(told(fake)->n_unshares, 0);
	bps_request_free(a);
	/* The last one, though its own request was released before. */
	bps_request_free(b);
	fake_complete(fake, 1, 0, NULL);
	fake_await(fake, &fake->told.n_entries, 2);
	while (!told(fake)->n_unshares)
		ASSERT_OK(bps_client_dispatch(client));
}

TEST(staging)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	uint8_t input[1000], output[1002];
	struct bps_request *request;

	ASSERT_OK(bps_tensor_declare(client, "t", BPS_UINT8, 1000, &tensor));
	for (unsigned i = 0; i < 300; i++) {
		memset(input, (int)i, sizeof(input));
		memset(output, 0x77, sizeof(output));
		request = push_pull(tensor, input, output + 1);
		/* The input was copied: it is the caller's to change, though he should not. */
		ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
		ASSERT_EQ(output[0], 0x77);
		ASSERT_EQ(output[1], (uint8_t)(i + 1));
		ASSERT_EQ(output[1000], (uint8_t)(i + 1));
		ASSERT_EQ(output[1001], 0x77);
		ASSERT_EQ(told(fake)->entry.input_offset % 64, 0);
		ASSERT_EQ(told(fake)->entry.output_offset % 64, 0);
		bps_request_free(request);
	}
	ASSERT_EQ(told(fake)->n_shares, 1);
	/* All of it is memory, also what is not used. */
	ASSERT_EQ(told(fake)->shared_len, MIB / 4);

	/* In place, in one range. */
	request = push_pull(tensor, input, input);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	ASSERT_EQ(input[999], (uint8_t)(299 + 1));
	ASSERT_EQ(told(fake)->entry.input_offset, told(fake)->entry.output_offset);
	bps_request_free(request);
}

TEST(staged_results_are_copied_once)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	uint8_t data[100] = { 0 };
	struct bps_request *request;

	ASSERT_OK(bps_tensor_declare(client, "t", BPS_UINT8, 100, &tensor));
	request = push_pull(tensor, data, data);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	ASSERT_EQ(data[99], 1);
	memset(data, 9, sizeof(data));
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	ASSERT_EQ(bps_request_poll(request), 1);
	ASSERT_OK(bps_client_dispatch(client));
	ASSERT_EQ(data[99], 9);
	bps_request_free(request);

	/* Dispatch copies too; and one that was released is not copied. */
	request = push_pull(tensor, data, data);
	while (data[99] != 10)
		ASSERT_OK(bps_client_dispatch(client));
	ASSERT_EQ(bps_request_poll(request), 1);
	bps_request_free(request);
	FAKE_SET(fake, hold, true);
	request = push_pull(tensor, data, data);
	bps_request_free(request);
	fake_await(fake, &fake->told.n_entries, 3);
	fake_complete(fake, 2, 0, NULL);
	ASSERT_OK(bps_client_dispatch(client));
	ASSERT_EQ(data[99], 10);
}

TEST(failed_results_are_not_copied)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	_cleanup_(bps_request_freep) struct bps_request *request = NULL;
	uint8_t input[100] = { 1 }, output[100] = { 7 };

	FAKE_SET(fake, status, -ETIME);
	FAKE_SET(fake, text, "rank 3 has not come");
	ASSERT_OK(bps_tensor_declare(client, "t", BPS_UINT8, 100, &tensor));
	request = push_pull(tensor, input, output);
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ETIME, "rank 3");
	ASSERT_EQ(output[0], 7);
}

/* Sizes and lifetimes mixed, checked against what each should give. */
TEST(staging_under_load)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	enum { N = 40, LEN = 200000 };
	_cleanup_(freep) uint8_t *data = malloc(N * LEN);
	struct bps_request *requests[N] = { 0 };
	uint8_t expected[N] = { 0 };
	uint32_t random = 1;

	ASSERT_OK(bps_tensor_declare(client, "t", BPS_UINT8, BPS_VARIABLE, &tensor));
	for (unsigned round = 0; round < 1500; round++) {
		random = random * 1664525 + 1013904223;
		unsigned i = (random >> 8) % N, count = (random >> 4) % LEN + 1;
		struct bps_submit_params params = {
			.size = sizeof(params),
			.operation = BPS_PUSH_PULL,
			.input = data + i * LEN,
			.output = data + i * LEN,
			.input_count = count,
		};

		if (requests[i]) {
			ASSERT_OK(bps_request_wait(requests[i], BPS_FOREVER));
			ASSERT_EQ(data[i * LEN], expected[i]);
			bps_request_free(requests[i]);
		}
		memset(data + i * LEN, (int)round, count);
		expected[i] = (uint8_t)(round + 1);
		ASSERT_OK(bps_submit(tensor, &params, &requests[i]));
	}
	for (unsigned i = 0; i < N; i++)
		bps_request_free(requests[i]);
}

/* What two requests beside each other had, in whatever order they end, is enough for one of both their sizes. */
TEST(staged_ranges_are_joined)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	_cleanup_(bps_tensor_freep) struct bps_tensor *one = NULL, *two = NULL, *four = NULL;
	char *data = calloc(4, MIB);
	struct bps_request *requests[3];
	unsigned n_done = 1;

	ASSERT_OK(bps_tensor_declare(client, "one", BPS_UINT8, MIB, &one));
	ASSERT_OK(bps_tensor_declare(client, "two", BPS_UINT8, 2 * MIB, &two));
	ASSERT_OK(bps_tensor_declare(client, "four", BPS_UINT8, 4 * MIB, &four));
	/* From now on there is one arena, of 4 MiB. */
	requests[0] = push_pull(four, data, data);
	ASSERT_OK(bps_request_wait(requests[0], BPS_FOREVER));
	bps_request_free(requests[0]);
	FAKE_SET(fake, hold, true);
	for (unsigned first = 0; first < 2; first++) {
		for (unsigned i = 0; i < 3; i++)
			requests[i] = push_pull(one, data, data);
		fake_await(fake, &fake->told.n_entries, n_done + 3);
		for (unsigned i = 0; i < 2; i++) {
			fake_complete(fake, n_done + (first ^ i), 0, NULL);
			ASSERT_OK(bps_request_wait(requests[first ^ i], BPS_FOREVER));
			bps_request_free(requests[first ^ i]);
		}
		requests[0] = push_pull(two, data, data);
		ASSERT_EQ(told(fake)->shared_len, 4 * MIB);
		fake_await(fake, &fake->told.n_entries, n_done + 4);
		for (unsigned i = 0; i < 2; i++) {
			fake_complete(fake, n_done + 2 + i, 0, NULL);
			ASSERT_OK(bps_request_wait(requests[2 - 2 * i], BPS_FOREVER));
			bps_request_free(requests[2 - 2 * i]);
		}
		n_done += 4;
	}
	free(data);
}

TEST(staging_grows_and_is_trimmed)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	_cleanup_(bps_tensor_freep) struct bps_tensor *large = NULL, *small = NULL;
	struct bps_request *requests[3];
	/* Never touched by the fake, which holds: it costs address space only where it is copied. */
	size_t len = 40 * MIB;
	char *data = mmap(NULL, len, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	ASSERT_OK(bps_tensor_declare(client, "large", BPS_UINT8, len, &large));
	ASSERT_OK(bps_tensor_declare(client, "small", BPS_UINT8, 1, &small));
	FAKE_SET(fake, hold, true);
	for (unsigned i = 0; i < 3; i++)
		requests[i] = push_pull(large, data, data);
	/* 40 MiB for the first, as much again for the second, 80 MiB for the third. */
	ASSERT_EQ(told(fake)->shared_len, 160 * MIB);
	fake_await(fake, &fake->told.n_entries, 3);
	for (unsigned i = 0; i < 3; i++) {
		fake_complete(fake, i, -ECANCELED, "enough");
		ASSERT_EQ(bps_request_wait(requests[i], BPS_FOREVER), -ECANCELED);
		bps_request_free(requests[i]);
	}
	/* 120 MiB were needed: no arena alone would do. */
	ASSERT_EQ(told(fake)->n_unshares, 0);
	FAKE_SET(fake, hold, false);
	for (unsigned i = 0; i < 2; i++) {
		requests[0] = push_pull(small, data, data);
		ASSERT_OK(bps_request_wait(requests[0], BPS_FOREVER));
		bps_request_free(requests[0]);
	}
	/* Twice nothing to speak of: so that is all that is kept. */
	fake_await(fake, &fake->told.n_unshares, 3);
	ASSERT_EQ(told(fake)->shared_len, 0);
	ASSERT_OK(munmap(data, len));
}

/* What a step stages in many pieces is there for the next, though little is staged in between. */
TEST(a_small_area_stays)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	_cleanup_(bps_tensor_freep) struct bps_tensor *piece = NULL, *number = NULL;
	enum { N = 12, LEN = 128 << 10 };
	struct bps_request *requests[N];
	_cleanup_(freep) char *data = calloc(N, LEN);
	unsigned n_done = 0;

	ASSERT_OK(bps_tensor_declare(client, "piece", BPS_UINT8, LEN, &piece));
	ASSERT_OK(bps_tensor_declare(client, "number", BPS_UINT8, 8, &number));
	FAKE_SET(fake, hold, true);
	for (unsigned step = 0; step < 3; step++) {
		for (unsigned i = 0; i < N; i++)
			requests[i] = push_pull(piece, data + i * LEN, data + i * LEN);
		for (unsigned i = 0; i < N + 2; i++) {
			if (i >= N)
				requests[0] = push_pull(number, data, data);
			fake_await(fake, &fake->told.n_entries, n_done + (i < N ? N - i : 1));
			fake_complete(fake, n_done, 0, NULL);
			n_done++;
			ASSERT_OK(bps_request_wait(requests[i < N ? i : 0], BPS_FOREVER));
			bps_request_free(requests[i < N ? i : 0]);
		}
		/* 256 KiB, as much again, 512 KiB and 1 MiB. */
		ASSERT_EQ(told(fake)->n_shares, 4);
		ASSERT_EQ(told(fake)->n_unshares, 0);
		ASSERT_EQ(told(fake)->shared_len, 2 * MIB);
	}
}

TEST(staging_within_a_quota)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	struct bps_submit_params params = { .size = sizeof(params), .operation = BPS_PUSH_PULL };
	struct bps_request *request, *refused;
	size_t len = 100000;
	char *data = calloc(1, len);

	/* Not an arena of 256 KiB; but what the tensor needs. */
	FAKE_SET(fake, share_quota, 150000);
	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_tensor_declare(client, "t", BPS_UINT8, len, &tensor));
	request = push_pull(tensor, data, data);
	ASSERT_EQ(told(fake)->shared_len, align_up(len, 4096));
	params.input = params.output = data;
	ASSERT_FAILS(bps_submit(tensor, &params, &refused), EDQUOT, "limit of a session");
	/* The one that was refused left no trace: not in the order of rounds either. */
	fake_await(fake, &fake->told.n_entries, 1);
	fake_complete(fake, 0, 0, NULL);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	bps_request_free(request);
	request = push_pull(tensor, data, data);
	fake_await(fake, &fake->told.n_entries, 2);
	ASSERT_EQ(told(fake)->entry.round, 2);
	bps_request_free(request);
	free(data);
}

/* What is larger than this machine has memory for is not populated. */
static bool is_sparse;

__attribute__((__visibility__("default"))) int madvise(void *data, size_t len, int advice)
{
	return is_sparse ? 0 : (int)syscall(SYS_madvise, data, len, advice);
}

TEST(tensor_larger_than_4_gib)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	_cleanup_(bps_memory_freep) struct bps_memory *memory = NULL;
	_cleanup_(bps_request_freep) struct bps_request *request = NULL;
	uint64_t len = 5 * 1024 * MIB;
	char *output = mmap(NULL, len, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	/* The input is used where it is and the result fails: nothing that large is touched. */
	ASSERT_TRUE(output != MAP_FAILED);
	is_sparse = true;
	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_memory_alloc(client, len, &memory));
	ASSERT_OK(bps_tensor_declare(client, "t", BPS_UINT8, len, &tensor));
	request = push_pull(tensor, bps_memory_data(memory), output);
	fake_await(fake, &fake->told.n_entries, 1);
	ASSERT_EQ(told(fake)->entry.input_count, len);
	ASSERT_EQ(told(fake)->entry.output_count, len);
	ASSERT_EQ(told(fake)->shared_len, 2 * len);
	fake_complete(fake, 0, -ECANCELED, "too large");
	ASSERT_EQ(bps_request_wait(request, BPS_FOREVER), -ECANCELED);
	ASSERT_OK(munmap(output, len));
}
