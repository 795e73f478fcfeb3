/* A view as bytes, for daemons that may not know it: a View of cluster.proto. */
#include "cluster/cluster.h"
#include "proto/cluster.pb-c.h"
#include "proto/pack.h"
#include "proto/types.h"
#include <stdio.h>

/* Each member is one, and no job has ranks on more. */
#define VIEW_FIELDS_MAX (JOB_RANKS_MAX + 64)

int view_pack(const struct view *view, size_t max, void **ret_data, size_t *ret_len)
{
	Bps__Cluster__View m = BPS__CLUSTER__VIEW__INIT;
	size_t n = MAX(view->n_members, (size_t)1);
	_cleanup_(freep) Bps__Cluster__Member *members = calloc(n, sizeof(*members));
	_cleanup_(freep) Bps__Cluster__Member **pointers = calloc(n, sizeof(*pointers));

	if (!members || !pointers)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < view->n_members; i++) {
		const struct view_member *member = &view->members[i];

		bps__cluster__member__init(&members[i]);
		members[i].id = member->id;
		members[i].name = (char *)member->name;
		members[i].roles = member->roles;
		members[i].address = (char *)member->address;
		members[i].has_bandwidth_mbps = true;
		members[i].bandwidth_mbps = member->bandwidth_mbps;
		pointers[i] = &members[i];
	}
	m.epoch = view->epoch;
	m.n_members = view->n_members;
	m.members = pointers;
	return error_trace(pack(&m.base, max, ret_data, ret_len));
}

int view_unpack(const void *data, size_t len, const char *own, struct view **ret_view)
{
	_cleanup_(unpack_freep) Bps__Cluster__View *m = NULL;
	_cleanup_(freep) struct view_member *members = NULL;
	int r;

	if (!pack_has_at_most(data, len, VIEW_FIELDS_MAX))
		return error_origin(-EPROTO);
	r = unpack(&bps__cluster__view__descriptor, data, len, (ProtobufCMessage **)&m);
	if (r)
		return error_trace(r);
	members = calloc(MAX(m->n_members, (size_t)1), sizeof(*members));
	if (!members)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < m->n_members; i++) {
		const Bps__Cluster__Member *from = m->members[i];
		struct view_member *to = &members[i];

		if (strlen(from->name) >= sizeof(to->name) ||
		    strlen(from->address) >= sizeof(to->address))
			return error_origin(-EPROTO);
		to->id = from->id;
		to->roles = from->roles;
		to->bandwidth_mbps = from->bandwidth_mbps;
		(void)snprintf(to->name, sizeof(to->name), "%s", from->name);
		(void)snprintf(to->address, sizeof(to->address), "%s", from->address);
		to->is_self = own && !strcmp(own, from->name);
	}
	r = view_new(m->epoch, members, m->n_members, ret_view);
	return r == -ENOMEM ? error_trace(r) : r ? error_origin(-EPROTO) : 0;
}
