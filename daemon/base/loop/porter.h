/*
 * What others hand over is looked at and closed by another process, the porter: a child of the daemon that shares nothing with
 * it. To close a file may take for ever: a socket that lingers, a file of a file system that its sender serves. Whoever waits
 * there must not be the control thread, nor any thread of the daemon, which could then not even end. A descriptor that is
 * no memfd is never one of the daemon's: it stays in the socket it was sent into, and the daemon gets at most a frame: a socket
 * of the porter's making in which it lies.
 *
 * The porter never waits for a file either. What it has to close it leaves to a child that takes its table of descriptors
 * along, and is killed: who is killed does not linger. A file system that does not answer keeps such a child and nobody else;
 * whoever asked for it goes on being charged with it until it is gone. Nor does it wait for memory of the daemon's that others
 * have as well, when that is to be sealed: a child does, one for each.
 *
 * One in a process. porter_start() comes first of all, when there is no other thread; the rest is the control thread's.
 */
#pragma once

#include "base/loop/loop.h"

enum porter_want {
	PORTER_MEMFD, /* what has seals, so that its memory stays; from then on only calls that never wait */
	PORTER_FRAME /* anything, in a frame */
};

/*
 * Starts the process. prepare: called in it first, to give up rights; or NULL; not 0: it ends. Returns 0 or -errno.
 */
int porter_start(int (*prepare)(void *user), void *user);
/* Answers come by this loop. ended: the process is gone, which it never is by itself. Returns 0 or -errno. */
int porter_attach(struct loop *loop, void (*ended)(void *user), void *user);
/* What has not been answered is forgotten. Harmless when it was not started. */
void porter_stop(void);

/* One thing asked. Embedded in its user; kept until over() was called or porter_forget(). */
struct porter_errand {
	/*
	 * PORTER_MEMFD, PORTER_FRAME: the packet at the head of the socket, with all beside it, was taken out. status: 0 and
	 * the descriptor, which belongs to the callee; -EINVAL: it is no memfd; -E2BIG: several; -errno.
	 */
	void (*taken)(struct porter_errand *errand, int status, int fd);
	/* Nothing of it is open any more. Comes last. */
	void (*over)(struct porter_errand *errand);
	struct porter_note *note; /* set while it is under way */
};

/* Takes the first packet out of a socket in which descriptors lie beside it. The socket stays the caller's. 0 or -errno. */
int porter_take(struct porter_errand *errand, enum porter_want want, int socket);
/*
 * Adds F_SEAL_FUTURE_WRITE and F_SEAL_SEAL to a memfd of the daemon's own that others have, too; takes it over. That waits
 * for all that they do with it at the time, and so does a process of its own. taken() has no descriptor; status: 0; -EINVAL:
 * the kernel knows no F_SEAL_FUTURE_WRITE, it has F_SEAL_SEAL alone; -EPERM: somebody else has sealed it; -errno. Returns 0 or -errno.
 */
int porter_seal(struct porter_errand *errand, int fd);
/* Closes a descriptor in which others' descriptors may lie; takes it over. errand: or NULL: nobody asks. */
void porter_close(struct porter_errand *errand, int fd);
/* Descriptors that porter_close() was given without an errand, and that the porter has not come to yet. */
size_t porter_backlog(void);
/* Neither is called any more. */
void porter_forget(struct porter_errand *errand);

/* Takes out what lies in a frame, which stays the caller's: for who may wait. Returns a descriptor or -errno. */
int porter_open_frame(int frame);
