/*
 * Stands for a GPU worker: says that it is there, and then does what FAKE_WORKER says:
 *
 *	ready	answers each MARK
 *	done	the same, once it has been stopped and is told to go on
 *	unknown	says what there is not
 *	short	says less than an event
 *	abort	ends by SIGABRT
 *	other	does not begin with READY
 *	gone	ends without a word
 *	refuse	says that it has no memory for other devices before it is asked, and is stopped
 *	arena	as ready, and says that it has; what it hands over is a descriptor of something else
 */
#include "gpu/wire.h"
#include "proto/frame.h"
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

static void say(uint32_t kind, uint64_t ticket)
{
	struct gpu_event event = { .kind = kind, .ticket = ticket };

	(void)frame_send(GPU_SOCKET_FD, &event, offsetof(struct gpu_event, text) + 1, NULL, 0);
}

/* Marks of one packet are told together. */
static void say_done(struct gpu_event *event)
{
	if (event->number)
		(void)frame_send(GPU_SOCKET_FD, event,
				 offsetof(struct gpu_event, done) +
					 event->number * sizeof(event->done[0]),
				 NULL, 0);
	event->number = 0;
}

static void say_arena(int status)
{
	struct gpu_event event = { .kind = GPU_EVENT_ARENA, .status = status };
	int fd = STDIN_FILENO;

	(void)frame_send(GPU_SOCKET_FD, &event, offsetof(struct gpu_event, text) + 1, &fd, !status);
}

static void serve(void)
{
	static char packet[FRAME_MAX] __attribute__((__aligned__(8)));
	const struct gpu_command *commands = (const void *)packet;
	int fds[FRAME_FDS];

	for (;;) {
		struct gpu_event done = { .kind = GPU_EVENT_DONE };
		size_t len = 0, n_fds = 0;

		if (frame_receive(GPU_SOCKET_FD, packet, &len, fds, &n_fds))
			return;
		while (n_fds)
			(void)close(fds[--n_fds]);
		for (size_t i = 0; i < len / sizeof(*commands); i++) {
			if (commands[i].op == GPU_OP_MARK)
				done.done[done.number++] = commands[i].ticket;
			else if (commands[i].op == GPU_OP_CLOSE)
				say(GPU_EVENT_CLOSED, commands[i].memory);
			else if (commands[i].op == GPU_OP_ARENA)
				say_arena(0);
			else if (commands[i].op == GPU_OP_END)
				return;
			if (done.number == GPU_DONE_MAX)
				say_done(&done);
		}
		say_done(&done);
	}
}

int main(void)
{
	const char *mode = getenv("FAKE_WORKER");

	if (!strcmp(mode, "gone"))
		return 0;
	say(strcmp(mode, "other") ? GPU_EVENT_READY : GPU_EVENT_DONE, 0);
	if (!strcmp(mode, "unknown"))
		say(99, 0);
	if (!strcmp(mode, "short"))
		(void)!write(GPU_SOCKET_FD, "what", 4);
	if (!strcmp(mode, "abort"))
		(void)raise(SIGABRT);
	if (!strcmp(mode, "refuse"))
		say_arena(-EOPNOTSUPP);
	if (!strcmp(mode, "done") || !strcmp(mode, "refuse"))
		(void)raise(SIGSTOP);
	serve();
	return 0;
}
