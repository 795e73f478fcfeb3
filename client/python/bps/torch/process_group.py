"""torch.distributed over bps: init_process_group("bps").

Each group is a job of its own, and so is each pair of its ranks that exchange messages with send() and recv(). A
group's calls are numbered; a call's number says under which name it travels, so that ranks that do not do the same are
told of it, and calls less than SLOTS apart do not wait for one another.

Threads. Who waits for a call sees to its end; where C++ or a user asks for a future instead, the thread of the group's
client does (see _futures). Calls may come from any thread, in the same order on all ranks; those of the thread in which
torch.distributed.checkpoint.async_save() writes beside the program are an order of their own.

The group is a subclass of torch's ProcessGroup and not of Backend, since C++ wraps what a Backend returns and then
never calls it completed. Its Work is a subclass too, since one that torch makes from a future does not tell of errors.
"""

import atexit
import datetime
import errno
import os
import threading
import time
import types
import weakref

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from .. import _ops
from .._client import run_interruptible
from .._errors import BpsCanceledError, BpsError, BpsTimeoutError
from .._library import VARIABLE, Order, SubmitParams
from .._ops import Handle, tensor_after
from . import _devices, _futures
from . import _process_group_moves as moves
from . import _process_group_sparse
from ._process_group_layout import agree, connect

SLOTS = 16
ASIDE = "AsyncCheckpointExecutor"  # how torch.distributed.checkpoint names the thread of async_save()
OLDEST = (2, 8)  # before, C++ forgets what Python returned to it while it is under way


def failure(error):
    """A BpsError as torch's backends fail; timeouts by the words that programs look for."""
    timed_out = "Timed out waiting: " if isinstance(error, BpsTimeoutError) else ""
    return dist.DistBackendError(f"bps: {timed_out}{error.strerror or error}")


def _is_aside():
    return threading.current_thread().name.startswith(ASIDE)


def _milliseconds(timeout):
    return max(1, int(timeout / datetime.timedelta(milliseconds=1)))


class _All:
    """Several requests as one."""

    def __init__(self, requests):
        self._requests = requests

    def poll(self):
        return all(request.poll() for request in self._requests)

    def wait(self, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        return all(
            request.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            for request in self._requests
        )

    def cancel(self):
        for request in self._requests:
            request.cancel()

    def outcome(self):
        errors = [request.outcome() for request in self._requests]
        return next((error for error in errors if error is not None), None)


def _steps(requests, moved, result):
    if requests:
        yield requests[0] if len(requests) == 1 else _All(requests)
    for move in moved:
        if move.finish is not None:
            move.finish()
    return result


def _submit(client, name, move, timeout_ms, stream=None, order=Order.NONE):
    tensor = client.declare(name, move.dtype, VARIABLE)
    source, target = move.source, move.target
    device = (target and target.device) or (source and source.device)
    params = SubmitParams(
        operation=move.operation,
        reduction=move.reduction,
        input=source.address if source else None,
        output=target.address if target else None,
        input_count=source.count if source else 0,
        output_count=target.count if target else 0,
        counts=moves.counts_array(move.counts),
        receive_counts=moves.counts_array(move.receive_counts),
        root=move.root,
        timeout_ms=timeout_ms,
        order=order,
        input_dtype=source.dtype if source and source.dtype != move.dtype else 0,
    )
    return client.submit(tensor, params, (source, target), device, stream)


class _Pair:
    """The job of two ranks that send to each other. It forms while the first messages wait, which nobody else does."""

    def __init__(self, layout, rank, timeout_ms):
        self._rank = rank  # in the pair
        self._lock = threading.RLock()  # a signal handler may destroy the group
        self._waiting = []  # under the lock: (name, move, result, timeout, stream, promise) until the job has formed
        self._client = None  # under the lock
        self._error = None  # under the lock
        self._joining = connect()
        threading.Thread(target=self._join, args=(layout, timeout_ms), name="bps-join", daemon=True).start()

    def start(self, name, move, result, timeout_ms):
        """A Future."""
        promise, future = _futures.promised()
        span = move.source or move.target
        stream = span.device and span.device.stream()
        if move.finish is not None and _devices.device_of(result[0]):
            move.finish = _devices.platform.apart(move.finish, result[0].device)
        message = (name, move, result, timeout_ms, stream, promise)
        sent = []
        with self._lock:
            if self._error is not None:
                raise failure(self._error) from None
            if self._client is None:
                self._waiting.append(message)
            else:
                sent.append(self._send(*message))
        self._fulfil(sent)
        return future

    def close(self):
        self._fail(BpsCanceledError(errno.ECANCELED, "the process group was destroyed"))
        self._joining.close()

    def _send(self, name, move, result, timeout_ms, stream, promise):
        """Under the lock: (promise, Handle, error)."""
        try:
            request = _submit(self._client, name, move, timeout_ms, stream)
            return promise, Handle(_steps([request], [move], result)), None
        except Exception as error:  # the one who waits for the message is to hear of it
            return promise, None, error

    def _fulfil(self, sent):
        """Without the lock: what a promise calls back may send."""
        for promise, handle, error in sent:
            try:
                if error is None:
                    _futures.fulfil(promise, handle, self._client)
            except Exception as late:
                error = late
            if error is not None:
                _futures.fail(promise, error)

    def _join(self, layout, timeout_ms):
        try:
            layout.join(self._joining, self._rank, timeout_ms=timeout_ms, request_timeout_ms=timeout_ms)
        except BpsError as error:
            self._fail(error)
            return
        with self._lock:
            self._client = self._joining
            waiting, self._waiting = self._waiting, []
            sent = [self._send(*message) for message in waiting]
        self._fulfil(sent)

    def _fail(self, error):
        with self._lock:
            self._error = self._error or error
            waiting, self._waiting = self._waiting, []
        for *_, promise in waiting:
            _futures.fail(promise, self._error)


def _untraced(cls):
    """torch.compile runs what is called here and does not look into it: no model's code, and called by C++ besides."""
    for name, method in list(vars(cls).items()):
        if isinstance(method, types.FunctionType) and name != "__init__":
            setattr(cls, name, torch.compiler.disable(method))
    return cls


@_untraced
class Work(c10d.Work):
    """A call under way. Has a handle, or a future, or first the one and then the other."""

    def __init__(self, tensors, client=None, handle=None, future=None):
        super().__init__()
        self._tensors = tensors
        self._client = client
        self._handle = handle
        self._lock = threading.Lock()
        self._future = future  # under the lock; set once, and from then on the handle is the future's

    def wait(self, timeout=None):
        """timeout: a timedelta; 0, as C++ says it, or less is none. The call goes on when it passes."""
        seconds = timeout / datetime.timedelta(seconds=1) if timeout else None
        seconds = seconds if seconds and seconds > 0 else None
        with self._lock:
            future = self._future
        try:
            if future is None:
                self._handle.wait(seconds)
            else:
                _wait_for(future, seconds)
        except BpsError as error:
            raise failure(error) from error
        return True

    def synchronize(self):
        self.wait()

    def is_completed(self):
        with self._lock:
            return self._handle.poll() if self._future is None else self._future.done()

    def is_success(self):
        return self.is_completed() and self.exception() is None

    def exception(self):
        """How a call that is complete failed."""
        if not self.is_completed():
            return None
        try:
            return self.wait() and None
        except RuntimeError as error:
            return error

    def result(self):
        self.wait()
        return self._tensors

    def get_future(self):
        with self._lock:
            if self._future is None:
                of = self._tensors[0] if self._tensors and torch.is_tensor(self._tensors[0]) else None
                self._future = _futures.future_of(self._handle, self._client, of)
            return self._future

    def _source_rank(self):
        raise NotImplementedError("bps receives from a rank that is named")

    source_rank = _source_rank


def _wait_for(future, seconds):
    """Of a future alone, the waiting cannot be ended, by Ctrl-C or otherwise."""
    if not future.done():
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        if not done.wait(seconds):
            raise BpsTimeoutError(errno.ETIMEDOUT, f"not complete after {seconds} s")
    try:
        future.value()
    except RuntimeError as error:  # as futures fail
        raise dist.DistBackendError(str(error)) from None


_live = weakref.WeakSet()


class _Backend(c10d.Backend):
    """What the group shows as the backend of its devices. Carries out nothing."""

    supports_splitting = True
    supports_coalescing = supports_shrinking = supports_reconfigure = supports_window = False
    _supports_time_estimate = False

    def getBackendName(self):
        return "bps"


@_untraced
class ProcessGroupBps(dist.ProcessGroup):
    """One group of ranks. Names and arguments are those that C++ and torch.distributed call."""

    def __init__(self, store, rank, size, timeout):
        """Returns when all ranks have come, which find each other through the store."""
        super().__init__(rank, size)

        def join():
            client, layout = agree(store, rank, size)
            try:
                timeout_ms = _milliseconds(timeout)
                layout.join(client, rank, timeout_ms=timeout_ms, request_timeout_ms=timeout_ms)
            except BaseException:
                client.close()
                raise
            return client, layout

        try:
            client, layout = run_interruptible(join)
        except BpsError as error:
            raise failure(error) from error
        self._store = store
        self._client = client
        self._layout = layout
        self._me = rank
        self._n = size
        self._timeout_ms = _milliseconds(timeout)
        self._lock = threading.RLock()  # a signal handler may destroy the group
        self._calls = 0  # under the lock
        self._calls_aside = 0  # under the lock: of the thread of async_save()
        self._pairs = {}  # under the lock: rank: _Pair
        self._group_name = ""
        self._group_desc = "undefined"
        self._show_devices()
        _live.add(self)

    # -- What it is

    def _show_devices(self):
        """PyTorch asks a group for its devices, and each of these for its backend."""
        devices = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
        try:
            backend = _Backend(self._me, self._n)
        except TypeError:  # this version has no backends made in Python, and asks less
            return
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        for device in devices:
            self._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, backend)

    def getBackendName(self):
        return "bps"

    name = _get_backend_name = getBackendName

    def setGroupName(self, name):
        self._group_name = name

    _set_group_name = setGroupName

    def getGroupName(self):
        return self._group_name

    group_name = property(getGroupName)

    def setGroupDesc(self, desc):
        self._group_desc = desc

    _set_group_desc = setGroupDesc

    def getGroupDesc(self):
        return self._group_desc

    group_desc = property(getGroupDesc)

    def _get_sequence_number_for_group(self):
        return self._calls

    def _set_sequence_number_for_group(self):
        pass  # counted from 0 in any case

    def set_timeout(self, timeout):
        self._timeout_ms = _milliseconds(timeout)

    def _set_default_timeout(self, timeout):
        self.set_timeout(timeout)

    # -- Its parts

    def get_group_store(self):
        return self._store

    def split_group(self, ranks, timeout=None, opts=None, group_name=None, group_desc=None, device_types=None):
        """A group of some of the ranks, in this order; None on the others, which wait for nobody."""
        if opts is not None:
            raise TypeError("the backend bps takes no pg_options")
        if self._me not in ranks:
            return None
        store = dist.PrefixStore(f"{group_name}/", self._store)
        timeout = timeout or datetime.timedelta(milliseconds=self._timeout_ms)
        group = ProcessGroupBps(store, ranks.index(self._me), len(ranks), timeout)
        group.setGroupName(group_name)
        group.setGroupDesc(group_desc or f"{self._group_desc}:split")
        return group

    # -- Its end

    def shutdown(self):
        """Leaves the jobs. What is under way fails. In a child made by fork they are the parent's."""
        if self._client.forked:
            return
        with self._lock:
            pairs, self._pairs = list(self._pairs.values()), {}
        for each in (*pairs, self._client):
            each.close()

    def abort(self):
        self.shutdown()

    # -- How calls run

    def _timeout(self, opts):
        timeout = getattr(opts, "timeout", None)
        if timeout is None or timeout <= datetime.timedelta(0):
            return self._timeout_ms
        return _milliseconds(timeout)

    def _run(self, moved, result, opts=None):
        """A Work whose result is the list of tensors `result`."""
        timeout_ms = self._timeout(opts)
        requests = []
        try:
            self._client.check_process()  # before the lock, which another thread may have held at the fork
            with self._lock:
                for move in moved:
                    name, order = self._next_name(move.dtype.name.lower())
                    requests.append(_submit(self._client, name, move, timeout_ms, order=order))
        except BpsError as error:
            raise failure(error) from error
        return self._work(Handle(_steps(requests, moved, result)), result, opts)

    def _next_name(self, dtype):
        """With the lock: (the name of the next call of this thread, the order in which it is)"""
        if _is_aside():
            self._calls_aside += 1
            return f"aside.{self._calls_aside % SLOTS}.{dtype}", Order.NONE
        self._calls += 1
        return tensor_after(self._client, f"{self._calls % SLOTS}.{dtype}"), Order.CALLS

    def _work(self, handle, tensors, opts):
        if not getattr(opts, "asyncOp", True):
            try:
                handle.wait()
            except BpsError as error:
                raise failure(error) from error
        return Work(tensors, self._client, handle)

    # -- Reductions

    def allreduce(self, tensors, opts=None):
        opts = opts or dist.AllreduceOptions()
        if any(t.layout != torch.strided for t in tensors):
            return self._allreduce_sparse(tensors, opts)
        return self._run([moves.allreduce(t, opts.reduceOp, self._me, self._n) for t in tensors], tensors, opts)

    def _allreduce_sparse(self, tensors, opts):
        (tensor,) = tensors
        _process_group_sparse.check(tensor, opts.reduceOp)
        timeout_ms = self._timeout(opts)

        def submit(name, move):
            return _submit(self._client, name, move, timeout_ms)

        try:
            self._client.check_process()
            with self._lock:
                handle = Handle(_process_group_sparse.all_reduce(tensor, opts.reduceOp, self._me, self._n, submit))
        except BpsError as error:
            raise failure(error) from error
        handle.go_on()  # its second round is not to wait until somebody waits for the call
        return self._work(handle, tensors, opts)

    allreduce_sparse = allreduce

    def allreduce_coalesced(self, tensors, opts=None):
        return self.allreduce(tensors, opts or dist.AllreduceCoalescedOptions())

    def reduce(self, tensors, opts):
        moved = [moves.reduce(t, opts.reduceOp, opts.rootRank, self._me, self._n) for t in tensors]
        return self._run(moved, tensors, opts)

    def reduce_scatter(self, outputs, inputs, opts=None):
        op = (opts or dist.ReduceScatterOptions()).reduceOp
        moved = [moves.reduce_scatter_list(o, i, op, self._me, self._n) for o, i in zip(outputs, inputs)]
        return self._run(moved, outputs, opts)

    def reduce_scatter_single(self, output, input, opts=None):
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        op = (opts or dist.ReduceScatterOptions()).reduceOp
        moved = [moves.reduce_scatter_single(o, i, op, self._me, self._n) for o, i in zip(outputs, inputs)]
        return self._run(moved, outputs, opts)

    # -- What only moves

    def broadcast(self, tensors, opts=None):
        root = opts.rootRank if opts else 0
        return self._run([moves.broadcast(t, root, self._me) for t in tensors], tensors, opts)

    def allgather(self, outputs, inputs, opts=None):
        moved = [moves.all_gather_list(o, i, self._me, self._n) for o, i in zip(outputs, inputs)]
        return self._run(moved, [t for each in outputs for t in each], opts)

    def allgather_coalesced(self, outputs, inputs, opts=None):
        """outputs[r] has rank r's tensors."""
        return self.allgather([list(each) for each in zip(*outputs)], inputs, opts)

    def all_gather_single(self, output, input, opts=None):
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        moved = [moves.all_gather_single(o, i, self._me, self._n) for o, i in zip(outputs, inputs)]
        return self._run(moved, outputs, opts)

    def gather(self, outputs, inputs, opts):
        lists = outputs or [None] * len(inputs)  # of which other ranks than root have none
        moved = [moves.gather_list(o, i, opts.rootRank, self._me, self._n) for o, i in zip(lists, inputs)]
        return self._run(moved, [t for each in outputs for t in each], opts)

    def gather_single(self, output, input, opts):
        moved = [moves.gather_single(output, input, opts.rootRank, self._me, self._n)]
        return self._run(moved, [output], opts)

    def scatter(self, outputs, inputs, opts):
        lists = inputs or [None] * len(outputs)
        moved = [moves.scatter_list(o, i, opts.rootRank, self._me, self._n) for o, i in zip(outputs, lists)]
        return self._run(moved, outputs, opts)

    def alltoall(self, outputs, inputs, opts=None):
        return self._run([moves.all_to_all_list(outputs, inputs, self._me, self._n)], outputs, opts)

    def all_to_all_single(self, output, input, output_splits, input_splits, opts=None):
        move = moves.all_to_all_single(output, input, output_splits, input_splits, self._me, self._n)
        return self._run([move], [output], opts)

    def barrier(self, opts=None):
        try:
            self._client.check_process()
            aside = _is_aside()
            with self._lock:
                name = "barrier.aside" if aside else tensor_after(self._client, "barrier.noname")
                order = Order.NONE if aside else Order.CALLS
                request = _ops.named_barrier(self._client, name, self._timeout(opts) / 1000, order)
        except BpsError as error:
            raise failure(error) from error
        return self._work(Handle(_steps([request], [], [])), [], opts)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """A barrier whose error names all missing ranks, which every barrier's does."""
        opts = dist.BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        self.barrier(opts).wait()

    # The same under the names of older versions.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single

    # -- From one rank to another

    def send(self, tensors, destination, tag):
        return self._exchange(tensors, destination, tag, self._me)

    def recv(self, tensors, source, tag):
        return self._exchange(tensors, source, tag, source)

    def recv_anysource(self, tensors, tag):
        raise NotImplementedError("bps receives from a rank that is named: give src to recv()")

    recvAnysource = recv_anysource

    def _exchange(self, tensors, peer, tag, sender):
        """A broadcast in the job of the two. Both ends wait for each other."""
        if peer == self._me:
            raise ValueError(f"rank {peer} cannot send to itself")
        (tensor,) = tensors
        low, high = sorted((self._me, peer))
        move = moves.broadcast(tensor, int(sender == high), int(self._me == high))
        try:
            future = self._pair(low, high, peer).start(f"{tag}.from.{sender}", move, tensors, self._timeout_ms)
        except BpsError as error:
            raise failure(error) from error
        return Work(tensors, future=future)

    def _pair(self, low, high, peer):
        self._client.check_process()
        with self._lock:
            pair = self._pairs.get(peer)
            if pair is None:
                self._client.check_open()
                self._pairs[peer] = pair = _Pair(self._layout.pair(low, high), int(self._me == high), self._timeout_ms)
            return pair


def create(options, backend_options):
    """What torch.distributed calls for each group of this backend that the process is a rank of."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        raise RuntimeError(
            f"process groups of bps need PyTorch {'.'.join(map(str, OLDEST))} or newer, this is {torch.__version__}; "
            "bps.torch.DistributedOptimizer works with it"
        )
    if backend_options is not None:
        raise TypeError("the backend bps takes no pg_options")
    return ProcessGroupBps(options.store, options.group_rank, options.group_size, options.timeout)


@atexit.register
def _shutdown_all():
    """Before the interpreter ends, so that no thread of ours is alive then."""
    for group in list(_live):
        group.shutdown()


os.register_at_fork(after_in_child=_live.clear)
