/*
 * Staging: one memfd for all jobs, mapped here and in every worker, which registers it with the
 * driver. The agent's device.c takes leases of it for parts; jobs whose leases wait take turns.
 */
#include "gpu/internal.h"
#include <fcntl.h>
#include <sys/mman.h>

int gpu_staging_open(struct gpu *gpu)
{
	uint64_t len = gpu->pages.n * GPU_PAGE;
	_cleanup_(fd_closep) int fd = -1;
	void *data;

	if (gpu->staging)
		return 0;
	if (gpu_pages_init(&gpu->pages, gpu->pages.n))
		return error_trace(-ENOMEM);
	fd = memfd_create("bps-gpu-staging", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0 || ftruncate(fd, (off_t)len) ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
		int r = error_origin(-errno);

		gpu_staging_close(gpu);
		return r;
	}
	data = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (data == MAP_FAILED) {
		gpu_staging_close(gpu);
		return error_origin(-ENOMEM);
	}
	gpu->staging = data;
	gpu->staging_fd = TAKE_FD(fd);
	if (gpu->params.staging_ops) {
		int r = gpu->params.staging_ops->opened(gpu->params.user, data, len);

		if (r) {
			gpu_staging_close(gpu);
			return error_trace(r);
		}
	}
	return 0;
}

void gpu_staging_close(struct gpu *gpu)
{
	if (gpu->staging && gpu->params.staging_ops)
		gpu->params.staging_ops->closing(gpu->params.user, gpu->staging);
	if (gpu->staging)
		(void)munmap(gpu->staging, gpu->pages.n * GPU_PAGE);
	gpu->staging = NULL;
	gpu->staging_fd = fd_close(gpu->staging_fd);
	gpu_pages_done(&gpu->pages);
}

static bool take(struct gpu_lease *lease)
{
	struct gpu *gpu = lease->gpu;
	uint64_t n = gpu_pages_of(lease->len), page;

	if (lease->is_long && gpu->n_long + n > gpu->pages.n / 2)
		return false;
	if (!gpu_pages_take(&gpu->pages, n, &page))
		return false;
	if (lease->is_long)
		gpu->n_long += n;
	lease->offset = page * GPU_PAGE;
	lease->data = gpu->staging + lease->offset;
	return true;
}

int gpu_lease_take(struct gpu_worker *worker, struct gpu_lease *lease, uint64_t len, bool is_long)
{
	struct gpu *gpu = worker->gpu;

	lease->gpu = gpu;
	lease->arena = NULL;
	lease->worker = worker;
	lease->len = len;
	lease->is_long = is_long;
	lease->waits = false;
	lease->data = NULL;
	if (len > gpu->pages.n * GPU_PAGE)
		return error_origin(-EMSGSIZE);
	/* Who waits comes first. */
	if (list_empty(&gpu->waiting) && take(lease))
		return 0;
	if (is_long)
		return GPU_E_WAIT;
	lease->waits = true;
	list_push_back(&worker->leases, &lease->link);
	if (!list_linked(&worker->wait_link))
		list_push_back(&gpu->waiting, &worker->wait_link);
	return GPU_E_WAIT;
}

void gpu_staging_grant(struct gpu *gpu)
{
	struct gpu_worker *worker;

	while ((worker = list_first(&gpu->waiting, struct gpu_worker, wait_link))) {
		struct gpu_lease *lease = list_first(&worker->leases, struct gpu_lease, link);

		/* Nobody overtakes: a large piece would otherwise wait for ever. */
		if (!take(lease))
			return;
		list_remove(&lease->link);
		lease->waits = false;
		/* The next turn is another job's. */
		list_remove(&worker->wait_link);
		if (!list_empty(&worker->leases))
			list_push_back(&gpu->waiting, &worker->wait_link);
		lease->granted(lease);
		/* The last that kept a dead one, perhaps. */
		gpu_worker_idle(worker);
	}
}

static void on_grant(struct mail *mail)
{
	struct gpu *gpu = container_of(mail, struct gpu, grant);

	gpu->granting = false;
	gpu_staging_grant(gpu);
}

static void grant_later(struct gpu *gpu)
{
	if (gpu->granting || list_empty(&gpu->waiting))
		return;
	gpu->granting = true;
	gpu->grant.run = on_grant;
	loop_post(gpu->params.loop, &gpu->grant);
}

void gpu_lease_give(struct gpu_lease *lease)
{
	struct gpu *gpu;
	uint64_t n;

	if (lease->arena) {
		gpu_direct_give(lease);
		return;
	}
	if (lease->waits) {
		list_remove(&lease->link);
		lease->waits = false;
		if (list_empty(&lease->worker->leases))
			list_remove(&lease->worker->wait_link);
		gpu_worker_idle(lease->worker);
		grant_later(lease->gpu);
		return;
	}
	if (!lease->data)
		return;
	gpu = lease->gpu;
	n = gpu_pages_of(lease->len);
	gpu_pages_give(&gpu->pages, lease->offset / GPU_PAGE, n);
	if (lease->is_long)
		gpu->n_long -= n;
	lease->data = NULL;
	grant_later(gpu);
}

uint64_t gpu_staging_len(const struct gpu_worker *worker)
{
	return worker->gpu->pages.n * GPU_PAGE;
}
