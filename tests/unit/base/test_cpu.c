/* How many processors a process may use: by bandwidth and by affinity. */
#include "base/cpu.h"
#include "test.h"
#include <sched.h>

TEST(bandwidth_rounds_up)
{
	ASSERT_EQ(cpu_parse_max("max 100000\n"), UINT_MAX);
	ASSERT_EQ(cpu_parse_max("100000 100000\n"), 1);
	ASSERT_EQ(cpu_parse_max("100001 100000\n"), 2);
	ASSERT_EQ(cpu_parse_max("1000 100000\n"), 1);
	ASSERT_EQ(cpu_parse_max("0 100000\n"), 1);
	ASSERT_EQ(cpu_parse_max("800000 100000"), 8);
	ASSERT_EQ(cpu_parse_max("18446744073709551615 1"), UINT_MAX);
	ASSERT_EQ(cpu_parse_max("5 0"), UINT_MAX);
	ASSERT_EQ(cpu_parse_max(""), UINT_MAX);
}

TEST(affinity_limits)
{
	cpu_set_t allowed, one;
	int first = 0;

	ASSERT_OK(sched_getaffinity(0, sizeof(allowed), &allowed));
	ASSERT_INT(cpu_count(), >=, 1);
	ASSERT_INT(cpu_count(), <=, CPU_COUNT(&allowed));

	while (!CPU_ISSET(first, &allowed))
		first++;
	CPU_ZERO(&one);
	CPU_SET(first, &one);
	ASSERT_OK(sched_setaffinity(0, sizeof(one), &one));
	ASSERT_EQ(cpu_count(), 1);
}
