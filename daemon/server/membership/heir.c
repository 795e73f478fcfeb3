/*
 * The home of an elastic job may die while it tells the nodes of the run that has begun when ranks regrouped: bps-recovery(7),
 * ELASTIC JOBS. Who has heard attaches, and brings JobJoined to every server of the job. Who has not asks again, at the next
 * home, and is told there what the others were. The same goes for a node whose daemon has died before it had told its ranks,
 * and for one whose connection was lost. Control thread only.
 */
#include "base/log.h"
#include "server/job/job.h"

struct job *heir_of(struct server *server, uint64_t number)
{
	struct job *job;

	list_for_each (job, &server->jobs, link)
		if (job->state == JOB_RUNNING && job->forming.answer && number &&
		    job->membership.regroups == number)
			return job;
	return NULL;
}

static void answer(struct job *heir, uint32_t node, const struct join *join,
		   struct delivery *delivery)
{
	struct data_header header = {
		.op = DATA_OK,
		.job = heir->number,
		.node = node,
		.epoch = heir->forming.epoch,
		.len = (uint32_t)heir->forming.answer_len,
	};

	log_notice("job %s: node %u had not heard that ranks have regrouped", heir->owner.name,
		   node);
	heir->nodes[node].instance = join->instance;
	delivery_answer(delivery, &header, NULL, heir->forming.answer);
}

/* Others go on without it, or it has begun there before. */
static bool is_too_late(const struct job *heir, uint32_t node)
{
	return heir->nodes[node].out || heir->nodes[node].left || heir->nodes[node].spoke;
}

void heir_tell(struct job *heir, const struct join *join, struct delivery *delivery)
{
	uint32_t node = 0;
	int r = joined_node(heir->forming.answer, heir->forming.answer_len, join, &node);

	if (r == -ENOMEM)
		refuse(delivery, r, "job %s: out of memory", heir->owner.name);
	else if (!job_is(heir, join->job, join->secret_digest))
		refuse(delivery, -EPROTO, "job %s: the run that regroups is of job %s", join->job,
		       heir->owner.name);
	else if (r || node >= heir->n_nodes || is_too_late(heir, node))
		refuse(delivery, -ESTALE,
		       "job %s: its ranks have regrouped without those of this node",
		       heir->owner.name);
	else
		answer(heir, node, join, delivery);
}

bool heir_tell_guest(struct job *heir, const struct join *join, struct delivery *delivery)
{
	uint32_t node;

	if (!heir->membership.regroups || !heir->forming.answer || !join->newcomers ||
	    joined_node(heir->forming.answer, heir->forming.answer_len, join, &node) ||
	    node >= heir->n_nodes || heir->nodes[node].attached || is_too_late(heir, node))
		return false;
	answer(heir, node, join, delivery);
	return true;
}

/* Those who were not let in wait for the run after. */
static void tell_guests(struct job *heir, struct job *old)
{
	struct guest *guest, *next;

	list_for_each_safe (guest, next, &old->membership.guests, link)
		if (heir_tell_guest(heir, guest->join, guest->joining))
			guest_free(guest);
	if (heir->home)
		guest_go_on(heir, old);
}

void heir_attached(struct job *heir)
{
	struct job *old = heir->membership.regroups
				  ? job_find(heir->server, heir->membership.regroups)
				  : NULL;

	/* A number from outside: what waits for another job is none of its. */
	if (old && !job_is(old, heir->owner.name, heir->owner.secret_digest))
		old = NULL;
	if (old)
		tell_guests(heir, old);
	for (uint32_t i = 0; old && i < old->n_nodes; i++) {
		struct job_node *node = &old->nodes[i];

		/* One whose connection was lost since asks again when it is back. */
		if (!node->joining || node->joining->peer != node->peer)
			continue;
		heir_tell(heir, node->join, TAKE_PTR(node->joining));
		node->join = join_free(node->join);
	}
}
