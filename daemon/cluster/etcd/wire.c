/* Packs requests to etcd and unpacks its answers. Types of etcd.proto appear here alone. */
#include "cluster/etcd/wire.h"
#include "proto/etcd.pb-c.h"
#include "proto/pack.h"
#include "rpc/rpc.h"

static int pack_bytes(const ProtobufCMessage *message, struct wire_bytes *ret_bytes)
{
	return error_trace(pack(message, RPC_MESSAGE_MAX, &ret_bytes->data, &ret_bytes->len));
}

static int unpack_bytes(const ProtobufCMessageDescriptor *descriptor, const void *data, size_t len,
			struct failure *failure, void *ret_message)
{
	ProtobufCMessage *message;
	int r;

	r = unpack(descriptor, data, len, &message);
	if (r)
		return failure_set(failure, r, "etcd: not a message %s: %s", descriptor->name,
				   strerror(-r));
	*(ProtobufCMessage **)ret_message = message;
	return 0;
}

static ProtobufCBinaryData text(const char *from)
{
	return (ProtobufCBinaryData){ strlen(from), (uint8_t *)from };
}

/* Requests */

int etcd_pack_range(const char *key, const char *end, int64_t limit, int64_t revision,
		    struct wire_bytes *ret_bytes)
{
	Bps__Etcd__RangeRequest request = BPS__ETCD__RANGE_REQUEST__INIT;

	request.has_key = true;
	request.key = text(key);
	request.has_range_end = end != NULL;
	request.range_end = text(end ? end : "");
	request.has_limit = limit > 0;
	request.limit = limit;
	request.has_revision = revision > 0;
	request.revision = revision;
	return error_trace(pack_bytes(&request.base, ret_bytes));
}

static void write_guard(const struct etcd_guard *from, Bps__Etcd__Compare *to)
{
	bps__etcd__compare__init(to);
	to->has_key = true;
	to->key = text(from->key);
	to->has_range_end = from->end != NULL;
	to->range_end = text(from->end ? from->end : "");
	to->has_result = to->has_target = true;
	to->result = from->condition == ETCD_VERSION_ABOVE ? 1 : 0;
	to->target = from->condition == ETCD_REVISION_IS ? 2 : 0;
	to->has_mod_revision = from->condition == ETCD_REVISION_IS;
	to->has_version = !to->has_mod_revision;
	to->version = to->mod_revision = from->value;
}

struct txn_message {
	Bps__Etcd__Compare *compares, **compare_pointers;
	Bps__Etcd__RequestOp *ops, **op_pointers;
	Bps__Etcd__PutRequest *puts;
	Bps__Etcd__DeleteRangeRequest *removes;
};

static void txn_message_done(struct txn_message *message)
{
	free(message->compares);
	free(message->compare_pointers);
	free(message->ops);
	free(message->op_pointers);
	free(message->puts);
	free(message->removes);
}

static int txn_message_init(struct txn_message *message, size_t n_guards, size_t n_changes)
{
	*message = (struct txn_message){
		.compares = calloc(n_guards + 1, sizeof(*message->compares)),
		.compare_pointers = calloc(n_guards + 1, sizeof(*message->compare_pointers)),
		.ops = calloc(n_changes + 1, sizeof(*message->ops)),
		.op_pointers = calloc(n_changes + 1, sizeof(*message->op_pointers)),
		.puts = calloc(n_changes + 1, sizeof(*message->puts)),
		.removes = calloc(n_changes + 1, sizeof(*message->removes)),
	};
	if (!message->compares || !message->compare_pointers || !message->ops ||
	    !message->op_pointers || !message->puts || !message->removes)
		return error_origin(-ENOMEM);
	return 0;
}

static void write_change(const struct etcd_change *from, struct txn_message *message, size_t i)
{
	bps__etcd__request_op__init(&message->ops[i]);
	message->op_pointers[i] = &message->ops[i];
	if (from->remove) {
		bps__etcd__delete_range_request__init(&message->removes[i]);
		message->removes[i].has_key = true;
		message->removes[i].key = text(from->key);
		message->ops[i].request_delete_range = &message->removes[i];
		return;
	}
	bps__etcd__put_request__init(&message->puts[i]);
	message->puts[i].has_key = message->puts[i].has_value = true;
	message->puts[i].key = text(from->key);
	message->puts[i].value = (ProtobufCBinaryData){ from->value.len, from->value.data };
	message->puts[i].has_lease = from->lease != 0;
	message->puts[i].lease = from->lease;
	message->ops[i].request_put = &message->puts[i];
}

int etcd_pack_txn(const struct etcd_guard *guards, size_t n_guards,
		  const struct etcd_change *changes, size_t n_changes, struct wire_bytes *ret_bytes)
{
	_cleanup_(txn_message_done) struct txn_message message = { 0 };
	Bps__Etcd__TxnRequest request = BPS__ETCD__TXN_REQUEST__INIT;
	int r;

	r = txn_message_init(&message, n_guards, n_changes);
	if (r)
		return error_trace(r);
	for (size_t i = 0; i < n_guards; i++) {
		write_guard(&guards[i], &message.compares[i]);
		message.compare_pointers[i] = &message.compares[i];
	}
	for (size_t i = 0; i < n_changes; i++)
		write_change(&changes[i], &message, i);
	request.n_compare = n_guards;
	request.compare = message.compare_pointers;
	request.n_success = n_changes;
	request.success = message.op_pointers;
	return error_trace(pack_bytes(&request.base, ret_bytes));
}

int etcd_pack_grant(int64_t ttl_s, struct wire_bytes *ret_bytes)
{
	Bps__Etcd__LeaseGrantRequest request = BPS__ETCD__LEASE_GRANT_REQUEST__INIT;

	request.has_ttl = true;
	request.ttl = ttl_s;
	return error_trace(pack_bytes(&request.base, ret_bytes));
}

int etcd_pack_keep_alive(int64_t lease, struct wire_bytes *ret_bytes)
{
	Bps__Etcd__LeaseKeepAliveRequest request = BPS__ETCD__LEASE_KEEP_ALIVE_REQUEST__INIT;

	request.has_id = true;
	request.id = lease;
	return error_trace(pack_bytes(&request.base, ret_bytes));
}

int etcd_pack_revoke(int64_t lease, struct wire_bytes *ret_bytes)
{
	Bps__Etcd__LeaseRevokeRequest request = BPS__ETCD__LEASE_REVOKE_REQUEST__INIT;

	request.has_id = true;
	request.id = lease;
	return error_trace(pack_bytes(&request.base, ret_bytes));
}

int etcd_pack_watch(const char *key, const char *end, int64_t revision,
		    struct wire_bytes *ret_bytes)
{
	Bps__Etcd__WatchRequest request = BPS__ETCD__WATCH_REQUEST__INIT;
	Bps__Etcd__WatchCreateRequest create = BPS__ETCD__WATCH_CREATE_REQUEST__INIT;

	create.has_key = create.has_range_end = create.has_start_revision = true;
	create.key = text(key);
	create.range_end = text(end);
	create.start_revision = revision;
	create.has_fragment = create.fragment = true;
	request.create_request = &create;
	return error_trace(pack_bytes(&request.base, ret_bytes));
}

/* Answers */

static int64_t revision_of(const Bps__Etcd__ResponseHeader *header)
{
	return header ? header->revision : 0;
}

static void read_kv(const Bps__Etcd__KeyValue *from, struct etcd_kv *to)
{
	*to = (struct etcd_kv){
		.key = (const char *)from->key.data,
		.key_len = from->key.len,
		.value = from->value.data,
		.value_len = from->value.len,
		.create_revision = from->create_revision,
		.mod_revision = from->mod_revision,
		.lease = from->lease,
	};
}

void etcd_range_done(struct etcd_range *range)
{
	free(range->kvs);
	unpack_free(range->message);
	*range = (struct etcd_range){ 0 };
}

int etcd_unpack_range(const void *data, size_t len, struct failure *failure,
		      struct etcd_range *ret_range)
{
	Bps__Etcd__RangeResponse *response = NULL;
	struct etcd_range range;
	int r;

	r = unpack_bytes(&bps__etcd__range_response__descriptor, data, len, failure, &response);
	if (r)
		return r;
	range = (struct etcd_range){
		.revision = revision_of(response->header),
		.more = response->more,
		.kvs = calloc(response->n_kvs + 1, sizeof(*range.kvs)),
		.n_kvs = response->n_kvs,
		.message = response,
	};
	if (!range.kvs || range.revision <= 0) {
		r = range.kvs ? -EPROTO : -ENOMEM;
		etcd_range_done(&range);
		return failure_set(failure, r, "etcd: keys without a revision");
	}
	for (size_t i = 0; i < range.n_kvs; i++)
		read_kv(response->kvs[i], &range.kvs[i]);
	*ret_range = range;
	return 0;
}

int etcd_unpack_txn(const void *data, size_t len, struct failure *failure, int64_t *ret_revision,
		    bool *ret_succeeded)
{
	_cleanup_(unpack_freep) Bps__Etcd__TxnResponse *response = NULL;
	int r;

	r = unpack_bytes(&bps__etcd__txn_response__descriptor, data, len, failure, &response);
	if (r)
		return r;
	*ret_revision = revision_of(response->header);
	*ret_succeeded = response->succeeded;
	return 0;
}

int etcd_unpack_grant(const void *data, size_t len, struct failure *failure, int64_t *ret_lease,
		      int64_t *ret_ttl_s)
{
	_cleanup_(unpack_freep) Bps__Etcd__LeaseGrantResponse *response = NULL;
	int r;

	r = unpack_bytes(&bps__etcd__lease_grant_response__descriptor, data, len, failure,
			 &response);
	if (r)
		return r;
	if ((response->error && *response->error) || !response->id || response->ttl <= 0)
		return failure_set(failure, -EPROTO, "etcd: no lease: %s",
				   response->error && *response->error ? response->error
								       : "it gave none");
	*ret_lease = response->id;
	*ret_ttl_s = response->ttl;
	return 0;
}

int etcd_unpack_keep_alive(const void *data, size_t len, struct failure *failure,
			   int64_t *ret_ttl_s)
{
	_cleanup_(unpack_freep) Bps__Etcd__LeaseKeepAliveResponse *response = NULL;
	int r;

	r = unpack_bytes(&bps__etcd__lease_keep_alive_response__descriptor, data, len, failure,
			 &response);
	if (!r)
		*ret_ttl_s = MAX(response->ttl, (int64_t)0);
	return r;
}

void etcd_watch_done(struct etcd_watch *watch)
{
	free(watch->events);
	unpack_free(watch->message);
	*watch = (struct etcd_watch){ 0 };
}

int etcd_unpack_watch(const void *data, size_t len, struct failure *failure,
		      struct etcd_watch *ret_watch)
{
	Bps__Etcd__WatchResponse *response = NULL;
	struct etcd_watch watch;
	int r;

	r = unpack_bytes(&bps__etcd__watch_response__descriptor, data, len, failure, &response);
	if (r)
		return r;
	watch = (struct etcd_watch){
		.revision = revision_of(response->header),
		.canceled = response->canceled,
		.fragment = response->fragment,
		.compact_revision = response->compact_revision,
		.reason = response->cancel_reason ? response->cancel_reason : "",
		.events = calloc(response->n_events + 1, sizeof(*watch.events)),
		.message = response,
	};
	if (!watch.events) {
		etcd_watch_done(&watch);
		return failure_set(failure, -ENOMEM, "etcd: out of memory");
	}
	for (size_t i = 0; i < response->n_events; i++) {
		if (!response->events[i]->kv)
			continue;
		watch.events[watch.n_events].removed = response->events[i]->type == 1;
		read_kv(response->events[i]->kv, &watch.events[watch.n_events++].kv);
	}
	*ret_watch = watch;
	return 0;
}
