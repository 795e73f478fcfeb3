/*
 * Small mappings go at once, large ones by a thread that comes and goes; what others have, too, by
 * threads of its owners, who are charged until then.
 */
#include "base/memory/unmap.h"

#include "base/loop/thread.h"
#include "test.h"
#include <sched.h>
#include <semaphore.h>
#include <sys/mman.h>

static bool is_mapped(void *data)
{
	unsigned char there;

	return !mincore(data, 1, &there) || errno != ENOMEM;
}

static void *map(size_t len)
{
	void *data = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	ASSERT_TRUE(data != MAP_FAILED);
	memset(data, 1, len);
	return data;
}

TEST(small_ones_at_once)
{
	void *data = map(4096);

	unmap(data, 4096);
	ASSERT_TRUE(!is_mapped(data));
}

/* By a thread that ends when there is nothing left, and comes again. */
TEST_FULL_TIER(large_ones_soon, "1 GiB of memory, given back by a thread that must come to it")
{
	enum { N = 5, LEN = 65 << 20 };
	void *data[N];

	for (unsigned turn = 0; turn < 3; turn++) {
		for (unsigned i = 0; i < N; i++)
			data[i] = map(LEN - i * 4096);
		for (unsigned i = 0; i < N; i++)
			unmap(data[i], LEN - i * 4096);
		for (unsigned i = 0; i < N; i++)
			while (is_mapped((char *)data[i] + LEN - (i + 1) * 4096))
				sched_yield();
	}
}

static sem_t is_held, let_go;
static unsigned n_threads;

int __wrap_madvise(void *data, size_t len, int advice);
int __real_thread_detach(void *(*run)(void *user), void *user);
int __wrap_thread_detach(void *(*run)(void *user), void *user);

/* Somebody has the lock of that memory. */
int __wrap_madvise(void *data, size_t len, int advice)
{
	ASSERT_EQ(advice, MADV_REMOVE);
	(void)sem_post(&is_held);
	while (sem_wait(&let_go))
		;
	return 0;
}

int __wrap_thread_detach(void *(*run)(void *user), void *user)
{
	n_threads++;
	return __real_thread_detach(run, user);
}

static void wait_unmapped(void *data)
{
	while (is_mapped(data))
		sched_yield();
}

static void wait_released(const struct quota *quota)
{
	while (quota_used(quota))
		sched_yield();
}

static void hold(const struct quota *owner, void *data)
{
	ASSERT_OK(sem_init(&is_held, 0, 0) || sem_init(&let_go, 0, 0));
	unmap_remove(owner, data, 4096, (struct unmap_charge[UNMAP_CHARGES]){ 0 });
	while (sem_wait(&is_held))
		;
	ASSERT_EQ(n_threads, 1);
}

static void give(struct quota *owner, void *data)
{
	struct unmap_charge charges[UNMAP_CHARGES] = { { owner, 4096 }, { NULL, 0 }, { owner, 1 } };

	ASSERT_OK(quota_charge(owner, 4097));
	unmap_shared(owner, data, 4096, charges);
}

/* Its own memory waits, and stays charged. */
TEST(who_keeps_its_memory_locked_keeps_nobody_else_waiting)
{
	enum { LEN = 1 << 20 };
	void *held = map(4096), *own = map(4096), *others = map(4096), *ours = map(LEN);
	struct quota one, another;

	quota_init(&one, UINT64_MAX, NULL);
	quota_init(&another, UINT64_MAX, NULL);
	hold(&one, held);
	give(&one, own);
	ASSERT_EQ(n_threads, 1);
	unmap(ours, LEN);
	ASSERT_EQ(n_threads, 2);
	give(&another, others);
	ASSERT_EQ(n_threads, 3);
	wait_unmapped(ours);
	wait_released(&another);
	ASSERT_TRUE(!is_mapped(others));
	ASSERT_TRUE(is_mapped(held) && is_mapped(own));
	ASSERT_EQ(quota_used(&one), 4097);
	(void)sem_post(&let_go);
	wait_released(&one);
	ASSERT_TRUE(!is_mapped(own) && !is_mapped(held));
}

/* As when the daemon ends. */
TEST(nobody_waits_for_it_where_the_quotas_go)
{
	void *held = map(4096), *own = map(4096);
	struct quota one;

	quota_init(&one, UINT64_MAX, NULL);
	hold(&one, held);
	give(&one, own);
	unmap_release_all();
	ASSERT_EQ(quota_used(&one), 0);
	ASSERT_TRUE(is_mapped(own));
	(void)sem_post(&let_go);
	wait_unmapped(own);
	ASSERT_EQ(quota_used(&one), 0);
}
