"""all_reduce of sparse tensors (COO): everybody gets all elements, and adds up those of one place in rank order.

That takes two rounds, since no rank knows how many elements the others have. Calls of a group are in turn, so that the
second rounds come in one order on all ranks.
"""

import torch
from torch.distributed import ReduceOp

from .._ops import in_turn
from . import _devices
from . import _process_group_moves as moves


def check(tensor, op):
    if tensor.layout != torch.sparse_coo:
        raise TypeError(f"bps reduces dense tensors and sparse ones of COO, not {tensor.layout}: call to_dense()")
    if not (op == ReduceOp.SUM or op == ReduceOp.AVG):  # its own comparison alone is right
        raise TypeError(f"bps has SUM and AVG of sparse tensors, not {op.op}")


def all_reduce(tensor, op, rank, size, submit):
    """Steps of a Handle, for any thread. submit(name, move) gives a request."""

    @torch.no_grad()  # and not detach(), which has elements of its own
    def finish():
        tensor.copy_(total)

    if _devices.device_of(tensor):
        finish = _devices.platform.apart(finish, tensor.device)
    own = tensor.detach().coalesce().cpu()
    counts = torch.empty(size, dtype=torch.int64, device="cpu")
    mine = torch.tensor([own._nnz()], device="cpu")
    yield in_turn(submit("sparse.count", moves.all_gather_single(counts, mine, rank, size)), "sparse")
    indices = [torch.empty(own.sparse_dim(), n, dtype=torch.int64, device="cpu") for n in counts.tolist()]
    values = [torch.empty(n, *own.shape[own.sparse_dim() :], dtype=own.dtype, device="cpu") for n in counts.tolist()]
    gathers = {
        "sparse.indices": moves.all_gather_list(indices, own.indices(), rank, size),
        "sparse.values": moves.all_gather_list(values, own.values(), rank, size),
    }
    yield from [submit(name, move) for name, move in gathers.items()]
    for move in gathers.values():
        move.finish()
    total = torch.sparse_coo_tensor(
        torch.cat(indices, 1), torch.cat(values), own.shape, check_invariants=True
    ).coalesce()
    if op == ReduceOp.AVG:
        total = torch.sparse_coo_tensor(
            total.indices(), total.values() / size, own.shape, is_coalesced=True, check_invariants=True
        )
    finish()
    return [tensor]
