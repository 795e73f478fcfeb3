/* Which view a job runs in: fixed by the first member that asks, until the last that asked has closed it or is gone. */
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "cluster/coordinator_state.h"
#include "cluster/source.h"

#include <stdio.h>

#define JOBS_MAX	 65536u
#define OPENINGS_MAX	 4096u /* OpenJob calls that wait */
#define OPEN_TIMEOUT_MAX (24ull * 3600 * 1000)

struct job {
	struct list link;
	char name[64];
	uint64_t owner; /* jobs of one name and different owners are different jobs */
	struct view *view;
	struct list holds;
};

struct hold {
	struct list link; /* of job->holds */
	struct member *member;
};

/* An OpenJob that cannot be answered yet. */
struct opening {
	struct list link;
	struct coordinator *coordinator;
	struct rpc_call *call;
	struct wire_open request;
	struct loop_timer timer;
};

static bool job_is(const struct job *job, const char *name, uint64_t owner)
{
	return job->owner == owner && !strcmp(job->name, name);
}

static struct job *job_find(struct coordinator *c, const char *name, uint64_t owner)
{
	struct job *job;

	list_for_each (job, &c->jobs, link)
		if (job_is(job, name, owner))
			return job;
	return NULL;
}

static int job_new(struct coordinator *c, const char *name, uint64_t owner, struct view *view,
		   struct job **ret_job)
{
	struct job *job;

	if (c->n_jobs == JOBS_MAX)
		return error_origin(-ENOBUFS);
	job = calloc(1, sizeof(*job));
	if (!job)
		return error_origin(-ENOMEM);
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
	c->n_jobs--;
	view_unref(job->view);
	free(job);
}

static struct hold *hold_find(const struct job *job, const struct member *member)
{
	struct hold *hold;

	list_for_each (hold, &job->holds, link)
		if (hold->member == member)
			return hold;
	return NULL;
}

static int hold_add(struct job *job, struct member *member)
{
	struct hold *hold;

	if (hold_find(job, member))
		return 0;
	hold = malloc(sizeof(*hold));
	if (!hold)
		return error_origin(-ENOMEM);
	hold->member = member;
	list_push_back(&job->holds, &hold->link);
	return 0;
}

static void hold_remove(struct coordinator *c, struct job *job, const struct member *member)
{
	struct hold *hold = hold_find(job, member);

	if (!hold)
		return;
	list_remove(&hold->link);
	free(hold);
	job_settle(c, job);
}

void coordinator_used_done(struct coordinator_used *used)
{
	free(used->epochs);
	free(used->views);
}

int coordinator_used_collect(const struct coordinator *c, struct coordinator_used *used)
{
	struct job *job;
	size_t i;

	used->epochs = calloc(c->n_jobs + 1, sizeof(*used->epochs));
	used->views = calloc(c->n_jobs + 1, sizeof(struct view *));
	if (!used->epochs || !used->views)
		return error_origin(-ENOMEM);
	list_for_each (job, &c->jobs, link) {
		for (i = 0; i < used->n && used->epochs[i] != job->view->epoch; i++)
			;
		if (i < used->n)
			continue;
		used->epochs[used->n] = job->view->epoch;
		used->views[used->n++] = job->view;
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

void coordinator_jobs_take(struct coordinator *c, const struct wire_register *message,
			   struct member *member)
{
	struct job *job, *next;
	size_t i;
	int r;

	for (i = 0; i < message->n_jobs; i++) {
		const struct wire_job *held = &message->jobs[i];
		struct view *view = view_among(&message->views, held->epoch);

		job = job_find(c, held->name, held->owner);
		r = !view ? -EINVAL : job ? 0 : job_new(c, held->name, held->owner, view, &job);
		if (!r)
			r = hold_add(job, member);
		if (r)
			log_warning("coordinator: member %s: job %s is not taken over: %s",
				    member->info.name, held->name, strerror(-r));
		else if (job->view->epoch != view->epoch)
			log_warning("coordinator: job %s: member %s is in view %u, others in %u",
				    job->name, member->info.name, view->epoch, job->view->epoch);
	}
	list_for_each_safe (job, next, &c->jobs, link) {
		for (i = 0; i < message->n_jobs; i++)
			if (job_is(job, message->jobs[i].name, message->jobs[i].owner))
				break;
		if (i == message->n_jobs)
			hold_remove(c, job, member);
	}
}

/* Opening */

static void opening_free(struct opening *opening)
{
	loop_timer_cancel(&opening->timer);
	list_remove(&opening->link);
	opening->coordinator->n_openings--;
	free(opening);
}

static void opening_fail(struct opening *opening, int status, const char *text)
{
	struct rpc_call *call = opening->call;

	opening_free(opening);
	rpc_call_fail(call, status, text);
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

static bool may_open(struct coordinator *c, const struct wire_open *request)
{
	return c->view && !c->change.loop && view_n_servers(c->view) >= request->min_servers &&
	       !unsettled_server(c);
}

/* Answers, if the job is open or can be. Returns whether it did. */
static bool open_now(struct coordinator *c, struct rpc_call *call, const struct wire_open *request)
{
	struct member *member = coordinator_member_find(c, request->member);
	struct job *job = job_find(c, request->job, request->owner);
	struct wire_bytes bytes = { 0 };
	int r = 0;

	if (!member) {
		rpc_call_fail(call, -ENOENT, "the member is not registered");
		return true;
	}
	if (!job && !may_open(c, request))
		return false;
	if (!job)
		r = job_new(c, request->job, request->owner, c->view, &job);
	if (!r) {
		r = hold_add(job, member);
		if (r)
			job_settle(c, job);
	}
	if (!r) {
		r = wire_pack_opened(job->view, &bytes);
		if (r)
			hold_remove(c, job, member);
	}
	FAILPOINT("coordinator-job-opened");
	coordinator_reply_bytes(call, r, &bytes);
	return true;
}

void coordinator_openings_try(struct coordinator *c)
{
	struct opening *opening, *next;

	list_for_each_safe (opening, next, &c->openings, link)
		if (open_now(c, opening->call, &opening->request))
			opening_free(opening);
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

void coordinator_job_open_called(void *user, struct rpc_call *call, const void *data, size_t len)
{
	struct coordinator *c = user;
	struct failure failure = { 0 };
	struct opening *opening;
	struct wire_open request;
	int r;

	r = wire_unpack_open(data, len, &failure, &request);
	if (r) {
		rpc_call_fail(call, r, failure.text);
		return;
	}
	if (!coordinator_member_calling(c, call, request.member)) {
		rpc_call_fail(call, -ENOENT, "the member is not registered");
		return;
	}
	if (open_now(c, call, &request))
		return;
	opening = c->n_openings < OPENINGS_MAX ? calloc(1, sizeof(*opening)) : NULL;
	if (!opening) {
		rpc_call_fail(call, -ENOBUFS, "too many jobs wait to be opened");
		return;
	}
	opening->coordinator = c;
	opening->call = call;
	opening->request = request;
	opening->timer.expired = on_opening_over;
	list_push_back(&c->openings, &opening->link);
	c->n_openings++;
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
	struct job *job;
	int r;

	r = wire_unpack_close(data, len, &failure, &message);
	if (r) {
		rpc_call_fail(call, r, failure.text);
		return;
	}
	member = coordinator_member_calling(c, call, message.member);
	job = job_find(c, message.job, message.owner);
	if (member && job)
		hold_remove(c, job, member);
	FAILPOINT("coordinator-job-closed");
	rpc_call_reply(call, "", 0);
}

void coordinator_jobs_forget_member(struct coordinator *c, const struct member *member,
				    const char *why)
{
	struct opening *opening, *next_opening;
	struct job *job, *next_job;

	list_for_each_safe (job, next_job, &c->jobs, link)
		hold_remove(c, job, member);
	list_for_each_safe (opening, next_opening, &c->openings, link)
		if (opening->request.member == member->info.id)
			opening_fail(opening, -ENOENT, why);
}

void coordinator_openings_close(struct coordinator *c)
{
	while (!list_empty(&c->openings))
		opening_fail(list_first(&c->openings, struct opening, link), -ESHUTDOWN,
			     "the coordinator is stopping");
}
