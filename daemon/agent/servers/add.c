/*
 * A job is given servers that came to the cluster after it had begun, or came back at another address: bps-recovery(7), CHANGE
 * OF SERVERS. They are no members of its view; everybody who knows of them knows their names and addresses, beside which
 * servers have gone and come (move.c). One node, the first, looks at the cluster's newest view, and asks each server that the
 * job does not have. Once it has said that it takes part the job goes over, as when one is back.
 */
#include "agent/round/part.h"
#include "base/failpoint.h"
#include "base/log.h"

#define LOOK_NS \
	NSEC_PER_SEC /* when one that did not take part is asked again; then later and later */
#define LOOK_MAX_NS (60 * NSEC_PER_SEC)
/*
 * No more are added, or asked at a time: the next look goes on behind them, as all of them may decline. Others may have asked some
 * at the same time: for these, too, there is room in a set.
 */
#define ADDED_MAX (DATA_ADDED_MAX / 2)

bool agent_add_is(const struct agent_server *server, const struct view_member *member)
{
	return !strcmp(server->member.name, member->name) &&
	       !strcmp(server->member.address, member->address);
}

static bool is_self(const struct agent_job *job, const struct data_added *added)
{
	const struct view *view = cluster_view(job->agent->params.cluster);

	for (size_t i = 0; view && i < view->n_members; i++) {
		const struct view_member *member = &view->members[i];

		if (member->is_self && !strcmp(member->name, added->name) &&
		    !strcmp(member->address, added->address))
			return true;
	}
	return false;
}

int agent_add_places(struct agent_job *job)
{
	for (uint32_t i = (uint32_t)(job->fleet.n_servers - job->fleet.n_viewed);
	     i < job->placement.added.n; i++) {
		const struct data_added *added = &job->placement.added.servers[i];
		struct view_member member = {
			.roles = ROLE_SERVER,
			.bandwidth_mbps = added->bandwidth_mbps,
			.is_self = is_self(job, added),
		};
		struct data_added_set known;
		int r;

		memcpy(member.name, added->name, sizeof(member.name));
		memcpy(member.address, added->address, sizeof(member.address));
		r = agent_setup_add_place(job, &member);
		if (r)
			return error_trace(r);
		/* Should all others be gone when the next process looks, it has to find this one. */
		if (ledger_added_read(job->resumption.ledger, &known) ||
		    data_added_find(&known, added->name, added->address) == known.n)
			ledger_added_keep(job->resumption.ledger, added);
	}
	return 0;
}

/* Most servers of a job are in the order in which they are members: *next is where the one after the last that was found is. */
static bool has(const struct agent_job *job, const struct view_member *member, size_t *next)
{
	size_t n = job->fleet.n_servers;

	for (size_t i = 0; i < n; i++) {
		size_t number = (*next + i) % n;

		if (!agent_add_is(&job->fleet.servers[number], member))
			continue;
		*next = number + 1;
		return true;
	}
	return false;
}

static int ask(struct agent_job *job, const struct view_member *member)
{
	_cleanup_(freep) struct agent_said *said = agent_move_said(job);
	struct data_added *added;

	if (!said)
		return error_origin(-ENOMEM);
	added = &said->added.servers[said->added.n++];
	*added = (struct data_added){ .bandwidth_mbps = member->bandwidth_mbps };
	strncpy(added->name, member->name, sizeof(added->name) - 1);
	strncpy(added->address, member->address, sizeof(added->address) - 1);
	return error_trace(agent_setup_ask_in(job, member, said));
}

static void on_look(struct loop_timer *timer)
{
	agent_add_look(container_of(timer, struct agent_job, placement.add_timer));
}

static void look_in(struct agent_job *job, uint64_t ns)
{
	job->placement.add_timer.expired = on_look;
	/* Without memory it is looked with the next view. */
	(void)loop_timer_set(job->agent->params.loop, &job->placement.add_timer,
			     clock_now_ns() + ns);
}

void agent_add_look_soon(struct agent_job *job)
{
	job->placement.add_ns = 0;
	look_in(job, LOOK_NS);
}

void agent_add_look(struct agent_job *job)
{
	const struct view *view;
	uint32_t n_asked = 0;
	size_t first, next = 0;

	if (!job->retention.keeps || job->state != JOB_RUNNING || !agent_elastic_is_first(job))
		return;
	view = cluster_view(job->agent->params.cluster);
	if (!view)
		return;
	agent_job_hold(job);
	first = job->placement.add_from;
	for (size_t i = 0; i < view->n_members && job->state == JOB_RUNNING; i++) {
		size_t number = (first + i) % view->n_members;
		const struct view_member *member = &view->members[number];

		if (!(member->roles & ROLE_SERVER) || !*member->address || has(job, member, &next))
			continue;
		if (job->placement.added.n >= ADDED_MAX) {
			log_warning("job %s: may be given %u servers after it began; %s is one too "
				    "many",
				    job->owner.name, ADDED_MAX, member->name);
			break;
		}
		if (job->placement.added.n + n_asked >= ADDED_MAX)
			break;
		n_asked++;
		job->placement.add_from = number + 1;
		(void)ask(job, member);
	}
	job->placement.add_ns =
		MIN(MAX(2 * job->placement.add_ns, (uint64_t)LOOK_NS), (uint64_t)LOOK_MAX_NS);
	if (n_asked && job->state == JOB_RUNNING)
		look_in(job, job->placement.add_ns);
	agent_job_release(job);
}

void agent_add_take(struct agent_job *job, const struct data_added *added)
{
	_cleanup_(freep) struct agent_said *said = agent_move_said(job);

	/* Those of an earlier look may still be asked. */
	if (!said || said->added.n >= ADDED_MAX ||
	    data_added_find(&said->added, added->name, added->address) < said->added.n)
		return;
	said->added.servers[said->added.n++] = *added;
	FAILPOINT("server-added");
	agent_move_take(job, said, "one has come");
}
