"""torchft over bps: bpslaunch -np 2 python torchft_ddp.py

Each rank is a replica of its own. Replica 1 leaves after some steps, and has the model of replica 0 when it is back. Prints the
loss of each step, and what the model has come to. Over gloo: torchft_ddp.py gloo
"""

import datetime
import sys

import torch
import torch.distributed as dist
import torchft
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroupGloo, ProcessGroupWrapper

from bps.torch.process_group import ProcessGroupBps

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "bps"
TIMEOUT = datetime.timedelta(seconds=60)


class Reconfigured(ProcessGroupWrapper):
    """A process group of bps, made anew whenever other replicas are there."""

    def _create_pg(self, store, rank, world_size):
        return ProcessGroupBps(store, rank, world_size, TIMEOUT)

    def getBackendName(self):
        return "torchft-bps"


class Replica:
    def __init__(self, number, lighthouse):
        torch.manual_seed(number)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

        def state():
            return {"model": self.model.state_dict(), "optimizer": optimizer.state_dict()}

        def load(saved):
            self.model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])

        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.manager = torchft.Manager(
            pg=ProcessGroupGloo(TIMEOUT) if BACKEND == "gloo" else Reconfigured(TIMEOUT),
            load_state_dict=load,
            state_dict=state,
            min_replica_size=1,
            use_async_quorum=False,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=self.store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica{number}",
            hostname="localhost",
        )
        self.ddp = torchft.DistributedDataParallel(self.manager, self.model)
        self.optimizer = torchft.Optimizer(self.manager, optimizer)

    def train(self, steps, replicas, data):
        """Until so many steps have been taken by so many replicas."""
        while steps:
            inputs = torch.randn(8, 16, generator=data)
            before = self.manager.current_step()
            self.optimizer.zero_grad()
            loss = (self.ddp(inputs) - inputs[:, :4].sin()).square().mean()
            loss.backward()
            self.optimizer.step()
            taken, n = self.manager.current_step() > before, self.manager.num_participants()
            steps -= taken and n == replicas
            print(f"loss {loss.item():.9f}, a step of {n}" if taken else "no step", flush=True)


dist.init_process_group(BACKEND)
number = dist.get_rank()
server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000) if number == 0 else None
address = [server.address() if server else None]
dist.broadcast_object_list(address)

data = torch.Generator().manual_seed(number)
replica = Replica(number, address[0])
replica.train(4, 2, data)
dist.barrier()
if number == 1:
    replica.manager.shutdown()
dist.barrier()
if number == 0:
    replica.train(2, 1, data)
dist.barrier()
if number == 1:
    replica = Replica(number, address[0])
replica.train(4, 2, data)
print(f"in the end {sum(p.double().sum().item() for p in replica.model.parameters()):.15f}", flush=True)
dist.barrier()
replica.manager.shutdown()
dist.destroy_process_group()
