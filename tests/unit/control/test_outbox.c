/* Trainers that do not read their packets: where one is too many, what is said to them ends their sessions, and no more. */
#include "control/session.h"
#include "door.h"

/* The first trainer's: as many packets wait as may. */
static void fill(struct door *door, struct trainer *trainer)
{
	const struct session *session = list_first(&door->control->sessions, struct session, link);

	while (session->outbox.n < OUTBOX_MAX) {
		(void)trainer_send_cancel(trainer, 0, 0);
		ASSERT_OK(loop_turn(door->loop, 0));
	}
}

static void open_two(struct door *door, struct trainer trainers[2])
{
	uint64_t joins[2];

	for (uint32_t i = 0; i < 2; i++) {
		trainer_open(&trainers[i], door);
		joins[i] = trainer_send_join(&trainers[i], "job", i, 2, 60000);
	}
	for (uint32_t i = 0; i < 2; i++)
		ASSERT_OK(trainer_answer(&trainers[i], joins[i], NULL));
}

TEST(a_tensor_on_which_ranks_do_not_agree)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer trainers[2];

	open_two(door, trainers);
	(void)trainer_send_declare(&trainers[0], 1, "t", DTYPE_FLOAT32, 5);
	fill(door, &trainers[0]);
	ASSERT_EQ(trainer_declare(&trainers[1], 1, "t", DTYPE_FLOAT32, 6, NULL), -EINVAL);
	trainer_expect_end(&trainers[0]);
	for (uint32_t i = 0; i < 2; i++)
		trainer_close(&trainers[i]);
}

/* Whatever a job that ends owes a trainer that is slow to read: it is told as it reads. */
TEST(who_reads_late_hears_all_answers)
{
	enum { N = OUTBOX_MAX };
	const struct door_options options = { .max_tensors = N };
	_cleanup_(door_freep) struct door *door = door_new(&options);
	struct trainer trainers[2];
	const struct session *session;
	unsigned n = 0;

	open_two(door, trainers);
	session = container_of(door->control->sessions.next, struct session, link);
	for (uint32_t i = 0; i < N; i++) {
		char name[16];

		(void)snprintf(name, sizeof(name), "t%u", i);
		(void)trainer_send_declare(&trainers[0], 1 + i, name, DTYPE_FLOAT32, 5);
		ASSERT_OK(loop_turn(door->loop, 0));
	}
	trainer_close(&trainers[1]);
	DOOR_UNTIL(door, session->outbox.n > OUTBOX_MAX / 2);
	for (unsigned i = 0; i < 100; i++)
		ASSERT_OK(loop_turn(door->loop, 0));
	ASSERT_INT(session->outbox.n, <=, OUTBOX_MAX / 2 + 1);
	while (n < N + 1) {
		n += trainer_read_all(&trainers[0]);
		ASSERT_OK(loop_turn(door->loop, 0));
	}
	ASSERT_EQ(n, N + 1);
	ASSERT_EQ(session->state, SESSION_OPEN);
	trainer_close(&trainers[0]);
}

/* However many its trainer has room for again: others have their turn. */
TEST(packets_that_have_waited_go_a_few_in_a_turn)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer trainers[2];
	struct session *session;
	unsigned left, n;

	open_two(door, trainers);
	session = list_first(&door->control->sessions, struct session, link);
	fill(door, &trainers[0]);
	for (left = session->outbox.n; left; left -= n) {
		(void)trainer_read_all(&trainers[0]);
		ASSERT_OK(loop_turn(door->loop, 0));
		n = left - session->outbox.n;
		ASSERT_INT(n, >, 0);
		ASSERT_INT(n, <=, 16);
	}
	for (uint32_t i = 0; i < 2; i++)
		trainer_close(&trainers[i]);
}
