/* A client opened, closed, forked, and left by its daemon, with the fake daemon. */
#include "fake.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

TEST(open_and_close)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	struct bps_client *client = fake_open(fake);

	ASSERT_TRUE(bps_client_fd(client) >= 0);
	ASSERT_OK(bps_client_dispatch(client));
	bps_client_close(client);
	bps_client_close(NULL);
	fake_await(fake, &fake->told.n_gone, 1);
}

TEST(versions_and_types)
{
	char version[32];

	(void)snprintf(version, sizeof(version), "%d.%d.%d", BPS_VERSION_MAJOR, BPS_VERSION_MINOR,
		       BPS_VERSION_PATCH);
	ASSERT_STR(bps_version(), version);
	ASSERT_EQ(bps_dtype_size(BPS_FLOAT64), 8);
	ASSERT_EQ(bps_dtype_size(BPS_BFLOAT16), 2);
	ASSERT_EQ(bps_dtype_size(BPS_BOOL), 1);
	ASSERT_EQ(bps_dtype_size(0), 0);
	ASSERT_EQ(bps_dtype_size(-1), 0);
	ASSERT_EQ(bps_dtype_size(11), 0);
	ASSERT_STR(bps_error(), "");
}

TEST(socket_from_environment)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = NULL;

	ASSERT_OK(setenv("BPS_SOCKET", fake->path, 1));
	ASSERT_OK(bps_client_open(NULL, &client));
}

TEST(socket_of_the_user)
{
	_cleanup_(fake_freep) _unused_ struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = NULL;
	char path[128];

	(void)snprintf(path, sizeof(path), "%s/bps", test_dir());
	ASSERT_OK(symlink(".", path));
	ASSERT_OK(unsetenv("BPS_SOCKET"));
	ASSERT_OK(setenv("XDG_RUNTIME_DIR", test_dir(), 1));
	ASSERT_OK(bps_client_open(NULL, &client));
}

TEST(nobody_listens)
{
	struct bps_open_params params = { .size = sizeof(params),
					  .socket = "/nonexistent/bps.sock" };
	char path[200] = "/";
	struct bps_client *client;

	ASSERT_FAILS(bps_client_open(&params, &client), ENOENT, "/nonexistent/bps.sock");
	params.timeout_ms = 50;
	ASSERT_FAILS(bps_client_open(&params, &client), ENOENT, "no bps-daemon listens");
	memset(path, 'x', sizeof(path) - 1);
	params.socket = path;
	ASSERT_FAILS(bps_client_open(&params, &client), EINVAL, "cannot be a socket");
	params.socket = "";
	ASSERT_FAILS(bps_client_open(&params, &client), EINVAL, "cannot be a socket");
	params.size = 0;
	ASSERT_FAILS(bps_client_open(&params, &client), EINVAL, "size is 0");
	ASSERT_FAILS(bps_client_open(NULL, NULL), EINVAL, "NULL");
}

static void *listen_later(void *data)
{
	/* Not a synchronisation: whenever it comes, the client has to find it. */
	(void)poll(NULL, 0, 30);
	*(struct fake **)data = fake_new();
	return NULL;
}

TEST(daemon_that_comes_late)
{
	_cleanup_(fake_freep) struct fake *fake = NULL;
	_cleanup_(bps_client_closep) struct bps_client *client = NULL;
	struct bps_open_params params = { .size = sizeof(params), .timeout_ms = 50000 };
	char path[128];
	pthread_t thread;

	(void)snprintf(path, sizeof(path), "%s/bps.sock", test_dir());
	params.socket = path;
	ASSERT_OK(pthread_create(&thread, NULL, listen_later, &fake));
	ASSERT_OK(bps_client_open(&params, &client));
	ASSERT_OK(pthread_join(thread, NULL));
}

static int open_at(struct fake *fake)
{
	struct bps_open_params params = { .size = sizeof(params), .socket = fake->path };
	struct bps_client *client;

	return bps_client_open(&params, &client);
}

TEST(bad_welcomes)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();

	FAKE_SET(fake, hello_status, -EPROTONOSUPPORT);
	FAKE_SET(fake, hello_text, "the daemon speaks 7 to 9, the library 1");
	ASSERT_FAILS(open_at(fake), EPROTONOSUPPORT, "the daemon speaks 7 to 9");
	FAKE_SET(fake, hello_status, 17);
	ASSERT_FAILS(open_at(fake), EPROTO, "a status that is none");
	FAKE_SET(fake, hello_status, 0);
	FAKE_SET(fake, version, 2);
	ASSERT_FAILS(open_at(fake), EPROTONOSUPPORT, "version 2");
	FAKE_SET(fake, version, 0);
	FAKE_SET(fake, shm_version, 9);
	ASSERT_FAILS(open_at(fake), EPROTONOSUPPORT, "version 9");
	FAKE_SET(fake, shm_version, 0);
	FAKE_SET(fake, unsealed, true);
	ASSERT_FAILS(open_at(fake), EPROTO, "wrong kind");
	FAKE_SET(fake, unsealed, false);
	FAKE_SET(fake, hello_garbage, true);
	ASSERT_FAILS(open_at(fake), EPROTO, "not the socket of a bps-daemon");
	FAKE_SET(fake, hello_garbage, false);
	FAKE_SET(fake, hang_up, true);
	ASSERT_FAILS(open_at(fake), ECONNRESET, "hung up");
}

TEST(a_daemon_that_dies_before_it_answers_is_found_again)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	struct bps_open_params params = { .size = sizeof(params),
					  .socket = fake->path,
					  .timeout_ms = 60000 };
	struct bps_client *client;

	FAKE_SET(fake, hang_ups, 3);
	ASSERT_OK(bps_client_open(&params, &client));
	bps_client_close(client);
}

TEST(newer_params)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = NULL;
	struct {
		struct bps_open_params params;
		uint64_t newer;
	} larger = { .params = { .size = sizeof(larger), .socket = fake->path }, .newer = 1 };

	ASSERT_FAILS(bps_client_open(&larger.params, &client), EINVAL, "newer bps.h");
	larger.newer = 0;
	ASSERT_OK(bps_client_open(&larger.params, &client));
}

TEST(older_params)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = NULL;
	struct {
		size_t size;
		const char *socket;
		int64_t not_its_own;
	} older = { .size = offsetof(struct bps_open_params, timeout_ms),
		    .not_its_own = INT64_MIN };

	older.socket = fake->path;
	ASSERT_OK(bps_client_open((const struct bps_open_params *)(const void *)&older, &client));
}

static bool is_readable(int fd, int timeout_ms)
{
	struct pollfd pollfd = { .fd = fd, .events = POLLIN };

	return poll(&pollfd, 1, timeout_ms) == 1;
}

TEST(dead_daemon_is_sticky)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	struct bps_memory *memory;
	struct bps_request *request;
	int fd = bps_client_fd(client);

	ASSERT_OK(bps_tensor_declare(client, "t", BPS_FLOAT32, 4, &tensor));
	ASSERT_OK(bps_tensor_wait(tensor, BPS_FOREVER));
	ASSERT_OK(bps_client_dispatch(client));
	ASSERT_TRUE(!is_readable(fd, 0));
	fake_die(fake, NULL);
	ASSERT_TRUE(is_readable(fd, -1));
	ASSERT_FAILS(bps_client_dispatch(client), ESHUTDOWN, "has gone");
	ASSERT_FAILS(bps_client_dispatch(client), ESHUTDOWN, fake->path);
	ASSERT_TRUE(is_readable(fd, 0));
	ASSERT_EQ(bps_client_fd(client), fd);
	ASSERT_FAILS(bps_barrier(client, 0, &request), ESHUTDOWN, "has gone");
	ASSERT_FAILS(bps_tensor_wait(tensor, 0), ESHUTDOWN, "has gone");
	ASSERT_FAILS(bps_memory_alloc(client, 1, &memory), ESHUTDOWN, "has gone");
	ASSERT_FAILS(bps_client_join(client, NULL), ESHUTDOWN, "has gone");
	ASSERT_FAILS(bps_client_leave(client), ESHUTDOWN, "has gone");
}

TEST(farewell)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	struct bps_request *request;

	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_barrier(client, 0, &request));
	fake_die(fake, "your packets are broken");
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ESHUTDOWN, "your packets are broken");
	bps_request_free(request);
}

TEST(garbage_from_the_daemon)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_open(fake);

	fake_send_garbage(fake);
	ASSERT_FAILS(bps_client_join(client, NULL), ESHUTDOWN, "not to be understood");
}

TEST(two_clients)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *a = fake_join(fake, 0, 2);
	_cleanup_(bps_client_closep) struct bps_client *b = fake_join(fake, 1, 2);

	ASSERT_EQ(bps_client_rank(a), 0);
	ASSERT_EQ(bps_client_rank(b), 1);
}

/* Runs f in a child of fork(), and returns its exit status. */
static int in_child(int (*f)(struct fake *, struct bps_client *), struct fake *fake,
		    struct bps_client *client)
{
	pid_t pid = fork();
	int status;

	ASSERT_TRUE(pid >= 0);
	if (!pid)
		_exit(f(fake, client));
	ASSERT_EQ(waitpid(pid, &status, 0), pid);
	ASSERT_TRUE(WIFEXITED(status));
	return WEXITSTATUS(status);
}

static struct bps_tensor *inherited_tensor;
static struct bps_request *inherited_request;
static struct bps_memory *inherited_memory;

static int use_in_child(struct fake *fake, struct bps_client *client)
{
	struct bps_submit_params params = { .size = sizeof(params), .operation = BPS_BARRIER };
	struct bps_memory *memory;
	struct bps_tensor *tensor;
	struct bps_request *request;

	ASSERT_FAILS(bps_client_fd(client), EPERM, "parent");
	ASSERT_FAILS(bps_client_dispatch(client), EPERM, "fork");
	ASSERT_FAILS(bps_client_rank(client), EPERM, "fork");
	ASSERT_FAILS(bps_client_join(client, NULL), EPERM, "fork");
	ASSERT_FAILS(bps_client_leave(client), EPERM, "fork");
	ASSERT_FAILS(bps_memory_alloc(client, 1, &memory), EPERM, "fork");
	ASSERT_FAILS(bps_tensor_declare(client, "x", BPS_INT8, 1, &tensor), EPERM, "fork");
	ASSERT_FAILS(bps_tensor_wait(inherited_tensor, 0), EPERM, "fork");
	ASSERT_FAILS(bps_submit(inherited_tensor, &params, &request), EPERM, "fork");
	ASSERT_FAILS(bps_barrier(client, 0, &request), EPERM, "fork");
	ASSERT_FAILS(bps_request_poll(inherited_request), EPERM, "fork");
	ASSERT_FAILS(bps_request_wait(inherited_request, 0), EPERM, "fork");
	ASSERT_FAILS(bps_request_blocked(inherited_request, 1), EPERM, "fork");
	ASSERT_FAILS(bps_request_cancel(inherited_request), EPERM, "fork");
	bps_request_free(inherited_request);
	bps_tensor_free(inherited_tensor);
	bps_memory_free(inherited_memory);
	bps_client_close(client);

	/* One of its own works. */
	client = fake_join(fake, 0, 1);
	ASSERT_OK(bps_barrier(client, 0, &request));
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	bps_request_free(request);
	bps_client_close(client);
	return 7;
}

TEST(fork_guard)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);

	ASSERT_OK(bps_tensor_declare(client, "t", BPS_INT8, 1, &inherited_tensor));
	ASSERT_OK(bps_memory_alloc(client, 1, &inherited_memory));
	ASSERT_OK(bps_barrier(client, 0, &inherited_request));
	ASSERT_EQ(in_child(use_in_child, fake, client), 7);
	/* And the parent did not notice. */
	ASSERT_OK(bps_request_wait(inherited_request, BPS_FOREVER));
	bps_request_free(inherited_request);
	bps_tensor_free(inherited_tensor);
	bps_memory_free(inherited_memory);
}

TEST(daemon_sees_a_parent_whose_child_lives)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	struct bps_client *client = fake_open(fake);
	int pipes[2];
	pid_t pid;
	char byte;

	ASSERT_OK(pipe(pipes));
	pid = fork();
	if (!pid) {
		fd_close(pipes[1]);
		(void)!read(pipes[0], &byte, 1);
		_exit(0);
	}
	fd_close(pipes[0]);
	bps_client_close(client);
	/* Would wait for ever if the child had kept the socket. */
	fake_await(fake, &fake->told.n_gone, 1);
	fd_close(pipes[1]);
	ASSERT_EQ(waitpid(pid, NULL, 0), pid);
}

/* Who is woken for them all sleeps again then. */
TEST(wake_ups_that_lie_there_are_taken_at_once)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_open(fake);
	struct pollfd news = { .fd = bps_client_fd(client), .events = POLLIN };

	ASSERT_OK(bps_client_dispatch(client));
	ASSERT_EQ(poll(&news, 1, 0), 0);
	fake_wake(fake, 6);
	ASSERT_EQ(poll(&news, 1, 0), 1);
	ASSERT_OK(bps_client_dispatch(client));
	ASSERT_EQ(poll(&news, 1, 0), 0);
}

TEST(objects_outlive_their_client)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	struct bps_client *client = fake_join(fake, 0, 1);
	struct bps_memory *memory;
	struct bps_tensor *tensor;
	struct bps_request *request, *other;

	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_memory_alloc(client, 100, &memory));
	ASSERT_OK(bps_tensor_declare(client, "t", BPS_UINT8, 100, &tensor));
	ASSERT_OK(bps_barrier(client, 0, &request));
	bps_client_close(client);

	memset(bps_memory_data(memory), 1, bps_memory_len(memory));
	ASSERT_EQ(bps_request_poll(request), 1);
	ASSERT_EQ(bps_request_wait(request, 0), -ECANCELED);
	ASSERT_CONTAINS(bps_request_error(request), "left its job");
	ASSERT_FAILS(bps_tensor_wait(tensor, 0), ESHUTDOWN, "closed");
	ASSERT_FAILS(
		bps_submit(tensor,
			   &(struct bps_submit_params){ .size = sizeof(struct bps_submit_params),
							.operation = BPS_BARRIER },
			   &other),
		ESHUTDOWN, "closed");
	bps_request_free(request);
	bps_tensor_free(tensor);
	bps_memory_free(memory);
}

TEST(null_clients)
{
	struct bps_tensor *tensor;
	struct bps_request *request;
	struct bps_memory *memory;

	ASSERT_FAILS(bps_client_fd(NULL), EINVAL, "NULL");
	ASSERT_FAILS(bps_client_dispatch(NULL), EINVAL, "NULL");
	ASSERT_FAILS(bps_client_join(NULL, NULL), EINVAL, "NULL");
	ASSERT_FAILS(bps_client_leave(NULL), EINVAL, "NULL");
	ASSERT_FAILS(bps_client_size(NULL), EINVAL, "NULL");
	ASSERT_FAILS(bps_tensor_declare(NULL, "t", BPS_INT8, 1, &tensor), EINVAL, "NULL");
	ASSERT_FAILS(bps_tensor_wait(NULL, 0), EINVAL, "NULL");
	ASSERT_FAILS(bps_submit(NULL, NULL, &request), EINVAL, "NULL");
	ASSERT_FAILS(bps_barrier(NULL, 0, &request), EINVAL, "NULL");
	ASSERT_FAILS(bps_memory_alloc(NULL, 0, &memory), EINVAL, "NULL");
	ASSERT_FAILS(bps_request_poll(NULL), EINVAL, "NULL");
	ASSERT_FAILS(bps_request_wait(NULL, 0), EINVAL, "NULL");
	ASSERT_FAILS(bps_request_blocked(NULL, 1), EINVAL, "NULL");
	ASSERT_FAILS(bps_request_cancel(NULL), EINVAL, "NULL");
	ASSERT_STR(bps_request_error(NULL), "");
	bps_request_free(NULL);
	bps_tensor_free(NULL);
	bps_memory_free(NULL);
}
