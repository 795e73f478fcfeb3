/* Options: a file of them, and the same bytes as KEY=VALUE of the command line. */
#include "config.h"
#include "fuzz.h"
#include <sys/mman.h>

static void set_pair(struct config *config, const uint8_t *data, size_t size)
{
	struct failure failure = { 0 };
	char *pair = strndup((const char *)data, size), *equals;
	int r;

	FUZZ_CHECK(pair);
	equals = strchr(pair, '=');
	if (equals) {
		*equals = 0;
		r = config_set(config, pair, equals + 1, &failure);
		FUZZ_CHECK(r == 0 || (failure.status == r && *failure.text));
	}
	free(pair);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct failure failure = { 0 };
	struct config config, fresh;
	char path[64], restart[64];
	int fd = memfd_create("config", MFD_CLOEXEC), r;

	FUZZ_CHECK(fd >= 0 && (size == 0 || write(fd, data, size) == (ssize_t)size));
	(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	FUZZ_CHECK(config_init(&config) == 0 && config_init(&fresh) == 0);
	r = config_load(&config, path, &failure);
	/* What is wrong is said with file and line, and what was set before it stands. */
	FUZZ_CHECK(r == 0 || (failure.status == r && strstr(failure.text, path)));
	set_pair(&config, data, size);
	(void)config_check(&config, &failure);
	FUZZ_CHECK(config_reload(&fresh, &config, restart, sizeof(restart)) == 0);
	FUZZ_CHECK(memchr(restart, 0, sizeof(restart)));
	config_done(&config);
	config_done(&fresh);
	(void)close(fd);
	return 0;
}
