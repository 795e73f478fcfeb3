"""The run as a whole: machines, their daemons, the ranks, what they say, and how it ended."""

import os
import secrets
import signal
import socket
import sys
import time

from . import LaunchError, hosts, node, process
from .elastic import Elastic
from .daemon import STOP_S
from .loop import Loop
from .output import Lines, rank_file, target_of

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
FINISH_S = 5.0  # beyond what a daemon may take
INPUT_MAX = 1 << 16
NAME_RETRY_S = 0.5
UNCAUGHT, UNCAUGHT_S = 1, 3.0  # the status of an uncaught exception; how long others may tell of a better one
LOST_S = 10.0  # until an elastic job goes on without a machine whose daemon is gone


class Launcher:
    """Everything happens in turns of one loop."""

    def __init__(self, options):
        self.options = options
        self.loop = Loop()
        self.nodes = []
        self.workers = []  # of these, those with ranks, and the machines of an elastic job that may have some later
        self.running = False  # ranks are being started, or were
        self.failed = None  # (in words, exit status) of the first
        self.patience = None  # the timer of what may follow it
        self.stopping = False  # ranks are told to end
        self.streams = {}  # (node, source, target): Lines
        self.deadline = time.monotonic() + options.start_timeout
        self.heart = None
        self.elastic = Elastic(self) if options.elastic else None
        self.loop.on_signals((*FORWARDED, signal.SIGCHLD), self.on_signal)

    def run(self):
        try:
            self.make_nodes()
            self.look()
            self.start_daemons()
            self.start_ranks()
            while not all(self.is_done(each) for each in self.nodes):
                self.loop.turn()
        finally:
            self.end()
        return self.report()

    def is_done(self, each):
        return each.over or each.idle and not (self.elastic is not None and self.elastic.ranks_on(each))

    def say(self, text):
        target_of(2).say(f"bpslaunch: {text}")

    # -- Machines

    def make_nodes(self):
        options = self.options
        if options.hosts is None:
            first = options.node * options.ranks
            self.size, self.n_nodes, self.first_node = options.ranks * options.nodes, options.nodes, options.node
            self.nodes = self.workers = [node.Here(self.loop, list(range(first, first + options.ranks)), self.on_event)]
            return
        placed = hosts.assign(options.hosts, options.ranks)
        self.size, self.n_nodes, self.first_node = sum(len(ranks) for _, ranks in placed), len(placed), 0
        if self.elastic is not None:  # the others may have ranks later
            used = [host for host, _ in placed]
            placed += [(host, []) for host in options.hosts if host not in used]
        if all(host.is_local for host, _ in placed) and not options.servers and len(placed) == 1:
            self.nodes = self.workers = [node.Here(self.loop, placed[0][1], self.on_event)]
            return
        for host, ranks in [*placed, *((host, []) for host in options.servers)]:
            command, starter = node.agent_command(host, options, options.launch_file)
            if options.verbose:
                self.say(f"{host.bare}: {len(ranks)} ranks, by {' '.join(command)}")
            self.nodes.append(node.Agent(self.loop, host, command, ranks, self.on_event, starter))
        self.workers = self.nodes[: len(placed)]
        self.heart = node.Heart(self.nodes)
        self.heart.start()
        self.loop.after(node.BEAT_S, self.check_silence)

    @property
    def many(self):
        """Whether agents on several machines take part."""
        return len(self.nodes) > 1

    @property
    def meets(self):
        """Whether daemons must find others."""
        return self.many or bool(self.options.coordinator)

    def check_silence(self):
        for each in self.nodes:
            if not each.over and each.is_silent():
                each.over = True
                self.on_event(each, "lost", b"", {"how": f"not heard of for {node.SILENCE_S:.0f} s"})
        self.loop.after(node.BEAT_S, self.check_silence)

    def ask(self, nodes, command, answer, what, /, **fields):
        """Sends a command to all of nodes and waits for their answers. A field that is callable is called with the node."""
        for each in nodes:
            each.facts.pop(answer, None)
        for each in nodes:
            each.call(command, **{k: v(each) if callable(v) else v for k, v in fields.items()})
        while missing := [each for each in nodes if answer not in each.facts]:
            if time.monotonic() >= self.deadline:
                names = ", ".join(each.name for each in missing if each.name)
                names = f"{names}: " if names else ""
                raise LaunchError(f"{names}{what} within {self.options.start_timeout:g} s (--start-timeout)")
            self.loop.turn(self.deadline)

    def look(self):
        reached = [each.host for each in self.nodes if isinstance(each, node.Agent) and not each.host.is_local]
        meets = self.options.coordinator.rpartition(":")[0].strip("[]") if self.options.coordinator else "127.0.0.1"
        towards = reached[0].bare if reached else meets
        self.ask(
            self.nodes,
            "look",
            "machine",
            "no answer",
            path=self.options.socket,
            interfaces=self.options.interfaces,
            towards=towards,
            cluster=self.meets,
            library=os.environ.get("BPS_LIBRARY"),
        )

    # -- Daemons

    def start_daemons(self):
        """Uses the daemons that listen, or starts private ones on all machines."""
        options = self.options
        facts = {each: each.facts["machine"] for each in self.nodes}
        for each in self.nodes:
            if doubt := facts[each]["doubt"]:
                self.say(f"{each.name}: {doubt}" if each.name else doubt)
        deaf = [each for each in self.nodes if not facts[each]["listens"]]
        alone = [each for each in self.nodes if facts[each]["alone"]]
        if not (deaf or alone or options.private or options.servers):
            self.sockets = {each: (facts[each]["socket"], None) for each in self.nodes}
            return
        if options.no_daemon:
            if not deaf:
                raise LaunchError(
                    f"the daemon at {facts[alone[0]]['socket']} is in no cluster: see bps-cluster.conf(5)"
                )
            where = f"{deaf[0].name}: " if deaf[0].name else ""
            raise LaunchError(
                f"{where}no daemon listens at {facts[deaf[0]]['socket']}: leave out --no-daemon, or start one: "
                "systemctl start bps-daemon.socket"
            )
        if self.many:
            if len(deaf) not in (0, len(self.nodes)):
                names = ", ".join(each.name for each in deaf)
                self.say(f"no daemon listens on {names}: the job gets private ones on every machine")
            self.start_cluster(facts)
        else:
            self.start_one()
        self.sockets = {
            each: (each.facts["ready"]["socket"], each.facts["ready"]["admin_socket"]) for each in self.nodes
        }

    def socket_for(self, each):
        """Where a private daemon is to listen, if that is free; None: in its folder."""
        return None if each.facts["machine"]["listens"] else self.options.socket

    def daemon_options(self):
        level = "info" if self.options.verbose else "warning"
        # A private daemon of one machine of several is not started again: it need not be waited for long.
        lost = [f"lost_timeout={LOST_S:g}s"] if self.elastic is not None and self.many else []
        return [f"log_level={level}", *lost, *self.options.daemon_option]

    def start_one(self):
        options = self.options
        if (
            self.n_nodes > 1
            and not options.coordinator
            and not any(o.startswith("cluster=") for o in options.daemon_option)
        ):
            path = self.nodes[0].facts["machine"]["socket"]
            raise LaunchError(
                f"no daemon listens at {path}, and a private one would be alone: run bps-daemon on all {self.n_nodes} "
                "machines as a cluster, or name the first machine with --coordinator"
            )
        more = []
        if options.coordinator:
            coordinator = options.coordinator
            more += ["cluster=coordinator", f"coordinator={coordinator}", f"node={options.job[:40]}-{self.first_node}"]
            address = self.await_address(coordinator)
            if self.first_node == 0 and options.coordinator_here:
                more.append(f"coordinator_listen={coordinator}")
            self.ask(self.nodes, "listen", "listening", "no port for data", address=address)
            more.append(f"address={bracket(address)}:{self.nodes[0].facts['listening']['port']}")
            if not options.sums:
                more.append("roles=agent")
        self.ask(
            self.nodes,
            "start_daemon",
            "ready",
            "bps-daemon was not ready",
            options=more + self.daemon_options(),
            path=self.socket_for,
            restarts=not options.coordinator and self.n_nodes == 1,
        )

    def await_address(self, coordinator):
        """Our address as the coordinator's machine sees it. Its name may come to be known only after it has started."""
        while (address := self.nodes[0].facts["machine"]["address"]) is None:
            if time.monotonic() >= self.deadline:
                raise LaunchError(f"no way to the coordinator {coordinator} is known here (--start-timeout)")
            self.loop.after(NAME_RETRY_S, lambda: None)
            self.loop.turn(self.deadline)
            self.look()
        return address

    def start_cluster(self, facts):
        """A static cluster that only this job's daemons know, by a key that only they know."""
        names = self.node_names()
        addresses = {each: facts[each]["address"] or each.name for each in self.nodes}
        self.ask(self.nodes, "listen", "listening", "no port for data", address=addresses.get)
        text = "".join(
            f"[node {names[each]}]\naddress = {bracket(addresses[each])}:{each.facts['listening']['port']}\n"
            f"roles = {'agent, server' if each in self.workers else 'server'}\n"
            for each in self.nodes
        )
        if self.options.verbose:
            self.say("the job's own cluster:\n" + text.rstrip())
        self.ask(
            self.nodes,
            "start_daemon",
            "ready",
            "bps-daemon was not ready",
            options=lambda each: [f"node={names[each]}", *self.daemon_options()],
            path=self.socket_for,
            program=os.environ.get("BPS_DAEMON"),
            cluster=text,
            key=secrets.token_hex(32),
        )

    def node_names(self):
        """As the user calls them, in the letters that a cluster's file allows, each its own."""
        names, used = {}, set()
        for number, each in enumerate(self.nodes):
            name = "".join(c if c.isalnum() and c.isascii() or c in ".-_" else "-" for c in each.name)[:50]
            names[each] = name if name not in used else f"{name}-{number}"
            used.add(names[each])
        return names

    # -- Ranks

    def job_environment(self):
        """What all ranks of all machines get."""
        options = self.options
        environment = {
            "BPS_JOB": options.job or f"bpslaunch-{os.getpid()}-{secrets.token_hex(4)}",
            "BPS_SIZE": str(self.size),
            "WORLD_SIZE": str(self.size),
            "BPS_NODES": str(self.n_nodes),
            "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),
        }
        if "BPS_SECRET" in os.environ:
            environment["BPS_SECRET"] = os.environ["BPS_SECRET"]
        elif options.nodes == 1:
            environment["BPS_SECRET"] = secrets.token_hex(16)
        if options.package_folder:  # not installed: let the ranks find the package where we did
            folders = [options.package_folder, os.environ.get("PYTHONPATH")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        if options.nodes == 1:
            environment.update(self.torch_meeting())
        if self.elastic is not None:
            environment.update(self.elastic.environment())
        return {**environment, **options.environment}

    def torch_meeting(self):
        """For torch.distributed: its ranks meet at a port of the machine that has rank 0."""
        first = next(each for each in self.nodes if each.ranks)
        address = first.facts["machine"]["address"] or first.name
        return {
            "MASTER_ADDR": "127.0.0.1" if self.n_nodes == 1 else address,
            "MASTER_PORT": str(meeting_port()),
        }

    def node_environment(self, number, each):
        path, admin_path = self.sockets[each]
        environment = {
            "BPS_SOCKET": path,
            "BPS_NODE": str(self.first_node + number),
            "BPS_LOCAL_SIZE": str(len(each.ranks)),
            "LOCAL_WORLD_SIZE": str(len(each.ranks)),
        }
        if admin_path is not None:
            environment["BPS_ADMIN_SOCKET"] = admin_path
        if "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, each.facts["machine"]["cores"] // max(1, len(each.ranks))))
        return environment

    def start_ranks(self):
        options, common = self.options, self.job_environment()
        workers = self.workers
        reader = None if os.isatty(0) else workers[0].ranks[0]
        if reader != 0 and isinstance(workers[0], node.Here):
            reader = None
        self.running = True
        numbers = {each: number for number, each in enumerate(workers)}
        self.ask(
            workers,
            "start_ranks",
            "started",
            "the ranks were not started",
            ranks=lambda each: [[r, self.rank_environment(r, i)] for i, r in enumerate(each.ranks)],
            command=options.command,
            environment=lambda each: {**each.travels(), **self.node_environment(numbers[each], each), **common},
            folder=lambda each: options.folder or (None if isinstance(each, node.Here) else os.getcwd()),
            reader=reader,
            inherit=lambda each: isinstance(each, node.Here),
            rule=options.bind,
            grace=options.grace,
        )
        if self.elastic is not None:
            self.elastic.begin(workers)
        if reader is not None and isinstance(workers[0], node.Agent):
            self.reader = workers[0]
            self.read_input()

    def rank_environment(self, rank, local_rank):
        own = {"BPS_RANK": str(rank), "BPS_LOCAL_RANK": str(local_rank)}
        own.update(RANK=str(rank), LOCAL_RANK=str(local_rank))  # torch's
        if self.options.byteps:
            own["BYTEPS_LOCAL_RANK"] = str(local_rank)
        return own

    # -- Input of rank 0, where that is behind an agent

    def read_input(self):
        """One piece on its way at a time."""
        if sys.stdin is None:  # closed before we were started
            return self.reader.call("send_input", b"")
        try:
            self.loop.watch(sys.stdin, self.input_readable)
        except PermissionError:  # a file, which is always ready
            self.input_readable()

    def input_readable(self):
        try:
            data = os.read(0, INPUT_MAX)
        except BlockingIOError:
            return
        self.loop.forget(sys.stdin)
        self.reader.call("send_input", data)

    # -- What happens

    def on_signal(self, number):
        if number == signal.SIGCHLD:
            for each in self.nodes:
                if isinstance(each, node.Here):
                    each.machine.reap()
        elif self.running:
            for each in self.nodes:
                each.call("signal", number=number)
        else:
            raise LaunchError(f"ended by {signal.Signals(number).name} while no rank was running")

    def on_event(self, each, kind, data, fields):
        if kind == "output":
            self.stream(each, fields["source"], fields["target"]).feed(data)
        elif kind == "quiet":
            self.stream(each, fields["source"], fields["target"]).show()
        elif kind == "ended":
            self.rank_ended(each, **fields)
        elif kind == "joined":
            self.elastic.joined(**fields)
        elif kind == "taken":
            self.read_input()
        elif kind == "daemon_ended":
            self.daemon_ended(each, **fields)
        elif kind == "lost" and self.running and self.elastic is not None:
            self.elastic.lost(each, fields["how"])
        elif kind in ("error", "lost"):
            text = fields["text"] if kind == "error" else fields["how"]
            text = f"{each.name}: {text}" if each.name else text
            if kind == "error" or not self.running:
                raise LaunchError(text)
            self.fail(f"bpslaunch: {text}", 1)

    def stream(self, each, source, target):
        key = (each, source, target)
        if key not in self.streams:
            name = source if source != "daemon" or not each.name else f"daemon {each.name}"
            folder, file = self.options.output_filename, None
            if folder and source != "daemon":
                file = rank_file(folder, source, self.size, "stdout" if target == 1 else "stderr")
            self.streams[key] = Lines(f"[{name}] ", target_of(target), self.options.timestamp, file)
        return self.streams[key]

    def rank_ended(self, each, rank, pid, status):
        if self.elastic is not None:
            self.elastic.ended(each, rank, pid, status)
        elif status:
            words, code = process.describe_end(status)
            where = f" on {each.name}" if each.name else ""
            self.fail(f"rank {rank}{where} (pid {pid}) {words}", code, UNCAUGHT_S if status == UNCAUGHT else 0)

    def daemon_ended(self, each, status, ready, ranks, restarted):
        where = f" on {each.name}" if each.name else ""
        words = process.describe_end(status)[0]
        if not ready:
            raise LaunchError(f"bps-daemon{where} {words} before it was ready")
        if ranks or not each.ranks:
            again = ": another takes its place" if restarted else ""
            self.say(f"bps-daemon{where} {words} while ranks were running{again}")
        if self.elastic is not None and not restarted:
            self.elastic.deaf(each)

    def fail(self, words, code, patience=0):
        """The first failure is the job's, and ends it. patience, in seconds: for one that says more. A rank that has left the job, of
        which this one has heard, may be slower to end.
        """
        if self.stopping:
            return
        if self.failed is None or not patience:
            self.failed = words, code
        if not patience:
            self.stop_ranks()
        elif self.patience is None:
            self.patience = self.loop.after(patience, self.stop_ranks)

    def stop_ranks(self):
        if not self.stopping:
            self.stopping = True
            for each in self.nodes:
                each.call("stop")

    # -- The end

    def end(self):
        if self.heart is not None:
            self.heart.stopped.set()
        for each in self.nodes:
            each.call("finish")
        deadline = time.monotonic() + STOP_S + FINISH_S
        agents = [each for each in self.nodes if isinstance(each, node.Agent)]
        answering = [each for each in agents if each.reader.greeted]  # the others have started nothing
        while any("bye" not in each.facts and not each.over for each in answering) and time.monotonic() < deadline:
            try:
                self.loop.turn(deadline)
            except (LaunchError, BrokenPipeError):
                pass  # the run is over, and why is known
        for each in agents:
            each.close()

    def report(self):
        if self.elastic is not None and self.elastic.ended_well:
            return 0
        if self.failed is None:
            return 0
        words, code = self.failed
        target_of(2).say(words)
        return code


def meeting_port():
    """A port that nobody listens on here, outside the range that connections take theirs from."""
    while True:
        port = 20000 + secrets.randbelow(10000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


def bracket(address):
    return f"[{address}]" if ":" in address else address
