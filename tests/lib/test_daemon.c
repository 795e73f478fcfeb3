/*
 * daemon.c, with another program in the daemon's place: what it is started with, restarts, and the
 * end of a program that refuses or is killed.
 */
#include "daemon.h"
#include "test.h"
#include <signal.h>

static const char *const good[] = { "--set", "a=b", "good", NULL };

TEST(starts_stops_and_starts_again)
{
	_cleanup_(test_daemon_donep) struct test_daemon daemon = { .name = "a", .args = good };
	_cleanup_(freep) char *log = NULL;
	char expected[512];

	test_daemon_start(&daemon);
	ASSERT_TRUE(test_daemon_alive(&daemon));
	test_daemon_stop(&daemon);
	ASSERT_TRUE(!test_daemon_alive(&daemon));

	test_daemon_start(&daemon);
	test_daemon_kill(&daemon);
	test_daemon_start(&daemon);
	test_daemon_stop(&daemon);

	log = test_daemon_log(&daemon);
	(void)snprintf(expected, sizeof(expected),
		       "argument --socket\nargument %s\nargument --admin-socket\nargument %s\n"
		       "argument --config\nargument %s\nargument --log-level\nargument debug\n"
		       "argument --set\nargument a=b\nargument good\nends\nargument --socket\n",
		       daemon.socket, daemon.admin_socket, daemon.config_path);
	ASSERT_TRUE(!strncmp(log, expected, strlen(expected)));
}

TEST(two_beside_each_other)
{
	_cleanup_(test_daemon_donep) struct test_daemon a = { .name = "a", .args = good };
	_cleanup_(test_daemon_donep) struct test_daemon b = { .name = "b", .args = good };

	test_daemon_start(&a);
	test_daemon_start(&b);
	ASSERT_TRUE(strcmp(a.socket, b.socket));
	test_daemon_kill(&a);
	ASSERT_TRUE(test_daemon_alive(&b));
}

TEST(one_that_refuses_tells_its_status)
{
	static const char *const early[] = { "early", NULL };
	struct test_daemon daemon = { .name = "a", .args = early };

	test_daemon_launch(&daemon);
	ASSERT_EQ(test_daemon_exited(&daemon), 4);
}

TEST(signal_is_told_apart_from_status)
{
	struct test_daemon daemon = { .name = "a", .args = good };

	test_daemon_start(&daemon);
	(void)kill(daemon.pid, SIGKILL);
	ASSERT_EQ(test_daemon_exited(&daemon), -SIGKILL);
}

TEST(wrapper_and_configuration)
{
	static const char *const wrapper[] = { "env", "BPS_TEST=1", NULL };
	_cleanup_(test_daemon_donep) struct test_daemon daemon = {
		.name = "a", .args = good, .wrapper = wrapper, .config = "key = value\n"
	};
	char text[64] = "";
	FILE *file;

	test_daemon_start(&daemon);
	file = fopen(daemon.config_path, "re");
	ASSERT_TRUE(file && fgets(text, sizeof(text), file));
	(void)fclose(file);
	ASSERT_STR(text, "key = value\n");
}
