/*
 * Makes and frees the one struct gpu, for daemon.c. A first worker is started to see whether
 * there is a GPU that can be used, and why not, and is let go.
 */
#include "base/log.h"
#include "gpu/internal.h"
#include "proto/cuda_abi.h"
#include "proto/frame.h"
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <sys/wait.h>

/* A driver whose devices sleep may take seconds to wake them. */
#define PROBE_NS (10 * NSEC_PER_SEC)

/* What a worker says first: whether it can work. Returns 0, or why it cannot. */
static int await_ready(int socket, struct gpu_event *ret_event)
{
	uint64_t until = clock_now_ns() + PROBE_NS, now;
	struct pollfd poll_fd = { .fd = socket, .events = POLLIN };
	int fd, r;

	while ((now = clock_now_ns()) < until) {
		if (poll(&poll_fd, 1, (int)((until - now) / NSEC_PER_MSEC) + 1) < 0 &&
		    errno != EINTR)
			return error_origin(-errno);
		r = gpu_event_receive(socket, ret_event, &fd);
		if (!r)
			(void)fd_close(fd);
		if (r == FRAME_E_EOF)
			return error_origin(-EPIPE);
		if (r != FRAME_E_AGAIN)
			return error_trace(r);
	}
	return error_origin(-ETIMEDOUT);
}

/* Starts a worker to see what it says, and lets it go. */
static void probe(struct gpu *gpu)
{
	struct gpu_event event = { 0 };
	siginfo_t info;
	int pidfd, socket, r;
	pid_t pid;

	r = gpu_process_start(gpu->params.program, &pid, &pidfd, &socket);
	if (r) {
		(void)snprintf(gpu->text, sizeof(gpu->text), "a worker cannot be started: %s",
			       strerror(-r));
		return;
	}
	r = await_ready(socket, &event);
	if (!r && event.kind != GPU_EVENT_READY)
		r = error_origin(-EPROTO);
	gpu->is_there = !r && !event.status;
	if (r)
		(void)snprintf(gpu->text, sizeof(gpu->text), "the worker that looked for them: %s",
			       strerror(-r));
	else
		(void)snprintf(gpu->text, sizeof(gpu->text), "%s", event.text);
	(void)fd_close(socket);
	(void)syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, NULL, 0);
	while (waitid((idtype_t)P_PIDFD, (id_t)pidfd, &info, WEXITED) && errno == EINTR)
		;
	(void)fd_close(pidfd);
}

int gpu_new(const struct gpu_params *params, struct gpu **ret_gpu)
{
	struct gpu *gpu = calloc(1, sizeof(*gpu));
	const struct cuda *cuda;
	const char *reason = NULL;

	if (!gpu)
		return error_origin(-ENOMEM);
	gpu->params = *params;
	gpu->staging_fd = -1;
	gpu->pages.n = params->staging_bytes / GPU_PAGE;
	gpu->bytes_staged = (struct metric){
		.name = "bps_gpu_staged_bytes_total",
		.help = "Bytes copied between GPUs and staging in the host's memory.",
	};
	gpu->bytes_direct = (struct metric){
		.name = "bps_gpu_direct_bytes_total",
		.help = "Bytes that went between GPUs and RDMA devices without the host's memory.",
	};
	metric_register(&gpu->bytes_staged);
	metric_register(&gpu->bytes_direct);
	list_init(&gpu->workers);
	list_init(&gpu->arenas);
	list_init(&gpu->waiting);
	/* This loads the driver's library, and calls nothing that makes a context. */
	if (cuda_load(&cuda, &reason))
		(void)snprintf(gpu->text, sizeof(gpu->text), "%s", reason);
	else
		probe(gpu);
	*ret_gpu = gpu;
	return 0;
}

bool gpu_is_there(const struct gpu *gpu)
{
	return gpu->is_there;
}

const char *gpu_describe(const struct gpu *gpu)
{
	return gpu->text;
}

struct gpu *gpu_free(struct gpu *gpu)
{
	if (!gpu)
		return NULL;
	gpu_close(gpu);
	if (gpu->reaping)
		loop_unpost(gpu->params.loop, &gpu->reap);
	if (gpu->granting)
		loop_unpost(gpu->params.loop, &gpu->grant);
	gpu_staging_close(gpu);
	metric_unregister(&gpu->bytes_staged);
	metric_unregister(&gpu->bytes_direct);
	free(gpu);
	return NULL;
}
