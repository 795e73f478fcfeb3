/*
 * Ranks that follow the others, at the job's home: how many there are, of which nodes are told; in which turn all ranks are
 * idle; and what nodes say of rounds that they have begun, which is passed on to nodes with such ranks. The other end is
 * agent/request/follow.c. server.c, attach.c, leave.c and forget.c call it. Control thread only.
 */
#include "proto/text.h"
#include "server/job/job.h"

/* Rounds that were passed on last, and are not again: every node whose ranks have begun a round tells of it. */
#define NOTIFIED_MAX 1024

struct notified_round {
	uint64_t name, round, since; /* the name's hash */
};

static bool can_be_notified(const struct job_node *node)
{
	return node->peer && !node->departed && peer_has(node->peer, DATA_FEATURE_FOLLOW);
}

static void tell_over(const struct job *job, uint32_t to)
{
	const struct failure *over = &job->following.over;
	struct data_header header = {
		.op = DATA_OTHERS_FOLLOW,
		.job = job->number,
		.node = to,
		.status = -over->status,
		.len = (uint32_t)strlen(over->text),
	};

	if (can_be_notified(&job->nodes[to]))
		peer_tell(job->nodes[to].peer, &header, over->text);
}

/* The first reason that is known stays. */
static void end(struct job *job, const struct failure *how)
{
	if (job->following.over.status)
		return;
	job->following.over = *how;
	for (uint32_t i = 0; job->following.n && i < job->n_nodes; i++)
		if (job->nodes[i].following.n)
			tell_over(job, i);
}

static void tell_node(const struct job *job, uint32_t to)
{
	const struct job_node *node = &job->nodes[to];
	struct data_header header = {
		.op = DATA_OTHERS_FOLLOW,
		.job = job->number,
		.node = to,
		.turn = job->following.done,
		.n_following = job->following.n - node->following.n,
	};

	if (can_be_notified(node))
		peer_tell(node->peer, &header, NULL);
}

/* Tells all nodes but one, which may be NODE_NONE. Nodes of one peer are told once. */
static void tell_all(const struct job *job, uint32_t but)
{
	uint64_t walk = job_peers_walk(job);

	if (but != NODE_NONE)
		(void)job_peer_meet(job, job->nodes[but].peer, walk);
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (job_peer_meet(job, job->nodes[i].peer, walk))
			tell_node(job, i);
}

static uint32_t count_idle(const struct job *job, uint64_t turn)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < job->n_nodes; i++)
		n += job->nodes[i].following.turn == turn ? job->nodes[i].following.n_idle : 0;
	return n;
}

/* Whether more turns are done, now that a node has said something else than before. */
static bool look_done(struct job *job, const struct node_following *before,
		      const struct node_following *now)
{
	struct job_following *following = &job->following;
	uint64_t done = following->done;

	/* A rank goes on to a turn once the one before is done. */
	following->done = MAX(done, now->turn ? now->turn - 1 : 0);
	if (following->done != done) {
		following->n_idle = count_idle(job, following->done + 1);
	} else {
		following->n_idle -= before->turn == done + 1 ? before->n_idle : 0;
		following->n_idle += now->turn == done + 1 ? now->n_idle : 0;
	}
	if (following->n_idle == job->size) {
		following->done++;
		following->n_idle = count_idle(job, following->done + 1);
	}
	return following->done != done;
}

static void set(struct job *job, uint32_t at, struct node_following now)
{
	struct node_following before = job->nodes[at].following;

	job->nodes[at].following = now;
	job->following.n += now.n - before.n;
	job->following.since += now.n > before.n;
	if (look_done(job, &before, &now))
		tell_all(job, NODE_NONE);
	else if (now.n != before.n)
		tell_all(job, at);
}

void follow_heard(struct job *job, uint32_t node, const struct data_header *header,
		  const struct failure *how)
{
	struct node_following now = {
		.n = MIN(header->n_following, job->size),
		.n_idle = MIN(header->n_idle, job->size),
		.turn = header->turn,
	};

	if (!job->home)
		return;
	set(job, node, now);
	if (job->following.over.status && now.n)
		tell_over(job, node);
	if (how)
		end(job, how);
}

/* Without memory for the table every round is passed on. */
static bool was_notified(struct job *job, const char *name, uint64_t round)
{
	struct job_following *following = &job->following;
	const struct notified_round now = { map_hash_string(name), round, following->since };
	struct notified_round *notified;

	if (!following->notified)
		following->notified =
			held_new(job_memory(job), NOTIFIED_MAX * sizeof(following->notified[0]));
	if (!following->notified)
		return false;
	notified = &following->notified[(now.name ^ round) % NOTIFIED_MAX];
	if (!memcmp(notified, &now, sizeof(now)))
		return true;
	*notified = now;
	return false;
}

static void pass_on(const struct job *job, uint32_t from, struct data_header *begun,
		    const char *name)
{
	uint64_t walk = job_peers_walk(job);

	(void)job_peer_meet(job, job->nodes[from].peer, walk);
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		const struct job_node *node = &job->nodes[i];

		if (i == from || !node->following.n || !can_be_notified(node) ||
		    !job_peer_meet(job, node->peer, walk))
			continue;
		begun->node = i;
		peer_tell(node->peer, begun, name);
	}
}

void follow_begun(struct job *job, uint32_t from, const struct data_header *header,
		  const void *payload)
{
	struct data_header begun = {
		.op = DATA_OTHERS_BEGUN,
		.job = job->number,
		.tensor_round = header->tensor_round,
		.first_round = header->first_round,
		.elements = header->elements,
		.dtype = header->dtype,
		.operation = header->operation,
		.reduction = header->reduction,
		.len = header->len,
	};
	char name[TENSOR_NAME_MAX + 1];

	if (!job->home || !text_take_name(payload, header->len, name, sizeof(name)))
		return;
	/* The home before this one may have told the node that others follow. */
	if (job->following.n == job->nodes[from].following.n)
		tell_node(job, from);
	else if (!was_notified(job, name, header->tensor_round))
		pass_on(job, from, &begun, name);
}

void follow_attached(struct job *job, uint32_t node)
{
	if (!job->home)
		return;
	set(job, node, (struct node_following){ 0 });
	/* Another home may have told the node of others that do not follow any more. */
	if (job->following.n || job->following.done || job->retention.resume)
		tell_node(job, node);
}

void follow_departed(struct job *job)
{
	struct ranks_text ranks;
	struct failure how;
	const char *text;

	if (!job->home || job->following.over.status)
		return;
	ranks_init(&ranks);
	for (uint32_t i = 0; i < job->size; i++)
		if (job->nodes[job->node_of_rank[i]].departed)
			ranks_add(&ranks, i);
	text = ranks_end(&ranks);
	(void)failure_set(&how, -EPIPE, "job %s: %s %s left the job", job->owner.name, text,
			  ranks_have(&ranks));
	end(job, &how);
}

void follow_forgotten(struct job *job)
{
	job->following.since++;
}

void follow_free(struct job *job)
{
	job->following.notified = held_free(job->following.notified);
}
