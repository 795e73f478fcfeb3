"""An honest job beside whoever does wrong: two ranks that reduce 4 KiB again and again, each result compared, each round timed."""
import threading, time
from cluster import DEADLINE, FLOAT32

ONES, TWOS = b'\x00\x00\x80\x3f' * 1024, b'\x00\x00\x00\x40' * 1024


class Honest:
    def __init__(self, cluster, layout=(2,), job='honest', **keys):
        """layout: ranks of each node. Two ranks in all, or results have other values."""
        self.ranks = cluster.job(layout, job=job, timeout_ms=120000, **keys)
        assert len(self.ranks) == 2
        for rank in self.ranks:
            rank.call('tensor', 0, 'x', FLOAT32, 1024)
        self.n = 0

    def step(self):
        """One round. Returns how long it took, in seconds."""
        began, n = time.monotonic(), self.n % 1024  # requests have few numbers
        for rank in self.ranks:
            rank.submit(n, 0, ONES, out=1024)
        # All at once: one that has lost its daemon comes back when it waits, and the others wait for it.
        for rank in self.ranks:
            rank.send('wait', n, DEADLINE * 1000)
        for rank in self.ranks:
            rank.answer(2 * DEADLINE)
        took = time.monotonic() - began
        for rank in self.ranks:
            assert rank.result(n) == TWOS, 'wrong bits'
            rank.call('free', n)
        self.n += 1
        return took

    def steps(self, seconds):
        """Rounds for so long, one after the other. Returns how long each took."""
        end, times = time.monotonic() + seconds, []
        while not times or time.monotonic() < end:
            times.append(self.step())
        return times

    def beside(self, act):
        """Rounds in this thread while act() runs in another. Returns how long each round took; raises what act() raised."""
        times, raised = [], []

        def run():
            try:
                act()
            except BaseException as error:  # pylint: disable=broad-except; it is raised again below
                raised.append(error)
        thread = threading.Thread(target=run)
        thread.start()
        while thread.is_alive():
            times.append(self.step())
        thread.join()
        times.append(self.step())
        if raised:
            raise raised[0]
        return times
