/*
 * What the files of transport/ share. Two kinds of state, kept apart by thread:
 *
 *	home	peers, calls and deliveries as objects with names, connections being made, timers
 *	worker	one for each data thread (or one on the home loop): lanes, that is sockets, what waits to be written,
 *		what is being read
 *
 * Home speaks to a lane by mail to its worker's loop, in order. A lane speaks to home through its mailbox. A lane ends in
 * three steps: home posts close (or the lane posts lost, and home answers with close), the lane lets go of everything
 * and posts closed, home frees it. So no call is ended and nothing freed while a data thread can touch it.
 */
#pragma once

#include "base/memory/bulk.h"
#include "base/metrics.h"
#include "transport/common/address.h"
#include "transport/common/worker.h"
#include "transport/hooks.h"
#include "transport/transport.h"

struct handshake;
struct rdma;
struct rdma_params;

/* The data port: accept.c's. */
struct transport_port {
	struct loop_source listener;
	struct loop_timer timer; /* out of descriptors: when to accept again */
	uint16_t number;
	struct list handshakes; /* of accepted connections */
	unsigned n_unproved;	/* of these; the oldest first */
	unsigned n_accepted;	/* accepted connections that have proved themselves, and are open */
	uint64_t complained_ns;
	unsigned n_unsaid; /* complaints since that were not logged */
};

/* Calls whose payload was damaged on the way. */
struct transport_damaged {
	unsigned n_calls; /* since the log last spoke of them */
	uint64_t said_ns; /* when that was; 0: not yet */
};

/* What the operator set. */
struct transport_settings {
	unsigned n_lanes, max_connections;
	uint64_t handshake_timeout_ns, peer_timeout_ns, quota_bytes;
	struct accounts *accounts;
	enum transport_checksums checksums;
	enum transport_probes probes;
	bool is_rdma_strict; /* parts may not go by TCP */
	bool has_threads;    /* data threads: messages come and go on others than home */
};

struct transport {
	const struct transport_hooks *hooks;
	struct loop *loop;
	struct block_cache *blocks;
	const struct transport_ops *ops;
	void *user;
	uint64_t id;
	char node[64];
	void *key;
	size_t key_len;
	struct transport_settings settings;
	struct handshake *probing;		 /* the one that wants a probe, or NULL */
	_Atomic uint64_t probed_bytes_s;	 /* any thread; 0: not known */
	_Atomic uint64_t bytes_s;		 /* the same; the workers' together */
	char congestion[ADDRESS_CONGESTION_MAX]; /* empty: by address */
	struct metric checksum_errors, lanes_broken, copied;
	struct transport_damaged damaged;

	bool is_closed;
	struct mailboxes mailboxes;
	struct mailbox
		mailbox; /* of these the only one, home to home: what must not happen inside the caller */
	struct worker **workers;
	unsigned n_workers, next_worker;
	_Atomic unsigned n_tcp_lanes; /* but for those of signs of life */
	struct worker *beat; /* of the lanes that carry signs of life; NULL until there is one */
	struct list peers;   /* not lost */
	struct list
		lost_peers; /* without lanes: peer_lost() comes when their calls have ended, or was called */
	struct peer *self;
	struct list spare_incoming; /* of those made and freed on the home thread */
	struct bulk incoming_bulk;  /* which these are from, */
	unsigned n_incoming;	    /* so many, in use or spare */
	unsigned
		next_group; /* tells our connections of one transport_connect() from those of another */

	struct rdma *rdma; /* NULL: none */

	struct transport_port port;
};

/* complain.c. Logs a stranger's failure to connect, at most once a second. */
void transport_complain(struct transport *transport, const char *format, ...) _printf_(2, 3);
/* workers.c */
/* So many data threads, or home in their place. Returns 0 or -errno. */
int transport_start_workers(struct transport *transport, unsigned n_threads);
/* Takes turns. */
struct worker *transport_pick_worker(struct transport *transport);
/* The one of signs of life. Returns 0 or -errno. */
int transport_beat_worker(struct transport *transport, struct worker **ret_worker);

/* Listening (accept.c) */
int accept_start(struct transport *transport, const char *listen_on, int listen_fd);
/* Closes the listener and every connection that has not proved itself. */
void accept_stop(struct transport *transport);
/* Whether an address has three times as many connections as it leaves to others: then it gets no more, and text says why. */
bool accept_has_its_share(const struct transport *transport, const char *source, char *text,
			  size_t size);
/* Takes over a connection as if it had been accepted. */
int accept_adopt(struct transport *transport, int fd);
