#include "base/log.h"
#include "test.h"
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>

/* stderr for as long as lines are being caught; asserts come after log_release(), so that they are seen. */
static int log_saved_stderr = -1;

static void log_catch(int fd)
{
	log_saved_stderr = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
	(void)dup2(fd, STDERR_FILENO);
}

static void log_release(void)
{
	(void)dup2(log_saved_stderr, STDERR_FILENO);
	log_saved_stderr = fd_close(log_saved_stderr);
}

static void log_open_pipe(int fds[static 2])
{
	ASSERT_OK(pipe2(fds, O_CLOEXEC));
	ASSERT_OK(fcntl(fds[0], F_SETFL, O_NONBLOCK));
}

static void close_both(int fds[static 2])
{
	fds[0] = fd_close(fds[0]);
	fds[1] = fd_close(fds[1]);
}

/* Reads what there is, up to size - 1 bytes, and ends it with 0. */
static size_t read_all(int fd, char *text, size_t size)
{
	size_t len = 0;
	ssize_t n;

	while (len < size - 1 && (n = read(fd, text + len, size - 1 - len)) > 0)
		len += (size_t)n;
	text[len] = '\0';
	return len;
}

TEST(levels_by_name)
{
	static const char *const names[] = { "error", "warning", "notice", "info", "debug" };
	int level = -1;

	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		ASSERT_OK(log_level_parse(names[i], &level));
		ASSERT_EQ(level, LOG_LEVEL_ERROR + (int)i);
	}
	ASSERT_EQ(log_level_parse("loud", &level), -EINVAL);
	ASSERT_EQ(log_level_parse("", &level), -EINVAL);
	ASSERT_EQ(level, LOG_LEVEL_DEBUG);
}

TEST(line_has_time_level_and_text)
{
	char text[512];
	int fds[2], year, n = 0;

	log_open_pipe(fds);
	log_catch(fds[1]);
	log_init(LOG_LEVEL_NOTICE);
	errno = ENOTTY;
	log_warning("peer %s: gone", "10.0.3.7");
	log_info("below the level");
	log_release();
	ASSERT_EQ(errno, ENOTTY);

	(void)read_all(fds[0], text, sizeof(text));
	ASSERT_EQ(sscanf(text, "%d-%*d-%*d %*d:%*d:%*d.%*d warning: peer 10.0.3.7: gone%n", &year,
			 &n),
		  1);
	ASSERT_INT(n, >, 0);
	ASSERT_STR(text + n, "\n");
	close_both(fds);
}

TEST(journal_gets_the_priority)
{
	char text[512], stream[64];
	struct stat st;
	int fds[2];

	ASSERT_OK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds));
	ASSERT_OK(fstat(fds[1], &st));
	(void)snprintf(stream, sizeof(stream), "%ju:%ju", (uintmax_t)st.st_dev,
		       (uintmax_t)st.st_ino);
	ASSERT_OK(setenv("JOURNAL_STREAM", stream, 1));
	log_catch(fds[1]);
	log_init(LOG_LEVEL_INFO);
	log_notice("node joined");
	log_release();

	(void)read_all(fds[0], text, sizeof(text));
	ASSERT_STR(text, "<5>node joined\n");
	close_both(fds);
}

TEST(journal_of_another_stream_is_no_journal)
{
	static const char *const streams[] = { "1:1", "", "x", "1", "1:1:1" };
	char text[512];
	int fds[2];

	log_open_pipe(fds);
	for (size_t i = 0; i < ARRAY_SIZE(streams); i++) {
		ASSERT_OK(setenv("JOURNAL_STREAM", streams[i], 1));
		log_catch(fds[1]);
		log_init(LOG_LEVEL_INFO);
		log_notice("node joined");
		log_release();
		(void)read_all(fds[0], text, sizeof(text));
		ASSERT_CONTAINS(text, " notice: node joined\n");
	}
	close_both(fds);
}

TEST(text_from_outside_forges_no_line)
{
	char text[512];
	int fds[2];

	log_open_pipe(fds);
	log_catch(fds[1]);
	log_init(LOG_LEVEL_INFO);
	log_error("job \"%s\": refused", "a\n<0>b\x1b[2J\x7f\xc3\xa4");
	log_release();
	(void)read_all(fds[0], text, sizeof(text));
	ASSERT_CONTAINS(text, "job \"a?<0>b?[2J?\xc3\xa4\": refused\n");
	close_both(fds);
}

TEST(long_line_is_cut_and_ended)
{
	char text[8192], name[6000];
	size_t len;
	int fds[2];

	memset(name, 'x', sizeof(name) - 1);
	name[sizeof(name) - 1] = '\0';
	log_open_pipe(fds);
	log_catch(fds[1]);
	log_init(LOG_LEVEL_INFO);
	log_error("%s", name);
	log_release();
	len = read_all(fds[0], text, sizeof(text));
	ASSERT_INT(len, >, 1000);
	ASSERT_INT(len, <=, 4096);
	ASSERT_EQ(text[len - 1], '\n');
	ASSERT_EQ(text[len - 2], 'x');
	close_both(fds);
}

/* Logs until well past what the reader's buffer holds; a logger that waits for the reader hits the time limit. */
static void log_stuck_reader(int fds[static 2])
{
	static char text[4 << 20];
	unsigned long long dropped = 0;
	unsigned n_lines = 0, n_posted = 50000;
	const char *line;

	log_catch(fds[1]);
	log_init(LOG_LEVEL_INFO);
	for (unsigned i = 0; i < n_posted; i++)
		log_info("line");
	log_release();
	(void)read_all(fds[0], text, sizeof(text));
	for (line = text; (line = strstr(line, "info: line\n")); line++)
		n_lines++;
	ASSERT_INT(n_lines, >, 0);
	ASSERT_INT(n_lines, <, n_posted);

	log_catch(fds[1]);
	log_info("again");
	log_release();
	(void)read_all(fds[0], text, sizeof(text));
	line = strstr(text, "dropped ");
	ASSERT_TRUE(line);
	ASSERT_EQ(sscanf(line, "dropped %llu lines", &dropped), 1);
	ASSERT_EQ(dropped + n_lines, n_posted);
	ASSERT_CONTAINS(line, " info: again\n");
}

TEST(stuck_pipe_drops_and_counts)
{
	int fds[2];

	log_open_pipe(fds);
	log_stuck_reader(fds);
	close_both(fds);
}

TEST(stuck_socket_drops_and_counts)
{
	int fds[2];

	ASSERT_OK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds));
	ASSERT_OK(fcntl(fds[0], F_SETFL, O_NONBLOCK));
	log_stuck_reader(fds);
	close_both(fds);
}

TEST(reader_that_left_does_not_kill)
{
	int fds[2];

	log_open_pipe(fds);
	fds[0] = fd_close(fds[0]);
	log_catch(fds[1]);
	log_init(LOG_LEVEL_INFO);
	log_info("to nobody"); /* SIGPIPE would end this process */
	log_release();
	close_both(fds);
	ASSERT_OK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds));
	fds[0] = fd_close(fds[0]);
	log_catch(fds[1]);
	log_init(LOG_LEVEL_INFO);
	log_info("to nobody");
	log_release();
	close_both(fds);
}

TEST(file_takes_lines)
{
	char text[512], path[128];
	int fd;

	(void)snprintf(path, sizeof(path), "%s/log", test_dir());
	fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	ASSERT_INT(fd, >=, 0);
	log_catch(fd);
	log_init(LOG_LEVEL_DEBUG);
	log_debug("one");
	log_error("two");
	log_release();
	(void)lseek(fd, 0, SEEK_SET);
	(void)read_all(fd, text, sizeof(text));
	ASSERT_CONTAINS(text, " debug: one\n");
	ASSERT_CONTAINS(text, " error: two\n");
	(void)fd_close(fd);
}
