"""all_reduce of sparse tensors (COO): everybody gets all elements, and adds up those of one place in rank order.

That takes two rounds, since no rank knows how many elements the others have. Calls of a group take their turns, so that
the second rounds come in one order on all ranks.
"""

import torch
from torch.distributed import ReduceOp

from .._errors import BpsError, BpsTimeoutError
from . import _process_group_moves as moves


class Turn:
    """The end of the call before, well or not, as a request to wait for."""

    def __init__(self, handle):
        self._handle = handle

    def outcome(self):
        return None

    def poll(self):
        return self._handle.poll()

    def wait(self, timeout=None):
        try:
            self._handle.wait(timeout)
        except BpsTimeoutError:
            return self._handle.poll()
        except BpsError:
            pass
        return True

    def cancel(self):
        pass


def check(tensor, op):
    if tensor.layout != torch.sparse_coo:
        raise TypeError(f"bps reduces dense tensors and sparse ones of COO, not {tensor.layout}: call to_dense()")
    if not (op == ReduceOp.SUM or op == ReduceOp.AVG):  # its own comparison alone is right
        raise TypeError(f"bps has SUM and AVG of sparse tensors, not {op.op}")


def all_reduce(tensor, op, rank, size, before, submit):
    """Steps of a Handle. before: Turn of the call before, or None. submit(name, moves) gives a request."""
    if before is not None:
        yield before
    own = tensor.detach().coalesce().cpu()
    counts = torch.empty(size, dtype=torch.int64, device="cpu")
    yield submit("sparse.count", [moves.all_gather_single(counts, torch.tensor([own._nnz()], device="cpu"), rank, size)])
    indices = [torch.empty(own.sparse_dim(), n, dtype=torch.int64, device="cpu") for n in counts.tolist()]
    values = [torch.empty(n, *own.shape[own.sparse_dim() :], dtype=own.dtype, device="cpu") for n in counts.tolist()]
    gathers = [
        moves.all_gather_list(indices, own.indices(), rank, size),
        moves.all_gather_list(values, own.values(), rank, size),
    ]
    yield submit("sparse.elements", gathers)
    for move in gathers:
        move.finish()
    total = torch.sparse_coo_tensor(
        torch.cat(indices, 1), torch.cat(values), own.shape, check_invariants=True
    ).coalesce()
    if op == ReduceOp.AVG:
        total = torch.sparse_coo_tensor(
            total.indices(), total.values() / size, own.shape, is_coalesced=True, check_invariants=True
        )
    with torch.no_grad():  # and not detach(), which has elements of its own
        tensor.copy_(total)
    return [tensor]
