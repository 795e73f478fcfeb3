/*
 * Addresses as text and as the kernel has them, the options of data sockets, and names resolved
 * on a thread of their own. accept.c, dial.c and transport.c call on the home thread, send.c
 * sets an option on the lane's worker.
 */
#include "transport/common/address.h"
#include "transport/common/worker.h"

#include "base/clock.h"
#include "base/loop/thread.h"
#include <arpa/inet.h>
#include <linux/socket.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>

int address_split(const char *text, char *ret_host, const char **ret_port)
{
	const char *colon = strrchr(text, ':'), *host = text, *end = colon;
	char *rest;

	if (!colon || strlen(text) >= TRANSPORT_ADDRESS_MAX || colon[1] < '0' || colon[1] > '9' ||
	    strtoul(colon + 1, &rest, 10) > UINT16_MAX || *rest)
		return -EINVAL;
	if (*text == '[') {
		if (colon == text || colon[-1] != ']')
			return -EINVAL;
		host++;
		end--;
	} else if (memchr(text, ':', (size_t)(colon - text))) {
		return -EINVAL; /* an IPv6 address without brackets could mean anything */
	}
	memcpy(ret_host, host, (size_t)(end - host));
	ret_host[end - host] = '\0';
	*ret_port = colon + 1;
	return 0;
}

int address_resolve(const char *text, bool numeric, bool passive, struct addresses *ret_addresses,
		    const char **ret_why)
{
	struct addrinfo hints = {
		.ai_socktype = SOCK_STREAM,
		.ai_flags = AI_NUMERICSERV | (numeric ? AI_NUMERICHOST : 0) |
			    (passive ? AI_PASSIVE : 0),
	};
	struct addresses addresses = { 0 };
	char host[TRANSPORT_ADDRESS_MAX];
	struct addrinfo *found = NULL;
	const char *port;
	int r;

	r = address_split(text, host, &port);
	if (r)
		return r;
	r = getaddrinfo(*host ? host : NULL, port, &hints, &found);
	if (r == EAI_NONAME && numeric)
		return -EAGAIN;
	if (r) {
		*ret_why = r == EAI_SYSTEM ? strerrordesc_np(errno) : gai_strerror(r);
		return error_origin(-EHOSTUNREACH);
	}
	for (struct addrinfo *i = found; i && addresses.n < ADDRESSES_MAX; i = i->ai_next) {
		struct address *address = &addresses.list[addresses.n];

		if (i->ai_addrlen > sizeof(address->storage))
			continue;
		address->len = i->ai_addrlen;
		memcpy(&address->storage, i->ai_addr, i->ai_addrlen);
		addresses.n++;
	}
	freeaddrinfo(found);
	*ret_addresses = addresses;
	return 0;
}

void address_format(const struct address *address, char *text, size_t size)
{
	char host[INET6_ADDRSTRLEN] = "?";

	if (address->any.sa_family == AF_INET) {
		(void)inet_ntop(AF_INET, &address->in.sin_addr, host, sizeof(host));
		(void)snprintf(text, size, "%s:%u", host, ntohs(address->in.sin_port));
	} else if (address->any.sa_family == AF_INET6 &&
		   IN6_IS_ADDR_V4MAPPED(&address->in6.sin6_addr)) {
		(void)inet_ntop(AF_INET, &address->in6.sin6_addr.s6_addr[12], host, sizeof(host));
		(void)snprintf(text, size, "%s:%u", host, ntohs(address->in6.sin6_port));
	} else if (address->any.sa_family == AF_INET6) {
		(void)inet_ntop(AF_INET6, &address->in6.sin6_addr, host, sizeof(host));
		(void)snprintf(text, size, "[%s]:%u", host, ntohs(address->in6.sin6_port));
	} else {
		(void)snprintf(text, size, "a local socket");
	}
}

static void set_option(int fd, int level, int option, unsigned value)
{
	int v = (int)MIN(value, (unsigned)INT_MAX);

	(void)setsockopt(fd, level, option, &v, sizeof(v));
}

/*
 * What waits for more to fill its segment (MSG_MORE) has to leave room for that, or nobody is asked for more, and it waits for a
 * timer of the kernel: 200 ms. On the loopback a segment is twice as long as what goes ahead on the slowest links.
 */
void address_set_ahead(int fd, unsigned bytes)
{
	struct tcp_info info = { 0 };
	socklen_t len = sizeof(info);

	/* Segments grow with the window up to that. */
	(void)getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len);
	set_option(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, MAX(bytes, 2 * info.tcpi_pmtu));
}

/*
 * The kernel looks after the silence that we do not: bytes of ours that nobody acknowledges, also
 * into a window that stays closed (which a busy peer's may do for a while), and, by keepalive, idle
 * connections whose other end has vanished.
 */
void address_tune_socket(int fd, uint64_t peer_timeout_ns)
{
	uint64_t timeout_ms = MIN(peer_timeout_ns / NSEC_PER_MSEC * BUSY_FACTOR, (uint64_t)INT_MAX);

	set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
	address_set_ahead(fd, TRANSPORT_AHEAD);
	set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, MAX((unsigned)timeout_ms, 1u));
	set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 60);
	set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
	set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
}

/* As it is now: less than has been offered already would have the kernel drop what comes right behind the proof. */
void address_limit(int fd)
{
	set_option(fd, SOL_SOCKET, SO_BUF_LOCK, SOCK_RCVBUF_LOCK);
}

void address_lift(int fd)
{
	set_option(fd, SOL_SOCKET, SO_BUF_LOCK, 0);
}

static bool is_loopback(const struct address *address)
{
	const struct in6_addr *in6 = &address->in6.sin6_addr;
	uint32_t in = address->any.sa_family == AF_INET ? ntohl(address->in.sin_addr.s_addr) : 0;

	if (address->any.sa_family == AF_INET6 && IN6_IS_ADDR_V4MAPPED(in6))
		in = (uint32_t)in6->s6_addr[12] << 24;
	else if (address->any.sa_family == AF_INET6)
		return IN6_IS_ADDR_LOOPBACK(in6);
	return in >> 24 == IN_LOOPBACKNET;
}

bool address_is_inside(int fd)
{
	struct address ours = { 0 }, theirs = { 0 };
	socklen_t len = sizeof(ours), their_len = sizeof(theirs);

	return !getsockname(fd, &ours.any, &len) && !getpeername(fd, &theirs.any, &their_len) &&
	       is_loopback(&ours) && is_loopback(&theirs);
}

/*
 * Algorithms that pace what they send (bbr) set a timer for every 64 KiB. Inside a machine that
 * takes more time than all the rest of TCP. Once a connection stands it is too late: what has been
 * paced stays so.
 */
int address_set_congestion(int fd, const struct address *address, const char *name)
{
	if (!*name) {
		/* Which every kernel has, and lets everyone use. Without it things are slower. */
		if (is_loopback(address))
			(void)setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
		return 0;
	}
	if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, (socklen_t)strlen(name)) < 0)
		return error_origin(-errno);
	return 0;
}

/*
 * getaddrinfo() blocks for as long as name servers like and cannot be cancelled. So the thread is
 * detached, and whoever comes last, it or the owner, frees.
 */
struct resolver {
	struct resolver_params params;
	char address[TRANSPORT_ADDRESS_MAX];
	struct addresses addresses;
	const char *why;
	int r;
	struct mail mail;
	bool has_run;
	pthread_mutex_t lock; /* guards what is below */
	bool is_abandoned;
};

static void resolver_destroy(struct resolver *resolver)
{
	(void)pthread_mutex_destroy(&resolver->lock);
	free(resolver);
}

static void resolver_on_mail(struct mail *mail)
{
	struct resolver *resolver = container_of(mail, struct resolver, mail);

	/* After this the thread no longer touches it. */
	(void)pthread_mutex_lock(&resolver->lock);
	(void)pthread_mutex_unlock(&resolver->lock);
	resolver->has_run = true;
	if (resolver->is_abandoned)
		resolver_destroy(resolver);
	else
		resolver->params.done(resolver->params.user, resolver->r, resolver->why,
				      &resolver->addresses);
}

static void *resolver_main(void *arg)
{
	struct resolver *resolver = arg;
	bool is_abandoned;

	resolver->r = address_resolve(resolver->address, false, false, &resolver->addresses,
				      &resolver->why);
	(void)pthread_mutex_lock(&resolver->lock);
	is_abandoned = resolver->is_abandoned;
	if (!is_abandoned)
		mailbox_post(resolver->params.mailbox, &resolver->mail);
	(void)pthread_mutex_unlock(&resolver->lock);
	if (is_abandoned)
		resolver_destroy(resolver);
	return NULL;
}

int resolver_start(const struct resolver_params *params, struct resolver **ret_resolver)
{
	_cleanup_(freep) struct resolver *resolver = calloc(1, sizeof(*resolver));
	int r;

	if (!resolver)
		return error_origin(-ENOMEM);
	resolver->params = *params;
	resolver->mail.run = resolver_on_mail;
	resolver->why = "";
	(void)snprintf(resolver->address, sizeof(resolver->address), "%s", params->address);
	(void)pthread_mutex_init(&resolver->lock, NULL);

	r = thread_detach(resolver_main, resolver);
	if (r) {
		(void)pthread_mutex_destroy(&resolver->lock);
		return error_trace(r);
	}
	*ret_resolver = TAKE_PTR(resolver);
	return 0;
}

/*
 * Not run: either the thread still works, and frees when it finds itself abandoned; or the mail
 * lies in the mailbox, which runs it later, at the latest when the transport closes, and the mail
 * frees.
 */
struct resolver *resolver_free(struct resolver *resolver)
{
	if (!resolver)
		return NULL;
	if (resolver->has_run) {
		resolver_destroy(resolver);
		return NULL;
	}
	(void)pthread_mutex_lock(&resolver->lock);
	resolver->is_abandoned = true;
	(void)pthread_mutex_unlock(&resolver->lock);
	return NULL;
}
