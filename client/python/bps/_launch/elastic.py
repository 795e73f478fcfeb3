"""Which ranks of an elastic job are started in the place of those that are lost, and when all is over."""

import subprocess
import time

from . import process

FIRST_S, LONGEST_S = 1.0, 30.0  # before another rank is started; twice as long after each that came to nothing
LOOK_S = 1.0  # between two runs of the discovery script
SCRIPT_S = 30.0  # that one may take


class Elastic:
    """Of a Launcher with one machine. A rank that fails is no failure of the job, which knows itself when it has too few.

    The last rank that fails is the run's failure if none has ended well. When only newcomers are left that the job has not
    let in, it is over.
    """

    def __init__(self, launcher):
        self.launcher = launcher
        self.options = launcher.options
        self.ended_well = False
        self.stopping = False
        self.waiting = set()  # newcomers that are not in the job yet
        self.running = set()
        self.n_started = 0  # newcomers
        self.delay_s = FIRST_S
        self.wanted = self.options.ranks
        self.script = None  # the run of it that is under way, and since when

    def environment(self):
        options = self.options
        return {
            "BPS_ELASTIC": "1",
            "BPS_MIN_RANKS": str(options.min_np),
            "BPS_MAX_RANKS": str(options.max_np or 0),
        }

    def begin(self, node):
        self.node = node
        self.running = set(node.ranks)
        if self.options.host_discovery_script:
            self.look()

    # -- What happens

    def joined(self, rank):
        self.waiting.discard(rank)
        self.delay_s = FIRST_S

    def ended(self, rank, pid, status):
        self.running.discard(rank)
        was_waiting = rank in self.waiting
        self.waiting.discard(rank)
        if status == 0:
            self.ended_well = True
        elif not self.stopping:
            words, code = process.describe_end(status)
            self.launcher.failed = f"rank {rank} (pid {pid}) {words}", code
            if was_waiting:
                self.delay_s = min(2 * self.delay_s, LONGEST_S)
            if not self.ended_well:
                self.launcher.say(f"rank {rank} (pid {pid}) {words}: {len(self.running)} go on")
                self.launcher.loop.after(self.delay_s, self.fill)
        if self.running and not self.running - self.waiting:
            self.stop()

    def stop(self):
        if not self.stopping:
            self.stopping = True
            self.node.call("stop")

    def fill(self):
        """Starts what is missing."""
        options = self.options
        most = min(self.wanted, options.max_np or self.wanted)
        while self.running and not self.stopping and not self.ended_well and len(self.running) < most:
            if options.reset_limit is not None and self.n_started >= options.reset_limit:
                return
            rank = options.ranks + self.n_started
            self.n_started += 1
            self.running.add(rank)
            self.waiting.add(rank)
            own = {**self.launcher.rank_environment(rank, rank), "BPS_NEWCOMER": "1"}
            own["BPS_TIMEOUT"] = f"{options.elastic_timeout:g}s"
            self.launcher.say(f"rank {rank} is started, and comes in when the others regroup")
            self.node.call("add_rank", rank=rank, own=own)

    # -- The discovery script

    def look(self):
        """How many ranks there are to be, from time to time."""
        if self.stopping or self.ended_well:
            return
        loop = self.launcher.loop
        if self.script is None:
            self.script = process.start(
                [self.options.host_discovery_script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
            )
            self.script_until = time.monotonic() + SCRIPT_S
        if self.script.poll() is not None:
            said, status = self.script.communicate()[0], self.script.returncode
            self.script = None
            self.adapt(said if status == 0 else None)
        elif time.monotonic() > self.script_until:
            self.script.kill()
        loop.after(LOOK_S if self.script is None else LOOK_S / 10, self.look)

    def adapt(self, said):
        slots = slots_here(said)
        if slots is None:
            self.launcher.say(f"{self.options.host_discovery_script}: does not say localhost:SLOTS, and nothing changes")
            return
        self.wanted = max(self.options.min_np, min(slots, self.options.max_np or slots))
        for rank in sorted(self.running, reverse=True)[: max(0, len(self.running) - self.wanted)]:
            self.node.call("end_rank", rank=rank)
        self.fill()


def slots_here(said):
    """Slots of the lines HOST:SLOTS, or HOST for one, that are of this machine; None if there is no such line."""
    slots = None
    for line in (said or "").split():
        host, _, number = line.partition(":")
        if host in ("localhost", "127.0.0.1", process.host_name()) and (number or "1").isdecimal():
            slots = (slots or 0) + int(number or 1)
    return slots
