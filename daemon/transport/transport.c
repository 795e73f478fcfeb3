/*
 * Makes and closes the transport, for daemon.c: its workers, the peer that stands for this
 * process, the key, the port. The agent and drain.c find peers by transport_connect(). Home
 * thread.
 */
#include "transport/common/address.h"
#include "transport/common/worker.h"
#include "transport/internal.h"
#include "transport/lane/gmac.h"
#include "transport/lane/lane.h"
#include "transport/peer/peer.h"
#include "transport/rdma/peer.h"
#include "transport/tcp/dial.h"

#include "base/clock.h"
#include "base/log.h"
#include <stdio.h>
#include <sys/random.h>

#define LANES_MAX  DATA_LANE_BEAT /* the low byte of hello.lane */
#define GROUPS_MAX 256		  /* the high byte */

static int make_self(struct transport *transport)
{
	int r;

	r = peer_new(transport, PEER_SELF, "this daemon", "", &transport->self);
	if (r)
		return error_trace(r);
	transport->self->id = transport->id;
	transport->self->state = PEER_UP;
	peer_set_node(transport->self, transport->node);
	return 0;
}

static void key_forget(struct transport *transport)
{
	if (transport->key)
		explicit_bzero(transport->key, transport->key_len);
	free(transport->key);
	transport->key = NULL;
	transport->key_len = 0;
}

int transport_set_key(struct transport *transport, const void *key, size_t len)
{
	void *copy = NULL;

	if (len) {
		copy = malloc(len);
		if (!copy)
			return error_origin(-ENOMEM);
		memcpy(copy, key, len);
	}
	key_forget(transport);
	transport->key = copy;
	transport->key_len = len;
	if (len)
		log_info("tags of messages are made by %s", gmac_implementation(0));
	return 0;
}

/*
 * A name of which the kernel knows nothing, or that it does not let us use, is said now and not at
 * the first connection.
 */
static int set_congestion(struct transport *transport, const char *name)
{
	static const struct address nowhere = { .any.sa_family = AF_INET };
	_cleanup_(fd_closep) int fd = -1;
	int r;

	(void)snprintf(transport->congestion, sizeof(transport->congestion), "%s", name ?: "");
	if (!*transport->congestion)
		return 0;
	fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return error_origin(-errno);
	r = address_set_congestion(fd, &nowhere, transport->congestion);
	if (r)
		log_error("congestion %s: %s. Those that may be used here are in "
			  "/proc/sys/net/ipv4/tcp_allowed_congestion_control",
			  transport->congestion,
			  r == -ENOENT ? "this kernel has no such algorithm" : strerror(-r));
	return error_trace(r);
}

static int copy_params(struct transport *transport, const struct transport_params *params)
{
	int r;

	transport->loop = params->loop;
	transport->blocks = params->blocks;
	transport->ops = params->ops;
	transport->user = params->user;
	transport->id = params->id;
	transport->settings.n_lanes = MIN(MAX(params->n_lanes, 1u), (unsigned)LANES_MAX);
	transport->settings.max_connections = params->max_connections;
	transport->settings.handshake_timeout_ns = params->handshake_timeout_ms * NSEC_PER_MSEC;
	transport->settings.peer_timeout_ns = params->peer_timeout_ms * NSEC_PER_MSEC;
	transport->settings.quota_bytes = params->quota_bytes;
	transport->settings.accounts = params->accounts;
	transport->settings.checksums = params->checksums;
	transport->settings.probes = params->probes;
	transport->settings.has_threads = params->n_threads;
	(void)snprintf(transport->node, sizeof(transport->node), "%s", params->node);
	r = set_congestion(transport, params->congestion);
	if (r)
		return error_trace(r);
	return error_trace(transport_set_key(transport, params->key, params->key_len));
}

static void drop_dial(struct peer *peer)
{
	peer->dial = dial_free(peer->dial);
}

static void free_rdma(struct peer *peer)
{
	peer->rdma = rdma_peer_free(peer->rdma);
}

static const struct transport_hooks hooks = {
	.make_spare = dial_again,
	.drop_dial = drop_dial,
	.rdma_agreed = rdma_begin,
	.rdma_said = rdma_notice_arrived,
	.rdma_broke = rdma_lane_lost,
	.rdma_gone = rdma_lane_closed,
	.rdma_drop = rdma_peer_close,
	.rdma_free = free_rdma,
};

int transport_new(const struct transport_params *params, struct transport **ret_transport)
{
	_cleanup_(fd_closep) int listen_fd = params->listen_fd;
	_cleanup_(transport_freep) struct transport *transport = calloc(1, sizeof(*transport));
	int r;

	if (!transport)
		return error_origin(-ENOMEM);
	transport->hooks = &hooks;
	mailboxes_init(&transport->mailboxes, params->loop);
	mailbox_init(&transport->mailbox, &transport->mailboxes);
	list_init(&transport->peers);
	list_init(&transport->lost_peers);
	list_init(&transport->port.handshakes);
	list_init(&transport->spare_incoming);
	transport->port.listener.fd = -1;
	transport->checksum_errors = (struct metric){
		.name = "bps_checksum_errors_total",
		.help = "Messages of other daemons that did not fit their checksums.",
	};
	transport->lanes_broken = (struct metric){
		.name = "bps_connections_broken_total",
		.help = "Connections to other daemons that broke alone, and whose work went "
			"another way.",
	};
	metric_register(&transport->checksum_errors);
	transport->copied = (struct metric)METRIC_COPIED;
	metric_register(&transport->lanes_broken);
	metric_register(&transport->copied);

	r = copy_params(transport, params);
	if (!r)
		r = make_self(transport);
	if (!r)
		r = transport_start_workers(transport, params->n_threads);
	if (!r)
		r = rdma_new(transport, &params->rdma, &transport->rdma);
	if (!r)
		r = accept_start(transport, params->listen, TAKE_FD(listen_fd));
	if (r)
		return error_trace(r);
	*ret_transport = TAKE_PTR(transport);
	return 0;
}

/*
 * Lanes close on their threads; after these have ended nothing but the mailboxes holds anything of
 * ours.
 */
void transport_close(struct transport *transport)
{
	struct peer *peer, *next;
	struct lane *lane;

	if (transport->is_closed)
		return;
	transport->is_closed = true;
	accept_stop(transport);
	list_for_each_safe (peer, next, &transport->peers, link)
		peer_lose(peer, -ESHUTDOWN, "this daemon shuts down");
	list_for_each (peer, &transport->peers, link)
		list_for_each (lane, &peer->lanes, link)
			if (!lane->worker->thread)
				lane_drain(lane);
	for (unsigned i = 0; i < transport->n_workers; i++)
		worker_stop(transport->workers[i]);
	if (transport->beat)
		worker_stop(transport->beat);
	for (unsigned i = 0; i < transport->n_workers; i++)
		mailboxes_drain(&transport->workers[i]->to_home);
	if (transport->beat)
		mailboxes_drain(&transport->beat->to_home);
	do
		mailboxes_drain(&transport->mailboxes);
	while (peer_end_now(transport));
	transport->rdma = rdma_free(transport->rdma);
	if (transport->self) {
		peer_take_calls(transport->self);
		(void)peer_end_calls(transport->self, UINT_MAX, -ESHUTDOWN,
				     "this daemon shuts down");
	}
}

struct transport *transport_free(struct transport *transport)
{
	struct peer *peer;

	if (!transport)
		return NULL;
	transport_close(transport);
	mailboxes_drain(&transport->mailboxes); /* calls begun since */
	assert(list_empty(&transport->peers));

	while ((peer = list_first(&transport->lost_peers, struct peer, link)))
		peer_free(peer);
	peer_free(transport->self);
	for (unsigned i = 0; i < transport->n_workers; i++)
		worker_free(transport->workers[i]);
	free(transport->workers);
	worker_free(transport->beat);
	bulk_done(&transport->incoming_bulk);
	key_forget(transport);
	metric_unregister(&transport->checksum_errors);
	metric_unregister(&transport->lanes_broken);
	metric_unregister(&transport->copied);
	free(transport);
	return NULL;
}

uint16_t transport_port(const struct transport *transport)
{
	return transport->port.number;
}

struct peer *transport_self(struct transport *transport)
{
	return transport->self;
}

/*
 * One that is neither lost nor about to be, and is or may still become the daemon that is asked
 * for.
 */
static struct peer *find_called(struct transport *transport, const char *address,
				uint64_t expect_id)
{
	struct peer *peer;

	list_for_each (peer, &transport->peers, link) {
		if (peer->kind != PEER_CALLED || peer->state >= PEER_LOSING || peer->is_posted ||
		    strcmp(peer->address, address))
			continue;
		if (!expect_id || peer->id == expect_id || peer->expect_id == expect_id)
			return peer;
		if (!peer->id && !peer->expect_id) {
			peer->expect_id = expect_id;
			return peer;
		}
	}
	return NULL;
}

int transport_connect(struct transport *transport, const char *address, uint64_t expect_id,
		      struct peer **ret_peer)
{
	struct peer *peer = find_called(transport, address, expect_id);
	struct addresses addresses;
	const char *why = "";
	int resolved, r;

	if (peer) {
		*ret_peer = peer;
		return 0;
	}
	if (transport->is_closed)
		return error_origin(-ESHUTDOWN);
	resolved = address_resolve(address, true, false, &addresses, &why);
	if (resolved && resolved != -EAGAIN)
		return error_origin(resolved);
	r = peer_new(transport, PEER_CALLED, address, "", &peer);
	if (r)
		return error_trace(r);
	if (getrandom(&peer->alias, sizeof(peer->alias), 0) != (ssize_t)sizeof(peer->alias)) {
		peer_free(peer);
		return error_origin(-EIO);
	}
	peer->expect_id = expect_id;
	peer->group = transport->next_group++ % GROUPS_MAX;
	r = dial_start(peer, resolved ? NULL : &addresses);
	if (r) {
		peer_free(peer);
		return error_trace(r);
	}
	list_push_back(&transport->peers, &peer->link);
	*ret_peer = peer;
	return 0;
}

/* The entry of the same daemon, or a new one. A daemon calls by another number than it answers by. */
static struct transport_peer_info *info_of(struct transport_peer_info *infos, size_t *n,
					   const struct peer *peer)
{
	for (size_t i = 0; i < *n; i++)
		if (*peer->node && !strcmp(infos[i].node, peer->node))
			return &infos[i];
	infos[*n].id = peer->id;
	return &infos[(*n)++];
}

int transport_peers(const struct transport *transport, struct transport_peer_info **ret_peers,
		    size_t *ret_n)
{
	struct transport_peer_info *infos;
	const struct peer *peer;
	size_t n = 0;

	list_for_each (peer, &transport->peers, link)
		n++;
	infos = calloc(MAX(n, (size_t)1), sizeof(*infos));
	if (!infos)
		return error_origin(-ENOMEM);
	n = 0;
	list_for_each (peer, &transport->peers, link) {
		struct transport_peer_info *info = info_of(infos, &n, peer);
		uint64_t in, out;

		peer_counters(peer, &in, &out);
		info->bytes_in += in;
		info->bytes_out += out;
		info->is_up |= peer->state == PEER_UP;
		if (!*info->transport || peer->kind == PEER_CALLED)
			rdma_describe(peer, info->transport, sizeof(info->transport));
		(void)snprintf(info->node, sizeof(info->node), "%s", peer->node);
		/* Where and as whom we call it says more than where and as whom it calls. */
		if (peer->kind == PEER_CALLED)
			info->id = peer->id;
		if (!*info->address || peer->kind == PEER_CALLED)
			(void)snprintf(info->address, sizeof(info->address), "%s", peer->address);
	}
	*ret_peers = infos;
	*ret_n = n;
	return 0;
}
