#include "pipeline/round.h"

/*
 * Which parts are made next. Parts come into being in the order in which they should leave, of all rounds of the job, and
 * only as many as are worth ahead_bytes unsent. A fast server so cannot be served much beyond a slow one: at each moment
 * each has been sent the share of the bytes that placement has given it, and all links are busy to the end. It bounds
 * what is unsent, never what is unanswered: two nodes may submit their tensors in different orders.
 */

static bool is_before(const struct pipeline_round *a, const struct pipeline_round *b)
{
	return a->priority != b->priority ? a->priority > b->priority : a->sequence < b->sequence;
}

/* Most often it is the most urgent, or the newest of the same priority. */
void pipeline_deal_add(struct pipeline_round *round)
{
	struct list *dealt = &round->tensor->job->dealt;
	struct pipeline_round *other = list_last(dealt, struct pipeline_round, deal_link);

	if (!other || is_before(other, round)) {
		list_push_back(dealt, &round->deal_link);
		return;
	}
	list_for_each (other, dealt, deal_link) {
		if (is_before(round, other)) {
			list_insert_before(&other->deal_link, &round->deal_link);
			return;
		}
	}
}

bool pipeline_deal_has_room(const struct pipeline_round *round)
{
	const struct pipeline_job *job = round->tensor->job;
	const struct pipeline_round *other;
	uint64_t unsent = round->unsent;

	if (!job->distributed)
		return true;
	list_for_each (other, &job->dealt, deal_link) {
		if (other == round)
			break;
		unsent += other->unsent;
	}
	return unsent < job->pipeline->params.ahead_bytes;
}

static struct pipeline_round *next_round(struct pipeline_job *job)
{
	struct pipeline_round *round, *next;
	uint64_t unsent = 0;

	list_for_each_safe (round, next, &job->dealt, deal_link) {
		if (unsent >= job->pipeline->params.ahead_bytes)
			return NULL;
		/* All of it has left. Thousands may so wait for their results: they are not to be gone through for each part. */
		if (round->cut && !round->unsent) {
			list_remove(&round->deal_link);
			continue;
		}
		if (!round->refilling && pipeline_round_can_begin_part(round))
			return round;
		unsent += round->unsent;
	}
	return NULL;
}

void pipeline_deal(struct pipeline_job *job)
{
	struct pipeline_round *round;

	if (job->dealing)
		return;
	job->dealing = true;
	/* From the start after each: it may end, and others with it. */
	while ((round = next_round(job)))
		pipeline_round_refill(round);
	job->dealing = false;
}
