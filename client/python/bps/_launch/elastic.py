"""Which ranks of an elastic job are started in the place of those that are lost, and when all is over."""

import subprocess
import time

from . import process
from .hosts import LOCAL

FIRST_S, LONGEST_S = 1.0, 30.0  # before another rank is started; twice as long after each that came to nothing
LOOK_S = 1.0  # between two runs of the discovery script
SCRIPT_S = 30.0  # that one may take


class Elastic:
    """Of a Launcher. A rank that fails is no failure of the job, which knows itself when it has too few, nor is a machine that is
    lost while another has ranks.

    The last rank that fails is the run's failure if none has ended well. When only newcomers are left that the job has not
    let in, it is over.
    """

    def __init__(self, launcher):
        self.launcher = launcher
        self.options = launcher.options
        self.ended_well = False
        self.stopping = False
        self.waiting = set()  # newcomers that are not in the job yet
        self.running = {}  # rank: its machine
        self.slots = {}  # machine: ranks that it has room for
        self.n_started = 0  # newcomers
        self.delay_s = FIRST_S
        self.wanted = self.options.ranks
        self.script = None  # the run of it that is under way
        self.strangers = set()  # machines that the script has named in vain

    def environment(self):
        options = self.options
        return {
            "BPS_ELASTIC": "1",
            "BPS_MIN_RANKS": str(options.min_np),
            "BPS_MAX_RANKS": str(options.max_np or 0),
            # Through servers newcomers come in on any machine, also where all ranks are on one at the start.
            **({"BPS_FORCE_DISTRIBUTED": "1"} if self.launcher.many else {}),
        }

    def begin(self, machines):
        """machines: those that have ranks, or may have some later."""
        self.running = {rank: each for each in machines for rank in each.ranks}
        if self.options.hosts is None:
            self.slots = {machines[0]: self.wanted}
        else:
            slots = {host.bare: host.slots for host in self.options.hosts}
            self.slots = {each: slots.get(each.name, self.wanted) for each in machines}
        if self.options.host_discovery_script:
            self.look()

    def ranks_on(self, machine):
        return [rank for rank, where in self.running.items() if where is machine]

    # -- What happens

    def joined(self, rank):
        self.waiting.discard(rank)
        self.delay_s = FIRST_S

    def ended(self, machine, rank, pid, status):
        if self.running.pop(rank, None) is None:
            return
        was_waiting = rank in self.waiting
        self.waiting.discard(rank)
        if status == 0:
            self.ended_well = True
        elif not self.stopping:
            words, code = process.describe_end(status)
            where = f" on {machine.name}" if machine.name else ""
            if was_waiting:
                self.delay_s = min(2 * self.delay_s, LONGEST_S)
            self.failed(f"rank {rank}{where} (pid {pid}) {words}", code)
        self.look_over()

    def lost(self, machine, how):
        """With all its ranks, which its agent ends when it can."""
        ranks = self.ranks_on(machine)
        self.slots.pop(machine, None)
        for rank in ranks:
            del self.running[rank]
            self.waiting.discard(rank)
        if not self.stopping:
            numbers = ", ".join(map(str, ranks))
            self.failed(f"{machine.name}: {how}" + (f", with its ranks: {numbers}" if ranks else ""), 1)
        self.look_over()

    def deaf(self, machine):
        """Its daemon is gone for good: no rank could do anything there."""
        self.slots.pop(machine, None)

    def failed(self, words, code):
        self.launcher.failed = words, code
        if not self.ended_well:
            self.launcher.say(f"{words}: {len(self.running)} go on")
            self.launcher.loop.after(self.delay_s, self.fill)

    def look_over(self):
        if self.running and not self.running.keys() - self.waiting:
            self.stop()

    def stop(self):
        if not self.stopping:
            self.stopping = True
            for machine in self.launcher.nodes:
                machine.call("stop")

    def room(self):
        """The machine with most room for another, before others one that has ranks in the job; or None."""
        free = {
            machine: (bool(set(self.ranks_on(machine)) - self.waiting), slots - len(self.ranks_on(machine)))
            for machine, slots in self.slots.items()
            if not machine.over and slots > len(self.ranks_on(machine))
        }
        return max(free, key=free.get, default=None)

    def fill(self):
        """Starts what is missing."""
        options = self.options
        most = min(self.wanted, options.max_np or self.wanted)
        while self.running and not self.stopping and not self.ended_well and len(self.running) < most:
            machine = self.room()
            if machine is None or options.reset_limit is not None and self.n_started >= options.reset_limit:
                return
            rank = options.ranks + self.n_started
            self.n_started += 1
            self.running[rank] = machine
            self.waiting.add(rank)
            own = {**self.launcher.rank_environment(rank, rank), "BPS_NEWCOMER": "1"}
            own["BPS_TIMEOUT"] = f"{options.elastic_timeout:g}s"
            where = f" on {machine.name}" if machine.name else ""
            self.launcher.say(f"rank {rank} is started{where}, and comes in when the others regroup")
            machine.idle = False
            machine.call("add_rank", rank=rank, own=own)

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
        """Slots of machines that are not named are none; the newest ranks of one that has too many end."""
        slots, strangers = slots_of(said, self.slots)
        script = self.options.host_discovery_script
        if new := strangers - self.strangers:
            self.strangers |= new
            self.launcher.say(f"{script}: {', '.join(sorted(new))}: no machine of the run, and not used")
        if not any(slots.values()):
            names = " or ".join(machine.name or "localhost" for machine in self.slots)
            self.launcher.say(f"{script}: does not say {names}:SLOTS, and nothing changes")
            return
        self.slots = slots
        total = sum(slots.values())
        self.wanted = max(self.options.min_np, min(total, self.options.max_np or total))
        left = len(self.running)
        for rank, machine in sorted(self.running.items(), reverse=True):
            crowded = len([r for r in self.ranks_on(machine) if r <= rank]) > slots.get(machine, 0)
            if left > self.options.min_np and (crowded or left > self.wanted):
                machine.call("end_rank", rank=rank)
                left -= 1
        self.fill()


def slots_of(said, machines):
    """({machine: slots}, other hosts) of lines HOST:SLOTS, or HOST for one."""
    slots, strangers = dict.fromkeys(machines, 0), set()
    here = (*LOCAL, process.host_name())
    for line in (said or "").split():
        host, _, number = line.rpartition(":") if line.rpartition(":")[2].isdecimal() else (line, "", "1")
        host = host.rpartition("@")[2].strip("[]")
        for machine in machines:
            if host == machine.name or host in here and (not machine.name or machine.name in here):
                slots[machine] += int(number)
                break
        else:
            strangers.add(host)
    return slots, strangers
