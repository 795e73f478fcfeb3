/* What an operator asks one daemon to do with another: move what it sums to the others. */
#include "internal.h"
#include <stdarg.h>
#include <stdio.h>

struct remote {
	struct call call;
	struct admin_drain *drain;
};

static void _printf_(3, 4) fail(struct admin_drain *drain, int status, const char *format, ...)
{
	char text[ERROR_TEXT_MAX + 1];
	va_list args;

	va_start(args, format);
	(void)vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	drain->done(drain, status, text, 0, 0);
}

static void on_answer(struct call *call)
{
	struct remote *remote = container_of(call, struct remote, call);
	struct admin_drain *drain = remote->drain;

	drain->done(drain, call->status, call->text, call->answer.block, call->answer.part);
	free(remote);
}

static void ask(struct daemon *daemon, const struct view_member *member, struct admin_drain *drain)
{
	struct remote *remote = calloc(1, sizeof(*remote));
	struct peer *peer;
	int r = -ENOMEM;

	if (remote)
		r = transport_connect(daemon->transport, member->address, member->id, &peer);
	if (r) {
		free(remote);
		fail(drain, r, "cannot reach node %s (%s): %s", member->name, member->address,
		     strerror(-r));
		return;
	}
	peer_call_it(peer, member->name);
	remote->drain = drain;
	remote->call.header.op = DATA_DRAIN;
	remote->call.done = on_answer;
	peer_call(peer, &remote->call);
}

static void drain_here(struct daemon *daemon, struct admin_drain *drain)
{
	uint32_t moved, stay;

	if (!daemon->server) {
		fail(drain, -ENOENT, "node %s is no server", daemon->node);
		return;
	}
	server_drain(daemon->server, &moved, &stay);
	drain->done(drain, 0, NULL, moved, stay);
}

static const struct view_member *find(const struct view *view, const char *node)
{
	for (size_t i = 0; view && i < view->n_members; i++)
		if (!strcmp(view->members[i].name, node))
			return &view->members[i];
	return NULL;
}

void drain_node(void *user, const char *node, struct admin_drain *drain)
{
	struct daemon *daemon = user;
	const struct view_member *member;

	if (!node || !*node || !strcmp(node, daemon->node)) {
		drain_here(daemon, drain);
		return;
	}
	member = find(cluster_view(daemon->cluster), node);
	if (!member)
		fail(drain, -ENOENT, "the cluster has no node %s: see bpsctl nodes", node);
	else if (!(member->roles & ROLE_SERVER))
		fail(drain, -ENOENT, "node %s is no server", node);
	else
		ask(daemon, member, drain);
}
