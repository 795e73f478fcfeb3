"""Operations on memory: what the front ends for NumPy and PyTorch have in common.

A Span is a piece of memory. Functions that need one message return its Request; operations that need more than one, one
after the other, are generators that yield each Request and return the result, to be run by a Handle.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import inspect
import os
import pickle
import threading
import time
import weakref
from _thread import start_new_thread
from typing import TYPE_CHECKING

from . import _client
from ._completer import completer_of
from ._errors import BpsError, BpsMembershipError, BpsTimeoutError, BpsValueError
from ._library import VARIABLE, DType, Operation, Order, Reduction, SubmitParams

if TYPE_CHECKING:  # ParamSpec came with Python 3.10
    from typing import Any, Callable, ParamSpec

    P = ParamSpec("P")


class Span:
    """count elements of dtype at address. owner keeps the memory.

    device: on which it is, with a function stream() that gives the handle of the stream that is current there; None: it is
    memory of the host. shape: of the array whose elements they are, if there is one.
    """

    __slots__ = ("address", "dtype", "count", "owner", "device", "shape")

    def __init__(self, address, dtype, count, owner=None, device=None, shape=None):
        self.address = address if count else None
        self.dtype = dtype
        self.count = count
        self.owner = owner
        self.device = device if count else None
        self.shape = shape or (count,)  # a number is an array of one


class Handle:
    """What the caller has of an operation under way, which goes on also when the handle is dropped. wait() gives its result;
    poll() tells whether wait() would return at once, and of an operation on memory of a device, for which wait() makes the
    stream wait that is current, whether the result is there.
    """

    _operation = None  # until its first request is submitted

    def __init__(self, steps):
        self._operation = _Operation(steps)

    def go_on(self):
        """Has the client's completer submit what has yet to be submitted, while nobody waits."""
        if self._operation.name is not None:
            _open.watch(self._operation)

    def __del__(self):
        operation = self._operation
        if operation is not None and operation.is_open():
            # Not here: the garbage collector may run this in a thread that another one waits for, which holds a client's lock.
            start_new_thread(_open.watch, (operation,))

    def poll(self):
        return self._operation.poll()

    def wait(self, timeout=None):
        """The result. timeout in seconds: BpsTimeoutError when it passes; the operation then goes on."""
        return self._operation.wait(timeout)

    def cancel(self):
        """Gives up an operation that still waits for other ranks; it then ends with BpsCanceledError for all."""
        self._operation.cancel()


class _Operation:
    """One of more than one request comes after those that were begun before it under the same name, in whatever order they
    are waited for: all ranks then submit the requests of a name in the same order. And while a thread waits for one, the
    client's completer goes on with the others, which another rank may be waiting for.
    """

    name = None  # of more than one request: what they are in turn under

    def __init__(self, steps):
        self._lock = threading.Lock()
        self._steps = steps
        self._request = None
        self._result = None
        self._error = None
        self._before = None  # the _Operation that is to end first
        self._watched = False  # by a completer
        self._advance()
        turn = getattr(self._request, "turn", None)
        if turn is not None:
            self.name, self.client = turn, self._request._client
            self._before = _open.add(self)

    def poll(self):
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits for it
        try:
            if not self._in_turn(_Operation.poll):
                return False
            while self._steps is not None and self._request.poll():
                self._take()
            return self._steps is None
        finally:
            self._lock.release()

    def wait(self, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout

        def left():
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise BpsTimeoutError(errno.ETIMEDOUT, f"not complete after {timeout} s")
        try:
            if self._steps is not None:
                _open.watch_others(self)
            if not self._in_turn(lambda before: before._ends(left())):
                raise BpsTimeoutError(errno.ETIMEDOUT, f"not complete after {timeout} s")
            while self._steps is not None:
                if not self._request.wait(left()):
                    raise BpsTimeoutError(errno.ETIMEDOUT, f"not complete after {timeout} s")
                self._take()
        finally:
            self._lock.release()
        if self._error is not None:
            raise self._error
        return self._result

    def is_open(self):
        """Whether a completer is to see to it if nobody waits."""
        return self.name is not None and self._steps is not None and not self._watched and not (self.client.forked or self.client.closing)

    def _in_turn(self, ended):
        """Whether those before have ended, of which ended(operation) sees to one. The oldest first."""
        before, operation = [], self._before
        while operation is not None:
            before.append(operation)
            operation = operation._before
        if not all(ended(operation) for operation in reversed(before)):
            return False
        self._before = None
        return True

    def _ends(self, timeout):
        """Waits until it has ended, well or not; False when timeout (in seconds) passed before."""
        try:
            self.wait(timeout)
        except BpsTimeoutError:
            return self._steps is None
        except Exception:
            if self._steps is not None:
                raise
            # How it ended is for the one who began it.
        return True

    def cancel(self):
        request = self._request
        if request is not None:
            request.cancel()

    def _take(self):
        error = self._request.outcome()
        if error is not None:
            self._end(error=error)
        else:
            try:
                self._advance()
            except Exception as error:
                self._end(error=error)

    def _advance(self):
        try:
            self._request = next(self._steps)
        except StopIteration as stop:
            self._end(result=stop.value)

    def _end(self, result=None, error=None):
        if self.name is not None:
            _open.discard(self)
        steps, self._steps, self._request = self._steps, None, None
        self._result, self._error = result, error
        steps.close()


def waits_for(start: Callable[P, Any]) -> Callable[[Callable], Callable[P, Any]]:
    """Makes of a function that has but a name and words one that calls start() with its arguments, and waits for the result."""

    def decorate(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            return start(*args, **kwargs).wait()

        call.__signature__ = inspect.signature(start)
        return call

    return decorate


def form_of(whole: Callable[P, Any], without=()) -> Callable[[Callable], Callable[P, Any]]:
    """Gives function(tensor, ..., **asked) the parameters of whole(), but for the first, which is its own, and those that it is without.
    All but the first come to it by name. What is not given does not come: who takes asked has the defaults.
    """
    rest = [p for p in list(inspect.signature(whole).parameters.values())[1:] if p.name not in without]

    def decorate(function):
        signature = inspect.Signature([*inspect.signature(function).parameters.values()][:1] + rest)
        names = tuple(signature.parameters)
        known = frozenset(names)

        @functools.wraps(function)
        def form(*args, **kwargs):
            if len(args) > len(names) or not known.issuperset(kwargs):
                wrong = ", ".join(sorted(kwargs.keys() - known)) or f"{len(args)} arguments"
                raise TypeError(f"{function.__name__}() takes {', '.join(names)}, and not {wrong}")
            if len(args) > 1:
                return function(args[0], **dict(zip(names[1:], args[1:])), **kwargs)
            return function(*args, **kwargs)

        form.__signature__ = signature
        return form

    return decorate


def group_names(name, count):
    """The i-th tensor of a group called x is called x.i. Names are left out for all or for none."""
    return [None if name is None else f"{name}.{i}" for i in range(count)]


class _Open:
    """The operations whose last request may not have been submitted."""

    def __init__(self):
        self._lock = threading.RLock()  # a signal handler may begin an operation
        self._operations = weakref.WeakSet()  # under the lock; they are kept in turns of their clients

    def add(self, operation):
        """Returns the one before it in its turn, or None."""
        turns = operation.client.turns
        with self._lock:
            self._operations.add(operation)
            before, turns[operation.name] = turns.get(operation.name), operation
            return before

    def discard(self, operation):
        turns = operation.client.turns
        with self._lock:
            self._operations.discard(operation)
            if turns.get(operation.name) is operation:
                del turns[operation.name]

    def advance(self):
        """Goes on with all as far as they can. Whether some have not ended."""
        with self._lock:
            operations = list(self._operations)
        return not all([operation.poll() for operation in operations])

    def names(self):
        """Of tensors on which this process is yet to submit something, for operations that it has begun."""
        with self._lock:
            return {operation.name for operation in self._operations}

    def watch_others(self, waiting):
        """Has completers see to all but the one that this thread is about to wait for."""
        if self._operations:
            with self._lock:
                others = [operation for operation in self._operations if operation is not waiting]
            for operation in others:
                self.watch(operation)

    def watch(self, operation):
        """Has a completer see to one, if it is open."""
        with self._lock:
            if operation not in self._operations or operation._watched:
                return
            operation._watched = True
        try:
            completer_of(operation.client).add(operation, _NOBODY)
        except BpsError:
            pass  # the client is closed, and the operation with it


class _Nobody:
    """A future that nobody waits for."""

    def set_result(self, result):
        pass


_NOBODY = _Nobody()
_open = _Open()


def advance_open():
    """Whether an operation of more than one request has not ended, of all that this process has begun."""
    return _open.advance()


def open_names():
    """The names of tensors on which such operations have yet to submit something."""
    return _open.names()


def _forget_after_fork():
    global _open
    _open = _Open()


os.register_at_fork(after_in_child=_forget_after_fork)


def tensor_name(operation, name, dtype, shape):
    """The name that all ranks give the tensor of a call. shape: None: each rank has its own.

    Calls without a name share one tensor for each kind, type and shape: there are then as many names as there are shapes,
    not as many as there are calls, and every rank comes to the same name whatever it did before.
    """
    if name is not None:
        return f"{operation}.{name}"
    text = "any" if shape is None else _client.shape_text(shape)
    return f"{operation}.noname.{dtype.name.lower()}.{text}"


def tensor_after(client, full, order=Order.CALLS):
    """The name that takes full's place among operations in one order. Once ranks have differed, they have come to a
    tensor differently often, and go on with others.
    """
    differed = client.differed(order)
    return f"{full}.after.{differed}" if differed else full


def _in_order(client, name, full):
    """(the name of a call's tensor, the order in which it is). name: the caller's; full: the tensor's."""
    if name is not None or not client.orders_here():
        return full, Order.NONE
    return tensor_after(client, full), Order.CALLS


def _counts(values):
    return (ctypes.c_uint64 * len(values))(*values)


def submit(client, name, elements, source, target, operation, stream=None, **more):
    """source: of target's type, or narrower where that is widened. shape: of the array, the same on all ranks, if there is one.

    stream: on a device, which one it is in the order of, if that is not the one that is current now.
    """
    tensor = client.declare(name, target.dtype, elements, more.get("shape"))
    counts = more.get("counts"), more.get("receive_counts")
    params = SubmitParams(
        operation=operation,
        reduction=more.get("reduction", 0),
        input=source.address,
        output=target.address,
        input_count=source.count,
        output_count=target.count,
        counts=counts[0],
        receive_counts=counts[1],
        root=more.get("root", 0),
        priority=more.get("priority", 0),
        timeout_ms=_client.milliseconds(more.get("timeout")),
        all_ranks=more.get("all_ranks", False),
        ordinal=more.get("ordinal", 0),
        order=more.get("order", Order.NONE),
        round=more.get("round", 0),
        input_dtype=0 if source.dtype == target.dtype else source.dtype,
    )
    device = target.device or source.device
    return client.submit(tensor, params, (source.owner, target.owner), device, stream)


def push_pull(source, target, reduction, name=None, priority=0, timeout=None, all_ranks=False, ordinal=0):
    """ordinal: the place that was taken for a call without a name, whose tensor is called name."""
    client = _client.current()
    full, order = _in_order(client, name, tensor_name("push_pull", name, target.dtype, source.shape))
    more = {"reduction": reduction, "priority": priority, "timeout": timeout, "all_ranks": all_ranks}
    more.update(order=order, ordinal=ordinal, shape=source.shape)
    return submit(client, full, source.count, source, target, Operation.PUSH_PULL, **more)


def accumulate(source, target, name, priority=0, timeout=None, all_ranks=False):
    client = _client.current()
    full = f"accumulate.{name}"
    more = {"reduction": Reduction.SUM, "priority": priority, "timeout": timeout, "all_ranks": all_ranks}
    more["shape"] = source.shape
    return submit(client, full, source.count, source, target, Operation.ACCUMULATE, **more)


def prepared_push_pull(span, reduction, name, priority=0):
    """A function that starts the same push_pull, in place, each time that it is called, and returns its Request."""
    client = _client.current()
    tensor = client.declare(tensor_name("push_pull", name, span.dtype, span.shape), span.dtype, span.count)
    params = SubmitParams(
        operation=Operation.PUSH_PULL,
        reduction=reduction,
        input=span.address,
        output=span.address,
        input_count=span.count,
        output_count=span.count,
        priority=priority,
    )
    owner, device = span.owner, span.device
    if device is None:
        return client.prepared(tensor, params, owner)
    return lambda: client.submit(tensor, params, owner, device)


class Rows:
    """Some rows of a table. numbers: int64, one for each row; values: width elements for each."""

    __slots__ = ("numbers", "values", "width")

    def __init__(self, numbers, values, width):
        self.numbers = numbers
        self.values = values
        self.width = width
        if numbers.dtype != DType.INT64 or numbers.count * width != values.count:
            kind = numbers.dtype.name.lower()
            raise ValueError(f"{numbers.count} row numbers of {kind} for {values.count} elements in rows of {width}")


def push_pull_rows(source, table, make, reduction, name=None, priority=0, timeout=None, full=None, room=None):
    """Steps. source: Rows of a table of so many rows. make(rows) gives (result, Rows) with room for so many: for those of all
    ranks, if they are all different, and no more than room. Returns (result, how many rows of it came).

    full: the tensor's whole name, to share the one of a push_pull().
    """
    client = _client.current()
    dtype, width = source.values.dtype, source.width
    full = full or tensor_name("push_pull_rows", name, dtype, (table, width))
    _, mine = int64_span([source.numbers.count])
    counts, of_all = int64_span([0] * client.size)
    yield in_turn(submit(client, f"{full}.rows", 1, mine, of_all, Operation.ALL_GATHER, timeout=timeout), full)
    result, target = make(min(sum(counts), table if room is None else min(room, table)))
    params = SubmitParams(
        operation=Operation.PUSH_PULL_ROWS,
        reduction=reduction,
        input=source.values.address,
        output=target.values.address,
        input_count=source.values.count,
        output_count=target.values.count,
        priority=priority,
        timeout_ms=_client.milliseconds(timeout),
        width=width,
        input_rows=source.numbers.address,
        output_rows=target.numbers.address,
    )
    keep = [span.owner for rows in (source, target) for span in (rows.numbers, rows.values)]
    request = client.submit(client.declare(full, dtype, table * width), params, keep)
    yield request
    return result, request.rows


def broadcast(
    span,
    root,
    name=None,
    priority=0,
    kind="broadcast",
    variable=False,
    timeout=None,
    order=None,
    ordinal=0,
    client=None,
):
    """In place: span holds what is sent on the root, and what has come elsewhere. order: None: as the name says.

    ordinal: as for push_pull(). client: None: that of the ranks over which this thread begins operations.
    """
    client = client or _client.current()
    root = client.number_of(root)
    elements, shape = (VARIABLE, None) if variable else (span.count, span.shape)
    full, by_name = _in_order(client, name, tensor_name(kind, name, span.dtype, shape))
    source = Span(span.address if client.rank == root else None, span.dtype, span.count, device=span.device)
    more = {"root": root, "priority": priority, "timeout": timeout, "order": by_name if order is None else order}
    more.update(ordinal=ordinal, shape=shape)
    return submit(client, full, elements, source, span, Operation.BROADCAST, **more)


def barrier(timeout=None):
    client = _client.current()
    if client.elastic:
        return client.barrier(timeout)
    full, order = _in_order(client, None, "barrier.noname")
    return named_barrier(client, full, timeout, order)


def named_barrier(client, full, timeout, order):
    tensor = client.declare(full, DType.UINT8, 0)
    params = SubmitParams(operation=Operation.BARRIER, timeout_ms=_client.milliseconds(timeout), order=order)
    return client.submit(tensor, params, None)


def int64_span(values):
    array = (ctypes.c_int64 * len(values))(*values)
    return array, Span(ctypes.addressof(array), DType.INT64, len(values), array)


def _check_rows(client, rows, row, what):
    for rank, other in enumerate(rows):
        if other != row:
            raise BpsValueError(
                errno.EINVAL,
                f"{what}: rank {rank} gives rows of {other} elements, rank {client.rank} rows of {row}: "
                "only the first dimension may differ",
            )


def in_turn(request, full):
    """request, as the first of an operation under this name whose other requests come after those of the one before."""
    request.turn = full
    return request


def ranks_gathered(request, full, size):
    """How many ranks have come to an operation that has ended well.

    In an elastic job they may be fewer than there were, which all ranks see alike.
    """
    if request._client.elastic:
        request.wait_on_host()  # of one on a device, only a stream may have waited
        request.check()
    came = request.came
    if came is None:
        return size
    if came.n_came != came.world_size:
        raise BpsMembershipError(errno.EREMCHG, f"{full}: the ranks of the job have changed meanwhile: do it again")
    return came.n_came


def all_gather_equal(source, target, name, timeout=None):
    """As many elements of each rank, known beforehand: target has room for all."""
    client = _client.current()
    full, order = _in_order(client, name, tensor_name("all_gather_equal", name, source.dtype, source.shape))
    more = {"timeout": timeout, "order": order, "shape": source.shape}
    return submit(client, full, source.count, source, target, Operation.ALL_GATHER, **more)


def gather_factors(source, target, size, name=None, timeout=None):
    """Steps. The factors of a product over ranks: servers only add. target has room for those of size ranks.

    Returns of how many ranks they have come.
    """
    name = None if name is None else f"product.{name}"
    request = all_gather_equal(source, target, name, timeout)
    yield request
    return ranks_gathered(request, "a product over ranks", size)


def all_gather(span, rows, row, make, name=None, timeout=None, order=None):
    """Steps. span: rows of row elements. make(rows) gives (result, Span). Returns (result, rows of each rank).

    order: None: as the name says.
    """
    client = _client.current()
    stream = span.device and span.device.stream()  # what follows may be done by another thread
    full, by_name = _in_order(client, name, tensor_name("all_gather", name, span.dtype, None))
    first = {"timeout": timeout, "order": by_name if order is None else order}
    _, mine = int64_span([rows, row])
    size = client.size
    table, all_of_them = int64_span([0] * (2 * size))
    request = submit(client, full + ".rows", 2, mine, all_of_them, Operation.ALL_GATHER, **first)
    yield in_turn(request, full)
    table = table[: 2 * ranks_gathered(request, full, size)]
    _check_rows(client, table[1::2], row, full)
    rows = table[0::2]
    result, target = make(sum(rows))
    counts = _counts([n * row for n in rows])
    more = {"counts": counts, "timeout": timeout, "stream": stream}
    yield submit(client, full, VARIABLE, span, target, Operation.ALL_GATHER, **more)
    return result, rows


def all_to_all(span, rows, row, splits, make, name=None, timeout=None):
    """Steps. span: rows of row elements. splits: rows for each rank. make(rows) gives (result, Span).

    Returns (result, rows from each rank).
    """
    client = _client.current()
    stream = span.device and span.device.stream()
    full, order = _in_order(client, name, tensor_name("all_to_all", name, span.dtype, None))
    if len(splits) != client.size or min(splits) < 0 or sum(splits) != rows:
        raise BpsValueError(
            errno.EINVAL,
            f"{full}: splits {list(splits)} do not cut {rows} rows for {client.size} ranks",
        )
    _, mine = int64_span([value for n in splits for value in (n, row)])
    table, others = int64_span([0] * (2 * client.size))
    first = {"timeout": timeout, "order": order}
    request = submit(client, full + ".rows", 2 * client.size, mine, others, Operation.ALL_TO_ALL, **first)
    yield in_turn(request, full)
    _check_rows(client, table[1::2], row, full)
    rows = table[0::2]
    result, target = make(sum(rows))
    yield submit(
        client,
        full,
        VARIABLE,
        span,
        target,
        Operation.ALL_TO_ALL,
        counts=_counts([n * row for n in splits]),
        receive_counts=_counts([n * row for n in rows]),
        timeout=timeout,
        stream=stream,
    )
    return result, rows


def equal_splits(rows):
    """Rows for each rank, when rows must be cut evenly."""
    size = _client.current().size
    if rows % size:
        raise BpsValueError(errno.EINVAL, f"{rows} rows cannot be cut evenly for {size} ranks: give splits")
    return [rows // size] * size


def scatter_rows(rows):
    """Rows that each rank gets of a reduce_scatter: the first ranks get one more where it is uneven."""
    size = _client.current().size
    return [rows // size + (rank < rows % size) for rank in range(size)]


def check_scattered(dimensions):
    """For front ends where an array without any is no row."""
    if not dimensions:
        raise BpsValueError(errno.EINVAL, "reducescatter: a tensor without dimensions has no rows to be scattered")


def reduce_scatter(source, target, row, rows, reduction, name=None, timeout=None):
    client = _client.current()
    full, order = _in_order(client, name, tensor_name("reduce_scatter", name, target.dtype, source.shape))
    more = {"counts": _counts([n * row for n in rows]), "reduction": reduction, "timeout": timeout}
    more.update(order=order, shape=source.shape)
    return submit(client, full, source.count, source, target, Operation.REDUCE_SCATTER, **more)


def _bytes_span(buffer):
    """Of a bytearray. The view keeps the bytearray from being resized or freed."""
    view = (ctypes.c_char * len(buffer)).from_buffer(buffer)
    return Span(ctypes.addressof(view), DType.UINT8, len(buffer), view)


def broadcast_object(obj, root, name=None, timeout=None):
    """Steps."""
    client = _client.current()
    mine = client.rank == client.number_of(root)  # now: in an elastic job another may be root's number before this ends
    data = bytearray(pickle.dumps(obj)) if mine else None
    size, size_span = int64_span([len(data) if data is not None else 0])
    name, order = _in_order(client, name, "noname" if name is None else name)
    more = {"kind": "broadcast_object", "timeout": timeout, "client": client}  # also in the thread that goes on
    yield broadcast(size_span, root, f"{name}.size", order=order, **more)
    if data is None:
        data = bytearray(size[0])
    if size[0]:
        yield broadcast(_bytes_span(data), root, name, variable=True, **more)
    # A pickle begins so. Else whoever has root's number since had no object to send: all ranks see that alike.
    if not size[0] or data[0] != 0x80:
        raise BpsMembershipError(errno.EREMCHG, f"{name}: rank {root} was lost meanwhile: do it again")
    return obj if mine else pickle.loads(data)


def allgather_object(obj, name=None, timeout=None):
    """Steps. Returns the list of all ranks' objects."""
    data = bytearray(pickle.dumps(obj))

    def make(size):
        gathered = bytearray(size)
        return gathered, _bytes_span(gathered)

    name, order = _in_order(_client.current(), name, "noname" if name is None else name)
    gathered, sizes = yield from all_gather(_bytes_span(data), len(data), 1, make, f"object.{name}", timeout, order)
    objects, start = [], 0
    for size in sizes:
        objects.append(pickle.loads(memoryview(gathered)[start : start + size]))
        start += size
    return objects


def choose_reduction(average, op, default=Reduction.AVERAGE):
    """The reduction that the arguments average (BytePS's, Horovod's old one) and op (Horovod's) ask for."""
    if op is not None:
        if average is not None:
            raise ValueError("give average or op, not both")
        return Reduction(op)
    if average is None:
        return default
    return Reduction.AVERAGE if average else Reduction.SUM


def check_predivide(factor, reduction):
    if factor != 1.0 and reduction != Reduction.AVERAGE:
        raise ValueError("gradient_predivide_factor needs op=Average")


def check_average(reduction, of_bool):
    if of_bool and reduction == Reduction.AVERAGE:
        raise TypeError("bool has no average: give op=Sum (or), Max (or) or Min (and)")


def check_differentiable(reduction):
    if reduction not in (Reduction.SUM, Reduction.AVERAGE):
        raise RuntimeError("only sums and averages over ranks can be differentiated")
