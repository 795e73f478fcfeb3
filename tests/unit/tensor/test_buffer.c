/*
 * Buffers: ranges, counts, quota, pages that a trainer has given back. What may be mapped is tested
 * at the door (tests unit control).
 */
#include "tensor/tensor.h"
#include "test.h"
#include <fcntl.h>
#include <sched.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/stat.h>

static int sealed(size_t len)
{
	int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	ASSERT_TRUE(fd >= 0);
	ASSERT_OK(ftruncate(fd, (off_t)len));
	ASSERT_OK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK));
	return fd;
}

static long page; /* 0: as it is */

long __real_sysconf(int name);
long __wrap_sysconf(int name);

long __wrap_sysconf(int name)
{
	return page && name == _SC_PAGESIZE ? page : __real_sysconf(name);
}

int __real_madvise(void *data, size_t len, int advice);
int __wrap_madvise(void *data, size_t len, int advice);

static bool holds;
static sem_t is_held, let_go;

/* Who gives back waits for others who give back some of the same memory. */
int __wrap_madvise(void *data, size_t len, int advice)
{
	if (advice == MADV_REMOVE && gettid() == getpid())
		test_fail(__FILE__, __LINE__, "memory is given back by the control thread");
	if (advice == MADV_REMOVE && holds) {
		(void)sem_post(&is_held);
		while (sem_wait(&let_go))
			;
	}
	return __real_madvise(data, len, advice);
}

static unsigned n_released;

static void on_released(struct buffer *buffer)
{
	ASSERT_TRUE(!quota_used(buffer->quota));
	n_released++;
}

TEST(lives_until_the_last_use)
{
	struct quota quota;
	struct failure failure;
	struct buffer *buffer;
	int fd = sealed(10000);

	quota_init(&quota, 10000, NULL);
	ASSERT_OK(buffer_map(fd, 10000, &quota, &buffer, &failure));
	ASSERT_EQ(quota_used(&quota), 10000);
	ASSERT_EQ(pwrite(fd, "x", 1, 9999), 1);
	(void)fd_close(fd);
	ASSERT_EQ(buffer->data[9999], 'x');
	buffer->released = on_released;
	(void)buffer_ref(buffer);
	(void)buffer_unref(buffer);
	ASSERT_EQ(n_released, 0);
	(void)buffer_unref(buffer);
	ASSERT_EQ(n_released, 1);
}

static struct mail *left;

static bool on_leaving(struct buffer *buffer, struct mail *mail)
{
	ASSERT_EQ(quota_used(buffer->quota), 4096);
	left = mail;
	return false;
}

/* Hardware that knows it takes its time: until then it is there, and charged. */
TEST(lives_until_hardware_has_forgotten_it)
{
	struct quota quota;
	struct failure failure;
	struct buffer *buffer;
	int fd = sealed(4096);

	quota_init(&quota, 4096, NULL);
	ASSERT_OK(buffer_map(fd, 4096, &quota, &buffer, &failure));
	(void)fd_close(fd);
	buffer->leaving = on_leaving;
	buffer->released = on_released;
	(void)buffer_unref(buffer);
	ASSERT_EQ(n_released, 0);
	ASSERT_EQ(quota_used(&quota), 4096);
	buffer->data[0] = 'x';
	left->run(left);
	ASSERT_EQ(n_released, 1);
	ASSERT_EQ(quota_used(&quota), 0);
}

static void wait_used(const struct quota *quota, uint64_t used)
{
	while (quota_used(quota) != used)
		sched_yield();
}

/* A session has none of it any more when it is given up, and its user until it is unmapped. */
TEST(stays_charged_to_the_user_until_it_is_unmapped)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct quota users[2], sessions[2], pieces;
	struct buffer *buffers[2];
	struct failure failure;
	int fd = sealed(4096);

	holds = true;
	ASSERT_OK(sem_init(&is_held, 0, 0) || sem_init(&let_go, 0, 0));
	ASSERT_OK(loop_new(&loop));
	quota_init(&pieces, 1, NULL);
	for (unsigned i = 0; i < 2; i++) {
		quota_init(&users[i], 4096, NULL);
		quota_init(&sessions[i], 4096, &users[i]);
		ASSERT_OK(buffer_map(fd, 4096, &sessions[i], &buffers[i], &failure));
	}
	ASSERT_OK(quota_charge(&pieces, 1));
	buffers[0]->charges[1] = (struct unmap_charge){ &pieces, 1 };
	buffer_bury(buffers[0], loop);
	buffer_give_back(buffers[0], buffers[0]->data);
	while (sem_wait(&is_held))
		;
	for (unsigned i = 0; i < 2; i++) {
		(void)buffer_unref(buffers[i]);
		ASSERT_EQ(quota_used(&sessions[i]), 0);
	}
	wait_used(&users[1], 0);
	ASSERT_EQ(quota_used(&users[0]), 4096);
	ASSERT_EQ(quota_used(&pieces), 1);
	(void)sem_post(&let_go);
	wait_used(&users[0], 0);
	wait_used(&pieces, 0);
	(void)fd_close(fd);
}

static bool stalls(off_t len, int seals)
{
	struct quota quota;
	struct failure failure;
	struct buffer *buffer;
	int fd = sealed((size_t)len);
	bool stalls;

	ASSERT_OK(fcntl(fd, F_ADD_SEALS, seals));
	quota_init(&quota, 4096, NULL);
	ASSERT_OK(buffer_map(fd, 4096, &quota, &buffer, &failure));
	stalls = buffer->stalls;
	(void)buffer_unref(buffer);
	(void)fd_close(fd);
	return stalls;
}

/* However little of it is shared. */
TEST(what_may_have_many_pages_stalls)
{
	ASSERT_TRUE(!stalls(4096, F_SEAL_GROW));
	ASSERT_TRUE(!stalls(256 << 20, F_SEAL_GROW));
	ASSERT_TRUE(stalls((256 << 20) + 1, F_SEAL_GROW));
	ASSERT_TRUE(stalls(4096, 0));
}

TEST(refusal_charges_nothing)
{
	struct quota quota;
	struct failure failure;
	struct buffer *buffer = NULL;
	int fd = sealed(4096);

	quota_init(&quota, 4095, NULL);
	ASSERT_EQ(buffer_map(fd, 4097, &quota, &buffer, &failure), -EINVAL);
	ASSERT_EQ(buffer_map(fd, 4096, &quota, &buffer, &failure), -EDQUOT);
	quota_init(&quota, 1 << 20, NULL);
	ASSERT_OK(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE));
	ASSERT_EQ(buffer_map(fd, 4096, &quota, &buffer, &failure), -EPERM);
	ASSERT_EQ(quota_used(&quota), 0);
	ASSERT_TRUE(!buffer);
	(void)fd_close(fd);
}

TEST(ranges_are_inside_and_aligned)
{
	struct quota quota;
	struct failure failure;
	struct buffer *buffer;
	int fd = sealed(4096);
	void *data;

	quota_init(&quota, 1 << 20, NULL);
	ASSERT_OK(buffer_map(fd, 4001, &quota, &buffer, &failure));
	ASSERT_OK(buffer_range(buffer, 0, 500, 8, &data));
	ASSERT_TRUE(data == buffer->data);
	ASSERT_OK(buffer_range(buffer, 3992, 1, 8, &data));
	ASSERT_TRUE(data == buffer->data + 3992);
	ASSERT_OK(buffer_range(buffer, 4001, 0, 1, &data));
	ASSERT_OK(buffer_range(buffer, 4000, 1, 1, &data));
	ASSERT_EQ(buffer_range(buffer, 4000, 1, 2, &data), -EINVAL);
	ASSERT_EQ(buffer_range(buffer, 4001, 1, 1, &data), -EINVAL);
	ASSERT_EQ(buffer_range(buffer, 4002, 0, 1, &data), -EINVAL);
	ASSERT_EQ(buffer_range(buffer, 0, 501, 8, &data), -EINVAL);
	ASSERT_EQ(buffer_range(buffer, 4, 1, 8, &data), -EINVAL);
	ASSERT_EQ(buffer_range(buffer, 8, UINT64_MAX, 1, &data), -EINVAL);
	ASSERT_EQ(buffer_range(buffer, UINT64_MAX - 7, 1, 8, &data), -EINVAL);
	/* 2^61 + 1 elements of 8 bytes are 8 bytes, if nobody looks. */
	ASSERT_EQ(buffer_range(buffer, 0, (1ull << 61) + 1, 8, &data), -EINVAL);
	(void)buffer_unref(buffer);
	(void)fd_close(fd);
}

static long blocks_of(int fd)
{
	struct stat st;

	ASSERT_OK(fstat(fd, &st));
	return st.st_blocks * 512;
}

TEST(what_is_buried_is_given_back_by_pages_of_the_machine)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	size_t len = 4 << 16;
	struct quota quota;
	struct failure failure;
	struct buffer *buffer;
	int fd = sealed(len);

	page = 1 << 16;
	quota_init(&quota, len, NULL);
	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(fallocate(fd, 0, 0, (off_t)len));
	ASSERT_OK(buffer_map(fd, len, &quota, &buffer, &failure));
	ASSERT_EQ(blocks_of(fd), len);
	buffer_bury(buffer, loop);
	buffer_give_back(buffer, buffer->data + (1 << 16));
	while (blocks_of(fd) != (long)len - (1 << 16))
		sched_yield();
	ASSERT_OK(loop_turn(loop, 0));
	/* Nothing of it is mapped here any more. */
	buffer->data[0] = 'x';
	buffer_give_back(buffer, buffer->data);
	ASSERT_EQ(blocks_of(fd), len - (1 << 16));
	(void)buffer_unref(buffer);
	(void)fd_close(fd);
}

/* However large: others have their turn between two pieces. */
TEST(a_large_buffer_is_buried_piece_by_piece)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	size_t len = (size_t)64 << 20;
	unsigned n_steps = 1;
	struct quota quota;
	struct failure failure;
	struct buffer *buffer, *dropped;
	int fd = sealed(len);
	struct chore *chore;

	quota_init(&quota, 2 * len, NULL);
	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(buffer_map(fd, len, &quota, &buffer, &failure));
	ASSERT_OK(buffer_map(fd, len, &quota, &dropped, &failure));
	buffer->data[0] = buffer->data[len - 1] = 'x';
	chore = &buffer->burial;
	buffer_bury(buffer, loop);
	buffer_bury(buffer, loop);
	buffer_bury(dropped, loop);
	ASSERT_EQ(buffer->data[0], 'x');
	for (; chore->step(chore); n_steps++)
		ASSERT_EQ(buffer->data[len - 1], 'x');
	ASSERT_EQ(n_steps, 32);
	ASSERT_EQ(buffer->data[0], 0);
	ASSERT_EQ(buffer->data[len - 1], 0);
	/* One that is gone has no more steps. */
	(void)buffer_unref(dropped);
	ASSERT_OK(loop_turn(loop, 0));
	(void)buffer_unref(buffer);
	(void)fd_close(fd);
}
