"""What both kinds of scripts/chaos have in common: ranks that log, daemons that are started again, failpoints that are armed for their
next processes, and who stands still."""
import os, threading, time
from cluster import Cluster, Process


class Rank(Process):
    """A trainer with a log (`path`) of lines of words."""

    def __init__(self, path, *arguments, **keys):
        self.path, self.known, self.read = path, [], 0
        super().__init__(*arguments, **keys)

    def lines(self):
        """What is written in full, as lists of words. Reads what is new: logs grow long."""
        try:
            with open(self.path) as file:
                file.seek(self.read)
                new, whole, _ = file.read().rpartition('\n')
        except FileNotFoundError:
            return self.known
        self.read += len((new + whole).encode())
        self.known += [line.split() for line in new.split('\n')] if whole else []
        return self.known


class Watch:
    """Says who stands still. Each rank is judged by itself: what others do is no sign of its life."""

    def __init__(self, longest):
        self.longest, self.seen = longest, {}

    def standing(self, ranks):
        now, standing = time.monotonic(), []
        for rank in ranks:
            state = len(rank.lines()), rank.process.poll()
            if self.seen.get(rank, (None,))[0] != state:
                self.seen[rank] = state, now
            elif state[1] is None and now - self.seen[rank][1] > self.longest:
                standing.append(rank)
        return standing


def longest_round(stamps):
    """Seconds between two results of a rank that follow each other. stamps: nanoseconds."""
    return max((b - a for a, b in zip(stamps, stamps[1:])), default=0) / 1e9


class World(Cluster):
    """Its daemons are started again when they end, but for those that are away. They are patient as they are by default."""

    patience = ()

    def __init__(self, *arguments, **keys):
        self.lock, self.away = threading.RLock(), set()
        self.armed, self.points = {}, []  # failpoints of next processes; all that were armed
        self.starts, self.deaths = [], []  # (daemon, time), (daemon, time, time of the wall's clock)
        super().__init__(*arguments, **keys)

    def arm(self, i, spec):
        """The next process of daemon i does so, if it comes by."""
        self.armed[i] = {'daemon': i, 'point': spec, 'lived': None}
        self.points.append(self.armed[i])

    def log_size(self, i):
        path = os.path.join(self.folder, self.names[i] + '.log')
        return os.path.getsize(path) if os.path.exists(path) else 0

    def start(self, i, wait=True, options=()):
        with self.lock:
            for point in self.points:
                if point['daemon'] == i and point['lived'] and not point['lived'][1]:
                    point['lived'][1] = self.log_size(i)
            point = self.armed.pop(i, None)
            if point:
                self.failpoints[i] = point['point']
                point['lived'] = [self.log_size(i), None]
            self.starts.append((i, time.monotonic()))
            return super().start(i, wait, options)

    def keep(self, over):
        """Starts again whatever has ended."""
        while not over.wait(0.005):
            for i, daemon in enumerate(self.daemons):
                with self.lock:
                    if not daemon.alive() and i not in self.away:
                        self.deaths.append((i, time.monotonic(), time.time()))
                        self.restart(i, wait=False)

    def met(self, point):
        """Whether the process that it was armed for came by: its log says so."""
        if not point['lived']:
            return False
        with open(os.path.join(self.folder, self.names[point['daemon']] + '.log'), 'rb') as file:
            file.seek(point['lived'][0])
            log = file.read(point['lived'][1] - point['lived'][0] if point['lived'][1] else -1)
        return f'failpoint {point["point"].partition("=")[0]} met\n'.encode() in log

    def unmet(self):
        """Failpoints that were armed and nobody came by, in words."""
        return [f'{self.names[point["daemon"]]}: {point["point"]}' for point in self.points if not self.met(point)]
