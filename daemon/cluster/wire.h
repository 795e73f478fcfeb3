/*
 * The coordinator's messages (proto/cluster.proto) as plain structs: the one place of this module where generated types
 * appear. Whatever comes in is checked here: lengths, names, addresses, limits. pack functions return newly allocated
 * bytes (free() them); unpack functions return 0, -ENOMEM, or -EPROTO or -EINVAL with a failure.
 */
#pragma once

#include "cluster/cluster.h"

#define WIRE_VERSION	 2u
#define WIRE_VERSION_MIN 2u /* 1: whoever knew an id was that member */
#define WIRE_KEY_MAX	 1024u
#define WIRE_JOBS_MAX	 1024u /* held by one member */
/* A coordinator goes on from the largest epoch it hears of; beyond this one, something is wrong with who tells it. */
#define WIRE_EPOCH_MAX (UINT32_MAX / 2)

struct wire_bytes {
	void *data;
	size_t len;
};
void wire_bytes_done(struct wire_bytes *bytes);

struct wire_views {
	struct view **views;
	size_t n;
};
void wire_views_done(struct wire_views *views);

struct wire_job {
	char name[64];
	uint64_t owner;
	uint32_t epoch; /* of one of the views beside it */
};

struct wire_register {
	uint32_t version, version_min;
	struct view_member member;
	uint8_t secret[MEMBER_SECRET_LEN];
	uint32_t epoch;
	uint32_t n_members; /* of that view */
	struct wire_bytes key;
	struct wire_job *jobs;
	size_t n_jobs;
	struct wire_views views;
};
void wire_register_done(struct wire_register *message);
int wire_pack_register(const struct wire_register *message, struct wire_bytes *ret_bytes);
int wire_unpack_register(const void *data, size_t len, struct failure *failure,
			 struct wire_register *ret_message);

/* What is kept in etcd. */
int wire_pack_member(const struct view_member *member, struct wire_bytes *ret_bytes);
int wire_unpack_member(const void *data, size_t len, struct failure *failure,
		       struct view_member *ret_member);
int wire_pack_view(const struct view *view, struct wire_bytes *ret_bytes);
int wire_unpack_view(const void *data, size_t len, uint64_t self_id, struct failure *failure,
		     struct view **ret_view);
int wire_pack_claim(const struct view *view, bool accepted, struct wire_bytes *ret_bytes);
int wire_unpack_claim(const void *data, size_t len, uint64_t self_id, struct failure *failure,
		      struct view **ret_view, bool *ret_accepted);

/* One of the stream that answers; the first has a version. self_id tells which member is ourselves. */
struct wire_event {
	uint32_t version; /* 0: none */
	struct wire_bytes key;
	uint32_t lease_ms;
	struct view *view;
	uint32_t *in_use;
	size_t n_in_use;
	struct wire_views old_views;
};
void wire_event_done(struct wire_event *message);
int wire_pack_event(const struct wire_event *message, struct wire_bytes *ret_bytes);
int wire_unpack_event(const void *data, size_t len, uint64_t self_id, struct failure *failure,
		      struct wire_event *ret_message);

struct wire_heartbeat {
	uint64_t id;
	uint32_t epoch;
};
struct wire_heard {
	uint32_t epoch;
	bool known;
};
int wire_pack_heartbeat(const struct wire_heartbeat *message, struct wire_bytes *ret_bytes);
int wire_unpack_heartbeat(const void *data, size_t len, struct failure *failure,
			  struct wire_heartbeat *ret_message);
int wire_pack_heard(const struct wire_heard *message, struct wire_bytes *ret_bytes);
int wire_unpack_heard(const void *data, size_t len, struct failure *failure,
		      struct wire_heard *ret_message);

struct wire_open {
	char job[64];
	uint64_t owner;
	uint32_t min_servers;
	uint64_t timeout_ms;
	uint64_t member;
};
int wire_pack_open(const struct wire_open *message, struct wire_bytes *ret_bytes);
int wire_unpack_open(const void *data, size_t len, struct failure *failure,
		     struct wire_open *ret_message);
int wire_pack_opened(const struct view *view, struct wire_bytes *ret_bytes);
int wire_unpack_opened(const void *data, size_t len, uint64_t self_id, struct failure *failure,
		       struct view **ret_view);

struct wire_close {
	char job[64];
	uint64_t owner;
	uint64_t member;
};
int wire_pack_close(const struct wire_close *message, struct wire_bytes *ret_bytes);
int wire_unpack_close(const void *data, size_t len, struct failure *failure,
		      struct wire_close *ret_message);
int wire_pack_leave(uint64_t id, struct wire_bytes *ret_bytes);
int wire_unpack_leave(const void *data, size_t len, struct failure *failure, uint64_t *ret_id);
