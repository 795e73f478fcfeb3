"""torchcomms over bps: torchcomms.new_comm("bps", torch.device("cpu"), name="main").

torchcomms finds the backend by the entry point torchcomms.backends, or once this module is imported. Each communicator is a
process group of bps (torch/process_group.py), which carries out its calls: threads, errors and deadlines are as there.
Interface: PyTorchCommBackend.hpp of torchcomms, of August 2026. It tells backends in Python no tags, hints or deadlines of single
calls, and no factor of PREMUL_SUM.
"""

import errno
import os

import torch.distributed as dist
import torchcomms

from ._errors import BpsValueError
from .torch.process_group import ProcessGroupBps

# In torchcomms' order, without those of PALS.
_VARIABLES = [
    ("TORCHCOMM_RANK", "TORCHCOMM_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("RANK", "WORLD_SIZE"),
]


def _rank_and_size():
    for rank, size in _VARIABLES:
        if os.environ.get(rank) and os.environ.get(size):
            return int(os.environ[rank]), int(os.environ[size])
    raise RuntimeError("bps: RANK and WORLD_SIZE are not set: start the script with bpslaunch or torchrun, or set TORCHCOMM_RANK and TORCHCOMM_SIZE")


def _reduction(op):
    if op.type.name == "PREMUL_SUM":
        raise TypeError(
            "bps: torchcomms tells no backend in Python the factor of PREMUL_SUM: multiply before, and take SUM; FSDP2 does so after "
            "set_force_sum_reduction_for_comms(True)"
        )
    return getattr(dist.ReduceOp, op.type.name)


def _with(options, **fields):
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def _done(work, async_op):
    """What torchcomms is given of a call: an object to wait for, or None of one that has ended."""
    if async_op:
        return work
    work.wait()
    return None


class TorchCommBps(torchcomms.TorchCommBackend):
    """One communicator. torchcomms calls what is here, from any thread, in the same order on all ranks."""

    def __init__(self):
        super().__init__()
        self._name = self._group = None

    def init(self, device, name, options):
        """Returns when all ranks have come. options.store, or else what MASTER_ADDR and MASTER_PORT name, lets them find each other."""
        rank, size = _rank_and_size()
        store = options.store
        if store is None:
            store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=options.timeout))
        self._begin(name, ProcessGroupBps(dist.PrefixStore(f"torchcomms/{name}", store), rank, size, options.timeout))

    def _begin(self, name, group):
        self._name, self._group = name, group

    def finalize(self):
        """What is under way fails."""
        self._group.shutdown()

    def split(self, ranks, name, options):
        """A communicator of some of the ranks, in this order, which all of these call; None for an empty list: the others' part."""
        if not ranks:
            return None
        me, size = self.get_rank(), self.get_size()
        if len(set(ranks)) < len(ranks) or me not in ranks or not set(ranks) <= set(range(size)):
            raise BpsValueError(
                errno.EINVAL, f"split() into {name}: {ranks} are not different ranks of the {size} that there are, this one, {me}, among them"
            )
        # Parts of other ranks may have the same name.
        of_ranks = f"{name}/{'-'.join(map(str, ranks))}"
        part = TorchCommBps()
        part._begin(name, self._group.split_group(ranks, options.timeout, group_name=of_ranks))
        return part

    def set_timeout(self, timeout):
        self._group.set_timeout(timeout)

    def get_rank(self):
        return self._group.rank()

    def get_size(self):
        return self._group.size()

    def get_backend_name(self):
        return "bps"

    def get_comm_name(self):
        return self._name

    # -- Reductions

    def all_reduce(self, tensor, op, async_op):
        return _done(self._group.allreduce([tensor], _with(dist.AllreduceOptions(), reduceOp=_reduction(op))), async_op)

    def reduce(self, tensor, root, op, async_op):
        options = _with(dist.ReduceOptions(), reduceOp=_reduction(op), rootRank=root)
        return _done(self._group.reduce([tensor], options), async_op)

    def reduce_scatter(self, output, input_list, op, async_op):
        options = _with(dist.ReduceScatterOptions(), reduceOp=_reduction(op))
        return _done(self._group.reduce_scatter([output], [input_list], options), async_op)

    reduce_scatter_v = reduce_scatter

    def reduce_scatter_single(self, output, input, op, async_op):
        options = _with(dist.ReduceScatterOptions(), reduceOp=_reduction(op))
        return _done(self._group.reduce_scatter_single(output, input, options), async_op)

    # -- What only moves

    def broadcast(self, tensor, root, async_op):
        return _done(self._group.broadcast([tensor], _with(dist.BroadcastOptions(), rootRank=root)), async_op)

    def all_gather(self, tensor_list, tensor, async_op):
        return _done(self._group.allgather([tensor_list], [tensor]), async_op)

    all_gather_v = all_gather

    def all_gather_single(self, output, input, async_op):
        return _done(self._group.all_gather_single(output, input), async_op)

    def gather(self, output_list, input, root, async_op):
        outputs = [output_list] if root == self.get_rank() else []
        return _done(self._group.gather(outputs, [input], _with(dist.GatherOptions(), rootRank=root)), async_op)

    def scatter(self, output, input_list, root, async_op):
        inputs = [input_list] if root == self.get_rank() else []
        return _done(self._group.scatter([output], inputs, _with(dist.ScatterOptions(), rootRank=root)), async_op)

    def all_to_all(self, output_list, input_list, async_op):
        return _done(self._group.alltoall(output_list, input_list), async_op)

    def all_to_all_single(self, output, input, async_op):
        return self.all_to_all_v_single(output, input, [], [], async_op)

    def all_to_all_v_single(self, output, input, output_splits, input_splits, async_op):
        return _done(self._group.all_to_all_single(output, input, output_splits, input_splits), async_op)

    def send(self, tensor, dst, async_op):
        return _done(self._group.send([tensor], dst, 0), async_op)

    def recv(self, tensor, src, async_op):
        return _done(self._group.recv([tensor], src, 0), async_op)

    def barrier(self, async_op):
        return _done(self._group.barrier(), async_op)


torchcomms.register_backend("bps", TorchCommBps)
