/*
 * Two transports on one loop, one calling the other, or one calling itself; what arrives is recorded. For the contract
 * and unit tests of transport/. Functions fail the test when they cannot.
 */
#pragma once

#include "base/memory/account.h"
#include "base/memory/block.h"
#include "test.h"
#include "transport/transport.h"

struct pair_variant {
	const char *name;
	bool is_inproc;
	unsigned n_threads, n_lanes;
	bool is_rdma; /* parts by RDMA alone; on the devices of BPS_TEST_RDMA, "a b" */
};

struct pair_config {
	struct pair_variant variant;
	const char *key_a, *key_b;				     /* NULL: none */
	uint64_t handshake_timeout_ms, peer_timeout_ms, quota_bytes; /* 0: long, much */
	unsigned max_connections;				     /* 0: many */
	uint64_t memory; /* of each side's accounts, half of which one place may have; 0: much */
	enum transport_kind kind;	   /* with is_rdma; 0: RDMA alone */
	bool no_checksums, auto_checksums; /* neither: on */
	bool has_two_rails;		   /* b has both devices */
	enum transport_windows windows;
	void (*adjust)(struct transport_params *params); /* optional: of either side, at last */
};

struct pair_notice {
	struct peer *peer;
	struct data_header header;
	char payload[64];
};

/* What one side has seen. */
struct pair_side {
	struct pair *pair;
	struct transport *transport;
	struct accounts accounts;
	struct list deliveries; /* by delivery.link, in order of arrival */
	unsigned n_deliveries, n_lost, n_notices;
	struct pair_notice notices[64];
	struct peer *lost_peer;
	char lost_why[448];
	void (*on_call)(struct pair_side *side,
			struct delivery *delivery); /* instead of the list */
};

struct pair {
	uint32_t
		raw_from; /* where raw_connect() comes from, in network order; 0: as the system likes */
	struct loop *loop;
	struct block_cache *blocks;
	struct pair_side a, b;	  /* a calls b; in-process b is a */
	struct pair_side *server; /* &b, or &a in-process */
	struct peer *peer;	  /* a's way to the server */
	char address[64];
};

struct pair_call {
	struct call call;
	unsigned n_sent, n_done;
	bool was_sent_first;
	struct block *answer; /* a reference of ours */
	void (*on_done)(struct pair_call *call);
};

void pair_params(struct pair *pair, const struct pair_config *config, struct pair_side *side,
		 struct transport_params *ret_params);
/* Skips the test where variant needs what the machine has not. */
struct pair *pair_new_with(const struct pair_config *config);
/* Variant with defaults. */
struct pair *pair_new(const struct pair_variant *variant);
/* Without b, and without a peer: for servers made of bytes. */
struct pair *pair_new_alone(const struct pair_config *config);
/* With b, which serves, but without a peer: for callers made of bytes. */
struct pair *pair_new_serving(const struct pair_config *config);
/* Gives it b with this configuration, to which a connects. */
void pair_serve(struct pair *pair, const struct pair_config *config);
/* Fails what is held, closes and frees. */
struct pair *pair_free(struct pair *pair);
DEFINE_CLEANUP(struct pair *, pair_free)

void pair_turn(struct pair *pair);
#define PAIR_UNTIL(pair, condition)      \
	do {                             \
		while (!(condition))     \
			pair_turn(pair); \
	} while (0)

/* A contribution of len bytes, answered by a result; callbacks and header set. */
void pair_call_init(struct pair_call *call, const void *payload, size_t len, void *target,
		    size_t target_len);
void pair_call_begin(struct pair *pair, struct pair_call *call);
/* Takes the oldest delivery off the server's list, waiting for it. */
struct delivery *pair_take(struct pair *pair);
/* RESULT with the same payload, by reference where there is a block. */
void pair_echo(struct pair *pair, struct delivery *delivery);
void pair_on_call_echo(struct pair_side *side, struct delivery *delivery);
/* One call there and back: the caller that pair_new_with() made is connected then, and no stranger. */
void pair_settle(struct pair *pair);

void pair_fill(void *data, size_t len, uint64_t seed);
bool pair_check(const void *data, size_t len, uint64_t seed);

/* Sockets that speak bytes; none of them blocks the loop. */
int raw_connect(struct pair *pair, uint16_t port);
/*
 * A port of the loopback at which nobody listens, nor can another program meanwhile; a daemon of ours can, which reuses
 * addresses.
 */
int raw_reserve(uint16_t *ret_port);
int raw_listen(uint16_t *ret_port);
int raw_accept(struct pair *pair, int listener);
void raw_send(struct pair *pair, int fd, const void *data, size_t len);
/* Returns the bytes received: fewer than len when the other side closed. */
size_t raw_receive(struct pair *pair, int fd, void *data, size_t len);
/* A hello of a stranger, in wire order. */
void raw_hello(struct data_hello *ret_hello, uint64_t sender, unsigned lane);
/* Shakes hands with the server at port as a connecting daemon would. */
int raw_shake(struct pair *pair, uint16_t port, const char *key, uint64_t sender, unsigned lane);
/* With feature bits. */
int raw_shake_with(struct pair *pair, uint16_t port, const char *key, uint64_t sender,
		   unsigned lane, uint64_t features);
/* The accepting half, on an accepted socket. */
void raw_shake_accepted(struct pair *pair, int fd, const char *key, uint64_t sender);
void raw_shake_accepted_with(struct pair *pair, int fd, const char *key, uint64_t sender,
			     uint64_t features);
/* A valid PUSH with a cookie, host order. */
void raw_push_header(struct data_header *ret_header, uint32_t cookie, uint32_t len);
