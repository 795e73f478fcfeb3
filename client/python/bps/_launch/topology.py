"""Cores and NUMA nodes of this machine: by hwloc where its library is, else from /sys.

A topology is a list of NUMA nodes, each a list of cores, each a sorted list of the numbers of its CPUs (hardware threads).
"""

import ctypes
import os
import re

HWLOC = "libhwloc.so.15"
# enum hwloc_obj_type_t, and the field cpuset of struct hwloc_obj: of the ABI that libhwloc.so.15 keeps.
TYPE_CORE, TYPE_PU, TYPE_NUMANODE = 2, 3, 13


class Obj(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("subtype", ctypes.c_char_p),
        ("os_index", ctypes.c_uint),
        ("name", ctypes.c_char_p),
        ("total_memory", ctypes.c_uint64),
        ("attr", ctypes.c_void_p),
        ("depth", ctypes.c_int),
        ("logical_index", ctypes.c_uint),
        ("next_cousin", ctypes.c_void_p),
        ("prev_cousin", ctypes.c_void_p),
        ("parent", ctypes.c_void_p),
        ("sibling_rank", ctypes.c_uint),
        ("next_sibling", ctypes.c_void_p),
        ("prev_sibling", ctypes.c_void_p),
        ("arity", ctypes.c_uint),
        ("children", ctypes.c_void_p),
        ("first_child", ctypes.c_void_p),
        ("last_child", ctypes.c_void_p),
        ("symmetric_subtree", ctypes.c_int),
        ("memory_arity", ctypes.c_uint),
        ("memory_first_child", ctypes.c_void_p),
        ("io_arity", ctypes.c_uint),
        ("io_first_child", ctypes.c_void_p),
        ("misc_arity", ctypes.c_uint),
        ("misc_first_child", ctypes.c_void_p),
        ("cpuset", ctypes.c_void_p),
    ]


def parse_list(text):
    """0-2,7 as [0, 1, 2, 7]. ValueError for anything else."""
    numbers = []
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        numbers += range(int(first), int(last if dash else first) + 1)
    return numbers


def from_hwloc():
    """None without the library. Knows HWLOC_SYNTHETIC and HWLOC_XMLFILE, as every program with hwloc does."""
    try:
        lib = ctypes.CDLL(HWLOC)
    except OSError:
        return None
    lib.hwloc_get_obj_by_depth.restype = ctypes.POINTER(Obj)
    lib.hwloc_get_obj_by_depth.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    lib.hwloc_get_nbobjs_by_depth.argtypes = [ctypes.c_void_p, ctypes.c_int]
    lib.hwloc_get_type_depth.argtypes = [ctypes.c_void_p, ctypes.c_int]
    lib.hwloc_bitmap_list_snprintf.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p]
    lib.hwloc_topology_load.argtypes = lib.hwloc_topology_destroy.argtypes = [ctypes.c_void_p]
    topology = ctypes.c_void_p()
    if lib.hwloc_topology_init(ctypes.byref(topology)):
        return None
    try:
        if lib.hwloc_topology_load(topology):
            return None
        nodes = _objects(lib, topology, TYPE_NUMANODE)
        cores = _objects(lib, topology, TYPE_CORE) or _objects(lib, topology, TYPE_PU)
    finally:
        lib.hwloc_topology_destroy(topology)
    return _group(nodes, cores)


def _objects(lib, topology, kind):
    """The CPUs of each object of a kind."""
    depth = lib.hwloc_get_type_depth(topology, kind)
    result = []
    for index in range(lib.hwloc_get_nbobjs_by_depth(topology, depth)):
        cpuset = lib.hwloc_get_obj_by_depth(topology, depth, index).contents.cpuset
        length = lib.hwloc_bitmap_list_snprintf(None, 0, cpuset)
        text = ctypes.create_string_buffer(length + 1)
        lib.hwloc_bitmap_list_snprintf(text, length + 1, cpuset)
        result.append(parse_list(text.value.decode()))
    return result


def _group(nodes, cores):
    """Cores by node; a node without cores (of memory alone) is none of ours."""
    nodes = [set(node) for node in nodes] or [{cpu for core in cores for cpu in core}]
    grouped = [[core for core in cores if core and core[0] in node] for node in nodes]
    return [node for node in grouped if node]


def _read_list(*path):
    try:
        with open(os.path.join(*path)) as file:
            return parse_list(file.read())
    except (OSError, ValueError):
        return []


def from_sys(root="/sys/devices/system"):
    online = _read_list(root, "cpu", "online") or sorted(os.sched_getaffinity(0))
    cores = {}
    for cpu in online:
        folder = os.path.join(root, "cpu", f"cpu{cpu}", "topology")
        siblings = _read_list(folder, "thread_siblings_list") or [cpu]
        cores[min(siblings)] = [sibling for sibling in siblings if sibling in online]
    try:
        names = [name for name in os.listdir(os.path.join(root, "node")) if re.fullmatch(r"node\d+", name)]
    except OSError:
        names = []
    names.sort(key=lambda name: int(name[4:]))
    return _group(
        [_read_list(root, "node", name, "cpulist") for name in names], [cores[core] for core in sorted(cores)]
    )


def read(allowed=None):
    """The machine, without the CPUs that this process may not use. allowed: which those are, where that is known."""
    whole = from_hwloc() or from_sys()
    if allowed is None:
        allowed = os.sched_getaffinity(0)
    kept = [[[cpu for cpu in core if cpu in allowed] for core in node] for node in whole]
    kept = [[core for core in node if core] for node in kept]
    return [node for node in kept if node]
