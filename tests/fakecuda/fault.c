/*
 * Faults, delays and traces, asked for by the environment and read once:
 *
 *   FAKECUDA_FAIL       POINT:NTH:WHAT[,...]. POINT: a function ("cuMemAlloc", "ncclAllReduce") or an operation when its
 *                       turn in a stream has come ("@copy", "@set", "@wait", "@write", "@call", "@record"). NTH: which
 *                       call in this process, from 1; 0: each. WHAT: a number that the call returns (or that sticks to
 *                       the stream's context), "kill" (SIGKILL) or "hang".
 *   FAKECUDA_FAIL_FILE  a file that holds such a list, read by each process at its first call, if it is there. Its faults
 *                       happen once in all processes: to the one that removes the file.
 *   FAKECUDA_DELAY_US   each operation in a stream is held up by up to so many microseconds, at random
 *   FAKECUDA_TRACE      calls are written to stderr
 */
#include "fake.h"

#include <signal.h>
#include <time.h>

#define FAULTS_MAX 16
enum { FAULT_KILL = -1, FAULT_HANG = -2 };

struct fault {
	char point[48];
	unsigned long nth;
	int what;
	bool once; /* in all processes */
	_Atomic unsigned long calls;
};

static struct {
	pthread_once_t once;
	struct fault faults[FAULTS_MAX];
	size_t n_faults;
	const char *file; /* of faults that happen once */
	unsigned long delay_us;
	bool trace;
} setup = { .once = PTHREAD_ONCE_INIT };

static void parse_fault(char *text, bool once)
{
	struct fault *fault = &setup.faults[setup.n_faults];
	char *save = NULL, *point = strtok_r(text, ":", &save), *nth = strtok_r(NULL, ":", &save),
	     *what = strtok_r(NULL, ":", &save), *end;

	if (!point || !nth || !what || setup.n_faults == FAULTS_MAX ||
	    strlen(point) >= sizeof(fault->point)) {
		fprintf(stderr,
			"fakecuda: FAKECUDA_FAIL is not of the form POINT:NTH:WHAT[,...]\n");
		abort();
	}
	strcpy(fault->point, point);
	fault->once = once;
	fault->nth = strtoul(nth, NULL, 10);
	if (!strcmp(what, "kill")) {
		fault->what = FAULT_KILL;
	} else if (!strcmp(what, "hang")) {
		fault->what = FAULT_HANG;
	} else {
		fault->what = (int)strtol(what, &end, 10);
		if (*end || fault->what <= 0) {
			fprintf(stderr, "fakecuda: FAKECUDA_FAIL: %s is no number, kill or hang\n",
				what);
			abort();
		}
	}
	setup.n_faults++;
}

static void parse_faults(char *list, bool once)
{
	char *save = NULL;

	for (char *one = strtok_r(list, ",\n", &save); one; one = strtok_r(NULL, ",\n", &save))
		parse_fault(one, once);
}

static void read_file(const char *path)
{
	FILE *file = fopen(path, "re");
	char list[512];
	size_t len;

	if (!file)
		return;
	len = fread(list, 1, sizeof(list) - 1, file);
	(void)fclose(file);
	list[len] = 0;
	setup.file = path;
	parse_faults(list, true);
}

static void read_environment(void)
{
	const char *fail = getenv("FAKECUDA_FAIL"), *delay = getenv("FAKECUDA_DELAY_US"),
		   *file = getenv("FAKECUDA_FAIL_FILE");
	char *copy;

	setup.trace = getenv("FAKECUDA_TRACE") != NULL;
	setup.delay_us = delay ? strtoul(delay, NULL, 10) : 0;
	if (fail) {
		copy = strdup(fail);
		if (!copy)
			abort();
		parse_faults(copy, false);
		free(copy);
	}
	if (file)
		read_file(file);
}

/* "cuMemAlloc_v2" is "cuMemAlloc" to who asks for faults. */
static bool is_point(const struct fault *fault, const char *point)
{
	size_t len = strlen(fault->point);

	return !strncmp(point, fault->point, len) &&
	       (!point[len] || (point[len] == '_' && point[len + 1] == 'v'));
}

CUresult fakecuda_fault(const char *point)
{
	unsigned long call;

	pthread_once(&setup.once, read_environment);
	for (size_t i = 0; i < setup.n_faults; i++) {
		struct fault *fault = &setup.faults[i];

		if (!is_point(fault, point))
			continue;
		call = atomic_fetch_add(&fault->calls, 1) + 1;
		if (fault->nth && call != fault->nth)
			continue;
		if (fault->once && unlink(setup.file))
			continue;
		if (setup.trace)
			fprintf(stderr, "fakecuda %d: fault at %s, call %lu\n", (int)getpid(),
				point, call);
		if (fault->what == FAULT_KILL)
			(void)raise(SIGKILL);
		while (fault->what == FAULT_HANG)
			pause();
		return (CUresult)fault->what;
	}
	return CUDA_SUCCESS;
}

bool fake_is_sticky(CUresult error)
{
	switch ((int)error) {
	case CUDA_ERROR_ECC_UNCORRECTABLE:
	case CUDA_ERROR_ILLEGAL_ADDRESS:
	case CUDA_ERROR_LAUNCH_TIMEOUT:
	case CUDA_ERROR_LAUNCH_FAILED:
	case CUDA_ERROR_MPS_CLIENT_TERMINATED:
	case CUDA_ERROR_CONTEXT_IS_DESTROYED:
	case CUDA_ERROR_UNKNOWN:
		return true;
	}
	return false;
}

void fake_poison(CUcontext context, CUresult error)
{
	int none = 0;

	(void)atomic_compare_exchange_strong(&context->sticky, &none, (int)error);
}

void fakecuda_trace(const char *function)
{
	pthread_once(&setup.once, read_environment);
	if (setup.trace)
		fprintf(stderr, "fakecuda %d: %s\n", (int)getpid(), function);
}

void fake_delay(void)
{
	static _Atomic uint32_t state = 2463534242u;
	struct timespec time = { 0 };
	uint32_t x;

	pthread_once(&setup.once, read_environment);
	if (!setup.delay_us)
		return;
	x = atomic_fetch_add(&state, 2654435769u);
	x ^= x >> 16;
	x *= 0x45d9f3bu;
	x ^= x >> 16;
	time.tv_nsec = (long)(x % (setup.delay_us + 1)) * 1000;
	(void)nanosleep(&time, NULL);
}
