/*
 * The methods of the admin service and the health service, over gRPC, with structs that the test
 * has filled.
 */
#include "fake_daemon.h"
#include "grpc_test.h"
#include "proto/admin.pb-c.h"
#include "proto/health.pb-c.h"
#include "proto/pack.h"

struct question {
	struct rpc_request request;
	const ProtobufCMessageDescriptor *type;
	ProtobufCMessage *reply; /* unary: once done */
	bool is_done;
	int status;
	char text[256];
	int health[16]; /* Watch */
	unsigned n_messages;
};

#define UNTIL(f, condition)                                            \
	do {                                                           \
		while (!(condition))                                   \
			ASSERT_INT(loop_turn((f)->loop, 1000), >=, 0); \
	} while (0)

static void on_done(struct rpc_request *request, int status, const char *text, const void *data,
		    size_t len)
{
	struct question *q = container_of(request, struct question, request);

	q->is_done = true;
	q->status = status;
	(void)snprintf(q->text, sizeof(q->text), "%s", text);
	if (!status && q->type)
		ASSERT_OK(unpack(q->type, data, len, &q->reply));
}

static void on_message(struct rpc_request *request, const void *data, size_t len)
{
	struct question *q = container_of(request, struct question, request);
	_cleanup_(unpack_freep) ProtobufCMessage *message = NULL;

	ASSERT_INT(q->n_messages, <, ARRAY_SIZE(q->health));
	ASSERT_OK(
		unpack(&grpc__health__v1__health_check_response__descriptor, data, len, &message));
	q->health[q->n_messages++] =
		(int)((Grpc__Health__V1__HealthCheckResponse *)message)->status;
}

static void question_start(struct rpc_channel *channel, struct question *q, const char *path,
			   const ProtobufCMessageDescriptor *type, const void *data, size_t len)
{
	*q = (struct question){ .type = type,
				.request = { .path = path,
					     .data = data,
					     .len = len,
					     .stream = !type,
					     .deadline_ms = 20000,
					     .message = on_message,
					     .done = on_done } };
	rpc_request_start(channel, &q->request);
}

static void ask(struct fake_daemon *f, struct rpc_channel *channel, struct question *q,
		const char *path, const ProtobufCMessageDescriptor *type, const void *data,
		size_t len)
{
	question_start(channel, q, path, type, data, len);
	UNTIL(f, q->is_done);
}

static struct rpc_channel *connect_to(struct fake_daemon *f)
{
	struct rpc_channel *channel;

	ASSERT_OK(rpc_channel_new(f->rpc, f->target, 0, NULL, &f->failure, &channel));
	return channel;
}

GRPC_TEST(status)
{
	struct fake_daemon f;
	struct rpc_channel *channel;
	struct question q;
	Bps__Admin__StatusReply *reply;

	fake_start(&f);
	channel = connect_to(&f);
	ask(&f, channel, &q, "/bps.admin.Admin/Status", &bps__admin__status_reply__descriptor, "",
	    0);
	ASSERT_EQ(q.status, 0);
	reply = (Bps__Admin__StatusReply *)q.reply;
	ASSERT_STR(reply->software, "bps-daemon 9.9");
	ASSERT_STR(reply->node, "node-a");
	ASSERT_TRUE(reply->id == 0xfedcba9876543210);
	ASSERT_EQ(reply->epoch, 7);
	ASSERT_EQ(reply->n_failed, 2);
	ASSERT_EQ(reply->bytes_out, 3ull << 40);
	unpack_free(q.reply);
	rpc_channel_free(channel);
	fake_stop(&f);
}

GRPC_TEST(nodes_and_jobs)
{
	struct fake_daemon f;
	struct rpc_channel *channel;
	struct question q;
	Bps__Admin__NodesReply *nodes;
	Bps__Admin__JobsReply *jobs;

	fake_start(&f);
	channel = connect_to(&f);
	ask(&f, channel, &q, "/bps.admin.Admin/Nodes", &bps__admin__nodes_reply__descriptor, "", 0);
	nodes = (Bps__Admin__NodesReply *)q.reply;
	ASSERT_EQ(nodes->epoch, 7);
	ASSERT_EQ(nodes->n_nodes, 2);
	ASSERT_STR(nodes->nodes[0]->address, "10.0.0.1:9690");
	ASSERT_TRUE(!nodes->nodes[0]->has_bandwidth_mbps);
	ASSERT_EQ(nodes->nodes[1]->bandwidth_mbps, 25000);
	unpack_free(q.reply);
	ask(&f, channel, &q, "/bps.admin.Admin/Jobs", &bps__admin__jobs_reply__descriptor, "", 0);
	jobs = (Bps__Admin__JobsReply *)q.reply;
	ASSERT_EQ(jobs->n_jobs, 1);
	ASSERT_STR(jobs->jobs[0]->job, "resnet");
	ASSERT_STR(jobs->jobs[0]->waiting_for, fake_the_job.waiting_for);
	unpack_free(q.reply);
	rpc_channel_free(channel);
	fake_stop(&f);
}

static void ask_job(struct fake_daemon *f, struct rpc_channel *channel, struct question *q,
		    const char *name)
{
	Bps__Admin__JobRequest request = BPS__ADMIN__JOB_REQUEST__INIT;
	_cleanup_(freep) void *data = NULL;
	size_t len;

	request.job = (char *)name;
	ASSERT_OK(pack(&request.base, RPC_MESSAGE_MAX, &data, &len));
	ask(f, channel, q, "/bps.admin.Admin/Job", &bps__admin__job_reply__descriptor, data, len);
}

GRPC_TEST(job)
{
	struct fake_daemon f;
	struct rpc_channel *channel;
	struct question q;
	Bps__Admin__JobReply *job;

	fake_start(&f);
	channel = connect_to(&f);
	ask_job(&f, channel, &q, "resnet");
	job = (Bps__Admin__JobReply *)q.reply;
	ASSERT_EQ(job->summary->number, 99);
	ASSERT_EQ(job->n_ranks, 2);
	ASSERT_EQ(job->ranks[0]->pid, 1234);
	ASSERT_EQ(job->ranks[0]->requests, 17);
	ASSERT_EQ(job->ranks[0]->pending, 1);
	ASSERT_EQ(job->ranks[0]->regions, 5);
	ASSERT_TRUE(!job->ranks[1]->has_pid);
	ASSERT_EQ(job->n_tensors, 2);
	ASSERT_EQ(job->total_tensors, 2);
	ASSERT_STR(job->tensors[0]->dtype, "float32");
	unpack_free(q.reply);

	ask_job(&f, channel, &q, "none");
	ASSERT_EQ(q.status, -ENOENT);
	ASSERT_CONTAINS(q.text, "no such job");
	ask(&f, channel, &q, "/bps.admin.Admin/Job", &bps__admin__job_reply__descriptor, "\xff\xff",
	    2);
	ASSERT_EQ(q.status, -EPROTO);

	/* More than a message holds: some, and how many there are. */
	f.n_tensors = 60000;
	ask_job(&f, channel, &q, "resnet");
	ASSERT_EQ(q.status, 0);
	job = (Bps__Admin__JobReply *)q.reply;
	ASSERT_INT(job->n_tensors, >, 1000);
	ASSERT_INT(job->n_tensors, <, 60000);
	ASSERT_EQ(job->total_tensors, 60000);
	unpack_free(q.reply);
	rpc_channel_free(channel);
	fake_stop(&f);
}

GRPC_TEST(metrics)
{
	struct fake_daemon f;
	struct rpc_channel *channel;
	struct question q;

	fake_start(&f);
	channel = connect_to(&f);
	ask(&f, channel, &q, "/bps.admin.Admin/Metrics", &bps__admin__metrics_reply__descriptor, "",
	    0);
	ASSERT_CONTAINS(((Bps__Admin__MetricsReply *)q.reply)->text, "bps_things_total 42\n");
	unpack_free(q.reply);
	rpc_channel_free(channel);
	fake_stop(&f);
}

/* A HealthCheckRequest: field 1, a string. */
static const char ask_admin[] = "\x0a\x0f"
				"bps.admin.Admin";
static const char ask_unknown[] = "\x0a\x04"
				  "what";

GRPC_TEST(health_check)
{
	struct fake_daemon f;
	struct rpc_channel *channel;
	struct question q;
	const ProtobufCMessageDescriptor *type =
		&grpc__health__v1__health_check_response__descriptor;

	fake_start(&f);
	channel = connect_to(&f);
	ask(&f, channel, &q, "/grpc.health.v1.Health/Check", type, "", 0);
	ASSERT_EQ(((Grpc__Health__V1__HealthCheckResponse *)q.reply)->status, 1);
	unpack_free(q.reply);
	f.sick = true;
	ask(&f, channel, &q, "/grpc.health.v1.Health/Check", type, ask_admin,
	    sizeof(ask_admin) - 1);
	ASSERT_EQ(((Grpc__Health__V1__HealthCheckResponse *)q.reply)->status, 2);
	unpack_free(q.reply);
	ask(&f, channel, &q, "/grpc.health.v1.Health/Check", type, ask_unknown,
	    sizeof(ask_unknown) - 1);
	ASSERT_EQ(q.status, -ENOENT);
	ask(&f, channel, &q, "/grpc.health.v1.Health/Check", type, "\xff", 1);
	ASSERT_EQ(q.status, -EPROTO);
	rpc_channel_free(channel);
	fake_stop(&f);
}

GRPC_TEST(health_watch)
{
	struct fake_daemon f;
	struct rpc_channel *channel;
	struct question q, second, other;

	fake_start(&f);
	channel = connect_to(&f);
	question_start(channel, &q, "/grpc.health.v1.Health/Watch", NULL, "", 0);
	q.request.deadline_ms = 0;
	UNTIL(&f, q.n_messages == 1);
	question_start(channel, &second, "/grpc.health.v1.Health/Watch", NULL, ask_admin,
		       sizeof(ask_admin) - 1);
	UNTIL(&f, second.n_messages == 1);
	f.sick = true;
	UNTIL(&f, q.n_messages == 2 && second.n_messages == 2);
	f.sick = false;
	UNTIL(&f, q.n_messages == 3 && second.n_messages == 3);
	ASSERT_EQ(q.health[0], 1);
	ASSERT_EQ(q.health[1], 2);
	ASSERT_EQ(q.health[2], 1);
	ASSERT_EQ(second.health[1], 2);
	question_start(channel, &other, "/grpc.health.v1.Health/Watch", NULL, ask_unknown,
		       sizeof(ask_unknown) - 1);
	UNTIL(&f, other.n_messages == 1);
	ASSERT_EQ(other.health[0], 3);
	rpc_request_cancel(&q.request);
	UNTIL(&f, q.is_done);
	/* The other one is still watching when the daemon ends. */
	ASSERT_TRUE(!other.is_done);
	rpc_close(f.rpc);
	rpc_channel_free(channel);
	ASSERT_TRUE(second.is_done && other.is_done);
	fake_stop(&f);
}
