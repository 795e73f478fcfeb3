"""What a run that was killed has left is gone after the next; what a living one has is not."""
import os
import pathlib
import select
import signal
import subprocess
import sys

import pytest

from tests.driver import leftovers

# A run with a file, memory, a process that outlives it, and, of root, a network namespace; which says so and waits.
RUN = """
import os, pathlib, signal, subprocess, sys
from tests.driver import leftovers
leftovers.PLACES[:] = sys.argv[1:]
with leftovers.run_folder() as folder:
    memory = pathlib.Path(leftovers.PLACES[1], pathlib.Path(folder).name)
    (memory / 'x').write_text('x')
    pathlib.Path(folder, 'y').write_text('y')
    if os.geteuid() == 0:
        subprocess.run(['scripts/netns', 'up', '1'], env={**os.environ, 'BPS_NETNS': f't{os.getpid()}x'}, check=True)
    child = subprocess.Popen(['sleep', '1000'], start_new_session=True)
    while not pathlib.Path(f'/proc/{child.pid}/environ').read_bytes():  # its exec() is not over, and nobody knows whose it is
        os.sched_yield()
    print(folder, child.pid, flush=True)
    signal.pause()
"""


@pytest.fixture
def places(tmp_path, monkeypatch):
    found = [str(tmp_path / 'disk'), str(tmp_path / 'memory')]
    for place in found:
        os.mkdir(place)
    monkeypatch.setattr(leftovers, 'PLACES', found)
    return found


def start(places):
    run = subprocess.Popen([sys.executable, '-c', RUN, *places], stdout=subprocess.PIPE, text=True, cwd=leftovers.TOP)
    folder, pid = run.stdout.readline().split()
    return run, pathlib.Path(folder), int(pid)


def is_there(pid):
    try:
        return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] not in 'ZX'
    except FileNotFoundError:
        return False


def namespaces(run):
    if os.geteuid():
        return []
    listed = subprocess.run(['ip', 'netns', 'list'], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f't{run.pid}x')]


def test_a_living_run_is_left_alone_and_a_dead_one_swept(places, capsys):
    run, folder, pid = start(places)
    process = os.pidfd_open(pid)
    try:
        leftovers.sweep()
        assert (folder / 'y').exists() and is_there(pid) and (namespaces(run) or os.geteuid()) and not capsys.readouterr().out
        run.kill()
        run.wait()
        assert is_there(pid)
        leftovers.sweep()
        assert str(folder) in capsys.readouterr().out
        assert [os.listdir(place) for place in places] == [[], []] and not namespaces(run)
        assert select.select([process], [], [], 60)[0], f'process {pid} of the dead run has not been killed'
    finally:
        os.close(process)
        run.kill()
        run.wait()
        run.stdout.close()
        if is_there(pid):
            os.kill(pid, signal.SIGKILL)
        if namespaces(run):
            subprocess.run(['scripts/netns', 'down'], cwd=leftovers.TOP, env={**os.environ, 'BPS_NETNS': f't{run.pid}x'}, check=True)


def test_a_run_leaves_nothing(places):
    with leftovers.run_folder() as folder:
        assert os.environ['TMPDIR'] == folder and os.listdir(places[0]) == os.listdir(places[1])
    assert [os.listdir(place) for place in places] == [[], []]
