/*
 * Log lines as their readers get them: a file, a pipe, a socket, the journal, readers that are slow
 * or gone.
 */
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

static void log_from_here(unsigned i)
{
	log_info("trainer %u is wrong", i);
}

static unsigned n_lines_in(const char *text)
{
	unsigned n = 0;

	for (; (text = strchr(text, '\n')); text++)
		n++;
	return n;
}

TEST(place_that_logs_often_leaves_the_log_to_others)
{
	const unsigned n_wanted = 5000;
	static char text[1 << 20];
	char path[128];
	uint64_t began_ns, took_ns;
	unsigned n_lines;
	int fd;

	(void)snprintf(path, sizeof(path), "%s/log", test_dir());
	fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	ASSERT_INT(fd, >=, 0);
	log_catch(fd);
	log_init(LOG_LEVEL_DEBUG);
	began_ns = clock_now_ns();
	for (unsigned i = 0; i < n_wanted; i++)
		log_from_here(i);
	took_ns = clock_now_ns() - began_ns;
	log_info("another place");
	log_release();

	(void)lseek(fd, 0, SEEK_SET);
	(void)read_all(fd, text, sizeof(text));
	ASSERT_CONTAINS(text, " info: trainer 0 is wrong\n");
	ASSERT_CONTAINS(text, " info: another place\n");
	n_lines = n_lines_in(text) - 1;
	ASSERT_INT(n_lines, >=, LOG_BURST);
	/* One more for each interval that has passed, and one that tells of those that were left out. */
	ASSERT_INT(n_lines, <=, LOG_BURST + 2 * (took_ns / LOG_INTERVAL_NS + 1));
	(void)fd_close(fd);
}

TEST(lines_left_out_are_counted)
{
	struct log_place place = { 0 };
	unsigned n_omitted = 0;
	char text[512], said[64];
	int fds[2];

	log_open_pipe(fds);
	log_catch(fds[1]);
	log_init(LOG_LEVEL_INFO);
	ASSERT_TRUE(!log_passes(&place, LOG_LEVEL_DEBUG));
	ASSERT_EQ(place.due_ns, 0);
	place.due_ns = CLOCK_NEVER / 2; /* all that it may say for long, it has said */
	for (; n_omitted < 7; n_omitted++)
		ASSERT_TRUE(!log_passes(&place, LOG_LEVEL_INFO));
	place.due_ns = 0; /* long ago */
	ASSERT_TRUE(log_passes(&place, LOG_LEVEL_INFO));
	ASSERT_TRUE(log_passes(&place, LOG_LEVEL_INFO));
	log_release();
	(void)read_all(fds[0], text, sizeof(text));
	(void)snprintf(said, sizeof(said), " info: log: left out %u lines like the next\n",
		       n_omitted);
	ASSERT_CONTAINS(text, said);
	ASSERT_EQ(n_lines_in(text), 1);
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
		log_line(LOG_LEVEL_INFO, "line");
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
