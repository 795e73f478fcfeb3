/*
 * FORGET, at the home of a job: a tensor is gone, name and key, once all nodes have said of one and the same round that no
 * rank of theirs uses it. The protocol, of which agent/request/forget.c and agent/servers/names.c are the other end:
 *
 *	known	A node has the tensor and its key in its ledger. The home has it, too.
 *	doubt	All ranks of the node have released it. The node has noted so in its ledger, and then says FORGET. No rank posts
 *		or names anything under that name before the home's answer: the node cannot change its mind, but asks for an answer
 *		soon (KEEP).
 *	gone	The home has said OK: the tensor is out of the ledger; then ranks hear of it, and servers (HAVE, DATA_ROUND_NEVER).
 *
 * A node comes into doubt by itself, and out of it by the home's word alone: OK or EBUSY, the same for all nodes. So while the
 * tensor is known at one node it is gone at none. What a home decides it forgets at once. An answer that is lost is asked for
 * once more: by FORGET; or by DECLARE in_doubt from a process that has found the doubt in its ledger, as its ranks have declared
 * the tensor again. A home that has all names and not that key has forgotten it, or the home before has: OK; and ESTALE, for
 * ranks that have to name it anew.
 *
 * A fresh home has no names. Nodes tell it those that they know, and then NAMED; those in doubt they ask about. What is asked
 * waits for the last NAMED: a key that nobody has told is gone at some node, or in doubt at all that have it, and is gone. NAMED
 * brings the largest key that a node has seen, before any new name: so none is given twice.
 *
 * A node that hears UNUSED and cannot ask its ranks says KEEP. UNUSED is said again when a node attaches.
 */
#include "server/job/forget.h"

#include "base/failpoint.h"

/* What a node that attaches hears at once, and in each later turn: of so many tensors, or fewer where there are more nodes. */
#define ASK_STEP 64

struct forgetting {
	struct list link; /* in names.forgetting */
	struct declared *declared;
	uint64_t round;
	uint32_t n_said;
	struct delivery *said[]; /* by node: its FORGET, or NULL */
};

static bool is_notified(struct job *job)
{
	for (uint32_t i = 0; job->placement.fresh && !job->names.is_notified && i < job->n_nodes;
	     i++)
		if (!job->nodes[i].named && !job->nodes[i].departed)
			return false;
	job->names.is_notified = true;
	return true;
}

bool forget_is_possible(const struct job *job)
{
	return !job->membership.elastic && !stragglers_any(&job->stragglers);
}

/* Whether what is asked comes behind what has waited for the nodes' tensors. */
static bool waits(struct job *job)
{
	return !is_notified(job) || (!job->names.goes_on && !list_empty(&job->names.early));
}

/* Only where all nodes can be asked: not one that has left. */
static bool may_forget(const struct job *job)
{
	if (!forget_is_possible(job) || job->n_departed)
		return false;
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (job->nodes[i].peer && !peer_has(job->nodes[i].peer, DATA_FEATURE_FORGET))
			return false;
	return true;
}

static void accept(const struct job *job, struct delivery *delivery)
{
	struct data_header header = {
		.op = DATA_OK,
		.job = job->number,
		.key = delivery->header.key,
		.epoch = delivery->header.epoch,
		.node = delivery->header.node,
	};

	delivery_answer(delivery, &header, NULL, NULL);
}

static void is_used(const struct job *job, struct delivery *delivery)
{
	refuse(delivery, -EBUSY, "job %s: a rank uses the tensor", job->owner.name);
}

/* One word for all. */
static void decide(struct job *job, struct forgetting *forgetting, bool forgotten)
{
	struct declared *declared = forgetting->declared;

	sweep_leave(job, &forgetting->link);
	list_remove(&forgetting->link);
	job->names.n_forgetting--;
	declared->forgetting = NULL;
	if (forgotten) {
		declared_remove(job, declared);
		follow_forgotten(job);
	}
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		struct delivery *said = TAKE_PTR(forgetting->said[i]);

		if (said && forgotten)
			accept(job, said);
		else if (said)
			is_used(job, said);
		if (said)
			FAILPOINT("server-tensor-decided");
	}
	(void)held_free(forgetting);
}

static void ask(const struct job *job, const struct forgetting *forgetting, uint32_t node)
{
	const struct declared *declared = forgetting->declared;
	struct data_header header = {
		.op = DATA_UNUSED,
		.job = job->number,
		.node = node,
		.key = declared->key,
		.len = (uint32_t)strlen(declared->name),
	};

	/* Without memory, others are in doubt until one of their ranks needs the name. */
	if (job->nodes[node].peer && !forgetting->said[node])
		(void)peer_notice(job->nodes[node].peer, &header, declared->name);
}

/* The first node has said so. */
static struct forgetting *begin(struct job *job, struct declared *declared,
				const struct delivery *delivery)
{
	struct forgetting *forgetting = held_new(
		job_memory(job), sizeof(*forgetting) + job->n_nodes * sizeof(forgetting->said[0]));

	if (!forgetting)
		return NULL;
	forgetting->declared = declared;
	forgetting->round = delivery->header.round;
	declared->forgetting = forgetting;
	list_push_back(&job->names.forgetting, &forgetting->link);
	job->names.n_forgetting++;
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (i != delivery->header.node)
			ask(job, forgetting, i);
	return forgetting;
}

static void add(struct job *job, struct forgetting *forgetting, struct delivery *delivery)
{
	struct delivery **said = &forgetting->said[delivery->header.node], *before = *said;

	/* It may have been said by a daemon that was lost. */
	*said = delivery;
	if (before)
		delivery_fail(before, -EALREADY, "the node has said it again");
	else
		forgetting->n_said++;
	if (forgetting->round != delivery->header.round)
		decide(job, forgetting, false);
	else if (forgetting->n_said == job->n_nodes)
		decide(job, forgetting, true);
}

/* A node has as many to say as there may be tensors, and what a connection of it has left that was lost. */
static void put_off(struct job *job, struct delivery *delivery)
{
	struct job_node *node = &job->nodes[delivery->header.node];

	if (node->n_early >= 2 * (uint64_t)job->server->params.max_tensors) {
		refuse(delivery, -EDQUOT, "job %s: node %u has said more than there may be tensors",
		       job->owner.name, delivery->header.node);
		return;
	}
	node->n_early++;
	list_push_back(&job->names.early, &delivery->link);
}

void forget_call(struct job *job, struct delivery *delivery)
{
	struct declared *declared;
	struct forgetting *forgetting;

	if (!job->home) {
		refuse(delivery, -EPROTO, "job %s: this is not its home", job->owner.name);
		return;
	}
	if (waits(job)) {
		put_off(job, delivery);
		return;
	}
	declared = declared_of(job, delivery->header.key);
	if (!declared) {
		accept(job, delivery);
		return;
	}
	forgetting = declared->forgetting;
	if (!forgetting && may_forget(job))
		forgetting = begin(job, declared, delivery);
	if (forgetting)
		add(job, forgetting, delivery);
	else
		is_used(job, delivery);
}

void forget_not(struct job *job, uint64_t key)
{
	const struct declared *declared = declared_of(job, key);

	if (declared && declared->forgetting)
		decide(job, declared->forgetting, false);
}

void forget_ask(struct job *job, const struct declare *declare, struct delivery *delivery)
{
	const struct declared *declared;

	if (waits(job)) {
		put_off(job, delivery);
		return;
	}
	declared = declared_of(job, declare->key);
	if (!declared || strcmp(declared->name, declare->name) != 0) {
		refuse(delivery, -ESTALE,
		       "job %s: tensor %s was forgotten while the daemon of this node began anew: "
		       "name it anew",
		       job->owner.name, declare->name);
		return;
	}
	forget_not(job, declare->key);
	declare_answer(declared, delivery);
}

/* Each may have all other nodes asked. */
static bool go_on(struct chore *chore)
{
	struct job *job = container_of(chore, struct job, names.going_on);

	job->names.goes_on = true;
	for (uint32_t n = 0; n < ASK_STEP && job->state != JOB_OVER;
	     n += 1 + job->n_nodes / ASK_STEP) {
		struct delivery *delivery = list_first(&job->names.early, struct delivery, link);

		if (!delivery)
			break;
		list_remove(&delivery->link);
		job->nodes[delivery->header.node].n_early--;
		if (delivery->header.op == DATA_FORGET)
			forget_call(job, delivery);
		else
			declare_call(job, delivery);
	}
	job->names.goes_on = false;
	return job->state != JOB_OVER && !list_empty(&job->names.early);
}

/* The last word: what has waited goes on. */
static void look(struct job *job)
{
	if (list_empty(&job->names.early) || !is_notified(job))
		return;
	job->names.going_on.step = go_on;
	if (go_on(&job->names.going_on))
		loop_begin(job->server->params.loop, &job->names.going_on);
}

void forget_named(struct job *job, uint32_t node, uint64_t last_key)
{
	job->nodes[node].named = true;
	/* No job comes so far: nobody may use up the numbers. */
	if (last_key < UINT64_MAX / 2)
		job->names.next_key = MAX(job->names.next_key, last_key + 1);
	look(job);
}

/* What is being forgotten is put behind the end of its list: the first is the next. */
static bool step(struct job *job)
{
	struct names *names = &job->names;

	for (uint32_t n = 0; n < ASK_STEP && names->n_to_ask; n += 1 + job->n_nodes / ASK_STEP) {
		struct forgetting *forgetting =
			list_first(&names->forgetting, struct forgetting, link);

		if (!forgetting || job->state == JOB_OVER) {
			names->n_to_ask = 0;
			break;
		}
		names->n_to_ask--;
		sweep_leave(job, &forgetting->link);
		list_remove(&forgetting->link);
		list_push_back(&names->forgetting, &forgetting->link);
		for (uint32_t i = 0; i < job->n_nodes; i++)
			if (job->nodes[i].to_ask)
				ask(job, forgetting, i);
	}
	for (uint32_t i = 0; !names->n_to_ask && i < job->n_nodes; i++)
		job->nodes[i].to_ask = false;
	return names->n_to_ask;
}

static bool on_step(struct chore *chore)
{
	return step(container_of(chore, struct job, names.asking));
}

void forget_attached(struct job *job, uint32_t node)
{
	struct names *names = &job->names;

	if (list_empty(&names->forgetting))
		return;
	job->nodes[node].to_ask = true;
	names->n_to_ask = names->n_forgetting;
	names->asking.step = on_step;
	if (step(job))
		loop_begin(job->server->params.loop, &names->asking);
}

void forget_done(struct job *job)
{
	loop_abort(&job->names.asking);
	loop_abort(&job->names.going_on);
}

void forget_departed(struct job *job)
{
	look(job);
}

void forget_visit(struct job *job, struct list *link, uint64_t now_ns)
{
	(void)now_ns;
	if (job->n_departed)
		decide(job, container_of(link, struct forgetting, link), false);
}

void forget_end(struct job *job, struct list *link)
{
	struct forgetting *forgetting = container_of(link, struct forgetting, link);

	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (forgetting->said[i])
			delivery_fail(forgetting->said[i], job->failure.status, job->failure.text);
	list_remove(link);
	forgetting->declared->forgetting = NULL;
	(void)held_free(forgetting);
}

void forget_end_early(struct job *job, struct list *link)
{
	list_remove(link);
	delivery_fail(container_of(link, struct delivery, link), job->failure.status,
		      job->failure.text);
}
