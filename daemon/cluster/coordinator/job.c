/* Which view a job runs in: fixed by the first member that asks, until the last that asked has closed it or is gone. */
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "cluster/coordinator/state.h"
#include "cluster/source.h"

#include <stdio.h>

#define JOBS_MAX	 65536u
#define HOLDS_MAX	 1048576u /* of all jobs: members that have them open */
#define OPENINGS_MAX	 4096u	  /* OpenJob calls that wait */
#define OPEN_TIMEOUT_MAX (24ull * 3600 * 1000)

struct job {
	struct list link;
	struct map_entry entry; /* of jobs_by_name */
	char name[64];
	uint64_t owner; /* jobs of one name and different owners are different jobs */
	struct view *view;
	struct list holds;
};

struct hold {
	struct list link; /* of job->holds */
	struct list in_member;
	struct job *job;
	struct member *member;
	bool said; /* while the member says what it holds: this one, too */
};

/* An OpenJob that cannot be answered yet. */
struct opening {
	struct list link, in_member;
	struct map_entry entry; /* of openings_by_name */
	struct coordinator *coordinator;
	struct member *member;
	struct rpc_call *call;
	struct wire_open request;
	struct loop_timer timer;
};

static bool job_is(const struct job *job, const char *name, uint64_t owner)
{
	return job->owner == owner && !strcmp(job->name, name);
}

static uint64_t hash_of(const char *name, uint64_t owner)
{
	return map_hash_string(name) ^ owner;
}

static struct job *job_find(struct coordinator *c, const char *name, uint64_t owner)
{
	struct map_entry *entry = map_find(&c->jobs_by_name, hash_of(name, owner));

	for (; entry; entry = map_find_next(entry)) {
		struct job *job = container_of(entry, struct job, entry);

		if (job_is(job, name, owner))
			return job;
	}
	return NULL;
}

/* Of what there is for all, a member may have as much as it leaves. */
static bool has_share(size_t own, size_t all, size_t max)
{
	return all < max && own < max - all;
}

/* r: -errno; they: what jobs do of which there are too many. */
static void refuse(struct rpc_call *call, int r, const char *they)
{
	char text[128];

	if (r != -ENOBUFS) {
		rpc_call_fail(call, r, strerror(-r));
		return;
	}
	(void)snprintf(text, sizeof(text),
		       "too many jobs %s: a member may have as many as it leaves to others", they);
	rpc_call_fail(call, r, text);
}

static int job_new(struct coordinator *c, const struct member *member, const char *name,
		   uint64_t owner, struct view *view, struct job **ret_job)
{
	struct job *job;
	int r;

	if (!has_share(member->n_holds, c->n_jobs, JOBS_MAX))
		return error_origin(-ENOBUFS);
	job = calloc(1, sizeof(*job));
	r = job ? map_add(&c->jobs_by_name, hash_of(name, owner), &job->entry) : -ENOMEM;
	if (r) {
		free(job);
		return error_origin(r);
	}
	(void)snprintf(job->name, sizeof(job->name), "%s", name);
	job->owner = owner;
	job->view = view_ref(view);
	list_init(&job->holds);
	list_push_back(&c->jobs, &job->link);
	c->n_jobs++;
	*ret_job = job;
	return 0;
}

static void job_settle(struct coordinator *c, struct job *job)
{
	if (!list_empty(&job->holds))
		return;
	list_remove(&job->link);
	map_remove(&c->jobs_by_name, &job->entry);
	c->n_jobs--;
	view_unref(job->view);
	free(job);
}

/* Members that hold it: as many as there are nodes of the job. */
static struct hold *hold_find(const struct job *job, const struct member *member)
{
	struct hold *hold;

	list_for_each (hold, &job->holds, link)
		if (hold->member == member)
			return hold;
	return NULL;
}

static int hold_add(struct coordinator *c, struct job *job, struct member *member,
		    struct hold **ret_hold)
{
	struct hold *hold = hold_find(job, member);

	if (!hold && !has_share(member->n_holds, c->n_holds, HOLDS_MAX))
		return error_origin(-ENOBUFS);
	if (!hold) {
		hold = calloc(1, sizeof(*hold));
		if (!hold)
			return error_origin(-ENOMEM);
		hold->job = job;
		hold->member = member;
		list_push_back(&job->holds, &hold->link);
		list_push_back(&member->holds, &hold->in_member);
		member->n_holds++;
		c->n_holds++;
	}
	*ret_hold = hold;
	return 0;
}

static void hold_remove(struct coordinator *c, struct hold *hold)
{
	struct job *job = hold->job;

	list_remove(&hold->link);
	list_remove(&hold->in_member);
	hold->member->n_holds--;
	c->n_holds--;
	free(hold);
	job_settle(c, job);
}

void coordinator_used_done(struct coordinator_used *used)
{
	free(used->epochs);
	free(used->views);
}

struct used {
	struct view *view;
	size_t at;
};

/* Of one epoch, the view that came first. */
static int by_epoch(const void *a, const void *b)
{
	const struct used *x = a, *y = b;

	if (x->view->epoch != y->view->epoch)
		return x->view->epoch < y->view->epoch ? -1 : 1;
	return x->at < y->at ? -1 : x->at > y->at;
}

int coordinator_used_collect(const struct coordinator *c, struct coordinator_used *used)
{
	_cleanup_(freep) struct used *all = calloc(c->n_jobs + 1, sizeof(*all));
	struct job *job;
	size_t n = 0;

	used->epochs = calloc(c->n_jobs + 1, sizeof(*used->epochs));
	used->views = calloc(c->n_jobs + 1, sizeof(struct view *));
	if (!all || !used->epochs || !used->views)
		return error_origin(-ENOMEM);
	list_for_each (job, &c->jobs, link) {
		all[n] = (struct used){ job->view, n };
		n++;
	}
	qsort(all, n, sizeof(*all), by_epoch);
	for (size_t i = 0; i < n; i++) {
		if (used->n && used->epochs[used->n - 1] == all[i].view->epoch)
			continue;
		used->epochs[used->n] = all[i].view->epoch;
		used->views[used->n++] = all[i].view;
	}
	return 0;
}

static struct view *view_among(const struct wire_views *views, uint32_t epoch)
{
	for (size_t i = 0; i < views->n; i++)
		if (views->views[i]->epoch == epoch)
			return views->views[i];
	return NULL;
}

/* Opening */

static void opening_free(struct opening *opening)
{
	struct coordinator *c = opening->coordinator;

	loop_timer_cancel(&opening->timer);
	list_remove(&opening->link);
	list_remove(&opening->in_member);
	map_remove(&c->openings_by_name, &opening->entry);
	opening->member->n_openings--;
	c->n_openings--;
	free(opening);
}

static void opening_fail(struct opening *opening, int status, const char *text)
{
	struct rpc_call *call = opening->call;

	opening_free(opening);
	rpc_call_fail(call, status, text);
}

static struct opening *opening_find(const struct coordinator *c, const char *job, uint64_t owner)
{
	struct map_entry *entry = map_find(&c->openings_by_name, hash_of(job, owner));

	for (; entry; entry = map_find_next(entry)) {
		struct opening *opening = container_of(entry, struct opening, entry);

		if (opening->request.owner == owner && !strcmp(opening->request.job, job))
			return opening;
	}
	return NULL;
}

/* A server of the newest view that has not said that it has it; it could not place the job's tensors yet. */
static const struct member *unsettled_server(struct coordinator *c)
{
	struct member *member;

	list_for_each (member, &c->members, link)
		if (member->info.roles & ROLE_SERVER && member->acked < c->view->epoch)
			return member;
	return NULL;
}

/* Whether jobs can be opened that want no more servers than there are. */
static bool is_settled(struct coordinator *c)
{
	return c->view && !c->change.loop && !unsettled_server(c);
}

/* A member is in a job that is open, or that it opens. */
static void answer(struct coordinator *c, struct rpc_call *call, struct member *member,
		   struct job *job, int r)
{
	struct wire_bytes bytes = { 0 };
	struct hold *hold = NULL;

	if (!r) {
		r = hold_add(c, job, member, &hold);
		if (r)
			job_settle(c, job);
	}
	if (!r) {
		r = wire_pack_opened(job->view, &bytes);
		if (r)
			hold_remove(c, hold);
	}
	FAILPOINT("coordinator-job-opened");
	if (r)
		refuse(call, r, "are open");
	else
		coordinator_reply_bytes(call, 0, &bytes);
}

/* A job is open from now on: whoever waits for it has wanted more servers than it has. */
static void answer_others(struct coordinator *c, const char *name, uint64_t owner)
{
	struct opening *opening;
	struct job *job;

	while ((job = job_find(c, name, owner)) && (opening = opening_find(c, name, owner))) {
		struct member *member = opening->member;
		struct rpc_call *call = opening->call;

		opening_free(opening);
		answer(c, call, member, job, 0);
	}
}

/* For a member that is not among those who wait. */
static void open_new(struct coordinator *c, struct rpc_call *call, struct member *member,
		     const struct wire_open *request)
{
	struct job *job = NULL;
	int r = job_new(c, member, request->job, request->owner, c->view, &job);

	answer(c, call, member, job, r);
	answer_others(c, request->job, request->owner);
}

/* Answers, if the job is open or can be. Returns whether it did. */
static bool open_now(struct coordinator *c, struct rpc_call *call, struct member *member,
		     const struct wire_open *request)
{
	struct job *job = job_find(c, request->job, request->owner);

	if (job)
		answer(c, call, member, job, 0);
	else if (is_settled(c) && view_n_servers(c->view) >= request->min_servers)
		open_new(c, call, member, request);
	else
		return false;
	return true;
}

/* Each once, though those behind one may be answered with it. Nobody waits for a job that is open. */
void coordinator_openings_try(struct coordinator *c)
{
	size_t n_servers;

	if (!is_settled(c))
		return;
	n_servers = view_n_servers(c->view);
	for (size_t n = c->n_openings; n && !list_empty(&c->openings); n--) {
		struct opening *opening = list_first(&c->openings, struct opening, link);
		struct wire_open request = opening->request;
		struct member *member = opening->member;
		struct rpc_call *call = opening->call;

		if (n_servers >= request.min_servers) {
			opening_free(opening);
			open_new(c, call, member, &request);
			continue;
		}
		list_remove(&opening->link);
		list_push_back(&c->openings, &opening->link);
	}
}

static void on_opening_over(struct loop_timer *timer)
{
	struct opening *opening = container_of(timer, struct opening, timer);
	struct coordinator *c = opening->coordinator;
	const struct member *unsettled = c->view ? unsettled_server(c) : NULL;
	char servers[256], text[400];

	cluster_describe_servers(c->view, opening->request.min_servers, servers, sizeof(servers));
	if (!c->view)
		(void)snprintf(text, sizeof(text),
			       "job %s: the coordinator has just started and waits for its members",
			       opening->request.job);
	else if (c->view && view_n_servers(c->view) >= opening->request.min_servers && unsettled)
		(void)snprintf(text, sizeof(text), "job %s: server %s has not taken over view %u",
			       opening->request.job, unsettled->info.name, c->view->epoch);
	else
		(void)snprintf(text, sizeof(text), "job %s: %s", opening->request.job, servers);
	opening_fail(opening, -ETIMEDOUT, text);
}

static int opening_new(struct coordinator *c, struct member *member, struct rpc_call *call,
		       const struct wire_open *request, struct opening **ret_opening)
{
	struct opening *opening;
	int r;

	if (!has_share(member->n_openings, c->n_openings, OPENINGS_MAX))
		return error_origin(-ENOBUFS);
	opening = calloc(1, sizeof(*opening));
	r = opening ? map_add(&c->openings_by_name, hash_of(request->job, request->owner),
			      &opening->entry)
		    : -ENOMEM;
	if (r) {
		free(opening);
		return error_origin(r);
	}
	opening->coordinator = c;
	opening->member = member;
	opening->call = call;
	opening->request = *request;
	opening->timer.expired = on_opening_over;
	list_push_back(&c->openings, &opening->link);
	list_push_back(&member->openings, &opening->in_member);
	member->n_openings++;
	c->n_openings++;
	*ret_opening = opening;
	return 0;
}

void coordinator_job_open_called(void *user, struct rpc_call *call, const void *data, size_t len)
{
	struct coordinator *c = user;
	struct failure failure = { 0 };
	struct opening *opening = NULL;
	struct wire_open request;
	struct member *member;
	int r;

	r = wire_unpack_open(data, len, &failure, &request);
	if (r) {
		rpc_call_fail(call, r, failure.text);
		return;
	}
	member = coordinator_member_calling(c, call, request.member);
	if (!member) {
		rpc_call_fail(call, -ENOENT, "the member is not registered");
		return;
	}
	if (open_now(c, call, member, &request))
		return;
	r = opening_new(c, member, call, &request, &opening);
	if (r) {
		refuse(call, r, "wait to be opened");
		return;
	}
	rpc_call_set_user(call, opening);
	if (loop_timer_set(c->loop, &opening->timer,
			   clock_now_ns() +
				   MIN(request.timeout_ms, OPEN_TIMEOUT_MAX) * NSEC_PER_MSEC))
		opening_fail(opening, -ENOMEM, "out of memory");
}

void coordinator_job_open_cancelled(void *user, struct rpc_call *call)
{
	opening_free(rpc_call_user(call));
}

void coordinator_job_close_called(void *user, struct rpc_call *call, const void *data, size_t len)
{
	struct coordinator *c = user;
	struct wire_close message;
	struct failure failure = { 0 };
	struct member *member;
	struct hold *hold;
	struct job *job;
	int r;

	r = wire_unpack_close(data, len, &failure, &message);
	if (r) {
		rpc_call_fail(call, r, failure.text);
		return;
	}
	member = coordinator_member_calling(c, call, message.member);
	job = job_find(c, message.job, message.owner);
	hold = member && job ? hold_find(job, member) : NULL;
	if (hold)
		hold_remove(c, hold);
	FAILPOINT("coordinator-job-closed");
	rpc_call_reply(call, "", 0);
}

/* What members hold */

void coordinator_jobs_take(struct coordinator *c, const struct wire_register *message,
			   struct member *member)
{
	struct hold *hold, *next;

	for (size_t i = 0; i < message->n_jobs; i++) {
		const struct wire_job *held = &message->jobs[i];
		struct view *view = view_among(&message->views, held->epoch);
		struct job *job = job_find(c, held->name, held->owner);
		bool is_new = !job;
		int r;

		hold = job ? hold_find(job, member) : NULL;
		if (hold)
			hold->said = true;
		r = !view    ? -EINVAL
		    : is_new ? job_new(c, member, held->name, held->owner, view, &job)
			     : 0;
		if (!r) {
			r = hold_add(c, job, member, &hold);
			if (r)
				job_settle(c, job);
		}
		if (r) {
			log_warning("coordinator: member %s: job %s is not taken over: %s",
				    member->info.name, held->name, strerror(-r));
			continue;
		}
		hold->said = true;
		if (job->view->epoch != view->epoch)
			log_warning("coordinator: job %s: member %s is in view %u, others in %u",
				    job->name, member->info.name, view->epoch, job->view->epoch);
		if (is_new)
			answer_others(c, held->name, held->owner);
	}
	list_for_each_safe (hold, next, &member->holds, in_member) {
		if (!hold->said)
			hold_remove(c, hold);
		else
			hold->said = false;
	}
}

void coordinator_jobs_forget_member(struct coordinator *c, const struct member *member,
				    const char *why)
{
	struct opening *opening, *next_opening;
	struct hold *hold, *next;

	list_for_each_safe (hold, next, &member->holds, in_member)
		hold_remove(c, hold);
	list_for_each_safe (opening, next_opening, &member->openings, in_member)
		opening_fail(opening, -ENOENT, why);
}

void coordinator_jobs_init(struct coordinator *c)
{
	list_init(&c->jobs);
	list_init(&c->openings);
}

void coordinator_jobs_done(struct coordinator *c)
{
	map_done(&c->jobs_by_name);
	map_done(&c->openings_by_name);
}

void coordinator_openings_close(struct coordinator *c)
{
	while (!list_empty(&c->openings))
		opening_fail(list_first(&c->openings, struct opening, link), -ESHUTDOWN,
			     "the coordinator is stopping");
}
