/*
 * Calls over loopback, beside one plain TCP stream in the same run.
 *
 *	bench_transport [--json FILE] [--rounds N] [--bytes N] [--part N] [--calls N]
 *
 * Goodput is that of --bytes in calls of --part bytes, all posted at once and answered without payload ("push") or with
 * as many bytes ("echo": each direction counts once). Latency is that of --calls calls of 1 KiB, one after another, each
 * answered with 1 KiB. The other end is a process of its own. In every round each case runs once; medians over all
 * rounds are printed, with the processor time that both processes took.
 */
#include "base/clock.h"
#include "transport/transport.h"
#include <arpa/inet.h>
#include <getopt.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define ROUNDS_MAX 1000
#define CALL_LEN   1024
#define SERVER_ID  2

struct options {
	const char *json;
	size_t rounds, bytes, part, calls;
};

enum kind { KIND_PUSH, KIND_ECHO, KIND_LATENCY, KINDS };

struct bench_case {
	const char *name; /* NULL: plain TCP */
	unsigned n_threads, n_lanes;
	double values[KINDS][ROUNDS_MAX]; /* GB/s, GB/s, us */
	double p99[ROUNDS_MAX];		  /* us */
	double cpu[KINDS][ROUNDS_MAX];	  /* seconds per GB; us per call */
};

static struct bench_case cases[] = {
	{ .name = NULL },
	{ .name = "1 lane, control thread", .n_threads = 0, .n_lanes = 1 },
	{ .name = "4 lanes, control thread", .n_threads = 0, .n_lanes = 4 },
	{ .name = "1 lane, data thread", .n_threads = 1, .n_lanes = 1 },
	{ .name = "4 lanes, data thread", .n_threads = 1, .n_lanes = 4 },
};

/* Both ends fail by ending: there is nothing to clean up. */
static void check(bool ok, const char *what)
{
	if (ok)
		return;
	(void)fprintf(stderr, "bench_transport: %s: %s\n", what, strerror(errno));
	exit(EXIT_FAILURE);
}

static uint64_t cpu_ns(clockid_t clock)
{
	struct timespec ts = { 0 };

	(void)clock_gettime(clock, &ts);
	return (uint64_t)ts.tv_sec * NSEC_PER_SEC + (uint64_t)ts.tv_nsec;
}

/* One end of the transport. A call whose round is 2 asks for its bytes back. */

struct end {
	struct loop *loop;
	struct block_cache *blocks;
	struct transport *transport;
};

static void on_call(void *user, struct delivery *delivery)
{
	struct data_header header = delivery->header;
	bool echo = header.round == 2;

	(void)user;
	header.op = DATA_RESULT;
	header.len = echo ? header.len : 0;
	delivery_answer(delivery, &header, echo ? delivery->payload_block : NULL, NULL);
}

static void on_notice(void *user, struct peer *peer, const struct data_header *header,
		      const void *payload)
{
	(void)user;
	(void)peer;
	(void)header;
	(void)payload;
}

static void on_lost(void *user, struct peer *peer, const char *why)
{
	(void)user;
	(void)peer;
	(void)why;
}

static const struct transport_ops ops = {
	.call_arrived = on_call,
	.notice_arrived = on_notice,
	.peer_lost = on_lost,
};

static void end_open(struct end *end, const struct bench_case *c, bool is_server)
{
	struct transport_params params = {
		.ops = &ops,
		.id = is_server ? SERVER_ID : 1,
		.node = is_server ? "server" : "caller",
		.listen = is_server ? "127.0.0.1:0" : NULL,
		.listen_fd = -1,
		.n_threads = c->n_threads,
		.n_lanes = c->n_lanes,
		.max_connections = 16,
		.handshake_timeout_ms = 10000,
		.peer_timeout_ms = 60000,
		.quota_bytes = UINT64_MAX,
	};

	check(!loop_new(&end->loop), "loop");
	check(!block_cache_new(256 << 20, &end->blocks), "blocks");
	params.loop = end->loop;
	params.blocks = end->blocks;
	check(!transport_new(&params, &end->transport), "transport");
}

static void end_close(struct end *end)
{
	transport_free(end->transport);
	block_cache_free(end->blocks);
	loop_free(end->loop);
}

/* The other process: says its port, then serves until it is killed. */

static _Noreturn void serve_transport(const struct bench_case *c, int port_fd)
{
	struct end end;
	uint16_t port;

	end_open(&end, c, true);
	port = transport_port(end.transport);
	check(write(port_fd, &port, sizeof(port)) == sizeof(port), "port");
	(void)loop_run(end.loop);
	exit(EXIT_FAILURE);
}

static bool receive_all(int fd, void *data, size_t len)
{
	size_t done = 0;

	while (done < len) {
		ssize_t n = recv(fd, (char *)data + done, len - done, 0);

		if (n <= 0)
			return false;
		done += (size_t)n;
	}
	return true;
}

static bool send_all(int fd, const void *data, size_t len)
{
	size_t done = 0;

	while (done < len) {
		ssize_t n = send(fd, (const char *)data + done, len - done, MSG_NOSIGNAL);

		if (n <= 0)
			return false;
		done += (size_t)n;
	}
	return true;
}

/* What plain TCP is asked for: this many bytes come, and one byte or all of each piece goes back. */
struct plain_request {
	uint64_t bytes, piece;
	bool echo;
};

static _Noreturn void serve_plain(int port_fd, size_t part)
{
	struct sockaddr_in address = { .sin_family = AF_INET,
				       .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), fd, on = 1;
	socklen_t len = sizeof(address);
	struct plain_request request;
	char *buffer = malloc(MAX(part, (size_t)CALL_LEN));

	check(buffer && !bind(listener, (struct sockaddr *)&address, len) && !listen(listener, 1) &&
		      !getsockname(listener, (struct sockaddr *)&address, &len),
	      "listening");
	check(write(port_fd, &address.sin_port, 2) == 2, "port");
	fd = accept(listener, NULL, NULL);
	(void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	while (receive_all(fd, &request, sizeof(request))) {
		for (uint64_t done = 0; done < request.bytes; done += request.piece) {
			check(receive_all(fd, buffer, request.piece), "receiving");
			if (request.echo)
				check(send_all(fd, buffer, request.piece), "sending");
		}
		if (!request.echo)
			check(send_all(fd, buffer, 1), "sending");
	}
	exit(EXIT_SUCCESS);
}

static pid_t start_server(const struct bench_case *c, const struct options *options,
			  uint16_t *ret_port)
{
	int fds[2];
	pid_t pid;

	check(!pipe(fds), "pipe");
	pid = fork();
	check(pid >= 0, "fork");
	if (pid == 0) {
		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (c->name)
			serve_transport(c, fds[1]);
		serve_plain(fds[1], options->part);
	}
	check(read(fds[0], ret_port, sizeof(*ret_port)) == sizeof(*ret_port), "port");
	(void)close(fds[0]);
	(void)close(fds[1]);
	return pid;
}

/* Our end. */

struct caller {
	struct end end;
	struct peer *peer;
	int fd; /* plain */
	const struct options *options;
	char *payload, *target;
	struct call *calls;
	double *latencies;
	size_t n_out;
};

static void on_done(struct call *call)
{
	struct caller *caller = (struct caller *)call->header.job;

	check(!call->status, call->text);
	caller->n_out--;
}

static void begin_call(struct caller *caller, size_t index, size_t len, bool echo)
{
	struct call *call = &caller->calls[index];

	*call = (struct call){
		.header = {
			.op = DATA_PUSH,
			.len = (uint32_t)len,
			.part_len = (uint32_t)len,
			.total = len,
			.job = (uintptr_t)caller,
			.key = 1,
			.round = echo ? 2 : 1,
			.dtype = DTYPE_UINT8,
			.operation = OPERATION_PUSH_PULL,
			.reduction = REDUCTION_SUM,
		},
		.payload = caller->payload + index * len,
		.target = caller->target + index * len,
		.target_len = len,
		.done = on_done,
	};
	caller->n_out++;
	peer_call(caller->peer, call);
}

static void wait_for_calls(struct caller *caller)
{
	while (caller->n_out)
		check(!loop_turn(caller->end.loop, -1), "loop");
}

static void move(struct caller *caller, const struct bench_case *c, bool echo)
{
	size_t part = caller->options->part, n = caller->options->bytes / part;
	struct plain_request request = { .bytes = n * part, .piece = part, .echo = false };
	char last;

	if (!c->name) {
		check(send_all(caller->fd, &request, sizeof(request)), "sending");
		for (size_t i = 0; i < n; i++)
			check(send_all(caller->fd, caller->payload + i * part, part), "sending");
		check(receive_all(caller->fd, &last, 1), "receiving");
		return;
	}
	for (size_t i = 0; i < n; i++)
		begin_call(caller, i, part, echo);
	wait_for_calls(caller);
}

static void call_once(struct caller *caller, const struct bench_case *c)
{
	if (!c->name) {
		check(send_all(caller->fd, caller->payload, CALL_LEN), "sending");
		check(receive_all(caller->fd, caller->target, CALL_LEN), "receiving");
		return;
	}
	begin_call(caller, 0, CALL_LEN, true);
	wait_for_calls(caller);
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void measure_latency(struct caller *caller, struct bench_case *c, size_t round)
{
	size_t n = caller->options->calls;
	struct plain_request request = { .bytes = n * CALL_LEN, .piece = CALL_LEN, .echo = true };

	if (!c->name)
		check(send_all(caller->fd, &request, sizeof(request)), "sending");
	for (size_t i = 0; i < n; i++) {
		uint64_t begun_ns = clock_now_ns();

		call_once(caller, c);
		caller->latencies[i] = (double)(clock_now_ns() - begun_ns) / 1e3;
	}
	qsort(caller->latencies, n, sizeof(double), compare);
	c->values[KIND_LATENCY][round] = caller->latencies[n / 2];
	c->p99[round] = caller->latencies[n * 99 / 100];
}

static void measure(struct caller *caller, struct bench_case *c, enum kind kind, clockid_t server,
		    size_t round)
{
	uint64_t begun_ns = clock_now_ns(),
		 begun_cpu_ns = cpu_ns(CLOCK_PROCESS_CPUTIME_ID) + cpu_ns(server), ns;
	double gigabytes = (double)caller->options->bytes / 1e9;

	if (kind == KIND_LATENCY)
		measure_latency(caller, c, round);
	else
		move(caller, c, kind == KIND_ECHO);
	ns = cpu_ns(CLOCK_PROCESS_CPUTIME_ID) + cpu_ns(server) - begun_cpu_ns;
	if (kind == KIND_LATENCY) {
		c->cpu[kind][round] = (double)ns / 1e3 / (double)caller->options->calls;
		return;
	}
	c->cpu[kind][round] = (double)ns / 1e9 / gigabytes;
	c->values[kind][round] = gigabytes / ((double)(clock_now_ns() - begun_ns) / 1e9);
}

static void open_caller(struct caller *caller, const struct bench_case *c, uint16_t port)
{
	struct sockaddr_in address = {
		.sin_family = AF_INET,
		.sin_port = port,
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};
	char text[32];
	int on = 1;

	if (!c->name) {
		caller->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		(void)setsockopt(caller->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
		check(!connect(caller->fd, (struct sockaddr *)&address, sizeof(address)),
		      "connecting");
		return;
	}
	(void)snprintf(text, sizeof(text), "127.0.0.1:%u", port);
	end_open(&caller->end, c, false);
	check(!transport_connect(caller->end.transport, text, SERVER_ID, &caller->peer),
	      "connecting");
}

/* A fresh pair of processes for each case and round: no case inherits another's buffers. */
static void run_case(struct caller *caller, struct bench_case *c, size_t round)
{
	uint16_t port;
	pid_t pid = start_server(c, caller->options, &port);
	clockid_t server;

	check(!clock_getcpuclockid(pid, &server), "clock");
	open_caller(caller, c, port);
	if (c->name)
		move(caller, c, true); /* pages, buffers and lanes as they are in a steady state */
	for (enum kind kind = 0; kind < KINDS; kind++)
		if (c->name || kind != KIND_ECHO)
			measure(caller, c, kind, server, round);
	if (c->name)
		end_close(&caller->end);
	else
		(void)close(caller->fd);
	(void)kill(pid, SIGKILL);
	(void)waitpid(pid, NULL, 0);
}

static double median(const double *values, size_t n)
{
	double sorted[ROUNDS_MAX];

	memcpy(sorted, values, n * sizeof(*values));
	qsort(sorted, n, sizeof(*sorted), compare);
	return sorted[n / 2];
}

static void print_table(size_t n)
{
	(void)printf("%-24s %21s %21s %27s\n", "", "push GB/s (cpu-s/GB)", "echo GB/s (cpu-s/GB)",
		     "1 KiB call us p50 p99 (cpu)");
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		const struct bench_case *c = &cases[i];

		(void)printf("%-24s %12.2f (%6.2f)", c->name ?: "plain TCP, one stream",
			     median(c->values[KIND_PUSH], n), median(c->cpu[KIND_PUSH], n));
		if (c->name)
			(void)printf(" %12.2f (%6.2f)", median(c->values[KIND_ECHO], n),
				     median(c->cpu[KIND_ECHO], n));
		else
			(void)printf(" %21s", "");
		(void)printf(" %10.1f %7.1f (%6.1f)\n", median(c->values[KIND_LATENCY], n),
			     median(c->p99, n), median(c->cpu[KIND_LATENCY], n));
	}
}

static void write_json(const struct options *options)
{
	FILE *file = fopen(options->json, "we");

	check(file, options->json);
	(void)fprintf(file, "{\"bytes\": %zu, \"part\": %zu, \"rounds\": %zu, \"cases\": [",
		      options->bytes, options->part, options->rounds);
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		const struct bench_case *c = &cases[i];
		size_t n = options->rounds;

		(void)fprintf(
			file,
			"%s\n{\"name\": \"%s\", \"push_gbps\": %.3f, \"push_cpu_s_per_gb\": %.3f, "
			"\"echo_gbps\": %.3f, \"echo_cpu_s_per_gb\": %.3f, \"call_p50_us\": %.2f, "
			"\"call_p99_us\": %.2f, \"call_cpu_us\": %.2f}",
			i ? "," : "", c->name ?: "plain TCP", median(c->values[KIND_PUSH], n),
			median(c->cpu[KIND_PUSH], n), median(c->values[KIND_ECHO], n),
			median(c->cpu[KIND_ECHO], n), median(c->values[KIND_LATENCY], n),
			median(c->p99, n), median(c->cpu[KIND_LATENCY], n));
	}
	(void)fprintf(file, "\n]}\n");
	check(!fclose(file), options->json);
}

static bool parse_options(struct options *options, int argc, char **argv)
{
	static const struct option names[] = {
		{ "json", required_argument, NULL, 'j' },
		{ "rounds", required_argument, NULL, 'r' },
		{ "bytes", required_argument, NULL, 'b' },
		{ "part", required_argument, NULL, 'p' },
		{ "calls", required_argument, NULL, 'c' },
		{ NULL, 0, NULL, 0 },
	};
	int option;

	*options =
		(struct options){ .rounds = 5, .bytes = 256 << 20, .part = 4 << 20, .calls = 3000 };
	while ((option = getopt_long(argc, argv, "", names, NULL)) >= 0) {
		size_t number = option == 'j' ? 0 : strtoull(optarg ?: "0", NULL, 10);

		switch (option) {
		case 'j':
			options->json = optarg;
			break;
		case 'r':
			options->rounds = number;
			break;
		case 'b':
			options->bytes = number;
			break;
		case 'p':
			options->part = number;
			break;
		case 'c':
			options->calls = number;
			break;
		default:
			return false;
		}
	}
	return optind == argc && options->rounds && options->rounds <= ROUNDS_MAX &&
	       options->calls && options->part >= CALL_LEN && options->part <= DATA_PAYLOAD_MAX &&
	       options->bytes >= options->part;
}

int main(int argc, char **argv)
{
	struct options options;
	struct caller caller = { .options = &options };

	if (!parse_options(&options, argc, argv)) {
		(void)fprintf(
			stderr,
			"usage: %s [--json FILE] [--rounds N] [--bytes N] [--part N] [--calls N]\n",
			argv[0]);
		return 2;
	}
	options.bytes -= options.bytes % options.part;
	caller.payload = malloc(options.bytes);
	caller.target = malloc(options.bytes);
	caller.calls = calloc(options.bytes / options.part, sizeof(struct call));
	caller.latencies = calloc(options.calls, sizeof(double));
	check(caller.payload && caller.target && caller.calls && caller.latencies, "memory");
	memset(caller.payload, 1, options.bytes);
	memset(caller.target, 2, options.bytes);
	for (size_t round = 0; round < options.rounds; round++)
		for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
			run_case(&caller, &cases[i], round);
	print_table(options.rounds);
	if (options.json)
		write_json(&options);
	free(caller.payload);
	free(caller.target);
	free(caller.calls);
	free(caller.latencies);
	return 0;
}
