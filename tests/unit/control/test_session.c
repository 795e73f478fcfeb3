/* Sessions, with trainers by hand: connecting, packets, jobs, memory, and what ends a session. */
#include "../base/chores.h"
#include "control/session.h"
#include "door.h"
#include "proto/pack.h"
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

/* -- Connecting --------------------------------------------------------------------------------------------------- */

TEST(socket_is_for_owner_and_group)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct stat st;

	ASSERT_OK(stat(door->path, &st));
	ASSERT_TRUE(S_ISSOCK(st.st_mode));
	ASSERT_EQ(st.st_mode & 07777, 0660);
	control_stop_accepting(door->control);
	ASSERT_TRUE(stat(door->path, &st) && errno == ENOENT);
}

TEST(second_daemon_on_a_socket_is_refused_and_a_stale_one_replaced)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct control_params params = {
		.loop = door->loop,
		.agent = door->agent,
		.socket_path = door->path,
		.listen_fd = -1,
		.node = "node1",
	};
	struct control *second = NULL;
	char stale[120];
	int fd;

	ASSERT_EQ(control_new(&params, &second), -EADDRINUSE);
	ASSERT_OK(access(door->path, F_OK));

	/* What a killed daemon leaves behind: a name that nobody listens on. */
	(void)snprintf(stale, sizeof(stale), "%s.stale", door->path);
	ASSERT_OK(rename(door->path, stale));
	params.socket_path = stale;
	control_stop_accepting(door->control);
	ASSERT_OK(control_new(&params, &second));
	control_free(second);

	fd = open(stale, O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	ASSERT_TRUE(fd >= 0);
	(void)fd_close(fd);
	ASSERT_EQ(control_new(&params, &second), -EEXIST);
}

TEST(welcome_brings_sealed_memory)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer trainer;
	const struct shm_header *header;
	int seals = F_SEAL_SHRINK | F_SEAL_GROW;

	trainer_open(&trainer, door);
	header = trainer.shm;
	/* It has yet to be mapped: test_ring.c seals it for good. */
	ASSERT_EQ(fcntl(trainer.memory, F_GET_SEALS), seals);
	ASSERT_TRUE(ftruncate(trainer.memory, 4096) && errno == EPERM);
	ASSERT_EQ(header->magic, SHM_MAGIC);
	ASSERT_EQ(header->version, SHM_VERSION);
	ASSERT_EQ(header->n_entries, SHM_ENTRIES);
	ASSERT_EQ(header->n_slots, SHM_SLOTS);
	ASSERT_EQ(header->len, SHM_LEN);
	ASSERT_EQ(header->daemon_armed, 1);
	ASSERT_EQ(control_n_sessions(door->control), 1);
	trainer_close(&trainer);
	DOOR_UNTIL(door, !control_n_sessions(door->control));
}

static uint64_t send_hello(struct trainer *trainer, uint32_t version_min, uint32_t version)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Hello hello = BPS__CONTROL__HELLO__INIT;

	hello.version = version;
	hello.version_min = version_min;
	request.body_case = BPS__CONTROL__REQUEST__BODY_HELLO;
	request.hello = &hello;
	return trainer_send(trainer, &request, NULL, 0);
}

TEST(foreign_version_is_told_both)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer trainer;
	char text[ERROR_TEXT_MAX + 1];

	trainer_connect(&trainer, door);
	ASSERT_EQ(trainer_answer(&trainer, send_hello(&trainer, 7, 9), text), -EPROTONOSUPPORT);
	ASSERT_CONTAINS(text, "1 to 1");
	ASSERT_CONTAINS(text, "7 to 9");
	trainer_expect_end(&trainer);
	trainer_close(&trainer);
}

TEST(newer_library_that_speaks_ours_too_is_welcome)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer trainer;
	char packet[FRAME_MAX];
	int fds[FRAME_FDS];
	size_t len, n_fds;

	trainer_connect(&trainer, door);
	(void)send_hello(&trainer, 1, 9);
	DOOR_UNTIL(door, trainer_readable(&trainer));
	ASSERT_OK(frame_receive(trainer.socket, packet, &len, fds, &n_fds));
	ASSERT_EQ(n_fds, 3);
	for (size_t i = 0; i < n_fds; i++)
		(void)fd_close(fds[i]);
	trainer_close(&trainer);
}

TEST(silent_connection_is_closed)
{
	_cleanup_(door_freep) struct door *door =
		door_new(&(struct door_options){ .hello_timeout_ms = 20 });
	struct trainer trainer;

	trainer_connect(&trainer, door);
	trainer_expect_end(&trainer);
	trainer_close(&trainer);
	DOOR_UNTIL(door, !control_n_sessions(door->control));
}

static void expect_refusal(struct door *door, int status, const char *words)
{
	_cleanup_(unpack_freep) Bps__Control__Message *message = NULL;
	struct trainer trainer;

	trainer_connect(&trainer, door);
	message = trainer_receive(&trainer);
	ASSERT_TRUE(message);
	ASSERT_EQ(message->id, 0);
	ASSERT_EQ(message->status, status);
	ASSERT_CONTAINS(message->text, words);
	trainer_expect_end(&trainer);
	trainer_close(&trainer);
}

TEST(limits_of_sessions)
{
	struct door_options options[] = { { .max_sessions = 2 }, { .max_sessions_per_uid = 2 } };

	for (size_t i = 0; i < ARRAY_SIZE(options); i++) {
		_cleanup_(door_freep) struct door *door = door_new(&options[i]);
		struct trainer trainers[3];

		trainer_open(&trainers[0], door);
		trainer_open(&trainers[1], door);
		expect_refusal(door, i ? -EDQUOT : -EMFILE,
			       i ? "max_sessions_per_user" : "max_sessions");
		/* One that goes makes room. */
		trainer_close(&trainers[0]);
		DOOR_UNTIL(door, control_n_sessions(door->control) == 1);
		trainer_open(&trainers[2], door);
		trainer_close(&trainers[1]);
		trainer_close(&trainers[2]);
	}
}

TEST(who_connects_takes_turns)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer trainers[8];

	for (size_t i = 0; i < ARRAY_SIZE(trainers); i++)
		trainer_connect(&trainers[i], door);
	for (size_t i = 0; i < ARRAY_SIZE(trainers); i++) {
		ASSERT_EQ(control_n_sessions(door->control), i);
		ASSERT_OK(loop_turn(door->loop, 1000));
	}
	ASSERT_EQ(control_n_sessions(door->control), ARRAY_SIZE(trainers));
	for (size_t i = 0; i < ARRAY_SIZE(trainers); i++)
		trainer_close(&trainers[i]);
}

TEST(without_descriptors_is_refused_and_comes_back)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct rlimit limit, low;
	struct trainer trainer;
	uint64_t wakeups;
	int fill[64], n = 0, socket;

	/* The trainer's own descriptor is made before there are none left. */
	trainer_connect(&trainer, door);
	socket = trainer.socket;
	ASSERT_OK(getrlimit(RLIMIT_NOFILE, &limit));
	low = limit;
	low.rlim_cur = 64;
	ASSERT_OK(setrlimit(RLIMIT_NOFILE, &low));
	while (n < 64 && (fill[n] = dup(socket)) >= 0)
		n++;
	{
		_cleanup_(unpack_freep) Bps__Control__Message *message = trainer_receive(&trainer);

		ASSERT_EQ(message->status, -EMFILE);
		ASSERT_CONTAINS(message->text, "descriptors");
	}
	/* Nobody asks any more: no spinning. */
	wakeups = loop_wakeups(door->loop);
	ASSERT_OK(loop_turn(door->loop, 50));
	ASSERT_OK(loop_turn(door->loop, 50));
	ASSERT_TRUE(loop_wakeups(door->loop) - wakeups <= 3);
	while (n)
		(void)fd_close(fill[--n]);
	ASSERT_OK(setrlimit(RLIMIT_NOFILE, &limit));
	trainer_close(&trainer);
	trainer_open(&trainer, door);
	trainer_close(&trainer);
}

/* -- Packets ------------------------------------------------------------------------------------------------------ */

static void expect_end_after(const void *data, size_t len, const int *fds, size_t n_fds, bool open)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer bad, good;

	trainer_open(&good, door);
	if (open)
		trainer_open(&bad, door);
	else
		trainer_connect(&bad, door);
	trainer_send_bytes(&bad, data, len, fds, n_fds);
	trainer_expect_end(&bad);
	trainer_close(&bad);
	DOOR_UNTIL(door, control_n_sessions(door->control) == 1);
	/* Nobody else has felt it. */
	ASSERT_EQ(trainer_join(&good, "job", 0, 1, NULL), 0);
	trainer_close(&good);
}

static void expect_end_after_request(Bps__Control__Request *request, const int *fds, size_t n_fds,
				     bool open)
{
	_cleanup_(freep) void *data = NULL;
	size_t len;

	ASSERT_OK(pack(&request->base, FRAME_MAX, &data, &len));
	expect_end_after(data, len, fds, n_fds, open);
}

TEST(garbage_ends_the_session)
{
	static const char garbage[] = "\xff\xff\xff\xff what is this";

	expect_end_after(garbage, sizeof(garbage), NULL, 0, false);
	expect_end_after(garbage, sizeof(garbage), NULL, 0, true);
}

TEST(anything_before_hello_ends_the_session)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Leave leave = BPS__CONTROL__LEAVE__INIT;

	request.id = 1;
	request.body_case = BPS__CONTROL__REQUEST__BODY_LEAVE;
	request.leave = &leave;
	expect_end_after_request(&request, NULL, 0, false);
	request.body_case = BPS__CONTROL__REQUEST__BODY__NOT_SET;
	expect_end_after_request(&request, NULL, 0, false);
}

TEST(second_hello_ends_the_session)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Hello hello = BPS__CONTROL__HELLO__INIT;

	hello.version = hello.version_min = 1;
	request.id = 1;
	request.body_case = BPS__CONTROL__REQUEST__BODY_HELLO;
	request.hello = &hello;
	expect_end_after_request(&request, NULL, 0, true);
}

TEST(request_without_number_ends_the_session)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Leave leave = BPS__CONTROL__LEAVE__INIT;

	request.body_case = BPS__CONTROL__REQUEST__BODY_LEAVE;
	request.leave = &leave;
	expect_end_after_request(&request, NULL, 0, true);
}

TEST(descriptors_where_none_belong_end_the_session)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Leave leave = BPS__CONTROL__LEAVE__INIT;
	Bps__Control__Share share = BPS__CONTROL__SHARE__INIT;
	int fds[FRAME_FDS] = { 0, 1, 2, 0 };

	request.id = 1;
	request.body_case = BPS__CONTROL__REQUEST__BODY_LEAVE;
	request.leave = &leave;
	expect_end_after_request(&request, fds, 1, true);
	request.body_case = BPS__CONTROL__REQUEST__BODY_SHARE;
	request.share = &share;
	expect_end_after_request(&request, fds, 2, true);
	expect_end_after_request(&request, fds, FRAME_FDS, true);
}

TEST(packet_too_large_ends_the_session)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	_cleanup_(freep) char *large = calloc(1, FRAME_MAX + 1);
	struct trainer trainer;

	trainer_open(&trainer, door);
	/* frame_send() would not do it. */
	ASSERT_EQ(send(trainer.socket, large, FRAME_MAX + 1, MSG_NOSIGNAL), FRAME_MAX + 1);
	trainer_expect_end(&trainer);
	trainer_close(&trainer);
}

TEST(request_of_a_later_version_is_answered)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	/* id 5; field 100, a message of no bytes. */
	static const uint8_t unknown[] = { 0x08, 5, 0xa2, 0x06, 0 };
	struct trainer trainer;

	trainer_open(&trainer, door);
	trainer_send_bytes(&trainer, unknown, sizeof(unknown), NULL, 0);
	ASSERT_EQ(trainer_answer(&trainer, 5, NULL), -EOPNOTSUPP);
	trainer_close(&trainer);
}

TEST(trainer_that_does_not_read_is_cut_off)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Leave leave = BPS__CONTROL__LEAVE__INIT;
	_cleanup_(freep) void *data = NULL;
	struct trainer trainer;
	size_t len;

	trainer_open(&trainer, door);
	request.id = 1;
	request.body_case = BPS__CONTROL__REQUEST__BODY_LEAVE;
	request.leave = &leave;
	ASSERT_OK(pack(&request.base, FRAME_MAX, &data, &len));
	while (control_n_sessions(door->control)) {
		int r = frame_send(trainer.socket, data, len, NULL, 0);

		ASSERT_TRUE(r == 0 || r == FRAME_E_AGAIN || r == FRAME_E_EOF);
		ASSERT_OK(loop_turn(door->loop, 0));
	}
	trainer_close(&trainer);
}

/* -- Jobs --------------------------------------------------------------------------------------------------------- */

static void open_job(struct door *door, struct trainer *trainers, uint32_t size)
{
	uint64_t ids[8];

	for (uint32_t i = 0; i < size; i++) {
		trainer_open(&trainers[i], door);
		ids[i] = trainer_send_join(&trainers[i], "job", i, size, 60000);
	}
	for (uint32_t i = 0; i < size; i++)
		ASSERT_EQ(trainer_answer(&trainers[i], ids[i], NULL), 0);
}

TEST(join_is_answered_once_all_are_there)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer trainers[3];
	uint64_t ids[3];
	char text[ERROR_TEXT_MAX + 1];

	for (uint32_t i = 0; i < 3; i++)
		trainer_open(&trainers[i], door);
	ids[0] = trainer_send_join(&trainers[0], "job", 0, 3, 60000);
	ids[2] = trainer_send_join(&trainers[2], "job", 2, 3, 60000);
	/* Whoever asks later is answered first: the join has been read and waits. */
	ASSERT_EQ(trainer_join(&trainers[2], "job", 2, 3, text), -EISCONN);
	ASSERT_TRUE(!trainer_readable(&trainers[0]) && !trainer_readable(&trainers[2]));
	ids[1] = trainer_send_join(&trainers[1], "job", 1, 3, 60000);
	for (uint32_t i = 0; i < 3; i++) {
		_cleanup_(unpack_freep) Bps__Control__Message *message =
			trainer_receive(&trainers[i]);

		ASSERT_EQ(message->id, ids[i]);
		ASSERT_EQ(message->body_case, BPS__CONTROL__MESSAGE__BODY_JOINED);
		ASSERT_TRUE(message->joined->job);
		ASSERT_EQ(message->joined->n_servers, 0);
	}
	for (uint32_t i = 0; i < 3; i++)
		trainer_close(&trainers[i]);
}

TEST(leave_and_join_again)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer trainer;
	char text[ERROR_TEXT_MAX + 1];

	trainer_open(&trainer, door);
	ASSERT_EQ(trainer_leave(&trainer, text), -ENOTCONN);
	for (int i = 0; i < 3; i++) {
		ASSERT_EQ(trainer_declare(&trainer, 1, "t", DTYPE_FLOAT32, 4, text), -ENOTCONN);
		ASSERT_EQ(trainer_join(&trainer, "job", 0, 1, text), 0);
		ASSERT_EQ(trainer_join(&trainer, "job", 0, 1, text), -EISCONN);
		ASSERT_EQ(trainer_declare(&trainer, 1, "t", DTYPE_FLOAT32, 4, text), 0);
		ASSERT_EQ(trainer_leave(&trainer, text), 0);
	}
	trainer_close(&trainer);
}

TEST(leave_takes_back_a_join)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer trainer, other;
	uint64_t join, leave;
	char text[ERROR_TEXT_MAX + 1];

	trainer_open(&trainer, door);
	trainer_open(&other, door);
	join = trainer_send_join(&trainer, "job", 0, 2, 60000);
	leave = trainer_send_leave(&trainer);
	ASSERT_EQ(trainer_answer(&trainer, join, text), -ECANCELED);
	ASSERT_EQ(trainer_answer(&trainer, leave, text), 0);
	/* Its place is free again. */
	join = trainer_send_join(&trainer, "job", 1, 2, 60000);
	ASSERT_EQ(trainer_join(&other, "job", 0, 2, text), 0);
	ASSERT_EQ(trainer_answer(&trainer, join, text), 0);
	trainer_close(&trainer);
	trainer_close(&other);
}

/* Ranks of one job have one secret. With another, or none, a rank waits for another job of that name. */
TEST(secrets_name_jobs_of_their_own)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Join join = BPS__CONTROL__JOIN__INIT;
	struct trainer trainers[2];
	uint64_t first;
	char text[ERROR_TEXT_MAX + 1], long_secret[JOB_SECRET_MAX + 1] = { 0 };

	join.job = (char *)"job";
	join.size = join.local_size = 2;
	join.n_nodes = 1;
	join.has_secret = true;
	join.secret = (ProtobufCBinaryData){ 6, (uint8_t *)"sesame" };
	request.body_case = BPS__CONTROL__REQUEST__BODY_JOIN;
	request.join = &join;
	trainer_open(&trainers[0], door);
	trainer_open(&trainers[1], door);
	first = trainer_send(&trainers[0], &request, NULL, 0);
	/* It has been read: the secret is set. */
	ASSERT_EQ(trainer_join(&trainers[0], "job", 0, 2, text), -EISCONN);

	join.rank = join.local_rank = 1;
	join.secret.data = (uint8_t *)"Sesame";
	join.has_timeout_ms = true;
	join.timeout_ms = 1;
	ASSERT_EQ(trainer_answer(&trainers[1], trainer_send(&trainers[1], &request, NULL, 0), text),
		  -ETIMEDOUT);
	ASSERT_CONTAINS(text, "another secret");
	join.has_secret = false;
	ASSERT_EQ(trainer_answer(&trainers[1], trainer_send(&trainers[1], &request, NULL, 0), text),
		  -ETIMEDOUT);
	ASSERT_CONTAINS(text, "another secret");
	join.has_timeout_ms = false;
	join.has_secret = true;
	join.secret = (ProtobufCBinaryData){ sizeof(long_secret), (uint8_t *)long_secret };
	ASSERT_EQ(trainer_answer(&trainers[1], trainer_send(&trainers[1], &request, NULL, 0), text),
		  -EINVAL);
	join.secret = (ProtobufCBinaryData){ 6, (uint8_t *)"sesame" };
	ASSERT_EQ(trainer_answer(&trainers[1], trainer_send(&trainers[1], &request, NULL, 0), text),
		  0);
	ASSERT_EQ(trainer_answer(&trainers[0], first, text), 0);
	trainer_close(&trainers[0]);
	trainer_close(&trainers[1]);
}

/* The event that a job is over. */
static void expect_job_failed(struct trainer *trainer, int status, const char *words)
{
	_cleanup_(unpack_freep) Bps__Control__Message *message = trainer_receive(trainer);

	ASSERT_TRUE(message);
	ASSERT_EQ(message->id, 0);
	ASSERT_EQ(message->body_case, BPS__CONTROL__MESSAGE__BODY_JOB_FAILED);
	ASSERT_TRUE(message->job_failed->job);
	ASSERT_EQ(message->status, status);
	ASSERT_CONTAINS(message->text, words);
}

TEST(hanging_up_fails_the_job_of_the_others)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer trainers[3];
	uint64_t declare;
	char text[ERROR_TEXT_MAX + 1];

	open_job(door, trainers, 3);
	declare = trainer_send_declare(&trainers[1], 1, "t", DTYPE_FLOAT32, 4);
	ASSERT_EQ(trainer_leave(&trainers[0], text), 0);
	trainer_close(&trainers[2]);
	/* What was not answered yet is. */
	ASSERT_EQ(trainer_answer(&trainers[1], declare, text), -EPIPE);
	ASSERT_CONTAINS(text, "rank 2 (pid ");
	expect_job_failed(&trainers[1], -EPIPE, "closed its connection");
	ASSERT_EQ(trainer_declare(&trainers[1], 2, "u", DTYPE_FLOAT32, 4, text), -ENOTCONN);
	ASSERT_EQ(trainer_leave(&trainers[1], text), -ENOTCONN);
	/* The daemon goes on, and so does the name. */
	ASSERT_EQ(trainer_join(&trainers[1], "job", 0, 1, text), 0);
	trainer_close(&trainers[0]);
	trainer_close(&trainers[1]);
}

/* A trainer in a process of its own that has forked a child, which keeps its descriptors. */
TEST(death_is_seen_though_a_child_keeps_the_socket)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer mine, other = { 0 };
	struct pollfd ended = { .events = POLLIN };
	int go[2], ready[2];
	uint64_t join;
	pid_t pid, child;
	char text[64];

	ASSERT_OK(pipe2(go, O_CLOEXEC));
	ASSERT_OK(pipe2(ready, O_CLOEXEC));
	trainer_open(&mine, door);
	pid = fork();
	ASSERT_TRUE(pid >= 0);
	if (!pid) {
		/* The door is the parent's: this one only connects, is one process and then two. */
		Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
		Bps__Control__Hello hello = BPS__CONTROL__HELLO__INIT;

		(void)fd_close(go[1]);
		trainer_connect(&other, door);
		hello.version = hello.version_min = 1;
		request.body_case = BPS__CONTROL__REQUEST__BODY_HELLO;
		request.hello = &hello;
		(void)trainer_send(&other, &request, NULL, 0);
		(void)trainer_send_join(&other, "job", 1, 2, 60000);
		child = fork();
		if (!child) {
			(void)!read(go[0], text, 1); /* until the test ends */
			_exit(0);
		}
		(void)!write(ready[1], &child, sizeof(child));
		(void)!read(go[0], text, 1);
		_exit(0);
	}
	ASSERT_EQ(read(ready[0], &child, sizeof(child)), sizeof(child));
	join = trainer_send_join(&mine, "job", 0, 2, 60000);
	ASSERT_EQ(trainer_answer(&mine, join, NULL), 0);

	ASSERT_OK(kill(pid, SIGKILL));
	(void)snprintf(text, sizeof(text), "rank 1 (pid %d) of job job died", pid);
	expect_job_failed(&mine, -EPIPE, text);
	ASSERT_EQ(waitpid(pid, NULL, 0), pid);
	/* Not our child, but our group's: the runner must not meet it while it is ending. */
	ended.fd = (int)syscall(SYS_pidfd_open, child, 0);
	ASSERT_INT(ended.fd, >=, 0);
	ASSERT_OK(kill(child, SIGKILL));
	ASSERT_EQ(poll(&ended, 1, -1), 1);
	(void)fd_close(ended.fd);
	for (int i = 0; i < 2; i++) {
		(void)fd_close(go[i]);
		(void)fd_close(ready[i]);
	}
	trainer_close(&mine);
}

TEST(late_ranks_are_named)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer trainer;
	uint64_t id;
	char text[ERROR_TEXT_MAX + 1];

	trainer_open(&trainer, door);
	id = trainer_send_join(&trainer, "job", 1, 4, 20);
	ASSERT_EQ(trainer_answer(&trainer, id, text), -ETIMEDOUT);
	ASSERT_STR(text, "job job: ranks 0, 2, 3 did not join within 20 ms");
	trainer_close(&trainer);
}

TEST(admin_sees_sessions)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	_cleanup_(freep) struct control_session_info *infos = NULL;
	struct trainer trainers[2];
	int fd = memory_new(8192, NULL);
	size_t n;

	open_job(door, trainers, 2);
	ASSERT_EQ(trainer_share(&trainers[1], 1, fd, 8192, NULL), 0);
	ASSERT_OK(control_sessions(door->control, &infos, &n));
	ASSERT_EQ(n, 2);
	ASSERT_EQ(infos[1].pid, getpid());
	ASSERT_EQ(infos[1].uid, getuid());
	ASSERT_EQ(infos[1].rank, 1);
	ASSERT_STR(infos[1].job, "job");
	ASSERT_EQ(infos[1].bytes_mapped, 8192);
	ASSERT_EQ(infos[0].bytes_mapped, 0);
	(void)fd_close(fd);
	trainer_close(&trainers[0]);
	trainer_close(&trainers[1]);
}

/* -- Memory ------------------------------------------------------------------------------------------------------- */

static void expect_share(struct trainer *trainer, int fd, uint64_t len, int status,
			 const char *words)
{
	char text[ERROR_TEXT_MAX + 1];

	ASSERT_EQ(trainer_share(trainer, 5, fd, len, text), status);
	ASSERT_CONTAINS(text, words);
	(void)fd_close(fd);
}

TEST(only_sealed_memfds_are_mapped)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer trainer;
	char path[64];
	int fd, again, fds[2];

	trainer_open(&trainer, door);
	expect_share(&trainer, -1, 4096, -EINVAL, "no descriptor");
	expect_share(&trainer, eventfd(0, EFD_CLOEXEC), 4096, -EINVAL, "not a memfd");
	expect_share(&trainer, open("/proc/self/exe", O_RDONLY | O_CLOEXEC), 4096, -EINVAL,
		     "not a memfd");
	expect_share(&trainer, open("/dev/zero", O_RDWR | O_CLOEXEC), 4096, -EINVAL, "not a memfd");
	ASSERT_OK(pipe2(fds, O_CLOEXEC));
	expect_share(&trainer, fds[0], 4096, -EINVAL, "not a memfd");
	(void)fd_close(fds[1]);

	fd = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	ASSERT_OK(ftruncate(fd, 4096));
	expect_share(&trainer, fd, 4096, -EPERM, "sealed");
	fd = memfd_create("no seals", MFD_CLOEXEC);
	ASSERT_OK(ftruncate(fd, 4096));
	expect_share(&trainer, fd, 4096, -EPERM, "sealed");
	fd = memory_new(4096, NULL);
	expect_share(&trainer, fd, 4097, -EINVAL, "4096 bytes");
	expect_share(&trainer, memory_new(4096, NULL), UINT64_MAX, -EINVAL, "cannot be shared");
	expect_share(&trainer, memory_new(4096, NULL), 0, -EINVAL, "cannot be shared");

	fd = memory_new(4096, NULL);
	(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	again = open(path, O_RDONLY | O_CLOEXEC);
	ASSERT_TRUE(again >= 0);
	expect_share(&trainer, again, 4096, -EPERM, "reading and writing");
	ASSERT_OK(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE));
	expect_share(&trainer, fd, 4096, -EPERM, "reading and writing");

	fd = memfd_create("huge", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
	if (fd >= 0 && !fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK))
		expect_share(&trainer, fd, 4096, -EINVAL, "normal pages");
	else
		(void)fd_close(fd);
	trainer_close(&trainer);
}

TEST(buffers_have_numbers_and_limits)
{
	_cleanup_(door_freep) struct door *door =
		door_new(&(struct door_options){ .max_buffers = 3, .session_quota_bytes = 20000 });
	struct trainer trainer;
	int fd = memory_new(16384, NULL);
	char text[ERROR_TEXT_MAX + 1];

	trainer_open(&trainer, door);
	ASSERT_EQ(trainer_share(&trainer, 0, fd, 100, text), -EEXIST);
	ASSERT_EQ(trainer_share(&trainer, 1, fd, 10000, text), 0);
	ASSERT_EQ(trainer_share(&trainer, 1, fd, 100, text), -EEXIST);
	ASSERT_EQ(trainer_share(&trainer, 2, fd, 10001, text), -EDQUOT);
	ASSERT_CONTAINS(text, "20000");
	ASSERT_EQ(trainer_share(&trainer, 2, fd, 9999, text), 0);
	ASSERT_EQ(trainer_share(&trainer, 3, fd, 1, text), 0);
	ASSERT_EQ(trainer_share(&trainer, 4, fd, 1, text), -EDQUOT);
	ASSERT_EQ(trainer_unshare(&trainer, 4), -EINVAL);
	ASSERT_EQ(trainer_unshare(&trainer, 1), 0);
	ASSERT_EQ(trainer_unshare(&trainer, 1), -EINVAL);
	ASSERT_EQ(trainer_share(&trainer, 1, fd, 10000, text), 0);
	(void)fd_close(fd);
	trainer_close(&trainer);
}

#define N_BUFFERS 64

/* What else the thread has to do meanwhile: sees what there is between two steps of others. */
struct other {
	struct chore chore;
	struct control *control;
	unsigned n_some_left; /* times that the first session had some of its buffers and not all */
	size_t n_sessions, n_gone_most;
};

static bool on_other(struct chore *chore)
{
	struct other *other = container_of(chore, struct other, chore);
	const struct session *first = list_first(&other->control->sessions, struct session, link);
	size_t n_sessions = control_n_sessions(other->control),
	       n = first ? first->memory.buffers.n_entries : 0;

	other->n_some_left += n > 0 && n < N_BUFFERS;
	other->n_gone_most = MAX(other->n_gone_most, other->n_sessions - n_sessions);
	other->n_sessions = n_sessions;
	return true;
}

static void other_begin(struct other *other, struct door *door)
{
	*other = (struct other){ .chore = { .step = on_other },
				 .control = door->control,
				 .n_sessions = control_n_sessions(door->control) };
	loop_begin(door->loop, &other->chore);
}

/* A trainer that shares many buffers hangs up. The chore that gives these up is held. */
static void hang_up_with_buffers(struct door *door)
{
	struct trainer trainer;
	int fd = memory_new(4096, NULL);

	trainer_open(&trainer, door);
	for (uint32_t i = 1; i <= N_BUFFERS; i++)
		ASSERT_OK(trainer_share(&trainer, i, fd, 4096, NULL));
	chores_hold();
	trainer_close(&trainer);
	DOOR_UNTIL(door, chores_n_held());
	(void)fd_close(fd);
}

/* However many buffers there are: others have their turns in between. */
TEST(buffers_of_who_hangs_up_are_given_up_in_pieces)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct other other;

	hang_up_with_buffers(door);
	ASSERT_EQ(control_n_sessions(door->control), 1);
	chores_go_on();
	other_begin(&other, door);
	DOOR_UNTIL(door, !control_n_sessions(door->control));
	loop_abort(&other.chore);
	ASSERT_INT(other.n_some_left, >=, 3);
}

/* However many sessions are over at once. */
TEST(sessions_that_are_over_go_one_by_one)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer trainers[8];
	struct other other;

	for (unsigned i = 0; i < ARRAY_SIZE(trainers); i++)
		trainer_open(&trainers[i], door);
	chores_hold();
	for (unsigned i = 0; i < ARRAY_SIZE(trainers); i++)
		trainer_close(&trainers[i]);
	for (unsigned i = 0; i < 100; i++)
		ASSERT_OK(loop_turn(door->loop, 0));
	DOOR_UNTIL(door, chores_n_held());
	ASSERT_EQ(control_n_sessions(door->control), ARRAY_SIZE(trainers));
	chores_go_on();
	other_begin(&other, door);
	DOOR_UNTIL(door, !control_n_sessions(door->control));
	loop_abort(&other.chore);
	ASSERT_INT(other.n_gone_most, <=, 2);
}

/* What no step has come to goes at once where the daemon ends. */
TEST(buffers_that_are_left_go_with_the_door)
{
	struct door *door = door_new(NULL);

	hang_up_with_buffers(door);
	chores_go_on();
	(void)door_free(door);
}

/* -- Tensors ------------------------------------------------------------------------------------------------------ */

TEST(tensors_have_numbers_and_limits)
{
	_cleanup_(door_freep) struct door *door =
		door_new(&(struct door_options){ .max_tensors = 2 });
	struct trainer trainer;
	char text[ERROR_TEXT_MAX + 1], name[TENSOR_NAME_MAX + 2];

	trainer_open(&trainer, door);
	ASSERT_EQ(trainer_join(&trainer, "job", 0, 1, text), 0);
	ASSERT_EQ(trainer_declare(&trainer, 0, "t", DTYPE_FLOAT32, 4, text), -EEXIST);
	ASSERT_EQ(trainer_declare(&trainer, 1, "", DTYPE_FLOAT32, 4, text), -EINVAL);
	memset(name, 'n', sizeof(name) - 1);
	name[sizeof(name) - 1] = 0;
	ASSERT_EQ(trainer_declare(&trainer, 1, name, DTYPE_FLOAT32, 4, text), -EINVAL);
	ASSERT_EQ(trainer_declare(&trainer, 1, "a\nb", DTYPE_FLOAT32, 4, text), -EINVAL);
	ASSERT_EQ(trainer_declare(&trainer, 1, "t", 0, 4, text), -EINVAL);
	ASSERT_EQ(trainer_declare(&trainer, 1, "t", 99999, 4, text), -EINVAL);
	ASSERT_EQ(trainer_declare(&trainer, 1, "t", DTYPE_FLOAT32, UINT64_MAX / 2, text), -EINVAL);
	ASSERT_EQ(trainer_declare(&trainer, 1, "t", DTYPE_FLOAT32, 4, text), 0);
	ASSERT_EQ(trainer_declare(&trainer, 1, "u", DTYPE_FLOAT32, 4, text), -EEXIST);
	ASSERT_EQ(trainer_declare(&trainer, 2, "t", DTYPE_FLOAT32, 4, text), -EEXIST);
	ASSERT_CONTAINS(text, "already");
	ASSERT_EQ(trainer_declare(&trainer, 2, "u", DTYPE_FLOAT32, ELEMENTS_VARIABLE, text), 0);
	ASSERT_EQ(trainer_declare(&trainer, 3, "v", DTYPE_FLOAT32, 4, text), -EDQUOT);
	trainer_close(&trainer);
}
