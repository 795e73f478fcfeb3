/* Join, failure and leave of a job, with the fake daemon. */
#include "fake.h"

static int try_join(struct bps_client *client, struct bps_join_params params)
{
	params.size = sizeof(params);
	return bps_client_join(client, &params);
}
#define TRY(client, ...) try_join(client, (struct bps_join_params){ __VA_ARGS__ })

TEST(what_a_join_says)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_open(fake);

	ASSERT_FAILS(bps_client_rank(client), ENOTCONN, "no job");
	ASSERT_OK(TRY(client, .job = "train.1", .secret = "a\0b", .secret_len = 3, .rank = 5,
		      .world_size = 8, .local_rank = 1, .local_size = 2, .node = 2, .n_nodes = 4,
		      .timeout_ms = 1000, .request_timeout_ms = 2000, .min_servers = 3,
		      .part_bytes = 1 << 16, .force_distributed = 1));
	ASSERT_STR(told(fake)->join.job, "train.1");
	ASSERT_EQ(told(fake)->join.secret_len, 3);
	ASSERT_MEM(told(fake)->join.secret, "a\0b", 3);
	ASSERT_EQ(told(fake)->join.rank, 5);
	ASSERT_EQ(told(fake)->join.size, 8);
	ASSERT_EQ(told(fake)->join.local_rank, 1);
	ASSERT_EQ(told(fake)->join.local_size, 2);
	ASSERT_EQ(told(fake)->join.node, 2);
	ASSERT_EQ(told(fake)->join.n_nodes, 4);
	ASSERT_EQ(told(fake)->join.timeout_ms, 1000);
	ASSERT_EQ(told(fake)->join.request_timeout_ms, 2000);
	ASSERT_EQ(told(fake)->join.min_servers, 3);
	ASSERT_EQ(told(fake)->join.part_bytes, 1 << 16);
	ASSERT_TRUE(told(fake)->join.force_distributed);
	ASSERT_EQ(bps_client_rank(client), 5);
	ASSERT_EQ(bps_client_size(client), 8);
	ASSERT_EQ(bps_client_local_rank(client), 1);
	ASSERT_EQ(bps_client_local_size(client), 2);
	ASSERT_EQ(bps_client_node(client), 2);
	ASSERT_FAILS(TRY(client, .rank = 0), EISCONN, "in a job");
}

TEST(join_defaults)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_open(fake);

	ASSERT_OK(TRY(client, .rank = 2, .world_size = 4));
	ASSERT_STR(told(fake)->join.job, "default");
	ASSERT_EQ(told(fake)->join.local_size, 4);
	ASSERT_EQ(told(fake)->join.local_rank, 2);
	ASSERT_EQ(told(fake)->join.n_nodes, 1);
	ASSERT_EQ(told(fake)->join.timeout_ms, 60000);
	ASSERT_EQ(told(fake)->join.request_timeout_ms, 600000);
	ASSERT_OK(bps_client_leave(client));
	ASSERT_OK(TRY(client, .rank = 2, .world_size = 4, .local_size = 2, .node = 1));
	ASSERT_EQ(told(fake)->join.n_nodes, 2);
	ASSERT_OK(bps_client_leave(client));
	ASSERT_OK(TRY(client, .rank = 2, .world_size = 4, .n_nodes = 4, .node = 2));
	ASSERT_EQ(told(fake)->join.local_size, 1);
	ASSERT_OK(bps_client_leave(client));
	ASSERT_OK(TRY(client, .rank = 0));
	ASSERT_EQ(told(fake)->join.size, 1);
	ASSERT_EQ(told(fake)->n_leaves, 3);
}

TEST(join_params_that_do_not_fit)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_open(fake);
	char name[JOB_NAME_MAX + 2] = "";

	memset(name, 'n', JOB_NAME_MAX + 1);
	ASSERT_FAILS(TRY(client, .job = name), EINVAL, "cannot be the name of a job");
	ASSERT_FAILS(TRY(client, .job = ""), EINVAL, "cannot be the name of a job");
	ASSERT_FAILS(TRY(client, .job = "a b"), EINVAL, "\"a b\"");
	ASSERT_FAILS(TRY(client, .secret = name, .secret_len = 256), EINVAL, "at most 255");
	ASSERT_FAILS(TRY(client, .secret_len = 1), EINVAL, "NULL");
	ASSERT_FAILS(TRY(client, .rank = 4, .world_size = 4), EINVAL, "rank is 4");
	ASSERT_FAILS(TRY(client, .world_size = JOB_RANKS_MAX + 1), EINVAL, "at most 16384");
	ASSERT_FAILS(TRY(client, .world_size = 4, .local_size = 5, .n_nodes = 1), EINVAL,
		     "local_size is 5");
	ASSERT_FAILS(TRY(client, .world_size = 4, .local_size = 2, .local_rank = 2), EINVAL,
		     "local_rank is 2");
	ASSERT_FAILS(TRY(client, .world_size = 4, .local_size = 2, .node = 2), EINVAL, "node is 2");
	ASSERT_FAILS(TRY(client, .world_size = 2, .local_size = 1, .n_nodes = 3), EINVAL,
		     "n_nodes is 3");
	ASSERT_FAILS(TRY(client, .world_size = 5, .local_size = 2), EINVAL, "cannot be divided");
	ASSERT_FAILS(TRY(client, .timeout_ms = -1), EINVAL, "timeout");
	ASSERT_FAILS(TRY(client, .request_timeout_ms = -1), EINVAL, "timeout");
	ASSERT_FAILS(TRY(client, .part_bytes = 100), EINVAL, "part_bytes is 100");
	ASSERT_FAILS(TRY(client, .newcomer = 1), EINVAL, "elastic is not");
	ASSERT_FAILS(TRY(client, .min_ranks = 1), EINVAL, "elastic is not");
	ASSERT_FAILS(TRY(client, .elastic = 1, .min_ranks = 2), EINVAL, "2 to 0 ranks");
	ASSERT_FAILS(TRY(client, .elastic = 1, .world_size = 4, .max_ranks = 3), EINVAL,
		     "1 to 3 ranks");
	ASSERT_FAILS(TRY(client, .elastic = 1, .world_size = 4, .min_ranks = 3, .max_ranks = 2),
		     EINVAL, "max_ranks is 2");
	FAKE_SET(fake, features, CONTROL_FEATURE_RESUME);
	ASSERT_FAILS(TRY(client, .elastic = 1), EOPNOTSUPP, "knows no elastic jobs");
	ASSERT_FAILS(bps_client_join(client, &(struct bps_join_params){ 0 }), EINVAL, "size");
	ASSERT_EQ(told(fake)->n_joins, 0);
}

TEST(join_from_environment)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_open(fake);

	ASSERT_OK(clearenv());
	ASSERT_OK(setenv("BPS_RANK", "1", 1));
	ASSERT_FAILS(bps_client_join(client, NULL), EINVAL, "BPS_SIZE");
	ASSERT_OK(setenv("BPS_SIZE", "2", 1));
	ASSERT_OK(setenv("BPS_SECRET", "s3cret", 1));
	ASSERT_OK(bps_client_join(client, NULL));
	ASSERT_EQ(told(fake)->join.rank, 1);
	ASSERT_STR(told(fake)->join.secret, "s3cret");
}

TEST(refused_joins)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_open(fake);
	struct bps_tensor *tensor;

	FAKE_SET(fake, join_status, -ETIMEDOUT);
	FAKE_SET(fake, join_text, "ranks 1 and 3 have not come");
	ASSERT_FAILS(TRY(client, .world_size = 4), ETIMEDOUT, "ranks 1 and 3");
	FAKE_SET(fake, join_status, -EEXIST);
	FAKE_SET(fake, join_text, NULL);
	ASSERT_FAILS(TRY(client, .world_size = 4), EEXIST, strerror(EEXIST));
	FAKE_SET(fake, join_status, 5);
	FAKE_SET(fake, join_text, "?");
	ASSERT_FAILS(TRY(client, .world_size = 4), EPROTO, "none");
	ASSERT_FAILS(bps_tensor_declare(client, "t", BPS_INT8, 1, &tensor), ENOTCONN, "no job");
	ASSERT_FAILS(bps_client_leave(client), ENOTCONN, "no job");
	FAKE_SET(fake, join_status, 0);
	ASSERT_OK(TRY(client, .world_size = 4));
}

static void *die_after_join(void *data)
{
	struct fake *fake = data;

	fake_await(fake, &fake->told.n_joins, 1);
	fake_die(fake, NULL);
	return NULL;
}

TEST(daemon_that_dies_during_join)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_open(fake);
	pthread_t thread;

	FAKE_SET(fake, join_mute, true);
	ASSERT_OK(pthread_create(&thread, NULL, die_after_join, fake));
	ASSERT_FAILS(TRY(client, .world_size = 2), ESHUTDOWN, "has ended the session");
	ASSERT_OK(pthread_join(thread, NULL));
}

TEST(job_that_fails)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct bps_tensor *tensor, *again;
	struct bps_request *request, *other;

	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_tensor_declare(client, "t", BPS_INT8, 1, &tensor));
	ASSERT_OK(bps_barrier(client, 0, &request));
	fake_await(fake, &fake->told.n_entries, 1);
	fake_job_failed(fake, 99, -EIO, "another job");
	fake_job_failed(fake, 1, -ECONNRESET, "rank 1 died");
	fake_complete(fake, 0, -ECONNRESET, "rank 1 died");
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ECONNRESET, "rank 1 died");
	ASSERT_OK(bps_client_dispatch(client));

	ASSERT_FAILS(bps_barrier(client, 0, &other), ENOTCONN, "the job is over: rank 1 died");
	ASSERT_FAILS(bps_tensor_declare(client, "u", BPS_INT8, 1, &again), ENOTCONN, "rank 1 died");
	ASSERT_FAILS(bps_tensor_wait(tensor, 0), ENOTCONN, "rank 1 died");
	ASSERT_EQ(bps_client_rank(client), 0);

	/* The next run begins afresh; what is left of the last one is void. */
	ASSERT_OK(TRY(client, .rank = 1, .world_size = 2));
	ASSERT_FAILS(bps_tensor_wait(tensor, 0), ENOTCONN, "declare it again");
	ASSERT_OK(bps_tensor_declare(client, "t", BPS_INT16, 7, &again));
	ASSERT_OK(bps_tensor_wait(again, BPS_FOREVER));
	bps_tensor_free(again);
	bps_tensor_free(tensor);
	bps_request_free(request);
}

/* With a request under way, which ends with the session. */
static void expect_abort(const char *error, const char *told_error)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	struct bps_client *client = fake_join(fake, 1, 2);
	struct bps_request *request;

	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_barrier(client, 0, &request));
	bps_client_abort(client, error);
	ASSERT_EQ(bps_request_wait(request, 0), -ECANCELED);
	bps_request_free(request);
	fake_await(fake, &fake->told.n_gone, 1);
	ASSERT_EQ(told(fake)->n_leaves, 1);
	ASSERT_EQ(told(fake)->n_sessions, 1);
	ASSERT_STR(told(fake)->leave_error, told_error);
}

TEST(abort_says_of_what_error)
{
	expect_abort("ValueError: no such file", "ValueError: no such file");
	expect_abort("", "unknown");
	expect_abort(NULL, "unknown");
}

TEST(abort_without_a_job_closes)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();

	bps_client_abort(fake_open(fake), "ValueError");
	fake_await(fake, &fake->told.n_gone, 1);
	ASSERT_EQ(told(fake)->n_leaves, 0);
	bps_client_abort(NULL, "ValueError");
}

TEST(leave_ends_requests)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct bps_tensor *tensor;
	struct bps_request *request;

	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_tensor_declare(client, "t", BPS_INT8, 1, &tensor));
	ASSERT_OK(bps_barrier(client, 0, &request));
	ASSERT_OK(bps_client_leave(client));
	ASSERT_EQ(bps_request_poll(request), 1);
	ASSERT_EQ(bps_request_wait(request, 0), -ECANCELED);
	ASSERT_FAILS(bps_tensor_wait(tensor, 0), ENOTCONN, "no job");
	ASSERT_FAILS(bps_client_size(client), ENOTCONN, "no job");
	bps_request_free(request);
	bps_tensor_free(tensor);
}
