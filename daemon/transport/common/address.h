/*
 * Addresses: text to what the kernel takes, names by a thread that may wait for name servers, and what every data connection
 * has. Home thread.
 */
#pragma once

#include "proto/c.h"
#include <netinet/in.h>
#include <sys/socket.h>

struct mailbox;

#define TRANSPORT_ADDRESS_MAX  96 /* "host:port" with its NUL; longer ones are refused */
#define ADDRESS_CONGESTION_MAX 16 /* TCP_CA_NAME_MAX of the kernel */
/* How much longer a lane may be silent, or take nothing, while its peer is known to be alive. */
#define BUSY_FACTOR 3

#define ADDRESSES_MAX 8

struct address {
	socklen_t len;
	union {
		struct sockaddr any;
		struct sockaddr_in in;
		struct sockaddr_in6 in6;
		struct sockaddr_storage storage;
	};
};

struct addresses {
	struct address list[ADDRESSES_MAX];
	size_t n;
};

/*
 * Whether text is "host:port" or "[host]:port"; an empty host means every address. Returns 0 or -EINVAL; ret_host must
 * hold TRANSPORT_ADDRESS_MAX bytes, ret_port points into text.
 */
int address_split(const char *text, char *ret_host, const char **ret_port);
/*
 * Resolves; asks name servers, so it may block, unless numeric. Returns 0, -EINVAL for text that is no address,
 * -EAGAIN when numeric and the host is a name, or -EHOSTUNREACH with *ret_why a static text.
 */
int address_resolve(const char *text, bool numeric, bool passive, struct addresses *ret_addresses,
		    const char **ret_why);
void address_format(const struct address *address, char *text, size_t size);
/* Whether a connected socket's bytes stay inside this machine. */
bool address_is_inside(int fd);
/* What every data connection has. Ignores what the socket's family does not know. */
void address_tune_socket(int fd, uint64_t peer_timeout_ns);
/*
 * What the kernel holds of what comes in by a connection does not grow until address_lift(): whoever is there has not proved yet
 * that it may have more. Before Linux 5.18 it does.
 */
void address_limit(int fd);
void address_lift(int fd);
/* So many bytes, and one piece more, the kernel takes ahead of what it can send. */
void address_set_ahead(int fd, unsigned bytes);
/*
 * How a socket that is not connected yet, or the connections of one that listens, control congestion; name: empty: as the
 * system says, unless its address, where it will connect to or listens, is on the loopback. Returns 0 or -errno.
 */
int address_set_congestion(int fd, const struct address *address, const char *name);

/* Resolving a name on a thread of its own. */
struct resolver;
struct resolver_params {
	const char *address;
	struct mailbox *mailbox;
	void (*done)(void *user, int r, const char *why, const struct addresses *addresses);
	void *user;
};
int resolver_start(const struct resolver_params *params, struct resolver **ret_resolver);
/* No done() after it; the thread may live on for a while by itself. Called by done()'s owner, also inside done(). */
struct resolver *resolver_free(struct resolver *resolver);
