/* The program, run against a daemon of which only the admin side is real. */
#include "fake_daemon.h"
#include "grpc_test.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>

struct answer {
	char text[16384]; /* standard output and error */
	int status;
};

/* The program runs in a shell; the daemon in this process, which turns its loop meanwhile. */
static void run(struct fake_daemon *f, struct answer *a, const char *arguments)
{
	char command[512];
	size_t len = 0;
	FILE *pipe;
	int status;

	(void)snprintf(command, sizeof(command), "exec env -u XDG_RUNTIME_DIR '%s' %s 2>&1", BPSCTL,
		       arguments);
	pipe = popen(command, "re");
	ASSERT_TRUE(pipe);
	ASSERT_OK(fcntl(fileno(pipe), F_SETFL, O_NONBLOCK));
	for (;;) {
		ssize_t n = read(fileno(pipe), a->text + len, sizeof(a->text) - 1 - len);

		if (!n)
			break;
		if (n > 0)
			len += (size_t)n;
		else if (f)
			ASSERT_INT(loop_turn(f->loop, 10), >=, 0);
		else
			(void)poll(&(struct pollfd){ .fd = fileno(pipe), .events = POLLIN }, 1, -1);
	}
	a->text[len] = 0;
	status = pclose(pipe);
	ASSERT_TRUE(WIFEXITED(status));
	a->status = WEXITSTATUS(status);
}

static void ask(struct fake_daemon *f, struct answer *a, const char *arguments)
{
	char all[256];

	(void)snprintf(all, sizeof(all), "--socket %s %s", f->path, arguments);
	run(f, a, all);
}

GRPC_TEST(tables)
{
	struct fake_daemon f;
	struct answer a;

	fake_start(&f);
	ask(&f, &a, "status");
	ASSERT_EQ(a.status, 0);
	ASSERT_CONTAINS(a.text, "node         node-a\n");
	ASSERT_CONTAINS(a.text, "cluster      static, view 7\n");
	ASSERT_CONTAINS(a.text, "id           fedcba9876543210\n");
	ASSERT_CONTAINS(a.text, "up           1 h 2 min\n");
	ASSERT_CONTAINS(a.text, "requests     17 done, 2 of them failed\n");
	ASSERT_CONTAINS(a.text, "received     1.5K\n");
	ASSERT_CONTAINS(a.text, "sent         3.0T\n");
	ask(&f, &a, "nodes");
	ASSERT_EQ(a.status, 0);
	ASSERT_CONTAINS(a.text, "view 7, 2 nodes\n");
	ASSERT_CONTAINS(a.text, "node-a     agent,server  10.0.0.1:9690");
	/* No escape sequence reaches the terminal. */
	ASSERT_TRUE(!strchr(a.text, '\033'));
	ASSERT_CONTAINS(a.text, "evil?[2J?  agent         -");
	ask(&f, &a, "jobs");
	ASSERT_EQ(a.status, 0);
	ASSERT_CONTAINS(a.text, "rank 3 (tensor layer1.weight, round 17) for 2.1 s");
	ask(&f, &a, "job resnet");
	ASSERT_EQ(a.status, 0);
	ASSERT_CONTAINS(a.text, "missing");
	ASSERT_CONTAINS(a.text, "1234");
	ASSERT_CONTAINS(a.text, "float32");
	ask(&f, &a, "metrics");
	ASSERT_EQ(a.status, 0);
	ASSERT_CONTAINS(a.text, "bps_things_total 42\n");
	fake_stop(&f);
}

GRPC_TEST(json)
{
	struct fake_daemon f;
	struct answer a;

	fake_start(&f);
	ask(&f, &a, "--json status");
	ASSERT_EQ(a.status, 0);
	ASSERT_CONTAINS(a.text, "\"id\": \"fedcba9876543210\"");
	ASSERT_CONTAINS(a.text, "\"n_sessions\": 4");
	ASSERT_CONTAINS(a.text, "\"roles\": [\n    \"agent\",\n    \"server\"\n  ]");
	ask(&f, &a, "nodes --json");
	ASSERT_EQ(a.status, 0);
	/* Bytes that are no text do not break it. */
	ASSERT_CONTAINS(a.text, "evil\\u001B[2J?");
	ASSERT_CONTAINS(a.text, "\"bandwidth_mbps\": 25000");
	ask(&f, &a, "-j jobs");
	ASSERT_CONTAINS(a.text, "\"job\": \"resnet\"");
	ask(&f, &a, "-j job resnet");
	ASSERT_CONTAINS(a.text, "\"pid\": 1234");
	ASSERT_CONTAINS(a.text, "\"bytes_held\": 0");
	ASSERT_CONTAINS(a.text, "\"total_tensors\": 2");
	ask(&f, &a, "-j metrics");
	ASSERT_CONTAINS(a.text, "\"bps_things_total\": 42");
	ASSERT_CONTAINS(a.text, "\"bps_spent_total\": 1.5");
	fake_stop(&f);
}

GRPC_TEST(health)
{
	struct fake_daemon f;
	struct answer a;

	fake_start(&f);
	ask(&f, &a, "health");
	ASSERT_EQ(a.status, 0);
	ASSERT_STR(a.text, "serving\n");
	f.sick = true;
	ask(&f, &a, "health");
	ASSERT_EQ(a.status, 1);
	ASSERT_STR(a.text, "not serving\n");
	ask(&f, &a, "--json health");
	ASSERT_EQ(a.status, 1);
	ASSERT_CONTAINS(a.text, "\"serving\": false");
	fake_stop(&f);
}

GRPC_TEST(refusals)
{
	struct fake_daemon f;
	struct answer a;

	fake_start(&f);
	ask(&f, &a, "job none");
	ASSERT_EQ(a.status, 1);
	ASSERT_STR(a.text, "bpsctl: job none: no such job at this daemon\n");
	fake_stop(&f);
}

GRPC_TEST(over_tcp)
{
	struct fake_daemon f;
	struct answer a;
	uint16_t port;
	char arguments[128];

	fake_start(&f);
	ASSERT_OK(rpc_listen(f.rpc, "127.0.0.1:0", RPC_DOOR_OPERATORS, NULL, &port, &f.failure));
	(void)snprintf(arguments, sizeof(arguments), "--address 127.0.0.1:%u status", port);
	run(&f, &a, arguments);
	ASSERT_EQ(a.status, 0);
	ASSERT_CONTAINS(a.text, "node-a");
	fake_stop(&f);
}

GRPC_TEST(another_node_drains)
{
	struct fake_daemon f;
	struct answer a;

	fake_start(&f);
	ask(&f, &a, "drain");
	ASSERT_EQ(a.status, 0);
	ASSERT_CONTAINS(a.text, "2 jobs moved to other servers, 1 stay");
	ask(&f, &a, "drain b");
	ASSERT_EQ(a.status, 0);
	ASSERT_CONTAINS(a.text, "2 jobs moved to other servers, 3 stay");
	f.sick = true;
	ask(&f, &a, "drain b");
	ASSERT_EQ(a.status, 1);
	ASSERT_CONTAINS(a.text, "bpsctl: drain b: sick");
	fake_stop(&f);
}

/* It is there, and does nothing: however long it takes, that is not the same as if nobody were there. */
GRPC_TEST(a_daemon_that_is_stuck)
{
	struct fake_daemon f;
	struct answer a;
	char arguments[160];

	fake_start(&f);
	(void)snprintf(arguments, sizeof(arguments), "--socket %s --timeout 1 status", f.path);
	run(NULL, &a, arguments);
	ASSERT_EQ(a.status, 3);
	ASSERT_CONTAINS(a.text, "no answer for 1 s; is the daemon stopped or stuck?");
	fake_stop(&f);
}

TEST(usage)
{
	static const struct {
		const char *arguments, *expected;
	} wrong[] = {
		{ "", "no command" },
		{ "what", "no command what" },
		{ "status now", "status: takes no argument" },
		{ "job", "job: say which" },
		{ "job a b", "job: say which, and nothing else" },
		{ "drain a b", "drain: say which, and nothing else" },
		{ "--socket /a --address b:1 status", "one of them" },
		{ "--tls-ca x status", "TLS is for --address" },
		{ "--address a:1 --tls-ca x status", "all or none" },
		{ "--timeout 0 status", "--timeout 0: seconds" },
		{ "--timeout -1 status", "--timeout -1: seconds" },
		{ "--timeout 5s status", "--timeout 5s: seconds" },
		{ "--bogus status", "bogus" },
	};
	struct answer a;

	for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
		run(NULL, &a, wrong[i].arguments);
		ASSERT_EQ(a.status, 2);
		ASSERT_CONTAINS(a.text, wrong[i].expected);
		ASSERT_CONTAINS(a.text, "Try \"bpsctl --help\"");
	}
	run(NULL, &a, "--help");
	ASSERT_EQ(a.status, 0);
	ASSERT_CONTAINS(a.text, "Usage: bpsctl");
	run(NULL, &a, "--version");
	ASSERT_EQ(a.status, 0);
	ASSERT_CONTAINS(a.text, "bpsctl " BPS_VERSION);
}

TEST(nobody_there)
{
	char path[96], arguments[160];
	struct answer a;
	int fd;

	(void)snprintf(path, sizeof(path), "%s/none.sock", test_dir());
	(void)snprintf(arguments, sizeof(arguments), "--socket %s status", path);
	run(NULL, &a, arguments);
	ASSERT_EQ(a.status, 3);
	ASSERT_CONTAINS(a.text, path);
	ASSERT_CONTAINS(a.text, "is bps-daemon running there?");
	/* The environment says where, too. */
	ASSERT_OK(setenv("BPS_ADMIN_SOCKET", path, 1));
	run(NULL, &a, "status");
	ASSERT_EQ(a.status, 3);
	ASSERT_CONTAINS(a.text, path);
	fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	ASSERT_INT(fd, >=, 0);
	fd_close(fd);
	run(NULL, &a, "status");
	ASSERT_EQ(a.status, 3);
	run(NULL, &a, "--address 127.0.0.1:1 status");
	ASSERT_EQ(a.status, 3);
	ASSERT_CONTAINS(a.text, "is bps-daemon running there");
}
