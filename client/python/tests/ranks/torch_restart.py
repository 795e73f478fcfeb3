"""A training whose daemon dies under it: prints what must be the same whether it does or not. Arguments: the steps at which
rank 0 kills it, with gradients under way."""

import hashlib
import os
import signal
import socket
import struct
import sys

import torch
import torch.nn.functional as F

import bps.torch as bps

STEPS = 24
SHARE = 16


def daemon_pid():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.connect(os.environ["BPS_SOCKET"])
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[0]


def main(kills):
    bps.init()
    torch.manual_seed(3)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 10)
    )
    bps.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), named_parameters=net.named_parameters()
    )
    generator = torch.Generator().manual_seed(5 + bps.rank())
    losses, n_killed = [], 0
    for step in range(STEPS):
        x = torch.randn(SHARE, 64, generator=generator)
        y = (x.sum(1) * 2).long() % 10
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        if bps.rank() == 0 and step in kills:
            os.kill(daemon_pid(), signal.SIGKILL)
            n_killed += 1
        optimizer.step()
        losses.append(bps.push_pull(loss.detach(), name="loss").item())
    values = torch.cat([p.detach().flatten() for p in net.parameters()]).numpy().tobytes()
    print("losses", hashlib.sha256(struct.pack(f"{STEPS}d", *losses)).hexdigest(), losses[0], losses[-1])
    print("parameters", hashlib.sha256(values).hexdigest())
    if bps.rank() == 0:
        print("killed", n_killed)
    bps.shutdown()
    print("done")


main([int(step) for step in sys.argv[1:]])
