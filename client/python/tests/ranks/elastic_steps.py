"""Steps of an elastic job. Each process has an identity of its own, and block number identity of every tensor is its: a sum says
who is in it. Prints a line for each tensor and step. Arguments: identity, steps at least, of which at least three of the second half with so many ranks, and what it does at which
step (die@3, stop@3), half of that step's tensors being under way. Identity "-": the number that bpslaunch has given it, and acts are for
one of them (1:die@3).
"""

import json
import os
import signal
import sys

import numpy as np

import bps
import bps.elastic

IDENTITIES, BLOCK, TENSORS = 8, 5000, 4
steps, at_the_end = (int(word) for word in sys.argv[2:4])
words = sys.argv[4:]
if sys.argv[1] == "-":
    identity = int(os.environ["RANK"])
    words = [word.partition(":")[2] for word in words if word.startswith(f"{identity}:")]
else:
    identity = int(sys.argv[1])
acts = dict(reversed(word.split("@")) for word in words)
SIGNALS = {"die": signal.SIGKILL, "stop": signal.SIGSTOP}


def say(**what):
    os.write(1, (json.dumps(what) + "\n").encode())


def started(step):
    for number in range(TENSORS):
        x = np.zeros((IDENTITIES, BLOCK), np.float32)
        x[identity] = step + 1
        if number == TENSORS // 2 and str(step) in acts:
            name = acts.pop(str(step))
            say(act=name)
            os.kill(os.getpid(), SIGNALS[name])
        yield bps.push_pull_async(x, average=number % 2 == 1, name=f"t{number}", output=x)


@bps.elastic.run
def train(state):
    while state.step < steps or state.whole < 3:
        for number, handle in enumerate(list(started(state.step))):
            result = handle.wait()
            mine = result[identity, 0]
            assert mine > 0 and (result == result[:, :1]).all(), result
            came = [i for i in range(IDENTITIES) if result[i, 0]]
            each = state.step + 1 if number % 2 == 0 else np.float32(state.step + 1) / np.float32(len(came))
            assert all(result[i, 0] == np.float32(each) for i in came), (result[:, 0], came)
            say(step=state.step, tensor=number, came=came)
        state.step += 1
        state.whole += state.step > steps // 2 and bps.size() == at_the_end
        state.commit()
    say(done=state.step, rank=bps.rank(), size=bps.size())


bps.init(connect_timeout=60)
say(joined=bps.rank(), size=bps.size())
try:
    train(bps.elastic.ObjectState(step=0, whole=0))
except bps.BpsError as error:
    say(error=type(error).__name__, text=str(error))
    sys.exit(3)
bps.shutdown()
