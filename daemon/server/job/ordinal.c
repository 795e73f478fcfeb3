/*
 * Operations that all ranks of a job submit in one order, at its home: what waits at a node is
 * compared with what other nodes have said of that ordinal. All nodes hear of the operation that
 * came first, as one of that ordinal may have ended there, and once that ranks differ; a node that
 * asks later is answered. server.c calls it. Control thread only.
 *
 * What one node says is told to all, so there is a bound to it: the same operation is told once in
 * TELL_NS, and in that time a job has no more told than there can be nodes. What is left out is told
 * when a node says it again, as it does while an operation waits.
 */
#include "base/clock.h"
#include "proto/text.h"
#include "server/common/speakers.h"
#include "server/job/job.h"

#define TELL_NS NSEC_PER_SEC

static void tell(const struct job *job, uint32_t node, const struct data_header *header,
		 const void *payload)
{
	struct data_header notice = {
		.op = DATA_ORDINAL,
		.len = header->len,
		.job = job->number,
		.tensor_round = header->tensor_round,
		.ordinal = header->ordinal,
		.node = node,
		.rank = header->rank,
		.status = header->status,
	};
	struct peer *peer = job->nodes[node].peer;

	if (!peer || job->nodes[node].departed)
		return;
	/* Without memory: what waits is said again. */
	if (peer_has(peer, DATA_FEATURE_ORDINALS))
		(void)peer_notice(peer, &notice, payload);
}

static bool may_tell(struct job *job, uint64_t now_ns)
{
	struct ordinal_tellings *tellings = &job->ordinal_tellings;

	if (now_ns - tellings->since_ns >= TELL_NS)
		*tellings = (struct ordinal_tellings){ .since_ns = now_ns };
	if (tellings->n && tellings->n + job->n_nodes > JOB_RANKS_MAX)
		return false;
	tellings->n += job->n_nodes;
	return true;
}

/* Nodes of one peer are one to it, unless each rank is a node. */
static void tell_others(struct job *job, uint32_t from, const struct data_header *header,
			const void *payload)
{
	bool each = stragglers_any(&job->stragglers);
	struct speakers speakers;

	speakers_init(&speakers, job->n_nodes);
	if (!each)
		(void)speakers_meet(&speakers, job->nodes[from].peer);
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		const struct job_node *node = &job->nodes[i];

		if (i != from && node->peer && !node->departed &&
		    (each || speakers_meet(&speakers, node->peer)))
			tell(job, i, header, payload);
	}
	speakers_done(&speakers);
}

static void tell_differing(struct job *job, uint32_t from, const struct data_header *header,
			   const char *text)
{
	if (may_tell(job, clock_now_ns()))
		tell_others(job, from, header, text);
}

static void tell_first(struct job *job, uint32_t from, const struct data_header *header,
		       const char *name)
{
	uint64_t now_ns = clock_now_ns();
	uint64_t *notified_ns = ordinals_notified_ns(&job->ordinals, header->ordinal);

	if ((*notified_ns && now_ns - *notified_ns < TELL_NS) || !may_tell(job, now_ns))
		return;
	*notified_ns = now_ns;
	tell_others(job, from, header, name);
}

static struct data_header differing_header(const struct failure *how, uint64_t number)
{
	return (struct data_header){
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
	differing = differing_header(&how, header->ordinal);
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
	differing = differing_header(how, header->ordinal);
	if (r == ORDINALS_E_DIFFER)
		tell_differing(job, node, &differing, how->text);
	tell(job, node, &differing, how->text);
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
