/* bpsctl: asks a daemon and shows what it says. */
#include "admin/ctl.h"
#include "base/log.h"
#include "base/loop/loop.h"
#include "proto/admin.pb-c.h"
#include "proto/health.pb-c.h"
#include "rpc/rpc.h"

#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>

#define SYSTEM_SOCKET "/run/bps/admin.sock"

/* What exit(3) is given, as in bpsctl(1). */
enum { EXIT_ANSWERED = 0, EXIT_REFUSED = 1, EXIT_USAGE = 2, EXIT_UNREACHABLE = 3 };

struct command {
	const char *name, *help;
	const char *path;
	const ProtobufCMessageDescriptor *reply;
	void (*print)(const ProtobufCMessage *reply);
	const char *takes; /* what an argument is, in brackets if there need be none; NULL: none */
};

static const struct command commands[] = {
	{ "status", "this daemon: state, view, jobs, bytes", "/bps.admin.Admin/Status",
	  &bps__admin__status_reply__descriptor, ctl_print_status, NULL },
	{ "nodes", "the daemons of the cluster, and the links to them", "/bps.admin.Admin/Nodes",
	  &bps__admin__nodes_reply__descriptor, ctl_print_nodes, NULL },
	{ "jobs", "jobs here, and what they wait for", "/bps.admin.Admin/Jobs",
	  &bps__admin__jobs_reply__descriptor, ctl_print_jobs, NULL },
	{ "job", "one job: its ranks and tensors", "/bps.admin.Admin/Job",
	  &bps__admin__job_reply__descriptor, ctl_print_job, "ID" },
	{ "metrics", "all counters, as OpenMetrics text", "/bps.admin.Admin/Metrics",
	  &bps__admin__metrics_reply__descriptor, ctl_print_metrics, NULL },
	{ "drain", "moves what it, or NODE, sums to the other servers", "/bps.admin.Admin/Drain",
	  &bps__admin__drain_reply__descriptor, ctl_print_drain, "[NODE]" },
	{ "health", "whether it serves; the exit status says so too",
	  "/grpc.health.v1.Health/Check", &grpc__health__v1__health_check_response__descriptor,
	  ctl_print_health, NULL },
};

struct options {
	char socket[sizeof(((struct sockaddr_un *)NULL)->sun_path)];
	const char *address;
	struct rpc_tls tls;
	bool json;
	unsigned timeout_s;
	const struct command *command;
	const char *argument; /* of the command, or NULL */
};

struct question {
	const struct options *options;
	struct loop *loop;
	struct rpc_request request;
	char target[320];
	int status; /* of exit */
};

static void print_usage(FILE *out)
{
	fprintf(out, "Usage: bpsctl [OPTION]... COMMAND\n"
		     "Asks a bps-daemon how it is.\n"
		     "\n"
		     "Commands:\n");
	for (size_t i = 0; i < ARRAY_SIZE(commands); i++)
		fprintf(out, "  %-7s %-6s %s\n", commands[i].name,
			commands[i].takes ? commands[i].takes : "", commands[i].help);
	fprintf(out,
		"\n"
		"Options:\n"
		"  -s, --socket=PATH        the daemon's admin socket; else $BPS_ADMIN_SOCKET, "
		"else\n"
		"                           $XDG_RUNTIME_DIR/bps/admin.sock if it exists, else\n"
		"                           " SYSTEM_SOCKET "\n"
		"  -a, --address=HOST:PORT  a daemon's admin_listen instead, over TCP\n"
		"      --tls-ca=FILE        with --address: mutual TLS, all three\n"
		"      --tls-cert=FILE\n"
		"      --tls-key=FILE\n"
		"  -j, --json               for programs\n"
		"  -t, --timeout=SECONDS    5 if not given\n"
		"  -h, --help\n"
		"  -V, --version\n"
		"\n"
		"Exit status: 0 answered (health: and serving), 1 refused (health: not serving),\n"
		"2 wrong usage, 3 the daemon cannot be reached.\n");
}

static int _printf_(1, 2) usage_error(const char *format, ...)
{
	va_list args;

	fprintf(stderr, "bpsctl: ");
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fprintf(stderr, "\nTry \"bpsctl --help\".\n");
	return EXIT_USAGE;
}

static int choose_socket(struct options *options, const char *given)
{
	const char *named = given ? given : getenv("BPS_ADMIN_SOCKET");
	const char *runtime = getenv("XDG_RUNTIME_DIR");
	size_t size = sizeof(options->socket);
	int n = 0;

	if (named && *named) {
		n = snprintf(options->socket, size, "%s", named);
	} else {
		if (runtime && *runtime)
			n = snprintf(options->socket, size, "%s/bps/admin.sock", runtime);
		if (n <= 0 || (size_t)n >= size || access(options->socket, F_OK))
			n = snprintf(options->socket, size, "%s", SYSTEM_SOCKET);
	}
	return n > 0 && (size_t)n < size ? 0 : usage_error("the socket's path is too long");
}

static int parse_timeout(const char *text, unsigned *ret_s)
{
	char *end;
	unsigned long s;

	errno = 0;
	s = strtoul(text, &end, 10);
	if (errno || *end || end == text || *text == '-' || s < 1 || s > 86400)
		return usage_error("--timeout %s: seconds, from 1 to 86400", text);
	*ret_s = (unsigned)s;
	return 0;
}

static int parse_command(struct options *options, int n, char **words)
{
	const char *takes;

	if (!n)
		return usage_error("no command");
	for (size_t i = 0; i < ARRAY_SIZE(commands); i++)
		if (!strcmp(commands[i].name, words[0]))
			options->command = &commands[i];
	if (!options->command)
		return usage_error("no command %s", words[0]);
	takes = options->command->takes;
	if (n > (takes ? 2 : 1) || (n == 1 && takes && *takes != '['))
		return usage_error(takes ? "%s: say which, and nothing else"
					 : "%s: takes no argument",
				   words[0]);
	options->argument = n > 1 ? words[1] : NULL;
	return 0;
}

static int check_options(struct options *options, const char *socket)
{
	const struct rpc_tls *tls = &options->tls;

	if (socket && options->address)
		return usage_error("--socket and --address: one of them");
	if ((tls->ca || tls->cert || tls->key) && !options->address)
		return usage_error("TLS is for --address");
	if (!tls->ca != !tls->cert || !tls->ca != !tls->key)
		return usage_error("--tls-ca, --tls-cert and --tls-key: all or none");
	return options->address ? 0 : choose_socket(options, socket);
}

enum { OPTION_CA = 256, OPTION_CERT, OPTION_KEY };

static const struct option long_options[] = {
	{ "socket", required_argument, NULL, 's' },
	{ "address", required_argument, NULL, 'a' },
	{ "tls-ca", required_argument, NULL, OPTION_CA },
	{ "tls-cert", required_argument, NULL, OPTION_CERT },
	{ "tls-key", required_argument, NULL, OPTION_KEY },
	{ "json", no_argument, NULL, 'j' },
	{ "timeout", required_argument, NULL, 't' },
	{ "help", no_argument, NULL, 'h' },
	{ "version", no_argument, NULL, 'V' },
	{ NULL, 0, NULL, 0 },
};

/* Returns 0; or -1 when all has been said and done, with *ret_exit. */
static int parse_options(int argc, char **argv, struct options *options, int *ret_exit)
{
	const char *socket = NULL;
	int c, r = 0;

	*options = (struct options){ .timeout_s = 5 };
	while (!r && (c = getopt_long(argc, argv, "s:a:jt:hV", long_options, NULL)) != -1) {
		if (c == 's') {
			socket = optarg;
		} else if (c == 'a') {
			options->address = optarg;
		} else if (c == OPTION_CA) {
			options->tls.ca = optarg;
		} else if (c == OPTION_CERT) {
			options->tls.cert = optarg;
		} else if (c == OPTION_KEY) {
			options->tls.key = optarg;
		} else if (c == 'j') {
			options->json = true;
		} else if (c == 't') {
			r = parse_timeout(optarg, &options->timeout_s);
		} else if (c == 'h' || c == 'V') {
			if (c == 'h')
				print_usage(stdout);
			else
				printf("bpsctl %s\n", BPS_VERSION);
			*ret_exit = 0;
			return -1;
		} else {
			fprintf(stderr, "Try \"bpsctl --help\".\n");
			r = EXIT_USAGE; /* getopt_long() has said what is wrong */
		}
	}
	if (!r)
		r = parse_command(options, argc - optind, argv + optind);
	if (!r)
		r = check_options(options, socket);
	*ret_exit = r;
	return r ? -1 : 0;
}

/* gRPC would say of a socket only that it did not work; the kernel says why. */
static int try_socket(const char *path)
{
	_cleanup_(fd_closep) int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	const char *way_out = "is bps-daemon running there?";

	memcpy(address.sun_path, path, strlen(path) + 1);
	if (fd >= 0 && !connect(fd, (struct sockaddr *)&address, sizeof(address)))
		return 0;
	if (errno == EACCES)
		way_out = "it is for operators: root, the daemon's user and the group bps-admin";
	fprintf(stderr, "bpsctl: %s: %s; %s\n", path, strerror(errno), way_out);
	return -errno;
}

static int show(const struct options *options, const void *data, size_t len)
{
	_cleanup_(unpack_freep) ProtobufCMessage *reply = NULL;
	int r;

	r = unpack(options->command->reply, data, len, &reply);
	if (r) {
		fprintf(stderr,
			"bpsctl: an answer that cannot be understood; is the daemon of this "
			"version, %s?\n",
			BPS_VERSION);
		return EXIT_REFUSED;
	}
	if (options->json)
		r = ctl_print_json(reply);
	else
		options->command->print(reply);
	if (r || fflush(stdout) || ferror(stdout)) {
		fprintf(stderr, "bpsctl: standard output: %s\n", strerror(r ? -r : errno));
		return EXIT_REFUSED;
	}
	if (reply->descriptor == &grpc__health__v1__health_check_response__descriptor &&
	    ((Grpc__Health__V1__HealthCheckResponse *)reply)->status !=
		    GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING)
		return EXIT_REFUSED;
	return EXIT_ANSWERED;
}

static void on_done(struct rpc_request *request, int status, const char *text, const void *data,
		    size_t len)
{
	struct question *q = container_of(request, struct question, request);
	const struct options *options = q->options;

	if (!status) {
		q->status = show(options, data, len);
	} else if (status == -ECONNREFUSED) {
		fprintf(stderr, "bpsctl: %s: %s; is bps-daemon running there%s?\n", q->target, text,
			!options->address ? ""
			: options->tls.ca
				? ", with this authority and this name in its certificate"
				: ", and does it want --tls-ca, --tls-cert and --tls-key");
		q->status = EXIT_UNREACHABLE;
	} else if (status == -ETIMEDOUT) {
		fprintf(stderr, "bpsctl: %s: no answer for %u s; is the daemon stopped or stuck?\n",
			q->target, options->timeout_s);
		q->status = EXIT_UNREACHABLE;
	} else {
		fprintf(stderr, "bpsctl: %s%s%s: %s\n", options->command->name,
			options->argument ? " " : "", options->argument ? options->argument : "",
			text);
		q->status = EXIT_REFUSED;
	}
	loop_stop(q->loop);
}

static int pack_request(const struct options *options, void **ret_data, size_t *ret_len)
{
	Bps__Admin__DrainRequest drain = BPS__ADMIN__DRAIN_REQUEST__INIT;
	Bps__Admin__JobRequest job = BPS__ADMIN__JOB_REQUEST__INIT;
	bool drains = options->command->print == ctl_print_drain;

	/* The others have no fields: nothing is what they are packed to. */
	*ret_data = NULL;
	*ret_len = 0;
	if (!options->argument)
		return 0;
	job.job = drain.node = (char *)options->argument;
	return pack(drains ? &drain.base : &job.base, RPC_MESSAGE_MAX, ret_data, ret_len);
}

static int ask(const struct options *options)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	_cleanup_(rpc_freep) struct rpc *rpc = NULL;
	_cleanup_(rpc_channel_freep) struct rpc_channel *channel = NULL;
	struct question q = { .options = options, .status = EXIT_REFUSED };
	_cleanup_(freep) void *data = NULL;
	struct failure failure = { 0 };
	size_t len;
	int r;

	(void)snprintf(q.target, sizeof(q.target), "%s%s", options->address ? "" : "unix:",
		       options->address ? options->address : options->socket);
	r = loop_new(&loop);
	if (!r)
		r = rpc_new(loop, &rpc);
	if (!r)
		r = pack_request(options, &data, &len);
	if (r)
		(void)failure_set(&failure, r, "%s", strerror(-r));
	else
		r = rpc_channel_new(rpc, q.target, 0, options->tls.ca ? &options->tls : NULL,
				    &failure, &channel);
	if (r) {
		fprintf(stderr, "bpsctl: %s\n", failure.text);
		return EXIT_REFUSED;
	}
	q.loop = loop;
	q.request = (struct rpc_request){
		.path = options->command->path,
		.data = data,
		.len = len,
		.deadline_ms = options->timeout_s * 1000ull,
		.done = on_done,
	};
	rpc_request_start(channel, &q.request);
	r = loop_run(loop);
	if (r)
		fprintf(stderr, "bpsctl: %s\n", strerror(-r));
	return q.status;
}

int main(int argc, char **argv)
{
	struct options options;
	int status;

	if (parse_options(argc, argv, &options, &status))
		return status;
	/* gRPC's own words are for whoever debugs it; what matters of them comes with the answer. */
	log_init(LOG_LEVEL_ERROR);
	if (!options.address && try_socket(options.socket))
		return EXIT_UNREACHABLE;
	return ask(&options);
}
