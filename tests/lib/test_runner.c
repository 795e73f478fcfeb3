#include "test.h"
#include <signal.h>
#include <sys/wait.h>

/* Runs sample_tests with one argument. Returns its exit status and all it printed, to be freed. */
static int run_sample(const char *argument, char **ret_output)
{
	const char *program = getenv("SAMPLE_TESTS");
	size_t capacity = 1 << 16;
	char *output = calloc(1, capacity), command[512];
	FILE *pipe;
	int status;

	ASSERT_TRUE(program && output);
	(void)snprintf(command, sizeof(command), "exec '%s' %s 2>&1", program, argument);
	pipe = popen(command, "re");
	ASSERT_TRUE(pipe);
	(void)!fread(output, 1, capacity - 1, pipe);
	status = pclose(pipe);
	ASSERT_TRUE(WIFEXITED(status));
	*ret_output = output;
	return WEXITSTATUS(status);
}

static void expect(const char *argument, int status, const char *text)
{
	_cleanup_(freep) char *output = NULL;

	ASSERT_EQ(run_sample(argument, &output), status);
	ASSERT_CONTAINS(output, text);
}

TEST(result_of_each_end)
{
	expect("passes", 0, "ok passes\n1 passed, 0 failed, 0 skipped\n");
	expect("fails", 1, "sample_tests.c:15: 1 + 1 == 3: 2 and 3\n");
	expect("fails", 1, "FAIL fails: exit status 1\n0 passed, 1 failed, 0 skipped\n");
	expect("skips", 77, "skip skips: no moon here\n0 passed, 0 failed, 1 skipped\n");
	expect("crashes", 1, "FAIL crashes: signal 6 (Aborted)\n");
	expect("exits", 1, "FAIL exits: exit status 3\n");
	expect("leaks_a_descriptor", 1, "(/dev/null) was left open\n");
	expect("leaks_a_descriptor", 1, "FAIL leaks_a_descriptor: exit status 1\n");
	expect("closes_a_descriptor_late", 0, "ok closes_a_descriptor_late\n");
}

TEST(names_select)
{
	expect("passes skips", 0, "1 passed, 0 failed, 1 skipped\n");
	expect("fails passes", 1, "1 passed, 1 failed, 0 skipped\n");
	expect("passes nothing", 2, "no test has the name nothing\n");
	ASSERT_OK(unsetenv("BPS_TEST_TIER"));
	expect("--list", 0,
	       "passes\nfails\nskips\ncrashes\nexits\nleaks_a_descriptor\ncloses_a_descriptor_"
	       "late\nnever_ends\n"
	       "leaves_a_process\nleaves_files\nis_timed\n");
}

TEST(the_gate_leaves_out_the_full_tier)
{
	_cleanup_(freep) char *names = NULL;

	ASSERT_OK(setenv("BPS_TEST_TIER", "gate", 1));
	ASSERT_EQ(run_sample("--list", &names), 0);
	ASSERT_CONTAINS(names, "leaves_files\n");
	ASSERT_TRUE(!strstr(names, "is_timed"));
	expect("is_timed", 0, "ok is_timed\n1 passed, 0 failed, 0 skipped\n");
}

TEST(process_left_behind_fails_and_is_killed)
{
	_cleanup_(freep) char *output = NULL;
	int pid = 0;

	ASSERT_EQ(run_sample("leaves_a_process", &output), 1);
	ASSERT_CONTAINS(output, "FAIL leaves_a_process: left processes running\n");
	ASSERT_EQ(sscanf(output, "left %d", &pid), 1);
	/* Killed, though perhaps not yet reaped by whoever inherits it. */
	while (kill(pid, 0) == 0) {
		char path[64], line[256] = "";
		FILE *file;

		(void)snprintf(path, sizeof(path), "/proc/%d/stat", pid);
		file = fopen(path, "re");
		if (!file)
			break;
		(void)!fgets(line, sizeof(line), file);
		(void)fclose(file);
		if (strstr(line, ") Z ") || strstr(line, ") X "))
			break;
	}
}

static void expect_no_dir(const char *argument, int status, const char *text)
{
	_cleanup_(freep) char *output = NULL;
	char path[64];

	ASSERT_EQ(run_sample(argument, &output), status);
	ASSERT_CONTAINS(output, text);
	ASSERT_EQ(sscanf(output, "dir %63s", path), 1);
	ASSERT_TRUE(access(path, F_OK) < 0 && errno == ENOENT);
}

TEST(directory_is_removed_however_the_test_ends)
{
	expect_no_dir("leaves_files", 0, "ok leaves_files\n");
	expect_no_dir("never_ends", 1, "FAIL never_ends: time limit\n");
}
