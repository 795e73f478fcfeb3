"""A storage of torch moved, where it is, into memory that the daemon reads.

DistributedDataParallel of torch owns its buckets and has views into them all over; what can be changed is the memory under
their address. torch itself moves a storage into POSIX shared memory, page by page and apart from everything else, but
such memory cannot be sealed and the daemon does not take it; so a memfd is mapped over it at the same address. When torch
releases the storage it unmaps that range, as it would have unmapped its own. A child of fork() has a copy, as of what torch owns.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import weakref

from .. import _client
from .._errors import BpsError

SHARED_MEMORY = "/dev/shm"  # where torch makes its
NO_ROOM = (errno.ENOMEM, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOSPC)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_MAP_FIXED = 0x10

_live = weakref.WeakSet()


class SharedStorage:
    """Keeps the storage as long as the daemon's side of it. release() ends both; so does its end. fd: the memfd, now its own."""

    def __init__(self, client, storage, pointer, fd):
        self.client = client
        self.address = storage.data_ptr()
        self._storage = storage
        self._pointer = pointer
        self._fd = fd
        _live.add(self)

    def release(self):
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            os.close(self._fd)
            self.client.drop(self.client.lib.bps_memory_free, pointer)
        self._storage = None

    def copy(self):
        """In a child of fork(): what either process writes from now on is its own."""
        if self._pointer is not None:
            _map(self._storage, mmap.MAP_PRIVATE, self._fd)

    def __del__(self):
        self.release()


def share(storage):
    """A SharedStorage; None where that cannot be: the storage is shared with others already, or there is no room."""
    length = storage.nbytes()
    if length == 0 or storage.device.type != "cpu" or storage.is_shared() or not _has_room(length):
        return None
    theirs = storage._share_fd_cpu_()[0]
    try:
        ours = _memfd_over(storage)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        return None  # it stays in torch's shared memory
    try:
        os.ftruncate(theirs, 0)  # torch's, which stays open; nobody has it mapped any more
        return _imported(storage, ours)
    except BaseException as error:
        _map(storage, mmap.MAP_PRIVATE, ours)  # as it was
        os.close(ours)
        if not isinstance(error, BpsError) or error.errno not in NO_ROOM:
            raise
        return None


def _has_room(length):
    """torch writes into its file without having reserved the space: where there is too little it would die by SIGBUS."""
    try:
        room = os.statvfs(SHARED_MEMORY)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize >= 2 * length


def _memfd_over(storage):
    """Maps a memfd with the same content over the storage's pages."""
    length, address = storage.nbytes(), storage.data_ptr()
    fd = os.memfd_create("bps-bucket", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, -(-length // mmap.PAGESIZE) * mmap.PAGESIZE)
        content = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
        written = 0
        while written < length:
            written += os.pwrite(fd, content[written:], written)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        _map(storage, mmap.MAP_SHARED, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _map(storage, kind, fd):
    length, address = storage.nbytes(), storage.data_ptr()
    if _libc.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, kind | _MAP_FIXED, fd, 0) != address:
        raise OSError(ctypes.get_errno(), f"cannot map {length} bytes: {os.strerror(ctypes.get_errno())}")


def _imported(storage, fd):
    client = _client.current()
    length = -(-storage.nbytes() // mmap.PAGESIZE) * mmap.PAGESIZE
    pointer = ctypes.c_void_p()
    with client.lock:
        client.check_open()
        client.free_dropped()
        client.call(client.lib.bps_memory_import, client.pointer, fd, storage.data_ptr(), length, ctypes.byref(pointer))
    return SharedStorage(client, storage, pointer.value, fd)


def _copy_after_fork():
    for storage in list(_live):
        storage.copy()


os.register_at_fork(after_in_child=_copy_after_fork)
