/* Tensors that trainers release, over the socket: Unused, Release, and entries for what was released. */
#include "door.h"
#include "proto/pack.h"
#include <stdio.h>
#include <sys/mman.h>

#define MAX_TENSORS 64
#define RANKS	    2

struct asked {
	uint32_t tensor;
	char name[32];
};

/* Two ranks with a buffer 1 each; what they have been asked, and told. */
static struct {
	struct door *door;
	struct trainer trainers[RANKS];
	struct asked asked[RANKS][MAX_TENSORS];
	unsigned n_asked[RANKS], n_gone[RANKS], n_busy[RANKS], n_declared[RANKS];
	int status[RANKS]; /* of the last answer that is none of these */
	uint64_t answered[RANKS];
	int fds[RANKS];
	float *data[RANKS];
} ring;

static void begin(uint64_t features)
{
	uint64_t joins[RANKS];

	memset(&ring, 0, sizeof(ring));
	ring.door = door_new(
		&(struct door_options){ .max_tensors = MAX_TENSORS, .features = features });
	for (uint32_t i = 0; i < RANKS; i++) {
		void *data;

		trainer_open(&ring.trainers[i], ring.door);
		ring.fds[i] = memory_new(4096, &data);
		ring.data[i] = data;
		joins[i] = trainer_send_join(&ring.trainers[i], "job", i, RANKS, 60000);
	}
	for (uint32_t i = 0; i < RANKS; i++) {
		ASSERT_EQ(trainer_answer(&ring.trainers[i], joins[i], NULL), 0);
		ASSERT_EQ(trainer_share(&ring.trainers[i], 1, ring.fds[i], 4096, NULL), 0);
	}
}

static void end(void)
{
	for (uint32_t i = 0; i < RANKS; i++) {
		trainer_close(&ring.trainers[i]);
		(void)munmap(ring.data[i], 4096);
		(void)fd_close(ring.fds[i]);
	}
	DOOR_UNTIL(ring.door, !control_n_sessions(ring.door->control));
	ring.door = door_free(ring.door);
}

static uint64_t send_release(uint32_t i, uint32_t tensor, bool in_use)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Release release = BPS__CONTROL__RELEASE__INIT;

	release.tensor = tensor;
	release.has_in_use = release.in_use = in_use;
	request.body_case = BPS__CONTROL__REQUEST__BODY_RELEASE;
	request.release = &release;
	return trainer_send(&ring.trainers[i], &request, NULL, 0);
}

/* Takes the packets that have come. */
static void hear(uint32_t i)
{
	while (trainer_readable(&ring.trainers[i])) {
		_cleanup_(unpack_freep) Bps__Control__Message *message =
			trainer_receive(&ring.trainers[i]);

		ASSERT_TRUE(message);
		if (message->body_case == BPS__CONTROL__MESSAGE__BODY_UNUSED) {
			struct asked *asked = &ring.asked[i][ring.n_asked[i]++];

			ASSERT_TRUE(!message->id && ring.n_asked[i] <= MAX_TENSORS);
			asked->tensor = message->unused->tensor;
			(void)snprintf(asked->name, sizeof(asked->name), "%s",
				       message->unused->name);
		} else if (message->body_case == BPS__CONTROL__MESSAGE__BODY_DECLARED) {
			ring.n_declared[i]++;
		} else {
			ring.status[i] = message->status;
			ring.answered[i] = message->id;
			ring.n_gone[i] += !message->status;
			ring.n_busy[i] += message->status == -EBUSY;
		}
	}
}

#define HEAR_UNTIL(condition)                                          \
	do {                                                           \
		for (hear(0), hear(1); !(condition); hear(0), hear(1)) \
			ASSERT_OK(loop_turn(ring.door->loop, 1000));   \
	} while (0)

static int answer_of(uint32_t i, uint64_t id)
{
	HEAR_UNTIL(ring.answered[i] == id);
	return ring.status[i];
}

/* Rank 1 has other numbers than rank 0. */
static uint32_t number_of(uint32_t i, unsigned tensor)
{
	return tensor + 1 + i * 1000;
}

static void declare(unsigned tensor)
{
	unsigned n = ring.n_declared[1];
	char name[32];

	(void)snprintf(name, sizeof(name), "loss.%u", tensor);
	for (uint32_t i = 0; i < RANKS; i++)
		(void)trainer_send_declare(&ring.trainers[i], number_of(i, tensor), name,
					   DTYPE_FLOAT32, 1);
	HEAR_UNTIL(ring.n_declared[0] > n && ring.n_declared[1] > n);
}

static int use_one(uint32_t i, unsigned tensor, uint64_t round)
{
	struct shm_entry entry = trainer_entry(number_of(i, tensor), round, 1, 1, 1);

	return (int)trainer_post(&ring.trainers[i], &entry);
}

static void use(unsigned tensor, uint64_t round)
{
	int slots[RANKS];

	for (uint32_t i = 0; i < RANKS; i++) {
		ring.data[i][0] = (float)(i + 1);
		slots[i] = use_one(i, tensor, round);
	}
	for (uint32_t i = 0; i < RANKS; i++) {
		HEAR_UNTIL(trainer_done(&ring.trainers[i], (uint32_t)slots[i]));
		ASSERT_EQ(shm_slots(ring.trainers[i].shm)[slots[i]].status, 0);
		ASSERT_TRUE(ring.data[i][0] == 3);
	}
}

/* Until something is asked about; the first is tensor 0. */
static void fill(void)
{
	for (unsigned i = 0; !ring.n_asked[0]; i++) {
		ASSERT_TRUE(i < MAX_TENSORS);
		declare(i);
		use(i, 1);
	}
	HEAR_UNTIL(ring.n_asked[1] == ring.n_asked[0]);
	for (uint32_t i = 0; i < RANKS; i++) {
		ASSERT_EQ(ring.asked[i][0].tensor, number_of(i, 0));
		ASSERT_STR(ring.asked[i][0].name, "loss.0");
	}
}

TEST(a_session_names_without_end)
{
	begin(CONTROL_FEATURE_RELEASE);
	for (unsigned n = 0; n < 8 * MAX_TENSORS; n++) {
		declare(n);
		use(n, 1);
		for (uint32_t i = 0; i < RANKS; i++) {
			for (unsigned k = 0; k < ring.n_asked[i]; k++)
				(void)send_release(i, ring.asked[i][k].tensor, false);
			ring.n_asked[i] = 0;
		}
	}
	HEAR_UNTIL(ring.n_gone[0] == ring.n_gone[1] && ring.n_gone[0] >= 7 * MAX_TENSORS);
	ASSERT_EQ(ring.n_busy[0] + ring.n_busy[1], 0);
	end();
}

TEST(a_library_that_does_not_know_of_it_is_not_asked)
{
	unsigned n = 0;

	begin(0);
	for (; n < MAX_TENSORS; n++) {
		declare(n);
		use(n, 1);
	}
	ASSERT_EQ(ring.n_asked[0] + ring.n_asked[1], 0);
	ASSERT_EQ(answer_of(0, trainer_send_declare(&ring.trainers[0], 9999, "more", DTYPE_FLOAT32,
						    1)),
		  -EDQUOT);
	end();
}

TEST(release_of_what_is_not_asked_about)
{
	begin(CONTROL_FEATURE_RELEASE);
	declare(0);
	ASSERT_EQ(answer_of(0, send_release(0, 77, false)), -EINVAL);
	ASSERT_EQ(answer_of(0, send_release(0, 77, true)), -EINVAL);
	ASSERT_EQ(answer_of(0, send_release(0, number_of(0, 0), false)), -EBUSY);
	ASSERT_EQ(answer_of(0, send_release(0, number_of(0, 0), true)), 0);
	use(0, 1);
	end();
}

TEST(a_release_waits_for_the_other_rank)
{
	uint64_t id;

	begin(CONTROL_FEATURE_RELEASE);
	fill();
	id = send_release(0, number_of(0, 0), false);
	ASSERT_EQ(answer_of(0, send_release(0, number_of(0, 0), false)), -EALREADY);
	ASSERT_EQ(ring.n_busy[0], 0);
	/* The other uses it. */
	(void)use_one(1, 0, 2);
	ASSERT_EQ(answer_of(0, id), -EBUSY);
	use(1, 2);
	end();
}

TEST(a_release_is_taken_back)
{
	begin(CONTROL_FEATURE_RELEASE);
	fill();
	(void)send_release(0, number_of(0, 0), false);
	/* The answer to the first comes first. */
	ASSERT_EQ(answer_of(0, send_release(0, number_of(0, 0), true)), 0);
	ASSERT_EQ(ring.n_busy[0], 1);
	ASSERT_EQ(answer_of(1, send_release(1, number_of(1, 0), false)), -EBUSY);
	use(0, 2);
	end();
}

/* One that posts what it releases harms itself alone. */
TEST(an_entry_for_what_its_trainer_releases)
{
	struct shm_entry entry = trainer_entry(number_of(0, 0), 2, 99, 99, 1);
	uint32_t slot;

	begin(CONTROL_FEATURE_RELEASE);
	fill();
	(void)send_release(1, number_of(1, 0), false);
	ASSERT_OK(loop_turn(ring.door->loop, 0));
	/* More than are read before the entry: the rest is, while it looks for a buffer that is not there. */
	for (unsigned i = 0; i < 40; i++)
		(void)trainer_send_cancel(&ring.trainers[0], 0, 1);
	(void)send_release(0, number_of(0, 0), false);
	slot = trainer_post(&ring.trainers[0], &entry);
	HEAR_UNTIL(trainer_done(&ring.trainers[0], slot));
	/* "was released"; or where the turn was over meanwhile, and the entry came once more, "no tensor 1 was declared". */
	ASSERT_CONTAINS(shm_slots(ring.trainers[0].shm)[slot].text, "tensor 1 was ");
	HEAR_UNTIL(ring.n_gone[1]);
	/* Nor does anybody know it any more. */
	entry = trainer_entry(number_of(0, 0), 2, 1, 1, 1);
	slot = trainer_post(&ring.trainers[0], &entry);
	HEAR_UNTIL(trainer_done(&ring.trainers[0], slot));
	ASSERT_CONTAINS(shm_slots(ring.trainers[0].shm)[slot].text, "no tensor 1 was declared");
	use(1, 2);
	end();
}

TEST(a_job_is_left_while_a_release_waits)
{
	begin(CONTROL_FEATURE_RELEASE);
	fill();
	(void)send_release(0, number_of(0, 0), false);
	ASSERT_EQ(answer_of(0, trainer_send_leave(&ring.trainers[0])), 0);
	ASSERT_EQ(ring.n_busy[0] + ring.n_gone[0], 2);
	end();
}
