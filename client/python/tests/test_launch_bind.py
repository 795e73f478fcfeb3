"""What ranks are bound to: on synthetic machines, and really, here."""

import ctypes
import os
import pathlib

import pytest
from test_launch import FAKE

from bps._launch import LaunchError, bind, topology

TWO_NODES = [[[0, 8], [1, 9], [2, 10], [3, 11]], [[4, 12], [5, 13], [6, 14], [7, 15]]]
ONE_NODE = [[[0], [1], [2]]]


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("BYTEPS_", "HWLOC_")):
            monkeypatch.delenv(name)


def has_hwloc():
    try:
        ctypes.CDLL(topology.HWLOC)
    except OSError:
        return False
    return True


needs_hwloc = pytest.mark.skipif(not has_hwloc(), reason=f"no {topology.HWLOC}")


@needs_hwloc
@pytest.mark.parametrize(
    "text, nodes",
    [
        ("numa:2 core:2 pu:2", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        ("pack:1 core:3 pu:1", [[[0], [1], [2]]]),
        ("numa:2 core:4 pu:2(indexes=0,8,1,9,2,10,3,11,4,12,5,13,6,14,7,15)", TWO_NODES),
        ("pack:2 [numa] l3:1 core:1 pu:1", [[[0]], [[1]]]),
    ],
)
def test_hwloc_synthetic(monkeypatch, text, nodes):
    monkeypatch.setenv("HWLOC_SYNTHETIC", text)
    assert topology.from_hwloc() == nodes


@needs_hwloc
def test_hwloc_and_sys_see_the_same_machine(monkeypatch):
    by_hwloc = topology.read()
    monkeypatch.setattr(topology, "from_hwloc", lambda: None)
    assert by_hwloc == topology.read() != []


def write(root, files):
    for name, text in files.items():
        path = pathlib.Path(root) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_sys_of_a_machine_with_two_nodes(tmp_path):
    files = {
        "cpu/online": "0-15",
        "node/node0/cpulist": "0-3,8-11",
        "node/node1/cpulist": "4-7,12-15",
        "node/node2/cpulist": "",
    }
    files.update({f"cpu/cpu{i}/topology/thread_siblings_list": f"{i % 8},{i % 8 + 8}" for i in range(16)})
    write(tmp_path, files)
    assert topology.from_sys(tmp_path) == TWO_NODES


def test_sys_without_nodes_and_with_an_offline_thread(tmp_path):
    write(tmp_path, {"cpu/online": "0-2", "cpu/cpu0/topology/thread_siblings_list": "0,3"})
    assert topology.from_sys(tmp_path) == [[[0], [1], [2]]]


def test_cpus_that_are_not_ours_are_left_out(monkeypatch):
    monkeypatch.setattr(topology, "from_hwloc", lambda: TWO_NODES)
    assert topology.read({0, 8, 9, 4}) == [[[0, 8], [9]], [[4]]]
    assert topology.read({12}) == [[[12]]]


@pytest.mark.parametrize(
    "rule, n, machine, expected",
    [
        ("none", 2, TWO_NODES, [None, None]),
        ("numa", 1, TWO_NODES, [set(range(16))]),
        ("numa", 2, TWO_NODES, [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]),
        ("numa", 4, TWO_NODES, [{0, 1, 2, 3, 8, 9, 10, 11}] * 2 + [{4, 5, 6, 7, 12, 13, 14, 15}] * 2),
        ("numa", 3, TWO_NODES, [{0, 1, 2, 3, 8, 9, 10, 11}] * 2 + [{4, 5, 6, 7, 12, 13, 14, 15}]),
        ("core", 4, TWO_NODES, [{0, 8, 1, 9}, {2, 10, 3, 11}, {4, 12, 5, 13}, {6, 14, 7, 15}]),
        ("core", 2, ONE_NODE, [{0}, {1, 2}]),
        ("core", 5, ONE_NODE, [{0}, {0}, {1}, {1}, {2}]),
        ("auto", 2, TWO_NODES, [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]),
        ("auto", 1, TWO_NODES, [None]),
        ("auto", 2, ONE_NODE, [None, None]),
        ("numa", 0, TWO_NODES, []),
    ],
)
def test_rules(rule, n, machine, expected):
    assert bind.plan(rule, n, machine) == expected


@pytest.mark.parametrize(
    "n, settings, expected",
    [
        # 8 cores for 2 ranks: 4 each, whole cores.
        (2, {}, [{0, 8, 1, 9, 2, 10, 3, 11}, {4, 12, 5, 13, 6, 14, 7, 15}]),
        # 8 cores for 3: 2, 2, and 4 for the last, which was BytePS's root.
        (3, {}, [{0, 8, 1, 9}, {2, 10, 3, 11}, {4, 12, 5, 13, 6, 14, 7, 15}]),
        # One rank is the root: what is left is 8 cores, but no node has more than 4.
        (1, {}, [{0, 8, 1, 9, 2, 10, 3, 11}]),
        (2, {"MULTITHREADED_CPU": "0"}, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (2, {"CPU_BLACKLIST": "0,8,15"}, [{1, 9, 2, 10, 3, 11}, {4, 12, 5, 13, 6, 14, 7}]),
        (2, {"NUMA_DEFAULT_QUOTA": "1"}, [{0, 8}, {4, 12, 5, 13, 6, 14, 7, 15}]),
        (2, {"NUMA_DEFAULT_QUOTA": "3", "NUMA_ROOT_QUOTA": "1"}, [{0, 8, 1, 9, 2, 10}, {3, 11}]),
        # More than there is: as many as there are.
        (2, {"NUMA_DEFAULT_QUOTA": "99"}, [{0, 8, 1, 9, 2, 10, 3, 11}, {4, 12, 5, 13, 6, 14, 7, 15}]),
        # 3 for each of two leave 1 on each node: the root, which should have 2, gets 1.
        (3, {"NUMA_DEFAULT_QUOTA": "3"}, [{0, 8, 1, 9}, {2, 10, 3, 11}, {4, 12, 5, 13, 6, 14, 7, 15}]),
        (3, {"VISIBLE_CPU_CORES": "1,4-5:20-22:7"}, [{1, 4, 5}, {20, 21, 22}, {7}]),
        # Nothing is left for ranks beyond the cores.
        (9, {}, [None] * 8 + [{0, 8, 1, 9, 2, 10, 3, 11}]),
    ],
)
def test_byteps_rules(monkeypatch, n, settings, expected):
    for name, value in settings.items():
        monkeypatch.setenv("BYTEPS_" + name, value)
    assert bind.plan("byteps", n, TWO_NODES) == expected


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("BYTEPS_VISIBLE_CPU_CORES", "0:1:2", "has 3 lists, but there are 2 ranks"),
        ("BYTEPS_VISIBLE_CPU_CORES", "0:x", "CPUs are listed as in 0,4-7"),
        ("BYTEPS_NUMA_DEFAULT_QUOTA", "many", "BYTEPS_NUMA_DEFAULT_QUOTA is 'many'"),
        ("BYTEPS_CPU_BLACKLIST", "a", "CPUs are listed"),
    ],
)
def test_settings_that_make_no_sense(monkeypatch, name, value, words):
    monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=words):
        bind.plan("byteps", 2, TWO_NODES)


def seen(done):
    return [line for line in sorted(done.stdout.splitlines())]


SHOW = "import os; print(sorted(os.sched_getaffinity(0)))"


def test_ranks_really_run_there(run_launch):
    import sys

    mine = sorted(os.sched_getaffinity(0))
    done = run_launch("-np", 2, "--bind", "core", sys.executable, "-c", SHOW, BPS_DAEMON=FAKE)
    plan = bind.plan("core", 2)
    assert seen(done) == [f"[{rank}] {sorted(cpus)}" for rank, cpus in enumerate(plan)], done.stderr
    assert set().union(*plan) <= set(mine)
    lists = f"{mine[-1]}:{mine[0]}"
    done = run_launch(
        "-np", 2, "--bind", "byteps", sys.executable, "-c", SHOW, BPS_DAEMON=FAKE, BYTEPS_VISIBLE_CPU_CORES=lists
    )
    assert seen(done) == [f"[0] [{mine[-1]}]", f"[1] [{mine[0]}]"]
    done = run_launch("-np", 1, sys.executable, "-c", SHOW, BPS_DAEMON=FAKE)
    assert seen(done) == [f"[0] {mine}"]


def test_cpus_that_are_not_there_are_named(run_launch):
    done = run_launch("--bind", "byteps", "true", BPS_DAEMON=FAKE, BYTEPS_VISIBLE_CPU_CORES="99999")
    assert done.returncode == 1
    assert "cannot start true on the cores [99999]" in done.stderr
