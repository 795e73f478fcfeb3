/*
 * TCP: whoever reaches the port may speak to gRPC, which takes all connections, and of each all streams, before anybody is asked:
 * some 27 KiB for a TLS handshake that never ends, some 12 KiB for the 14 bytes of a header. So we accept ourselves, as many
 * connections as one address, and all together, may have, and relay them to gRPC.
 *
 * Without TLS gRPC is given one end of a socket pair. What a client sends goes on frame by frame of HTTP/2: streams no faster than
 * serve.c takes them, other frames no faster than anybody needs. Who sends more waits. Nothing else is looked at.
 *
 * With TLS, for which gRPC takes no descriptors, it listens at a Unix socket. That has no path once it is bound: we alone connect,
 * by a descriptor of it. Bytes pass as they are. Who calls has shown a certificate of the authority's, and is counted no more.
 */
#include "base/clock.h"
#include "base/log.h"
#include "base/source.h"
#include "rpc/engine.h"

#include <fcntl.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <limits.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

/* Of one connection the kernel holds this, and as much again for itself. */
#define INPUT_MAX	(32 << 10)
#define LISTENERS_MAX	4		      /* addresses of one name */
#define ACCEPT_PAUSE_NS (200 * NSEC_PER_MSEC) /* after running out of descriptors */
#define GRPC_NAME_MAX	32
#define GRPC_SOCKET	"bps-grpc.sock"
/* With TLS gRPC accepts, soon, what we have connected: without a descriptor for it, it listens no more. */
#define DESCRIPTORS_LEFT 64

/* Streams of all connections; and of each one, frames that are neither streams nor carry much of one. */
#define STREAMS_S	2000
#define STREAMS_AT_ONCE 512
#define FRAMES_S	500
#define FRAMES_AT_ONCE	2000
#define DATA_MUCH	1024u
#define REFILL_NS	(5 * NSEC_PER_MSEC)

/* Pieces of what is still to be said when the daemon stops: each of a flow's size. */
#define LAST_WORDS 16

#define PREFACE_LEN   24
#define FRAME_HEAD    9
#define FRAME_DATA    0
#define FRAME_HEADERS 1

struct listener {
	struct rpc_tcp *owner;
	struct loop_source source;
};

/* So many a second, and so many at once. */
struct token_bucket {
	uint64_t n, filled_ns;
};

struct rpc_tcp {
	struct rpc_server *server;
	int tls_fd; /* the socket (O_PATH) that gRPC listens at; -1: without TLS */
	struct listener listeners[LISTENERS_MAX];
	unsigned n_listeners;
	struct loop_timer pause;
	struct list connections;
	unsigned n_connections;
	unsigned n_counted;  /* those whose is_counted is set */
	unsigned n_unheard;  /* those that gRPC may have yet to accept */
	uint64_t n_accepted; /* ever */
	struct token_bucket streams;
	struct loop_timer refill; /* while somebody waits for that */
};

/* One direction. What was read and is not written stays here, and until it is nothing more is read. */
struct flow {
	struct loop_source *from, *to;
	bool is_scanned; /* for frames */
	size_t at, len;
	size_t ready; /* of these, may go on */
	unsigned char data[4096];
};

struct connection {
	struct list link;
	struct rpc_tcp *owner;
	struct loop_source client, server; /* its socket; ours to gRPC, -1 while there is none */
	struct flow in, out;		   /* by the client, to it */
	struct token_bucket frames;
	bool waits; /* for the next tokens */
	bool is_counted; /* against the limits: it has shown no certificate, and its client is not gone */
	bool heard; /* gRPC has it, and has said something */
	/* Of what the client sends. */
	uint32_t skip; /* of the preface, or of a frame */
	unsigned char head[FRAME_HEAD];
	unsigned head_len;
	uint64_t number;
	char from[SOURCE_MAX], name[RPC_PEER_MAX];
	char grpc_name[GRPC_NAME_MAX]; /* that gRPC has for the peer */
};

static bool token_bucket_take(struct token_bucket *bucket, unsigned per_s, unsigned at_once)
{
	uint64_t now_ns = clock_now_ns(), step_ns = NSEC_PER_SEC / per_s;
	uint64_t n = (now_ns - bucket->filled_ns) / step_ns;

	if (bucket->n + n >= at_once) {
		bucket->n = at_once;
		bucket->filled_ns = now_ns;
	} else {
		bucket->n += n;
		bucket->filled_ns += n * step_ns;
	}
	if (!bucket->n)
		return false;
	bucket->n--;
	return true;
}

static bool may_go_on(struct connection *connection, unsigned kind, uint32_t len)
{
	if (kind == FRAME_DATA && len >= DATA_MUCH)
		return true;
	if (kind == FRAME_HEADERS)
		return token_bucket_take(&connection->owner->streams, STREAMS_S, STREAMS_AT_ONCE);
	return token_bucket_take(&connection->frames, FRAMES_S, FRAMES_AT_ONCE);
}

/* How much of it may go on: all, or up to within the head of a frame that has to wait. */
static size_t scan(struct connection *connection, const unsigned char *data, size_t len)
{
	unsigned char *head = connection->head;
	size_t at = 0;
	uint32_t frame;

	while (at < len) {
		if (connection->skip) {
			size_t n = MIN((size_t)connection->skip, len - at);

			connection->skip -= (uint32_t)n;
			at += n;
			continue;
		}
		head[connection->head_len] = data[at];
		frame = (uint32_t)head[0] << 16 | (uint32_t)head[1] << 8 | head[2];
		if (connection->head_len + 1 < FRAME_HEAD) {
			connection->head_len++;
		} else if (may_go_on(connection, head[3], frame)) {
			connection->skip = frame;
			connection->head_len = 0;
		} else {
			connection->waits = true;
			break;
		}
		at++;
	}
	return at;
}

static void connection_heard(struct connection *connection)
{
	connection->owner->n_unheard -= !connection->heard;
	connection->heard = true;
}

static void connection_uncount(struct connection *connection)
{
	connection->owner->n_counted -= connection->is_counted;
	connection->is_counted = false;
}

static void connection_free(struct connection *connection)
{
	loop_remove(&connection->client);
	loop_remove(&connection->server);
	fd_close(connection->client.fd);
	fd_close(connection->server.fd);
	list_remove(&connection->link);
	connection->owner->n_connections--;
	connection_uncount(connection);
	connection_heard(connection);
	free(connection);
}

/* Passes on what there is, as far as it may and there is room. Returns whether the connection goes on. */
static bool flow_pass(struct connection *connection, struct flow *flow)
{
	ssize_t n;

	if (!flow->len) {
		n = read(flow->from->fd, flow->data, sizeof(flow->data));
		if (n <= 0)
			return n && (errno == EAGAIN || errno == EINTR);
		if (flow == &connection->out)
			connection_heard(connection);
		flow->at = 0;
		flow->len = (size_t)n;
	}
	while (flow->len) {
		const unsigned char *data = flow->data + flow->at;

		if (!flow->ready)
			flow->ready =
				flow->is_scanned ? scan(connection, data, flow->len) : flow->len;
		if (!flow->ready)
			return true;
		n = send(flow->to->fd, data, flow->ready, MSG_NOSIGNAL);
		if (n < 0)
			return errno == EAGAIN || errno == EINTR;
		flow->at += (size_t)n;
		flow->len -= (size_t)n;
		flow->ready -= (size_t)n;
	}
	return true;
}

static int want(struct connection *connection)
{
	const struct flow *in = &connection->in, *out = &connection->out;
	int r;

	r = loop_modify(&connection->client, (in->len ? 0 : EPOLLIN) | (out->len ? EPOLLOUT : 0));
	if (!r)
		r = loop_modify(&connection->server,
				(out->len ? 0 : EPOLLIN) | (in->ready ? EPOLLOUT : 0));
	return error_trace(r);
}

static void pass(struct connection *connection)
{
	struct rpc_tcp *tcp = connection->owner;
	bool goes_on;

	connection->waits = false;
	goes_on = flow_pass(connection, &connection->in) && flow_pass(connection, &connection->out);
	if (!goes_on || want(connection)) {
		connection_free(connection);
		return;
	}
	/* Without memory it waits until another does. */
	if (connection->waits && !tcp->refill.loop)
		(void)loop_timer_set(tcp->server->rpc->loop, &tcp->refill,
				     clock_now_ns() + REFILL_NS);
}

static void on_client(struct loop_source *source, uint32_t events)
{
	struct connection *connection = container_of(source, struct connection, client);

	if (events & (EPOLLERR | EPOLLHUP))
		connection_free(connection);
	else
		pass(connection);
}

static void on_server(struct loop_source *source, uint32_t events)
{
	struct connection *connection = container_of(source, struct connection, server);

	/* gRPC has ended it, and the client does not read the rest. */
	if ((events & (EPOLLERR | EPOLLHUP)) && connection->out.len)
		connection_free(connection);
	else
		pass(connection);
}

/* One after the other, and who had something goes to the end. */
static void on_refill(struct loop_timer *timer)
{
	struct rpc_tcp *tcp = container_of(timer, struct rpc_tcp, refill);
	struct connection *connection, *next;
	unsigned n = tcp->n_connections;

	list_for_each_safe (connection, next, &tcp->connections, link) {
		if (!n--)
			break;
		if (!connection->waits)
			continue;
		list_remove(&connection->link);
		list_push_back(&tcp->connections, &connection->link);
		pass(connection);
	}
}

static bool is_counted(const struct connection *connection, const char *from)
{
	return connection->is_counted && (!from || !strcmp(connection->from, from));
}

/*
 * Its client is gone. What gRPC has not accepted yet stays until it has, and sees the end: else nobody would know how much is still
 * to come to it.
 */
static void connection_abandon(struct connection *connection)
{
	if (connection->heard || connection->server.fd < 0 ||
	    loop_modify(&connection->server, EPOLLIN)) {
		connection_free(connection);
		return;
	}
	loop_remove(&connection->client);
	connection->client.fd = fd_close(connection->client.fd);
	(void)shutdown(connection->server.fd, SHUT_WR);
	connection_uncount(connection);
	connection->waits = false;
}

/* One of n. Chance says which: who comes again and again is as likely to lose a place as to take one. From NULL: from anywhere. */
static void close_any(struct rpc_tcp *tcp, const char *from, unsigned n)
{
	struct connection *connection;
	unsigned chosen = 0;

	/* Without it the oldest. */
	(void)!getrandom(&chosen, sizeof(chosen), GRND_NONBLOCK);
	chosen %= n;
	list_for_each (connection, &tcp->connections, link) {
		if (!is_counted(connection, from) || chosen--)
			continue;
		log_warning(
			"gRPC: a connection from %s gives its place to another: %u have shown no "
			"certificate yet",
			connection->from, n);
		connection_abandon(connection);
		return;
	}
}

/*
 * Who has a certificate shows it in no time, and is not counted then: so with TLS there is always a place for a newcomer, whoever
 * has taken all that there are, also from where the newcomer is.
 */
static bool has_place(struct rpc_tcp *tcp, const char *from)
{
	bool tls = tcp->tls_fd >= 0;
	unsigned n = 0, n_all = tcp->n_counted, most = tls ? RPC_TLS_OF_ONE : RPC_TCP_OF_ONE;
	unsigned most_all = tls ? RPC_TLS_CONNECTIONS : RPC_TCP_CONNECTIONS;
	const struct connection *connection;

	list_for_each (connection, &tcp->connections, link)
		n += is_counted(connection, from);
	if (n < most && n_all < most_all)
		return true;
	if (tls && n >= most)
		close_any(tcp, from, n);
	else if (tls)
		close_any(tcp, NULL, n_all);
	else
		log_warning("gRPC: connection from %s closed: %u of at most %u from there, %u of "
			    "%u in all",
			    from, n, most, n_all, most_all);
	return tls;
}

/* gRPC closes its end of the pair, in every case. */
static int give_pair(struct connection *connection)
{
	grpc_server_credentials *creds;
	int pair[2];

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair))
		return error_origin(-errno);
	connection->server.fd = pair[0];
	(void)snprintf(connection->grpc_name, GRPC_NAME_MAX, "fd:%d", pair[1]);
	creds = grpc_insecure_server_credentials_create();
	grpc_server_add_channel_from_fd(connection->owner->server->server, pair[1], creds);
	grpc_server_credentials_release(creds);
	return 0;
}

/* The kernel gives our end a name that no other socket has, a zero byte and five digits: gRPC calls the peer by that. */
static int connect_to_grpc(struct connection *connection)
{
	const struct rpc_tcp *tcp = connection->owner;
	struct sockaddr_un to = { .sun_family = AF_UNIX }, own = { 0 };
	_cleanup_(fd_closep) int fd =
		socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	socklen_t len = sizeof(own);
	struct rlimit limit;

	if (fd < 0)
		return error_origin(-errno);
	if (tcp->n_unheard > 2 * RPC_TLS_CONNECTIONS)
		return error_origin(-EAGAIN);
	if (!getrlimit(RLIMIT_NOFILE, &limit) &&
	    (rlim_t)fd + tcp->n_unheard + DESCRIPTORS_LEFT >= limit.rlim_cur)
		return error_origin(-EMFILE);
	(void)snprintf(to.sun_path, sizeof(to.sun_path), "/proc/self/fd/%d", tcp->tls_fd);
	if (bind(fd, (struct sockaddr *)&to, sizeof(to.sun_family)) ||
	    getsockname(fd, (struct sockaddr *)&own, &len) ||
	    connect(fd, (struct sockaddr *)&to, sizeof(to)))
		return error_origin(-errno);
	(void)snprintf(connection->grpc_name, GRPC_NAME_MAX, "unix-abstract:%.*s",
		       (int)(len - offsetof(struct sockaddr_un, sun_path) - 1), own.sun_path + 1);
	connection->server.fd = TAKE_FD(fd);
	return 0;
}

static void listen_for(struct rpc_tcp *tcp, uint32_t events)
{
	for (unsigned i = 0; i < tcp->n_listeners; i++)
		(void)loop_modify(&tcp->listeners[i].source, events);
}

/*
 * What passes, as the want of descriptors, or gRPC's backlog when it is full (-EAGAIN). The sockets would stay readable
 * and keep us busy. Returns whether all waits for a while.
 */
static bool pause_after(struct rpc_tcp *tcp, int r)
{
	if (r != -EMFILE && r != -ENFILE && r != -ENOMEM && r != -ENOBUFS && r != -EAGAIN)
		return false;
	if (loop_timer_set(tcp->server->rpc->loop, &tcp->pause, clock_now_ns() + ACCEPT_PAUSE_NS))
		return false;
	log_warning("gRPC: no connection is accepted for a moment: %s", strerror(-r));
	listen_for(tcp, 0);
	return true;
}

/* Who was accepted, and cannot be passed on yet, waits: nobody else is accepted meanwhile. */
static void pass_on(struct connection *connection)
{
	struct rpc_tcp *tcp = connection->owner;
	int r = tcp->tls_fd < 0 ? give_pair(connection) : connect_to_grpc(connection);

	if (pause_after(tcp, r))
		return;
	if (!r)
		r = loop_add(tcp->server->rpc->loop, &connection->client, EPOLLIN);
	if (!r)
		r = loop_add(tcp->server->rpc->loop, &connection->server, EPOLLIN);
	if (r)
		connection_free(connection);
}

static void on_pause_over(struct loop_timer *timer)
{
	struct rpc_tcp *tcp = container_of(timer, struct rpc_tcp, pause);
	struct connection *connection, *next;

	listen_for(tcp, EPOLLIN);
	list_for_each_safe (connection, next, &tcp->connections, link)
		if (connection->server.fd < 0)
			pass_on(connection);
}

static void name_peer(int fd, char ret_name[RPC_PEER_MAX])
{
	struct sockaddr_storage address = { 0 };
	socklen_t len = sizeof(address);
	char host[64] = "?", port[8] = "?";

	if (!getpeername(fd, (struct sockaddr *)&address, &len))
		(void)getnameinfo((struct sockaddr *)&address, len, host, sizeof(host), port,
				  sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV);
	(void)snprintf(ret_name, RPC_PEER_MAX,
		       address.ss_family == AF_INET6 ? "ipv6:[%s]:%s" : "ipv4:%s:%s", host, port);
}

static void accept_one(struct rpc_tcp *tcp, int fd)
{
	struct connection *connection;
	char from[SOURCE_MAX];
	int on = 1, input = INPUT_MAX;

	source_of(fd, from);
	connection = has_place(tcp, from) ? calloc(1, sizeof(*connection)) : NULL;
	if (!connection) {
		fd_close(fd);
		return;
	}
	*connection = (struct connection){
		.owner = tcp,
		.client = { .fd = fd, .ready = on_client },
		.server = { .fd = -1, .ready = on_server },
		.in = { .from = &connection->client,
			.to = &connection->server,
			.is_scanned = tcp->tls_fd < 0 },
		.out = { .from = &connection->server, .to = &connection->client },
		.is_counted = true,
		.skip = PREFACE_LEN,
		.number = tcp->n_accepted++,
	};
	memcpy(connection->from, from, sizeof(from));
	name_peer(fd, connection->name);
	(void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	(void)setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &input, sizeof(input));
	list_push_back(&tcp->connections, &connection->link);
	tcp->n_connections++;
	tcp->n_counted++;
	tcp->n_unheard++;
	pass_on(connection);
}

/* Returns NULL when it is gone. */
static struct connection *connection_of(const struct rpc_tcp *tcp, const char *peer)
{
	struct connection *found = NULL, *connection;

	/* The newest that has the name: gRPC may use a descriptor again, the kernel a name. */
	list_for_each (connection, &tcp->connections, link)
		if (!strcmp(connection->grpc_name, peer) &&
		    (!found || found->number < connection->number))
			found = connection;
	return found;
}

const char *rpc_tcp_peer(const struct rpc_tcp *tcp, const char *peer)
{
	const struct connection *connection = connection_of(tcp, peer);

	return connection ? connection->name : peer;
}

const char *rpc_tcp_source(const struct rpc_tcp *tcp, const char *peer, bool is_known)
{
	struct connection *connection = connection_of(tcp, peer);

	if (connection && is_known)
		connection_uncount(connection);
	return connection && connection->is_counted ? connection->from : "";
}

/* One connection a turn: who does nothing but connect takes turns with all else that the loop has. */
static void on_connect(struct loop_source *source, uint32_t events)
{
	struct rpc_tcp *tcp = container_of(source, struct listener, source)->owner;
	int fd = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	(void)events;
	if (fd >= 0)
		accept_one(tcp, fd);
	else if (errno != EAGAIN)
		(void)pause_after(tcp, -errno);
}

/* No SO_REUSEPORT: two daemons on one port would share its clients. */
static int listen_at(struct rpc_tcp *tcp, const struct addrinfo *at)
{
	struct listener *listener = &tcp->listeners[tcp->n_listeners];
	_cleanup_(fd_closep) int fd =
		socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	int r, on = 1, off = 0;

	if (fd < 0)
		return error_origin(-errno);
	(void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (at->ai_family == AF_INET6)
		(void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
	if (bind(fd, at->ai_addr, at->ai_addrlen) || listen(fd, SOMAXCONN))
		return error_origin(-errno);
	listener->owner = tcp;
	listener->source = (struct loop_source){ .fd = fd, .ready = on_connect };
	r = loop_add(tcp->server->rpc->loop, &listener->source, EPOLLIN);
	if (r)
		return error_trace(r);
	(void)TAKE_FD(fd);
	tcp->n_listeners++;
	return 0;
}

static uint16_t port_of(const struct rpc_tcp *tcp)
{
	struct sockaddr_storage address = { 0 };
	socklen_t len = sizeof(address);

	(void)getsockname(tcp->listeners[0].source.fd, (struct sockaddr *)&address, &len);
	return ntohs(address.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&address)->sin6_port
						   : ((struct sockaddr_in *)&address)->sin_port);
}

/* At all addresses of the name that this machine has; with port 0 at the first. */
static int listen_at_all(struct rpc_tcp *tcp, const char *address, struct failure *failure)
{
	const struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE };
	char host[256];
	struct addrinfo *found = NULL;
	const char *port;
	int r;

	if (rpc_address_split(address, host, sizeof(host), &port))
		return failure_set(failure, -EINVAL, "%s: not host:port", address);
	r = getaddrinfo(*host ? host : NULL, port, &hints, &found);
	if (r)
		return failure_set(failure, -EADDRNOTAVAIL, "%s: %s", address, gai_strerror(r));
	r = -EADDRNOTAVAIL;
	for (struct addrinfo *at = found; at && tcp->n_listeners < LISTENERS_MAX;
	     at = at->ai_next) {
		int one = listen_at(tcp, at);

		r = tcp->n_listeners ? 0 : one;
		if (!one && !strcmp(port, "0"))
			break;
	}
	freeaddrinfo(found);
	return r ? failure_set(failure, r, "%s: %s", address, strerror(-r)) : 0;
}

struct rpc_tcp *rpc_tcp_close(struct rpc_tcp *tcp)
{
	struct connection *connection, *next;

	if (!tcp)
		return NULL;
	fd_close(tcp->tls_fd);
	loop_timer_cancel(&tcp->pause);
	loop_timer_cancel(&tcp->refill);
	for (unsigned i = 0; i < tcp->n_listeners; i++) {
		loop_remove(&tcp->listeners[i].source);
		fd_close(tcp->listeners[i].source.fd);
	}
	list_for_each_safe (connection, next, &tcp->connections, link) {
		/* What gRPC was given to say still leaves, if the client takes it. */
		for (unsigned i = 0; i < LAST_WORDS && !connection->out.len; i++)
			if (!flow_pass(connection, &connection->out))
				break;
		connection_free(connection);
	}
	free(tcp);
	return NULL;
}

/* mkdtemp(3)'s template: where this process may make files. Of several folders systemd makes a list with colons. */
static void name_folder(char ret_path[PATH_MAX])
{
	const char *runtime = getenv("RUNTIME_DIRECTORY"), *temporary = getenv("TMPDIR");
	const char *in = temporary && *temporary ? temporary : "/tmp";
	size_t len = strlen(in);

	if (runtime && *runtime) {
		in = runtime;
		len = strcspn(in, ":");
	}
	(void)snprintf(ret_path, PATH_MAX, "%.*s/bps-grpc-XXXXXX", (int)len, in);
}

/* By the folder's descriptor, as a socket's path may be shorter than that of the folder. */
static int bind_in(struct rpc_tcp *tcp, int folder, const char *address, const struct rpc_tls *tls,
		   grpc_server_credentials *creds, struct failure *failure)
{
	char path[64];

	(void)snprintf(path, sizeof(path), "unix:/proc/self/fd/%d/" GRPC_SOCKET, folder);
	if (grpc_server_add_http2_port(tcp->server->server, path, creds) <= 0)
		return failure_set(failure, -EINVAL,
				   "%s: cannot be served; are %s and %s a certificate and its key?",
				   address, tls->cert, tls->key);
	tcp->tls_fd = openat(folder, GRPC_SOCKET, O_PATH | O_CLOEXEC);
	return tcp->tls_fd < 0 ? failure_set(failure, -errno, "%s: gRPC's socket: %s", address,
					     strerror(errno))
			       : 0;
}

/* Nobody else can enter the folder, and it is gone before this returns: a daemon that is killed leaves none. */
static int listen_in_private(struct rpc_tcp *tcp, const char *address, const struct rpc_tls *tls,
			     struct failure *failure)
{
	_cleanup_(fd_closep) int fd = -1;
	grpc_server_credentials *creds;
	char folder[PATH_MAX];
	int r;

	r = rpc_credentials_of_server(tls, failure, &creds);
	if (r)
		return error_trace(r);
	name_folder(folder);
	if (mkdtemp(folder)) {
		fd = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
		r = fd < 0 ? -errno : 0;
		if (!r)
			r = bind_in(tcp, fd, address, tls, creds, failure);
		(void)unlinkat(fd, GRPC_SOCKET, 0);
		(void)rmdir(folder);
	} else {
		r = -errno;
	}
	if (fd < 0)
		r = failure_set(failure, r, "%s: gRPC's socket cannot be made in %s: %s", address,
				folder, strerror(-r));
	grpc_server_credentials_release(creds);
	return r;
}

int rpc_tcp_listen(struct rpc_server *server, const char *address, const struct rpc_tls *tls,
		   uint16_t *ret_port, struct failure *failure)
{
	struct rpc_tcp *tcp = calloc(1, sizeof(*tcp));
	int r;

	if (!tcp)
		return failure_set(failure, -ENOMEM, "%s: out of memory", address);
	tcp->server = server;
	tcp->tls_fd = -1;
	tcp->pause.expired = on_pause_over;
	tcp->refill.expired = on_refill;
	list_init(&tcp->connections);
	r = listen_at_all(tcp, address, failure);
	if (!r && tls)
		r = listen_in_private(tcp, address, tls, failure);
	if (r) {
		(void)rpc_tcp_close(tcp);
		return r;
	}
	*ret_port = port_of(tcp);
	server->tcp = tcp;
	return 0;
}
