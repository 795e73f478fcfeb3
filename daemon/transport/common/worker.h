/*
 * Workers, one for each data thread or one on the home loop: the loop, mail there and back, and what its lanes use one at a
 * time.
 */
#pragma once

#include "base/clock.h"
#include "base/loop/loop.h"
#include "base/source.h"
#include "proto/data.h"
#include "transport/lane/seal.h"
#include "transport/transport.h"
#include <sys/uio.h>

/* Headers and small payloads of one read, which are copied out of it while a core's second cache has them. */
#define RECEIVE_BUFFER (72u << 10)
#define SEND_MESSAGES  32	  /* gathered into one system call */
#define SEND_BYTES     (1u << 20) /* offered to one system call */
#define CHECKED_BYTES \
	(256u         \
	 << 10) /* the same, sent or received, with checksums: the cache of a core still has them */

/*
 * Mailboxes: mail to home that transport_close() can still find. Each lane has one. Where a worker's lanes come from take turns, and
 * in the turn of such a source its lanes do: what one peer sends does not wait for all that another has sent, by however many
 * connections. A turn of the loop runs no more mail than takes a moment.
 */
struct mailboxes {
	struct loop *loop;
	_Atomic(struct mail *) posted; /* of mailboxes that have mail; last first */
	struct mail mail;	       /* in the loop while posted is not empty */
	/* Home thread. */
	struct list sources; /* that mailboxes share */
	struct list
		busy; /* sources of which a mailbox has mail that was taken out, and is still to be run */
	struct mail
		more; /* in the loop while goes_on: the rest of these is left to the next turn */
	bool goes_on;
	struct loop_piece piece;
	struct sampled_clock clock;
};

/* Whose turn it is. Home thread. */
struct mail_source {
	struct list turn; /* in mailboxes->busy */
	struct list busy; /* mailboxes with mail that was taken out, and is still to be run */
	struct list link; /* in mailboxes->sources, or nowhere: of one mailbox */
	unsigned refs;
	char name[SOURCE_MAX];
};

struct mailbox {
	struct mailboxes *mailboxes;
	_Atomic(struct mail *) posted; /* last first */
	struct mail mail; /* among those posted to mailboxes while posted is not empty */
	/* Home thread. */
	struct mail *first, **last; /* taken out; last: where the next is put */
	struct list link;	    /* in source->busy */
	struct mail_source own, *source;
};

void mailboxes_init(struct mailboxes *mailboxes, struct loop *loop);
/* Of a source of its own. */
void mailbox_init(struct mailbox *mailbox, struct mailboxes *mailboxes);
/* The mailbox, which has had no mail, is one of those of the source (base/source.h). Without memory its source stays its own. */
void mailbox_share(struct mailbox *mailbox, const char *source);
/* One that has no mail. Harmless when it was not initialized. */
void mailbox_done(struct mailbox *mailbox);
/* Any thread. The mail that is the last of a mailbox, and after which nobody posts, may free the mailbox when it runs. */
void mailbox_post(struct mailbox *mailbox, struct mail *mail);
/* Runs what is in them, and what that adds, until they are empty; the loop forgets them. Home thread. */
void mailboxes_drain(struct mailboxes *mailboxes);

/* A header as it is sent, with as much of a seal as the lane has. */
struct wire {
	struct data_header header;
	unsigned char seal[SEAL_MAX];
};

/* What goes under one header: a message, or several small ones. */
struct frame {
	struct message **messages;
	const struct wire *wire;
	const struct data_packed *packed; /* of several: as many */
	uint32_t payload_len;		  /* of all payloads, */
	uint32_t sealed;		  /* of which so many bytes are in the seal */
	uint64_t number;		  /* of its header's seal */
	unsigned n;
	unsigned char packed_seal[SEAL_MAX], seal[SEAL_MAX];
};

/* One of which a part was written. */
struct begun {
	struct frame frame; /* n 0: none. It leads to what follows */
	size_t done;	    /* bytes of it that are written */
	struct message *messages[DATA_PACK_MAX];
	struct wire wire;
	struct data_packed packed[DATA_PACK_MAX];
};

struct batch {
	struct message *messages[SEND_MESSAGES];
	struct frame frames[SEND_MESSAGES +
			    1]; /* the one that was begun is the first, if there is one */
	struct wire wire[SEND_MESSAGES];
	struct data_packed packed[SEND_MESSAGES];
	struct iovec iov[5 * (SEND_MESSAGES + DATA_PACK_MAX)];
	size_t n_messages, n_frames, n_iov, len;
	bool is_cut;		 /* there is more of the last message */
	unsigned char wrong[16]; /* failpoints: what is sent instead of the start of a payload */
};

/* What comes in, and how fast that is: rate.c. */
struct rate {
	uint64_t since_ns, last_ns, bytes;
	_Atomic uint64_t bytes_s; /* any thread; 0: not known */
	_Atomic uint64_t *sum;	  /* of all rates, which this is one of; or NULL */
	_Atomic uint64_t *probed; /* what a probe has said, or NULL: samples let that fade */
};

/* now_ns: when the bytes came; without bytes, of no effect. */
void rate_count(struct rate *rate, uint64_t bytes, uint64_t now_ns);

struct worker {
	struct loop *loop;
	struct loop_thread *thread; /* NULL: loop is home */
	struct mailboxes to_home;   /* of its lanes */
	struct batch batch;
	struct rate rate;
	uint64_t n_copied; /* bytes of payloads, while it receives */
	/* Where the loop is home: */
	bool receives;		 /* the loop has received in this turn */
	struct loop_piece piece; /* mail is run at once in it, */
	bool is_over;		 /* and goes into its mailbox after it */
	struct sampled_clock clock;
	struct mail turn_end; /* at the end of the turn, where the loop has received */
	unsigned char buffer[RECEIVE_BUFFER];
};

/* thread: its name; NULL: on the home loop. Returns 0 or -errno. */
int worker_new(struct loop *home, const char *thread, struct worker **ret_worker);
/* Runs the mail posted before, then ends the thread. */
void worker_stop(struct worker *worker);
/* After stop. */
struct worker *worker_free(struct worker *worker);
/* Mail to a lane of this worker: run at once when that is home, where we are. */
void worker_post(struct worker *worker, struct mail *mail);
/*
 * Mail to home of a lane of this worker, which the mailbox is of: run at once when that is home, where we are, but behind what lies
 * in the mailbox, and in a turn of the loop that receives no more than takes a moment.
 */
void worker_post_home(struct worker *worker, struct mailbox *mailbox, struct mail *mail);
/* A lane is about to receive. Returns false when home has still to run what came before: then it has to wait. */
bool worker_receive(struct worker *worker, const struct mailbox *mailbox);
/*
 * To copy a payload from the kernel, and to check it, took so long. That is no part of the moment, which is for what is run:
 * reads are bounded by their number.
 */
void worker_copied(struct worker *worker, uint64_t took_ns);
