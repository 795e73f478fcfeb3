/*
 * What others have of the daemon's when nothing here uses it any more: they can keep the ring of a session, the ledger of a job,
 * packets that they do not read, and with them pages and memory of the kernel. So what somebody is charged for it stays charged
 * until nobody has it. The kernel tells that to who asks.
 *
 * Not seen is who has memory by O_PATH alone, and who has moved pages into a pipe or a socket (splice(2)).
 *
 * One in a process, on the thread of its loop; SIGIO is ignored. Where it was not attached, nothing stays charged.
 */
#pragma once

#include "base/loop/loop.h"
#include "base/quota.h"

enum handout_kind {
	/*
	 * A memfd, by handout_open(fd, O_PATH): until nobody else has it open or mapped. Then fcntl(2), F_SETLEASE, gives an
	 * exclusive lease; not where leases are off (fs.leases-enable): there nobody is charged. Who has it by O_PATH alone is
	 * not seen: so its pages are given back then, if it is not sealed against that. Memory that is left again, while it is
	 * kept, is charged once: the more of both.
	 */
	HANDOUT_MEMORY,
	/* A socket of this machine that was shut down: until what was sent is read, or cannot be any more. SIOCOUTQ says so. */
	HANDOUT_PACKETS,
	/* The same of one whose other end others have: until nobody has that, either. Then it has POLLHUP. */
	HANDOUT_SOCKET,
};

/* What is left from now on is looked at by this loop. */
void handouts_attach(struct loop *loop);
/* The quotas go: what others still have is charged to nobody. Harmless when it was not attached. */
void handouts_done(void);
/*
 * Looks at once at some of what is charged to this quota, which has no room, but takes no more than a share of the thread's time for
 * all who ask. Returns whether any is gone.
 */
bool handouts_look(const struct quota *quota);
/* How much of what was left is not gone. */
size_t handouts_kept(void);

/*
 * Opens a memfd once more. Returns it, or -errno. The descriptor that memfd_create(2) returned is none for others: the kernel
 * does not count that when it is asked who has it open.
 */
int handout_open(int fd, int flags);
/* Whether something that was sent by a socket of this machine waits to be read at its other end. */
bool handout_is_unread(int socket);
/*
 * Nothing here uses it any more. Takes over the descriptor, for which descriptors is charged, and what quota is charged for what
 * others have by it: both are released soon after they have not. The quotas, or NULL, outlive handouts_done().
 */
void handout_leave(enum handout_kind kind, int fd, struct quota *descriptors, struct quota *quota,
		   uint64_t amount);
