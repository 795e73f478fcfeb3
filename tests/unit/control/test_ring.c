/*
 * The ring of a session, with trainers by hand: entries, completions, wake-ups, and entries that
 * lie.
 */
#include "base/loop/porter.h"
#include "base/memory/holes.h"
#include "door.h"
#include "proto/pack.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#define LEN 65536

/* A clock of the test's: not 0: what it shows, and by how much it goes on with each look. */
static uint64_t clock_ns, look_ns;

int __real_clock_gettime(clockid_t clock, struct timespec *ret);
int __wrap_clock_gettime(clockid_t clock, struct timespec *ret);

int __wrap_clock_gettime(clockid_t clock, struct timespec *ret)
{
	if (!clock_ns)
		return __real_clock_gettime(clock, ret);
	*ret = (struct timespec){ (time_t)(clock_ns / NSEC_PER_SEC),
				  (long)(clock_ns % NSEC_PER_SEC) };
	clock_ns += look_ns;
	return 0;
}

/* Each look at the clock takes so long from now on. */
static void clock_go(uint64_t each_ns)
{
	clock_ns = clock_now_ns();
	look_ns = each_ns;
}

static void clock_end(void)
{
	clock_ns = 0;
}

/* What sends fail with, or 0; and how many have. */
static int send_error;
static unsigned n_unsent;

ssize_t __real_send(int fd, const void *data, size_t len, int flags);
ssize_t __wrap_send(int fd, const void *data, size_t len, int flags);

ssize_t __wrap_send(int fd, const void *data, size_t len, int flags)
{
	if (!send_error)
		return __real_send(fd, data, len, flags);
	n_unsent++;
	errno = send_error;
	return -1;
}

/* A seal that the porter is asked for later. */
static struct {
	bool holds;
	unsigned n;
	struct porter_errand *errand;
	int fd;
} seals;

int __real_porter_seal(struct porter_errand *errand, int fd);
int __wrap_porter_seal(struct porter_errand *errand, int fd);

int __wrap_porter_seal(struct porter_errand *errand, int fd)
{
	seals.n++;
	if (!seals.holds)
		return __real_porter_seal(errand, fd);
	seals.errand = errand;
	seals.fd = fd;
	return 0;
}

static void seals_go_on(void)
{
	seals.holds = false;
	ASSERT_OK(__real_porter_seal(seals.errand, seals.fd));
}

/* Ranks with a buffer 1 each, and a tensor 1 of 100 float32. */
struct ring {
	struct door *door;
	uint32_t size;
	struct trainer trainers[4];
	int fds[4];
	float *data[4];
};

static void ring_open_with(struct ring *ring, uint32_t size, const struct door_options *options)
{
	uint64_t joins[4], declares[4];

	*ring = (struct ring){ .door = door_new(options), .size = size };
	for (uint32_t i = 0; i < size; i++) {
		void *data;

		trainer_open(&ring->trainers[i], ring->door);
		ring->fds[i] = memory_new(LEN, &data);
		ring->data[i] = data;
		joins[i] = trainer_send_join(&ring->trainers[i], "job", i, size, 60000);
	}
	for (uint32_t i = 0; i < size; i++) {
		ASSERT_EQ(trainer_answer(&ring->trainers[i], joins[i], NULL), 0);
		ASSERT_EQ(trainer_share(&ring->trainers[i], 1, ring->fds[i], LEN, NULL), 0);
		declares[i] =
			trainer_send_declare(&ring->trainers[i], 1, "tensor", DTYPE_FLOAT32, 100);
	}
	for (uint32_t i = 0; i < size; i++)
		ASSERT_EQ(trainer_answer(&ring->trainers[i], declares[i], NULL), 0);
}

static void ring_open(struct ring *ring, uint32_t size)
{
	ring_open_with(ring, size, NULL);
}

static void ring_close(struct ring *ring)
{
	for (uint32_t i = 0; i < ring->size; i++) {
		trainer_close(&ring->trainers[i]);
		(void)munmap(ring->data[i], LEN);
		(void)fd_close(ring->fds[i]);
	}
	DOOR_UNTIL(ring->door, !control_n_sessions(ring->door->control));
	ASSERT_EQ(control_pending(ring->door->control), 0);
	door_free(ring->door);
}

/* Everything still works. */
static void expect_sum(struct ring *ring, uint64_t round)
{
	struct shm_entry entry = trainer_entry(1, round, 1, 1, 100);
	uint32_t slots[4];

	entry.output_offset = 4096;
	for (uint32_t i = 0; i < ring->size; i++) {
		ring->data[i][99] = (float)(i + 1);
		ring->data[i][4096 / 4 + 99] = 0;
		slots[i] = trainer_post(&ring->trainers[i], &entry);
	}
	for (uint32_t i = 0; i < ring->size; i++) {
		ASSERT_EQ(trainer_wait(&ring->trainers[i], slots[i], NULL), 0);
		ASSERT_EQ(ring->data[i][4096 / 4 + 99], ring->size * (ring->size + 1) / 2);
	}
}

TEST(sums)
{
	struct ring ring;

	for (uint32_t size = 1; size <= 4; size++) {
		ring_open(&ring, size);
		for (uint64_t round = 1; round < 20; round++)
			expect_sum(&ring, round);
		ring_close(&ring);
	}
}

TEST(completion_wakes_who_sleeps_and_nobody_else)
{
	struct ring ring;
	struct shm_header *header;
	struct pollfd wake;
	uint64_t value;
	uint32_t slot;
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);

	ring_open(&ring, 1);
	header = ring.trainers[0].shm;
	wake = (struct pollfd){ .fd = ring.trainers[0].wake, .events = POLLIN };

	slot = trainer_post(&ring.trainers[0], &entry);
	ASSERT_EQ(trainer_wait(&ring.trainers[0], slot, NULL), 0);
	ASSERT_EQ(poll(&wake, 1, 0), 0);
	ASSERT_EQ(header->completions, 1);

	atomic_store(&header->trainer_armed, 1);
	entry.round = 2;
	slot = trainer_post(&ring.trainers[0], &entry);
	ASSERT_EQ(trainer_wait(&ring.trainers[0], slot, NULL), 0);
	ASSERT_EQ(poll(&wake, 1, 0), 1);
	ASSERT_EQ(header->trainer_armed, 0);
	ASSERT_EQ(header->completions, 2);
	ASSERT_EQ(read(wake.fd, &value, sizeof(value)), sizeof(value));
	ASSERT_EQ(poll(&wake, 1, 0), 0);
	/* Nothing goes the other way: least of all descriptors, which would have to be closed. */
	ASSERT_TRUE(send(wake.fd, &value, sizeof(value), MSG_NOSIGNAL) < 0 && errno == EPIPE);
	ring_close(&ring);
}

/* The order is told to all; what is said in brief, only to those who know to read it. */
TEST(completions_are_told_in_their_order)
{
	for (unsigned brief = 0; brief < 2; brief++) {
		const struct door_options options = { .features =
							      brief ? CONTROL_FEATURE_ORDER : 0 };
		struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);
		struct trainer *trainer;
		struct shm_header *header;
		struct ring ring;

		ring_open_with(&ring, 1, &options);
		trainer = &ring.trainers[0];
		header = trainer->shm;
		for (uint64_t round = 1; round < 2 * SHM_ORDER + 3; round++) {
			/* Not the slot that the number of the completion would be. */
			uint32_t slot = trainer->next_slot = (uint32_t)(round * 7 % SHM_SLOTS);
			struct shm_slot *s = &shm_slots(trainer->shm)[slot];

			s->n_rows = 77;
			(void)stpcpy(s->text, "what was there before");
			entry.round = round;
			ASSERT_EQ(trainer_post(trainer, &entry), slot);
			ASSERT_EQ(trainer_wait(trainer, slot, NULL), 0);
			ASSERT_EQ(header->completions, round);
			ASSERT_EQ(header->order[(round - 1) % SHM_ORDER], slot);
			ASSERT_EQ(s->text[0], 0);
			ASSERT_EQ(s->brief, brief);
			ASSERT_EQ(s->n_rows, brief ? 77 : 1);
			ASSERT_EQ(s->brief_rows, 1);
		}
		/* What failed says why, and all. */
		entry.round = 1;
		trainer->next_slot = 5;
		ASSERT_EQ(trainer_post(trainer, &entry), 5);
		ASSERT_TRUE(trainer_wait(trainer, 5, NULL) < 0);
		ASSERT_EQ(shm_slots(trainer->shm)[5].n_rows, 0);
		ring_close(&ring);
	}
}

/* A trainer may sleep for one slot, and for so many completions. */
TEST(completion_wakes_who_sleeps_for_it)
{
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);
	struct trainer *trainer;
	struct shm_header *header;
	struct ring ring;

	ring_open(&ring, 1);
	trainer = &ring.trainers[0];
	header = trainer->shm;
	atomic_store(&shm_slots(trainer->shm)[100].state, SHM_PENDING);
	for (uint32_t kind = 0; kind < 4; kind++) {
		/* The third that is completed, the third of all, a slot that there is not, any. */
		static const uint32_t slots[] = { 0, 101, SHM_SLOTS + 1, 0 };
		uint32_t first = trainer->next_slot;
		uint32_t enough = (uint32_t)header->completions + (kind == 1 ? 3 : 100);

		for (uint32_t i = 0; i < 3; i++) {
			if (!i) {
				atomic_store(&header->trainer_enough, enough);
				atomic_store(&header->trainer_slot, kind ? slots[kind] : first + 3);
				atomic_store(&shm_slots(trainer->shm)[first + 2].state,
					     SHM_PENDING);
				atomic_store(&header->trainer_armed, SHM_ARMED);
			}
			ASSERT_EQ(trainer_wait(trainer, trainer_post(trainer, &entry), NULL), 0);
			entry.round++;
			if (i == 1)
				ASSERT_EQ(header->trainer_armed, kind < 2 ? SHM_ARMED : SHM_AWAKE);
		}
		DOOR_UNTIL(ring.door, header->trainer_armed == SHM_AWAKE);
	}
	ring_close(&ring);
}

static void *futex_sleeper(void *user)
{
	struct shm_header *header = user;

	/* Without a limit: a wake-up that is lost is a test that hangs. */
	while (atomic_load(&header->trainer_armed) == SHM_ARMED_FUTEX)
		(void)syscall(SYS_futex, &header->trainer_armed, FUTEX_WAIT, SHM_ARMED_FUTEX, NULL,
			      NULL, 0);
	ASSERT_EQ(atomic_load(&header->completions), 1);
	return NULL;
}

/* Through a mapping of its own, as it has in a process of its own. */
TEST(completion_wakes_who_sleeps_on_the_word)
{
	struct ring ring;
	struct shm_header *header;
	struct pollfd wake;
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);
	pthread_t thread;
	uint32_t slot;

	ring_open(&ring, 1);
	header = ring.trainers[0].shm;
	wake = (struct pollfd){ .fd = ring.trainers[0].wake, .events = POLLIN };
	atomic_store(&header->trainer_armed, SHM_ARMED_FUTEX);
	ASSERT_OK(pthread_create(&thread, NULL, futex_sleeper, header));
	slot = trainer_post(&ring.trainers[0], &entry);
	ASSERT_EQ(trainer_wait(&ring.trainers[0], slot, NULL), 0);
	ASSERT_OK(pthread_join(thread, NULL));
	ASSERT_EQ(header->trainer_armed, SHM_AWAKE);
	/* One way is enough; and no other number is one. */
	ASSERT_EQ(poll(&wake, 1, 0), 0);
	atomic_store(&header->trainer_armed, 3);
	entry.round = 2;
	slot = trainer_post(&ring.trainers[0], &entry);
	ASSERT_EQ(trainer_wait(&ring.trainers[0], slot, NULL), 0);
	ASSERT_EQ(header->trainer_armed, 3);
	ASSERT_EQ(poll(&wake, 1, 0), 0);
	ring_close(&ring);
}

/* While the daemon looks by itself it needs no bell; before it sleeps it asks for one. */
TEST(ring_is_looked_at_before_the_daemon_sleeps)
{
	struct ring ring;
	struct shm_header *header;

	ring_open_with(&ring, 2, &(struct door_options){ .spin_ns = NSEC_PER_MSEC });
	header = ring.trainers[0].shm;
	for (uint64_t round = 1; round < 100; round++) {
		expect_sum(&ring, round);
		ASSERT_EQ(header->daemon_armed, 0);
		if (round % 10)
			continue;
		/* It finds nothing, and sleeps. */
		while (!header->daemon_armed)
			ASSERT_OK(loop_turn(ring.door->loop, 5));
	}
	trainer_close(&ring.trainers[1]);
	ASSERT_OK(loop_turn(ring.door->loop, 5));
	ring_close(&ring);
}

/* Nor does it while it lingers. */
TEST(ring_is_looked_at_by_a_daemon_that_lingers)
{
	struct ring ring;
	struct shm_header *header;

	ring_open(&ring, 2);
	header = ring.trainers[0].shm;
	for (uint64_t round = 1; round < 4; round++) {
		/* Under load it may lose its processor, and does not linger for a while. */
		while (!loop_lingers(ring.door->loop)) {
			if (!loop_linger(ring.door->loop, clock_now_ns(), NSEC_PER_MSEC))
				ASSERT_OK(loop_turn(ring.door->loop, 5));
		}
		expect_sum(&ring, round);
		/* Before it sleeps it wants to be woken. */
		while (loop_lingers(ring.door->loop) || !header->daemon_armed)
			ASSERT_OK(loop_turn(ring.door->loop, 5));
	}
	ring_close(&ring);
}

/* A job with much in many rings does not keep another waiting until all of that has been taken. */
TEST_FULL_TIER(jobs_take_turns, "turns go by time on the control thread")
{
	enum { N = 1000, ELEMENTS = 5000, RANKS = 3, MODEST = RANKS };
	struct shm_entry entry;
	struct shm_header *greedy;
	struct trainer *modest;
	struct ring ring;
	uint64_t declares[RANKS];
	unsigned n_good = 0;
	void *data;

	ring_open(&ring, RANKS);
	for (uint32_t i = 0; i < RANKS; i++)
		declares[i] = trainer_send_declare(&ring.trainers[i], 2, "large", DTYPE_FLOAT32,
						   ELEMENTS);
	for (uint32_t i = 0; i < RANKS; i++)
		ASSERT_EQ(trainer_answer(&ring.trainers[i], declares[i], NULL), 0);
	modest = &ring.trainers[MODEST];
	trainer_open(modest, ring.door);
	ASSERT_EQ(trainer_join(modest, "modest", 0, 1, NULL), 0);
	ring.fds[MODEST] = memory_new(LEN, &data);
	ring.data[MODEST] = data;
	ring.size++;
	ASSERT_EQ(trainer_share(modest, 1, ring.fds[MODEST], LEN, NULL), 0);
	ASSERT_EQ(trainer_declare(modest, 1, "tensor", DTYPE_FLOAT32, 100, NULL), 0);
	for (uint32_t i = 0; i < RANKS; i++)
		for (uint64_t round = 1; round <= N; round++) {
			entry = trainer_entry(2, round, 1, 1, ELEMENTS);
			entry.output_offset = ELEMENTS * sizeof(float);
			entry.priority = INT32_MAX;
			(void)trainer_post(&ring.trainers[i], &entry);
		}
	greedy = ring.trainers[0].shm;
	/* Then nobody rings, from the first round on. */
	(void)loop_linger(ring.door->loop, clock_now_ns(), NSEC_PER_SEC);
	/*
	 * It waits for what was begun when it came, and for one turn of the other: or for longer, where the thread that makes its
	 * sum waits for a processor.
	 */
	for (uint64_t round = 1; round <= 5; round++) {
		uint64_t before = atomic_load(&greedy->completions);
		uint32_t slot;

		if (before == N)
			break;
		entry = trainer_entry(1, round, 1, 1, 100);
		slot = trainer_post(modest, &entry);
		ASSERT_EQ(trainer_wait(modest, slot, NULL), 0);
		n_good += atomic_load(&greedy->completions) - before < 200;
	}
	ASSERT_TRUE(n_good > 0);
	DOOR_UNTIL(ring.door, atomic_load(&greedy->completions) == N);
	ring_close(&ring);
}

/* As many as are taken in one go, however long that takes. */
enum { BATCH = 16 };

struct sleeper {
	struct trainer *trainer;
	uint64_t completions; /* when it was woken */
};

static void *sleeper_run(void *user)
{
	struct sleeper *sleeper = user;
	struct shm_header *header = sleeper->trainer->shm;
	struct pollfd wake = { .fd = sleeper->trainer->wake, .events = POLLIN };

	ASSERT_EQ(poll(&wake, 1, -1), 1);
	sleeper->completions = atomic_load(&header->completions);
	return NULL;
}

/* A trainer that the first of many completions wakes takes the processor from the others, and has to sleep again. */
TEST(what_completes_together_wakes_once_behind_the_last)
{
	struct ring ring;
	struct shm_header *header;
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);
	struct sleeper sleeper = { .trainer = &ring.trainers[0] };
	pthread_t thread;
	uint32_t slot = 0;
	uint64_t value;

	ring_open(&ring, 1);
	header = ring.trainers[0].shm;
	for (unsigned i = 0; i < BATCH; i++, entry.round++)
		slot = trainer_post(&ring.trainers[0], &entry);
	atomic_store(&header->trainer_armed, 1);
	ASSERT_OK(pthread_create(&thread, NULL, sleeper_run, &sleeper));
	clock_go(0);
	ASSERT_EQ(trainer_wait(&ring.trainers[0], slot, NULL), 0);
	clock_end();
	ASSERT_OK(pthread_join(thread, NULL));
	ASSERT_EQ(sleeper.completions, BATCH);
	ASSERT_EQ(read(sleeper.trainer->wake, &value, sizeof(value)), sizeof(value));
	ring_close(&ring);
}

/* A trainer may do to its descriptors what it likes: the daemon never sleeps in a write. */
TEST(wake_up_that_is_full_blocks_nobody)
{
	struct ring ring;
	struct shm_header *header;
	unsigned n = 0;
	uint64_t value;

	ring_open(&ring, 1);
	header = ring.trainers[0].shm;
	ASSERT_OK(fcntl(ring.trainers[0].wake, F_SETFL, 0));
	for (uint64_t round = 1; round < 100; round++) {
		atomic_store(&header->trainer_armed, 1);
		expect_sum(&ring, round);
	}
	/* What waits there is memory of the daemon's, and little. */
	while (recv(ring.trainers[0].wake, &value, sizeof(value), MSG_DONTWAIT) == sizeof(value))
		n++;
	ASSERT_TRUE(n && n < 32);
	ring_close(&ring);
}

/* Its trainer is not armed any more: no completion would wake it. */
TEST(wake_up_for_which_there_is_no_memory_comes_later)
{
	static const int errors[] = { ENOBUFS, ENOMEM };

	for (size_t i = 0; i < ARRAY_SIZE(errors); i++) {
		struct ring ring;
		struct pollfd wake;

		ring_open(&ring, 1);
		wake = (struct pollfd){ .fd = ring.trainers[0].wake, .events = POLLIN };
		atomic_store(&((struct shm_header *)ring.trainers[0].shm)->trainer_armed,
			     SHM_ARMED);
		n_unsent = 0;
		send_error = errors[i];
		expect_sum(&ring, 1);
		DOOR_UNTIL(ring.door, n_unsent >= 3);
		ASSERT_EQ(poll(&wake, 1, 0), 0);
		send_error = 0;
		DOOR_UNTIL(ring.door, poll(&wake, 1, 0) == 1);
		ring_close(&ring);
	}
}

TEST(doorbell_need_not_ring_while_the_daemon_is_awake)
{
	struct ring ring;
	struct shm_header *header;
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);
	uint32_t slots[SHM_SLOTS];

	ring_open(&ring, 1);
	header = ring.trainers[0].shm;
	ASSERT_EQ(header->daemon_armed, 1);
	/* Far more than a turn takes: the ring is full to the last entry. */
	for (uint32_t i = 0; i < SHM_ENTRIES; i++) {
		entry.round = i + 1;
		slots[i] = trainer_post(&ring.trainers[0], &entry);
		ASSERT_EQ(header->daemon_armed, 0);
	}
	for (uint32_t i = 0; i < SHM_ENTRIES; i++)
		ASSERT_EQ(trainer_wait(&ring.trainers[0], slots[i], NULL), 0);
	DOOR_UNTIL(ring.door, header->daemon_armed);
	ASSERT_EQ(header->completions, SHM_ENTRIES);
	expect_sum(&ring, SHM_ENTRIES + 1);
	ring_close(&ring);
}

TEST(entries_may_overtake_the_packets_that_explain_them)
{
	struct ring ring;
	struct shm_entry entry = trainer_entry(2, 1, 2, 2, 50);
	struct trainer *trainer = &ring.trainers[0];
	uint64_t declare, share;
	uint32_t slot;

	ring_open(&ring, 1);
	/* Posted last, and the doorbell's turn may come first. */
	declare = trainer_send_declare(trainer, 2, "late", DTYPE_FLOAT32, 50);
	share = trainer_send_share(trainer, 2, ring.fds[0], LEN);
	slot = trainer_post(trainer, &entry);
	ASSERT_EQ(trainer_wait(trainer, slot, NULL), 0);
	ASSERT_EQ(trainer_answer(trainer, declare, NULL), 0);
	ASSERT_EQ(trainer_answer(trainer, share, NULL), 0);
	ring_close(&ring);
}

/* In sequence, as libraries give them, or any others. */
TEST(tensors_have_whatever_numbers)
{
	static const uint32_t odd[] = { 63, 64, 66, 5000, 1000000, UINT32_MAX };
	struct ring ring;
	struct trainer *trainer = &ring.trainers[0];
	struct shm_entry entries[200 + ARRAY_SIZE(odd)];
	uint32_t slots[ARRAY_SIZE(entries)];
	size_t n = 0;

	ring_open_with(&ring, 1, &(struct door_options){ .max_tensors = 300 });
	for (uint32_t i = 0; i < ARRAY_SIZE(entries); i++) {
		uint32_t number = i < ARRAY_SIZE(odd) ? odd[i] : 2 + i - (uint32_t)ARRAY_SIZE(odd);
		char name[16];

		if (i >= ARRAY_SIZE(odd) && (number == 63 || number == 64 || number == 66))
			continue;
		(void)snprintf(name, sizeof(name), "t%u", number);
		ASSERT_EQ(trainer_declare(trainer, number, name, DTYPE_FLOAT32, 1, NULL), 0);
		ASSERT_EQ(trainer_declare(trainer, number, name, DTYPE_FLOAT32, 1, NULL), -EEXIST);
		entries[n] = trainer_entry(number, 1, 1, 1, 1);
		entries[n].input_offset = 4 * n;
		entries[n].output_offset = LEN / 2 + 4 * n;
		ring.data[0][n] = (float)number;
		n++;
	}
	for (uint64_t round = 1; round <= 3; round++) {
		memset((char *)ring.data[0] + LEN / 2, 0, LEN / 2);
		for (size_t i = 0; i < n; i++) {
			entries[i].round = round;
			slots[i] = trainer_post(trainer, &entries[i]);
		}
		for (size_t i = 0; i < n; i++) {
			ASSERT_EQ(trainer_wait(trainer, slots[i], NULL), 0);
			ASSERT_TRUE(ring.data[0][LEN / 8 + i] == ring.data[0][i]);
		}
	}
	entries[0] = trainer_entry(4999, 1, 1, 1, 1);
	ASSERT_EQ(trainer_wait(trainer, trainer_post(trainer, &entries[0]), NULL), -EINVAL);
	expect_sum(&ring, 1);
	ring_close(&ring);
}

/* -- Wrong entries: the request fails, with words ------------------------------------------------------------------ */

static void expect_refused(struct ring *ring, uint64_t *round, const struct shm_entry *given,
			   int status, const char *words)
{
	struct shm_entry entry = *given;
	char text[ERROR_TEXT_MAX + 1];

	entry.round = ++*round;
	ASSERT_EQ(trainer_wait(&ring->trainers[0], trainer_post(&ring->trainers[0], &entry), text),
		  status);
	ASSERT_CONTAINS(text, words);
}

/* As a good entry, but for one field. */
#define REFUSED(field, value, words)                                   \
	do {                                                           \
		entry = good;                                          \
		entry.field = (value);                                 \
		expect_refused(&ring, &round, &entry, -EINVAL, words); \
	} while (0)

TEST(wrong_entries_fail_with_words)
{
	struct ring ring;
	struct shm_entry good, entry;
	uint64_t round = 0;

	ring_open(&ring, 1);
	good = trainer_entry(1, 0, 1, 1, 100);
	REFUSED(input_buffer, 9, "buffer 9");
	REFUSED(input_buffer, 0, "needs an input");
	REFUSED(output_buffer, UINT32_MAX, "buffer 4294967295");
	REFUSED(output_buffer, 0, "needs an output");
	REFUSED(input_offset, LEN - 399, "not inside");
	REFUSED(input_offset, LEN - 396, "not inside");
	REFUSED(input_offset, LEN, "not inside");
	REFUSED(input_offset, UINT64_MAX - 3, "not inside");
	REFUSED(input_offset, 2, "not aligned");
	REFUSED(output_offset, 4097, "not aligned");
	REFUSED(output_offset, 1ull << 63, "not inside");
	REFUSED(input_count, 99, "needs 100");
	REFUSED(input_count, UINT64_MAX, "not inside");
	REFUSED(input_count, 1ull << 62, "not inside");
	REFUSED(output_count, 99, "room for 99");
	REFUSED(output_count, UINT64_MAX / 4 + 1, "not inside");
	REFUSED(output_offset, 4, "overlap");
	REFUSED(operation, 0, "no operation 0");
	REFUSED(operation, 255, "no operation 255");
	REFUSED(reduction, 0, "no reduction 0");
	REFUSED(reduction, 200, "no reduction 200");
	REFUSED(membership, 1, "flags");
	REFUSED(operation, OPERATION_BROADCAST, "has no reduction");
	expect_sum(&ring, ++round);
	ring_close(&ring);
}

/* It has bytes of its own type, and is aligned to that. */
TEST(narrower_inputs)
{
	struct ring ring;
	struct shm_entry good, entry;
	uint64_t round = 0;
	uint16_t *narrow;

	ring_open(&ring, 1);
	good = trainer_entry(1, 0, 1, 1, 100);
	good.output_offset = 4096;
	good.input_offset = LEN - 200;
	good.input_dtype = DTYPE_BFLOAT16;
	narrow = (uint16_t *)((char *)ring.data[0] + LEN - 200);
	narrow[0] = 0x3f80;
	narrow[99] = 0x4040;
	entry = good;
	entry.round = ++round;
	ASSERT_EQ(trainer_wait(&ring.trainers[0], trainer_post(&ring.trainers[0], &entry), NULL),
		  0);
	ASSERT_TRUE(ring.data[0][4096 / 4] == 1 && ring.data[0][4096 / 4 + 99] == 3);
	REFUSED(input_offset, LEN - 198, "not inside");
	REFUSED(input_offset, 1, "not aligned");
	REFUSED(input_offset, 4096 - 198, "overlap");
	REFUSED(input_count, UINT64_MAX / 2 + 1, "not inside");
	REFUSED(input_dtype, DTYPE_INT8, "an input of int8 for a tensor of float32");
	REFUSED(input_dtype, DTYPE_MAX_ + 1, "not inside");
	REFUSED(input_dtype, 0x100 + DTYPE_BFLOAT16, "not inside");
	REFUSED(operation, OPERATION_ACCUMULATE, "accumulate");
	good.input_offset = 0;
	REFUSED(input_dtype, DTYPE_MAX_ + 1, "an input of invalid");
	REFUSED(input_dtype, 0x100 + DTYPE_BFLOAT16, "an input of invalid");
	REFUSED(input_dtype, UINT32_MAX, "an input of invalid");
#undef REFUSED
	expect_sum(&ring, ++round);
	ring_close(&ring);
}

TEST(wrong_counts_fail_with_words)
{
	struct ring ring;
	struct shm_entry entry = trainer_entry(1, 0, 1, 1, 100);
	uint64_t *counts, round = 0;

	ring_open(&ring, 1);
	counts = (uint64_t *)&ring.data[0][8192 / 4];
	entry.operation = OPERATION_REDUCE_SCATTER;
	entry.counts_buffer = 7;
	expect_refused(&ring, &round, &entry, -EINVAL, "buffer 7");
	entry.counts_buffer = 1;
	entry.counts_offset = LEN - 4;
	expect_refused(&ring, &round, &entry, -EINVAL, "counts");
	entry.counts_offset = 8192;
	counts[0] = 101;
	expect_refused(&ring, &round, &entry, -EINVAL, "needs 101");
	entry.operation = OPERATION_ALL_TO_ALL;
	entry.reduction = 0;
	entry.output_offset = 4096;
	counts[0] = 100;
	counts[1] = UINT64_MAX;
	expect_refused(&ring, &round, &entry, -EINVAL, "room");
	counts[1] = 101;
	expect_refused(&ring, &round, &entry, -EINVAL, "room");
	counts[1] = 99;
	expect_refused(&ring, &round, &entry, -EINVAL, "expects 99");
	counts[1] = 100;
	entry.round = ++round;
	ASSERT_EQ(trainer_wait(&ring.trainers[0], trainer_post(&ring.trainers[0], &entry), NULL),
		  0);
	expect_sum(&ring, ++round);
	ring_close(&ring);
}

/* Each is fine by itself, and of the other the trainer has never heard. */
TEST(ordinals_that_differ_fail_with_words)
{
	struct ring ring;
	uint32_t slots[2];
	char text[ERROR_TEXT_MAX + 1];

	ring_open(&ring, 2);
	for (uint32_t i = 0; i < 2; i++) {
		struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);

		entry.output_offset = 4096;
		entry.ordinal = 7;
		if (i) {
			entry.tensor = 2;
			(void)trainer_send_declare(&ring.trainers[i], 2, "other", DTYPE_FLOAT32,
						   100);
		}
		slots[i] = trainer_post(&ring.trainers[i], &entry);
	}
	for (uint32_t i = 0; i < 2; i++) {
		ASSERT_EQ(trainer_wait(&ring.trainers[i], slots[i], text), -EILSEQ);
		ASSERT_CONTAINS(text,
				"number 7 rank 0 submitted tensor, round 1, and rank 1 other");
	}
	ring_close(&ring);
}

TEST(numbers_that_mean_nothing)
{
	struct ring ring;
	struct shm_entry entry = trainer_entry(9, 1, 1, 1, 100);
	struct trainer *trainer = &ring.trainers[0], outside;
	char text[ERROR_TEXT_MAX + 1];

	ring_open(&ring, 1);
	ASSERT_EQ(trainer_wait(trainer, trainer_post(trainer, &entry), text), -EINVAL);
	ASSERT_CONTAINS(text, "no tensor 9");
	trainer_open(&outside, ring.door);
	ASSERT_EQ(trainer_wait(&outside, trainer_post(&outside, &entry), text), -ENOTCONN);
	trainer_close(&outside);
	ASSERT_EQ(trainer_leave(trainer, NULL), 0);
	ASSERT_EQ(trainer_wait(trainer, trainer_post(trainer, &entry), text), -ECANCELED);
	ASSERT_CONTAINS(text, "left");
	ring_close(&ring);
}

/* -- Wrong rings: the session ends, the others go on ---------------------------------------------------------------- */

static void expect_cut_off(void (*spoil)(struct trainer *trainer))
{
	struct ring ring;
	struct trainer other;

	ring_open(&ring, 1);
	trainer_open(&other, ring.door);
	spoil(&ring.trainers[0]);
	trainer_expect_end(&ring.trainers[0]);
	ASSERT_EQ(trainer_join(&other, "other", 0, 1, NULL), 0);
	trainer_close(&other);
	ring_close(&ring);
}

static void post_wild_slot(struct trainer *trainer)
{
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);

	entry.slot = SHM_SLOTS;
	trainer_post_raw(trainer, &entry);
}

static void post_twice(struct trainer *trainer)
{
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);

	/* Waits for nobody's declaration but its own, so a tensor that somebody else has to declare is needed. */
	ASSERT_EQ(trainer_leave(trainer, NULL), 0);
	(void)trainer_send_join(trainer, "pair", 0, 2, 60000);
	trainer_post_raw(trainer, &entry);
	trainer_post_raw(trainer, &entry);
	entry.slot = UINT32_MAX;
	trainer_post_raw(trainer, &entry);
}

/* Nothing else is wrong with the entry. */
static void jump(struct trainer *trainer)
{
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);

	trainer->tail += SHM_ENTRIES;
	trainer_post_raw(trainer, &entry);
}

static void go_back(struct trainer *trainer)
{
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);

	trainer->tail -= 2;
	trainer_post_raw(trainer, &entry);
}

TEST(wild_slot_ends_the_session)
{
	expect_cut_off(post_wild_slot);
}

/* What ends a session behind so many entries of a rank is met after the other rank's turn, in which all of them are done. */
TEST(ranks_of_a_job_take_turns)
{
	enum { TURN = 16 };
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);
	struct ring ring;
	uint32_t slots[2][TURN];

	ring_open_with(&ring, 2, &(struct door_options){ .spin_ns = NSEC_PER_SEC });
	/* Both are looked at from here on. */
	expect_sum(&ring, 1);
	for (uint32_t i = 0; i < 2; i++) {
		for (uint32_t n = 0; n < TURN; n++) {
			entry.round = n + 2;
			slots[i][n] = trainer_post(&ring.trainers[i], &entry);
		}
		if (!i)
			post_wild_slot(&ring.trainers[i]);
	}
	/* Nobody's turn ends because its time is over. */
	clock_go(1);
	DOOR_UNTIL(ring.door, control_n_sessions(ring.door->control) == 1);
	clock_end();
	for (uint32_t n = 0; n < TURN; n++)
		ASSERT_EQ(trainer_wait(&ring.trainers[1], slots[1][n], NULL), 0);
	ring_close(&ring);
}

TEST(slots_of_failed_entries_may_be_used_again_but_wild_ones_not)
{
	expect_cut_off(post_twice);
}

TEST(ring_that_jumps_ends_the_session)
{
	expect_cut_off(jump);
	expect_cut_off(go_back);
}

TEST(slot_posted_twice_ends_the_session_and_its_job)
{
	struct ring ring;
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);
	char text[ERROR_TEXT_MAX + 1];
	uint32_t slot;

	ring_open(&ring, 2);
	slot = trainer_post(&ring.trainers[1], &entry);
	DOOR_UNTIL(ring.door, control_pending(ring.door->control) == 1);
	entry.slot = slot;
	entry.round = 2;
	trainer_post_raw(&ring.trainers[1], &entry);
	trainer_expect_end(&ring.trainers[1]);
	{
		_cleanup_(unpack_freep) Bps__Control__Message *message =
			trainer_receive(&ring.trainers[0]);

		ASSERT_EQ(message->body_case, BPS__CONTROL__MESSAGE__BODY_JOB_FAILED);
		ASSERT_CONTAINS(message->text, "rank 1");
		ASSERT_CONTAINS(message->text, "posted slot 0 twice");
	}
	entry.slot = 0;
	ASSERT_EQ(trainer_wait(&ring.trainers[0], trainer_post(&ring.trainers[0], &entry), text),
		  -EPIPE);
	ASSERT_CONTAINS(text, "posted slot 0 twice");
	ring_close(&ring);
}

TEST(round_out_of_order_fails_the_job)
{
	struct ring ring;
	struct shm_entry entry = trainer_entry(1, 2, 1, 1, 100);
	char text[ERROR_TEXT_MAX + 1];

	ring_open(&ring, 2);
	ASSERT_EQ(trainer_wait(&ring.trainers[0], trainer_post(&ring.trainers[0], &entry), text),
		  -EPROTO);
	ASSERT_STR(text, "rank 0 submitted round 2 of tensor tensor, but its next is 1");
	for (uint32_t i = 0; i < 2; i++) {
		_cleanup_(unpack_freep) Bps__Control__Message *message =
			trainer_receive(&ring.trainers[i]);

		ASSERT_EQ(message->body_case, BPS__CONTROL__MESSAGE__BODY_JOB_FAILED);
		ASSERT_EQ(message->status, -EPROTO);
	}
	ring_close(&ring);
}

/* -- In flight ------------------------------------------------------------------------------------------------------ */

TEST(unshare_waits_for_what_is_in_flight)
{
	struct ring ring;
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);
	struct trainer *trainer = &ring.trainers[0];
	uint64_t unshare, share;
	uint32_t slots[2];

	ring_open(&ring, 2);
	slots[0] = trainer_post(trainer, &entry);
	unshare = trainer_send_unshare(trainer, 1);
	/* Its number is free at once, its memory is not. */
	share = trainer_send_share(trainer, 1, ring.fds[0], LEN);
	ASSERT_EQ(trainer_answer(trainer, share, NULL), 0);
	ASSERT_TRUE(!trainer_readable(trainer) && !trainer_done(trainer, slots[0]));
	slots[1] = trainer_post(&ring.trainers[1], &entry);
	ASSERT_EQ(trainer_answer(trainer, unshare, NULL), 0);
	ASSERT_EQ(trainer_wait(trainer, slots[0], NULL), 0);
	ASSERT_EQ(trainer_wait(&ring.trainers[1], slots[1], NULL), 0);
	expect_sum(&ring, 2);
	ring_close(&ring);
}

TEST(cancel_ends_it_everywhere)
{
	struct ring ring;
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);
	struct trainer *trainers = ring.trainers;
	char text[ERROR_TEXT_MAX + 1];
	uint32_t slots[2];

	ring_open(&ring, 3);
	slots[0] = trainer_post(&trainers[0], &entry);
	slots[1] = trainer_post(&trainers[1], &entry);
	/* A ticket of somebody else's use of the slot, a slot that is free, one that is none. */
	ASSERT_EQ(
		trainer_answer(&trainers[1], trainer_send_cancel(&trainers[1], slots[1], 99), NULL),
		0);
	ASSERT_EQ(trainer_answer(&trainers[1], trainer_send_cancel(&trainers[1], 77, 1), NULL), 0);
	ASSERT_EQ(trainer_answer(&trainers[1], trainer_send_cancel(&trainers[1], SHM_SLOTS + 5, 1),
				 NULL),
		  0);
	ASSERT_TRUE(!trainer_done(&trainers[0], slots[0]));
	ASSERT_EQ(
		trainer_answer(&trainers[1], trainer_send_cancel(&trainers[1], slots[1], 1), NULL),
		0);
	for (uint32_t i = 0; i < 2; i++) {
		ASSERT_EQ(trainer_wait(&trainers[i], slots[i], text), -ECANCELED);
		ASSERT_STR(text, "tensor tensor, round 1: rank 1 cancelled it");
	}
	ASSERT_EQ(trainer_wait(&trainers[2], trainer_post(&trainers[2], &entry), text), -ECANCELED);
	ASSERT_STR(text, "tensor tensor, round 1: rank 1 cancelled it");
	expect_sum(&ring, 2);
	/* Too late. */
	ASSERT_EQ(trainer_answer(&trainers[1], trainer_send_cancel(&trainers[1], 1, 2), NULL), 0);
	ring_close(&ring);
}

TEST(ranks_that_wait_for_one_another_are_told)
{
	struct ring ring;
	struct trainer *trainers = ring.trainers;
	char text[ERROR_TEXT_MAX + 1];
	struct shm_entry entries[2];
	uint64_t declares[2];
	uint32_t slots[2];

	ring_open(&ring, 2);
	for (uint32_t i = 0; i < 2; i++)
		declares[i] = trainer_send_declare(&trainers[i], 2, "other", DTYPE_FLOAT32, 100);
	for (uint32_t i = 0; i < 2; i++) {
		ASSERT_EQ(trainer_answer(&trainers[i], declares[i], NULL), 0);
		entries[i] = trainer_entry(i + 1, 1, 1, 1, 100);
		slots[i] = trainer_post(&trainers[i], &entries[i]);
	}
	/* Of a request that there is. */
	ASSERT_EQ(trainer_answer(&trainers[0], trainer_send_blocked(&trainers[0], slots[0], 99),
				 NULL),
		  0);
	ASSERT_EQ(trainer_answer(&trainers[0], trainer_send_blocked(&trainers[0], SHM_SLOTS, 1),
				 NULL),
		  0);
	ASSERT_EQ(
		trainer_answer(&trainers[1], trainer_send_blocked(&trainers[1], slots[1], 1), NULL),
		0);
	ASSERT_TRUE(!trainer_done(&trainers[0], slots[0]) && !trainer_done(&trainers[1], slots[1]));
	ASSERT_EQ(
		trainer_answer(&trainers[0], trainer_send_blocked(&trainers[0], slots[0], 1), NULL),
		0);
	ASSERT_EQ(trainer_wait(&trainers[0], slots[0], text), -EDEADLK);
	ASSERT_STR(text, "tensor tensor, round 1: rank 0 waits for rank 1, and rank 1 waits for "
			 "rank 0 in tensor other, round 1");
	ASSERT_EQ(trainer_wait(&trainers[1], slots[1], text), -EDEADLK);
	ASSERT_STR(text, "tensor other, round 1: rank 1 waits for rank 0, and rank 0 waits for "
			 "rank 1 in tensor tensor, round 1");
	for (uint32_t i = 0; i < 2; i++)
		ASSERT_EQ(
			trainer_wait(&trainers[i], trainer_post(&trainers[i], &entries[!i]), text),
			-EDEADLK);
	expect_sum(&ring, 2);
	ring_close(&ring);
}

/* A request refers to all that was posted before; others have their turns meanwhile. */
TEST(a_request_behind_a_full_ring_waits_for_turns)
{
	struct ring ring;
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);
	struct trainer *trainer = &ring.trainers[0];
	uint32_t slots[SHM_ENTRIES];
	uint64_t id;

	ring_open(&ring, 1);
	for (uint32_t i = 0; i < SHM_ENTRIES; i++) {
		entry.round = i + 1;
		slots[i] = trainer_post(trainer, &entry);
	}
	id = trainer_send_cancel(trainer, slots[SHM_ENTRIES - 1], SHM_ENTRIES);
	ASSERT_OK(loop_turn(ring.door->loop, 0));
	ASSERT_TRUE(!trainer_readable(trainer));
	ASSERT_EQ(trainer_answer(trainer, id, NULL), 0);
	for (uint32_t i = 0; i < SHM_ENTRIES; i++)
		ASSERT_TRUE(trainer_done(trainer, slots[i]));
	ring_close(&ring);
}

/*
 * One that takes as long as a turn has taken enough for one: those behind it come with the next. That they take so long is seen after the
 * first four.
 */
TEST(a_turn_ends_between_two_entries)
{
	struct ring ring;
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);
	size_t most = 0, first = 0, n = 0;
	uint32_t slot = 0;

	ring_open(&ring, 2);
	for (unsigned i = 0; i < BATCH; i++, entry.round++)
		slot = trainer_post(&ring.trainers[0], &entry);
	clock_go(NSEC_PER_MSEC);
	while (n < BATCH) {
		size_t before = n;

		ASSERT_OK(loop_turn(ring.door->loop, 0));
		n = control_pending(ring.door->control);
		if (before)
			most = MAX(most, n - before);
		else
			first = n;
	}
	clock_end();
	/* For the doorbell, and at its end. */
	ASSERT_INT(first, <=, SAMPLED_CLOCK_ITEMS + 1);
	ASSERT_INT(most, <=, 2);
	ASSERT_TRUE(!trainer_done(&ring.trainers[0], slot));
	ring_close(&ring);
}

/* However many tensors a job that ends leaves undeclared. */
TEST(a_turn_answers_a_few_that_wait)
{
	enum { N = 500, STEP = 64 };
	const struct door_options options = { .max_tensors = 2 * N };
	struct ring ring;
	unsigned n = 0;

	ring_open_with(&ring, 2, &options);
	for (uint32_t i = 0; i < N; i++) {
		char name[16];

		(void)snprintf(name, sizeof(name), "t%u", i);
		(void)trainer_send_declare(&ring.trainers[0], 2 + i, name, DTYPE_FLOAT32, 100);
		ASSERT_OK(loop_turn(ring.door->loop, 0));
	}
	ASSERT_EQ(trainer_read_all(&ring.trainers[0]), 0);
	trainer_close(&ring.trainers[1]);
	clock_go(10 * NSEC_PER_MSEC);
	while (n < N + 1) {
		unsigned more;

		ASSERT_OK(loop_turn(ring.door->loop, 0));
		more = trainer_read_all(&ring.trainers[0]);
		/* At once, with what is said of the job; and a step. */
		ASSERT_INT(more, <=, 2 * STEP + 1);
		n += more;
	}
	clock_end();
	ASSERT_EQ(n, N + 1);
	ring_close(&ring);
}

/* A rank that is far ahead: from 256 open requests on, a turn takes 128 more, and whatever else the loop has does not give way to these. */
TEST(what_has_begun_goes_before_what_is_new)
{
	enum { N = 1000, DEPTH = 256, ONCE = 128 };
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);
	struct ring ring;
	uint32_t slots[N];
	size_t n = 0;

	ring_open(&ring, 2);
	for (uint32_t i = 0; i < N; i++) {
		entry.round = i + 1;
		slots[i] = trainer_post(&ring.trainers[0], &entry);
	}
	while (n < N) {
		size_t before = n;

		ASSERT_OK(loop_turn(ring.door->loop, 1000));
		n = control_pending(ring.door->control);
		ASSERT_TRUE(n > before);
		/* In the first turn entries are taken for the doorbell, and at its end. */
		ASSERT_TRUE(before < DEPTH ? n < DEPTH + 2 * ONCE : n <= before + ONCE);
		ASSERT_TRUE(n < DEPTH || !loop_is_wanted(ring.door->loop));
	}
	for (uint32_t i = 0; i < N; i++) {
		entry.round = i + 1;
		ASSERT_EQ(trainer_wait(&ring.trainers[1], trainer_post(&ring.trainers[1], &entry),
				       NULL),
			  0);
		ASSERT_EQ(trainer_wait(&ring.trainers[0], slots[i], NULL), 0);
	}
	ring_close(&ring);
}

/* A session that is cut off asks for nothing any more, whatever was to follow its entries. */
TEST(a_request_behind_an_entry_that_ends_the_session_is_not_taken)
{
	enum { N = 200 }; /* more rounds than hear of it at once */
	struct ring ring;
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);
	char text[ERROR_TEXT_MAX + 1];
	uint32_t slot = 0, other = 0;

	ring_open(&ring, 3);
	for (uint32_t i = 0; i < 2 * N; i++) {
		entry.round = i % N + 1;
		if (i < N)
			other = trainer_post(&ring.trainers[0], &entry);
		else
			slot = trainer_post(&ring.trainers[1], &entry);
	}
	entry.slot = slot;
	entry.round = N + 1;
	trainer_post_raw(&ring.trainers[1], &entry);
	(void)trainer_send_cancel(&ring.trainers[1], slot, N);
	trainer_expect_end(&ring.trainers[1]);
	ASSERT_EQ(trainer_wait(&ring.trainers[0], other, text), -EPIPE);
	ASSERT_CONTAINS(text, "twice");
	ring_close(&ring);
}

TEST(leave_ends_requests_and_later_ones_name_who_left)
{
	struct ring ring;
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);
	char text[ERROR_TEXT_MAX + 1];
	uint32_t slots[2];

	ring_open(&ring, 3);
	for (uint32_t i = 0; i < 2; i++)
		slots[i] = trainer_post(&ring.trainers[i], &entry);
	ASSERT_EQ(trainer_leave(&ring.trainers[1], NULL), 0);
	for (uint32_t i = 0; i < 2; i++) {
		ASSERT_EQ(trainer_wait(&ring.trainers[i], slots[i], text), -ECANCELED);
		ASSERT_CONTAINS(text, "rank 1 left job job");
	}
	for (entry.round = 1; entry.round < 4; entry.round++) {
		ASSERT_EQ(trainer_wait(&ring.trainers[2], trainer_post(&ring.trainers[2], &entry),
				       text),
			  -EPIPE);
		ASSERT_STR(text, "rank 1 has left job job");
	}
	ASSERT_EQ(trainer_leave(&ring.trainers[2], NULL), 0);
	ASSERT_EQ(trainer_leave(&ring.trainers[0], NULL), 0);
	ring_close(&ring);
}

/* With its requests under way, as an exception finds them. */
static void expect_error_told(const char *error, const char *told)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Leave leave = BPS__CONTROL__LEAVE__INIT;
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);
	char text[ERROR_TEXT_MAX + 1], words[ERROR_TEXT_MAX + 1];
	struct ring ring;
	uint32_t slot;

	ring_open(&ring, 3);
	slot = trainer_post(&ring.trainers[0], &entry);
	(void)trainer_post(&ring.trainers[1], &entry);
	request.body_case = BPS__CONTROL__REQUEST__BODY_LEAVE;
	request.leave = &leave;
	leave.error = (char *)error;
	ASSERT_EQ(trainer_answer(&ring.trainers[1],
				 trainer_send(&ring.trainers[1], &request, NULL, 0), NULL),
		  0);
	trainer_expect_end(&ring.trainers[1]);
	ASSERT_EQ(trainer_wait(&ring.trainers[0], slot, text), -EPIPE);
	(void)snprintf(words, sizeof(words), "rank 1 (pid %d) of job job ended by an error: %s",
		       getpid(), told);
	ASSERT_STR(text, words);
	/* So are requests that come after it. */
	ASSERT_EQ(trainer_wait(&ring.trainers[2], trainer_post(&ring.trainers[2], &entry), text),
		  -EPIPE);
	ASSERT_STR(text, words);
	ring_close(&ring);
}

TEST(error_that_ends_a_rank_is_told_to_the_others)
{
	char longer[2000], cut[301];

	expect_error_told("ValueError: no such file", "ValueError: no such file");
	expect_error_told("a\n<0>b\x1b[2J \xc3\xa4", "a?<0>b?[2J \xc3\xa4");
	memset(longer, 'x', sizeof(longer) - 1);
	longer[sizeof(longer) - 1] = '\0';
	memset(cut, 'x', sizeof(cut) - 1);
	cut[sizeof(cut) - 1] = '\0';
	expect_error_told(longer, cut);
}

/* An entry waits for the packet that explains it; but others have their turns meanwhile. */
TEST(packets_without_end_do_not_keep_the_loop)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct shm_entry entry = trainer_entry(77, 1, 0, 0, 1);
	struct trainer trainers[2];
	int len = 32 << 20;
	uint32_t slot;
	uint64_t id;

	for (unsigned i = 0; i < 2; i++)
		trainer_open(&trainers[i], door);
	ASSERT_EQ(trainer_join(&trainers[0], "job", 0, 1, NULL), 0);
	if (setsockopt(trainers[0].socket, SOL_SOCKET, SO_SNDBUFFORCE, &len, sizeof(len)))
		TEST_SKIP("a socket that holds so many packets is for root");
	for (unsigned i = 0; i < 8000; i++)
		(void)trainer_send_cancel(&trainers[0], 0, 1);
	slot = trainer_post(&trainers[0], &entry);
	ASSERT_OK(loop_turn(door->loop, 0));
	id = trainer_send_cancel(&trainers[1], 0, 1);
	ASSERT_EQ(trainer_answer(&trainers[1], id, NULL), 0);
	ASSERT_TRUE(!trainer_done(&trainers[0], slot));
	for (unsigned i = 0; i < 2; i++)
		trainer_close(&trainers[i]);
	DOOR_UNTIL(door, !control_n_sessions(door->control));
}

/* -- Pages that the trainer gives back ---------------------------------------------------------------------------- */

static int punch(const struct trainer *trainer)
{
	return fallocate(trainer->memory, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, SHM_LEN)
		       ? -errno
		       : 0;
}

/* Whoever has touched a page has made it. */
static bool is_hole(const struct trainer *trainer)
{
	struct stat st;

	ASSERT_OK(fstat(trainer->memory, &st));
	return !st.st_blocks;
}

static void expect_sealed(const struct trainer *trainer)
{
	struct stat st;

	/* Nobody else opens it. */
	ASSERT_OK(fstat(trainer->memory, &st));
	ASSERT_EQ(st.st_mode & 0777, 0600);
	ASSERT_EQ(fcntl(trainer->memory, F_GET_SEALS),
		  F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL);
	ASSERT_EQ(punch(trainer), -EPERM);
	ASSERT_TRUE(madvise(trainer->shm, SHM_LEN, MADV_REMOVE) && errno == EPERM);
	ASSERT_TRUE(write(trainer->memory, "", 1) < 0 && errno == EPERM);
	ASSERT_TRUE(mmap(NULL, SHM_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, trainer->memory, 0) ==
		    MAP_FAILED);
	/* What was mapped before stays as it was. */
	shm_ring(trainer->shm)[SHM_ENTRIES - 1].slot = 1;
}

TEST(pages_of_a_ring_stay_before_they_are_touched)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);
	struct trainer trainer;
	uint64_t id, one = 1;

	trainer_open(&trainer, door);
	ASSERT_OK(punch(&trainer));
	for (unsigned i = 0; i < 5; i++)
		ASSERT_OK(loop_turn(door->loop, 0));
	ASSERT_EQ(seals.n, 0);
	seals.holds = true;
	/* Before the daemon acts on that it looks whether entries are there. */
	id = trainer_send_cancel(&trainer, 0, 1);
	DOOR_UNTIL(door, seals.n || trainer_readable(&trainer));
	ASSERT_EQ(write(trainer.doorbell, &one, sizeof(one)), sizeof(one));
	for (unsigned i = 0; i < 5; i++)
		ASSERT_OK(loop_turn(door->loop, 0));
	ASSERT_TRUE(!trainer_readable(&trainer));
	ASSERT_TRUE(is_hole(&trainer));
	ASSERT_OK(fallocate(trainer.memory, 0, 0, SHM_LEN));
	seals_go_on();
	ASSERT_EQ(trainer_answer(&trainer, id, NULL), 0);
	/* It was rung for before. */
	DOOR_UNTIL(door, ((struct shm_header *)trainer.shm)->daemon_armed);
	expect_sealed(&trainer);
	ASSERT_EQ(trainer_wait(&trainer, trainer_post(&trainer, &entry), NULL), -ENOTCONN);
	ASSERT_EQ(seals.n, 1);
	trainer_close(&trainer);
	DOOR_UNTIL(door, !control_n_sessions(door->control));
}

TEST(a_ring_that_is_rung_first_is_sealed)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);
	struct trainer trainer;
	uint32_t slot;

	trainer_open(&trainer, door);
	seals.holds = true;
	slot = trainer_post(&trainer, &entry);
	DOOR_UNTIL(door, seals.n || trainer_done(&trainer, slot));
	ASSERT_OK(loop_turn(door->loop, 0));
	ASSERT_TRUE(!trainer_done(&trainer, slot));
	seals_go_on();
	ASSERT_EQ(trainer_wait(&trainer, slot, NULL), -ENOTCONN);
	expect_sealed(&trainer);
	trainer_close(&trainer);
	DOOR_UNTIL(door, !control_n_sessions(door->control));
}

/* So that it cannot be sealed, or before it is. */
TEST(a_ring_that_its_trainer_has_sealed_ends_its_session)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer trainers[2];

	for (unsigned i = 0; i < 2; i++)
		trainer_open(&trainers[i], door);
	ASSERT_OK(fcntl(trainers[0].memory, F_ADD_SEALS, F_SEAL_SEAL));
	(void)trainer_send_cancel(&trainers[0], 0, 1);
	trainer_expect_end(&trainers[0]);
	trainer_close(&trainers[0]);
	/* The porter is asked, and nobody waits for its answer. */
	(void)trainer_send_cancel(&trainers[1], 0, 1);
	DOOR_UNTIL(door, seals.n == 2);
	trainer_close(&trainers[1]);
	DOOR_UNTIL(door, !control_n_sessions(door->control));
}

static size_t backlog;

size_t __wrap_porter_backlog(void);
size_t __wrap_porter_backlog(void)
{
	return backlog;
}

/* What came with a connection that is refused is charged to nobody until it is closed. */
TEST(nobody_is_let_in_while_much_waits_to_be_closed)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct trainer trainer;

	backlog = 64;
	trainer_connect(&trainer, door);
	for (unsigned i = 0; i < 20; i++)
		ASSERT_OK(loop_turn(door->loop, 10));
	ASSERT_EQ(control_n_sessions(door->control), 0);
	backlog = 63;
	DOOR_UNTIL(door, control_n_sessions(door->control) == 1);
	backlog = 0;
	trainer_close(&trainer);
	DOOR_UNTIL(door, !control_n_sessions(door->control));
}

/* Its page would be ours to make, and so for as long as the trainer keeps it. */
TEST(a_slot_that_was_never_written_ends_the_session)
{
	_cleanup_(door_freep) struct door *door = door_new(NULL);
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, 100);
	struct shm_header *header;
	struct trainer trainer;
	uint64_t one = 1;
	int fd;

	if (holes_open(&fd) != -EBUSY)
		TEST_SKIP("userfaultfd cannot be had");
	trainer_open(&trainer, door);
	header = trainer.shm;
	/* By the way that it should be: other slots of a page that is there. */
	ASSERT_EQ(trainer_wait(&trainer, trainer_post(&trainer, &entry), NULL), -ENOTCONN);
	for (uint32_t i = 0; i < 8; i++) {
		entry.slot = 512 + 256 * i; /* of other pages, also where these are large */
		entry.ticket = 100 + i;
		shm_ring(trainer.shm)[(trainer.tail + i) % SHM_ENTRIES] = entry;
	}
	atomic_store(&header->tail, trainer.tail + 8);
	ASSERT_EQ(write(trainer.doorbell, &one, sizeof(one)), sizeof(one));
	trainer_expect_end(&trainer);
	/* It took none of them. */
	ASSERT_EQ(atomic_load(&header->completions), 1);
	trainer_close(&trainer);
	DOOR_UNTIL(door, !control_n_sessions(door->control));
}
