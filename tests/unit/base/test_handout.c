/* Memory that was handed out is charged while others have it, in whatever way, and no longer; by a clock of its own. */
#include "base/clock.h"
#include "base/loop/loop.h"
#include "base/memory/account.h"
#include "base/memory/handout.h"
#include "test.h"
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

enum { LEN = 1 << 20 };

static uint64_t now_ns = NSEC_PER_SEC;
static unsigned n_leases; /* asked for */
static int lease_error;	  /* what that fails with, or 0 */
static uint64_t lease_ns; /* how long that takes */

int __wrap_clock_gettime(clockid_t clock, struct timespec *ret);
int __wrap_clock_gettime(clockid_t clock, struct timespec *ret)
{
	*ret = (struct timespec){ (time_t)(now_ns / NSEC_PER_SEC), (long)(now_ns % NSEC_PER_SEC) };
	return 0;
}

int __real_fcntl64(int fd, int command, ...);
int __wrap_fcntl64(int fd, int command, ...);
int __wrap_fcntl64(int fd, int command, ...)
{
	va_list args;
	long what;

	va_start(args, command);
	what = va_arg(args, long);
	va_end(args);
	if (command == F_SETLEASE && what == F_WRLCK) {
		n_leases++;
		now_ns += lease_ns;
	}
	if (command == F_SETLEASE && lease_error) {
		errno = lease_error;
		return -1;
	}
	return __real_fcntl64(fd, command, what);
}

/* As long as there may be a thread that releases what is charged to them. */
static struct quota bytes = { .limit = UINT64_MAX }, descriptors = { .limit = UINT64_MAX };

struct world {
	struct loop *loop;
};

static void open_world(struct world *world)
{
	*world = (struct world){ 0 };
	ASSERT_OK(loop_new(&world->loop));
	handouts_attach(world->loop);
	n_leases = 0;
}

static void close_world(struct world *world)
{
	handouts_done();
	ASSERT_EQ(quota_used(&bytes), 0);
	ASSERT_EQ(quota_used(&descriptors), 0);
	loop_free(world->loop);
}

static void pass(struct world *world, uint64_t ms)
{
	for (uint64_t end_ns = now_ns + ms * NSEC_PER_MSEC; now_ns < end_ns;
	     now_ns += NSEC_PER_MSEC)
		ASSERT_OK(loop_turn(world->loop, 0));
	ASSERT_OK(loop_turn(world->loop, 0));
}

/* Memory that is mapped here, what is charged for it, and the descriptor that others are to have. */
struct memory {
	int kept, theirs;
	void *data;
};

static struct memory hand_out(int flags)
{
	int fd = memfd_create("mine", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	struct memory memory;

	ASSERT_OK(ftruncate(fd, LEN));
	memory.data = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	ASSERT_TRUE(memory.data != MAP_FAILED);
	memory.theirs = handout_open(fd, flags);
	memory.kept = handout_open(fd, O_PATH);
	ASSERT_TRUE(memory.theirs >= 0 && memory.kept >= 0);
	ASSERT_OK(quota_charge(&descriptors, 1));
	ASSERT_OK(quota_charge(&bytes, LEN));
	(void)fd_close(fd);
	return memory;
}

/* Memory is given back by another thread, and charged until then. */
static void wait_for(const struct quota *quota, uint64_t used)
{
	while (quota_used(quota) != used)
		(void)sched_yield();
}

static void leave(enum handout_kind kind, int fd)
{
	handout_leave(kind, fd, &descriptors, &bytes, LEN);
}

/* A world in which memory was left, and others have it. */
static struct memory open_world_with_memory(struct world *world, int flags)
{
	struct memory memory;

	open_world(world);
	memory = hand_out(flags);
	leave(HANDOUT_MEMORY, memory.kept);
	ASSERT_EQ(handouts_kept(), 1);
	return memory;
}

TEST(what_nobody_has_is_charged_to_nobody)
{
	struct memory memory;
	struct world world;

	open_world(&world);
	memory = hand_out(O_RDWR);
	(void)fd_close(memory.theirs);
	/* It is still mapped here: that is not what is asked. */
	leave(HANDOUT_MEMORY, memory.kept);
	ASSERT_EQ(handouts_kept(), 0);
	wait_for(&bytes, 0);
	wait_for(&descriptors, 0);
	ASSERT_OK(munmap(memory.data, LEN));
	close_world(&world);
}

/* It is charged while it is kept, and looked at ever more seldom; then it is not. */
static void expect_kept(struct world *world)
{
	pass(world, 10000);
	ASSERT_EQ(handouts_kept(), 1);
	ASSERT_EQ(quota_used(&bytes), LEN);
	ASSERT_EQ(quota_used(&descriptors), 1);
}

static void expect_gone(struct world *world)
{
	pass(world, 1100);
	ASSERT_EQ(handouts_kept(), 0);
	wait_for(&bytes, 0);
	wait_for(&descriptors, 0);
	n_leases = 0;
	pass(world, 10000);
	ASSERT_EQ(n_leases, 0);
	close_world(world);
}

static void keep(int flags, bool maps)
{
	void *mapped = NULL;
	struct memory memory;
	struct world world;

	open_world(&world);
	memory = hand_out(flags);
	if (maps) {
		mapped = mmap(NULL, 4096, PROT_READ, MAP_SHARED, memory.theirs, LEN / 2);
		ASSERT_TRUE(mapped != MAP_FAILED);
		(void)fd_close(memory.theirs);
	}
	ASSERT_OK(munmap(memory.data, LEN));
	leave(HANDOUT_MEMORY, memory.kept);
	expect_kept(&world);
	/* Ten times in the first second, then once in each. */
	ASSERT_TRUE(n_leases > 15 && n_leases < 25);
	if (maps)
		ASSERT_OK(munmap(mapped, 4096));
	else
		(void)fd_close(memory.theirs);
	expect_gone(&world);
}

TEST(what_somebody_has_stays_charged)
{
	for (unsigned i = 0; i < 4; i++)
		keep(i & 1 ? O_RDWR : O_RDONLY, i & 2);
}

/* Ends of a socket, the first of which is charged for. */
static void make_socket(int ends[2])
{
	ASSERT_OK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends));
	ASSERT_OK(quota_charge(&descriptors, 1));
	ASSERT_OK(quota_charge(&bytes, LEN));
}

/* i: they read them, close their end, or both are gone before it is left. */
TEST(packets_that_are_not_read_stay_charged)
{
	for (unsigned i = 0; i < 3; i++) {
		struct world world;
		char packet[8];
		int ends[2];

		open_world(&world);
		make_socket(ends);
		ASSERT_EQ(send(ends[0], "packet", 6, 0), 6);
		ASSERT_OK(shutdown(ends[0], SHUT_RDWR));
		if (i == 2)
			(void)fd_close(ends[1]);
		leave(HANDOUT_PACKETS, ends[0]);
		if (i < 2)
			expect_kept(&world);
		if (i == 0) {
			ASSERT_EQ(recv(ends[1], packet, sizeof(packet), 0), 6);
			ASSERT_EQ(recv(ends[1], packet, sizeof(packet), 0), 0);
		}
		if (i == 1)
			(void)fd_close(ends[1]);
		ASSERT_EQ(handouts_kept(), i < 2);
		expect_gone(&world);
		if (i == 0)
			(void)fd_close(ends[1]);
	}
}

TEST(a_socket_whose_other_end_is_kept_stays_charged)
{
	struct world world;
	int ends[2];

	open_world(&world);
	make_socket(ends);
	leave(HANDOUT_SOCKET, ends[0]);
	expect_kept(&world);
	(void)fd_close(ends[1]);
	expect_gone(&world);
}

/* Whoever says that it reads no more has what there is. */
TEST(what_is_not_read_any_more_stays_charged)
{
	struct world world;
	int ends[2];

	open_world(&world);
	make_socket(ends);
	ASSERT_OK(shutdown(ends[0], SHUT_RD));
	ASSERT_EQ(send(ends[0], "packet", 6, 0), 6);
	ASSERT_OK(shutdown(ends[1], SHUT_RD));
	leave(HANDOUT_SOCKET, ends[0]);
	expect_kept(&world);
	(void)fd_close(ends[1]);
	expect_gone(&world);
}

static uint64_t pages_of(int fd)
{
	struct stat st;

	ASSERT_OK(fstat(fd, &st));
	return (uint64_t)st.st_blocks;
}

/* Who has it by O_PATH is not seen, and has nothing by it; who may not give back pages has them still. */
TEST(what_nobody_is_seen_to_have_has_no_pages)
{
	for (unsigned seals = 0; seals < 2; seals++) {
		struct memory memory;
		struct world world;
		int path;

		open_world(&world);
		memory = hand_out(O_RDWR);
		memset(memory.data, 1, LEN);
		if (seals)
			ASSERT_OK(fcntl(memory.theirs, F_ADD_SEALS, F_SEAL_FUTURE_WRITE));
		path = handout_open(memory.theirs, O_PATH);
		leave(HANDOUT_MEMORY, memory.kept);
		pass(&world, 100);
		ASSERT_EQ(handouts_kept(), 1);
		ASSERT_EQ(pages_of(path), LEN / 512);
		(void)fd_close(memory.theirs);
		pass(&world, 1000);
		ASSERT_EQ(handouts_kept(), 0);
		wait_for(&bytes, 0);
		wait_for(&descriptors, 0);
		ASSERT_EQ(pages_of(path), seals ? LEN / 512 : 0);
		ASSERT_OK(munmap(memory.data, LEN));
		(void)fd_close(path);
		close_world(&world);
	}
}

/* Who comes to what is kept need not wait for its next look. */
TEST(what_has_just_ended_is_looked_at_soon)
{
	struct memory kept, brief;
	struct world world;

	kept = open_world_with_memory(&world, O_RDONLY);
	pass(&world, 5000);
	brief = hand_out(O_RDONLY);
	leave(HANDOUT_MEMORY, brief.kept);
	ASSERT_EQ(handouts_kept(), 2);
	(void)fd_close(brief.theirs);
	pass(&world, 2);
	ASSERT_EQ(handouts_kept(), 1);
	wait_for(&bytes, LEN);
	wait_for(&descriptors, 1);
	(void)fd_close(kept.theirs);
	ASSERT_OK(munmap(kept.data, LEN));
	ASSERT_OK(munmap(brief.data, LEN));
	close_world(&world);
}

/* Ends that come again and again do not put off the next look, however long the last took. */
TEST(what_ends_puts_no_look_off)
{
	struct memory kept;
	struct world world;

	kept = open_world_with_memory(&world, O_RDONLY);
	pass(&world, 5000);
	(void)fd_close(kept.theirs);
	for (unsigned i = 0; i < 2000; i++) {
		int ends[2];

		ASSERT_OK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends));
		handout_leave(HANDOUT_SOCKET, ends[0], NULL, NULL, 0);
		(void)fd_close(ends[1]);
		/* Less than any wait, each time. */
		now_ns += NSEC_PER_MSEC / 2;
		ASSERT_OK(loop_turn(world.loop, 0));
	}
	wait_for(&bytes, 0);
	wait_for(&descriptors, 0);
	ASSERT_OK(munmap(kept.data, LEN));
	close_world(&world);
}

/* What is opened while it is looked at has the kernel tell by that. */
TEST(a_lease_that_is_broken_ends_nobody)
{
	struct world world;

	open_world(&world);
	ASSERT_OK(raise(SIGIO));
	close_world(&world);
}

/* Some in a step, in turns; and all, however many go meanwhile. */
TEST(many_are_looked_at_in_steps)
{
	enum { N = 100 };
	struct world world;
	int theirs[N];

	open_world(&world);
	for (unsigned i = 0; i < N; i++) {
		struct memory memory = hand_out(O_RDWR);

		theirs[i] = memory.theirs;
		ASSERT_OK(munmap(memory.data, LEN));
		leave(HANDOUT_MEMORY, memory.kept);
	}
	ASSERT_EQ(n_leases, N);
	ASSERT_EQ(handouts_kept(), N);
	for (unsigned i = 0; i < N; i += 2)
		(void)fd_close(theirs[i]);
	pass(&world, 2);
	ASSERT_EQ(handouts_kept(), N / 2);
	wait_for(&bytes, (uint64_t)N / 2 * LEN);
	for (unsigned i = 1; i < N; i += 2)
		(void)fd_close(theirs[i]);
	pass(&world, 4);
	ASSERT_EQ(handouts_kept(), 0);
	wait_for(&bytes, 0);
	wait_for(&descriptors, 0);
	close_world(&world);
}

enum { USERS = 40 };

/* Each user has what it may have, and others have it still. */
struct users {
	struct accounts all;
	struct account *accounts[USERS];
	struct memory kept[USERS];
};

static void open_users(struct users *users, unsigned n)
{
	struct accounts_params params = { .share = 100 };

	for (unsigned kind = 0; kind < ACCOUNT_KINDS; kind++)
		params.limits[kind] = (uint64_t)n * LEN;
	*users = (struct users){ 0 };
	accounts_init(&users->all, &params);
	for (unsigned i = 0; i < n; i++) {
		char name[16];
		struct failure failure;
		struct account *account;

		(void)snprintf(name, sizeof(name), "user %u", i);
		account = users->accounts[i] = account_get(&users->all, NULL, name);
		ASSERT_OK(account_charge(account, ACCOUNT_MEMORY, LEN, &failure));
		ASSERT_OK(account_charge(account, ACCOUNT_DESCRIPTORS, 1, &failure));
		users->kept[i] = hand_out(O_RDWR);
		quota_release(&bytes, LEN);
		quota_release(&descriptors, 1);
		/* So its pages are not given back, which another thread would do. */
		ASSERT_OK(fcntl(users->kept[i].theirs, F_ADD_SEALS, F_SEAL_FUTURE_WRITE));
		ASSERT_OK(munmap(users->kept[i].data, LEN));
		handout_leave(HANDOUT_MEMORY, users->kept[i].kept,
			      account_quota(account, ACCOUNT_DESCRIPTORS),
			      account_quota(account, ACCOUNT_MEMORY), LEN);
	}
	n_leases = 0;
}

static int ask(struct users *users, unsigned i, enum account_kind kind)
{
	struct failure failure;

	return account_charge(users->accounts[i], kind, LEN, &failure);
}

static void close_users(struct users *users, unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		(void)fd_close(users->kept[i].theirs);
	handouts_done();
	for (unsigned i = 0; i < n; i++)
		(void)account_put(users->accounts[i]);
	accounts_done(&users->all);
}

/* What was let go since the last look makes room, though the next is a second away. */
TEST(who_has_no_room_is_looked_at_at_once)
{
	struct users users;
	struct world world;

	open_world(&world);
	open_users(&users, 1);
	pass(&world, 5000);
	ASSERT_EQ(ask(&users, 0, ACCOUNT_MEMORY), -EDQUOT);
	now_ns += NSEC_PER_SEC / 10;
	users.kept[0].theirs = fd_close(users.kept[0].theirs);
	ASSERT_OK(ask(&users, 0, ACCOUNT_MEMORY));
	account_release(users.accounts[0], ACCOUNT_MEMORY, LEN);
	close_users(&users, 1);
	close_world(&world);
}

/* A user who asks all the time takes no other's looks. */
TEST(who_is_always_refused_is_looked_at_seldom)
{
	struct users users;
	struct world world;

	open_world(&world);
	open_users(&users, 2);
	for (unsigned i = 0; i < 1000; i++)
		ASSERT_EQ(ask(&users, 0, ACCOUNT_MEMORY), -EDQUOT);
	ASSERT_EQ(n_leases, 1);
	/* The other has its own; and of addresses nothing is charged that others could let go. */
	ASSERT_EQ(ask(&users, 1, ACCOUNT_MEMORY), -EDQUOT);
	ASSERT_EQ(n_leases, 2);
	now_ns += NSEC_PER_SEC;
	ASSERT_OK(ask(&users, 1, ACCOUNT_MAPPED));
	ASSERT_OK(ask(&users, 1, ACCOUNT_MAPPED));
	ASSERT_EQ(ask(&users, 1, ACCOUNT_MAPPED), -EDQUOT);
	ASSERT_EQ(n_leases, 2);
	account_release(users.accounts[1], ACCOUNT_MAPPED, 2 * (uint64_t)LEN);
	close_users(&users, 2);
	close_world(&world);
}

/* However many they are. */
TEST(looks_for_who_is_refused_take_a_twentieth)
{
	struct users users;
	struct world world;
	uint64_t began_ns;

	open_world(&world);
	open_users(&users, USERS);
	lease_ns = NSEC_PER_MSEC;
	began_ns = now_ns;
	for (unsigned i = 0; i < 100 * USERS; i++, now_ns += NSEC_PER_MSEC)
		ASSERT_EQ(ask(&users, i % USERS, ACCOUNT_MEMORY), -EDQUOT);
	ASSERT_TRUE(n_leases > 100);
	ASSERT_TRUE((n_leases - 1) * lease_ns * 20 < now_ns - began_ns);
	lease_ns = 0;
	close_users(&users, USERS);
	close_world(&world);
}

/* What others have left takes little time of who is refused. */
TEST(who_is_refused_is_not_looked_for_behind_all_others)
{
	enum { N = 600 };
	struct rlimit limit;
	struct users users;
	struct world world;
	int theirs[N];

	ASSERT_OK(getrlimit(RLIMIT_NOFILE, &limit));
	limit.rlim_cur = MAX(limit.rlim_cur, (rlim_t)2 * N + 100);
	ASSERT_OK(setrlimit(RLIMIT_NOFILE, &limit));
	open_world(&world);
	for (unsigned i = 0; i < N; i++) {
		int ends[2];

		make_socket(ends);
		leave(HANDOUT_SOCKET, ends[0]);
		theirs[i] = ends[1];
	}
	ASSERT_EQ(handouts_kept(), N);
	open_users(&users, 1);
	ASSERT_EQ(ask(&users, 0, ACCOUNT_MEMORY), -EDQUOT);
	ASSERT_EQ(n_leases, 0);
	/* Those before are looked at in their turn, and gone. */
	for (unsigned i = 0; i < N; i++)
		(void)fd_close(theirs[i]);
	while (handouts_kept() > 1)
		pass(&world, 1);
	n_leases = 0;
	now_ns += NSEC_PER_SEC;
	ASSERT_EQ(ask(&users, 0, ACCOUNT_MEMORY), -EDQUOT);
	ASSERT_EQ(n_leases, 1);
	close_users(&users, 1);
	close_world(&world);
}

/* As a ledger is that comes back more than once: none keeps another, and it is charged once. */
TEST(what_is_left_twice_is_charged_once)
{
	struct memory memory;
	struct world world;
	int again[2];

	open_world(&world);
	memory = hand_out(O_RDONLY);
	for (unsigned i = 0; i < 2; i++)
		again[i] = handout_open(memory.theirs, O_PATH);
	leave(HANDOUT_MEMORY, memory.kept);
	ASSERT_OK(munmap(memory.data, LEN));
	for (unsigned i = 0; i < 2; i++) {
		uint64_t amount = i ? 1 : 2 * (uint64_t)LEN;

		ASSERT_OK(quota_charge(&descriptors, 1));
		ASSERT_OK(quota_charge(&bytes, amount));
		handout_leave(HANDOUT_MEMORY, again[i], &descriptors, &bytes, amount);
		ASSERT_EQ(handouts_kept(), 1);
		ASSERT_EQ(quota_used(&descriptors), 1);
		ASSERT_EQ(quota_used(&bytes), 2 * (uint64_t)LEN);
	}
	(void)fd_close(memory.theirs);
	expect_gone(&world);
}

TEST(whoever_goes_first_is_charged_with_nothing)
{
	struct memory memory;
	struct world world;

	memory = open_world_with_memory(&world, O_RDWR);
	close_world(&world);
	ASSERT_EQ(handouts_kept(), 0);
	(void)fd_close(memory.theirs);
	ASSERT_OK(munmap(memory.data, LEN));
}

/* It is said once; memory that cannot be asked about is nobody's. But where there is no memory to ask, it is asked again. */
TEST(where_nobody_can_tell_nobody_is_charged)
{
	struct memory memory;
	struct world world;

	open_world(&world);
	memory = hand_out(O_RDWR);
	lease_error = ENOMEM;
	leave(HANDOUT_MEMORY, memory.kept);
	ASSERT_EQ(handouts_kept(), 1);
	lease_error = EINVAL;
	memset(memory.data, 1, LEN);
	pass(&world, 2);
	ASSERT_EQ(handouts_kept(), 0);
	ASSERT_EQ(quota_used(&bytes), 0);
	ASSERT_EQ(pages_of(memory.theirs), LEN / 512);
	lease_error = 0;
	(void)fd_close(memory.theirs);
	ASSERT_OK(munmap(memory.data, LEN));
	close_world(&world);
}
