/*
 * Runs a fuzz target over the files of a folder, so that every target is a test with any compiler: each file as it is,
 * every shorter beginning of it, and with each of its bytes turned over; with a BPS_TEST_TIER other than full CUTS_GATE of each at most, evenly.
 *
 *	PROGRAM DIRECTORY
 */
#include "fuzz.h"
#include <dirent.h>
#include <stdio.h>

#define INPUT_MAX (1u << 20)
#define CUTS_MAX  4096 /* longer inputs are run whole only */
#define CUTS_GATE 64u

/* In memory of exactly this size, so that a sanitizer sees a read past the end. */
static int run_bytes(const uint8_t *data, size_t len, size_t flip)
{
	_cleanup_(freep) uint8_t *copy = malloc(MAX(len, (size_t)1));

	if (!copy)
		return -ENOMEM;
	memcpy(copy, data, len);
	if (flip < len)
		copy[flip] ^= 0xff;
	(void)LLVMFuzzerTestOneInput(copy, len);
	return 0;
}

static int run_file(const char *directory, const char *name)
{
	_cleanup_(freep) uint8_t *data = malloc(INPUT_MAX);
	_cleanup_(freep) char *path = NULL;
	FILE *file;
	const char *tier = getenv("BPS_TEST_TIER");
	size_t len, step;
	int r;

	if (!data || asprintf(&path, "%s/%s", directory, name) < 0)
		return -ENOMEM;
	file = fopen(path, "re");
	if (!file)
		return -errno;
	len = fread(data, 1, INPUT_MAX, file);
	(void)fclose(file);

	r = run_bytes(data, len, SIZE_MAX);
	step = tier && strcmp(tier, "full") ? 1 + len / CUTS_GATE : 1;
	for (size_t i = 0; !r && len <= CUTS_MAX && i < len; i += step) {
		r = run_bytes(data, i, SIZE_MAX);
		if (!r)
			r = run_bytes(data, len, i);
	}
	return r;
}

int main(int argc, char **argv)
{
	unsigned n_passed = 0;
	struct dirent *entry;
	DIR *dir;

	dir = argc == 2 ? opendir(argv[1]) : NULL;
	if (!dir) {
		fprintf(stderr, "usage: %s DIRECTORY\n", argv[0]);
		return 2;
	}
	while ((entry = readdir(dir))) {
		int r;

		if (entry->d_name[0] == '.')
			continue;
		r = run_file(argv[1], entry->d_name);
		if (r) {
			fprintf(stderr, "%s: %s\n", entry->d_name, strerror(-r));
			return 1;
		}
		n_passed++;
	}
	(void)closedir(dir);
	printf("%u passed, 0 failed, 0 skipped\n", n_passed);
	return n_passed ? 0 : 1; /* an empty corpus tests nothing */
}
