"""A program that knows nothing of bps but the name of the backend, for torchrun, and for torch.multiprocessing.spawn().

Given a number, it starts so many processes itself. The ranks say which of them think that they share a machine.
"""

import os
import sys

import torch
import torch.distributed as dist


def run(rank=None, size=None):
    if rank is not None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("bps")
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [dist.get_world_size()] * 3
    group = dist.group.WORLD
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} over {type(group).__name__}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        torch.multiprocessing.spawn(run, (int(sys.argv[1]),), int(sys.argv[1]))
    else:
        run()
