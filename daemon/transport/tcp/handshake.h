/* Handshake: from a connected socket to one that has proved itself, either role; and probes, which follow it. Home thread. */
#pragma once

#include "base/error.h"
#include "base/list.h"
#include "base/loop/loop.h"
#include "base/source.h"
#include "transport/common/address.h"
#include "transport/lane/seal.h"
#include "transport/transport.h"

/* When each piece of a probe was here: probe.c. */
struct probe {
	uint64_t at_ns[DATA_PROBE_PIECES];
	uint64_t lasted_ns; /* all of the probe, by CLOCK_MONOTONIC; 0: not known */
	unsigned n;
};

/* 0: they do not tell. rtt_ns: there and back on the way that they came. */
uint64_t probe_bytes_s(const struct probe *probe, uint64_t rtt_ns);

struct handshake {
	/* Set by the owner before handshake_start(). */
	struct transport *transport;
	bool is_accepting;
	unsigned lane;	   /* hello.lane, when connecting */
	uint64_t sender;   /* hello.sender */
	bool offers_probe; /* when connecting */
	/*
	 * Once: r is 0 and the socket is to be taken with TAKE_FD(source.fd), or a negative errno with the reason. is_final:
	 * trying again will not help. May free the handshake.
	 */
	void (*done)(struct handshake *handshake, int r, bool is_final, const char *why);
	void *user;
	struct list link;
	char address[TRANSPORT_ADDRESS_MAX];
	char from[SOURCE_MAX]; /* when accepting: base/source.h */
	/* The handshake's. */
	struct loop_source source;
	struct loop_timer timer;
	unsigned state;
	struct data_hello connecting, accepting; /* wire order */
	struct data_hello theirs;		 /* host order, once checked; zero before */
	uint64_t our_features, features;	 /* DATA_FEATURE_*; what both have, once checked */
	unsigned char proof[DATA_PROOF_LEN];
	const void *out;
	size_t out_len, in_len;
	struct probe probe;
	uint64_t probed_since_ns;
	struct failure failure;
};

/* Takes the socket over. Returns 0 or -errno; then done() is not called, and the socket closed. */
int handshake_start(struct handshake *handshake, int fd, uint64_t deadline_ns);
/* Forgets everything, closes the socket unless taken. Idempotent. */
void handshake_done(struct handshake *handshake);
/* HMAC-SHA256(key, label || data). Returns 0 or -ENOMEM. */
int handshake_sign(const void *key, size_t key_len, const char *label, const struct iovec *data,
		   size_t n, unsigned char ret_proof[DATA_PROOF_LEN]);
/* Accepting: whether it shall have DATA_FEATURE_PROBE, too. */
bool probe_is_wanted(const struct handshake *handshake);
/* After the proof, in either role, if both have DATA_FEATURE_PROBE. */
void probe_begin(struct handshake *handshake);
/* To be called while there is something to read or room. 0: there is more to come; 1: that was all; -errno: it failed. */
int probe_read(struct handshake *handshake);
int probe_write(struct handshake *handshake);
/* Accepting: all has come. Takes what it tells. */
void probe_end(struct handshake *handshake);
/* What a connection that has proved itself seals its two directions with. Returns 0 or -ENOMEM. */
int handshake_seals(const struct handshake *handshake, struct seal *ret_in, struct seal *ret_out);
bool handshake_proofs_equal(const unsigned char *a, const unsigned char *b);
/* HMAC-SHA256(key, label || connecting || accepting with its proof zeroed). Returns 0 or -errno. */
int handshake_prove(const void *key, size_t key_len, const char *label,
		    const struct data_hello *connecting, const struct data_hello *accepting,
		    unsigned char ret_proof[DATA_PROOF_LEN]);

/*
 * tcp.c: a socket that has proved itself becomes a lane of the peer, as its handshake says. Takes the socket over, also on failure.
 * Returns 0 or -errno.
 */
int tcp_lane_add(struct peer *peer, int fd, unsigned index, const struct handshake *handshake);
