/*
 * Which view a job runs in: its claim, made by the first daemon that wants it, in a transaction that also writes that
 * daemon's hold, if the view is still the newest and nobody holds the job. The job's home accepts it once it has the view;
 * from then on the claim stays as it is for as long as anybody holds it. Every daemon that wants the job adds its hold; holds
 * hang on leases, so they go with their daemons.
 */
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "cluster/etcd/state.h"

#include <inttypes.h>
#include <stdio.h>

/* Keys of one job. */
struct keys {
	char claim[ETCD_KEY_MAX];
	char holds[ETCD_KEY_MAX], holds_end[ETCD_KEY_MAX];
	char hold[ETCD_KEY_MAX];
};

static void keys_of(const struct etcd_source *s, const char *job, uint64_t owner, struct keys *keys)
{
	char name[96];

	(void)snprintf(name, sizeof(name), "%s/%016" PRIx64, job, owner);
	etcd_state_key(s, "jobs/", name, keys->claim);
	(void)snprintf(keys->holds, sizeof(keys->holds), "%s%s/", s->holds, name);
	(void)snprintf(keys->holds_end, sizeof(keys->holds_end), "%s%s0", s->holds, name);
	(void)snprintf(keys->hold, sizeof(keys->hold), "%s%s/%016" PRIx64, s->holds, name,
		       s->cluster->params.self.id);
}

static struct etcd_guard nobody_holds(const struct keys *keys)
{
	return (struct etcd_guard){ ETCD_VERSION_IS, keys->holds, keys->holds_end, 0 };
}

static struct etcd_guard somebody_holds(const struct keys *keys)
{
	return (struct etcd_guard){ ETCD_VERSION_ABOVE, keys->holds, keys->holds_end, 0 };
}

static struct etcd_guard claim_is(const struct keys *keys, const struct etcd_claim *claim)
{
	if (!claim)
		return (struct etcd_guard){ ETCD_VERSION_IS, keys->claim, NULL, 0 };
	return (struct etcd_guard){ ETCD_REVISION_IS, keys->claim, NULL, claim->mod_revision };
}

/* Claims: what their home does for them */

static void on_claim_step(struct etcd_step *step, bool succeeded)
{
	struct etcd_claim *claim = container_of(step, struct etcd_claim, step);

	if (claim->accepted && succeeded)
		claim->check = false;
	if (succeeded)
		FAILPOINT("etcd-claim-accepted");
}

void etcd_claim_init(struct etcd_claim *claim)
{
	etcd_step_init(&claim->step, claim->source, on_claim_step);
}

static void claim_accept(struct etcd_claim *claim)
{
	struct etcd_source *s = claim->source;
	struct wire_bytes bytes = { 0 };
	struct etcd_change change;
	struct etcd_guard guard;
	struct keys keys;

	if (wire_pack_claim(claim->view, true, &bytes))
		return;
	keys_of(s, claim->job, claim->owner, &keys);
	guard = claim_is(&keys, claim);
	change = (struct etcd_change){ .key = keys.claim, .value = bytes };
	etcd_step_txn(&claim->step, &guard, 1, &change, 1);
	wire_bytes_done(&bytes);
}

/* Succeeds or not; that it is asked is enough, until the next that might have held it is gone. */
static void claim_check(struct etcd_claim *claim)
{
	struct etcd_change change;
	struct etcd_guard guard;
	struct keys keys;

	keys_of(claim->source, claim->job, claim->owner, &keys);
	guard = nobody_holds(&keys);
	change = (struct etcd_change){ .key = keys.claim, .remove = true };
	claim->check = false;
	etcd_step_txn(&claim->step, &guard, 1, &change, 1);
}

void etcd_claims_check(struct etcd_source *s)
{
	int64_t ttl_s = MAX(s->lease.ttl_s, (int64_t)(s->cluster->params.lease_ms / 1000));
	struct etcd_claim *claim;

	list_for_each (claim, &s->copy.claims, link) {
		claim->check = true;
		claim->check_again_ns = clock_now_ns() + (uint64_t)(ttl_s + 2) * NSEC_PER_SEC;
	}
}

/* Whether it is time for check_again_ns; else another look is taken then. */
static void claim_await_check(struct etcd_claim *claim)
{
	if (!claim->check_again_ns)
		return;
	if (clock_now_ns() < claim->check_again_ns) {
		etcd_look_at(claim->source, claim->check_again_ns);
		return;
	}
	claim->check = true;
	claim->check_again_ns = 0;
}

static bool is_home(const struct view *view, const char *job)
{
	const struct view_member *home = view ? view_home(view, job) : NULL;

	return home && home->is_self;
}

/* All views that jobs run in are kept, and said to be in use. */
static void claims_keep(struct etcd_source *s)
{
	struct etcd_claim *claim;
	struct failure failure = { 0 };
	uint32_t *in_use;
	size_t n = 0;

	list_for_each (claim, &s->copy.claims, link)
		n++;
	in_use = calloc(n + 1, sizeof(*in_use));
	if (!in_use)
		return;
	n = 0;
	list_for_each (claim, &s->copy.claims, link)
		if (claim->view)
			in_use[n++] = claim->view->epoch;
	cluster_set_in_use(s->cluster, in_use, n);
	list_for_each (claim, &s->copy.claims, link) {
		if (!claim->view || !cluster_keep_view(s->cluster, claim->view, &failure))
			continue;
		log_warning("etcd: job %s: %s", claim->job, failure.text);
		claim->view = view_unref(claim->view);
	}
	s->copy.claims_changed = false;
}

void etcd_claims_look(struct etcd_source *s)
{
	struct etcd_claim *claim;

	if (s->copy.claims_changed)
		claims_keep(s);
	list_for_each (claim, &s->copy.claims, link) {
		bool accept = claim->view && !claim->accepted && is_home(claim->view, claim->job);
		bool check;

		claim_await_check(claim);
		check = claim->check && is_home(s->cluster->view, claim->job);

		if ((!accept && !check) || !etcd_step_ready(&claim->step))
			continue;
		if (accept)
			claim_accept(claim);
		else
			claim_check(claim);
	}
}

/* Jobs: what this daemon wants */

static bool is_wanted(const struct etcd_job *j)
{
	return !j->job->dropped;
}

static void on_job_step(struct etcd_step *step, bool succeeded)
{
	struct etcd_job *j = container_of(step, struct etcd_job, step);

	/* etcd_jobs_look() has noted in them what was tried. */
	if (j->trying == TRY_LET_GO && succeeded) {
		j->maybe_held = false;
		j->clean = true;
	} else if (j->trying == TRY_CLEAN) {
		j->clean = !step->is_answered;
	} else if (j->trying == TRY_JOIN && !succeeded) {
		j->stale_claim = j->tried_claim;
	}
	if ((j->trying == TRY_CLAIM || j->trying == TRY_JOIN) && succeeded)
		j->held_lease = j->tried_lease;
	if (succeeded)
		FAILPOINT("etcd-job-written");
	j->trying = TRY_NOTHING;
}

static void job_free(struct etcd_job *j)
{
	etcd_call_cancel(&j->step.call);
	j->job->etcd = NULL;
	free(j);
}

static void try_txn(struct etcd_job *j, unsigned trying, const struct etcd_guard *guards,
		    size_t n_guards, const struct etcd_change *changes, size_t n_changes)
{
	j->trying = trying;
	j->tried_lease = j->source->lease.id;
	if (trying == TRY_CLAIM || trying == TRY_JOIN)
		j->maybe_held = true;
	etcd_step_txn(&j->step, guards, n_guards, changes, n_changes);
}

/* Adds our hold to a claim that somebody else holds, or, in a job that runs, to one that is as we know it. */
static void job_join(struct etcd_job *j, const struct etcd_claim *claim, bool runs)
{
	struct etcd_guard guards[2];
	struct etcd_change change;
	struct keys keys;

	keys_of(j->source, j->job->name, j->job->owner, &keys);
	guards[0] = claim_is(&keys, claim);
	guards[1] = somebody_holds(&keys);
	change = (struct etcd_change){ .key = keys.hold, .lease = j->source->lease.id };
	j->tried_claim = claim->mod_revision;
	try_txn(j, TRY_JOIN, guards, runs ? 1 : 2, &change, 1);
}

/* Makes the claim, with our hold. guard: what is to be so for it. */
static void job_claim(struct etcd_job *j, struct view *view, bool accepted, const struct keys *keys,
		      const struct etcd_guard *guards, size_t n_guards)
{
	struct wire_bytes bytes = { 0 };
	struct etcd_change changes[2];

	if (wire_pack_claim(view, accepted, &bytes))
		return;
	changes[0] = (struct etcd_change){ .key = keys->claim, .value = bytes };
	changes[1] = (struct etcd_change){ .key = keys->hold, .lease = j->source->lease.id };
	try_txn(j, TRY_CLAIM, guards, n_guards, changes, 2);
	wire_bytes_done(&bytes);
}

/* Nobody holds it: in the newest view, if there are servers enough. */
static void job_claim_newest(struct etcd_job *j)
{
	struct etcd_source *s = j->source;
	struct view *view = etcd_settled_view(s);
	struct etcd_guard guards[2];
	char key[ETCD_KEY_MAX];
	struct keys keys;

	if (!view || view_n_servers(view) < cluster_job_min_servers(j->job) ||
	    !view_n_servers(view))
		return;
	keys_of(s, j->job->name, j->job->owner, &keys);
	etcd_state_key(s, "view", "", key);
	guards[0] = nobody_holds(&keys);
	guards[1] = (struct etcd_guard){ ETCD_REVISION_IS, key, NULL, s->copy.view_mod };
	job_claim(j, view, false, &keys, guards, 2);
}

/* Its home has not accepted it, and now there is another view, perhaps because the home is gone. */
static void job_claim_newer(struct etcd_job *j, const struct etcd_claim *claim)
{
	struct view *view = etcd_settled_view(j->source);
	struct etcd_guard guard;
	struct keys keys;

	if (!view || view->epoch == claim->view->epoch ||
	    view_n_servers(view) < cluster_job_min_servers(j->job) || !view_n_servers(view))
		return;
	keys_of(j->source, j->job->name, j->job->owner, &keys);
	guard = claim_is(&keys, claim);
	job_claim(j, view, false, &keys, &guard, 1);
}

/* It runs here, and our hold went with our lease, or with all that etcd had. */
static void job_hold_again(struct etcd_job *j, const struct etcd_claim *claim)
{
	struct etcd_guard guard;
	struct keys keys;

	if (claim && claim->view && claim->view->epoch != j->job->view->epoch) {
		if (!j->warned)
			log_warning("etcd: job %s: is in view %u here, in %u elsewhere",
				    j->job->name, j->job->view->epoch, claim->view->epoch);
		j->warned = true;
		j->held_lease = j->source->lease.id;
		return;
	}
	if (claim && claim->view) {
		job_join(j, claim, true);
		return;
	}
	keys_of(j->source, j->job->name, j->job->owner, &keys);
	guard = claim_is(&keys, claim);
	job_claim(j, j->job->view, true, &keys, &guard, 1);
}

static void job_let_go(struct etcd_job *j)
{
	struct etcd_change change;
	struct etcd_guard guard;
	struct keys keys;

	j->job->view = view_unref(j->job->view);
	j->held_lease = 0;
	keys_of(j->source, j->job->name, j->job->owner, &keys);
	if (j->maybe_held) {
		change = (struct etcd_change){ .key = keys.hold, .remove = true };
		try_txn(j, TRY_LET_GO, NULL, 0, &change, 1);
	} else if (j->clean) {
		guard = nobody_holds(&keys);
		change = (struct etcd_change){ .key = keys.claim, .remove = true };
		try_txn(j, TRY_CLEAN, &guard, 1, &change, 1);
	} else {
		struct cluster_job *job = j->job;

		job_free(j);
		cluster_job_free(job);
	}
}

/* The job may be gone when it returns. */
static void job_open(struct etcd_job *j)
{
	struct etcd_source *s = j->source;
	struct etcd_claim *claim = etcd_claim_find(s, j->job->name, j->job->owner);

	if (!claim || !claim->view || claim->mod_revision == j->stale_claim)
		job_claim_newest(j);
	else if (j->held_lease != s->lease.id)
		job_join(j, claim, false);
	else if (!claim->accepted)
		job_claim_newer(j, claim);
	else
		cluster_job_opened(j->job, cluster_view_of(s->cluster, claim->view->epoch));
}

static void job_look(struct etcd_job *j)
{
	struct etcd_source *s = j->source;

	if (!s->lease.id || !etcd_step_ready(&j->step))
		return;
	if (!is_wanted(j))
		job_let_go(j);
	else if (!j->job->view)
		job_open(j);
	else if (j->held_lease != s->lease.id)
		job_hold_again(j, etcd_claim_find(s, j->job->name, j->job->owner));
}

static struct etcd_job *job_to_look_at(struct etcd_source *s)
{
	struct cluster_job *job;

	list_for_each (job, &s->cluster->jobs, link)
		if (job->etcd && job->etcd->look != s->look_number)
			return job->etcd;
	return NULL;
}

void etcd_jobs_look(struct etcd_source *s)
{
	struct etcd_job *j;

	s->look_number++;
	/* Sought anew each time: whoever is told may open and close jobs. */
	while (!s->cluster->closed && (j = job_to_look_at(s))) {
		j->look = s->look_number;
		job_look(j);
	}
}

void etcd_want(struct cluster_job *job)
{
	struct etcd_source *s = job->cluster->source;
	struct failure failure = { 0 };

	if (strchr(job->name, '/')) {
		(void)failure_set(&failure, -EINVAL, "job %s: a name with '/'", job->name);
		cluster_job_failed(job, &failure);
		return;
	}
	if (!job->etcd) {
		job->etcd = calloc(1, sizeof(*job->etcd));
		if (!job->etcd) {
			(void)failure_set(&failure, -ENOMEM, "job %s: out of memory", job->name);
			cluster_job_failed(job, &failure);
			return;
		}
		job->etcd->source = s;
		job->etcd->job = job;
		job->etcd->look = s->look_number;
		etcd_step_init(&job->etcd->step, s, on_job_step);
	}
	etcd_look_now(s);
}

void etcd_drop(struct cluster_job *job)
{
	if (job->cluster->closed)
		return;
	if (job->etcd)
		etcd_look_now(job->cluster->source);
	else
		cluster_job_free(job);
}

void etcd_jobs_free(struct etcd_source *s)
{
	struct cluster_job *job;

	list_for_each (job, &s->cluster->jobs, link)
		if (job->etcd)
			job_free(job->etcd);
}
