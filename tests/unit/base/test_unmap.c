/* Small mappings go at once, large ones by a thread that comes and goes. */
#include "base/memory/unmap.h"
#include "test.h"
#include <sched.h>
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
