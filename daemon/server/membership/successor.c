/*
 * The home of an elastic job may die while it tells the nodes of the run that has begun when ranks regrouped: bps-recovery(7),
 * ELASTIC JOBS. Who has heard attaches, and brings JobJoined to every server of the job. Who has not asks again, at the next
 * home, and is told there what the others were. The same goes for a node whose daemon has died before it had told its ranks,
 * and for one whose connection was lost. Control thread only.
 */
#include "base/log.h"
#include "server/job/job.h"

struct job *successor_of(struct server *server, uint64_t number)
{
	struct job *job;

	list_for_each (job, &server->jobs, link)
		if (job->state == JOB_RUNNING && job->forming.answer && number &&
		    job->membership.regroups == number)
			return job;
	return NULL;
}

static void answer(struct job *successor, uint32_t node, const struct join *join,
		   struct delivery *delivery)
{
	struct data_header header = {
		.op = DATA_OK,
		.job = successor->number,
		.node = node,
		.epoch = successor->forming.epoch,
		.len = (uint32_t)successor->forming.answer->len,
	};

	log_notice("job %s: node %u had not heard that ranks have regrouped", successor->owner.name,
		   node);
	successor->nodes[node].instance = join->instance;
	delivery_answer(delivery, &header, successor->forming.answer, NULL);
}

/* The node of the run that sends the join, as past_find(). */
static int find_node(struct job *successor, const struct join *join, uint32_t *ret_node)
{
	struct forming *forming = &successor->forming;
	int r = 0;

	assert(forming->answer);
	if (!forming->past)
		r = past_decode(forming->answer->data, forming->answer->len, &forming->past);
	return r ? error_trace(r) : past_find(forming->past, join, ret_node);
}

/* Others go on without it, or it has begun there before. */
static bool is_too_late(const struct job *successor, uint32_t node)
{
	return successor->nodes[node].out || successor->nodes[node].departed ||
	       successor->nodes[node].spoke;
}

void successor_tell(struct job *successor, const struct join *join, struct delivery *delivery)
{
	uint32_t node = 0;
	int r = find_node(successor, join, &node);

	if (r == -ENOMEM)
		refuse(delivery, r, "job %s: out of memory", successor->owner.name);
	else if (!job_is(successor, join->job, join->secret_digest))
		refuse(delivery, -EPROTO, "job %s: the run that regroups is of job %s", join->job,
		       successor->owner.name);
	else if (r || node >= successor->n_nodes || is_too_late(successor, node))
		refuse(delivery, -ESTALE,
		       "job %s: its ranks have regrouped without those of this node",
		       successor->owner.name);
	else
		answer(successor, node, join, delivery);
}

bool successor_tell_joiner(struct job *successor, const struct join *join,
			   struct delivery *delivery)
{
	uint32_t node;

	if (!successor->membership.regroups || !successor->forming.answer || !join->newcomers ||
	    find_node(successor, join, &node) || node >= successor->n_nodes ||
	    successor->nodes[node].attached || is_too_late(successor, node))
		return false;
	answer(successor, node, join, delivery);
	return true;
}

/* Those who were not let in wait for the run after. */
static void tell_joiners(struct job *successor, struct job *old)
{
	struct joiner *joiner, *next;

	list_for_each_safe (joiner, next, &old->membership.joiners, link)
		if (successor_tell_joiner(successor, joiner->join, joiner->joining))
			joiner_free(joiner);
	if (successor->home)
		joiner_go_on(successor, old);
}

void successor_attached(struct job *successor)
{
	struct job *old = successor->membership.regroups
				  ? job_find(successor->server, successor->membership.regroups)
				  : NULL;

	/* A number from outside: what waits for another job is none of its. */
	if (old && !job_is(old, successor->owner.name, successor->owner.secret_digest))
		old = NULL;
	if (old)
		tell_joiners(successor, old);
	for (uint32_t i = 0; old && i < old->n_nodes; i++) {
		struct job_node *node = &old->nodes[i];

		/* One whose connection was lost since asks again when it is back. */
		if (!node->joining || node->joining->peer != node->peer)
			continue;
		successor_tell(successor, node->join, TAKE_PTR(node->joining));
		node->join = join_free(node->join);
	}
}
