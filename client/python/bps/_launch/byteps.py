"""BytePS's way of starting: bpslaunch by hand on each machine, with DMLC_ROLE in the environment.

worker      ranks, one for each visible GPU, and a daemon that meets the others at the scheduler's address
server      a daemon that sums
scheduler   a daemon that is the coordinator of the cluster
joint       a worker whose daemon sums too
"""

import os
import signal

from . import LaunchError, placement
from .loop import Loop
from .machine import Machine, interface_address, own_address
from .output import Lines, target_of

ROLES = ("worker", "server", "scheduler", "joint")


def text(name):
    return os.environ.get(name) or None


def required(name):
    value = text(name)
    if value is None:
        raise LaunchError(f"DMLC_ROLE is {os.environ['DMLC_ROLE']}, but {name} is not set")
    return value


def address():
    return f"{required('DMLC_PS_ROOT_URI')}:{placement.number('DMLC_PS_ROOT_PORT', 'DMLC_ROLE')}"


def local_size():
    """As many as BYTEPS_LOCAL_SIZE says, else as there are visible GPUs, else 1."""
    if text("BYTEPS_LOCAL_SIZE"):
        return placement.number("BYTEPS_LOCAL_SIZE")
    devices = text("NVIDIA_VISIBLE_DEVICES") or text("CUDA_VISIBLE_DEVICES")
    if devices is None or devices in ("all", "none", "void", "NoDevFiles", "-1"):
        return 1
    return len(devices.split(","))


def place(options):
    """Fills in what BytePS's variables say and the command line does not. options.byteps is the role, or None."""
    role = (text("DMLC_ROLE") or "").lower() or None
    options.byteps = role
    if role is None:
        return
    if role not in ROLES:
        raise LaunchError(f"DMLC_ROLE is {text('DMLC_ROLE')!r}, which is none of {', '.join(ROLES)}")
    if role in ("server", "scheduler"):
        options.byteps_service = role
        options.coordinator = options.coordinator or address()
        return
    workers = placement.number("DMLC_NUM_WORKER", "DMLC_ROLE")
    options.ranks = options.ranks or local_size()
    if options.nodes is None:
        options.nodes = workers
        options.node = placement.number("DMLC_WORKER_ID", "DMLC_ROLE")
    if options.bind is None:
        options.bind = "byteps" if (text("BYTEPS_NUMA_ON") or "1") == "1" else "none"
    environment = {"BYTEPS_LOCAL_SIZE": str(options.ranks)}
    distributed = workers > 1 or placement.number("BYTEPS_FORCE_DISTRIBUTED")
    if distributed:
        options.coordinator = options.coordinator or address()
        options.coordinator_here = False
        options.sums = role == "joint"
        options.job = options.job or text("BPS_JOB") or placement.clean(address().replace(":", "-"))
        environment["BPS_MIN_SERVERS"] = str(placement.number("DMLC_NUM_SERVER") or 0)
    for theirs, ours in (
        ("BYTEPS_PARTITION_BYTES", "BPS_PART_BYTES"),
        ("BYTEPS_FORCE_DISTRIBUTED", "BPS_FORCE_DISTRIBUTED"),
    ):
        if text(theirs):
            environment[ours] = str(placement.number(theirs))
    options.environment = {**environment, **options.environment}


def daemon_options(role, coordinator, machine):
    """Of a server or a scheduler."""
    options = ["cluster=coordinator", f"coordinator={coordinator}", "log_level=notice"]
    host, port = coordinator.rpartition(":")[::2]
    own = text("DMLC_NODE_HOST") or (interface_address([text("DMLC_INTERFACE")]) if text("DMLC_INTERFACE") else None)
    own = own or own_address((), host.strip("[]"))
    if own is None:
        raise LaunchError(f"no way to {coordinator}: DMLC_PS_ROOT_URI must be an address or a name that is known here")
    data_port = (placement.number("DMLC_PORT") if role == "server" else None) or machine.listen(own)
    name = f"{role}-{own.replace(':', '-')}-{data_port}"
    options += [f"address={f'[{own}]' if ':' in own else own}:{data_port}", f"node={name[:63]}"]
    if role == "server":
        return [*options, "roles=server"]
    listen = f"0.0.0.0:{port}" if placement.number("DMLC_USE_KUBERNETES") else coordinator
    return [*options, f"coordinator_listen={listen}", "roles=agent"]


def serve(options):
    """Runs a server or a scheduler until a signal comes. Returns its exit status."""
    loop, ended = Loop(), []
    lines = Lines("[daemon] ", target_of(2), options.timestamp)

    def emit(kind, data=b"", **fields):
        if kind == "output":
            lines.feed(data)
        elif kind == "daemon_ended":
            ended.append(fields["status"] or 1)  # by itself, which it was not asked to
        elif kind == "ready":
            print(
                f"bpslaunch: {options.byteps_service} at {options.coordinator}: runs until it is stopped, for one job after "
                "another; BytePS's would end with its job",
                flush=True,
            )

    machine = Machine(loop, emit)

    def on_signal(number):
        if number == signal.SIGCHLD:
            machine.reap()
        else:
            ended.append(0)

    loop.on_signals((signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP), on_signal)
    try:
        machine.start_daemon(
            [*daemon_options(options.byteps_service, options.coordinator, machine), *options.daemon_option]
        )
        while not ended:
            loop.turn()
    finally:
        machine.finish()
    return ended[0]
