/*
 * Jobs that outlive their daemons' processes (bps-recovery(7), THROUGH SERVERS). A result is kept until every node of its set
 * has said that it keeps it, too: whoever dies, there is always one who can give it to those that have not got it.
 *
 * Each result has a number for each node that it is sent to, counted from 1 since the node attached. The node says up to
 * which number it has all (in its pushes, or by DATA_ACK), and is told up to which number all nodes have all (in results,
 * or by DATA_RELEASE), so that it can forget. A node that contributes to round r of a tensor has all of its rounds before.
 *
 * Who has no use for the data of a result (the source of a broadcast) is not answered before one who has keeps it: until
 * then the trainer's memory is the only other place where it is.
 *
 * After a loss, nodes push again what they have no result of, and offer by name what they keep. To a fresh process they
 * bring the data, which then is the result. Control thread only.
 */
#pragma once

#include "server/job/store.h"

/* The result is there, or there is no data: answers whom it can, and keeps the slot. The slot may be gone afterwards. */
void keep_finish(struct slot *slot);
/*
 * Whether a node that has contributed to a slot may do so once more: it was lost meanwhile, or a connection of it broke. Else it is a
 * repeat.
 */
bool keep_may_repeat(const struct slot *slot, const struct delivery *delivery);
/* A contribution to a slot that is kept, or which has one of that node from before it was lost. */
void keep_again(struct slot *slot, struct delivery *delivery);
/* Answers a node; with its number, if the job has resume. */
void keep_answer(struct slot *slot, struct delivery *delivery);
/*
 * Numbers an answer to a node, of which *number is 0 before the first time, and says what all nodes have. slot: whose result it is,
 * which is kept until all have it; or NULL. Returns 0 or -ENOMEM.
 */
int keep_number(struct job *job, struct slot *slot, uint32_t *number, struct data_header *header);
/* A node keeps all results up to this number. Returns 0, or -EPROTO when it was sent less. */
int keep_ack(struct job *job, uint32_t node, uint32_t number);
/* A node contributes to a round: those before are over for it. */
void keep_past(struct tensor *tensor, uint32_t node, uint64_t round);
/* DATA_HAVE, of a node of the job. */
void keep_acknowledged(struct job *job, uint32_t node, const struct data_header *header);
/* A node has attached, perhaps again. */
void keep_attached(struct job *job, uint32_t node);
/* For the sweep: a slot in store.kept, when nodes may have left, or be past its round. May end the job. */
void keep_visit(struct job *job, struct list *link, uint64_t now_ns);
/* An OFFER of a node that attach_check() has passed. */
void keep_offer(struct job *job, struct delivery *delivery);
/* The job is about to be freed: nobody is told any more. */
void keep_end(struct job *job);
/* The slot is about to be freed. */
void keep_forget(struct slot *slot);
/* Answers what is not in slot->from. */
void keep_fail(struct slot *slot, int status, const char *text);
