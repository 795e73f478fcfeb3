/*
 * The ranks that measure together: forked here or started by a launcher, joined to one job, with
 * barriers, sums and maxima through bps itself, and the CPU time of ranks and daemon.
 */
#include "bench/bench.h"
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

static void set(const char *name, unsigned value)
{
	char text[16];

	(void)snprintf(text, sizeof(text), "%u", value);
	(void)setenv(name, text, 1);
}

void group_start(unsigned n_ranks)
{
	int failed = 0;

	if (!n_ranks)
		return;
	for (unsigned rank = 0; rank < n_ranks; rank++) {
		pid_t pid = fork();

		if (pid < 0)
			bench_die("cannot fork: %m");
		if (pid)
			continue;
		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
		set("BPS_RANK", rank);
		set("BPS_SIZE", n_ranks);
		set("BPS_LOCAL_RANK", rank);
		set("BPS_LOCAL_SIZE", n_ranks);
		set("BPS_NODE", 0);
		set("BPS_NODES", 1);
		return;
	}
	for (unsigned i = 0; i < n_ranks; i++) {
		int status;

		/* The others learn from the daemon that one has died. */
		if (wait(&status) < 0 || !WIFEXITED(status))
			failed = failed ?: 1;
		else
			failed = failed ?: WEXITSTATUS(status);
	}
	exit(failed);
}

/*
 * The daemon is whoever listens where the library connects; under socket activation that is the
 * service manager.
 */
static pid_t find_daemon(void)
{
	const char *path = getenv("BPS_SOCKET"), *runtime = getenv("XDG_RUNTIME_DIR");
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	char name[16] = "", file[64];
	struct ucred peer = { 0 };
	socklen_t len = sizeof(peer);
	FILE *comm;
	int fd;

	if (path && *path)
		(void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
	else if (runtime && *runtime)
		(void)snprintf(address.sun_path, sizeof(address.sun_path), "%s/bps/bps.sock",
			       runtime);
	if (!*address.sun_path || access(address.sun_path, F_OK))
		(void)snprintf(address.sun_path, sizeof(address.sun_path), "/run/bps/bps.sock");
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return 0;
	if (connect(fd, (struct sockaddr *)&address, sizeof(address)) ||
	    getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len))
		peer.pid = 0;
	(void)fd_close(fd);
	(void)snprintf(file, sizeof(file), "/proc/%d/comm", peer.pid);
	comm = peer.pid > 0 ? fopen(file, "re") : NULL;
	if (!comm)
		return 0;
	(void)!fgets(name, sizeof(name), comm);
	(void)fclose(comm);
	return strncmp(name, "bps-daemon", 10) ? 0 : peer.pid;
}

void group_open(struct group *group)
{
	struct bps_open_params open = { .size = sizeof(open), .timeout_ms = 3000 };

	*group = (struct group){ 0 };
	bench_check(bps_client_open(&open, &group->client));
	bench_check(bps_client_join(group->client, NULL));
	group->rank = (uint32_t)bps_client_rank(group->client);
	group->size = (uint32_t)bps_client_size(group->client);
	group->local_rank = (uint32_t)bps_client_local_rank(group->client);
	group->daemon = find_daemon();
}

void group_close(struct group *group)
{
	group_barrier(group);
	bps_client_close(group->client);
}

static void finish(struct bps_request *request)
{
	bench_check(bps_request_wait(request, BPS_FOREVER));
	bps_request_free(request);
}

void group_run(struct bps_tensor *tensor, const struct bps_submit_params *params)
{
	struct bps_request *request;

	bench_check(bps_submit(tensor, params, &request));
	finish(request);
}

void group_barrier(struct group *group)
{
	struct bps_request *request;

	bench_check(bps_barrier(group->client, 0, &request));
	finish(request);
}

static void reduce(struct group *group, const char *what, int dtype, int reduction, void *values,
		   size_t n)
{
	struct bps_submit_params submit = {
		.size = sizeof(submit),
		.operation = BPS_PUSH_PULL,
		.reduction = reduction,
		.input = values,
		.output = values,
	};
	struct bps_tensor *tensor;
	char name[64];

	(void)snprintf(name, sizeof(name), "bench.%s.%zu", what, n);
	bench_check(bps_tensor_declare(group->client, name, dtype, n, &tensor));
	group_run(tensor, &submit);
	bps_tensor_free(tensor);
}

void group_largest(struct group *group, int64_t *values, size_t n)
{
	reduce(group, "largest", BPS_INT64, BPS_MAX, values, n);
}

double group_total(struct group *group, double value)
{
	reduce(group, "total", BPS_FLOAT64, BPS_SUM, &value, 1);
	return value;
}

static double seconds_of(struct timeval time)
{
	return (double)time.tv_sec + (double)time.tv_usec / 1e6;
}

/*
 * User and system time in clock ticks are fields 14 and 15; the name before them may hold spaces
 * and parentheses.
 */
static double daemon_cpu(pid_t pid)
{
	char file[64], line[1024];
	unsigned long user = 0, system = 0;
	const char *fields;
	FILE *stat;

	(void)snprintf(file, sizeof(file), "/proc/%d/stat", pid);
	stat = fopen(file, "re");
	if (!stat)
		return 0;
	fields = fgets(line, sizeof(line), stat) ? strrchr(line, ')') : NULL;
	(void)fclose(stat);
	if (!fields || sscanf(fields + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu",
			      &user, &system) != 2)
		return 0;
	return (double)(user + system) / (double)sysconf(_SC_CLK_TCK);
}

double group_cpu(const struct group *group)
{
	struct rusage usage;
	double cpu;

	(void)getrusage(RUSAGE_SELF, &usage);
	cpu = seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime);
	return group->local_rank || !group->daemon ? cpu : cpu + daemon_cpu(group->daemon);
}
