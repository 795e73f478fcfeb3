/* Traces of errors at log level debug, folded outcomes, texts of failures. */
#include "base/error.h"
#include "base/log.h"
#include "test.h"
#include <fcntl.h>

static int born(void)
{
	return error_origin(-EPIPE);
}

static int passes(int r)
{
	return error_trace(r);
}

static int folds(int r)
{
	return error_fold(r);
}

TEST(values_pass_unchanged)
{
	ASSERT_EQ(born(), -EPIPE);
	ASSERT_EQ(passes(-ENOENT), -ENOENT);
	ASSERT_EQ(passes(0), 0);
	ASSERT_EQ(folds(0), 0);
	ASSERT_EQ(folds(-EIO), -EIO);
}

TEST(outcome_folds_to_an_error)
{
	ASSERT_EQ(folds(3), -ENOTRECOVERABLE);
}

TEST(trace_prints_the_path_at_debug_level_only)
{
	_cleanup_(fd_closep) int saved = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
	char text[1024];
	int fds[2];
	ssize_t n;

	ASSERT_OK(pipe2(fds, O_CLOEXEC | O_NONBLOCK));
	(void)dup2(fds[1], STDERR_FILENO);
	log_init(LOG_LEVEL_INFO);
	(void)passes(born());
	n = read(fds[0], text, sizeof(text));
	log_set_level(LOG_LEVEL_DEBUG);
	if (n < 0)
		(void)passes(born());
	(void)dup2(saved, STDERR_FILENO);
	ASSERT_EQ(n, -1);

	n = read(fds[0], text, sizeof(text) - 1);
	ASSERT_INT(n, >, 0);
	text[n] = '\0';
	ASSERT_CONTAINS(text, "in born() at ");
	ASSERT_CONTAINS(text, "in passes() at ");
	ASSERT_CONTAINS(text, "(Broken pipe)");
	ASSERT_CONTAINS(text, "test_error.c:");
	ASSERT_TRUE(!strstr(text, "../"));
	(void)fd_close(fds[0]);
	(void)fd_close(fds[1]);
}

TEST(failure_text_is_cut_to_fit)
{
	struct failure failure = { 0 };
	char name[1000];

	ASSERT_EQ(failure_set(&failure, -ETIMEDOUT, "rank %d is missing", 3), -ETIMEDOUT);
	ASSERT_EQ(failure.status, -ETIMEDOUT);
	ASSERT_STR(failure.text, "rank 3 is missing");

	memset(name, 'x', sizeof(name) - 1);
	name[sizeof(name) - 1] = '\0';
	(void)failure_set(&failure, -EINVAL, "%s", name);
	ASSERT_EQ(strlen(failure.text), sizeof(failure.text) - 1);
}
