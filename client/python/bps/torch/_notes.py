"""Notes: what the ranks tell one another in each step, in one small tensor of which all get the maximum.

    who       the rank that sends it, plus one, while it trains; else 0
    changed   the rank, plus one, if in the step before somebody changed a gradient there that was under way; else 0
    slots     a digest of the gradients that the rank has, and that digest's complement
    sent      how many buckets of gradients the rank has sent since its last note, and the negation of that
    steps     how many steps the rank has ended since its last note, and the negation of that; both ANY in its first
    used      for each slot, whether the rank has a gradient

The maximum of a number and that of its complement, or negation, belong together only where all ranks have said the same number.
"""

import zlib

import torch

from .. import _client, _ops
from .._client import Arena
from .._library import Reduction
from . import ops

HEAD = 8
ANY = -(2**31)
SHORTEST = 64  # so that ranks that have a few slots more or less than others still hear so
FIRST = 2**31 - 1  # the priority of what is small and awaited by all


class Answer:
    """What all ranks know afterwards. last: the highest rank that trains, or None. changed: a rank that has changed a gradient under way."""

    def __init__(self, values, n_slots):
        who, changed, digest, complement, sent, negation, steps, other, *used = values[: HEAD + n_slots].tolist()
        self.last = who - 1 if who else None
        self.changed = changed - 1 if changed else None
        self.same_slots = digest == -1 - complement
        self.same_sent = sent == -negation
        self.same_steps = steps in (ANY, -other)
        self.used = used


class Notes:
    """Of one Gradients. agree_on() says which slots the notes are about; before, they are about none."""

    def __init__(self, prefix):
        self.name = f"{prefix}notes"
        self.digest = None
        self._n_slots = 0
        self._values = self._start = None

    def agree_on(self, digest, n_slots):
        length = max(SHORTEST, 1 << (HEAD + n_slots - 1).bit_length())
        if self._values is None or self._values.numel() != length:
            buffer = Arena.buffer(_client.current(), 4 * length)
            self._values = torch.frombuffer(buffer, dtype=torch.int32)
            self._start = _ops.prepared_push_pull(
                ops.span_of(self._values), Reduction.MAX, f"{self.name}.{length}", FIRST
            )
        self.digest, self._n_slots = digest, n_slots

    def send(self, trains, sent, steps=ANY, digest=None, changed=False, used=0):
        """Returns the Request. used: a list, or a number for all."""
        rank = _client.current().rank + 1
        digest = self.digest if digest is None else digest
        head = [rank if trains else 0, rank if changed else 0, digest, -1 - digest, sent, -sent]
        head += [steps, -steps if steps != ANY else ANY]
        self._values[:HEAD] = torch.tensor(head, dtype=torch.int32, device="cpu")
        if isinstance(used, list):
            used = torch.tensor(used, dtype=torch.int32, device="cpu")
        self._values[HEAD : HEAD + self._n_slots] = used
        return self._start()

    def read(self):
        """Once the request has ended well."""
        return Answer(self._values, self._n_slots)


def digest_of(lines):
    """A number of 31 bits that ranks with the same lines have alike."""
    return zlib.crc32("\n".join(lines).encode()) & 0x7FFFFFFF


def difference(everyone):
    """In words, how the lines of ranks differ. everyone: the lines of each rank."""
    known = [set(lines) for lines in everyone]
    for lines in everyone:
        for line in lines:
            has = [rank for rank, mine in enumerate(known) if line in mine]
            if len(has) < len(known):
                lacks = [rank for rank in range(len(known)) if rank not in has]
                return f"{_ranks(has)} {_have(has)} {line}, and {_ranks(lacks)} {_have(lacks)} not"
    return "ranks have the same parameters in another order"


def _ranks(ranks):
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _have(ranks):
    return "has" if len(ranks) == 1 else "have"
