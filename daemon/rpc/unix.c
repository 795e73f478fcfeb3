/*
 * The Unix socket. gRPC is not there while nobody is connected, so we listen and accept ourselves and hand the
 * connections over; that also keeps gRPC from unlinking a socket that is not its own. Of each connection we keep a
 * second descriptor, which only tells when the connection has ended: gRPC shuts the socket down before it closes its
 * own, so ours sees the end whichever side it comes from.
 */
#include "base/clock.h"
#include "base/log.h"
#include "rpc/engine.h"

#include <fcntl.h>
#include <grp.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#define ACCEPT_PAUSE_NS (100 * NSEC_PER_MSEC) /* after running out of descriptors */

struct rpc_unix {
	struct rpc *rpc;
	struct loop_source source; /* the listening socket */
	struct loop_timer pause;
	struct loop_timer idle;
	struct rpc_server *server; /* while gRPC is there */
	struct list connections;
	unsigned n_connections;
	bool closed;
	/* The socket file that we made. */
	char path[sizeof(((struct sockaddr_un *)NULL)->sun_path)];
	struct stat made;
};

struct connection {
	struct list link;
	struct rpc_unix *owner;
	struct loop_source source; /* our descriptor */
	int fd;			   /* gRPC's, or -1 once it has it */
};

static void unix_settle(struct rpc_unix *u)
{
	if (!u->closed || u->server)
		return;
	u->rpc->unix_socket = NULL;
	free(u);
}

static void connection_free(struct connection *connection)
{
	struct rpc_unix *u = connection->owner;

	loop_remove(&connection->source);
	fd_close(connection->source.fd);
	fd_close(connection->fd);
	list_remove(&connection->link);
	free(connection);
	if (--u->n_connections || !u->server || u->closed)
		return;
	if (loop_timer_set(u->rpc->loop, &u->idle,
			   clock_now_ns() + u->rpc->unix_idle_ms * NSEC_PER_MSEC))
		rpc_server_close(u->server);
}

static void on_end(struct loop_source *source, uint32_t events)
{
	connection_free(container_of(source, struct connection, source));
}

static void on_idle(struct loop_timer *timer)
{
	struct rpc_unix *u = container_of(timer, struct rpc_unix, idle);

	if (!u->n_connections && u->server)
		rpc_server_close(u->server);
}

static void on_server_gone(void *user)
{
	struct rpc_unix *u = user;

	u->server = NULL;
	/* Those that came while it went wait for the next; rpc_unix_proceed() makes it. */
	rpc_engine_wake(u->rpc);
	unix_settle(u);
}

/* gRPC closes the descriptor, in every case. */
static void pass_on(struct rpc_unix *u, struct connection *connection)
{
	grpc_server_credentials *creds = grpc_insecure_server_credentials_create();

	loop_timer_cancel(&u->idle);
	grpc_server_add_channel_from_fd(u->server->server, TAKE_FD(connection->fd), creds);
	grpc_server_credentials_release(creds);
}

static bool anybody_waits(struct rpc_unix *u)
{
	struct connection *connection;

	list_for_each (connection, &u->connections, link)
		if (connection->fd >= 0)
			return true;
	return false;
}

static int make_server(struct rpc_unix *u)
{
	int r;

	r = rpc_server_new(u->rpc, RPC_DOOR_OPERATORS, &u->server);
	if (r)
		return error_trace(r);
	u->server->gone = on_server_gone;
	u->server->user = u;
	r = rpc_server_start(u->server);
	if (r)
		rpc_server_close(u->server);
	return error_trace(r);
}

void rpc_unix_proceed(struct rpc *rpc)
{
	struct rpc_unix *u = rpc->unix_socket;
	struct connection *connection, *next;
	int r = 0;

	if (!u || u->closed || !anybody_waits(u))
		return;
	if (rpc->state == ENGINE_STOPPED)
		r = rpc_engine_start(rpc);
	else if (rpc->state == ENGINE_RUNNING && !u->server)
		r = make_server(u);
	if (!r && (rpc->state != ENGINE_RUNNING || u->server->closing))
		return; /* rpc_engine_wake() brings us back */
	if (r)
		log_warning("admin socket: gRPC cannot start, closing the connections: %s",
			    strerror(-r));

	list_for_each_safe (connection, next, &u->connections, link) {
		if (connection->fd < 0)
			continue;
		if (r)
			connection_free(connection);
		else
			pass_on(u, connection);
	}
}

static int connection_new(struct rpc_unix *u, int fd)
{
	struct connection *connection = calloc(1, sizeof(*connection));
	int r;

	if (!connection)
		return error_origin(-ENOMEM);
	connection->owner = u;
	connection->fd = -1;
	connection->source.ready = on_end;
	connection->source.fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	r = connection->source.fd < 0 ? -errno : 0;
	if (!r)
		r = loop_add(u->rpc->loop, &connection->source, EPOLLRDHUP);
	if (r) {
		fd_close(connection->source.fd);
		free(connection);
		return error_trace(r);
	}
	connection->fd = fd;
	list_push_back(&u->connections, &connection->link);
	u->n_connections++;
	return 0;
}

static void on_pause_over(struct loop_timer *timer)
{
	struct rpc_unix *u = container_of(timer, struct rpc_unix, pause);

	(void)loop_modify(&u->source, EPOLLIN);
}

static void on_connect(struct loop_source *source, uint32_t events)
{
	struct rpc_unix *u = container_of(source, struct rpc_unix, source);
	_cleanup_(fd_closep) int fd = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	struct ucred peer = { 0 };
	socklen_t len = sizeof(peer);

	if (fd < 0) {
		/* Without descriptors the socket would stay readable and keep us busy. */
		if ((errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) &&
		    !loop_timer_set(u->rpc->loop, &u->pause, clock_now_ns() + ACCEPT_PAUSE_NS))
			(void)loop_modify(source, 0);
		return;
	}
	(void)getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len);
	if (u->n_connections >= RPC_UNIX_CONNECTIONS) {
		log_debug("admin socket: %u connections already, closing that of pid %d, uid %u",
			  u->n_connections, (int)peer.pid, (unsigned)peer.uid);
		return;
	}
	/* Who may connect is said by the socket file's mode; its reader is named here. */
	log_debug("admin socket: pid %d, uid %u connected", (int)peer.pid, (unsigned)peer.uid);
	if (connection_new(u, fd))
		return;
	(void)TAKE_FD(fd);
	rpc_unix_proceed(u->rpc);
}

/* Whether somebody listens at the path; a file that nobody listens at is removed. */
static int replace_stale(const struct sockaddr_un *address, socklen_t len, struct failure *failure)
{
	_cleanup_(fd_closep) int fd =
		socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	struct stat st;

	if (fd < 0)
		return failure_set(failure, -errno, "%s: %s", address->sun_path, strerror(errno));
	if (!connect(fd, (const struct sockaddr *)address, len) || errno == EAGAIN)
		return failure_set(failure, -EADDRINUSE, "%s: another daemon is listening there",
				   address->sun_path);
	if (errno != ECONNREFUSED || lstat(address->sun_path, &st) || !S_ISSOCK(st.st_mode) ||
	    unlink(address->sun_path))
		return failure_set(failure, -EADDRINUSE, "%s: is in the way: %s", address->sun_path,
				   strerror(errno));
	return 0;
}

/*
 * The operators' group gets the socket, whose path nobody else can change. That there is none, or that this process is not in it,
 * is no reason not to serve: then it is for our user and root.
 */
static int give_to_group(const char *path, const char *name)
{
	const struct group *group;
	const char *why;

	if (!name || !*name)
		return 0;
	errno = 0;
	group = getgrnam(name);
	if (group && !chown(path, (uid_t)-1, group->gr_gid))
		return chmod(path, 0660) ? error_origin(-errno) : 0;
	why = group || errno ? strerror(errno) : "there is no such group";
	log_notice("admin socket %s: for this daemon's user and root alone: group %s: %s", path,
		   name, why);
	return 0;
}

static int bind_path(const char *path, const char *group, struct failure *failure,
		     struct rpc_unix *u, int *ret_fd)
{
	_cleanup_(fd_closep) int fd =
		socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int r;

	if (fd < 0)
		return failure_set(failure, -errno, "%s: %s", path, strerror(errno));
	if (!*path || strlen(path) >= sizeof(address.sun_path))
		return failure_set(failure, -ENAMETOOLONG, "%s: a socket's path has 1 to %zu bytes",
				   path, sizeof(address.sun_path) - 1);
	memcpy(address.sun_path, path, strlen(path) + 1);
	/* The file is born with the socket's mode less the umask, so never wider than wanted. */
	(void)fchmod(fd, 0600);
	if (bind(fd, (struct sockaddr *)&address, sizeof(address))) {
		if (errno != EADDRINUSE)
			return failure_set(failure, -errno, "%s: %s", path, strerror(errno));
		r = replace_stale(&address, sizeof(address), failure);
		if (r)
			return r;
		if (bind(fd, (struct sockaddr *)&address, sizeof(address)))
			return failure_set(failure, -errno, "%s: %s", path, strerror(errno));
	}
	if (chmod(path, 0600) || give_to_group(path, group) || lstat(path, &u->made) ||
	    listen(fd, SOMAXCONN))
		return failure_set(failure, -errno, "%s: %s", path, strerror(errno));
	memcpy(u->path, path, strlen(path) + 1);
	*ret_fd = TAKE_FD(fd);
	return 0;
}

int rpc_listen_unix(struct rpc *rpc, const char *path, const char *group, int listen_fd,
		    struct failure *failure)
{
	_cleanup_(fd_closep) int fd = listen_fd;
	_cleanup_(freep) struct rpc_unix *u = calloc(1, sizeof(*u));
	int r;

	assert(!rpc->unix_socket && !rpc->closed);
	if (!u)
		return failure_set(failure, -ENOMEM, "%s: out of memory", path);
	if (fd < 0) {
		r = bind_path(path, group, failure, u, &fd);
		if (r)
			return r;
	}
	/* One that was given to us may block, and accept4() must not. */
	if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK))
		return failure_set(failure, -errno, "%s: %s", path, strerror(errno));
	u->rpc = rpc;
	u->source.ready = on_connect;
	u->source.fd = fd;
	u->idle.expired = on_idle;
	u->pause.expired = on_pause_over;
	list_init(&u->connections);
	r = loop_add(rpc->loop, &u->source, EPOLLIN);
	if (r)
		return failure_set(failure, r, "%s: %s", path, strerror(-r));
	(void)TAKE_FD(fd);
	rpc->unix_socket = TAKE_PTR(u);
	return 0;
}

void rpc_unix_close(struct rpc *rpc)
{
	struct rpc_unix *u = rpc->unix_socket;
	struct connection *connection, *next;
	struct stat st;

	if (!u || u->closed)
		return;
	u->closed = true;
	loop_timer_cancel(&u->idle);
	loop_timer_cancel(&u->pause);
	loop_remove(&u->source);
	/* Only if it is still ours: the next daemon may have bound its own already. */
	if (*u->path && !lstat(u->path, &st) && st.st_dev == u->made.st_dev &&
	    st.st_ino == u->made.st_ino)
		(void)unlink(u->path);
	u->source.fd = fd_close(u->source.fd);
	list_for_each_safe (connection, next, &u->connections, link)
		connection_free(connection);
	if (u->server)
		rpc_server_close(u->server);
	unix_settle(u);
}
