"""join(): a rank that has come to the end of its data follows the others until all ranks have: libbps_client tells which operations
they begin, and this rank takes part in them. A sum or an average has zeros from it, a barrier its presence; any other operation
fails on all ranks, which is better than to wait.
"""

import collections
import ctypes
import errno

from . import _client, _ops
from ._client import ALL, Arena
from ._errors import BpsError
from ._library import SIZES, VARIABLE, Operation, Order, Reduction

NAME = "bps.join"  # of what all ranks do in the end
BARRIER = "bps:barrier"  # the library's name for barriers without one
BUSY_MS = 10  # how long it waits for the others at first, while something of its own is under way


class _Memory:
    """What operations read and write. All read the same zeros. Each has memory of its own for its result until it has ended: a daemon
    makes the result of all ranks in that of one.
    """

    def __init__(self, client):
        self._client = client
        self._zeros = None
        self._free = {}  # by length: buffers
        self._used = collections.deque()  # (request, buffer), in the order of their submission

    def spans(self, dtype, count):
        """(zeros, room for the result)"""
        if not count:
            return _ops.Span(0, dtype, 0), _ops.Span(0, dtype, 0)
        length = 1 << (SIZES[dtype] * count - 1).bit_length()
        if self._zeros is None or len(self._zeros) < length:
            self._zeros = Arena.buffer(self._client, length)
        free = self._free.get(length)
        result = free.pop() if free else Arena.buffer(self._client, length)
        return tuple(_ops.Span(ctypes.addressof(buffer), dtype, count, buffer) for buffer in (self._zeros, result))

    def used(self, request, result):
        """result: the span of a request that is under way; of those that have ended it is free again."""
        if result.owner is not None:
            self._used.append((request, result.owner))
        while self._used and self._used[0][0].poll():
            _, buffer = self._used.popleft()
            self._free.setdefault(len(buffer), []).append(buffer)


class _Follower:
    """own: parts of names of tensors whose operations this rank submits by itself."""

    def __init__(self, client, own):
        self.client = client
        self.n_served = 0  # operations that others have begun
        self._own = own
        self._memory = _Memory(client)

    def run(self, start, is_busy):
        """Until all ranks follow. start(): begins what this rank does beside; is_busy(): whether that is under way."""
        idle, wait_ms = False, BUSY_MS
        self.client.follow(True)
        try:
            start()
            while True:
                if not idle and not is_busy() and not _ops.advance_open() and not self.client.is_busy():
                    self.client.follow(True, idle=True)
                    idle = True
                begun = self.client.begun(_client.SLICE_MS if idle else wait_ms)
                wait_ms = min(2 * wait_ms, _client.SLICE_MS) if begun is None else BUSY_MS
                if begun is ALL:
                    break
                if begun is not None:
                    self._take(begun)
        except BaseException:
            self._end_in_vain()
            raise
        self.client.follow(False)

    def _end_in_vain(self):
        try:
            self.client.follow(False)
        except BpsError:
            pass  # of a job that is over: that is why it ends

    def _take(self, begun):
        name = begun.name.decode()
        if any(each in name for each in self._own) or name in _ops.open_names():
            return
        self.n_served += 1
        if name == BARRIER:
            self.client.barrier()
            return
        try:
            self._serve(name, begun)
        except BpsError as error:
            if error.errno != errno.EALREADY:  # another thread of this rank has come to it
                raise

    def _serve(self, name, begun):
        """Where there is no memory for zeros, the others are not to wait for them."""
        adds = begun.operation == Operation.PUSH_PULL and begun.reduction in (Reduction.SUM, Reduction.AVERAGE)
        if begun.operation == Operation.BARRIER:
            self._submit(name, begun, Operation.BARRIER, 0, 0)
        elif not adds or begun.elements == VARIABLE:
            self._submit(name, begun, Operation.REFUSE, 0, 0)
        else:
            try:
                self._submit(name, begun, begun.operation, begun.reduction, begun.elements)
            except BpsError as error:
                if error.errno not in (errno.ENOMEM, errno.EDQUOT):
                    raise
                self._submit(name, begun, Operation.REFUSE, 0, 0)
                raise

    def _submit(self, name, begun, operation, reduction, count):
        source, target = self._memory.spans(begun.dtype, count)
        more = {"reduction": reduction, "round": begun.round}
        request = _ops.submit(self.client, name, begun.elements, source, target, operation, **more)
        self._memory.used(request, target)


def _tell_all(client, mine):
    """What each rank says, a few numbers."""
    n = len(mine)
    _, source = _ops.int64_span(mine)
    said, target = _ops.int64_span([0] * (n * client.size))
    request = _ops.all_gather_equal(source, target, NAME)
    request.wait()
    request.check()
    return [said[i : i + n] for i in range(0, n * client.size, n)]


def join(start=lambda: None, is_busy=lambda: False, own=(), n_served=lambda: 0):
    """Takes part in what other ranks begin, until all ranks have called it. Returns the highest rank that was the last to.

    start, is_busy, own: of _Follower. n_served(): how many operations of others it has taken part in beside.
    """
    client = _client.of_all_ranks()
    follower = _Follower(client, (*own, f".{NAME}"))
    follower.run(start, is_busy)
    orders = [Order.CALLS, Order.PROGRAMS]
    # What others began without names had places that this rank has yet to take.
    places = [client.take_ordinal(order) for order in orders]
    with _client.using(None):
        everyone = _tell_all(client, [follower.n_served + n_served(), *places])
    served, *theirs = zip(*everyone)
    for order, place, taken in zip(orders, places, theirs):
        client.skip_ordinals(order, place, max(taken))
    return max(rank for rank, n in enumerate(served) if n == min(served))
