"""What the ranks of scripts/chaos give to a round (as tests/cluster/chaos.h does), and what must come of it: by NumPy and reference.py,
from nothing but who is in it."""
import numpy as np
import reference as ref

# Name, type, reduction, elements.
TENSORS = [('weights', ref.FLOAT32, ref.AVERAGE, 40000), ('bias', ref.FLOAT32, ref.SUM, 301), ('counts', ref.INT32, ref.SUM, 20000)]
FACTORS = (np.uint64(0x9e3779b97f4a7c15) * np.arange(1, 65537, dtype=np.uint64)) | np.uint64(1)


def noise(who, round_number, tensor, n):
    with np.errstate(over='ignore'):
        x = np.uint32(who) * np.uint32(0x9e3779b9) ^ np.uint32(round_number) * np.uint32(0x85ebca6b)
        x = (x ^ np.uint32(tensor) * np.uint32(0xc2b2ae35)) ^ np.arange(n, dtype=np.uint32)
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x7feb352d)
        x ^= x >> np.uint32(15)
        return x * np.uint32(0x846ca68b)


def give(who, round_number, tensor, state):
    x = noise(who, round_number, tensor, len(state))
    if state.dtype == np.float32:
        scale = (np.uint32(1) << (x & np.uint32(15))).astype(np.float32)
        return state * np.float32(0.0625) + (x >> np.uint32(8)).astype(np.float32) / np.float32(16777216) * scale
    return (state.view(np.uint32) // np.uint32(3) + (x & np.uint32(0xffff))).view(np.int32)


def digest(data):
    return f'{int((data.view(np.uint32).astype(np.uint64) * FACTORS[:len(data)]).sum(dtype=np.uint64)):016x}'


class Reference:
    """The results of a job's rounds, made again. slots: how many first elements say who is in a result, each rank's own."""

    def __init__(self, slots=0):
        self.slots = slots
        self.state = [np.zeros(slots + n, ref.STORAGE[dtype]) for _, dtype, _, n in TENSORS]

    def given(self, who, round_number, t):
        data = give(who, round_number, t, self.state[t])
        if self.slots:
            data[:self.slots] = 0
            data[who] = 1
        return data

    def result(self, round_number, t, nodes):
        """nodes: a list for each node in their order, of its ranks' identities in theirs."""
        _, dtype, reduction, _ = TENSORS[t]
        given = [self.given(who, round_number, t) for node in nodes for who in node]
        return ref.reduce(dtype, reduction, given, [len(node) for node in nodes])
