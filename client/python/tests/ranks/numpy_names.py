"""Names without end: more than the daemon may have, in an order of each rank's own, old ones again, and with other types."""

import random

import numpy as np

import bps
from bps import _client

_client.TENSORS_KEPT = 16
STEPS = 300
TOGETHER = 8


def expect(base):
    return sum(base + rank for rank in range(bps.size()))


bps.init()
order = random.Random(bps.rank())
for step in range(STEPS):
    names = [f"loss.{step}.{i}" for i in range(TOGETHER)]
    order.shuffle(names)
    handles = [
        bps.push_pull_async(np.float32([len(name) + bps.rank()]), average=False, name=name) for name in names
    ]
    for name, handle in zip(names, handles):
        assert handle.wait()[0] == expect(len(name))
    # Used now and then, and never forgotten or as good as new.
    if step % 20 == 0:
        assert bps.push_pull(np.float64([step + bps.rank()]), average=False, name="epoch")[0] == expect(step)
    # Of several requests each.
    rows = bps.allgather(np.full((bps.rank() + 1, 2), step, "int64"), name=f"rows.{step}")
    assert len(rows) == sum(range(1, bps.size() + 1)) and (rows == step).all()
    # One of before, of another type and size, whether or not it is forgotten.
    if step >= 100:
        name = f"loss.{step - 1 - 37 * step % 100}.0"
        old = bps.push_pull(np.full(3, 5 + bps.rank(), "int32"), average=False, name=name)
        assert old.dtype == np.int32 and (old == expect(5)).all()
    # And of a moment ago.
    again = bps.push_pull(np.full(2, 7 + bps.rank(), "int64"), average=False, name=names[order.randrange(TOGETHER)][:-1] + "3")
    assert (again == expect(7)).all()
client = bps._current()
assert len(client.tensors) + len(client._older_tensors) <= 2 * _client.TENSORS_KEPT
assert len(client.turns) <= TOGETHER
bps.shutdown()
print("done")
