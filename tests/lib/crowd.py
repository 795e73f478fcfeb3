"""A job whose ranks are sessions by hand that hold as much as they may: thousands of open rounds, of tensors."""
import os, struct, time
from wire import *


def rounds(n, first=1, **keys):
    """Entries for so many rounds of a tensor."""
    return [{'round': number, **keys} for number in range(first, first + n)]


class Crowd:
    """A session of each rank of one job. layout[k]: ranks on node k, whose daemon is daemons[k]. All share one buffer of so many bytes."""

    def __init__(self, daemons, layout, job='crowd', fields=None, length=4096):
        places = [(node, rank) for node, n_ranks in enumerate(layout) for rank in range(n_ranks)]
        self.sessions = [Session(daemons[node].socket) for node, _ in places]
        asked = [session.post_request(JOIN, {1: job, 3: rank, 4: len(places), 5: local, 6: layout[node], 7: node, 8: len(layout),
                                             **(fields or {})})
                 for rank, (session, (node, local)) in enumerate(zip(self.sessions, places))]
        for session, number in zip(self.sessions, asked):
            status, text, _ = session.answer(number)
            assert status == 0, text
        fd = memfd(length)
        for session in self.sessions:
            status, text, _ = session.share(fd, length)
            assert status == 0, text
        os.close(fd)

    def post(self, rank, entries):
        """Entries, each as what sets it apart (Session.entry()), and one wake-up."""
        session = self.sessions[rank]
        tail = WORD.unpack_from(session.memory, 64)[0]
        for at, keys in enumerate(entries, tail):
            struct.pack_into('<IiQ', session.memory, SLOT + 512 * (at % SLOTS), 1, 0, 1)
            place = RING + at % ENTRIES * 128
            session.memory[place:place + 128] = session.entry(slot=at % SLOTS, **keys)
        session.set_tail(tail + len(entries))
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
