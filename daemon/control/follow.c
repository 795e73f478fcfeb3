/*
 * A session whose rank follows the others: says so to the agent, and brings what that tells of rounds that others have begun.
 * request.c brings the packets.
 */
#include "control/request.h"

static void on_begun(struct agent_member *member, const struct agent_begun *begun)
{
	struct session *session = container_of(member, struct session, job.member);
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;
	Bps__Control__Begun body = BPS__CONTROL__BEGUN__INIT;

	body.name = (char *)begun->name;
	body.dtype = begun->dtype;
	body.elements = begun->elements;
	body.round = begun->round;
	body.operation = begun->operation;
	body.reduction = begun->reduction;
	body.first = begun->first;
	message.body_case = BPS__CONTROL__MESSAGE__BODY_BEGUN;
	message.begun = &body;
	session_send(session, &message, NULL, 0);
}

static void on_all_follow(struct agent_member *member, uint64_t turn, const struct failure *failure)
{
	struct session *session = container_of(member, struct session, job.member);
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;
	Bps__Control__AllFollow body = BPS__CONTROL__ALL_FOLLOW__INIT;

	body.turn = turn;
	message.has_status = failure != NULL;
	message.status = failure ? failure->status : 0;
	message.text = failure ? (char *)failure->text : NULL;
	message.body_case = BPS__CONTROL__MESSAGE__BODY_ALL_FOLLOW;
	message.all_follow = &body;
	session_send(session, &message, NULL, 0);
}

void follow_handle(const struct incoming *in, const Bps__Control__Follow *m)
{
	const struct agent_follow how = { .follows = m->follows, .idle = m->idle, .turn = m->turn };
	struct session *session = in->session;
	struct failure failure;

	if (!session->job.is_in || session->job.join_id)
		session_answer(session, in->id, -ENOTCONN,
			       session->job.last.status && !session->job.is_in
				       ? session->job.last.text
				       : "in no job");
	else if (!m->turn || m->turn == UINT64_MAX)
		session_answer(session, in->id, -EINVAL, "there is no such turn");
	else if (agent_follow(&session->job.member, &how, &failure))
		refuse(in, &failure);
	else
		session_answer(session, in->id, 0, NULL);
}

void follow_set_callbacks(struct session *session)
{
	session->job.member.begun = on_begun;
	session->job.member.all_follow = on_all_follow;
}
