/*
 * gRPC between two ends in this process and with another: calls, streams, deadlines, cancellation,
 * the Unix socket, strangers.
 */
#include "base/clock.h"
#include "certificates.h"
#include "grpc_test.h"
#include "rpc/engine.h"
#include "rpc/rpc.h"
#include "test.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

struct fixture {
	struct loop *loop;
	struct rpc *rpc;
	struct rpc_method echo, refuse, never, count, flood;
	struct rpc_call *held;
	unsigned n_called, n_cancelled;
	bool is_a;		 /* the last caller is called node-a, by its certificate */
	char peer[RPC_PEER_MAX]; /* where it comes from */
	uint16_t port;
	char address[64];
	struct failure failure;
};

/* Turns the loop until the condition holds; the test's time limit ends it otherwise. */
#define UNTIL(f, condition)                                            \
	do {                                                           \
		while (!(condition))                                   \
			ASSERT_INT(loop_turn((f)->loop, 1000), >=, 0); \
	} while (0)

static void on_echo(void *user, struct rpc_call *call, const void *data, size_t len)
{
	struct fixture *f = user;

	f->n_called++;
	f->is_a = rpc_call_is_named(call, "node-a") && !rpc_call_is_named(call, "node-") &&
		  !rpc_call_is_named(call, "node-ab");
	rpc_call_peer(call, f->peer);
	rpc_call_reply(call, data, len);
}

static void on_refuse(void *user, struct rpc_call *call, const void *data, size_t len)
{
	rpc_call_fail(call, -ENOENT, "no such thing: teapot");
}

static void on_never(void *user, struct rpc_call *call, const void *data, size_t len)
{
	struct fixture *f = user;

	f->n_called++;
	f->held = call;
	rpc_call_set_user(call, f);
}

static void on_cancelled(void *user, struct rpc_call *call)
{
	struct fixture *f = user;

	ASSERT_TRUE(!f->held || rpc_call_user(call) == f);
	f->held = NULL;
	f->n_cancelled++;
}

static void on_count(void *user, struct rpc_call *call, const void *data, size_t len)
{
	uint32_t n;

	ASSERT_EQ(len, sizeof(n));
	memcpy(&n, data, sizeof(n));
	for (uint32_t i = 0; i < n; i++)
		rpc_call_send(call, &i, sizeof(i));
	rpc_call_end(call);
}

static void on_flood(void *user, struct rpc_call *call, const void *data, size_t len)
{
	for (unsigned i = 0; i < RPC_QUEUE_MAX + 2; i++)
		rpc_call_send(call, "drop", 4);
}

static void add(struct fixture *f, struct rpc_method *method, const char *path,
		void (*called)(void *, struct rpc_call *, const void *, size_t))
{
	*method = (struct rpc_method){
		.path = path, .called = called, .cancelled = on_cancelled, .user = f
	};
	rpc_add_method(f->rpc, method);
}

static void start_bare(struct fixture *f)
{
	*f = (struct fixture){ 0 };
	ASSERT_OK(loop_new(&f->loop));
	ASSERT_OK(rpc_new(f->loop, &f->rpc));
	add(f, &f->echo, "/test.Test/EchoWhateverIsSent", on_echo);
	add(f, &f->refuse, "/test.Test/Refuse", on_refuse);
	add(f, &f->never, "/test.Test/Never", on_never);
	add(f, &f->count, "/test.Test/Count", on_count);
	add(f, &f->flood, "/test.Test/Flood", on_flood);
}

static void start(struct fixture *f, const struct rpc_tls *tls)
{
	start_bare(f);
	ASSERT_OK(rpc_listen(f->rpc, "127.0.0.1:0", RPC_DOOR_OPERATORS | RPC_DOOR_CLUSTER, tls,
			     &f->port, &f->failure));
	ASSERT_INT(f->port, >, 0);
	(void)snprintf(f->address, sizeof(f->address), "127.0.0.1:%u", f->port);
}

static void stop(struct fixture *f)
{
	rpc_free(f->rpc);
	loop_free(f->loop);
}

struct question {
	struct rpc_request request;
	bool is_done;
	int status;
	char text[512];
	char reply[64];
	size_t reply_len;
	uint32_t n_messages;
	struct rpc_request *cancel_on_message;
};

static void on_done(struct rpc_request *request, int status, const char *text, const void *data,
		    size_t len)
{
	struct question *q = container_of(request, struct question, request);

	ASSERT_TRUE(!q->is_done);
	q->is_done = true;
	q->status = status;
	(void)snprintf(q->text, sizeof(q->text), "%s", text);
	if (len)
		memcpy(q->reply, data, MIN(len, sizeof(q->reply)));
	q->reply_len = len;
}

static void on_message(struct rpc_request *request, const void *data, size_t len)
{
	struct question *q = container_of(request, struct question, request);

	if (!strcmp(request->path, "/test.Test/Count")) {
		ASSERT_EQ(len, sizeof(q->n_messages));
		ASSERT_MEM(data, &q->n_messages, len);
	}
	q->n_messages++;
	if (q->cancel_on_message)
		rpc_request_cancel(q->cancel_on_message);
}

static void question_init(struct question *q, const char *path, const void *data, size_t len)
{
	*q = (struct question){ .request = { .path = path,
					     .data = data,
					     .len = len,
					     .deadline_ms = 20000,
					     .message = on_message,
					     .done = on_done } };
}

static void ask(struct fixture *f, struct rpc_channel *channel, struct question *q,
		const char *path, const void *data, size_t len)
{
	question_init(q, path, data, len);
	rpc_request_start(channel, &q->request);
	ASSERT_TRUE(!q->is_done);
	UNTIL(f, q->is_done);
}

static struct rpc_channel *channel_to(struct fixture *f, const char *address,
				      const struct rpc_tls *tls)
{
	struct rpc_channel *channel;

	ASSERT_OK(rpc_channel_new(f->rpc, address, 0, tls, &f->failure, &channel));
	return channel;
}

GRPC_TEST(unary)
{
	struct fixture f;
	struct rpc_channel *channel;
	struct question q;

	start(&f, NULL);
	channel = channel_to(&f, f.address, NULL);
	ask(&f, channel, &q, "/test.Test/EchoWhateverIsSent", "gradient", 8);
	ASSERT_EQ(q.status, 0);
	ASSERT_EQ(q.reply_len, 8);
	ASSERT_MEM(q.reply, "gradient", 8);
	ASSERT_TRUE(!f.is_a);
	ask(&f, channel, &q, "/test.Test/EchoWhateverIsSent", NULL, 0);
	ASSERT_EQ(q.status, 0);
	ASSERT_EQ(q.reply_len, 0);
	for (int i = 0; i < 50; i++)
		ask(&f, channel, &q, "/test.Test/EchoWhateverIsSent", &i, sizeof(i));
	ASSERT_EQ(f.n_called, 52);
	rpc_channel_free(channel);
	stop(&f);
}

GRPC_TEST(errors_cross)
{
	struct fixture f;
	struct rpc_channel *channel;
	struct question q;

	start(&f, NULL);
	channel = channel_to(&f, f.address, NULL);
	ask(&f, channel, &q, "/test.Test/Refuse", "", 0);
	ASSERT_EQ(q.status, -ENOENT);
	ASSERT_STR(q.text, "no such thing: teapot");
	ask(&f, channel, &q, "/test.Test/Nothing", "", 0);
	ASSERT_EQ(q.status, -ENOSYS);
	rpc_channel_free(channel);
	stop(&f);
}

GRPC_TEST(too_long_message_is_refused)
{
	struct fixture f;
	struct rpc_channel *channel;
	struct question q;
	char *big = calloc(1, RPC_MESSAGE_MAX + 1);

	ASSERT_TRUE(big);
	start(&f, NULL);
	channel = channel_to(&f, f.address, NULL);
	ask(&f, channel, &q, "/test.Test/EchoWhateverIsSent", big, RPC_MESSAGE_MAX + 1);
	ASSERT_EQ(q.status, -ENOBUFS);
	ASSERT_EQ(f.n_called, 0);
	ask(&f, channel, &q, "/test.Test/EchoWhateverIsSent", big, RPC_MESSAGE_MAX);
	ASSERT_EQ(q.status, 0);
	ASSERT_EQ(q.reply_len, RPC_MESSAGE_MAX);
	rpc_channel_free(channel);
	stop(&f);
	free(big);
}

GRPC_TEST(too_many_calls_at_once_are_refused)
{
	enum { MOST = 4096 };
	struct rpc_channel *channel;
	struct rpc_server *server;
	struct fixture f;
	struct question q;

	start(&f, NULL);
	server = list_first(&f.rpc->servers, struct rpc_server, link);
	channel = channel_to(&f, f.address, NULL);
	/* As if so many were open. */
	server->n_open += MOST;
	ask(&f, channel, &q, "/test.Test/EchoWhateverIsSent", "x", 1);
	ASSERT_EQ(q.status, -ENOBUFS);
	ASSERT_CONTAINS(q.text, "too many calls at once");
	server->n_open--;
	ask(&f, channel, &q, "/test.Test/EchoWhateverIsSent", "x", 1);
	ASSERT_EQ(q.status, 0);
	server->n_open -= MOST - 1;
	rpc_channel_free(channel);
	stop(&f);
}

GRPC_TEST(long_requests_are_for_the_cluster)
{
	char *big = calloc(1, RPC_REQUEST_MAX + 1), address[64];
	struct rpc_channel *channel;
	struct fixture f;
	struct question q;
	uint16_t port;

	ASSERT_TRUE(big);
	start_bare(&f);
	ASSERT_OK(rpc_listen(f.rpc, "127.0.0.1:0", RPC_DOOR_PUBLIC, NULL, &port, &f.failure));
	(void)snprintf(address, sizeof(address), "127.0.0.1:%u", port);
	channel = channel_to(&f, address, NULL);
	ask(&f, channel, &q, "/test.Test/EchoWhateverIsSent", big, RPC_REQUEST_MAX + 1);
	ASSERT_EQ(q.status, -ENOBUFS);
	ASSERT_EQ(f.n_called, 0);
	ask(&f, channel, &q, "/test.Test/EchoWhateverIsSent", big, RPC_REQUEST_MAX);
	ASSERT_EQ(q.status, 0);
	ASSERT_EQ(q.reply_len, RPC_REQUEST_MAX);
	rpc_channel_free(channel);
	stop(&f);
	free(big);
}

GRPC_TEST(deadline_ends_both_sides)
{
	struct fixture f;
	struct rpc_channel *channel;
	struct question q;
	uint64_t start_ns, deadline_ms = 100;
	unsigned n_asked = 0;

	start(&f, NULL);
	channel = channel_to(&f, f.address, NULL);
	/* Where it is over before the other end has heard of it, more time is given. */
	for (; !f.n_called; deadline_ms *= 2, n_asked++) {
		question_init(&q, "/test.Test/Never", "", 0);
		q.request.deadline_ms = deadline_ms;
		start_ns = clock_now_ns();
		rpc_request_start(channel, &q.request);
		UNTIL(&f, q.is_done);
		ASSERT_EQ(q.status, -ETIMEDOUT);
		ASSERT_INT(clock_now_ns() - start_ns, >=, deadline_ms * 9 / 10 * NSEC_PER_MSEC);
	}
	/* It may hear late of those before, too. */
	UNTIL(&f, f.n_cancelled == f.n_called);
	ASSERT_INT(f.n_called, <=, n_asked);
	rpc_channel_free(channel);
	stop(&f);
}

GRPC_TEST(cancel_ends_both_sides)
{
	struct fixture f;
	struct rpc_channel *channel;
	struct question q;

	start(&f, NULL);
	channel = channel_to(&f, f.address, NULL);
	question_init(&q, "/test.Test/Never", "", 0);
	rpc_request_start(channel, &q.request);
	UNTIL(&f, f.n_called);
	rpc_request_cancel(&q.request);
	ASSERT_TRUE(!q.is_done);
	UNTIL(&f, q.is_done && f.n_cancelled);
	ASSERT_EQ(q.status, -ECANCELED);
	rpc_request_cancel(&q.request);
	rpc_channel_free(channel);
	stop(&f);
}

GRPC_TEST(stream_in_order)
{
	struct fixture f;
	struct rpc_channel *channel;
	struct question q;
	uint32_t n = RPC_QUEUE_MAX;

	start(&f, NULL);
	channel = channel_to(&f, f.address, NULL);
	question_init(&q, "/test.Test/Count", &n, sizeof(n));
	q.request.stream = true;
	q.request.deadline_ms = 0;
	rpc_request_start(channel, &q.request);
	UNTIL(&f, q.is_done);
	ASSERT_EQ(q.status, 0);
	ASSERT_EQ(q.n_messages, n);
	rpc_channel_free(channel);
	stop(&f);
}

GRPC_TEST(stream_cancelled_while_told)
{
	struct fixture f;
	struct rpc_channel *channel;
	struct question q;
	uint32_t n = RPC_QUEUE_MAX;

	start(&f, NULL);
	channel = channel_to(&f, f.address, NULL);
	question_init(&q, "/test.Test/Count", &n, sizeof(n));
	q.request.stream = true;
	q.cancel_on_message = &q.request;
	rpc_request_start(channel, &q.request);
	UNTIL(&f, q.is_done);
	ASSERT_INT(q.n_messages, >=, 1);
	rpc_channel_free(channel);
	stop(&f);
}

GRPC_TEST(slow_reader_is_cut_off)
{
	struct fixture f;
	struct rpc_channel *channel;
	struct question q;

	start(&f, NULL);
	channel = channel_to(&f, f.address, NULL);
	question_init(&q, "/test.Test/Flood", "", 0);
	q.request.stream = true;
	rpc_request_start(channel, &q.request);
	UNTIL(&f, q.is_done && f.n_cancelled);
	ASSERT_INT(q.status, <, 0);
	/* Not by its own deadline. */
	ASSERT_TRUE(q.status != -ETIMEDOUT);
	rpc_channel_free(channel);
	stop(&f);
}

GRPC_TEST(nobody_there)
{
	struct fixture f;
	struct rpc_channel *channel;
	struct question q;

	start(&f, NULL);
	/* The port of a listener that is gone. */
	rpc_close(f.rpc);
	channel = channel_to(&f, f.address, NULL);
	ask(&f, channel, &q, "/test.Test/EchoWhateverIsSent", "", 0);
	ASSERT_EQ(q.status, -ECONNREFUSED);
	ASSERT_CONTAINS(q.text, "refused");
	rpc_channel_free(channel);
	stop(&f);
}

GRPC_TEST(port_in_use)
{
	struct fixture f, g;

	start(&f, NULL);
	start_bare(&g);
	ASSERT_EQ(rpc_listen(g.rpc, f.address, RPC_DOOR_OPERATORS, NULL, &g.port, &g.failure),
		  -EADDRINUSE);
	ASSERT_CONTAINS(g.failure.text, f.address);
	ASSERT_CONTAINS(g.failure.text, "in use");
	ASSERT_EQ(rpc_listen(g.rpc, "nonsense", RPC_DOOR_OPERATORS, NULL, &g.port, &g.failure),
		  -EINVAL);
	ASSERT_CONTAINS(g.failure.text, "host:port");
	stop(&g);
	stop(&f);
}

GRPC_TEST(free_with_requests_out)
{
	struct fixture f;
	struct rpc_channel *channel;
	struct question q[3];

	start(&f, NULL);
	channel = channel_to(&f, f.address, NULL);
	for (size_t i = 0; i < ARRAY_SIZE(q); i++) {
		question_init(&q[i], "/test.Test/Never", "", 0);
		q[i].request.stream = i == 2;
		rpc_request_start(channel, &q[i].request);
	}
	UNTIL(&f, f.n_called);
	rpc_channel_free(channel);
	for (size_t i = 0; i < ARRAY_SIZE(q); i++) {
		ASSERT_TRUE(q[i].is_done);
		ASSERT_EQ(q[i].status, -ECANCELED);
	}
	stop(&f);
}

GRPC_TEST(close_with_calls_open)
{
	struct fixture f;
	struct rpc_channel *channel;
	struct question q;

	start(&f, NULL);
	channel = channel_to(&f, f.address, NULL);
	question_init(&q, "/test.Test/Never", "", 0);
	rpc_request_start(channel, &q.request);
	UNTIL(&f, f.n_called);
	rpc_close(f.rpc);
	ASSERT_EQ(f.n_cancelled, 1);
	rpc_channel_drain(channel, 5000);
	ASSERT_TRUE(q.is_done);
	ASSERT_INT(q.status, <, 0);
	rpc_channel_free(channel);
	stop(&f);
}

/* The server's process: says its port, serves one call, tells whether that was the farewell. */
static int serve_one(int port_fd)
{
	struct fixture f;

	start(&f, NULL);
	ASSERT_EQ(write(port_fd, &f.port, sizeof(f.port)), sizeof(f.port));
	UNTIL(&f, f.n_called);
	stop(&f);
	return EXIT_SUCCESS;
}

GRPC_TEST(farewell_arrives)
{
	struct fixture g;
	struct rpc_channel *channel;
	struct question q;
	uint16_t port;
	int pipe_fds[2], status;
	pid_t pid;

	ASSERT_OK(pipe2(pipe_fds, O_CLOEXEC));
	pid = fork();
	ASSERT_INT(pid, >=, 0);
	if (!pid)
		_exit(serve_one(pipe_fds[1]));
	ASSERT_EQ(read(pipe_fds[0], &port, sizeof(port)), sizeof(port));
	fd_close(pipe_fds[0]);
	fd_close(pipe_fds[1]);

	start_bare(&g);
	(void)snprintf(g.address, sizeof(g.address), "127.0.0.1:%u", port);
	channel = channel_to(&g, g.address, NULL);
	question_init(&q, "/test.Test/EchoWhateverIsSent", "bye", 3);
	rpc_request_start(channel, &q.request);
	rpc_close(g.rpc);
	rpc_channel_drain(channel, 20000);
	ASSERT_TRUE(q.is_done);
	rpc_channel_free(channel);
	stop(&g);
	ASSERT_EQ(waitpid(pid, &status, 0), pid);
	ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS);
}

/* A Unix socket in the test's directory. */
struct place {
	char path[64], target[80];
};

static void place_make(struct place *p)
{
	(void)snprintf(p->path, sizeof(p->path), "%s/admin.sock", test_dir());
	(void)snprintf(p->target, sizeof(p->target), "unix:%s", p->path);
}

GRPC_TEST(unix_starts_and_stops_by_use)
{
	struct fixture f, g;
	struct rpc_channel *channel;
	struct question q;
	struct place p;
	struct stat st;

	place_make(&p);
	start_bare(&f);
	start_bare(&g);
	rpc_set_unix_idle_ms(f.rpc, 50);
	ASSERT_OK(rpc_listen_unix(f.rpc, p.path, NULL, -1, &f.failure));
	ASSERT_OK(stat(p.path, &st));
	ASSERT_EQ(st.st_mode & 0777, 0600);
	ASSERT_TRUE(!rpc_running(f.rpc));

	for (int i = 0; i < 3; i++) {
		channel = channel_to(&g, p.target, NULL);
		question_init(&q, "/test.Test/EchoWhateverIsSent", "hello", 5);
		rpc_request_start(channel, &q.request);
		while (!q.is_done) {
			ASSERT_INT(loop_turn(f.loop, 5), >=, 0);
			ASSERT_INT(loop_turn(g.loop, 5), >=, 0);
		}
		ASSERT_EQ(q.status, 0);
		ASSERT_TRUE(rpc_running(f.rpc));
		rpc_channel_free(channel);
		/* The last round ends while gRPC still runs. */
		if (i < 2)
			UNTIL(&f, !rpc_running(f.rpc));
		while (rpc_running(g.rpc))
			ASSERT_INT(loop_turn(g.loop, 1000), >=, 0);
	}
	ASSERT_EQ(f.n_called, 3);
	rpc_close(f.rpc);
	ASSERT_TRUE(access(p.path, F_OK) && errno == ENOENT);
	stop(&g);
	stop(&f);
}

GRPC_TEST(the_socket_is_for_its_group)
{
	static const struct {
		const char *group;
		mode_t mode;
	} cases[] = {
		{ NULL, 0600 }, { "", 0600 }, { "bps-no-such-group", 0600 }, { "own", 0660 }
	};
	const struct group *own = getgrgid(getgid());
	struct fixture f;
	struct place p;
	struct stat st;

	place_make(&p);
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		const char *group = cases[i].group;
		bool is_own = group && !strcmp(group, "own");

		if (is_own && !own)
			continue;
		start_bare(&f);
		ASSERT_OK(rpc_listen_unix(f.rpc, p.path, is_own ? own->gr_name : group, -1,
					  &f.failure));
		ASSERT_OK(stat(p.path, &st));
		ASSERT_EQ(st.st_mode & 0777, cases[i].mode);
		ASSERT_TRUE(!is_own || st.st_gid == getgid());
		stop(&f);
	}
}

GRPC_TEST(a_method_is_for_who_comes_by_its_doors)
{
	struct fixture f;
	struct rpc_channel *channel;
	struct question q;
	uint16_t public;
	char address[32];

	start(&f, NULL);
	ASSERT_OK(rpc_listen(f.rpc, "127.0.0.1:0", RPC_DOOR_PUBLIC, NULL, &public, &f.failure));
	(void)snprintf(address, sizeof(address), "127.0.0.1:%u", public);
	f.echo.doors = RPC_DOOR_OPERATORS;
	f.refuse.doors = RPC_DOOR_OPERATORS | RPC_DOOR_PUBLIC;
	channel = channel_to(&f, f.address, NULL);
	ask(&f, channel, &q, f.echo.path, "hello", 5);
	ASSERT_EQ(q.status, 0);
	rpc_channel_free(channel);
	channel = channel_to(&f, address, NULL);
	ask(&f, channel, &q, f.echo.path, "hello", 5);
	ASSERT_EQ(q.status, -EACCES);
	ASSERT_CONTAINS(q.text, "admin socket");
	ask(&f, channel, &q, f.refuse.path, "hello", 5);
	ASSERT_TRUE(q.status && q.status != -EACCES);
	rpc_channel_free(channel);
	stop(&f);
}

/* A busy machine, or one that is far away: it accepts only after most of a second. */
GRPC_TEST(slow_to_answer_is_not_absent)
{
	struct fixture f, g;
	struct rpc_channel *channel;
	struct question q;
	struct place p;
	uint64_t until_ns;

	place_make(&p);
	start_bare(&f);
	start_bare(&g);
	ASSERT_OK(rpc_listen_unix(f.rpc, p.path, NULL, -1, &f.failure));
	channel = channel_to(&g, p.target, NULL);
	question_init(&q, "/test.Test/EchoWhateverIsSent", "hello", 5);
	rpc_request_start(channel, &q.request);
	until_ns = clock_now_ns() + 800 * NSEC_PER_MSEC;
	while (clock_now_ns() < until_ns && !q.is_done)
		ASSERT_INT(loop_turn(g.loop, 20), >=, 0);
	ASSERT_TRUE(!q.is_done);
	while (!q.is_done) {
		ASSERT_INT(loop_turn(f.loop, 5), >=, 0);
		ASSERT_INT(loop_turn(g.loop, 5), >=, 0);
	}
	ASSERT_EQ(q.status, 0);
	rpc_channel_free(channel);
	stop(&g);
	stop(&f);
}

static int connect_raw(const char *path)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	ASSERT_INT(fd, >=, 0);
	(void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
	ASSERT_OK(connect(fd, (struct sockaddr *)&address, sizeof(address)));
	return fd;
}

GRPC_TEST(unix_survives_strangers)
{
	static const char noise[] = "GET / HTTP/1.1\r\nHost: nobody\r\n\r\n\0\377\377\377";
	struct fixture f;
	struct rpc_channel *channel;
	struct question q;
	struct place p;
	char byte;
	int fd;

	place_make(&p);
	start_bare(&f);
	rpc_set_unix_idle_ms(f.rpc, 20);
	ASSERT_OK(rpc_listen_unix(f.rpc, p.path, NULL, -1, &f.failure));
	/* Gone before gRPC is up. */
	fd = connect_raw(p.path);
	ASSERT_INT(loop_turn(f.loop, 1000), >=, 0);
	fd_close(fd);
	UNTIL(&f, !rpc_running(f.rpc));

	fd = connect_raw(p.path);
	ASSERT_EQ(write(fd, noise, sizeof(noise)), sizeof(noise));
	ASSERT_OK(fcntl(fd, F_SETFL, O_NONBLOCK));
	/* gRPC says what it speaks, then hangs up; with our second descriptor open the end must still arrive. */
	for (;;) {
		ssize_t n = read(fd, &byte, 1);

		if (!n || (n < 0 && errno == ECONNRESET))
			break;
		if (n < 0)
			ASSERT_INT(loop_turn(f.loop, 10), >=, 0);
	}
	fd_close(fd);

	channel = channel_to(&f, p.target, NULL);
	ask(&f, channel, &q, "/test.Test/EchoWhateverIsSent", "x", 1);
	ASSERT_EQ(q.status, 0);
	rpc_channel_free(channel);
	stop(&f);
}

GRPC_TEST(unix_refuses_too_many)
{
	int fds[RPC_UNIX_CONNECTIONS + 1];
	struct fixture f;
	struct place p;
	char byte;

	place_make(&p);
	start_bare(&f);
	ASSERT_OK(rpc_listen_unix(f.rpc, p.path, NULL, -1, &f.failure));
	for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
		fds[i] = connect_raw(p.path);
	ASSERT_OK(fcntl(fds[RPC_UNIX_CONNECTIONS], F_SETFL, O_NONBLOCK));
	for (;;) {
		ssize_t n = read(fds[RPC_UNIX_CONNECTIONS], &byte, 1);

		if (!n || (n < 0 && errno != EAGAIN))
			break;
		ASSERT_TRUE(n < 0);
		ASSERT_INT(loop_turn(f.loop, 10), >=, 0);
	}
	for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
		fd_close(fds[i]);
	stop(&f);
}

GRPC_TEST(unix_path_in_use)
{
	struct fixture f, g;
	struct place p;
	int fd;

	place_make(&p);
	start_bare(&f);
	start_bare(&g);
	ASSERT_OK(rpc_listen_unix(f.rpc, p.path, NULL, -1, &f.failure));
	ASSERT_EQ(rpc_listen_unix(g.rpc, p.path, NULL, -1, &g.failure), -EADDRINUSE);
	ASSERT_CONTAINS(g.failure.text, "another daemon");
	stop(&f);

	/* A file that is no socket stays. */
	fd = open(p.path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	ASSERT_INT(fd, >=, 0);
	fd_close(fd);
	ASSERT_EQ(rpc_listen_unix(g.rpc, p.path, NULL, -1, &g.failure), -EADDRINUSE);
	ASSERT_OK(access(p.path, F_OK));
	ASSERT_OK(unlink(p.path));

	/* What a killed daemon leaves behind does not. */
	{
		struct sockaddr_un address = { .sun_family = AF_UNIX };

		fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
		memcpy(address.sun_path, p.path, sizeof(p.path));
		ASSERT_OK(bind(fd, (struct sockaddr *)&address, sizeof(address)));
		fd_close(fd);
	}
	ASSERT_OK(rpc_listen_unix(g.rpc, p.path, NULL, -1, &g.failure));
	stop(&g);

	start_bare(&g);
	ASSERT_EQ(rpc_listen_unix(g.rpc, "/nowhere/at/all.sock", NULL, -1, &g.failure), -ENOENT);
	ASSERT_CONTAINS(g.failure.text, "/nowhere/at/all.sock");
	stop(&g);
}

/* Whether a client of ours, which trusts the server, is still connected after some seconds in which it says nothing. */
static bool is_kept(struct fixture *f, const struct certificates *c, bool has_certificate,
		    const char *from, unsigned seconds)
{
	char command[512], own[192] = "";
	int status;
	pid_t pid;

	if (has_certificate)
		(void)snprintf(own, sizeof(own), "-cert %s -key %s", c->cert, c->key);
	(void)snprintf(command, sizeof(command),
		       "timeout %u openssl s_client -connect %s -bind %s:0 -CAfile %s %s -alpn h2 "
		       "-ign_eof </dev/null >/dev/null 2>&1; test $? = 124",
		       seconds, f->address, from, c->ca, own);
	pid = fork();
	ASSERT_INT(pid, >=, 0);
	if (!pid) {
		(void)execl("/bin/sh", "sh", "-c", command, NULL);
		_exit(EXIT_FAILURE);
	}
	UNTIL(f, waitpid(pid, &status, WNOHANG) == pid);
	return WIFEXITED(status) && !WEXITSTATUS(status);
}

GRPC_TEST(mutual_tls)
{
	struct certificates c;
	struct fixture f;
	struct rpc_channel *channel;
	struct question q;

	make_certificates(&c);
	start(&f, &(struct rpc_tls){ c.ca, c.cert, c.key });
	channel = channel_to(&f, f.address, &(struct rpc_tls){ c.ca, c.cert, c.key });
	ask(&f, channel, &q, "/test.Test/EchoWhateverIsSent", "secret", 6);
	ASSERT_EQ(q.status, 0);
	ASSERT_TRUE(f.is_a);
	rpc_channel_free(channel);

	/* In the clear; of another authority; and a client that does not trust us. */
	channel = channel_to(&f, f.address, NULL);
	ask(&f, channel, &q, "/test.Test/EchoWhateverIsSent", "secret", 6);
	ASSERT_INT(q.status, <, 0);
	rpc_channel_free(channel);
	channel = channel_to(&f, f.address, &(struct rpc_tls){ c.ca, c.other_cert, c.other_key });
	ask(&f, channel, &q, "/test.Test/EchoWhateverIsSent", "secret", 6);
	ASSERT_INT(q.status, <, 0);
	rpc_channel_free(channel);
	channel = channel_to(&f, f.address, &(struct rpc_tls){ c.other_ca, c.cert, c.key });
	ask(&f, channel, &q, "/test.Test/EchoWhateverIsSent", "secret", 6);
	ASSERT_INT(q.status, <, 0);
	rpc_channel_free(channel);
	ASSERT_EQ(f.n_called, 1);
	/* Nor is one kept that has no certificate at all, as one with a certificate is. */
	ASSERT_TRUE(!is_kept(&f, &c, false, "127.0.0.1", 20));
	ASSERT_TRUE(is_kept(&f, &c, true, "127.0.0.1", 1));
	stop(&f);
}

/* A stranger, who has said nothing yet. */
static int connect_from(const struct fixture *f, const char *from)
{
	struct sockaddr_in own = { .sin_family = AF_INET }, to = own;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	ASSERT_INT(fd, >=, 0);
	ASSERT_EQ(inet_pton(AF_INET, from, &own.sin_addr), 1);
	ASSERT_OK(bind(fd, (struct sockaddr *)&own, sizeof(own)));
	to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	to.sin_port = htons(f->port);
	ASSERT_OK(connect(fd, (struct sockaddr *)&to, sizeof(to)));
	ASSERT_OK(fcntl(fd, F_SETFL, O_NONBLOCK));
	return fd;
}

static bool is_closed(int fd)
{
	char data[256];
	ssize_t n;

	do
		n = read(fd, data, sizeof(data));
	while (n > 0);
	return !n || errno != EAGAIN;
}

#define FEW	 (RPC_TCP_OF_ONE + 1)
#define FEW_TLS	 (RPC_TLS_OF_ONE + 1)
#define FEW_KEPT 20

static void close_all(int *fds, unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		fd_close(fds[i]);
}

static unsigned n_closed(const int *fds, unsigned n)
{
	unsigned n_gone = 0;

	for (unsigned i = 0; i < n; i++)
		n_gone += is_closed(fds[i]);
	return n_gone;
}

/* One more than may connect, of which one is closed: again, where they have run out of time already. */
static void connect_too_many(struct fixture *f, const char *from, int *fds, unsigned n)
{
	for (unsigned tries = 0; tries < 3; tries++) {
		for (unsigned i = 0; i < n; i++) {
			fds[i] = connect_from(f, from);
			ASSERT_INT(loop_turn(f->loop, 0), >=, 0);
		}
		UNTIL(f, n_closed(fds, n));
		if (n_closed(fds, n) == 1)
			return;
		UNTIL(f, n_closed(fds, n) == n);
		close_all(fds, n);
	}
	test_fail(__FILE__, __LINE__, "others were closed, too");
}

GRPC_TEST(one_address_has_few_connections)
{
	struct rpc_channel *channel;
	struct fixture f;
	struct question q;
	int fds[FEW];

	start(&f, NULL);
	connect_too_many(&f, "127.0.0.2", fds, FEW);
	ASSERT_TRUE(is_closed(fds[FEW - 1]));
	channel = channel_to(&f, f.address, NULL);
	ask(&f, channel, &q, "/test.Test/EchoWhateverIsSent", "x", 1);
	ASSERT_EQ(q.status, 0);
	ASSERT_TRUE(!strncmp(f.peer, "ipv4:127.0.0.1:", 15));
	rpc_channel_free(channel);
	close_all(fds, FEW);
	stop(&f);
}

/* They cost gRPC as much as others do: 2000 of a connection go on at once, and 500 a second. */
GRPC_TEST(frames_with_little_data_are_few)
{
	enum { HEAD = 9, BATCH = 100, TURNS = 2000, AT_ONCE = 2000, A_SECOND = 500 };
	static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
	/* Empty settings; and data of a stream that is over. */
	static const char settings[HEAD] = { [3] = 4 }, data[HEAD] = { [8] = 1 };
	char batch[BATCH][HEAD];
	uint64_t n = 0, began_ns, most;
	struct fixture f;
	int fd, least = 0;

	for (size_t i = 0; i < BATCH; i++)
		memcpy(batch[i], data, HEAD);
	start(&f, NULL);
	fd = connect_from(&f, "127.0.0.2");
	ASSERT_OK(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &least, sizeof(least)));
	began_ns = clock_now_ns();
	ASSERT_EQ(send(fd, preface, sizeof(preface) - 1, MSG_NOSIGNAL), sizeof(preface) - 1);
	ASSERT_EQ(send(fd, settings, HEAD, MSG_NOSIGNAL), HEAD);
	for (unsigned i = 0; i < TURNS; i++) {
		ssize_t sent;

		while ((sent = send(fd, batch, sizeof(batch), MSG_DONTWAIT | MSG_NOSIGNAL)) > 0)
			n += (uint64_t)sent;
		ASSERT_EQ(errno, EAGAIN);
		ASSERT_INT(loop_turn(f.loop, 0), >=, 0);
	}
	most = AT_ONCE + A_SECOND * (1 + (clock_now_ns() - began_ns) / NSEC_PER_SEC);
	/* Besides, what waits in the kernel. */
	ASSERT_INT(n, <, most * HEAD + (1 << 20));
	(void)close(fd);
	stop(&f);
}

GRPC_TEST(one_address_has_few_connections_with_tls)
{
	struct certificates c;
	struct fixture f;
	int fds[FEW_TLS];

	make_certificates(&c);
	start(&f, &(struct rpc_tls){ c.ca, c.cert, c.key });
	connect_too_many(&f, "127.0.0.2", fds, FEW_TLS);
	/* The newest has taken the place of another. */
	ASSERT_TRUE(!is_closed(fds[FEW_TLS - 1]));
	ASSERT_TRUE(is_kept(&f, &c, true, "127.0.0.1", 1));
	/* Who says nothing makes room for others. */
	UNTIL(&f, n_closed(fds, FEW_TLS) == FEW_TLS);
	ASSERT_TRUE(is_kept(&f, &c, true, "127.0.0.2", 1));
	close_all(fds, FEW_TLS);
	stop(&f);
}

/* From where they come, too. */
GRPC_TEST(who_has_a_certificate_may_connect_beside_strangers)
{
	char peers[FEW_KEPT][RPC_PEER_MAX];
	struct rpc_channel *channels[FEW_KEPT], *late;
	struct certificates c;
	struct fixture f;
	struct question q;
	int fds[FEW_TLS];

	make_certificates(&c);
	start(&f, &(struct rpc_tls){ c.ca, c.cert, c.key });
	for (unsigned i = 0; i < FEW_KEPT; i++) {
		channels[i] = channel_to(&f, f.address, &(struct rpc_tls){ c.ca, c.cert, c.key });
		ask(&f, channels[i], &q, "/test.Test/EchoWhateverIsSent", "x", 1);
		ASSERT_EQ(q.status, 0);
		ASSERT_TRUE(!strncmp(f.peer, "ipv4:127.0.0.1:", 15));
		memcpy(peers[i], f.peer, sizeof(f.peer));
		for (unsigned j = 0; j < i; j++)
			ASSERT_TRUE(strcmp(peers[i], peers[j]));
	}
	connect_too_many(&f, "127.0.0.1", fds, FEW_TLS);
	late = channel_to(&f, f.address, &(struct rpc_tls){ c.ca, c.cert, c.key });
	ask(&f, late, &q, "/test.Test/EchoWhateverIsSent", "x", 1);
	ASSERT_EQ(q.status, 0);
	rpc_channel_free(late);
	for (unsigned i = 0; i < FEW_KEPT; i++) {
		ask(&f, channels[i], &q, "/test.Test/EchoWhateverIsSent", "x", 1);
		ASSERT_EQ(q.status, 0);
		ASSERT_STR(f.peer, peers[i]);
		rpc_channel_free(channels[i]);
	}
	close_all(fds, FEW_TLS);
	stop(&f);
}

/* The client's process: is told the port, calls once, tells whether that was answered. */
static int call_one(int port_fd, const struct rpc_tls *tls)
{
	struct rpc_channel *channel;
	struct fixture f;
	struct question q;

	start_bare(&f);
	ASSERT_EQ(read(port_fd, &f.port, sizeof(f.port)), sizeof(f.port));
	(void)snprintf(f.address, sizeof(f.address), "127.0.0.1:%u", f.port);
	channel = channel_to(&f, f.address, tls);
	question_init(&q, "/test.Test/EchoWhateverIsSent", "x", 1);
	q.request.deadline_ms = 0;
	rpc_request_start(channel, &q.request);
	UNTIL(&f, q.is_done);
	rpc_channel_free(channel);
	stop(&f);
	return q.status ? EXIT_FAILURE : EXIT_SUCCESS;
}

/* The lowest that are free. */
static void next_descriptors(int *ret_fds, unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		ret_fds[i] = open("/dev/null", O_RDONLY | O_CLOEXEC);
	for (unsigned i = 0; i < n; i++)
		fd_close(ret_fds[i]);
}

GRPC_TEST(who_comes_without_descriptors_waits)
{
	struct rlimit limit, low;
	struct certificates c;
	struct fixture f;
	int pipe_fds[2], status, next[3], now;
	pid_t pid;

	make_certificates(&c);
	ASSERT_OK(pipe2(pipe_fds, O_CLOEXEC));
	pid = fork();
	ASSERT_INT(pid, >=, 0);
	if (!pid)
		_exit(call_one(pipe_fds[0], &(struct rpc_tls){ c.ca, c.cert, c.key }));
	start(&f, &(struct rpc_tls){ c.ca, c.cert, c.key });
	ASSERT_EQ(write(pipe_fds[1], &f.port, sizeof(f.port)), sizeof(f.port));
	/* Two: enough for us, but gRPC, which needs one, would never listen again. So the second is left. */
	ASSERT_OK(getrlimit(RLIMIT_NOFILE, &limit));
	next_descriptors(next, 3);
	low = (struct rlimit){ (rlim_t)next[2], limit.rlim_max };
	ASSERT_OK(setrlimit(RLIMIT_NOFILE, &low));
	do {
		ASSERT_INT(loop_turn(f.loop, 1000), >=, 0);
		next_descriptors(&now, 1);
	} while (now != next[1]);
	ASSERT_INT(loop_turn(f.loop, 1000), >=, 0);
	ASSERT_EQ(f.n_called, 0);
	ASSERT_OK(setrlimit(RLIMIT_NOFILE, &limit));
	UNTIL(&f, waitpid(pid, &status, WNOHANG) == pid);
	ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS);
	fd_close(pipe_fds[0]);
	fd_close(pipe_fds[1]);
	stop(&f);
}

static unsigned entries_of(const char *path)
{
	DIR *folder = opendir(path);
	unsigned n = 0;

	ASSERT_TRUE(folder);
	while (readdir(folder))
		n++;
	(void)closedir(folder);
	return n;
}

GRPC_TEST(the_socket_between_has_no_path)
{
	char folder[200], list[256], address[32];
	struct certificates c;
	struct fixture f;
	uint16_t port;

	make_certificates(&c);
	/* Longer than a socket's path may be. */
	(void)snprintf(folder, sizeof(folder), "%s/%0120d", test_dir(), 0);
	(void)snprintf(list, sizeof(list), "%s:/nowhere", folder);
	ASSERT_OK(setenv("TMPDIR", "/nowhere/at/all", 1));
	start_bare(&f);
	ASSERT_EQ(rpc_listen(f.rpc, "127.0.0.1:0", RPC_DOOR_OPERATORS,
			     &(struct rpc_tls){ c.ca, c.cert, c.key }, &port, &f.failure),
		  -ENOENT);
	ASSERT_CONTAINS(f.failure.text, "/nowhere/at/all");
	stop(&f);

	ASSERT_OK(mkdir(folder, 0700));
	ASSERT_OK(setenv("RUNTIME_DIRECTORY", list, 1));
	start(&f, &(struct rpc_tls){ c.ca, c.cert, c.key });
	ASSERT_EQ(entries_of(folder), 2);
	ASSERT_TRUE(is_kept(&f, &c, true, "127.0.0.1", 1));
	ASSERT_INT(rpc_listen(f.rpc, "127.0.0.1:0", RPC_DOOR_OPERATORS,
			      &(struct rpc_tls){ c.ca, c.cert, c.other_key }, &port, &f.failure),
		   <, 0);
	(void)snprintf(address, sizeof(address), "127.0.0.1:%u", f.port);
	ASSERT_EQ(rpc_listen(f.rpc, address, RPC_DOOR_OPERATORS,
			     &(struct rpc_tls){ c.ca, c.cert, c.key }, &port, &f.failure),
		  -EADDRINUSE);
	ASSERT_EQ(entries_of(folder), 2);
	stop(&f);
	ASSERT_EQ(entries_of(folder), 2);
}

GRPC_TEST(tls_files_are_named)
{
	struct certificates c;
	struct rpc_channel *channel;
	struct fixture f;

	make_certificates(&c);
	start_bare(&f);
	ASSERT_EQ(rpc_listen(f.rpc, "127.0.0.1:0", RPC_DOOR_OPERATORS,
			     &(struct rpc_tls){ "/nowhere/ca.pem", c.cert, c.key }, &f.port,
			     &f.failure),
		  -ENOENT);
	ASSERT_CONTAINS(f.failure.text, "/nowhere/ca.pem");
	ASSERT_EQ(rpc_channel_new(f.rpc, "127.0.0.1:1", 0, &(struct rpc_tls){ c.ca, c.cert, "" },
				  &f.failure, &channel),
		  -EINVAL);
	ASSERT_CONTAINS(f.failure.text, "TLS key");
	ASSERT_EQ(rpc_channel_new(f.rpc, "127.0.0.1:1", 0,
				  &(struct rpc_tls){ c.ca, c.cert, "/etc/passwd" }, &f.failure,
				  &channel),
		  -EINVAL);
	ASSERT_CONTAINS(f.failure.text, "TLS key /etc/passwd: not a PEM file");
	/* A certificate with the key of another. */
	ASSERT_INT(rpc_listen(f.rpc, "127.0.0.1:0", RPC_DOOR_OPERATORS,
			      &(struct rpc_tls){ c.ca, c.cert, c.other_key }, &f.port, &f.failure),
		   <, 0);
	ASSERT_CONTAINS(f.failure.text, c.other_key);
	stop(&f);
}

GRPC_TEST(idle_without_users)
{
	struct fixture f;
	struct place p;
	uint64_t wakeups;

	place_make(&p);
	start_bare(&f);
	ASSERT_OK(rpc_listen_unix(f.rpc, p.path, NULL, -1, &f.failure));
	(void)loop_turn(f.loop, 0);
	wakeups = loop_wakeups(f.loop);
	(void)loop_turn(f.loop, 200);
	ASSERT_INT(loop_wakeups(f.loop) - wakeups, <=, 1);
	ASSERT_TRUE(!rpc_running(f.rpc));
	stop(&f);
}
