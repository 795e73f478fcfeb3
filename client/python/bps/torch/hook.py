"""A communication hook for torch's own DistributedDataParallel:

ddp = torch.nn.parallel.DistributedDataParallel(model)
ddp.register_comm_hook(None, bps.torch.ddp_hook)
"""

import torch

from .. import _client, _ops
from .._client import Arena
from .._library import SIZES, Reduction
from .._ops import Handle
from . import _devices, _shared_storage, ops
from ._futures import future_of
from .compression import Compression


class DDPHookState:
    """What register_comm_hook() takes as its state, for one DistributedDataParallel.

    name         of the tensors: different for instances whose backward passes may be under way together
    op           Average or Sum; also Min, Max
    compression  what travels: Compression.none, fp16 or bf16
    timeout      of each bucket, in seconds; None: the job's
    """

    def __init__(self, name="ddp", op=Reduction.AVERAGE, compression=Compression.none, timeout=None):
        if compression is not Compression.none and compression.wire_dtype is None:
            raise ValueError("a hook's compression is Compression.none, fp16 or bf16")
        self.name = name
        self.op = Reduction(op)
        self.compression = compression
        self.timeout = timeout
        self._shared = {}  # number of a bucket: SharedStorage, or where it is staged: its address
        self._wires = {}  # number of a bucket: (client, tensor)

    def reduce(self, bucket):
        """A Future of the bucket's buffer, reduced."""
        buffer, number = bucket.buffer(), bucket.index()
        wire = self._wire(number, buffer)
        if wire is buffer:
            if not _devices.device_of(buffer):
                self._share(number, buffer)
        else:
            wire.copy_(buffer)
        span = ops.span_of(wire)
        name = f"{self.name}.{number}.{wire.numel()}"
        # Buckets are numbered as they become ready: the last holds the front layers.
        request = _ops.push_pull(span, span, self.op, name, number, self.timeout)

        def steps():
            yield request
            if wire is not buffer:
                buffer.copy_(wire)
            _bring_all(bucket)
            return buffer

        return future_of(Handle(steps()), of=buffer)

    def _wire(self, number, buffer):
        """What the daemon works on: the buffer itself, or memory of its own."""
        cast = self.compression.wire_dtype
        dtype = cast if cast is not None and self.compression.applies_to(buffer.dtype) else buffer.dtype
        if dtype == buffer.dtype and _devices.is_known(buffer):
            return buffer
        if _devices.device_of(buffer):
            return _devices.empty(buffer.shape, dtype, buffer)
        if buffer.device.type != "cpu":
            _devices.say_staging(buffer.device)
        client, wire = self._wires.get(number, (None, None))
        if client is not _client.current() or wire.numel() != buffer.numel() or wire.dtype != dtype:
            client = _client.current()
            memory = Arena.buffer(client, max(1, buffer.numel() * SIZES[ops.DTYPES[dtype]]))
            wire = torch.frombuffer(memory, dtype=dtype, count=buffer.numel())
            self._wires[number] = client, wire
        return wire

    def _share(self, number, buffer):
        """Moves a bucket into shared memory when it is new. torch makes them anew after the first pass."""
        known, address = self._shared.get(number), buffer.untyped_storage().data_ptr()
        if isinstance(known, _shared_storage.SharedStorage):
            if known.address == address and known.client is _client.current():
                return
            known.release()
        elif known == address:
            return
        shared = _shared_storage.share(buffer.untyped_storage())
        self._shared[number] = shared if shared is not None else address


def _bring_all(bucket):
    """torch brings no results to parameters that its own group did not use. That group is this process; others may have used them."""
    for parameter, result in zip(bucket.parameters(), bucket.gradients()):
        if parameter.grad is None:
            if result.any():
                parameter.grad = result.clone()
        elif parameter.grad.data_ptr() != result.data_ptr():
            parameter.grad.copy_(result)


_default = None


def _default_state():
    global _default
    if _default is None:
        _default = DDPHookState()
    return _default


def ddp_hook(state, bucket):
    """Reduces the gradients of torch's DistributedDataParallel with bps: register_comm_hook(state, ddp_hook).

    state: a DDPHookState; None: an average, under the name of all instances without a state of their own, whose backward
    passes then must not overlap.
    """
    return (state or _default_state()).reduce(bucket)
