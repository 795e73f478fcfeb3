/*
 * Operations that all ranks of a job submit in one order, at its home: what waits at a node is
 * compared with what other nodes have said of that ordinal. All nodes hear of the operation that
 * came first, as one of that ordinal may have ended there, and once that ranks differ; a node that
 * asks later is answered. server.c calls it. Control thread only.
 *
 * What one node says is told to all, so there is a bound to it: the same operation is told once in
 * RELAY_NS, and all of it within relay_may().
 */
#include "base/clock.h"
#include "proto/text.h"
#include "server/job/job.h"

static void tell_differing(struct job *job, uint32_t from, const struct data_header *notice,
			   const char *text)
{
	if (relay_may(job, job->n_nodes, clock_now_ns()))
		relay_to_others(job, from, DATA_FEATURE_ORDINALS, notice, text);
}

static void tell_first(struct job *job, uint32_t from, const struct data_header *header,
		       const char *name)
{
	uint64_t now_ns = clock_now_ns();
	uint64_t *notified_ns = ordinals_notified_ns(&job->ordinals, header->ordinal);
	struct data_header notice = {
		.op = DATA_ORDINAL,
		.len = header->len,
		.tensor_round = header->tensor_round,
		.ordinal = header->ordinal,
		.rank = header->rank,
	};

	if ((*notified_ns && now_ns - *notified_ns < RELAY_NS) ||
	    !relay_may(job, job->n_nodes, now_ns))
		return;
	*notified_ns = now_ns;
	relay_to_others(job, from, DATA_FEATURE_ORDINALS, &notice, name);
}

static struct data_header differing_notice(const struct failure *how, uint64_t number)
{
	return (struct data_header){
		.op = DATA_ORDINAL,
		.len = (uint32_t)strlen(how->text),
		.ordinal = number,
		.status = -how->status,
	};
}

/* A node has found that ranks differ. */
static void differ(struct job *job, uint32_t node, const struct data_header *header,
		   const void *payload)
{
	struct data_header differing;
	struct failure said, how;

	notice_decode(header, payload, &said);
	(void)failure_set(&how, -EILSEQ, "%s", said.text);
	differing = differing_notice(&how, header->ordinal);
	if (ordinals_differ(&job->ordinals, header->ordinal, &how) == ORDINALS_E_DIFFER)
		tell_differing(job, node, &differing, how.text);
}

/* An operation waits at a node. */
static void compare(struct job *job, uint32_t node, const struct data_header *header,
		    const char *name)
{
	const struct ordinal_operation operation = { name, header->tensor_round, header->rank };
	int r = ordinals_compare(&job->ordinals, header->ordinal, &operation, true);
	const struct failure *how = ordinals_differing(&job->ordinals, header->ordinal);
	struct data_header differing;

	if (r == ORDINALS_E_FIRST || r == ORDINALS_E_AGAIN)
		tell_first(job, node, header, name);
	if (!how)
		return;
	differing = differing_notice(how, header->ordinal);
	if (r == ORDINALS_E_DIFFER)
		tell_differing(job, node, &differing, how->text);
	relay_to(job, node, DATA_FEATURE_ORDINALS, &differing, how->text);
}

void ordinal_heard(struct job *job, uint32_t node, const struct data_header *header,
		   const void *payload)
{
	char name[TENSOR_NAME_MAX + 1];

	if (header->status)
		differ(job, node, header, payload);
	else if (text_take_name(payload, header->len, name, sizeof(name)))
		compare(job, node, header, name);
}
