/* The session with a daemon, and how the next one is found when it is lost. (locked): client.h. */
#pragma once

#include "call.h"

/* How far the session with the daemon has come, and so what may be said in it. */
enum session_state {
	SESSION_LOST,	   /* nothing: there is no daemon */
	SESSION_GREETING,  /* Hello; its answer is awaited */
	SESSION_OPEN,	   /* Share, Join, Resume; the answer to Resume is awaited */
	SESSION_DECLARING, /* Declare; those of before are on their way */
	SESSION_READY,	   /* all, and entries */
};

struct session {
	enum session_state state;
	uint64_t daemon; /* random number of its process */
	struct client_call hello;
	/* Before SESSION_READY: by when the next daemon has to be there, and by when the state has to change. */
	int64_t give_up_ns, deadline_ns;
	int64_t retry_ns; /* SESSION_LOST: the next try to connect */
	int error;	  /* of the last try */
	uint64_t
		declared; /* SESSION_DECLARING: number of the last packet that declares what was declared before */
};

/* Connects and greets. timeout_ms: while nobody listens. Blocks; nobody else has the client yet. */
int session_open(struct bps_client *client, int64_t timeout_ms);
/* The daemon's end of the socket is closed: what it had completed is harvested, then the next daemon is sought. */
void session_lost(struct bps_client *client);
/* Resume was answered; 0: as a rank of the job again. */
void session_resumed(struct bps_client *client);
/* One step towards SESSION_READY, if one is possible now. True when it was taken. */
bool session_advance(struct bps_client *client);
/* When the next step is due though nothing has come. */
int64_t session_due_ns(const struct bps_client *client);
/* Gives back what is the session's. */
void session_drop(struct bps_client *client);
