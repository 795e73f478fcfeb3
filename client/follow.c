/*
 * A rank that follows the others: bps_client_follow() tells the daemon, whose events say which rounds others have begun;
 * bps_client_begun() gives them to the caller in the order in which this rank has to submit them. The daemon may say something
 * twice, and rounds of a tensor in any order: how many this rank has submitted decides.
 */
#include "client.h"
#include <stdarg.h>
#include <stdio.h>

/* Operations that were heard of and are not submitted yet: more than all ranks of a job can have under way. */
#define BEGUN_MAX (1u << 20)

struct follow_begun {
	TAILQ_ENTRY(follow_begun) link;
	struct bps_begun begun;
	uint64_t first; /* rounds before it that were not submitted here have failed */
};

void follow_init(struct client_follow *follow)
{
	TAILQ_INIT(&follow->begun);
}

static void drop(struct client_follow *follow, struct follow_begun *entry)
{
	TAILQ_REMOVE(&follow->begun, entry, link);
	follow->n_begun--;
	free(entry);
}

void follow_end(struct client_follow *follow)
{
	struct follow_begun *entry;

	while ((entry = TAILQ_FIRST(&follow->begun)))
		drop(follow, entry);
	follow->said = (struct follow_said){ 0 };
}

/* How bps_client_begun() fails from now on. */
static _printf_(3, 4) void never(struct client_follow *follow, int status, const char *format, ...)
{
	va_list args;

	follow->said.status = status;
	va_start(args, format);
	(void)vsnprintf(follow->text, sizeof(follow->text), format, args);
	va_end(args);
}

void follow_hear_begun(struct bps_client *client, const struct bps_begun *begun, uint64_t first)
{
	struct client_follow *follow = &client->follow;
	struct follow_begun *entry;

	if (!follow->said.on)
		return;
	/* The others would wait for this rank until their deadline. */
	if (!dtype_size((unsigned)begun->dtype)) {
		never(follow, -EOPNOTSUPP,
		      "the other ranks have begun an operation of tensor %s, whose element type %d "
		      "libbps_client " BPS_VERSION " does not know: update it",
		      begun->name, begun->dtype);
		return;
	}
	entry = follow->n_begun < BEGUN_MAX ? malloc(sizeof(*entry)) : NULL;
	if (!entry) {
		client_fail(client,
			    "the daemon at %s tells of more operations than there is memory for",
			    client->path);
		return;
	}
	entry->begun = *begun;
	entry->first = first;
	TAILQ_INSERT_TAIL(&follow->begun, entry, link);
	follow->n_begun++;
}

void follow_hear_all(struct bps_client *client, uint64_t turn, int status, const char *text)
{
	struct client_follow *follow = &client->follow;

	if (!follow->said.on || turn != follow->n_all + 1)
		return;
	if (status)
		never(follow, status, "%s", text);
	else if (follow->said.idle) {
		follow->said.all = true;
		follow->n_all++;
	}
}

/*
 * The first that is the next round of its tensor here, or tells that this one has failed; what was submitted since goes. Returns whether
 * there is one.
 */
static bool find_next(struct bps_client *client, struct bps_begun *ret)
{
	struct client_follow *follow = &client->follow;
	struct follow_begun *entry = TAILQ_FIRST(&follow->begun), *next;

	for (; entry; entry = next) {
		uint64_t round = tensor_rounds(client, entry->begun.name) + 1;
		bool is_due = entry->begun.round == round;
		bool has_failed = entry->begun.round > round && round < entry->first;

		next = TAILQ_NEXT(entry, link);
		if (is_due || has_failed)
			*ret = entry->begun;
		if (entry->begun.round <= round)
			drop(follow, entry);
		if (has_failed) {
			ret->round = round;
			ret->operation = ret->reduction = 0;
		}
		if (is_due || has_failed)
			return true;
	}
	return false;
}

/* 1: an operation; 0: none will come; -EAGAIN; or how the job or the client has failed, with the text set. */
static int take_next(struct bps_client *client, struct bps_begun *ret)
{
	struct bps_begun begun;
	int r;

	r = client_failed(client);
	r = r ?: job_check(client);
	if (r)
		return r;
	if (client->follow.said.status)
		return error_set(client->follow.said.status, "%s", client->follow.text);
	if (!client->follow.said.on)
		return error_set(-ECANCELED, "this rank does not follow the others");
	if (!find_next(client, &begun))
		return client->follow.said.all ? 0 : -EAGAIN;
	begun.size = MIN(ret->size, sizeof(begun));
	memcpy(ret, &begun, begun.size);
	return 1;
}

_public_ int bps_client_begun(struct bps_client *client, int64_t timeout_ms, struct bps_begun *ret)
{
	int64_t deadline_ns = client_deadline_ns(timeout_ms);
	int r;

	r = client_check(client);
	if (r)
		return r;
	if (!ret || !ret->size)
		return error_set(-EINVAL, "no struct bps_begun, or its size is not set");
	CLIENT_LOCKED(client);
	(void)client_progress(client);
	while ((r = take_next(client, ret)) == -EAGAIN) {
		if (client_now_ns() >= deadline_ns)
			return error_set(-ETIMEDOUT, "the other ranks have begun nothing");
		client_wait(client, deadline_ns);
	}
	return r;
}

/* Where the daemon is lost before its answer, the next daemon is asked: session.c. */
static int tell(struct bps_client *client)
{
	struct client_follow *follow = &client->follow;
	int r;

	if (client->session.state == SESSION_READY && !follow->offered)
		return error_set(-EOPNOTSUPP,
				 "the daemon at %s is of a version that knows no rank that follows "
				 "the others: update it",
				 client->path);
	if (follow->call.pending)
		return error_set(-EBUSY, "another thread is in bps_client_follow()");
	follow->call = (struct client_call){ 0 };
	r = call_follow(client, &follow->call);
	return r ?: call_wait(client, &follow->call, CLIENT_FOREVER);
}

_public_ int bps_client_follow(struct bps_client *client, int follows, int idle)
{
	struct client_follow *follow;
	struct follow_said before;
	int r;

	r = client_check(client);
	if (r)
		return r;
	CLIENT_LOCKED(client);
	(void)client_progress(client);
	follow = &client->follow;
	r = client_failed(client);
	r = r ?: job_check(client);
	if (r)
		return r;
	before = follow->said;
	if (!before.on)
		follow_end(follow);
	/* Before the answer, as events may come ahead of it. */
	follow->said.on = follows;
	follow->said.idle = follows && idle;
	follow->said.all &= follow->said.idle;
	follow->said.status = 0;
	r = tell(client);
	if (r)
		follow->said = before;
	else if (!follows)
		follow_end(follow);
	/* A thread that waits in bps_client_begun() is to see it. */
	client_wake(client);
	return r;
}
