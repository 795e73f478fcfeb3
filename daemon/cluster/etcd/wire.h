/*
 * etcd's messages (proto/etcd.proto) as plain structs, as wire.h does it for our own. pack functions return newly allocated
 * bytes; unpack functions return 0, -ENOMEM, or -EPROTO with a failure, and what they point to lives until done. Keys that
 * we make are text; those that come may be anything.
 */
#pragma once

#include "cluster/wire.h"

#define ETCD_KEY_MAX 512u

struct etcd_kv {
	const char *key; /* not terminated */
	size_t key_len;
	const void *value;
	size_t value_len;
	int64_t create_revision, mod_revision, lease;
};

/* A condition of a transaction; with an end, for all keys in [key, end), where none counts as one of version 0. */
struct etcd_guard {
	enum { ETCD_VERSION_IS, ETCD_VERSION_ABOVE, ETCD_REVISION_IS } condition;
	const char *key, *end;
	int64_t value;
};

struct etcd_change {
	const char *key;
	bool remove;
	struct wire_bytes value; /* borrowed */
	int64_t lease;		 /* 0: none */
};

int etcd_pack_range(const char *key, const char *end, int64_t limit, int64_t revision,
		    struct wire_bytes *ret_bytes);
int etcd_pack_txn(const struct etcd_guard *guards, size_t n_guards,
		  const struct etcd_change *changes, size_t n_changes,
		  struct wire_bytes *ret_bytes);
int etcd_pack_grant(int64_t ttl_s, struct wire_bytes *ret_bytes);
int etcd_pack_keep_alive(int64_t lease, struct wire_bytes *ret_bytes);
int etcd_pack_revoke(int64_t lease, struct wire_bytes *ret_bytes);
int etcd_pack_watch(const char *key, const char *end, int64_t revision,
		    struct wire_bytes *ret_bytes);

struct etcd_range {
	int64_t revision;
	bool more;
	struct etcd_kv *kvs;
	size_t n_kvs;
	void *message;
};
int etcd_unpack_range(const void *data, size_t len, struct failure *failure,
		      struct etcd_range *ret_range);
void etcd_range_done(struct etcd_range *range);

int etcd_unpack_txn(const void *data, size_t len, struct failure *failure, int64_t *ret_revision,
		    bool *ret_succeeded);
/* ttl_s 0: there is no such lease. */
int etcd_unpack_grant(const void *data, size_t len, struct failure *failure, int64_t *ret_lease,
		      int64_t *ret_ttl_s);
int etcd_unpack_keep_alive(const void *data, size_t len, struct failure *failure,
			   int64_t *ret_ttl_s);

struct etcd_event {
	bool removed;
	struct etcd_kv kv;
};

struct etcd_watch {
	int64_t revision;
	bool canceled;
	bool fragment; /* more of this revision comes */
	int64_t compact_revision;
	const char *reason;
	struct etcd_event *events;
	size_t n_events;
	void *message;
};
int etcd_unpack_watch(const void *data, size_t len, struct failure *failure,
		      struct etcd_watch *ret_watch);
void etcd_watch_done(struct etcd_watch *watch);
