"""Steps of an elastic job with optimizers. Arguments: identity, and what it does with its second step under way (stop).

Every batch is the same on every rank: whoever is there, the average is what one process computes, in every bit.
"""

import json
import os
import signal
import sys

import torch
import torch.nn.functional as F

import bps.torch as bps
from bps.torch import elastic

STEPS = 4
stops = sys.argv[2:] == ["stop"]


def say(**what):
    os.write(1, (json.dumps(what) + "\n").encode())


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def new_nets():
    torch.manual_seed(3)
    return [torch.nn.Linear(6, 3) for _ in range(2)]


def step_of(net, optimizer, number, meanwhile=lambda: None):
    optimizer.zero_grad()
    x, y = batch(number)
    F.cross_entropy(net(x), y).backward()
    meanwhile()
    optimizer.step()


def stop():
    global stops
    if stops:
        stops = False
        say(act="stop")
        os.kill(os.getpid(), signal.SIGSTOP)


@elastic.run
def train(state):
    while state.step < STEPS or state.whole < 2:
        for net, optimizer in zip(nets, optimizers):
            step_of(net, optimizer, state.step, stop if state.step == 1 else lambda: None)
        say(step=state.step, size=bps.size())
        state.step += 1
        state.whole += state.step >= STEPS and bps.size() == 2
        state.commit()
    return state.step


torch.set_num_threads(1)
bps.init(connect_timeout=60)
nets = new_nets()
optimizers = [bps.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets]
state = elastic.TorchState(
    step=0, whole=0, **{f"net{i}": net for i, net in enumerate(nets)}, **{f"sgd{i}": o for i, o in enumerate(optimizers)}
)
taken = train(state)
for net, alone in zip(nets, new_nets()):
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for number in range(taken):
        step_of(alone, optimizer, number)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), alone.parameters())), taken
say(done=taken, rank=bps.rank(), size=bps.size())
bps.shutdown()
