"""Which machines, and how many ranks on each: -H and the formats of host files."""

import re
import socket

from . import LaunchError

LOCAL = ("localhost", "127.0.0.1", "::1")


class Host:
    def __init__(self, name, slots):
        self.name = name  # as ssh wants it, with user@ if given
        self.slots = slots

    @property
    def bare(self):
        """Without a user."""
        return self.name.rpartition("@")[2]

    @property
    def is_local(self):
        """Whether it is certainly this machine. What is not sure goes through ssh, which works there too."""
        own = socket.gethostname()
        return self.name in LOCAL or self.name in (own, own.partition(".")[0])


def parse_host(text, where):
    """host, host:4, [::1]:4, user@host:4"""
    found = re.fullmatch(r"((?:[^@\s]+@)?(?:\[[^\]\s]+\]|[^:@\s]+))(?::(\d+))?", text)
    if not found or found[2] == "0":
        raise LaunchError(f"{where}: {text!r} is not HOST or HOST:SLOTS (an IPv6 address stands in brackets)")
    return Host(found[1].replace("[", "").replace("]", ""), int(found[2] or 1))


def parse_hosts(text, where="-H"):
    return merge([parse_host(part, where) for part in text.split(",")])


def parse_line(line, where):
    """Horovod's and Open MPI's `host slots=4 max_slots=8`, MPICH's `host:4`, or the host alone."""
    words = line.split()
    host = parse_host(words[0], where)
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in ("slots", "max_slots", "max-slots") or not value.isdigit():
            raise LaunchError(f"{where}: {word!r} is not slots=N")
        if key == "slots":
            host.slots = int(value)
    return host


def parse_hostfile(path):
    try:
        with open(path) as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except OSError as error:
        raise LaunchError(f"--hostfile {path}: {error.strerror}") from error
    hosts = [parse_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line]
    if not hosts:
        raise LaunchError(f"--hostfile {path}: names no host")
    return merge([host for host in hosts if host.slots])


def merge(hosts):
    """A host that is named again has more slots."""
    by_name = {}
    for host in hosts:
        known = by_name.setdefault(host.name, Host(host.name, 0))
        known.slots += host.slots
    return list(by_name.values())


def assign(hosts, ranks):
    """[(host, its ranks)] for so many ranks (None: all slots), filling one host after the other."""
    slots = sum(host.slots for host in hosts)
    if ranks is None:
        ranks = slots
    if ranks > slots:
        raise LaunchError(f"-np {ranks}: the hosts have {slots} slots: give them more, as in {hosts[0].name}:{ranks}")
    result, first = [], 0
    for host in hosts:
        n = min(host.slots, ranks - first)
        if n:
            result.append((host, list(range(first, first + n))))
        first += n
    return result
