"""Ranks that something else than bpslaunch has started: by hand, torchrun, mpirun, multiprocessing; and daemons that ranks
start for themselves.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import RANKS, clean_environment, needs_build
from test_launch import is_gone

SCRIPT = str(RANKS / "start_daemon.py")
pytestmark = needs_build


def environment(tmp_path, **more):
    found = clean_environment(XDG_RUNTIME_DIR=tmp_path, TMPDIR=tmp_path, **more)
    del found["BPS_SOCKET"]
    return found


def gone(tmp_path):
    """Whether the ranks' folder goes, within a few seconds."""
    deadline = time.monotonic() + 120
    while list(tmp_path.glob("bps-*")) and time.monotonic() < deadline:
        time.sleep(0.01)  # the keeper tells nobody
    return not list(tmp_path.glob("bps-*"))


def start_ranks(tmp_path, size, job="j", **more):
    return [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), str(size), job],
            env=environment(tmp_path, **more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def outputs(processes):
    done = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return done


def test_ranks_start_one_daemon_among_them(tmp_path):
    assert outputs(start_ranks(tmp_path, 4)) == [f"rank {r} of 4 local {r} 4\n" for r in range(4)]
    assert gone(tmp_path)


def test_jobs_that_follow_one_another_do_not_trip(tmp_path):
    """The next ranks come while the keeper of those before clears up."""
    for _ in range(4):
        assert len(outputs(start_ranks(tmp_path, 2))) == 2
    assert gone(tmp_path)


def daemons(tmp_path):
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.startswith(str(tmp_path).encode()) for word in line):
            found.append(int(path.parent.name))
    return found


def test_daemon_ends_with_ranks_that_are_killed(tmp_path):
    ranks = start_ranks(tmp_path, 2, BPS_TEST_WAIT="1")
    for rank in ranks:
        assert rank.stdout.readline().startswith("rank")
        assert rank.stdout.readline().startswith("pid")
    alive = daemons(tmp_path)
    assert len(alive) == 3  # the keeper, its daemon, and the porter of that
    ranks[0].kill()
    assert ranks[1].poll() is None and len(daemons(tmp_path)) == 3
    ranks[1].kill()
    for rank in ranks:
        rank.communicate()
    assert all(is_gone(pid) for pid in alive) and gone(tmp_path)


def test_what_a_killed_keeper_left_is_no_hindrance(tmp_path):
    ranks = start_ranks(tmp_path, 1, BPS_TEST_WAIT="1")
    ranks[0].stdout.readline(), ranks[0].stdout.readline()
    alive = daemons(tmp_path)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):  # the porter ends with its daemon
            os.kill(pid, signal.SIGKILL)
    assert all(is_gone(pid) for pid in alive)
    ranks[0].kill()
    ranks[0].communicate()
    assert list(tmp_path.glob("bps-*"))
    assert len(outputs(start_ranks(tmp_path, 2))) == 2
    assert gone(tmp_path)


def test_next_daemon_takes_the_place_of_one_that_died(tmp_path, run_launch):
    script = RANKS / "daemon_dies.py"
    done = run_launch("-np", 2, sys.executable, script)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] done", "[1] done"]), done.stderr
    assert (
        "bps-daemon was killed by signal 9 (SIGKILL) while ranks were running: another takes its place" in done.stderr
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), "2"],
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert outputs(ranks) == ["done\n", "done\n"]
    assert gone(tmp_path)


def run(tmp_path, *arguments, **more):
    return subprocess.run(
        arguments,
        env=environment(tmp_path, **more),
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def test_one_process_by_the_environment(tmp_path):
    done = run(tmp_path, sys.executable, SCRIPT, BPS_START_DAEMON="1")
    assert (done.returncode, done.stdout) == (0, "rank 0 of 1 local 0 1\n"), done.stderr
    assert gone(tmp_path)


def test_a_folder_of_another_is_refused(tmp_path):
    (tmp_path / f"bps-{os.getuid()}-j").mkdir(mode=0o777)
    (tmp_path / f"bps-{os.getuid()}-j").chmod(0o777)
    done = run(tmp_path, sys.executable, SCRIPT, "0", "1", "j")
    assert done.returncode == 1 and "is not a folder of this user alone" in done.stderr


@pytest.mark.parametrize(
    "more, words",
    [
        ({}, "no bps-daemon listens at"),
        ({}, "start the ranks by bpslaunch, or start one: systemctl start bps-daemon.socket"),
        ({"BPS_START_DAEMON": "yes"}, 'BPS_START_DAEMON is "yes": 1 starts a daemon'),
        (
            {"BPS_START_DAEMON": "1", "BPS_RANK": "0", "BPS_SIZE": "4", "BPS_NODES": "2"},
            "serves one machine; these are 2",
        ),
        ({"BPS_START_DAEMON": "1", "BPS_DAEMON": "/bin/false"}, "exited with status 1 before it was ready"),
        ({"BPS_START_DAEMON": "1", "BPS_DAEMON": "/no/such"}, "cannot start /no/such"),
    ],
)
def test_one_line_says_what_is_wrong(tmp_path, more, words):
    code = "import bps; bps.init(connect_timeout=0)"
    done = run(tmp_path, sys.executable, "-c", code, **more)
    assert done.returncode == 1 and words in done.stderr.splitlines()[-1], done.stderr
    assert gone(tmp_path)


def test_arguments_count_over_a_launcher_around(tmp_path):
    """As under multiprocessing's spawn in a process that mpirun, srun or a PyTorchJob has started."""
    around = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_ID": "0", "RANK": "nonsense"}
    assert outputs(start_ranks(tmp_path, 2, **around)) == [f"rank {r} of 2 local {r} 2\n" for r in range(2)]


def test_multiprocessing_spawn(tmp_path):
    program = tmp_path / "spawn.py"
    program.write_text(
        "import multiprocessing, bps\n"
        "def rank(i, n):\n"
        "    bps.init(rank=i, size=n, start_daemon=True)\n"
        "    x = bytearray(8); x[0] = 1\n"
        "    assert bps.push_pull(x, average=False)[0] == n\n"
        "if __name__ == '__main__':\n"
        "    processes = [multiprocessing.get_context('spawn').Process(target=rank, args=(i, 3)) for i in range(3)]\n"
        "    [p.start() for p in processes]; [p.join() for p in processes]\n"
        "    print([p.exitcode for p in processes])\n"
    )
    done = run(tmp_path, sys.executable, program)
    assert done.stdout == "[0, 0, 0]\n", done.stderr
    assert gone(tmp_path)


def test_torch_multiprocessing_spawn(tmp_path):
    pytest.importorskip("torch")
    program = tmp_path / "spawn.py"
    program.write_text(
        "import torch, torch.multiprocessing, bps.torch as bps\n"
        "def rank(i, n):\n"
        "    bps.init(rank=i, size=n, job='spawn', start_daemon=True)\n"
        "    assert bps.push_pull(torch.tensor([1.0 + i]), average=False, name='x').item() == 3\n"
        "if __name__ == '__main__':\n"
        "    torch.multiprocessing.spawn(rank, args=(2,), nprocs=2)\n"
        "    print('well')\n"
    )
    done = run(tmp_path, sys.executable, program)
    assert done.stdout == "well\n", done.stderr
    assert gone(tmp_path)


@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun")
def test_mpirun(tmp_path):
    more = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "BPS_START_DAEMON": "1"}
    done = run(tmp_path, "mpirun", "--oversubscribe", "-np", "3", sys.executable, SCRIPT, **more)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {r} of 3 local {r} 3" for r in range(3)]
    assert gone(tmp_path)


def test_torchrun(tmp_path):
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT]
    done = run(tmp_path, *command, BPS_START_DAEMON="1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {r} of 2 local {r} 2" for r in range(2)]
    assert gone(tmp_path)
