/*
 * What is over here is looked at in rounds, some in each step of a chore: soon after something has come to it, as who
 * has it mostly lets it go at that time, and then more and more seldom.
 */
#include "base/memory/handout.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/loop/porter.h"
#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#define LOOK_STEP   16
#define WAIT_MIN_NS NSEC_PER_MSEC
#define WAIT_MAX_NS NSEC_PER_SEC
/* A round is followed by so many times its own time without any. */
#define WAIT_SHARE 20

struct handout {
	struct list link; /* in handouts.over */
	enum handout_kind kind;
	int fd;
	struct quota *descriptors, *quota;
	uint64_t amount;
	dev_t device; /* HANDOUT_MEMORY */
	ino_t inode;
};

static bool on_looks(struct chore *chore);
static void on_next(struct loop_timer *timer);

static struct {
	struct loop *loop;
	struct list over;
	size_t n_over;
	size_t n_to_look;	    /* from the first on, in this round */
	uint64_t began_ns, took_ns; /* this round, or the last */
	uint64_t wait_ns;	    /* until the next, at least */
	struct loop_timer next;
	struct chore looks;
	bool said; /* that leases are off */
} handouts = {
	.over = LIST_INIT(handouts.over),
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
static bool is_memory_kept(int path_fd)
{
	_cleanup_(fd_closep) int fd = handout_open(path_fd, O_RDONLY);

	/* The lease goes with the descriptor. */
	if (fd >= 0 && !fcntl(fd, F_SETLEASE, F_WRLCK))
		return false;
	if (fd < 0 || errno == EAGAIN || errno == ENOMEM)
		return true;
	if (!handouts.said)
		log_notice("rings and ledgers that trainers keep when these are over are charged "
			   "to nobody: who has one cannot be told: F_SETLEASE: %m");
	handouts.said = true;
	return false;
}

static bool is_kept(const struct handout *handout)
{
	struct pollfd pollfd = { .fd = handout->fd };
	int n_unread = 0;

	switch (handout->kind) {
	case HANDOUT_MEMORY:
		return is_memory_kept(handout->fd);
	case HANDOUT_PACKETS:
		return !ioctl(handout->fd, SIOCOUTQ, &n_unread) && n_unread;
	case HANDOUT_PIPE:
		return poll(&pollfd, 1, 0) >= 0 && !(pollfd.revents & POLLERR);
	}
	return false;
}

/* Without memory for the timer, when the next comes to it. */
static void look_later(void)
{
	uint64_t wait_ns = MAX(handouts.wait_ns, WAIT_SHARE * handouts.took_ns);

	(void)loop_timer_set(handouts.loop, &handouts.next,
			     clock_now_ns() + MIN(wait_ns, WAIT_MAX_NS));
	handouts.wait_ns = MIN(2 * handouts.wait_ns, WAIT_MAX_NS);
}

static void look(void)
{
	struct handout *handout = list_first(&handouts.over, struct handout, link);

	list_remove(&handout->link);
	if (is_kept(handout)) {
		list_push_back(&handouts.over, &handout->link);
		return;
	}
	handouts.n_over--;
	release(handout);
	free(handout);
}

static bool on_looks(struct chore *chore)
{
	(void)chore;
	for (unsigned i = 0; i < LOOK_STEP && handouts.n_to_look; i++, handouts.n_to_look--)
		look();
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

void handouts_attach(struct loop *loop)
{
	handouts.loop = loop;
}

void handouts_done(void)
{
	struct handout *handout;

	loop_timer_cancel(&handouts.next);
	loop_abort(&handouts.looks);
	while ((handout = list_first(&handouts.over, struct handout, link))) {
		list_remove(&handout->link);
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
	list_for_each (handout, &handouts.over, link)
		if (handout->kind == HANDOUT_MEMORY && handout->inode == what->inode &&
		    handout->device == what->device && handout->quota == what->quota)
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
	struct handout what = { .kind = kind, .fd = fd }, *handout = NULL, *same;

	what.descriptors = descriptors;
	what.quota = quota;
	what.amount = amount;
	set_inode(&what);
	same = find_same(&what);
	if (same) {
		what.amount = MIN(same->amount, amount);
		same->amount = MAX(same->amount, amount);
	} else if (handouts.loop && is_kept(&what)) {
		handout = malloc(sizeof(*handout));
	}
	if (!handout) {
		release(&what);
		return;
	}
	*handout = what;
	list_push_back(&handouts.over, &handout->link);
	handouts.n_over++;
	handouts.wait_ns = WAIT_MIN_NS;
	if (!handouts.n_to_look)
		look_later();
}
