/*
 * What is over here is looked at in rounds, some in each step of a chore: soon after something has come to it, as who
 * has it mostly lets it go at that time, and then more and more seldom.
 */
#include "base/memory/handout.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/loop/porter.h"
#include "base/memory/unmap.h"
#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define LOOK_STEP   16
#define PASS_MAX    ((size_t)512) /* that are passed over for these */
#define WAIT_MIN_NS NSEC_PER_MSEC
#define WAIT_MAX_NS NSEC_PER_SEC
/* A round is followed by so many times its own time without any. */
#define WAIT_SHARE 20

struct handout {
	struct list link;	 /* in handouts.over */
	struct list memory_link; /* HANDOUT_MEMORY: in handouts.memory */
	enum handout_kind kind;
	int fd;
	struct quota *descriptors, *quota;
	uint64_t amount;
	/* HANDOUT_MEMORY */
	dev_t device;
	ino_t inode;
	bool is_gone; /* nobody else has it open or mapped: a lease was given */
};

static bool on_looks(struct chore *chore);
static void on_next(struct loop_timer *timer);

static struct {
	struct loop *loop;
	struct list over, memory;
	size_t n_over;
	size_t n_to_look;	    /* from the first on, in this round */
	uint64_t began_ns, took_ns; /* this round, or the last */
	uint64_t wait_ns;	    /* until the next, at least */
	uint64_t asked_ns;	    /* handouts_look() does nothing until then */
	struct loop_timer next;
	struct chore looks;
	bool said; /* that it cannot be told who has memory */
} handouts = {
	.over = LIST_INIT(handouts.over),
	.memory = LIST_INIT(handouts.memory),
	.next.expired = on_next,
	.looks.step = on_looks,
};

int handout_open(int fd, int flags)
{
	char path[32];
	int again;

	(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	/* Of a file that somebody else has a lease on, open() would wait. */
	again = open(path, flags | O_CLOEXEC | O_NONBLOCK);
	return again < 0 ? error_origin(-errno) : again;
}

/* To free its pages may take long: the porter has that done. */
static void release(const struct handout *handout)
{
	porter_close(NULL, handout->fd);
	quota_release(handout->quota, handout->amount);
	quota_release(handout->descriptors, 1);
}

/* Opened for that alone: the lease is refused while another one is open to read, be it ours. */
static bool is_memory_kept(struct handout *handout)
{
	_cleanup_(fd_closep) int fd = handout_open(handout->fd, O_RDONLY);

	/* The lease goes with the descriptor. */
	handout->is_gone = fd >= 0 && !fcntl(fd, F_SETLEASE, F_WRLCK);
	if (handout->is_gone)
		return false;
	if (fd < 0 || errno == EAGAIN || errno == ENOMEM)
		return true;
	if (!handouts.said)
		log_notice("rings and ledgers that trainers keep when these are over are charged "
			   "to nobody: who has one cannot be told: F_SETLEASE: %m");
	handouts.said = true;
	return false;
}

bool handout_is_unread(int socket)
{
	int n_unread = 0;

	return !ioctl(socket, SIOCOUTQ, &n_unread) && n_unread;
}

static bool is_kept(struct handout *handout)
{
	struct pollfd pollfd = { .fd = handout->fd };

	switch (handout->kind) {
	case HANDOUT_MEMORY:
		return is_memory_kept(handout);
	case HANDOUT_PACKETS:
		return handout_is_unread(handout->fd);
	case HANDOUT_SOCKET:
		/* Who reads nothing any more has what is there. */
		return (poll(&pollfd, 1, 0) >= 0 && !(pollfd.revents & POLLHUP)) ||
		       handout_is_unread(handout->fd);
	}
	return false;
}

/*
 * Whoever has it by O_PATH alone is not seen, and is not to have its pages. It is charged until they are given back, in another thread.
 * Returns whether they will be: not those of memory that is sealed against it.
 */
static bool give_back(const struct handout *handout)
{
	_cleanup_(fd_closep) int fd = handout_open(handout->fd, O_RDWR);
	struct unmap_charge charges[UNMAP_CHARGES] = {
		{ handout->quota, handout->amount },
		{ handout->descriptors, 1 },
	};
	struct stat st;
	void *data;

	if (fd < 0 || fstat(fd, &st))
		return false;
	data = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (data == MAP_FAILED)
		return false;
	unmap_remove(handout->quota, data, (size_t)st.st_size, charges);
	(void)fd_close(handout->fd);
	return true;
}

static void let_go(const struct handout *handout)
{
	if (!handout->is_gone || !give_back(handout))
		release(handout);
}

/* Without memory for the timer, when the next comes to it. What is due before that stays so. */
static void look_later(void)
{
	uint64_t wait_ns = MAX(handouts.wait_ns, WAIT_SHARE * handouts.took_ns);
	uint64_t at_ns = clock_now_ns() + wait_ns;

	if (!handouts.next.loop || handouts.next.at_ns > at_ns)
		(void)loop_timer_set(handouts.loop, &handouts.next, at_ns);
	handouts.wait_ns = MIN(2 * handouts.wait_ns, WAIT_MAX_NS);
}

/* Whoever opens memory while it is looked at breaks the lease, which this process would be told of by a signal that ends it. */
static void ignore_breaks(void)
{
	const struct sigaction action = { .sa_handler = SIG_IGN };

	(void)sigaction(SIGIO, &action, NULL);
}

static void look(struct handout *handout)
{
	list_remove(&handout->link);
	if (is_kept(handout)) {
		list_push_back(&handouts.over, &handout->link);
		return;
	}
	handouts.n_over--;
	list_remove(&handout->memory_link);
	let_go(handout);
	free(handout);
}

static bool on_looks(struct chore *chore)
{
	(void)chore;
	for (unsigned i = 0; i < LOOK_STEP && handouts.n_to_look; i++, handouts.n_to_look--)
		look(list_first(&handouts.over, struct handout, link));
	if (handouts.n_to_look)
		return true;
	handouts.took_ns = clock_now_ns() - handouts.began_ns;
	if (handouts.n_over)
		look_later();
	return false;
}

static void on_next(struct loop_timer *timer)
{
	(void)timer;
	handouts.n_to_look = handouts.n_over;
	handouts.began_ns = clock_now_ns();
	loop_begin(handouts.loop, &handouts.looks);
}

static size_t look_at_some(const struct quota *quota)
{
	struct handout *handout, *next;
	size_t n_over = handouts.n_over, n = 0, left = MIN(n_over, PASS_MAX);

	list_for_each_safe (handout, next, &handouts.over, link) {
		/* What was looked at is behind these. Others may have left a hundred thousand. */
		if (!left-- || n == LOOK_STEP)
			break;
		if (handout->quota != quota && handout->descriptors != quota)
			continue;
		look(handout);
		n++;
	}
	handouts.n_to_look = MIN(handouts.n_to_look, handouts.n_over);
	return n_over - handouts.n_over;
}

bool handouts_look(const struct quota *quota)
{
	uint64_t began_ns, now_ns;
	size_t n_gone;

	if (!handouts.n_over || (began_ns = clock_now_ns()) < handouts.asked_ns)
		return false;
	n_gone = look_at_some(quota);
	now_ns = clock_now_ns();
	handouts.asked_ns = now_ns + WAIT_SHARE * (now_ns - began_ns);
	return n_gone;
}

void handouts_attach(struct loop *loop)
{
	ignore_breaks();
	handouts.loop = loop;
}

void handouts_done(void)
{
	struct handout *handout;

	loop_timer_cancel(&handouts.next);
	loop_abort(&handouts.looks);
	while ((handout = list_first(&handouts.over, struct handout, link))) {
		list_remove(&handout->link);
		list_remove(&handout->memory_link);
		release(handout);
		free(handout);
	}
	handouts.n_over = handouts.n_to_look = 0;
	handouts.loop = NULL;
}

size_t handouts_kept(void)
{
	return handouts.n_over;
}

/* The same memory, which was left before, or NULL. */
static struct handout *find_same(const struct handout *what)
{
	struct handout *handout;

	if (what->kind != HANDOUT_MEMORY)
		return NULL;
	list_for_each (handout, &handouts.memory, memory_link)
		if (handout->inode == what->inode && handout->device == what->device &&
		    handout->quota == what->quota)
			return handout;
	return NULL;
}

static void set_inode(struct handout *what)
{
	struct stat st;

	if (what->kind == HANDOUT_MEMORY && !fstat(what->fd, &st)) {
		what->device = st.st_dev;
		what->inode = st.st_ino;
	}
}

void handout_leave(enum handout_kind kind, int fd, struct quota *descriptors, struct quota *quota,
		   uint64_t amount)
{
	struct handout what = { .kind = kind, .fd = fd }, *handout, *same;

	what.descriptors = descriptors;
	what.quota = quota;
	what.amount = amount;
	set_inode(&what);
	same = find_same(&what);
	if (same) {
		what.amount = MIN(same->amount, amount);
		same->amount = MAX(same->amount, amount);
		release(&what);
		return;
	}
	if (!handouts.loop || !is_kept(&what)) {
		let_go(&what);
		return;
	}
	handout = malloc(sizeof(*handout));
	if (!handout) {
		release(&what);
		return;
	}
	*handout = what;
	list_push_back(&handouts.over, &handout->link);
	if (kind == HANDOUT_MEMORY)
		list_push_back(&handouts.memory, &handout->memory_link);
	handouts.n_over++;
	handouts.wait_ns = WAIT_MIN_NS;
	if (!handouts.n_to_look)
		look_later();
}
