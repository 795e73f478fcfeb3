"""DistributedDataParallel: a module whose gradients are averaged over all ranks when backward() returns."""

import contextlib
import weakref

import torch

from .. import _client
from .._horovod import check_process_set
from .._library import Reduction
from . import ops
from ._gradients import Gradients, join_all
from .compression import Compression
from .functions import broadcast_parameters

MB = 1 << 20


class _Reducer(Gradients):
    """Gradients that are waited for at the end of the backward pass which they come from."""

    def __init__(self, *arguments, **options):
        # Whether a parameter is alone in its bucket is a matter of sizes: what is sparse stays so with an optimizer only.
        super().__init__(*arguments, sparse_as_dense=True, **options)
        self.cut_short = False  # the last backward pass ended with an exception while its gradients were on their way
        self.awaited = False  # a forward pass whose backward pass is to send has had none yet

    def _abandon(self):
        super()._abandon()
        self.cut_short = False

    def pass_has_ended(self, ended_well):
        if self.has_begun_to_end():
            self.awaited = False
            self.synchronize()
        else:
            self.cut_short = not ended_well and self.under_way()


def _moved(value, device):
    if torch.is_tensor(value):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device) for item in value)
    return value


def _buckets(named, cap):
    """Lists of parameters of at most cap bytes each, which are ready one after the other: the last of the model first."""
    groups, size, kind = [], 0, None
    for _, p in reversed(named):
        length = p.numel() * p.element_size()
        if not groups or size + length > cap or kind != (p.dtype, p.device):
            groups.append([])
            size, kind = 0, (p.dtype, p.device)
        groups[-1].append(p)
        size += length
    return groups


class DistributedDataParallel(torch.nn.Module):
    """Wraps a module, with the arguments of torch's class of this name, and of BytePS's (compression).

    Parameters and buffers become those of rank 0. backward() returns when the gradients are the averages over all ranks;
    they may then be read, clipped, scaled or stepped with any optimizer. All ranks must make their instances in the same
    order and run as many backward passes.

    device_ids       one device, to which inputs are moved; None: they are left where they are. output_device, dim and
                     check_reduction have no effect, as in torch with one device
    broadcast_buffers  buffers of rank 0 for all before each forward pass that a backward pass is to follow
    bucket_cap_mb    gradients travel together up to so many MB
    find_unused_parameters, gradient_as_bucket_view, static_graph  have no effect: a parameter that no rank used keeps p.grad as
                     it was, as in one process, one that only some ranks used is averaged, and gradients are views
    """

    def __init__(
        self,
        module,
        device_ids=None,
        output_device=None,
        dim=0,
        broadcast_buffers=True,
        process_group=None,
        bucket_cap_mb=25,
        find_unused_parameters=False,
        check_reduction=False,
        gradient_as_bucket_view=False,
        static_graph=False,
        *,
        init_sync=True,
        compression=Compression.none,
    ):
        super().__init__()
        if process_group is not None:
            check_process_set(process_group)
        if isinstance(output_device, bool):
            raise TypeError(
                "the third argument is output_device, as in torch: give BytePS's broadcast_buffers and compression by name"
            )
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError(f"device_ids={list(device_ids)}: one process trains on one device; start more ranks")
        if bucket_cap_mb is None:
            bucket_cap_mb = 25
        if bucket_cap_mb < 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb} is negative")
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        trained = [(name, p) for name, p in module.named_parameters() if name not in ignored and p.requires_grad]
        if not trained:
            raise RuntimeError("no parameter of the module requires a gradient: there is nothing to average")
        self.module = module
        self.device = torch.device("cuda", device_ids[0]) if device_ids and isinstance(device_ids[0], int) else None
        if device_ids and self.device is None:
            self.device = torch.device(device_ids[0])
        self.device_ids, self.output_device, self.dim = device_ids, output_device, dim
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self._ignored = ignored
        self._sends = True
        self._gradients = _Reducer(
            trained,
            *_ways_to_parameters(module, ignored),
            compression,
            1,
            Reduction.AVERAGE,
            1.0,
            _buckets(trained, bucket_cap_mb * MB),
        )
        self._gradients.each_step = weakref.WeakMethod(self._begin_step)
        if init_sync:
            self._broadcast_state(0)

    def _broadcast_state(self, root):
        state = [*self.module.named_parameters(), *self.module.named_buffers()]
        state = [(name, tensor) for name, tensor in state if name not in self._ignored]
        broadcast_parameters(state, root, prefix=f"{self._gradients.prefix}state.")

    # -- Buffers

    def _buffers_by_type(self):
        by_type = {}
        for name, buffer in self.module.named_buffers():
            if name not in self._ignored:
                by_type.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        return by_type

    @torch.no_grad()
    def _broadcast_buffers(self):
        """Those of one type and device travel as one tensor."""
        under_way = []
        for number, ((dtype, _), buffers) in enumerate(self._buffers_by_type().items()):
            moved = [ops.as_moved(buffer) for buffer in buffers]
            flat = torch.cat([buffer.reshape(-1) for buffer in moved])
            name = f"{self._gradients.prefix}buffers.{number}.{str(dtype)[6:]}.{flat.numel()}"
            under_way.append((buffers, moved, ops.broadcast_async_(flat, 0, name)))
        for buffers, moved, handle in under_way:
            pieces = handle.wait().split([buffer.numel() for buffer in moved])
            if _client.current().rank == 0:
                continue
            for buffer, place, piece in zip(buffers, moved, pieces):
                # Through .data, since a graph of an earlier forward pass may hold the buffer.
                buffer.data.copy_(ops.from_moved(piece.view(place.shape), buffer.dtype))

    def _begin_step(self):
        if self.broadcast_buffers:
            self._broadcast_buffers()

    # -- Passes

    def forward(self, *inputs, **options):
        sends = self._sends and torch.is_grad_enabled()
        self._gradients.follow_job()
        if self._gradients.cut_short:
            raise RuntimeError(
                "the last backward pass ended with an exception while its gradients were on their way: call "
                "synchronize(), which completes it for the other ranks, before the next forward pass"
            )
        if sends or (torch.is_grad_enabled() and not self._gradients.awaited):
            # As torch has it, the forward pass decides: no_sync() around it is what counts, unless the backward pass of one
            # before is still to come.
            self._gradients.listening = self._gradients.awaited = sends
        if sends:
            self._begin_step()
        if self.device is not None:
            inputs, options = _moved(inputs, self.device), _moved(options, self.device)
        return self.module(*inputs, **options)

    @contextlib.contextmanager
    def no_sync(self):
        """Inside, forward passes and their backward passes only add to the gradients of this rank."""
        before, self._sends = self._sends, False
        try:
            yield
        finally:
            self._sends = before

    def synchronize(self):
        """Waits for gradients; backward() has done so unless an exception has ended it. What it did not come to is zero."""
        self._gradients.follow_job()
        if self._gradients.cut_short:
            self._gradients.cut_short = False
            self._gradients.synchronize()

    @contextlib.contextmanager
    def join(self, divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False):
        """For ranks with unequal numbers of batches: around the training loop.

        A rank that leaves the block adds zeros to the others' averages until all have left, as join() of bps.torch does. Then
        everybody's parameters and buffers become those of a rank that trained last.
        """
        if not divide_by_initial_world_size:
            raise ValueError("averages are over all ranks of the job: divide_by_initial_world_size=False is not there")
        if throw_on_early_termination:
            raise ValueError("throw_on_early_termination is not there: leave enable=True, and ranks may end early")
        yield
        if enable:
            join_all()
            self._broadcast_state(self._gradients.last_to_train())


    def __getstate__(self):
        raise TypeError("a DistributedDataParallel cannot be pickled: save the state_dict() of its module")


def _ways_to_parameters(module, ignored):
    """How Gradients finds the parameters that there are now, and their names. They do not keep the module."""
    module = weakref.ref(module)

    def parameters():
        there = module()
        if there is None:
            return []
        if not ignored:
            return list(there.parameters())
        return [p for name, p in there.named_parameters() if name not in ignored]

    def name_of(parameter):
        return next(name for name, p in module().named_parameters() if p is parameter)

    return parameters, name_of
