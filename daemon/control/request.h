/*
 * Requests of trainers, being handled: what request.c, tensor.c and follow.c share. Private to control/.
 */
#pragma once

#include "control/session.h"

/* One request packet. */
struct incoming {
	struct session *session;
	uint64_t id;
	int fd; /* what came beside it: a memfd or a frame; or -1; closed by who received it */
};

static inline void refuse(const struct incoming *in, const struct failure *failure)
{
	session_answer(in->session, in->id, failure->status, failure->text);
}

/* tensor.c */
void tensor_handle_declare(const struct incoming *in, const Bps__Control__Declare *m);
void tensor_handle_release(const struct incoming *in, const Bps__Control__Release *m);
/* What the agent asks and tells of the session's tensors: struct agent_member. */
void tensor_set_callbacks(struct session *session);

/* follow.c */
void follow_handle(const struct incoming *in, const Bps__Control__Follow *m);
/* What the agent tells a session that follows the other ranks. */
void follow_set_callbacks(struct session *session);
