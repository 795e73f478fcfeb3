"""A program that knows nothing of bps but the backend's name: it writes checkpoints beside its training."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard


def whole(state):
    return {name: value.full_tensor().clone() for name, value in state.items()}


def train(folder, group):
    """A checkpoint of the third step, by a thread that makes its calls in this group."""
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(6):
        if step == 2:
            kept = whole(net.state_dict())
            written = dcp.async_save({"net": net.state_dict()}, checkpoint_id=folder, process_group=group)
        optimizer.zero_grad()
        net(torch.randn(3, 16)).sum().backward()
        optimizer.step()
        dist.barrier()
    written.result()
    state = {"net": net.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    came = whole(state["net"])
    assert came.keys() == kept.keys() and all(torch.equal(came[name], kept[name]) for name in kept)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("bps")
    for number in range(3):
        train(f"{sys.argv[1]}-{number}", None)
    train(f"{sys.argv[1]}-aside", dist.new_group())
    print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
