/*
 * What the files of the etcd source share: a copy of what etcd holds of this cluster (sync.c), and what this
 * daemon wants to be there (source.c, job.c). Whenever either has changed, or time has passed, everything
 * is looked at again, and what differs is written, by a transaction that only succeeds if what it was decided by is still
 * so. One that fails, or whose answer is lost, changes nothing here: the next look decides anew. Private to them.
 *
 * Keys, below the prefix (proto/cluster.proto, JobClaim): all of state/ is watched, holds/ is only asked about.
 */
#pragma once

#include "base/list.h"
#include "cluster/etcd/etcd.h"
#include "cluster/source.h"

struct etcd_source;

/* One transaction at a time, about one thing. */
struct etcd_step {
	struct etcd_call call;
	struct etcd_source *source;
	int64_t revision;  /* what we wrote is seen once this has come */
	uint64_t again_ns; /* not before: it has failed */
	bool is_watched;   /* it writes to state/ */
	bool is_answered;  /* the last one was, whether it succeeded or came too late */
	void (*done)(struct etcd_step *step, bool succeeded);
};

struct etcd_member {
	struct list link;
	char name[64];
	struct view_member info; /* roles 0: what is there is no member */
	int64_t create_revision, mod_revision, lease;
	bool seen;
};

struct etcd_claim {
	struct list link;
	struct etcd_source *source;
	char job[64];
	uint64_t owner;
	struct view *view; /* NULL: what is there is no claim */
	bool accepted;
	int64_t mod_revision;
	bool seen;
	bool check;		 /* by its home: does anybody still hold it? */
	uint64_t check_again_ns; /* when the leases of those who left are over; 0: not */
	struct etcd_step step;
};

struct etcd_job {
	struct etcd_source *source;
	struct cluster_job *job;
	struct etcd_step step;
	bool maybe_held;     /* our hold may be there */
	int64_t held_lease;  /* with which it is there for certain; 0: it is not */
	int64_t stale_claim; /* mod revision of the claim that we could not hold */
	enum { TRY_NOTHING, TRY_CLAIM, TRY_JOIN, TRY_LET_GO, TRY_CLEAN } trying;
	int64_t tried_lease, tried_claim;
	bool clean; /* we have let go; if nobody else holds it, the claim goes too */
	bool warned;
	uint32_t look; /* number of the newest look at it */
};

/* What etcd has under PREFIX/state/, as far as it is known here. */
struct etcd_copy {
	bool synced, was_synced;
	struct etcd_call range;
	size_t stage;		/* of the ranges that a copy is made of */
	int64_t range_revision; /* of which all of them are */
	int64_t revision;	/* newest that is in the copy */
	struct loop_timer sync_again;
	struct list members;
	size_t n_members;
	struct list claims;
	bool claims_changed;
	struct view *view; /* NULL while view_mod is 0, or if it is no view */
	int64_t view_mod;
	struct wire_bytes key;
	int64_t key_mod;
	uint64_t contest_id; /* somebody asks whether we live */
	int64_t contest_mod;
	bool view_seen, key_seen, contest_seen;
};

struct etcd_lease {
	struct etcd_call grant, keep_alive;
	int64_t id, ttl_s;
	struct loop_timer beat;
	uint64_t grant_again_ns;
};

/* What is to be in etcd, and how far that has come. */
struct etcd_wanted {
	bool key_reported;		/* the configured one */
	struct wire_bytes reported_key; /* the one from etcd */
	struct etcd_step key_step, member_step, view_step;
	int64_t asked_mod; /* of the member with our name that was asked whether it lives */
	uint64_t asked_until_ns;
	int64_t answered_mod; /* contest */
	int64_t answering_mod;
	bool registering, asking;
	uint64_t taken_since_ns; /* our name or address is another's */
	bool members_changed, differs;
	uint64_t differs_since_ns;
};

struct etcd_source {
	struct cluster *cluster;
	struct etcd *etcd;
	char state[160], state_end[160]; /* "PREFIX/state/" and what follows all of it */
	char holds[160];
	struct loop_timer look;
	uint32_t look_number;
	struct etcd_copy copy;
	struct etcd_lease lease;
	struct etcd_wanted wanted;
	uint64_t gone_since_ns;
};

/* source.c */
/* Everything is looked at again at that time, or before. */
void etcd_look_at(struct etcd_source *s, uint64_t at_ns);
void etcd_look_now(struct etcd_source *s);
/* PREFIX/state/WHAT. */
void etcd_state_key(const struct etcd_source *s, const char *what, const char *name,
		    char key[ETCD_KEY_MAX]);
void etcd_step_init(struct etcd_step *step, struct etcd_source *s,
		    void (*done)(struct etcd_step *step, bool succeeded));
/* Neither under way, nor waiting for what it wrote to be seen. */
bool etcd_step_ready(struct etcd_step *step);
void etcd_step_txn(struct etcd_step *step, const struct etcd_guard *guards, size_t n_guards,
		   const struct etcd_change *changes, size_t n_changes);
/* The view that jobs may be opened in now; NULL: none, for the moment. */
struct view *etcd_settled_view(const struct etcd_source *s);
uint32_t etcd_epoch_here(const struct etcd_source *s);

/* sync.c */
void etcd_sync_start(struct etcd_source *s);
void etcd_sync_stop(struct etcd_source *s);
void etcd_sync_watched(struct etcd_source *s, const void *data, size_t len);
struct etcd_member *etcd_member_find(const struct etcd_source *s, const char *name);
struct etcd_claim *etcd_claim_find(const struct etcd_source *s, const char *job, uint64_t owner);
void etcd_copy_free(struct etcd_source *s);

/* job.c */
void etcd_claim_init(struct etcd_claim *claim);
/* Members have changed: whoever held the claims may be gone, or be going with its lease. */
void etcd_claims_check(struct etcd_source *s);
void etcd_claims_look(struct etcd_source *s);
void etcd_jobs_look(struct etcd_source *s);
void etcd_want(struct cluster_job *job);
void etcd_drop(struct cluster_job *job);
void etcd_jobs_free(struct etcd_source *s);
