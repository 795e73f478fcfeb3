/* Options from files and arguments, refusals and their words, reload, the sample file. */
#include "config.h"
#include "test.h"
#include <fcntl.h>

static struct config config;

static void load(const char *text, int expect, struct failure *failure)
{
	char path[] = "/tmp/bps-config-XXXXXX";
	int fd = mkstemp(path);

	ASSERT_TRUE(fd >= 0);
	ASSERT_EQ(write(fd, text, strlen(text)), strlen(text));
	close(fd);
	ASSERT_OK(config_init(&config));
	ASSERT_EQ(config_load(&config, path, failure), expect);
	unlink(path);
}

TEST(defaults_pass_the_check)
{
	struct failure failure = { 0 };

	ASSERT_OK(config_init(&config));
	ASSERT_OK(config_check(&config, &failure));
	ASSERT_STR(config.cluster, "single");
	ASSERT_EQ(config.part_size, 0);
	config_done(&config);
}

TEST(file_sets_every_type)
{
	struct failure failure = { 0 };

	load("# comment\nnode = a\nmax_jobs = 7\npart_size = 64K\nlease = 2m\nbandwidth = 25Gbit\n"
	     "log-level = debug\n",
	     0, &failure);
	ASSERT_STR(config.node, "a");
	ASSERT_EQ(config.max_jobs, 7);
	ASSERT_EQ(config.part_size, 65536);
	ASSERT_EQ(config.lease, 120000);
	ASSERT_EQ(config.bandwidth, 25000);
	ASSERT_STR(config.log_level, "debug");
	config_done(&config);
}

TEST(an_unknown_key_names_its_line_and_the_nearest)
{
	struct failure failure = { 0 };

	load("node = a\n\npart_sise = 64K\n", -ENOENT, &failure);
	ASSERT_CONTAINS(failure.text, ":3:");
	ASSERT_CONTAINS(failure.text, "part_sise");
	ASSERT_CONTAINS(failure.text, "did you mean part_size?");
	config_done(&config);
}

TEST(bad_values_are_refused_with_an_example)
{
	static const struct {
		const char *line, *word;
		int r;
	} cases[] = {
		{ "part_size = 4MB\n", "such as 4096", -EINVAL },
		{ "part_size = yes\n", "such as 4096", -EINVAL },
		{ "part_size = -1\n", "such as 4096", -EINVAL },
		{ "part_size = 1K\n", "between 4K and 64M", -ERANGE },
		{ "part_size = 99999999999999999999\n", "between", -ERANGE },
		{ "part_size = 65M\n", "between 4K and 64M", -ERANGE },
		{ "part_size = 99999999999T\n", "between", -ERANGE },
		/* 2^64 and 1M. */
		{ "part_size = 18014398509483008K\n", "between", -ERANGE },
		{ "max_jobs = 0\n", "between 1 and", -ERANGE },
		{ "lease = 5\n", "such as 500ms", -EINVAL },
		{ "bandwidth = 10Gb\n", "such as 100Mbit", -EINVAL },
		{ "cluster = etcd3\n", "single|static|coordinator", -EINVAL },
		{ "cluster = stat\n", "is not one of", -EINVAL },
		{ "cluster = single|static\n", "is not one of", -EINVAL },
		{ "socket =\n", "must not be empty", -EINVAL },
		{ "[daemon]\nnode = a\n", "no sections", -EINVAL },
		{ "node\n", "neither a comment", -EINVAL },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct failure failure = { 0 };

		load(cases[i].line, cases[i].r, &failure);
		ASSERT_CONTAINS(failure.text, cases[i].word);
		config_done(&config);
	}
}

TEST(a_missing_file_is_named)
{
	struct failure failure = { 0 };

	ASSERT_OK(config_init(&config));
	ASSERT_EQ(config_load(&config, "/nonexistent/bps.conf", &failure), -ENOENT);
	ASSERT_CONTAINS(failure.text, "/nonexistent/bps.conf");
	config_done(&config);
}

TEST(options_that_need_each_other_are_checked)
{
	static const char *const bad[] = {
		"roles = worker\n",
		"roles = ,\n",
		"cluster = coordinator\naddress = a:1\n",
		"cluster = coordinator\ncoordinator = c:2\n",
		"coordinator_listen = c:2\n",
		"tls_ca = /a\n",
	};

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		struct failure failure = { 0 };

		load(bad[i], 0, &failure);
		ASSERT_EQ(config_check(&config, &failure), -EINVAL);
		config_done(&config);
	}
}

TEST(reload_takes_live_options_and_names_the_others)
{
	struct failure failure = { 0 };
	struct config fresh;
	char restart[128];

	ASSERT_OK(config_init(&config));
	ASSERT_OK(config_init(&fresh));
	ASSERT_OK(config_set(&fresh, "log_level", "debug", &failure));
	ASSERT_OK(config_set(&fresh, "drain-timeout", "1s", &failure));
	ASSERT_OK(config_set(&fresh, "lanes", "3", &failure));
	ASSERT_OK(config_reload(&config, &fresh, restart, sizeof(restart)));
	ASSERT_STR(restart, "lanes");
	ASSERT_STR(config.log_level, "debug");
	ASSERT_EQ(config.drain_timeout, 1000);
	ASSERT_EQ(config.lanes, 1);
	config_done(&config);
	config_done(&fresh);
}

/* The sample, with its comment marks taken off, is a file that sets every default to itself. */
TEST(the_sample_is_a_valid_file)
{
	char path[] = "/tmp/bps-sample-XXXXXX", line[512], restart[512];
	int fd = mkstemp(path);
	FILE *sample = tmpfile(), *file = fdopen(fd, "w");
	struct failure failure = { 0 };
	struct config fresh;

	ASSERT_TRUE(sample && file);
	config_print_sample(sample);
	rewind(sample);
	while (fgets(line, sizeof(line), sample)) {
		bool is_option = line[0] == '#' && line[1] != ' ';

		fputs(is_option ? line + 1 : line, file);
	}
	fclose(sample);
	fclose(file);
	ASSERT_OK(config_init(&config));
	ASSERT_OK(config_init(&fresh));
	ASSERT_OK(config_load(&fresh, path, &failure));
	ASSERT_OK(config_reload(&config, &fresh, restart, sizeof(restart)));
	ASSERT_STR(restart, "");
	unlink(path);
	config_done(&config);
	config_done(&fresh);
}
