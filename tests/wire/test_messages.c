/*
 * Protobuf messages as bytes: fields are never renumbered and never change their type. Each test packs a message with
 * every field set and unpacks the same bytes.
 */
#include "cluster.pb-c.h"
#include "control.pb-c.h"
#include "proto/pack.h"
#include "proto/types.h"
#include "test.h"

static void expect_bytes(const ProtobufCMessage *message, const char *bytes, size_t bytes_len)
{
	_cleanup_(unpack_freep) ProtobufCMessage *got = NULL;
	_cleanup_(freep) void *data = NULL;
	_cleanup_(freep) void *again = NULL;
	size_t len;

	ASSERT_OK(pack(message, 4096, &data, &len));
	if (len != bytes_len || memcmp(data, bytes, len)) {
		for (size_t i = 0; i < len; i++)
			fprintf(stderr, "\\x%02x", ((const uint8_t *)data)[i]);
		test_fail(__FILE__, __LINE__, "\n%s: other bytes", message->descriptor->name);
	}
	ASSERT_OK(unpack(message->descriptor, bytes, bytes_len, &got));
	ASSERT_OK(pack(got, 4096, &again, &len));
	ASSERT_EQ(len, bytes_len);
	ASSERT_MEM(again, bytes, len);
}

#define EXPECT_BYTES(message, bytes) expect_bytes(&(message).base, bytes, sizeof(bytes) - 1)

static void expect_request(int body_case, void *body, const char *bytes, size_t len)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;

	request.id = 300;
	request.body_case = (Bps__Control__Request__BodyCase)body_case;
	request.hello = body; /* the bodies are one union of pointers */
	expect_bytes(&request.base, bytes, len);
}

#define EXPECT_REQUEST(name, body, bytes) \
	expect_request(BPS__CONTROL__REQUEST__BODY_##name, body, bytes, sizeof(bytes) - 1)

TEST(requests_that_open_a_session)
{
	Bps__Control__Hello hello = BPS__CONTROL__HELLO__INIT;
	Bps__Control__Join join = BPS__CONTROL__JOIN__INIT;
	Bps__Control__Leave leave = BPS__CONTROL__LEAVE__INIT;

	hello.version = 2;
	hello.version_min = 1;
	hello.features = 5;
	hello.software = (char *)"x";
	EXPECT_REQUEST(HELLO, &hello, "\x08\xac\x02\x12\x09\x08\x02\x10\x01\x18\x05\x22\x01x");

	join.job = (char *)"j";
	join.has_secret = true;
	join.secret = (ProtobufCBinaryData){ .len = 2, .data = (uint8_t *)"s\0" };
	join.rank = 3;
	join.size = 4;
	join.local_rank = 1;
	join.local_size = 2;
	join.node = 5;
	join.n_nodes = 6;
	join.has_timeout_ms = join.has_request_timeout_ms = join.has_force_distributed = true;
	join.has_min_servers = join.has_part_bytes = join.has_gpu_reduce = true;
	join.timeout_ms = 1;
	join.request_timeout_ms = 2;
	join.force_distributed = true;
	join.min_servers = 7;
	join.part_bytes = 4096;
	join.gpu_reduce = GPU_REDUCE_HOST;
	EXPECT_REQUEST(JOIN, &join,
		       "\x08\xac\x02\x1a\x20\x0a\x01j\x12\x02s\x00\x18\x03\x20\x04\x28\x01\x30\x02"
		       "\x38\x05\x40\x06\x48"
		       "\x01\x50\x02\x58\x01\x60\x07\x68\x80\x20\x70\x03");
	join.has_gpu_roots = true;
	join.gpu_roots = 5;
	EXPECT_REQUEST(JOIN, &join,
		       "\x08\xac\x02\x1a\x23\x0a\x01j\x12\x02s\x00\x18\x03\x20\x04\x28\x01\x30\x02"
		       "\x38\x05\x40\x06\x48"
		       "\x01\x50\x02\x58\x01\x60\x07\x68\x80\x20\x70\x03\xc8\x01\x05");
	EXPECT_REQUEST(LEAVE, &leave, "\x08\xac\x02\x42\x00");
	leave.error = (char *)"e";
	EXPECT_REQUEST(LEAVE, &leave,
		       "\x08\xac\x02\x42\x03\x0a\x01"
		       "e");
}

TEST(request_to_resume)
{
	Bps__Control__Join join = BPS__CONTROL__JOIN__INIT;
	Bps__Control__Resume resume = BPS__CONTROL__RESUME__INIT;

	join.job = (char *)"j";
	join.rank = 3;
	join.size = 4;
	join.local_rank = 1;
	join.local_size = 2;
	join.node = 5;
	join.n_nodes = 6;
	resume.join = &join;
	resume.job = 300;
	EXPECT_REQUEST(RESUME, &resume,
		       "\x08\xac\x02\x4a\x14\x0a\x0f\x0a\x01j\x18\x03\x20\x04\x28\x01\x30\x02"
		       "\x38\x05\x40\x06\x10\xac\x02");
}

TEST(requests_about_memory_and_tensors)
{
	Bps__Control__Share share = BPS__CONTROL__SHARE__INIT;
	Bps__Control__Unshare unshare = BPS__CONTROL__UNSHARE__INIT;
	Bps__Control__Declare declare = BPS__CONTROL__DECLARE__INIT;
	Bps__Control__Cancel cancel = BPS__CONTROL__CANCEL__INIT;

	share.buffer = 1;
	share.len = 4096;
	EXPECT_REQUEST(SHARE, &share, "\x08\xac\x02\x22\x05\x08\x01\x10\x80\x20");
	share.has_kind = share.has_device = share.has_handle = true;
	share.kind = MEMORY_CUDA_IPC;
	share.device = (ProtobufCBinaryData){ 2, (uint8_t *)"\x07\x08" };
	share.handle = (ProtobufCBinaryData){ 1, (uint8_t *)"\x09" };
	EXPECT_REQUEST(
		SHARE, &share,
		"\x08\xac\x02\x22\x0e\x08\x01\x10\x80\x20\x18\x01\x22\x02\x07\x08\x2a\x01\x09");
	unshare.buffer = 1;
	EXPECT_REQUEST(UNSHARE, &unshare, "\x08\xac\x02\x2a\x02\x08\x01");
	declare.tensor = 9;
	declare.name = (char *)"w";
	declare.dtype = 2;
	declare.elements = UINT64_MAX;
	EXPECT_REQUEST(DECLARE, &declare,
		       "\x08\xac\x02\x32\x12\x08\x09\x12\x01w\x18\x02\x20\xff\xff\xff\xff\xff\xff"
		       "\xff\xff\xff\x01");
	declare.elements = 1;
	declare.has_rounds = declare.has_failed = true;
	declare.rounds = 300;
	declare.failed = 5;
	EXPECT_REQUEST(DECLARE, &declare,
		       "\x08\xac\x02\x32\x15\x08\x09\x12\x01w\x18\x02\x20\x01\x28\xac\x02"
		       "\x31\x05\0\0\0\0\0\0\0");
	cancel.slot = 8;
	cancel.ticket = 7;
	EXPECT_REQUEST(CANCEL, &cancel, "\x08\xac\x02\x3a\x04\x08\x08\x10\x07");
}

TEST(answers_and_events)
{
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;
	Bps__Control__Welcome welcome = BPS__CONTROL__WELCOME__INIT;
	Bps__Control__Joined joined = BPS__CONTROL__JOINED__INIT;
	Bps__Control__Declared declared = BPS__CONTROL__DECLARED__INIT;
	Bps__Control__JobFailed failed = BPS__CONTROL__JOB_FAILED__INIT;

	welcome.version = 1;
	welcome.software = (char *)"d";
	welcome.node = (char *)"n";
	welcome.daemon = 2;
	welcome.shm_len = 3;
	message.id = 1;
	message.body_case = BPS__CONTROL__MESSAGE__BODY_WELCOME;
	message.welcome = &welcome;
	EXPECT_BYTES(message, "\x08\x01\x22\x0e\x08\x01\x10\x00\x1a\x01"
			      "d\x22\x01n\x28\x02\x30\x03");
	welcome.has_resume_timeout_ms = true;
	welcome.resume_timeout_ms = 4;
	EXPECT_BYTES(message, "\x08\x01\x22\x10\x08\x01\x10\x00\x1a\x01"
			      "d\x22\x01n\x28\x02\x30\x03\x38\x04");
	joined.job = 5;
	joined.n_servers = 6;
	message.body_case = BPS__CONTROL__MESSAGE__BODY_JOINED;
	message.joined = &joined;
	EXPECT_BYTES(message, "\x08\x01\x2a\x04\x08\x05\x10\x06");
	declared.key = 7;
	declared.part_bytes = 8;
	message.body_case = BPS__CONTROL__MESSAGE__BODY_DECLARED;
	message.declared = &declared;
	EXPECT_BYTES(message, "\x08\x01\x3a\x04\x08\x07\x10\x08");
	failed.job = 9;
	message.id = 0;
	message.has_status = true;
	message.status = -110;
	message.text = (char *)"t";
	message.body_case = BPS__CONTROL__MESSAGE__BODY_JOB_FAILED;
	message.job_failed = &failed;
	EXPECT_BYTES(message, "\x08\x00\x10\xdb\x01\x1a\x01t\x32\x02\x08\x09");
}

TEST(a_job_is_set_up)
{
	static uint32_t numbers[] = { 0, 1, 300 };
	Bps__Cluster__JobJoin join = BPS__CLUSTER__JOB_JOIN__INIT;
	Bps__Cluster__JobJoined joined = BPS__CLUSTER__JOB_JOINED__INIT;
	Bps__Cluster__JobAttach attach = BPS__CLUSTER__JOB_ATTACH__INIT;

	join.job = (char *)"j";
	join.secret_digest = (ProtobufCBinaryData){ .len = 1, .data = (uint8_t *)"d" };
	join.size = 3;
	join.n_nodes = 4;
	join.node = 5;
	join.local_size = 6;
	join.n_ranks = 3;
	join.ranks = numbers;
	join.instance = 0x0102030405060708;
	join.epoch = 9;
	join.view_digest = 0x1112131415161718;
	join.timeout_ms = 10;
	join.request_timeout_ms = 11;
	join.has_part_bytes = true;
	join.part_bytes = 4096;
	join.member = 0x2122232425262728;
	join.has_user = true;
	join.user = 7;
	EXPECT_BYTES(join, "\x0a\x01j\x12\x01"
			   "d\x18\x03\x20\x04\x28\x05\x30\x06\x3a\x04\x00\x01\xac\x02\x41\x08\x07"
			   "\x06\x05\x04\x03\x02"
			   "\x01\x48\x09\x51\x18\x17\x16\x15\x14\x13\x12\x11\x58\x0a\x60\x0b\x68"
			   "\x80\x20\x71\x28\x27\x26"
			   "\x25\x24\x23\x22\x21\xc8\x01\x07");

	joined.job = 1;
	joined.n_node_of_rank = joined.n_stripes = 3;
	joined.node_of_rank = joined.stripes = numbers;
	joined.part_bytes = 4096;
	joined.request_timeout_ms = 2;
	EXPECT_BYTES(
		joined,
		"\x08\x01\x12\x04\x00\x01\xac\x02\x18\x80\x20\x22\x04\x00\x01\xac\x02\x28\x02");

	attach.name = (char *)"j";
	attach.size = 3;
	attach.n_nodes = 4;
	attach.node = 5;
	attach.n_node_of_rank = 3;
	attach.node_of_rank = numbers;
	attach.request_timeout_ms = 6;
	attach.instance = 0x0102030405060708;
	attach.has_secret_digest = attach.has_user = true;
	attach.secret_digest = join.secret_digest;
	attach.user = 7;
	EXPECT_BYTES(attach, "\x0a\x01j\x10\x03\x18\x04\x20\x05\x2a\x04\x00\x01\xac\x02\x30\x06\x39"
			     "\x08\x07\x06\x05\x04"
			     "\x03\x02\x01\xa2\x01\x01"
			     "d\xa8\x01\x07");
}

TEST(tensors_get_their_keys)
{
	Bps__Cluster__TensorDeclare declare = BPS__CLUSTER__TENSOR_DECLARE__INIT;
	Bps__Cluster__TensorDeclared declared = BPS__CLUSTER__TENSOR_DECLARED__INIT;

	declare.name = (char *)"w";
	declare.dtype = 2;
	declare.elements = 300;
	declare.rank = 4;
	EXPECT_BYTES(declare, "\x0a\x01w\x10\x02\x18\xac\x02\x20\x04");
	declared.key = 5;
	declared.start = 4096;
	EXPECT_BYTES(declared, "\x08\x05\x10\x80\x20");
}

TEST(views_travel)
{
	Bps__Cluster__Member member = BPS__CLUSTER__MEMBER__INIT, *members[] = { &member };
	Bps__Cluster__View view = BPS__CLUSTER__VIEW__INIT;
	Bps__Cluster__RegisterEvent event = BPS__CLUSTER__REGISTER_EVENT__INIT;

	member.id = 0x0102030405060708;
	member.name = (char *)"n";
	member.roles = 3;
	member.address = (char *)"a";
	member.has_bandwidth_mbps = true;
	member.bandwidth_mbps = 300;
	view.epoch = 4;
	view.n_members = 1;
	view.members = members;
	EXPECT_BYTES(view,
		     "\x08\x04\x12\x14\x09\x08\x07\x06\x05\x04\x03\x02\x01\x12\x01n\x18\x03\x22\x01"
		     "a\x28\xac\x02");
	event.has_version = event.has_features = event.has_data_key = event.has_lease_ms = true;
	event.version = 1;
	event.features = 2;
	event.data_key = (ProtobufCBinaryData){ .len = 1, .data = (uint8_t *)"k" };
	event.lease_ms = 3;
	view.n_members = 0;
	event.view = &view;
	EXPECT_BYTES(event, "\x08\x01\x10\x02\x1a\x01k\x20\x03\x2a\x02\x08\x04");
}
