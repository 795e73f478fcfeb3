/*
 * Memory of the host that the daemon maps: allocated here or the caller's memfd, found by
 * address, counted by the requests that use it. submit.c looks for inputs and outputs here,
 * staging.c has its arenas from here, session.c shares all of it with the next daemon.
 */
#include "cuda.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#define MEMORY_PAGE 4096
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U /* Linux 6.3 */
#endif

static int memfd_new(size_t len, int *ret_fd)
{
	_cleanup_(fd_closep) int fd = -1;
	unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;

	fd = memfd_create("bps", flags | MFD_NOEXEC_SEAL);
	if (fd < 0 && errno == EINVAL)
		fd = memfd_create("bps", flags);
	if (fd < 0)
		return error_set(-errno, "cannot make memory to share: %m");
	if (ftruncate(fd, (off_t)len) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW))
		return error_set(errno == EFBIG || errno == ENOSPC ? -ENOMEM : -errno,
				 "cannot make %zu bytes of memory to share: %m", len);
	*ret_fd = TAKE_FD(fd);
	return 0;
}

/*
 * All its pages are there from here on, charged to this process: the daemon takes no memory whose
 * pages would be its own when it touches them.
 */
static int populate(void *data, size_t len)
{
	char *bytes = data;

	if (!madvise(data, len, MADV_POPULATE_WRITE))
		return 0;
	if (errno != EINVAL)
		return error_set(errno == EFAULT ? -ENOMEM : -errno,
				 "there is no memory for the %zu bytes to be shared: %m", len);
	/* Before Linux 5.14. Others may write meanwhile: nothing is changed. */
	for (size_t at = 0; at < len; at += MEMORY_PAGE)
		(void)__atomic_fetch_or(&bytes[at], 0, __ATOMIC_RELAXED);
	return 0;
}

static void memory_answered(struct bps_client *client, struct client_call *call)
{
	struct bps_memory *memory = container_of(call, struct bps_memory, share);

	/*
	 * Nobody waits for what the next daemon says. Without it, no request would find its data.
	 */
	if (call->status && memory->taken && !client->failure)
		client_fail(client,
			    "the daemon at %s does not take memory that the one before it had: %s",
			    client->path, call->text);
	memory->taken |= !call->status;
}

static void memory_forget(struct bps_memory *memory)
{
	call_forget(memory->client, &memory->share);
	TAILQ_REMOVE(&memory->client->memory.shared, memory, link);
}

int memory_share(struct bps_memory *memory)
{
	struct bps_client *client = memory->client;
	int r;

	if (client->memory.next == UINT32_MAX)
		return error_set(-EDQUOT, "this client has shared memory too often: open another");
	memory->number = ++client->memory.next;
	memory->share.answered = memory_answered;
	TAILQ_INSERT_TAIL(&client->memory.shared, memory, link);
	r = call_share(client, memory);
	r = r ?: call_wait(client, &memory->share, CLIENT_FOREVER);
	if (r)
		memory_forget(memory);
	return r;
}

/*
 * A child of fork() has copies of what its parent has in memory of its own, and of no other: what the child writes must not
 * change gradients of the parent. So the child maps memory anew that the library has mapped.
 */
static LIST_HEAD(, bps_memory) all_mapped; /* guarded by client_fork_lock() */

static void memory_copy(struct bps_memory *memory)
{
	void *data = mmap(memory->data, memory->len, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_FIXED, memory->fd, 0);

	/* No memory is better than the parent's. */
	if (data == MAP_FAILED)
		(void)munmap(memory->data, memory->len);
}

void memory_forked(void)
{
	struct bps_memory *memory;

	LIST_FOREACH(memory, &all_mapped, mapped)
	memory_copy(memory);
	LIST_INIT(&all_mapped);
}

static void memory_unmap(struct bps_memory *memory)
{
	client_fork_lock();
	LIST_REMOVE(memory, mapped);
	(void)munmap(memory->data, memory->len);
	client_fork_unlock();
}

int memory_new(struct bps_client *client, size_t len, struct bps_memory **ret_memory)
{
	_cleanup_(fd_closep) int fd = -1;
	struct bps_memory *memory;
	void *data;
	int r;

	r = memfd_new(len, &fd);
	if (r)
		return r;
	data = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (data == MAP_FAILED)
		return error_set(-errno, "cannot map %zu bytes: %m", len);
	/* Where the administrator allows it for shared memory; fewer page faults on first use. */
	(void)madvise(data, len, MADV_HUGEPAGE);

	r = populate(data, len);
	if (r) {
		(void)munmap(data, len);
		return r;
	}
	memory = calloc(1, sizeof(*memory));
	if (!memory) {
		(void)munmap(data, len);
		return error_set(-ENOMEM, "out of memory");
	}
	*memory = (struct bps_memory){
		.client = client,
		.data = data,
		.len = len,
		.ours = true,
		.fd = fd,
	};
	client_fork_lock();
	LIST_INSERT_HEAD(&all_mapped, memory, mapped);
	client_fork_unlock();
	r = memory_share(memory);
	if (r) {
		memory_unmap(memory);
		free(memory);
		return r;
	}
	(void)TAKE_FD(fd);
	*ret_memory = memory;
	return 0;
}

/* Only what no request uses. The daemon unmaps by itself, when it is ready to. */
struct bps_memory *memory_free(struct bps_memory *memory)
{
	if (!memory)
		return NULL;
	memory_forget(memory);
	if (memory->cuda) {
		cuda_memory_free(memory);
		return NULL;
	}
	if (!memory->client->failure)
		(void)call_unshare(memory->client, NULL, memory->number);
	if (memory->ours)
		memory_unmap(memory);
	fd_close(memory->fd);
	free(memory);
	return NULL;
}

/* Index of the first of the caller's memories that starts behind data. */
static size_t memory_above(const struct bps_client *client, const void *data)
{
	size_t low = 0, high = client->memory.n;

	while (low < high) {
		size_t middle = low + (high - low) / 2;

		if ((uintptr_t)client->memory.by_address[middle]->data <= (uintptr_t)data)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

struct bps_memory *memory_find(struct bps_client *client, const void *data, size_t len)
{
	size_t above = memory_above(client, data);
	struct bps_memory *memory;
	size_t offset;

	if (!above)
		return NULL;
	memory = client->memory.by_address[above - 1];
	offset = (uintptr_t)data - (uintptr_t)memory->data;
	if (memory->released || offset > memory->len || len > memory->len - offset)
		return NULL;
	return memory;
}

static int memory_reserve_entry(struct bps_client *client)
{
	size_t capacity = MAX(client->memory.capacity * 2, (size_t)16);
	struct bps_memory **memories;

	if (client->memory.n < client->memory.capacity)
		return 0;
	memories = reallocarray(client->memory.by_address, capacity, sizeof(struct bps_memory *));
	if (!memories)
		return error_set(-ENOMEM, "out of memory");
	client->memory.by_address = memories;
	client->memory.capacity = capacity;
	return 0;
}

static void memory_insert(struct bps_client *client, struct bps_memory *memory)
{
	size_t at = memory_above(client, memory->data);

	memmove(client->memory.by_address + at + 1, client->memory.by_address + at,
		(client->memory.n - at) * sizeof(struct bps_memory *));
	client->memory.by_address[at] = memory;
	client->memory.n++;
}

static void memory_remove(struct bps_client *client, const struct bps_memory *memory)
{
	for (size_t at = 0; at < client->memory.n; at++) {
		if (client->memory.by_address[at] != memory)
			continue;
		client->memory.n--;
		memmove(client->memory.by_address + at, client->memory.by_address + at + 1,
			(client->memory.n - at) * sizeof(struct bps_memory *));
		return;
	}
}

void memory_use(struct bps_memory *memory)
{
	if (memory)
		memory->n_users++;
}

/* May free the memory, and with it a reference to the client: the caller has another. */
void memory_unuse(struct bps_memory *memory)
{
	struct bps_client *client;

	if (!memory || --memory->n_users || !memory->released)
		return;
	client = memory->client;
	if (memory->cuda) {
		memory_free(memory);
		return;
	}
	memory_remove(client, memory);
	memory_free(memory);
	client_unref(client);
}

_public_ int bps_memory_alloc(struct bps_client *client, size_t len, struct bps_memory **ret_memory)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	struct bps_memory *memory;
	int r;

	r = client_check(client);
	if (r)
		return r;
	if (!ret_memory)
		return error_set(-EINVAL, "ret_memory is NULL");
	if (len > (size_t)INT64_MAX - page)
		return error_set(-ENOMEM, "%zu bytes are more than there can be", len);

	CLIENT_LOCKED(client);
	r = client_failed(client);
	r = r ?: memory_new(client, align_up(MAX(len, (size_t)1), page), &memory);
	if (r)
		return r;
	r = memory_reserve_entry(client);
	if (r) {
		memory_free(memory);
		return r;
	}
	memory_insert(client, memory);
	client_ref(client);
	*ret_memory = memory;
	return 0;
}

/* The seal is what protects the daemon: without it, it could be made to fault by a truncation. */
static int memory_check_import(int fd, const void *data, size_t len)
{
	struct stat st;

	if (!len || !data || (uintptr_t)data % (size_t)sysconf(_SC_PAGESIZE))
		return error_set(-EINVAL, "memory to import is empty or does not start at a page");
	if (fstat(fd, &st))
		return error_set(-errno, "cannot import memory: %m");
	if (st.st_size < 0 || (uint64_t)st.st_size < len)
		return error_set(-EINVAL, "the descriptor has %lld bytes, fewer than %zu",
				 (long long)st.st_size, len);
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)) {
		int seals = fcntl(fd, F_GET_SEALS);

		if (seals < 0 || !(seals & F_SEAL_SHRINK))
			return error_set(-EPERM, "the descriptor cannot be sealed: use "
						 "memfd_create() with MFD_ALLOW_SEALING");
	}
	return 0;
}

_public_ int bps_memory_import(struct bps_client *client, int fd, void *data, size_t len,
			       struct bps_memory **ret_memory)
{
	_cleanup_(freep) struct bps_memory *memory = NULL;
	_cleanup_(fd_closep) int copy = -1;
	int r;

	r = client_check(client);
	if (r)
		return r;
	if (!ret_memory)
		return error_set(-EINVAL, "ret_memory is NULL");
	r = memory_check_import(fd, data, len);
	r = r ?: populate(data, len);
	if (r)
		return r;
	memory = calloc(1, sizeof(*memory));
	if (!memory)
		return error_set(-ENOMEM, "out of memory");
	copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	if (copy < 0)
		return error_set(-errno, "no descriptor to keep the memory by: %m");
	*memory = (struct bps_memory){ .client = client, .data = data, .len = len, .fd = copy };

	CLIENT_LOCKED(client);
	r = client_failed(client);
	r = r ?: memory_share(memory);
	if (r)
		return r;
	r = memory_reserve_entry(client);
	if (r) {
		memory_forget(memory);
		(void)call_unshare(client, NULL, memory->number);
		return r;
	}
	(void)TAKE_FD(copy);
	memory_insert(client, memory);
	client_ref(client);
	*ret_memory = TAKE_PTR(memory);
	return 0;
}

_public_ void *bps_memory_data(const struct bps_memory *memory)
{
	return memory ? memory->data : NULL;
}

_public_ size_t bps_memory_len(const struct bps_memory *memory)
{
	return memory ? memory->len : 0;
}

_public_ void bps_memory_free(struct bps_memory *memory)
{
	struct bps_client *client;

	if (!memory || client_check(memory->client))
		return;
	client = client_ref(memory->client);
	client_lock(client);
	memory->released = true;
	/* As the user that is last, unless a request is under way. */
	memory->n_users++;
	memory_unuse(memory);
	client_unlock(client);
	client_unref(client);
}
