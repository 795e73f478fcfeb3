/* A latch that several threads want at once. */
#include "base/latch.h"
#include "test.h"
#include <pthread.h>

#define N_THREADS 4
#define N_TIMES	  100000

static struct {
	struct latch latch;
	uint64_t n; /* not atomic */
} shared;

static void *count(void *user)
{
	(void)user;
	for (unsigned i = 0; i < N_TIMES; i++) {
		latch_take(&shared.latch);
		shared.n++;
		latch_drop(&shared.latch);
	}
	return NULL;
}

TEST(one_has_it_at_a_time)
{
	pthread_t threads[N_THREADS];

	for (unsigned i = 0; i < N_THREADS; i++)
		ASSERT_EQ(pthread_create(&threads[i], NULL, count, NULL), 0);
	for (unsigned i = 0; i < N_THREADS; i++)
		ASSERT_EQ(pthread_join(threads[i], NULL), 0);
	ASSERT_EQ(shared.n, (uint64_t)N_THREADS * N_TIMES);
}
