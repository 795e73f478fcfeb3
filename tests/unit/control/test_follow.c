/* Ranks that follow the others, over the socket: Follow, Begun, AllFollow. */
#include "door.h"
#include "proto/pack.h"
#include <sys/mman.h>

#define RANKS 2

/* Two ranks of a job with a buffer 1 each. */
static struct {
	struct door *door;
	struct trainer trainers[RANKS];
	int fds[RANKS];
	void *data[RANKS];
} ranks;

static void begin(void)
{
	uint64_t joins[RANKS];

	ranks.door = door_new(&(struct door_options){ .features = CONTROL_FEATURE_FOLLOW });
	for (uint32_t i = 0; i < RANKS; i++) {
		trainer_open(&ranks.trainers[i], ranks.door);
		ranks.fds[i] = memory_new(4096, &ranks.data[i]);
		joins[i] = trainer_send_join(&ranks.trainers[i], "job", i, RANKS, 60000);
	}
	for (uint32_t i = 0; i < RANKS; i++) {
		ASSERT_EQ(trainer_answer(&ranks.trainers[i], joins[i], NULL), 0);
		ASSERT_EQ(trainer_share(&ranks.trainers[i], 1, ranks.fds[i], 4096, NULL), 0);
	}
}

static void end(void)
{
	for (uint32_t i = 0; i < RANKS; i++) {
		trainer_close(&ranks.trainers[i]);
		(void)munmap(ranks.data[i], 4096);
		(void)fd_close(ranks.fds[i]);
	}
	DOOR_UNTIL(ranks.door, !control_n_sessions(ranks.door->control));
	ranks.door = door_free(ranks.door);
}

static uint64_t send_follow(struct trainer *trainer, bool follows, bool idle, uint64_t turn)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Follow follow = BPS__CONTROL__FOLLOW__INIT;

	follow.follows = follows;
	follow.has_idle = follow.idle = idle;
	follow.turn = turn;
	request.body_case = BPS__CONTROL__REQUEST__BODY_FOLLOW;
	request.follow = &follow;
	return trainer_send(trainer, &request, NULL, 0);
}

/* The status of the answer. AllFollow may come ahead of the answer, and once more. */
static int answer_of(uint32_t i, uint64_t id)
{
	for (;;) {
		_cleanup_(unpack_freep) Bps__Control__Message *message =
			trainer_receive(&ranks.trainers[i]);

		ASSERT_TRUE(message);
		if (message->id == id)
			return message->status;
		ASSERT_EQ(message->body_case, BPS__CONTROL__MESSAGE__BODY_ALL_FOLLOW);
	}
}

static int follow(uint32_t i, bool follows, bool idle, uint64_t turn)
{
	return answer_of(i, send_follow(&ranks.trainers[i], follows, idle, turn));
}

/* The next packet is an event of this kind. To be released with unpack_free(). */
static Bps__Control__Message *hear(uint32_t i, unsigned kind)
{
	Bps__Control__Message *message = trainer_receive(&ranks.trainers[i]);

	ASSERT_TRUE(message);
	ASSERT_EQ(message->id, 0);
	ASSERT_EQ(message->body_case, kind);
	return message;
}

TEST(what_others_begin_is_told_and_may_be_refused)
{
	_cleanup_(unpack_freep) Bps__Control__Message *message = NULL;
	uint32_t slots[RANKS];
	char text[ERROR_TEXT_MAX + 1];
	struct shm_entry entry;

	begin();
	ASSERT_EQ(follow(1, true, false, 1), 0);
	(void)trainer_send_declare(&ranks.trainers[0], 7, "layer.0", DTYPE_FLOAT32, 3);
	entry = trainer_entry(7, 1, 1, 1, 3);
	slots[0] = trainer_post(&ranks.trainers[0], &entry);
	message = hear(1, BPS__CONTROL__MESSAGE__BODY_BEGUN);
	ASSERT_STR(message->begun->name, "layer.0");
	ASSERT_EQ(message->begun->dtype, DTYPE_FLOAT32);
	ASSERT_EQ(message->begun->elements, 3);
	ASSERT_EQ(message->begun->round, 1);
	ASSERT_EQ(message->begun->first, 1);
	ASSERT_EQ(message->begun->operation, OPERATION_PUSH_PULL);
	ASSERT_EQ(message->begun->reduction, REDUCTION_SUM);

	(void)trainer_send_declare(&ranks.trainers[1], 9, "layer.0", DTYPE_FLOAT32, 3);
	entry = (struct shm_entry){ .round = 1, .tensor = 9, .operation = OPERATION_REFUSE };
	slots[1] = trainer_post(&ranks.trainers[1], &entry);
	for (uint32_t i = 0; i < RANKS; i++) {
		ASSERT_EQ(trainer_wait(&ranks.trainers[i], slots[i], text), -EOPNOTSUPP);
		ASSERT_CONTAINS(text, "tensor layer.0, round 1: rank 1 has joined");
	}
	end();
}

TEST(all_hear_that_all_follow_and_are_idle)
{
	uint64_t id;

	begin();
	for (uint64_t turn = 1; turn < 4; turn++) {
		ASSERT_EQ(follow(0, true, true, turn), 0);
		id = send_follow(&ranks.trainers[1], true, true, turn);
		for (uint32_t i = 0; i < RANKS; i++) {
			_cleanup_(unpack_freep) Bps__Control__Message *message =
				hear(i, BPS__CONTROL__MESSAGE__BODY_ALL_FOLLOW);

			ASSERT_EQ(message->all_follow->turn, turn);
			ASSERT_EQ(message->status, 0);
		}
		ASSERT_EQ(answer_of(1, id), 0);
		for (uint32_t i = 0; i < RANKS; i++)
			ASSERT_EQ(follow(i, false, false, turn + 1), 0);
	}
	end();
}

TEST(who_follows_hears_that_a_rank_has_left)
{
	_cleanup_(unpack_freep) Bps__Control__Message *message = NULL;

	begin();
	ASSERT_EQ(follow(1, true, true, 1), 0);
	ASSERT_EQ(trainer_leave(&ranks.trainers[0], NULL), 0);
	message = hear(1, BPS__CONTROL__MESSAGE__BODY_ALL_FOLLOW);
	ASSERT_EQ(message->status, -EPIPE);
	ASSERT_STR(message->text, "rank 0 has left job job");
	ASSERT_EQ(follow(1, true, true, 1), -EPIPE);
	end();
}

TEST(what_is_no_turn_is_refused)
{
	begin();
	ASSERT_EQ(follow(0, true, false, 0), -EINVAL);
	ASSERT_EQ(follow(0, true, false, UINT64_MAX), -EINVAL);
	ASSERT_EQ(trainer_leave(&ranks.trainers[0], NULL), 0);
	ASSERT_EQ(follow(0, true, false, 1), -ENOTCONN);
	end();
}
