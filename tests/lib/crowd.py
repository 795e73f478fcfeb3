"""A job whose ranks, all on one node, are sessions by hand that hold as much as they may: thousands of open rounds, of tensors."""
import os, struct, time
from wire import *


class Crowd:
    """n_ranks sessions of one job, each with a buffer of 4 KiB."""

    def __init__(self, daemon, n_ranks, job='crowd', fields=None):
        self.sessions = [Session(daemon.socket) for _ in range(n_ranks)]
        asked = [session.post_request(JOIN, {1: job, 3: rank, 4: n_ranks, 5: rank, 6: n_ranks, 7: 0, 8: 1, **(fields or {})})
                 for rank, session in enumerate(self.sessions)]
        for session, number in zip(self.sessions, asked):
            status, text, _ = session.answer(number)
            assert status == 0, text
        fd = memfd(4096)
        for session in self.sessions:
            status, text, _ = session.share(fd, 4096)
            assert status == 0, text
        os.close(fd)

    def post(self, rank, n, tensor=lambda i: 1, round=lambda i: i + 1, **keys):
        """n entries, tensor(i) and round(i) of the i-th, and one wake-up."""
        session = self.sessions[rank]
        tail = WORD.unpack_from(session.memory, 64)[0]
        for i in range(n):
            slot = (tail + i) % SLOTS
            struct.pack_into('<IiQ', session.memory, SLOT + 512 * slot, 1, 0, 1)
            at = RING + (tail + i) % ENTRIES * 128
            session.memory[at:at + 128] = session.entry(round=round(i), slot=slot, tensor=tensor(i), **keys)
        session.set_tail(tail + n)
        session.wake()

    def completed(self, rank):
        """Requests of this rank that have ended."""
        return WORD.unpack_from(self.sessions[rank].memory, 256)[0]

    def wait(self, rank, n, seconds=300):
        end = time.monotonic() + seconds
        while self.completed(rank) < n:
            assert time.monotonic() < end, f'rank {rank}: {self.completed(rank)} of {n} requests ended in {seconds} s'
            time.sleep(0.002)

    def statuses(self, rank, n):
        """How its first n requests ended."""
        return {struct.unpack_from('<i', self.sessions[rank].memory, SLOT + 512 * slot + 4)[0] for slot in range(n)}

    def close(self):
        for session in self.sessions:
            session.close()
