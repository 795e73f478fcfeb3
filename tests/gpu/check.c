/*
 * The runner of gpu-rules and gpu-trainer: main(), a process for each rule, a peer process,
 * patterns and flags in memory.
 */
#include "check.h"

#include "daemon/gpu/nccl_abi.h"
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

#define SEEN_FD 3 /* of a rule's process: where it says what it has seen */

const struct cuda *cu;

#ifdef __SANITIZE_THREAD__
/* Each of the many processes would sleep for a second at its end. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void)
{
	return "atexit_sleep_ms=0";
}
#endif

/* -- In the process of a rule --------------------------------------------------------------------------------- */

void seen(const char *format, ...)
{
	char text[160];
	va_list args;
	int len;

	va_start(args, format);
	len = vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	if (write(SEEN_FD, text, (size_t)MIN(len, (int)sizeof(text) - 1)) < 0)
		_exit(1);
	_exit(0);
}

void check_call(const char *call, CUresult result)
{
	if (result)
		seen("%.60s: %s", call, name_of(result));
}

void check_true(const char *what, bool is_true)
{
	if (!is_true)
		seen("not %.100s", what);
}

const char *name_of(CUresult result)
{
	return cuda_error_name(cu, result);
}

CUcontext start(int device)
{
	CUcontext context;
	const char *reason;

	if (!cu && cuda_load(&cu, &reason))
		seen("%s", reason);
	CU(cuInit(0));
	CU(cuDevicePrimaryCtxRetain(&context, device));
	CU(cuCtxSetCurrent(context));
	return context;
}

void *pinned(size_t len)
{
	void *p;

	CU(cuMemHostAlloc(&p, len, 0));
	return p;
}

static unsigned char byte_of(size_t i, unsigned seed)
{
	return (unsigned char)(i * 31 + (i >> 8) * 7 + seed);
}

void pattern_put(CUdeviceptr ptr, size_t len, unsigned seed)
{
	unsigned char *host = pinned(len);

	for (size_t i = 0; i < len; i++)
		host[i] = byte_of(i, seed);
	CU(cuMemcpyHtoDAsync(ptr, host, len, NULL));
	CU(cuStreamSynchronize(NULL));
	CU(cuMemFreeHost(host));
}

CUdeviceptr pattern_new(size_t len, unsigned seed)
{
	CUdeviceptr ptr;

	CU(cuMemAlloc(&ptr, len));
	pattern_put(ptr, len, seed);
	return ptr;
}

bool pattern_is(CUdeviceptr ptr, size_t len, unsigned seed)
{
	unsigned char *host = pinned(len);
	bool is = true;

	CU(cuMemcpyDtoHAsync(host, ptr, len, NULL));
	CU(cuStreamSynchronize(NULL));
	for (size_t i = 0; i < len; i++)
		is = is && host[i] == byte_of(i, seed);
	CU(cuMemFreeHost(host));
	return is;
}

uint32_t *flags_map(int fd, CUdeviceptr *ret_device)
{
	uint32_t *flags = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	CHECK(flags != MAP_FAILED);
	CU(cuMemHostRegister(flags, 4096,
			     CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_PORTABLE));
	CU(cuMemHostGetDevicePointer(ret_device, flags, 0));
	return flags;
}

uint32_t *flags_new(CUdeviceptr *ret_device, int *ret_fd)
{
	int fd = memfd_create("gpu-check", MFD_CLOEXEC);

	CHECK(fd >= 0 && !ftruncate(fd, 4096));
	if (ret_fd)
		*ret_fd = fd;
	return flags_map(fd, ret_device);
}

void flag_set(uint32_t *flag, uint32_t value)
{
	__atomic_store_n(flag, value, __ATOMIC_RELEASE);
}

uint32_t flag_get(const uint32_t *flag)
{
	return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}

static uint64_t now_ms(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * 1000 + (uint64_t)time.tv_nsec / 1000000;
}

bool comes_to_end(CUstream stream)
{
	uint64_t until = now_ms() + RULE_S * 500;
	CUresult r;

	while ((r = cu->cuStreamQuery(stream)) == CUDA_ERROR_NOT_READY) {
		if (now_ms() > until)
			return false;
		usleep(1000);
	}
	check_call("cuStreamQuery()", r);
	return true;
}

/* -- Two processes -------------------------------------------------------------------------------------------- */

pid_t peer_new(void (*run)(int fd), int *ret_fd)
{
	int pair[2];
	pid_t pid;

	CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		close(pair[0]);
		run(pair[1]);
		_exit(0);
	}
	close(pair[1]);
	*ret_fd = pair[0];
	return pid;
}

void peer_kill(pid_t pid)
{
	(void)kill(pid, SIGKILL);
	(void)waitpid(pid, NULL, 0);
}

union control {
	struct cmsghdr header;
	char space[CMSG_SPACE(sizeof(int))];
};

void tell(int fd, const struct note *note, int passed)
{
	union control control = { 0 };
	struct iovec iov = { (void *)note, sizeof(*note) };
	struct msghdr message = { .msg_iov = &iov, .msg_iovlen = 1 };

	if (passed >= 0) {
		message.msg_control = &control;
		message.msg_controllen = sizeof(control);
		control.header = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)),
						   .cmsg_level = SOL_SOCKET,
						   .cmsg_type = SCM_RIGHTS };
		memcpy(CMSG_DATA(&control.header), &passed, sizeof(passed));
	}
	CHECK(sendmsg(fd, &message, MSG_NOSIGNAL) == (ssize_t)sizeof(*note));
}

int hear(int fd, struct note *ret_note)
{
	union control control = { 0 };
	struct iovec iov = { ret_note, sizeof(*ret_note) };
	struct msghdr message = { .msg_iov = &iov,
				  .msg_iovlen = 1,
				  .msg_control = &control,
				  .msg_controllen = sizeof(control) };
	int passed = -1;

	/* Its other end has said what it saw, or died. */
	if (recvmsg(fd, &message, MSG_CMSG_CLOEXEC) != (ssize_t)sizeof(*ret_note))
		_exit(1);
	if (message.msg_controllen >= CMSG_LEN(sizeof(int)))
		memcpy(&passed, CMSG_DATA(&control.header), sizeof(passed));
	return passed;
}

/* -- Running them --------------------------------------------------------------------------------------------- */

/*
 * The end of a process that was killed. One that the driver does not let go of is left to the system: nothing may hang here.
 */
static void reap(pid_t pid)
{
	uint64_t until = now_ms() + 5000;

	while (!waitpid(pid, NULL, WNOHANG) && now_ms() < until)
		usleep(1000);
}

/* Runs the rule in a process group of its own, for at most limit_ms, and fills text with what it has seen. */
static void run_rule(const struct rule *rule, int limit_ms, char *text, size_t len)
{
	struct pollfd pollfd = { .events = POLLIN };
	ssize_t n = 0;
	int pipes[2];
	pid_t pid;

	if (pipe2(pipes, O_CLOEXEC))
		abort();
	pid = fork();
	if (pid < 0)
		abort();
	if (!pid) {
		(void)setpgid(0, 0);
		if (dup2(pipes[1], SEEN_FD) < 0)
			_exit(1);
		rule->run();
		_exit(1);
	}
	(void)setpgid(pid, pid);
	close(pipes[1]);
	pollfd.fd = pipes[0];
	if (poll(&pollfd, 1, limit_ms) == 1)
		n = read(pipes[0], text, len - 1);
	else
		n = -1;
	if (n <= 0)
		snprintf(text, len, n ? "no answer in %d s" : "it died", limit_ms / 1000);
	else
		text[n] = '\0';
	(void)kill(-pid, SIGKILL);
	reap(pid);
	close(pipes[0]);
}

/* A process of its own asks, so that the runner never touches CUDA. */
struct machine {
	int n_devices, version;
	char name[96];
	char reason[160];
};

static void look(struct machine *machine)
{
	const char *reason;
	CUdevice device;
	CUresult r;

	if (cuda_load(&cu, &reason)) {
		snprintf(machine->reason, sizeof(machine->reason), "%s", reason);
		return;
	}
	r = cu->cuInit(0);
	if (!r)
		r = cu->cuDeviceGetCount(&machine->n_devices);
	if (r) {
		snprintf(machine->reason, sizeof(machine->reason), "cuInit(): %s", name_of(r));
		return;
	}
	if (cu->cuDriverGetVersion(&machine->version) || cu->cuDeviceGet(&device, 0) ||
	    cu->cuDeviceGetName(machine->name, sizeof(machine->name), device))
		snprintf(machine->reason, sizeof(machine->reason), "the first device has no name");
}

static void find_machine(struct machine *ret_machine)
{
	struct machine *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
				      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	int pipes[2];
	pid_t pid;

	if (shared == MAP_FAILED)
		abort();
	if (pipe2(pipes, O_CLOEXEC))
		abort();
	pid = fork();
	if (!pid) {
		look(shared);
		_exit(0);
	}
	close(pipes[1]);
	/* Hangs up at its end. */
	if (poll(&(struct pollfd){ .fd = pipes[0] }, 1, RULE_S * 1000) != 1)
		snprintf(shared->reason, sizeof(shared->reason),
			 "the driver does not answer within %d s", RULE_S);
	close(pipes[0]);
	(void)kill(pid, SIGKILL);
	reap(pid);
	*ret_machine = *shared;
	(void)munmap(shared, sizeof(*shared));
}

static void json_string(FILE *json, const char *text)
{
	fputc('"', json);
	for (; *text; text++)
		if (*text == '"' || *text == '\\')
			fprintf(json, "\\%c", *text);
		else if ((unsigned char)*text >= ' ')
			fputc(*text, json);
	fputc('"', json);
}

static void report_time(FILE *json, const struct rule *rule, const char *text, bool first)
{
	printf("%-24s %-58s %s\n", rule->name, rule->asks, text);
	fflush(stdout);
	if (!json)
		return;
	fprintf(json, "%s\n    { \"time\": ", first ? "" : ",");
	json_string(json, rule->name);
	fprintf(json, ", \"of\": ");
	json_string(json, rule->asks);
	fprintf(json, ", \"seen\": ");
	json_string(json, text);
	fprintf(json, " }");
}

/* What the rule is assumed to see here. */
static const char *assumed_of(const struct rule *rule, bool is_double)
{
	return is_double || !rule->driver ? rule->assumed : rule->driver;
}

static void report(FILE *json, const struct rule *rule, const char *text, const char *assumed,
		   bool first)
{
	bool same = !strcmp(text, assumed);

	printf("%-24s %-58s %-28s %s%s\n", rule->name, rule->asks, text,
	       same ? "as assumed" : (rule->needed ? "FAILS, assumed: " : "differs, assumed: "),
	       same ? "" : assumed);
	fflush(stdout);
	if (!json)
		return;
	fprintf(json, "%s\n    { \"rule\": ", first ? "" : ",");
	json_string(json, rule->name);
	fprintf(json, ", \"asks\": ");
	json_string(json, rule->asks);
	fprintf(json, ", \"assumed\": ");
	json_string(json, assumed);
	fprintf(json, ", \"seen\": ");
	json_string(json, text);
	fprintf(json, ", \"needed\": %s, \"same\": %s }", rule->needed ? "true" : "false",
		same ? "true" : "false");
}

static bool is_wanted(const struct rule *rule, char **names)
{
	if (!*names)
		return true;
	for (; *names; names++)
		if (!strcmp(*names, rule->name))
			return true;
	return false;
}

static const char usage[] =
	"usage: %s [--double | --times] [--json FILE] [--seconds N] [RULE...]\n"
	"Asks the CUDA driver of this machine, or a daemon on it, what is "
	"assumed. 77: there is no GPU.\n"
	"  --double     it is the test double, which must do all as assumed\n"
	"  --times      how fast copies are instead\n"
	"  --json FILE  writes what was seen there too\n"
	"  --seconds N  ends by then: rules that there is no time for are left out\n";

struct options {
	bool is_double, times;
	uint64_t until_ms;
	FILE *json;
	char **names;
};

static bool read_options(struct options *options, char **argv)
{
	for (argv++; *argv && **argv == '-'; argv++) {
		if (!strcmp(*argv, "--double")) {
			options->is_double = true;
		} else if (!strcmp(*argv, "--times")) {
			options->times = true;
		} else if (!strcmp(*argv, "--seconds") && argv[1]) {
			options->until_ms = now_ms() + strtoul(*++argv, NULL, 10) * 1000;
		} else if (!strcmp(*argv, "--json") && argv[1]) {
			options->json = fopen(*++argv, "we");
			if (!options->json) {
				fprintf(stderr, "%s: %s: %s\n", check_program.name, *argv,
					strerror(errno));
				return false;
			}
		} else {
			fprintf(stderr, usage, check_program.name);
			return false;
		}
	}
	options->names = argv;
	/* Nothing that the double takes says how long anything takes. */
	if (options->is_double && options->times) {
		fprintf(stderr, usage, check_program.name);
		return false;
	}
	return true;
}

struct counts {
	int seen, failed, differ, skipped;
};

static void ask(const struct options *options, const struct machine *machine,
		const struct rule *rule, struct counts *counts)
{
	int limit_ms = RULE_S * 1000;
	char text[256];

	if (!is_wanted(rule, options->names))
		return;
	if (rule->n_devices > machine->n_devices) {
		printf("%-24s skipped: it takes %d devices\n", rule->name, rule->n_devices);
		counts->skipped++;
		return;
	}
	if (options->until_ms) {
		uint64_t now = now_ms(), left = options->until_ms - MIN(now, options->until_ms);

		/* With some for who has to be waited for. */
		limit_ms = (int)MIN((uint64_t)limit_ms, left > 5000 ? left - 5000 : 0);
		if (limit_ms < 1000) {
			printf("%-24s left out: there is no time for it\n", rule->name);
			counts->skipped++;
			return;
		}
	}
	run_rule(rule, limit_ms, text, sizeof(text));
	if (rule->assumed) {
		const char *assumed = assumed_of(rule, options->is_double);
		bool same = !strcmp(text, assumed);

		report(options->json, rule, text, assumed, !counts->seen);
		counts->failed += !same && (rule->needed || options->is_double);
		counts->differ += !same && !rule->needed && !options->is_double;
	} else {
		report_time(options->json, rule, text, !counts->seen);
	}
	counts->seen++;
}

int main(int argc, char **argv)
{
	struct options options = { 0 };
	struct counts counts = { 0 };
	struct machine machine;

	if (!read_options(&options, argv))
		return 2;
	/* So that no rule's process gets its number for another. */
	if (fcntl(SEEN_FD, F_GETFD) < 0 && open("/dev/null", O_RDONLY | O_CLOEXEC) < 0)
		return 2;
	find_machine(&machine);
	if (machine.reason[0] || !machine.n_devices) {
		printf("no GPU: %s\n",
		       machine.reason[0] ? machine.reason : "the driver has no device");
		return 77;
	}
	printf("%s x %d, CUDA %d.%d of the driver\n\n", machine.name, machine.n_devices,
	       machine.version / 1000, machine.version % 1000 / 10);
	if (options.json) {
		fprintf(options.json, "{\n  \"device\": ");
		json_string(options.json, machine.name);
		fprintf(options.json,
			",\n  \"devices\": %d,\n  \"cuda\": %d,\n  \"double\": %s,\n  \"seen\": [",
			machine.n_devices, machine.version, options.is_double ? "true" : "false");
	}
	for (const struct rule *const *table = options.times ? check_program.times
							     : check_program.rules;
	     *table; table++)
		for (const struct rule *rule = *table; rule->name; rule++)
			ask(&options, &machine, rule, &counts);
	if (options.json) {
		fprintf(options.json, "\n  ]\n}\n");
		if (fclose(options.json))
			return 2;
	}
	if (!options.times)
		printf("\n%d as assumed, %d that bps needs failed, %d differ from the double, %d "
		       "skipped\n",
		       counts.seen - counts.failed - counts.differ, counts.failed, counts.differ,
		       counts.skipped);
	return counts.failed || !counts.seen ? 1 : 0;
}
