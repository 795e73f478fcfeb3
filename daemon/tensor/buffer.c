/*
 * Memory of trainers: a memfd checked and mapped, or addresses for memory of a device; counted,
 * and unmapped when neither shared nor in use. control/ makes buffers; ledger/ has a ledger
 * mapped as a buffer.
 */
#include "tensor/tensor.h"

#include "base/pages.h"
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

/* To give back so much takes the kernel some 0.2 s. */
#define CALM_LEN_MAX ((off_t)256 << 20)
/* More than any device has. */
#define DEVICE_LEN_MAX (UINT64_C(1) << 40)

static int check_memory(int fd, uint64_t len, bool *ret_stalls, struct failure *failure)
{
	struct statfs fs;
	struct stat st;
	int seals;

	/* First: files of all kinds answer this at once. What has seals is memory, and answers the rest at once, too. */
	seals = fcntl(fd, F_GET_SEALS);
	if (seals < 0)
		return failure_set(failure, -EINVAL, "the descriptor is not a memfd");
	if (fstat(fd, &st) || fstatfs(fd, &fs))
		return failure_set(failure, -errno, "cannot look at the descriptor: %s",
				   strerror(errno));
	if (!S_ISREG(st.st_mode) || fs.f_type != TMPFS_MAGIC)
		return failure_set(failure, -EINVAL,
				   "the descriptor is not a memfd of normal pages");
	if (!(seals & F_SEAL_SHRINK))
		return failure_set(failure, -EPERM, "the memfd is not sealed against shrinking");
	if (!len || len > SIZE_MAX / 2)
		return failure_set(failure, -EINVAL, "%" PRIu64 " bytes cannot be shared", len);
	/* Sealed: it can only grow from here on. */
	if ((uint64_t)st.st_size < len)
		return failure_set(failure, -EINVAL,
				   "the memfd has %" PRIu64 " bytes, less than the %" PRIu64
				   " to be shared",
				   (uint64_t)st.st_size, len);
	*ret_stalls = st.st_size > CALM_LEN_MAX || !(seals & F_SEAL_GROW);
	return 0;
}

int buffer_map(int fd, uint64_t len, struct quota *quota, struct buffer **ret_buffer,
	       struct failure *failure)
{
	_cleanup_(freep) struct buffer *buffer = NULL;
	bool stalls;
	void *data;
	int r;

	r = check_memory(fd, len, &stalls, failure);
	if (r)
		return r;
	buffer = calloc(1, sizeof(*buffer));
	if (!buffer)
		return failure_set(failure, -ENOMEM, "out of memory");
	if (quota_charge(quota, len))
		return failure_set(failure, -EDQUOT,
				   "%" PRIu64 " bytes are too many beside %" PRIu64
				   " shared already: session_quota is %" PRIu64,
				   len, quota_used(quota), quota->limit);
	data = mmap(NULL, (size_t)len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (data == MAP_FAILED) {
		r = failure_set(failure, errno == EACCES || errno == EPERM ? -EPERM : -errno,
				"cannot map the memfd for reading and writing: %s",
				strerror(errno));
		quota_release(quota, len);
		return r;
	}

	*buffer = (struct buffer){
		.refs = 1,
		.data = data,
		.len = len,
		.quota = quota,
		.stalls = stalls,
		.burial_fd = -1,
	};
	*ret_buffer = TAKE_PTR(buffer);
	return 0;
}

int buffer_check_whole(int fd, uint64_t len, struct failure *failure)
{
	uint64_t there;
	struct stat st;

	if (fstat(fd, &st))
		return failure_set(failure, -errno, "cannot look at the descriptor: %s",
				   strerror(errno));
	there = (uint64_t)st.st_blocks * 512;
	if (there >= len)
		return 0;
	return failure_set(failure, -EINVAL,
			   "of the memfd's pages, %" PRIu64 " bytes of %" PRIu64
			   " have never been written: they would be charged to the daemon when it "
			   "writes them; madvise(MADV_POPULATE_WRITE) or fallocate(2) before Share",
			   len - there, len);
}

/* What stands for it is in pieces, of which there are at most so many, and as large at most as so many pieces are many. */
#define PIECES_MAX 1024
#define PIECE_MIN  (UINT64_C(2) << 20)

static uint64_t piece_len(const struct buffer *buffer)
{
	return MAX(align_up(buffer->len / PIECES_MAX, page_size()), PIECE_MIN);
}

static void end_burial(struct buffer *buffer)
{
	loop_abort(&buffer->burial);
	buffer->burial_fd = fd_close(buffer->burial_fd);
}

/* The next piece: to take pages out of the tables takes the kernel some 0.1 s for 4 GiB. */
static bool on_burial(struct chore *chore)
{
	struct buffer *buffer = container_of(chore, struct buffer, burial);
	uint64_t left = align_up(buffer->len, page_size()) - buffer->buried_to;
	uint64_t piece = MIN(piece_len(buffer), left);
	void *data = mmap(buffer->data + buffer->buried_to, (size_t)piece, PROT_READ | PROT_WRITE,
			  MAP_SHARED | MAP_FIXED, buffer->burial_fd, 0);

	if (data != MAP_FAILED)
		buffer->buried_to += piece;
	if (data != MAP_FAILED && piece < left)
		return true;
	/* Where there is no memory for it, each page that is met is given back again. */
	end_burial(buffer);
	return false;
}

void buffer_bury(struct buffer *buffer, struct loop *loop)
{
	if (buffer->buried)
		return;
	buffer->buried = true;
	buffer->burial_fd = memfd_create("bps-nothing", MFD_CLOEXEC);
	if (buffer->burial_fd < 0 || ftruncate(buffer->burial_fd, (off_t)piece_len(buffer))) {
		end_burial(buffer);
		return;
	}
	buffer->burial.step = on_burial;
	loop_begin(loop, &buffer->burial);
}

/* A user. Ledgers are together: trainers have no descriptor with which to take pages out of one. */
static const void *owner_of(const struct buffer *buffer)
{
	if (buffer->quota)
		return buffer->quota->parent ?: buffer->quota;
	return buffer->charges[1].quota ? (void *)buffer->charges[1].quota : buffer->data;
}

/* In a thread that unmaps: madvise() waits for others who give back pages of that memfd. */
void buffer_give_back(const struct buffer *buffer, void *data)
{
	size_t page = page_size();
	void *again;

	if ((uint64_t)((char *)data - buffer->data) < buffer->buried_to)
		return;
	/* mremap() of no bytes makes a second mapping of shared memory. */
	again = mremap(data, 0, page, MREMAP_MAYMOVE);
	if (again != MAP_FAILED)
		unmap_remove(owner_of(buffer), again, page,
			     (struct unmap_charge[UNMAP_CHARGES]){ 0 });
}

int buffer_check_device(uint64_t len, struct failure *failure)
{
	if (len && len <= DEVICE_LEN_MAX)
		return 0;
	return failure_set(failure, -EINVAL, "%" PRIu64 " bytes of a device cannot be shared", len);
}

int buffer_of_device(const struct gpu_memory_params *params, struct buffer **ret_buffer,
		     struct failure *failure)
{
	_cleanup_(freep) struct buffer *buffer = calloc(1, sizeof(*buffer));
	void *data;
	int r;

	if (!buffer)
		return failure_set(failure, -ENOMEM, "out of memory");
	data = mmap(NULL, (size_t)params->len, PROT_NONE,
		    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (data == MAP_FAILED)
		return failure_set(failure, -ENOMEM,
				   "no addresses for %" PRIu64 " bytes of a device: %s",
				   params->len, strerror(errno));
	r = gpu_memory_new(params, &buffer->device);
	if (r) {
		(void)munmap(data, (size_t)params->len);
		return failure_set(failure, r, "memory of a device: %s", strerror(-r));
	}
	buffer->refs = 1;
	buffer->burial_fd = -1;
	buffer->is_bare = true;
	buffer->data = data;
	buffer->len = params->len;
	*ret_buffer = TAKE_PTR(buffer);
	return 0;
}

struct buffer *buffer_ref(struct buffer *buffer)
{
	buffer->refs++;
	return buffer;
}

/* Nothing knows it any more. */
static void on_left(struct mail *mail)
{
	struct buffer *buffer = container_of(mail, struct buffer, left);

	end_burial(buffer);
	if (buffer->quota)
		buffer->charges[0] = (struct unmap_charge){
			quota_leave(buffer->quota, buffer->len),
			buffer->len,
		};
	if (buffer->is_bare)
		unmap_now(buffer->data, (size_t)buffer->len, buffer->charges);
	else
		unmap_shared(owner_of(buffer), buffer->data, (size_t)buffer->len, buffer->charges);
	if (buffer->released)
		buffer->released(buffer);
	free(buffer);
}

static void buffer_free(void *user)
{
	struct buffer *buffer = user;

	buffer->left.run = on_left;
	if (!buffer->leaving || buffer->leaving(buffer, &buffer->left))
		on_left(&buffer->left);
}

struct buffer *buffer_unref(struct buffer *buffer)
{
	if (!buffer || --buffer->refs)
		return NULL;
	if (buffer->device)
		gpu_memory_free(TAKE_PTR(buffer->device), buffer_free, buffer);
	else
		buffer_free(buffer);
	return NULL;
}

int buffer_range(const struct buffer *buffer, uint64_t offset, uint64_t count, size_t element_size,
		 void **ret_data)
{
	uint64_t bytes;

	if (MUL_OVERFLOW(count, (uint64_t)element_size, &bytes) || offset > buffer->len ||
	    bytes > buffer->len - offset || offset % element_size)
		return -EINVAL;
	*ret_data = buffer->data + offset;
	return 0;
}
