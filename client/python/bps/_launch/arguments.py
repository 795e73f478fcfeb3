"""The command line: our options, and a line each about those of other launchers that mean something else here."""

import argparse
import math
import os
import sys

from .. import __version__
from . import LaunchError, bind, byteps, hosts, machine, placement

EPILOG = "See bpslaunch(1), also for what becomes of the options of horovodrun, mpirun, torchrun and BytePS."

# Of other launchers: (names, number of values, whether they are refused, why).
FOREIGN = (
    (("--gloo", "--mpi", "--jsrun", "--tcp"), 0, False, "the daemons move the data"),
    (("--disable-cache",), 0, False, "nothing is cached"),
    (
        ("--autotune", "--no-autotune", "--hierarchical-allreduce", "--no-hierarchical-allreduce"),
        0,
        False,
        "bps needs no such tuning",
    ),
    (("--hierarchical-allgather", "--no-hierarchical-allgather"), 0, False, "bps needs no such tuning"),
    (
        (
            "--autotune-log-file",
            "--autotune-warmup-samples",
            "--autotune-steps-per-sample",
            "--autotune-bayes-opt-max-samples",
        ),
        1,
        False,
        "bps needs no such tuning",
    ),
    (
        ("--autotune-gaussian-process-noise", "--cycle-time-ms", "--cache-capacity"),
        1,
        False,
        "bps has no cycles and no cache",
    ),
    (("--fusion-threshold-mb",), 1, False, "small tensors share parts; -x BPS_PART_BYTES=4M bounds a part"),
    (("--num-nccl-streams", "--thread-affinity", "--gloo-timeout-seconds"), 1, False, "it is of Horovod's own threads"),
    (("--mpi-threads-disable", "--no-mpi-threads-disable"), 0, False, "there is no MPI"),
    (("--stall-check", "--no-stall-check"), 0, False, "every wait has a deadline: -x BPS_REQUEST_TIMEOUT=10min"),
    (
        ("--stall-check-warning-time-seconds", "--stall-check-shutdown-time-seconds"),
        1,
        False,
        "every wait has a deadline: -x BPS_REQUEST_TIMEOUT=10min",
    ),
    (("--timeline-filename",), 1, False, "there is no timeline; see bpsctl jobs and bpsctl metrics"),
    (("--timeline-mark-cycles", "--no-timeline-mark-cycles"), 0, False, "there is no timeline"),
    (("--log-level",), 1, False, "--daemon-option log_level=debug is for a private daemon's log"),
    (
        ("--log-with-timestamp", "--log-without-timestamp"),
        0,
        False,
        "a daemon's log has its time; --timestamp is for all lines",
    ),
    (("--config-file",), 1, True, "there is no file of options: give them here"),
    (("--slots-per-host",), 1, True, "the script of --host-discovery-script says how many: a:4"),
    (("--blacklist-cooldown-range",), 2, False, "a machine that is lost is given up, no other"),
    (("--mpi-args",), 1, True, "there is no MPI"),
    (("--binding-args",), 1, True, "--bind numa and --bind core do it here"),
    (("--allow-run-as-root", "--oversubscribe", "--tag-output", "-tag-output"), 0, False, "it is so anyway"),
    (("--mca", "-mca", "--prtemca", "--pmixmca"), 2, False, "there is no MPI"),
    (("--map-by", "-map-by", "--rank-by", "-rank-by"), 1, True, "ranks fill one host after the other"),
    (("--bind-to", "-bind-to"), 1, True, "--bind numa, --bind core and --bind none do it here"),
    (("-N", "-npernode", "--npernode"), 1, True, "give each host its slots: -H a:4,b:4"),
    (("-ppn", "-perhost"), 1, True, "give each host its slots: -H a:4,b:4"),
    (("-genv",), 2, True, "-x NAME=VALUE does it here"),
    (("--nproc_per_node", "--nproc-per-node"), 1, True, "-np N does it here, and the program is python train.py"),
    (("--nnodes",), 1, True, "--nodes N does it here"),
    (("--node_rank", "--node-rank"), 1, True, "--node I does it here"),
    (
        ("--master_addr", "--master-addr", "--rdzv_endpoint", "--rdzv-endpoint"),
        1,
        True,
        "--coordinator HOST:PORT does it here",
    ),
    (("--master_port", "--master-port"), 1, True, "--coordinator HOST:PORT does it here"),
    (("--rdzv_id", "--rdzv-id"), 1, True, "--job NAME does it here"),
    (
        ("--rdzv_backend", "--rdzv-backend", "--max_restarts", "--max-restarts"),
        1,
        False,
        "a job forms once, in its daemons",
    ),
    (("--standalone",), 0, False, "it is so without --nodes"),
    (("-WH", "--worker-hostfile"), 1, True, "--hostfile FILE does it here"),
    (("-SH", "--server-hostfile"), 1, True, "--servers HOST,HOST does it here"),
    (
        ("--scheduler-ip", "--scheduler-port", "--scheduler-ssh-port"),
        1,
        False,
        "ssh starts all; no scheduler is needed",
    ),
    (("--interface",), 1, True, "--network-interfaces NAME does it here"),
    (("--username",), 1, True, "-H user@host does it here"),
)


def foreign(refused, why):
    class Foreign(argparse.Action):
        def __call__(self, parser, options, values, name=None):
            if refused:
                parser.error(f"{name}: {why}")
            print(f"bpslaunch: {name} changes nothing: {why}", file=sys.stderr)

    return Foreign


class CommaList(argparse.Action):
    """Names after commas, and from each time the option is given."""

    def __call__(self, parser, options, values, name=None):
        setattr(options, self.dest, [*getattr(options, self.dest), *filter(None, values.split(","))])


class CheckBuild(argparse.Action):
    def __call__(self, parser, options, values, name=None):
        from . import build

        print(build.report())
        parser.exit()


def seconds(text):
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def make_parser():
    parser = argparse.ArgumentParser(
        prog="bpslaunch",
        usage="bpslaunch [-np N] [-H HOST:SLOTS,...] [OPTIONS] PROGRAM [ARGUMENTS]...",
        allow_abbrev=False,
        description="Starts the ranks of a job, and private daemons if none are there.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add(
        "-np",
        "-n",
        "--ranks",
        "--num-proc",
        type=int,
        metavar="N",
        help="ranks; on this machine, or with -H in all (1; all slots)",
    )
    add("-v", "--version", action="version", version=f"bpslaunch {__version__}")
    add("-cb", "--check-build", action=CheckBuild, nargs=0, help="say what is usable here, and exit")
    add("--verbose", action="store_true", help="say what is done")

    where = parser.add_argument_group("machines, over ssh")
    add = where.add_argument
    add("-H", "--hosts", "--host", "-host", metavar="LIST", help="machines and their slots: a:4,b:4")
    add(
        "--hostfile",
        "-hostfile",
        "--machinefile",
        "-f",
        metavar="FILE",
        help="the same in a file, one a line: a slots=4",
    )
    add("--servers", action=CommaList, default=[], metavar="LIST", help="machines that only sum: c,d")
    add("-p", "--ssh-port", type=int, metavar="PORT", help="port of ssh on all machines")
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    add(
        "--ssh",
        default=os.environ.get("BPS_SSH", "ssh"),
        metavar="COMMAND",
        help="what runs a command elsewhere ($BPS_SSH, or ssh)",
    )
    add("--remote-python", metavar="PATH", help="Python on the other machines (this one's path)")
    add("--network-interfaces", "--network-interface", action=CommaList, default=[], dest="interfaces", metavar="LIST",
        help="network interfaces for the daemons' data (where ssh came in)")  # fmt: skip
    add("--start-timeout", type=seconds, default=os.environ.get("HOROVOD_START_TIMEOUT", 30), metavar="S",
        help="seconds until all machines have begun (30)")  # fmt: skip

    ranks = parser.add_argument_group("ranks")
    add = ranks.add_argument
    add(
        "-x",
        "--env",
        action="append",
        default=[],
        metavar="VAR[=VALUE]",
        help="a variable for all ranks; may be given again",
    )
    add("--wdir", "-wdir", dest="folder", metavar="DIR", help="folder that ranks start in (the current one)")
    add("--bind", choices=bind.RULES, help="what each rank may run on: numa, core, none, auto, byteps (none)")
    add("--timestamp", "--prefix-output-with-timestamp", "-prefix-timestamp", action="store_true",
        help="put the time before each line of output")  # fmt: skip
    add("--grace", type=seconds, default=machine.GRACE_S, metavar="S",
        help=f"seconds between SIGTERM and SIGKILL for ranks that have to end ({machine.GRACE_S:g})")  # fmt: skip
    add("--output-filename", metavar="DIR", help="also write each rank's output to DIR/rank.N/stdout and stderr")

    elastic = parser.add_argument_group("ranks that come and go")
    add = elastic.add_argument
    add("--min-np", "--min-num-proc", type=int, metavar="N", help="the job goes on while it has so many ranks")
    add("--max-np", "--max-num-proc", type=int, metavar="N", help="and never has more (no bound)")
    add("--host-discovery-script", metavar="PROGRAM", help="prints HOST:SLOTS: how many ranks there are to be now")
    add("--elastic-timeout", type=seconds, default=os.environ.get("HOROVOD_ELASTIC_TIMEOUT", 600), metavar="S",
        help="seconds for a new rank to be let in (600)")  # fmt: skip
    add("--reset-limit", type=int, metavar="N", help="ranks that are started in the place of others, at most (no bound)")

    one = parser.add_argument_group("one machine of several, where something else starts bpslaunch on each")
    add = one.add_argument
    add("--node", type=int, metavar="I", help="number of this machine, from 0 (0)")
    add("--nodes", type=int, metavar="N", help="machines of the job, with as many ranks on each (1)")
    add(
        "--coordinator",
        metavar="HOST[:PORT]",
        help=f"machine 0: private daemons of all machines meet there ({placement.PORT})",
    )

    daemons = parser.add_argument_group("daemons")
    add = daemons.add_argument
    add("--socket", metavar="PATH", help="the daemon's socket ($BPS_SOCKET, or where it usually is)")
    add("--job", metavar="NAME", help="name of the job (one that nobody else has)")
    add("--no-daemon", action="store_true", help="never start a daemon; fail where none is there")
    add("--private", action="store_true", help="start private daemons in any case")
    add("--daemon-option", action="append", default=[], metavar="KEY=VALUE",
        help="start private daemons in any case, with this option; may be given again")  # fmt: skip

    for names, values, refused, why in FOREIGN:
        nargs = {"nargs": values} if values != 1 else {}
        parser.add_argument(*names, **nargs, action=foreign(refused, why), dest="_foreign", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="...", help="program and its arguments")
    return parser


def parse_arguments(arguments=None):
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.command[:1] == ["--"]:
        del options.command[0]
    options.coordinator_here = options.sums = True
    try:
        check_options(parser, options)
        options.environment = variables(options.env)
        if options.hosts is None:
            byteps.place(options)
            placement.place(options)
        else:
            options.byteps = None
            options.node, options.nodes, options.bind = 0, 1, options.bind or "none"
    except LaunchError as error:
        parser.error(str(error))
    if not options.command and not options.byteps_service:
        parser.error("which program?")
    if not 0 <= options.node < options.nodes:
        parser.error("--node must be at least 0 and less than --nodes")
    if options.nodes > 1 and not options.job:
        parser.error("--nodes needs --job: the name must be the same on all machines")
    return options


def check_options(parser, options):
    if options.ranks is not None and options.ranks < 1:
        parser.error("-np must be at least 1")
    if options.hosts is not None and options.hostfile is not None:
        parser.error("-H and --hostfile both name the machines: give one")
    if options.hosts is not None:
        options.hosts = hosts.parse_hosts(options.hosts)
    elif options.hostfile is not None:
        options.hosts = hosts.parse_hostfile(options.hostfile)
    options.servers = [hosts.parse_host(name, "--servers") for name in options.servers]
    options.byteps_service = None
    if options.hosts is None:
        if options.servers:
            parser.error("--servers needs -H: the machines that train")
        if options.interfaces and not options.coordinator:
            parser.error("--network-interfaces needs -H or --coordinator: on one machine there is no network")
    else:
        if options.node is not None or options.nodes is not None or options.coordinator is not None:
            parser.error("--node, --nodes and --coordinator are for bpslaunch on each machine; -H starts all of them")
        both = {host.name for host in options.hosts} & {host.name for host in options.servers}
        if both:
            parser.error(f"--servers {min(both)}: trains, says -H; machines that train sum as well")
    check_elastic(parser, options)
    if options.no_daemon and (options.daemon_option or options.private or options.servers):
        other = "--daemon-option" if options.daemon_option else "--private" if options.private else "--servers"
        parser.error(f"--no-daemon and {other} contradict each other")
    for option in options.daemon_option:
        if "=" not in option:
            parser.error(f"--daemon-option {option}: not KEY=VALUE")
    options.private = options.private or bool(options.daemon_option)


def check_elastic(parser, options):
    options.elastic = any(
        value is not None for value in (options.min_np, options.max_np, options.host_discovery_script, options.reset_limit)
    )
    if not options.elastic:
        return
    if options.nodes or options.coordinator:
        parser.error("--min-np, --max-np and --host-discovery-script need one bpslaunch that starts all ranks: here, or by -H")
    options.min_np = 1 if options.min_np is None else options.min_np
    if options.ranks is None:
        slots = options.min_np if options.hosts is None else sum(host.slots for host in options.hosts)
        options.ranks = min(slots, options.max_np or slots)
    if options.min_np < 1 or options.ranks < options.min_np:
        parser.error(f"--min-np must be at least 1, and at most -np, which is {options.ranks}")
    if options.max_np is not None and options.max_np < options.ranks:
        parser.error(f"--max-np must be at least -np, which is {options.ranks}")


def variables(given):
    """NAME=VALUE, NAME for one of ours, NAME,NAME of mpirun's older versions, and NAME:VALUE of BytePS's launcher."""
    result = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals and ":" in text:
            name, equals, value = text.partition(":")
        if equals:
            result[name] = value
            continue
        for each in text.split(","):
            if each not in os.environ:
                raise LaunchError(f"-x {each}: there is no such variable here; -x {each}=VALUE gives it one")
            result[each] = os.environ[each]
    return result
