/*
 * Makes the modules in order from the options, hands each the callbacks that it needs of others,
 * and takes them down in the reverse order; drains before. main.c owns the one struct daemon.
 */
#include "daemon.h"
#include "base/clock.h"
#include "base/cpu.h"
#include "base/log.h"
#include "base/memory/allowed.h"
#include "base/memory/handout.h"
#include "internal.h"
#include "reduce/reduce.h"
#include <fcntl.h>
#include <sys/random.h>
#include <sys/resource.h>

#define KEY_FILE_MAX 4096
#define MESSAGES_MIN (UINT64_C(64) << 20)
#define ADDRESSES    (UINT64_C(1) << 46) /* for memory of trainers: half of what x86-64 has */
/* What a worker of GPUs may take of the machine's memory; there may be so many at least. */
#define WORKER_BYTES  (UINT64_C(512) << 20)
#define WORKERS_LEAST UINT64_C(32)
#define LOCAL_PART_BYTES \
	(128u << 10) /* of jobs that need no server, unless part_size says otherwise */
#define DEVICE_PART_BYTES (4u << 20) /* the largest of them, of rounds on devices */
#define DRAIN_INTERVAL_NS \
	(10 * NSEC_PER_MSEC) /* how often draining looks; only then does anything look at all */

static unsigned n_sum_threads(const struct config *config)
{
	return config->sum_threads ? config->sum_threads : MIN(cpu_count(), 8u);
}

static unsigned n_data_threads(const struct config *config)
{
	return config->data_threads ? config->data_threads : MIN(cpu_count() / 4, 4u);
}

/*
 * Where the control thread owns the data connections, a part that has just come in is in the cache
 * of its core, and cores are few: to wake another thread for it takes longer than to sum or copy
 * it.
 */
static uint64_t remote_inline_bytes(const struct config *config)
{
	return n_data_threads(config) ? config->inline_size
				      : MAX(config->inline_size, UINT64_C(2) << 20);
}

/* "" means none, in options; NULL does in parameters. */
static const char *text_or_null(const char *text)
{
	return *text ? text : NULL;
}

static void ended(struct daemon *daemon, const struct failure *failure)
{
	if (daemon->ended)
		return;
	daemon->ended = true;
	daemon->params.ended(daemon->params.user, failure);
}

static void on_call(void *user, struct delivery *delivery)
{
	struct daemon *daemon = user;

	if (daemon->server)
		server_call_arrived(daemon->server, delivery);
	else
		delivery_fail(delivery, -EOPNOTSUPP, "this daemon does not have the server role");
}

/* A notice concerns this node's jobs, the jobs it sums for, or both when it is its own server. */
static void on_notice(void *user, struct peer *peer, const struct data_header *header,
		      const void *payload)
{
	struct daemon *daemon = user;

	if (daemon->server)
		server_notice_arrived(daemon->server, peer, header, payload);
	if (daemon->agent)
		agent_notice_arrived(daemon->agent, peer, header, payload);
}

static void on_peer_lost(void *user, struct peer *peer, const char *why)
{
	struct daemon *daemon = user;

	log_notice("%s: lost: %s", peer_name(peer), why);
	if (daemon->agent)
		agent_peer_lost(daemon->agent, peer, why);
	if (daemon->server)
		server_peer_lost(daemon->server, peer, why);
}

static const struct transport_ops transport_ops = {
	.call_arrived = on_call,
	.notice_arrived = on_notice,
	.peer_lost = on_peer_lost,
};

static const struct view *view_of(void *user, uint32_t epoch)
{
	struct daemon *daemon = user;

	return cluster_view_of(daemon->cluster, epoch);
}

/* A daemon that has no cluster has nobody to reach. */
static enum transport_kind transport_kind(const struct config *config)
{
	if (!strcmp(config->transport, "tcp") || !strcmp(config->cluster, "single"))
		return TRANSPORT_TCP;
	return !strcmp(config->transport, "rdma") ? TRANSPORT_RDMA : TRANSPORT_AUTO;
}

static enum transport_windows transport_windows(const struct config *config)
{
	if (!strcmp(config->rdma_windows, "auto"))
		return TRANSPORT_WINDOWS_AUTO;
	return !strcmp(config->rdma_windows, "on") ? TRANSPORT_WINDOWS_ON : TRANSPORT_WINDOWS_OFF;
}

static enum transport_checksums transport_checksums(const struct config *config)
{
	if (!strcmp(config->checksum, "auto"))
		return TRANSPORT_CHECKSUMS_AUTO;
	return !strcmp(config->checksum, "on") ? TRANSPORT_CHECKSUMS_ON : TRANSPORT_CHECKSUMS_OFF;
}

/* This daemon in the current view; NULL before the first. */
static const struct view_member *own_member(const struct daemon *daemon)
{
	const struct view *view = cluster_view(daemon->cluster);

	for (size_t i = 0; view && i < view->n_members; i++) {
		if (view->members[i].is_self)
			return &view->members[i];
	}
	return NULL;
}

/*
 * What the cgroup or the machine has beside what the daemon takes when it holds nothing for
 * anybody.
 */
static uint64_t memory_for_others(const struct config *config)
{
	uint64_t all = allowed_memory() / 4 * 3;

	return config->memory ?: (all - MIN(config->block_cache, all / 3)) / 5 * 4;
}

/* Besides: more than comes while the control thread is busy elsewhere. */
static uint64_t memory_for_messages(const struct config *config)
{
	uint64_t memory = memory_for_others(config);

	return MAX(memory / 4, MIN(memory / 2, MESSAGES_MIN));
}

static int open_transport(struct daemon *daemon, int listen_fd, const char *listen)
{
	const struct config *config = daemon->config;
	const struct view_member *self = own_member(daemon);
	bool is_link_known = config->bandwidth || (self && self->bandwidth_mbps);
	struct transport_params params = {
		.loop = daemon->loop,
		.blocks = daemon->blocks,
		.ops = &transport_ops,
		.user = daemon,
		.id = daemon->id,
		.node = daemon->node,
		.listen = listen_fd < 0 ? listen : NULL,
		.listen_fd = listen_fd,
		.key = daemon->data_key,
		.key_len = daemon->data_key_len,
		.n_threads = n_data_threads(config),
		.n_lanes = config->lanes,
		.max_connections = config->max_connections,
		.handshake_timeout_ms = config->hello_timeout,
		.peer_timeout_ms = config->peer_timeout,
		.quota_bytes = MIN(config->peer_quota, memory_for_others(config)),
		.accounts = &daemon->accounts,
		.checksums = transport_checksums(config),
		.probes = is_link_known ? TRANSPORT_PROBES_OFF : TRANSPORT_PROBES_AUTO,
		.congestion = config->congestion,
		.rdma = {
			.kind = transport_kind(config),
			.devices = config->rdma_devices,
			.service_level = config->rdma_service_level,
			.traffic_class = config->rdma_traffic_class,
			.gid_index = config->rdma_gid_index,
			.windows = transport_windows(config),
		},
	};

	return error_trace(transport_new(&params, &daemon->transport));
}

static int open_server(struct daemon *daemon)
{
	const struct config *config = daemon->config;
	struct server_params params = {
		.loop = daemon->loop,
		.accounts = &daemon->accounts,
		.pool = daemon->pool,
		.blocks = daemon->blocks,
		.transport = daemon->transport,
		.part_bytes = (uint32_t)config->part_size,
		.inline_bytes = remote_inline_bytes(config),
		.job_quota_bytes = MIN(config->job_quota, memory_for_others(config)),
		.max_jobs = config->max_jobs,
		.max_tensors = config->max_tensors,
		.view_of = view_of,
		.user = daemon,
	};

	return error_trace(server_new(&params, &daemon->server));
}

/* Parts go from and to staging by RDMA, without a copy. */
static int staging_opened(void *user, void *data, size_t len)
{
	struct daemon *daemon = user;

	return error_trace(transport_memory_add(daemon->transport, NULL, data, len));
}

static int staging_exported(void *user, void *data, size_t len, int dmabuf, struct failure *failure)
{
	struct daemon *daemon = user;

	return transport_memory_add_direct(daemon->transport, data, len, dmabuf, failure);
}

static void staging_closing(void *user, void *data)
{
	struct daemon *daemon = user;

	(void)transport_memory_remove(daemon->transport, data, NULL);
}

static const struct gpu_staging_ops staging_ops = {
	.opened = staging_opened,
	.exported = staging_exported,
	.closing = staging_closing,
};

/* That there are no GPUs is said once, with what is lost by it. */
static int open_gpu(struct daemon *daemon)
{
	const struct config *config = daemon->config;
	struct gpu_params params = {
		.loop = daemon->loop,
		.staging_bytes = config->gpu_staging,
		.timeout_ms = config->gpu_timeout,
		.staging_ops = &staging_ops,
		.user = daemon,
	};
	int r;

	if (!strcmp(config->gpu, "off"))
		return 0;
	params.no_direct = !strcmp(config->gpu_direct, "off")
				   ? "gpu_direct = off"
				   : transport_no_direct(daemon->transport);
	if (!params.no_direct)
		params.direct_bytes = config->gpu_direct_staging;
	r = gpu_new(&params, &daemon->gpu);
	if (r)
		return error_trace(r);
	if (gpu_is_there(daemon->gpu))
		log_notice("GPUs: used: %s", gpu_describe(daemon->gpu));
	else
		log_info("GPUs: not used, trainers copy to the host: %s",
			 gpu_describe(daemon->gpu));
	if (gpu_is_there(daemon->gpu) && params.no_direct)
		log_info("GPUs: their memory goes to servers by way of the host: %s",
			 params.no_direct);
	return 0;
}

static int open_agent(struct daemon *daemon)
{
	const struct config *config = daemon->config;
	struct agent_params params = {
		.loop = daemon->loop,
		.pool = daemon->pool,
		.blocks = daemon->blocks,
		.transport = daemon->transport,
		.cluster = daemon->cluster,
		.id = daemon->id,
		.part_bytes = config->part_size ? (uint32_t)config->part_size : LOCAL_PART_BYTES,
		.device_part_bytes =
			config->part_size ? (uint32_t)config->part_size : DEVICE_PART_BYTES,
		.inline_bytes = config->inline_size,
		.remote_inline_bytes = remote_inline_bytes(config),
		.ahead_bytes = config->ahead,
		.job_quota_bytes = config->job_quota,
		.max_jobs = config->max_jobs,
		.max_tensors = config->max_tensors,
		.resume_timeout_ms = config->resume_timeout,
		.gpu = daemon->gpu,
		.resume = !strcmp(config->resume, "on"),
		.lost_timeout_ms = config->lost_timeout,
		.move_timeout_ms = config->move_timeout,
	};

	return error_trace(agent_new(&params, &daemon->agent));
}

static int open_control(struct daemon *daemon)
{
	const struct config *config = daemon->config;
	struct control_params params = {
		.loop = daemon->loop,
		.accounts = &daemon->accounts,
		.agent = daemon->agent,
		.socket_path = config->socket,
		.listen_fd = TAKE_FD(daemon->params.fds.control),
		.group = text_or_null(config->group),
		.node = daemon->node,
		.cluster = config->cluster,
		.id = daemon->id,
		.max_sessions = config->max_sessions,
		.max_sessions_per_uid = config->max_sessions_per_user,
		.max_buffers = config->max_buffers,
		.max_tensors = config->max_tensors,
		.session_quota_bytes = config->session_quota,
		.hello_timeout_ms = config->hello_timeout,
		.resume_timeout_ms = config->resume_timeout,
		.has_cuda = daemon->gpu && gpu_is_there(daemon->gpu),
		.spin_ns = config->spin_us * NSEC_PER_USEC,
	};

	return error_trace(control_new(&params, &daemon->control));
}

/* Where other daemons reach us: as configured, or as the static file says. Empty: nobody does. */
static const char *own_address(const struct daemon *daemon)
{
	const struct view_member *self = own_member(daemon);

	if (*daemon->config->address)
		return daemon->config->address;
	return self ? self->address : "";
}

/* Everything from the data port to the door, once the key for data connections is known. */
static int open_line(struct daemon *daemon, struct failure *failure)
{
	const struct config *config = daemon->config;
	const char *listen = *config->listen ? config->listen : own_address(daemon);
	const struct view_member *self = own_member(daemon);
	int r;

	if (!*config->roles && self)
		daemon->roles &= self->roles | ROLE_COORDINATOR;

	r = open_transport(daemon, TAKE_FD(daemon->params.fds.data), text_or_null(listen));
	if (r)
		return failure_set(failure, r, "data port %s: %s", *listen ? listen : "(none)",
				   strerror(-r));
	if (daemon->roles & ROLE_SERVER) {
		r = open_server(daemon);
		if (r)
			return failure_set(failure, r, "server: %s", strerror(-r));
	}
	if (daemon->roles & ROLE_AGENT) {
		r = open_gpu(daemon);
		if (r)
			return failure_set(failure, r, "GPUs: %s", strerror(-r));
		r = open_agent(daemon);
		if (r)
			return failure_set(failure, r, "agent: %s", strerror(-r));
	}
	/*
	 * A socket that was handed over is open in any case: whoever connects is to hear something.
	 */
	if ((daemon->roles & ROLE_AGENT) || daemon->params.fds.control >= 0) {
		r = open_control(daemon);
		if (r)
			return failure_set(failure, r, "socket %s: %s", config->socket,
					   strerror(-r));
	}
	if (*listen && !daemon->data_key_len)
		log_warning(
			"data port %s: no cluster_key_file, so whoever reaches it can take part",
			listen);
	daemon->params.ready(daemon->params.user);
	return 0;
}

static void on_view(void *user, struct view *view)
{
	struct daemon *daemon = user;

	log_notice("cluster: view %u has %zu members, %zu of them servers", view->epoch,
		   view->n_members, view_n_servers(view));
	if (daemon->agent)
		agent_view_changed(daemon->agent);
}

/* A coordinator tells the key before the first view; only then can the data port open. */
static void on_data_key(void *user, const void *key, size_t len)
{
	struct daemon *daemon = user;
	struct failure failure = { 0 };

	if (daemon->transport) {
		if (!*daemon->config->cluster_key_file &&
		    transport_set_key(daemon->transport, key, len))
			log_error("cluster key: out of memory for a new one, keeping the old");
		return;
	}
	if (!daemon->data_key_len) {
		daemon->data_key = malloc(MAX(len, 1u));
		if (!daemon->data_key) {
			(void)failure_set(&failure, -ENOMEM, "cluster key: out of memory");
			ended(daemon, &failure);
			return;
		}
		memcpy(daemon->data_key, key, len);
		daemon->data_key_len = len;
	}
	if (open_line(daemon, &failure))
		ended(daemon, &failure);
}

static void on_cluster_failed(void *user, const struct failure *failure)
{
	ended(user, failure);
}

static int open_cluster(struct daemon *daemon)
{
	const struct config *config = daemon->config;
	struct cluster_params params = {
		.loop = daemon->loop,
		.rpc = daemon->rpc,
		.source = config->cluster,
		.file = config->cluster_file,
		.coordinator = text_or_null(config->coordinator),
		.coordinator_listen = text_or_null(config->coordinator_listen),
		.etcd_endpoints = config->etcd_endpoints,
		.etcd_prefix = config->etcd_prefix,
		.tls_ca = text_or_null(config->tls_ca),
		.tls_cert = text_or_null(config->tls_cert),
		.tls_key = text_or_null(config->tls_key),
		.lease_ms = config->lease,
		.data_key = daemon->data_key,
		.data_key_len = daemon->data_key_len,
		.view_changed = on_view,
		.data_key_known = on_data_key,
		.failed = on_cluster_failed,
		.user = daemon,
	};

	params.self = (struct view_member){
		.id = daemon->id,
		.roles = daemon->roles,
		.bandwidth_mbps = (uint32_t)config->bandwidth,
		.is_self = true,
	};
	memcpy(params.secret, daemon->secret, sizeof(params.secret));
	(void)snprintf(params.self.name, sizeof(params.self.name), "%s", daemon->node);
	(void)snprintf(params.self.address, sizeof(params.self.address), "%s", config->address);
	return error_trace(cluster_new(&params, &daemon->cluster));
}

static int open_admin(struct daemon *daemon, struct failure *failure)
{
	const struct config *config = daemon->config;
	struct rpc_tls tls = { config->tls_ca, config->tls_cert, config->tls_key };
	int fd = TAKE_FD(daemon->params.fds.admin), r;
	uint16_t port;

	r = admin_new(daemon->rpc, &report_ops, daemon, &daemon->admin);
	if (r) {
		(void)fd_close(fd);
		return failure_set(failure, r, "admin: %s", strerror(-r));
	}
	if (fd >= 0 || *config->admin_socket) {
		r = rpc_listen_unix(daemon->rpc, config->admin_socket, config->admin_group, fd,
				    failure);
		if (r)
			return error_trace(r);
	}
	if (!*config->admin_listen)
		return 0;
	return error_trace(rpc_listen(daemon->rpc, config->admin_listen,
				      *tls.ca ? RPC_DOOR_OPERATORS : RPC_DOOR_PUBLIC,
				      *tls.ca ? &tls : NULL, &port, failure));
}

/* The key of the cluster: the bytes of a file, less a final newline. */
static int read_key(struct daemon *daemon, struct failure *failure)
{
	const char *path = daemon->config->cluster_key_file;
	_cleanup_(fd_closep) int fd = -1;
	char bytes[KEY_FILE_MAX];
	ssize_t n;

	if (!*path)
		return 0;
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return failure_set(failure, -errno, "cluster_key_file %s: %s", path,
				   strerror(errno));
	n = read(fd, bytes, sizeof(bytes));
	if (n < 0)
		return failure_set(failure, -errno, "cluster_key_file %s: %s", path,
				   strerror(errno));
	while (n > 0 && (bytes[n - 1] == '\n' || bytes[n - 1] == '\r'))
		n--;
	if (n < 16)
		return failure_set(failure, -EINVAL,
				   "cluster_key_file %s: shorter than 16 bytes; make one with "
				   "\"head -c 32 /dev/urandom | base64\"",
				   path);
	daemon->data_key = malloc((size_t)n);
	if (!daemon->data_key)
		return failure_set(failure, -ENOMEM, "cluster_key_file %s: out of memory", path);
	memcpy(daemon->data_key, bytes, (size_t)n);
	daemon->data_key_len = (size_t)n;
	return 0;
}

static int choose_kernel(const struct config *config, struct failure *failure)
{
	if (strcmp(config->kernel, "auto") && reduce_kernel_select(config->kernel))
		return failure_set(failure, -ENOTSUP,
				   "kernel = %s: this CPU or build does not have it; use auto",
				   config->kernel);
	return 0;
}

/* Descriptors that are left to connections between daemons, and to the daemon itself. */
static uint64_t descriptors_for_trainers(void)
{
	struct rlimit limit;

	return getrlimit(RLIMIT_NOFILE, &limit) ? UINT64_MAX : limit.rlim_cur / 4 * 3;
}

static uint64_t gpu_workers(void)
{
	return MAX(allowed_memory() / WORKER_BYTES, WORKERS_LEAST);
}

static void open_accounts(struct daemon *daemon)
{
	const struct config *config = daemon->config;

	accounts_init(&daemon->accounts,
		      &(struct accounts_params){
			      .share = config->user_share,
			      .limits = {
				      [ACCOUNT_MEMORY] = memory_for_others(config),
				      [ACCOUNT_MESSAGES] = memory_for_messages(config),
				      [ACCOUNT_MAPPED] = ADDRESSES,
				      [ACCOUNT_MAPPINGS] = allowed_mappings() / 4 * 3,
				      [ACCOUNT_DESCRIPTORS] = descriptors_for_trainers(),
				      [ACCOUNT_JOBS] = config->max_jobs,
				      [ACCOUNT_SERVED_JOBS] = config->max_jobs,
				      [ACCOUNT_GPU_WORKERS] = gpu_workers(),
			      },
		      });
}

int daemon_new(const struct daemon_params *params, struct daemon **ret_daemon)
{
	_cleanup_(daemon_freep) struct daemon *daemon = calloc(1, sizeof(*daemon));
	const struct config *config = params->config;

	if (!daemon)
		return error_origin(-ENOMEM);
	daemon->params = *params;
	daemon->config = params->config;
	open_accounts(daemon);
	daemon->loop = params->loop;
	handouts_attach(daemon->loop);
	daemon->roles =
		*config->roles ? config_parse_roles(config->roles) : ROLE_AGENT | ROLE_SERVER;
	if (*config->coordinator_listen)
		daemon->roles |= ROLE_COORDINATOR;
	daemon->started_ns = clock_now_ns();
	if (getrandom(daemon->secret, sizeof(daemon->secret), 0) != sizeof(daemon->secret))
		return error_origin(-errno);
	daemon->id = member_id(daemon->secret);
	if (!daemon->id)
		return error_origin(-ENOMEM);
	if (*config->node)
		(void)snprintf(daemon->node, sizeof(daemon->node), "%s", config->node);
	else if (gethostname(daemon->node, sizeof(daemon->node) - 1))
		return error_origin(-errno);
	*ret_daemon = TAKE_PTR(daemon);
	return 0;
}

int daemon_start(struct daemon *daemon, struct failure *failure)
{
	int r;

	r = choose_kernel(daemon->config, failure);
	if (r)
		return r;
	r = read_key(daemon, failure);
	if (r)
		return r;
	r = block_cache_new(daemon->config->block_cache, &daemon->blocks);
	if (!r)
		r = pool_new(daemon->loop, n_sum_threads(daemon->config), &daemon->pool);
	if (!r)
		r = rpc_new(daemon->loop, &daemon->rpc);
	if (r)
		return failure_set(failure, r, "start: %s", strerror(-r));
	r = open_cluster(daemon);
	if (r)
		return failure_set(failure, r, "cluster: %s", strerror(-r));
	r = open_admin(daemon, failure);
	if (r)
		return r;
	r = cluster_start(daemon->cluster, failure);
	if (r)
		return r;
	/* A coordinator or etcd opens the line later, by on_data_key(). */
	if (!strcmp(daemon->config->cluster, "coordinator") ||
	    !strcmp(daemon->config->cluster, "etcd"))
		return 0;
	return open_line(daemon, failure);
}

static size_t pending(const struct daemon *daemon)
{
	return daemon->control ? control_pending(daemon->control) : 0;
}

static void on_drain_timer(struct loop_timer *timer)
{
	struct daemon *daemon = container_of(timer, struct daemon, drain_timer);
	size_t n_pending = pending(daemon);
	size_t n_busy = !n_pending && daemon->server ? server_stop(daemon->server) : 0;
	struct failure none = { 0 };
	uint64_t now = clock_now_ns();

	daemon->n_busy = n_busy;
	if ((n_pending || n_busy) && now < daemon->drain_until_ns &&
	    !loop_timer_set(daemon->loop, timer, now + DRAIN_INTERVAL_NS))
		return;
	if (n_pending)
		log_warning("stop: %zu requests did not finish within drain_timeout, ending them",
			    n_pending);
	if (n_busy)
		log_warning(
			"stop: %zu nodes have not said within drain_timeout that they have their "
			"last results: ranks there may fail, as others have left their job",
			n_busy);
	ended(daemon, &none);
}

/* In the next turn of the loop. */
static void drain_by(struct daemon *daemon, void (*expired)(struct loop_timer *timer))
{
	daemon->drain_timer.expired = expired;
	if (loop_timer_set(daemon->loop, &daemon->drain_timer, clock_now_ns() + 1))
		on_drain_timer(&daemon->drain_timer);
}

/*
 * What ranks had said before the signal came, that they leave above all, is read in this turn,
 * after its timers.
 */
static void on_drain_begun(struct loop_timer *timer)
{
	drain_by(container_of(timer, struct daemon, drain_timer), on_drain_timer);
}

void daemon_drain(struct daemon *daemon)
{
	uint64_t now = clock_now_ns();

	if (daemon->ended)
		return;
	loop_timer_cancel(&daemon->drain_timer);
	if (daemon->draining) {
		daemon->drain_until_ns = now;
		on_drain_timer(&daemon->drain_timer);
		return;
	}
	daemon->draining = true;
	daemon->drain_until_ns = now + daemon->config->drain_timeout * NSEC_PER_MSEC;
	if (daemon->control)
		control_stop_accepting(daemon->control);
	drain_by(daemon, on_drain_begun);
}

int daemon_reload(struct daemon *daemon, struct failure *failure)
{
	return error_trace(cluster_reload(daemon->cluster, failure));
}

void daemon_describe(const struct daemon *daemon, char *buffer, size_t len)
{
	size_t n_trainers = daemon->control ? control_n_sessions(daemon->control) : 0;
	int n = snprintf(buffer, len, "node %s,%s%s%s, cluster %s, sums by %s", daemon->node,
			 daemon->roles & ROLE_AGENT ? " agent" : "",
			 daemon->roles & ROLE_SERVER ? " server" : "",
			 daemon->roles & ROLE_COORDINATOR ? " coordinator" : "",
			 daemon->config->cluster, reduce_kernel_name());

	if (n > 0 && (size_t)n < len && daemon->draining)
		(void)snprintf(buffer + n, len - (size_t)n, "; stopping, %zu requests under way",
			       pending(daemon) + daemon->n_busy);
	else if (n > 0 && (size_t)n < len && n_trainers)
		(void)snprintf(buffer + n, len - (size_t)n, "; %zu trainers", n_trainers);
}

struct daemon *daemon_free(struct daemon *daemon)
{
	if (!daemon)
		return NULL;
	loop_timer_cancel(&daemon->drain_timer);
	/*
	 * Jobs that can be resumed are left as they are. Their trainers see us go when nothing of
	 * ours touches their memory any more: the next daemon may be there already.
	 */
	if (daemon->control)
		control_freeze(daemon->control);
	if (daemon->agent)
		agent_suspend(daemon->agent);
	while (daemon->agent && agent_n_suspended(daemon->agent) && !loop_turn(daemon->loop, -1))
		;
	if (daemon->agent)
		agent_close(daemon->agent);
	/*
	 * Workers are killed, so that nothing of theirs touches trainers' memory, and what they had
	 * ends.
	 */
	if (daemon->gpu)
		gpu_close(daemon->gpu);
	if (daemon->server)
		server_close(daemon->server);
	/*
	 * Sums read memory that calls within this process have given; closing the transport gives it
	 * back.
	 */
	while (daemon->pool && pool_pending(daemon->pool) && !loop_turn(daemon->loop, -1))
		;
	if (daemon->transport)
		transport_close(daemon->transport);
	if (daemon->control)
		control_close(daemon->control);
	if (daemon->cluster)
		cluster_close(daemon->cluster);
	if (daemon->rpc)
		rpc_close(daemon->rpc);
	/* Nothing posts any more: wait for the threads, then free from the door to the far end. */
	pool_free(daemon->pool);
	control_free(daemon->control);
	agent_free(daemon->agent);
	gpu_free(daemon->gpu);
	server_free(daemon->server);
	transport_free(daemon->transport);
	cluster_free(daemon->cluster);
	admin_free(daemon->admin);
	rpc_free(daemon->rpc);
	block_cache_free(daemon->blocks);
	handouts_done();
	accounts_done(&daemon->accounts);
	fd_close(daemon->params.fds.control);
	fd_close(daemon->params.fds.admin);
	fd_close(daemon->params.fds.data);
	free(daemon->data_key);
	free(daemon);
	return NULL;
}
