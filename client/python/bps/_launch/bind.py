"""What each rank of a machine may run on. A plan is a list of sets of CPUs, one for each local rank; None is no bound."""

import os

from . import LaunchError, topology

RULES = ("numa", "core", "none", "auto", "byteps")


def plan(rule, n_ranks, machine=None):
    """machine: a topology; read when it is needed."""
    if rule == "none" or not n_ranks:
        return [None] * n_ranks
    if rule == "byteps":
        return by_byteps(n_ranks, machine)
    machine = machine or topology.read()
    if rule == "auto":
        rule = "numa" if len(machine) > 1 and n_ranks > 1 else "none"
    if rule == "numa":
        return by_numa(machine, n_ranks)
    if rule == "core":
        return by_core(machine, n_ranks)
    return [None] * n_ranks


def cpus_of(cores):
    return {cpu for core in cores for cpu in core}


def shares(things, n):
    """Neighbours go together: things in n pieces in order, or each thing to several in turn where n is larger."""
    count = len(things)
    return [things[i * count // n : max((i + 1) * count // n, i * count // n + 1)] for i in range(n)]


def by_numa(machine, n_ranks):
    """Whole NUMA nodes: the first ranks on the first."""
    return [cpus_of(core for node in share for core in node) for share in shares(machine, n_ranks)]


def by_core(machine, n_ranks):
    """Whole cores with all their hardware threads, in the order of NUMA nodes; where there are too few, ranks share."""
    return [cpus_of(share) for share in shares([core for node in machine for core in node], n_ranks)]


# -- BytePS's rules


def setting(name, default):
    value = os.environ.get(name) or str(default)
    if not value.isdigit():
        raise LaunchError(f"{name} is {value!r}, which is not a number")
    return int(value)


def cpu_list(name, text):
    try:
        return set(topology.parse_list(text))
    except ValueError:
        raise LaunchError(f"{name} is {os.environ[name]!r}: CPUs are listed as in 0,4-7") from None


def by_byteps(n_ranks, machine=None):
    """BYTEPS_VISIBLE_CPU_CORES says it, rank by rank after colons. Else every rank gets BYTEPS_NUMA_DEFAULT_QUOTA cores of one
    NUMA node, and the last, which was BytePS's root, BYTEPS_NUMA_ROOT_QUOTA or what is left of one, with fewer where no node
    has as many. BYTEPS_MULTITHREADED_CPU=0 leaves out the second threads of cores; BYTEPS_CPU_BLACKLIST names CPUs to avoid.
    """
    visible = (os.environ.get("BYTEPS_VISIBLE_CPU_CORES") or "").strip()
    if visible:
        lists = visible.split(":")
        if len(lists) != n_ranks:
            raise LaunchError(
                f"BYTEPS_VISIBLE_CPU_CORES has {len(lists)} lists, but there are {n_ranks} ranks on this machine"
            )
        return [cpu_list("BYTEPS_VISIBLE_CPU_CORES", text) for text in lists]

    free = [list(node) for node in machine or topology.read()]
    total = sum(len(node) for node in free)
    quota = setting("BYTEPS_NUMA_DEFAULT_QUOTA", total // n_ranks)
    quota = min(quota, total // n_ranks)
    root = setting("BYTEPS_NUMA_ROOT_QUOTA", 0) or total - quota * (n_ranks - 1)
    root = min(root, len(free[0]))
    threads = None if (os.environ.get("BYTEPS_MULTITHREADED_CPU") or "1").lower() in ("1", "true") else 1
    blacklist = os.environ.get("BYTEPS_CPU_BLACKLIST") or "-1"
    avoided = set() if blacklist == "-1" else cpu_list("BYTEPS_CPU_BLACKLIST", blacklist)
    result = []
    for wanted in [quota] * (n_ranks - 1) + [root]:
        taken = take(free, wanted)
        cpus = cpus_of(core[:threads] for core in taken) - avoided
        result.append(cpus or None)
    return result


def take(free, wanted):
    """So many cores of the first node that has them, or one fewer, and so on; they are free no more."""
    for n in range(wanted, 0, -1):
        for node in free:
            if len(node) >= n:
                taken = node[:n]
                del node[:n]
                return taken
    return []
