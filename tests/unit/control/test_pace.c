/*
 * The pace of packets: what it comes to, in virtual time; and at a door, which packets wait for it, and that entries do not.
 */
#include "control/pace.h"
#include "control/ring.h"
#include "control/session.h"
#include "door.h"
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define MSEC NSEC_PER_MSEC
#define NOW  (1000 * NSEC_PER_SEC)
#define HOUR (3600 * NSEC_PER_SEC)

/* -- In virtual time ---------------------------------------------------------------------------------------------- */

/* Users who take packets of cost_ns whenever they may, until end_ns. Returns what all have used of the thread. */
static uint64_t play(struct pace *users, size_t n_users, uint64_t cost_ns, uint64_t end_ns)
{
	uint64_t used_ns = 0;

	for (uint64_t now_ns = NOW, i = 0; now_ns < end_ns; i++) {
		struct pace *pace = &users[i % n_users];

		if (pace_holds(pace, now_ns)) {
			now_ns += cost_ns / 10;
			continue;
		}
		now_ns += cost_ns;
		used_ns += cost_ns;
		pace_charge(pace, cost_ns, now_ns);
	}
	return used_ns;
}

TEST(users_have_one_part_of_the_time_after_a_burst_each)
{
	const uint64_t seconds_ns = 20 * NSEC_PER_SEC;

	for (size_t n = 1; n <= 4; n++) {
		struct paces paces = { 0 };
		struct pace users[4] = { { .paces = &paces },
					 { .paces = &paces },
					 { .paces = &paces },
					 { .paces = &paces } };
		uint64_t used_ns = play(users, n, MSEC / 4, NOW + seconds_ns);

		/* The bursts, what is earned meanwhile, and the part. */
		ASSERT_TRUE(used_ns >= n * PACE_BURST_NS / PACE_OWN_PARTS);
		ASSERT_TRUE(used_ns <= n * 2 * PACE_BURST_NS / PACE_OWN_PARTS +
					       seconds_ns / PACE_PARTS + n * MSEC);
		ASSERT_TRUE(used_ns >= seconds_ns / PACE_PARTS * 9 / 10);
	}
}

TEST(a_user_with_little_to_ask_waits_for_nobody)
{
	struct paces paces = { .paid_ns = NOW + HOUR };
	struct pace pace = { .paces = &paces };

	for (uint64_t now_ns = NOW; now_ns < NOW + 100 * NSEC_PER_SEC; now_ns += 20 * MSEC) {
		ASSERT_TRUE(!pace_holds(&pace, now_ns));
		pace_charge(&pace, MSEC, now_ns);
	}
	ASSERT_EQ(paces.paid_ns, NOW + HOUR);
}

TEST(a_rest_earns_a_burst_and_no_more)
{
	struct paces paces = { 0 };
	struct pace pace = { .paces = &paces, .paid_ns = NOW };

	pace_charge(&pace, MSEC, NOW + HOUR);
	ASSERT_EQ(pace.paid_ns, NOW + HOUR - PACE_BURST_NS + PACE_OWN_PARTS * MSEC);
	/* Not long after the machine has started. */
	pace.paid_ns = 0;
	pace_charge(&pace, MSEC, MSEC);
	ASSERT_EQ(pace.paid_ns, PACE_OWN_PARTS * MSEC);
	/* Nor is a debt larger than that. */
	pace_charge(&pace, HOUR, NOW);
	ASSERT_EQ(pace.paid_ns, NOW + PACE_BURST_NS);
}

TEST(others_are_who_had_rounds_lately_and_is_neither)
{
	struct pace_jobs jobs = { 0 };

	ASSERT_TRUE(!pace_jobs_others(&jobs, 1, 2, NOW));
	pace_jobs_note(&jobs, 1, NOW);
	pace_jobs_note(&jobs, 2, NOW);
	ASSERT_TRUE(!pace_jobs_others(&jobs, 1, 2, NOW));
	ASSERT_TRUE(pace_jobs_others(&jobs, 1, 3, NOW));
	ASSERT_TRUE(!pace_jobs_others(&jobs, 1, 3, NOW + PACE_BUSY_NS));
	/* However often the two come. */
	pace_jobs_note(&jobs, 3, NOW);
	for (int i = 0; i < 100; i++)
		pace_jobs_note(&jobs, 1 + i % 2, NOW + PACE_BUSY_NS / 2);
	ASSERT_TRUE(pace_jobs_others(&jobs, 1, 2, NOW + PACE_BUSY_NS / 2));
	/* However many others there are. */
	for (uint64_t job = 4; job < 100; job++)
		pace_jobs_note(&jobs, job, NOW);
	ASSERT_TRUE(pace_jobs_others(&jobs, 98, 99, NOW));
}

TEST(a_pace_lives_until_nobody_has_it_and_its_burst_is_earned_again)
{
	struct paces paces;
	struct pace *one, *other;

	paces_init(&paces, NULL, NULL);
	one = pace_get(&paces, 7);
	other = pace_get(&paces, 8);
	ASSERT_TRUE(one && other && one != other);
	ASSERT_TRUE(pace_get(&paces, 7) == one);
	ASSERT_TRUE(!pace_put(one, NOW));
	one->paid_ns = NOW;
	(void)pace_put(one, NOW);
	/* Nobody has it. */
	(void)pace_put(pace_get(&paces, 9), NOW + PACE_BURST_NS - 1);
	ASSERT_EQ(paces.map.n_entries, 2);
	ASSERT_TRUE(pace_get(&paces, 7) == one && one->paid_ns == NOW);
	/* One who is back is not forgotten when others go. */
	(void)pace_put(other, NOW + PACE_BURST_NS);
	ASSERT_EQ(paces.map.n_entries, 1);
	(void)pace_put(one, NOW + PACE_BURST_NS);
	ASSERT_EQ(paces.map.n_entries, 0);
	one = pace_get(&paces, 7);
	one->paid_ns = NOW + HOUR;
	(void)pace_put(one, NOW);
	(void)pace_put(NULL, NOW);
	paces_done(&paces);
	ASSERT_TRUE(!paces.map.n_entries && !paces.map.buckets);
}

/* -- At a door ---------------------------------------------------------------------------------------------------- */

static struct pace *only_pace(struct door *door)
{
	return container_of(map_first(&door->control->paces.map), struct pace, entry);
}

/* So long packets of the user wait. */
static void hold(struct door *door, uint64_t until_ns)
{
	only_pace(door)->paid_ns = door->control->paces.paid_ns = until_ns;
}

static bool is_charged(struct trainer *trainer)
{
	struct pace *pace = only_pace(trainer->door);

	pace->paid_ns = 0;
	ASSERT_EQ(trainer_answer(trainer, trainer_send_cancel(trainer, 1, 1), NULL), 0);
	return pace->paid_ns != 0;
}

TEST(requests_are_charged_while_other_jobs_have_rounds)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer trainers[2];
	struct pace_jobs *jobs = &door->control->pace_jobs;

	for (int i = 0; i < 2; i++) {
		trainer_open(&trainers[i], door);
		ASSERT_EQ(trainer_join(&trainers[i], i ? "other" : "job", 0, 1, NULL), 0);
	}
	/* For ever, as far as the test is concerned. */
	pace_jobs_note(jobs, ring_job_flow(getuid(), "job"), clock_now_ns() + HOUR);
	ASSERT_TRUE(!is_charged(&trainers[0]));
	ASSERT_TRUE(is_charged(&trainers[1]));
	*jobs = (struct pace_jobs){ 0 };
	ASSERT_TRUE(!is_charged(&trainers[1]));
	for (int i = 0; i < 2; i++)
		trainer_close(&trainers[i]);
	DOOR_UNTIL(door, !control_n_sessions(door->control));
}

TEST(packets_wait_until_their_user_is_not_behind_and_entries_do_not)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);
	struct trainer trainers[2];
	uint64_t id, paid_ns;
	void *data;
	int fd = memory_new(65536, &data);
	uint32_t slot;

	for (int i = 0; i < 2; i++)
		trainer_open(&trainers[i], door);
	ASSERT_EQ(trainer_join(&trainers[0], "job", 0, 1, NULL), 0);
	ASSERT_EQ(trainer_share(&trainers[0], 1, fd, 65536, NULL), 0);
	ASSERT_EQ(trainer_declare(&trainers[0], 1, "tensor", DTYPE_FLOAT32, 100, NULL), 0);
	paid_ns = clock_now_ns() + 100 * MSEC;
	hold(door, paid_ns);
	id = trainer_send_cancel(&trainers[0], 1, 1);
	(void)trainer_send_cancel(&trainers[1], 1, 1);
	slot = trainer_post(&trainers[0], &entry);
	ASSERT_EQ(trainer_wait(&trainers[0], slot, NULL), 0);
	/* One that hangs up while its packets wait. */
	trainer_close(&trainers[1]);
	ASSERT_EQ(trainer_answer(&trainers[0], id, NULL), 0);
	ASSERT_TRUE(clock_now_ns() >= paid_ns);
	/* From then on none waits. */
	ASSERT_EQ(trainer_declare(&trainers[0], 2, "another", DTYPE_FLOAT32, 100, NULL), 0);
	trainer_close(&trainers[0]);
	DOOR_UNTIL(door, !control_n_sessions(door->control));
	(void)munmap(data, 65536);
	(void)fd_close(fd);
}

/* More packets than one turn takes, and the last of them is what the entry needs. */
TEST(an_entry_that_needs_a_packet_waits_for_the_pace_as_it_does)
{
	enum { N = 60 };
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct shm_entry entry = trainer_entry(N, 1, 1, 1, 100);
	struct trainer trainer;
	char name[32];
	uint64_t paid_ns;
	void *data;
	int fd = memory_new(65536, &data);
	uint32_t slot;

	trainer_open(&trainer, door);
	ASSERT_EQ(trainer_join(&trainer, "job", 0, 1, NULL), 0);
	ASSERT_EQ(trainer_share(&trainer, 1, fd, 65536, NULL), 0);
	for (uint32_t i = 1; i <= N; i++) {
		(void)snprintf(name, sizeof(name), "x%u", i);
		(void)trainer_send_declare(&trainer, i, name, DTYPE_FLOAT32, 100);
	}
	paid_ns = clock_now_ns() + 100 * MSEC;
	hold(door, paid_ns);
	slot = trainer_post(&trainer, &entry);
	ASSERT_EQ(trainer_wait(&trainer, slot, NULL), 0);
	ASSERT_TRUE(clock_now_ns() >= paid_ns);
	/* When nobody is behind it does not. */
	entry.tensor = N + 1;
	(void)trainer_send_declare(&trainer, N + 1, "last", DTYPE_FLOAT32, 100);
	slot = trainer_post(&trainer, &entry);
	ASSERT_EQ(trainer_wait(&trainer, slot, NULL), 0);
	trainer_close(&trainer);
	DOOR_UNTIL(door, !control_n_sessions(door->control));
	(void)munmap(data, 65536);
	(void)fd_close(fd);
}

TEST(connections_and_hang_ups_are_charged_and_none_of_it_is_forgotten)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer trainers[2];
	uint64_t paid_ns;

	trainer_open(&trainers[0], door);
	pace_jobs_note(&door->control->pace_jobs, 1, clock_now_ns() + HOUR);
	paid_ns = only_pace(door)->paid_ns;
	trainer_connect(&trainers[1], door);
	DOOR_UNTIL(door, control_n_sessions(door->control) == 2);
	ASSERT_TRUE(only_pace(door)->paid_ns > paid_ns);
	paid_ns = only_pace(door)->paid_ns;
	trainer_close(&trainers[1]);
	DOOR_UNTIL(door, control_n_sessions(door->control) == 1);
	ASSERT_TRUE(only_pace(door)->paid_ns > paid_ns);
	/* With the last session none of it is forgotten. */
	paid_ns = only_pace(door)->paid_ns;
	trainer_close(&trainers[0]);
	DOOR_UNTIL(door, !control_n_sessions(door->control));
	ASSERT_TRUE(only_pace(door)->paid_ns > paid_ns);
}

TEST(connections_behind_one_of_a_user_who_is_behind_wait_for_the_pace)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer trainers[3];
	uint64_t paid_ns;

	trainer_open(&trainers[0], door);
	paid_ns = clock_now_ns() + 100 * MSEC;
	hold(door, paid_ns);
	trainer_connect(&trainers[1], door);
	trainer_connect(&trainers[2], door);
	DOOR_UNTIL(door, control_n_sessions(door->control) == 2);
	ASSERT_TRUE(!door->control->listener.loop);
	DOOR_UNTIL(door, control_n_sessions(door->control) == 3);
	ASSERT_TRUE(clock_now_ns() >= paid_ns);
	/* Who is not behind makes nobody wait. */
	hold(door, 0);
	for (int i = 0; i < 3; i++)
		trainer_close(&trainers[i]);
	trainer_open(&trainers[0], door);
	ASSERT_TRUE(door->control->listener.loop);
	trainer_close(&trainers[0]);
	DOOR_UNTIL(door, !control_n_sessions(door->control));
}

/* A trainer is closed by the daemon while its packets wait. */
TEST(a_door_may_close_on_who_waits)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer trainer;

	trainer_open(&trainer, door);
	hold(door, clock_now_ns() + HOUR);
	(void)trainer_send_cancel(&trainer, 1, 1);
	DOOR_UNTIL(door, !list_empty(&door->control->paces.waiting));
	control_close(door->control);
	DOOR_UNTIL(door, !control_n_sessions(door->control));
	trainer_close(&trainer);
}
