/*
 * Meets faults on missing pages of trainers' memory: a signal handler makes the page by
 * userfaultfd(2) and notes it in a ring. control/ reads the ring and cuts the memory off;
 * transport/ touches pages after an EFAULT, so that they are noted, too.
 */
#include "base/memory/holes.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/pages.h"
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <time.h>

#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1 /* Linux 5.11 */
#endif

/* Pages that may wait for holes_take(), and so be made meanwhile. */
#define RING 1024u
/* Whoever would make more looks so often whether they were taken, and goes on at last: 1 s. */
#define WAIT_NS	  NSEC_PER_MSEC
#define WAITS_MAX 1000u
/* Accesses of a thread to one page in a row that find it neither watched nor made; and that find it made, and fail. */
#define STALE_MAX 4u
#define LOST_MAX  1000u

static struct {
	_Atomic int fd; /* userfaultfd, or -1 */
	int event;
	pthread_t taker;
	struct sigaction before;
	size_t page;
	_Atomic uint32_t n_made, n_taken;
	_Atomic uintptr_t ring[RING]; /* 0: not stored yet, or taken */
} holes = { .fd = -1, .event = -1 };

/* -- In the signal: nothing but system calls and atomics --------------------------------------- */

static bool is_full(void)
{
	return atomic_load(&holes.n_made) - atomic_load(&holes.n_taken) >= RING / 2;
}

static bool is_taker(void)
{
	return pthread_equal(pthread_self(), holes.taker);
}

static void wait_once(void)
{
	(void)nanosleep(&(struct timespec){ .tv_nsec = (long)WAIT_NS }, NULL);
}

static void wait_while_full(void)
{
	for (unsigned i = 0; is_full() && i < WAITS_MAX; i++)
		wait_once();
}

static void note(uintptr_t page)
{
	uint64_t one = 1;

	/* More than half of it is left to threads that come at once. */
	if (atomic_load(&holes.n_made) - atomic_load(&holes.n_taken) < RING - 64)
		atomic_store(&holes.ring[atomic_fetch_add(&holes.n_made, 1) % RING], page);
	(void)!write(holes.event, &one, sizeof(one));
}

/* The page that the thread has met last without making it, and what it was told instead, so often in a row. */
static _Thread_local struct {
	uintptr_t page;
	int error;
	unsigned n;
} last;

static unsigned count(uintptr_t page, int error)
{
	if (last.page != page || last.error != error)
		last.n = 0;
	last.page = page;
	last.error = error;
	return ++last.n;
}

/*
 * No watched memory is there: it may have been mapped anew since the access, which then finds what
 * is there now. Who comes back with the same page has met another kind of fault.
 */
static bool is_stale(uintptr_t page, int error)
{
	return count(page, error) < STALE_MAX;
}

/*
 * Somebody has made the page since the access, which then finds it; or it cannot be had any more, as what could not be read from
 * swap. Its owner answers for that as for a hole, and whoever touches it waits until other memory is there. The taker does not wait,
 * and has met another kind of fault in the end. An owner that makes and gives back in turns is noted before.
 */
static bool is_there(uintptr_t page)
{
	unsigned n = count(page, EEXIST);

	if (n % STALE_MAX)
		return true;
	note(page);
	if (is_taker())
		return n < LOST_MAX;
	wait_once();
	return true;
}

/* Returns whether the access is to be made again. */
static bool make(uintptr_t page)
{
	struct uffdio_zeropage zero = { .range = { .start = page, .len = holes.page } };

	if (!ioctl(holes.fd, UFFDIO_ZEROPAGE, &zero)) {
		note(page);
		last.n = 0;
		return true;
	}
	if (errno == EEXIST)
		return is_there(page);
	/* It is mapped anew just now, or there is no memory. */
	return errno == EAGAIN || errno == ENOMEM || is_stale(page, errno);
}

static void on_fault(int signal, siginfo_t *info, void *context)
{
	uintptr_t page = (uintptr_t)info->si_addr & ~(holes.page - 1);
	int saved = errno;

	(void)context;
	/* Broken memory, or somebody's signal: no access is sure to be made again. */
	if (info->si_code != BUS_ADRERR) {
		(void)sigaction(signal, &holes.before, NULL);
		(void)raise(signal);
		return;
	}
	if (!is_taker())
		wait_while_full();
	/* Else it is as if we had not been here: the access is made again. */
	if (atomic_load(&holes.fd) < 0 || !make(page))
		(void)sigaction(signal, &holes.before, NULL);
	errno = saved;
}

/* -- Outside ----------------------------------------------------------------------------------- */

static int open_fd(void)
{
	struct uffdio_api api = { .api = UFFD_API,
				  .features = UFFD_FEATURE_SIGBUS | UFFD_FEATURE_MISSING_SHMEM };
	_cleanup_(fd_closep) int fd =
		(int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);

	if (fd < 0 || ioctl(fd, UFFDIO_API, &api))
		return error_origin(-errno);
	return TAKE_FD(fd);
}

int holes_open(int *ret_fd)
{
	struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER };
	_cleanup_(fd_closep) int fd = -1;

	if (atomic_load(&holes.fd) >= 0)
		return error_origin(-EBUSY);
	fd = open_fd();
	if (fd < 0)
		return fd;
	holes.event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (holes.event < 0)
		return error_origin(-errno);
	holes.page = page_size();
	holes.taker = pthread_self();
	(void)sigemptyset(&action.sa_mask);
	if (sigaction(SIGBUS, &action, &holes.before)) {
		holes.event = fd_close(holes.event);
		return error_origin(-errno);
	}
	*ret_fd = holes.event;
	atomic_store(&holes.fd, TAKE_FD(fd));
	return 0;
}

void holes_close(void)
{
	int fd = atomic_exchange(&holes.fd, -1);

	if (fd < 0)
		return;
	(void)sigaction(SIGBUS, &holes.before, NULL);
	holes.event = fd_close(holes.event);
	(void)fd_close(fd);
}

int holes_watch(void *data, size_t len)
{
	struct uffdio_register range = {
		.range = { .start = (uintptr_t)data, .len = align_up(len, MAX(holes.page, 1u)) },
		.mode = UFFDIO_REGISTER_MODE_MISSING,
	};

	if (atomic_load(&holes.fd) < 0)
		return 0;
	return ioctl(holes.fd, UFFDIO_REGISTER, &range) ? error_origin(-errno) : 0;
}

size_t holes_take(void **pages, size_t max)
{
	uint64_t value, one = 1;
	size_t n = 0;

	/* The taker goes on: what it has met is not in a row with what it will. */
	last.n = 0;
	(void)!read(holes.event, &value, sizeof(value));
	while (n < max && atomic_load(&holes.n_taken) != atomic_load(&holes.n_made)) {
		_Atomic uintptr_t *slot = &holes.ring[atomic_load(&holes.n_taken) % RING];
		uintptr_t page = atomic_exchange(slot, 0);

		/* Its thread is about to store it. */
		if (!page)
			break;
		pages[n++] = (void *)page;
		atomic_fetch_add(&holes.n_taken, 1);
	}
	if (n == max)
		(void)!write(holes.event, &one, sizeof(one));
	return n;
}

uint32_t holes_made(void)
{
	return atomic_load_explicit(&holes.n_made, memory_order_relaxed);
}

bool holes_fill(const struct iovec *iov, size_t n)
{
	if (atomic_load(&holes.fd) < 0)
		return false;
	for (size_t i = 0; i < n; i++) {
		const volatile char *data = iov[i].iov_base;

		for (size_t at = 0; at < iov[i].iov_len; at += holes.page)
			(void)data[at];
		if (iov[i].iov_len)
			(void)data[iov[i].iov_len - 1];
	}
	return true;
}
