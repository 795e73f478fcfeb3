"""The part of a run on one machine, in this process."""

import os
import signal
import sys
import time

import pytest

from bps._launch import loop, machine


class Run:
    """A machine, and what it has told."""

    def __init__(self):
        self.loop = loop.Loop()
        self.machine = machine.Machine(self.loop, self.emit)
        self.output = b""
        self.kinds = []

    def emit(self, kind, data=b"", /, **fields):
        self.output += data
        self.kinds.append(kind)

    def until(self, kind):
        deadline = time.monotonic() + 60
        while kind not in self.kinds:
            assert time.monotonic() < deadline, self.kinds
            self.loop.turn(time.monotonic() + 0.1)
            self.machine.reap()

    def start(self, *command):
        self.machine.start_ranks([[0, {}]], command, {})


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(machine, "DRAIN_S", 0.2)
    run = Run()
    yield run
    run.machine.finish()


def test_what_waits_in_a_paused_pipe_is_not_lost(run):
    run.machine.pause(True)
    run.start(sys.executable, "-c", "print('x' * 50000)")
    run.until("idle")
    assert run.output == b"x" * 50000 + b"\n"
    assert run.kinds[-1] == "idle"


def test_an_endless_writer_in_the_background_does_not_hold_the_run(run):
    run.start("sh", "-c", "sh -c 'echo $$; exec yes' & exec sleep 0.1")
    run.until("idle")
    group = int(run.output.split()[0])

    try:
        os.kill(group, signal.SIGKILL)
    except ProcessLookupError:
        pass  # ended by SIGPIPE


def test_who_begins_a_line_and_waits_is_told_of(run):
    """But not for as long as more comes of it, up to a moment."""
    run.start(sys.executable, "-c", "import time; print('go on? ', end='', flush=True); time.sleep(1000)")
    run.until("quiet")
    assert run.output == b"go on? " and run.kinds[-1] == "quiet"
    quiet, told = machine.Quiet(run.machine, 0, 1), run.kinds.count("quiet")
    quiet.heard(b"begin")
    for _ in range(machine.QUIET_MAX):
        assert run.kinds.count("quiet") == told
        quiet.heard(b".")
        quiet._over()
    assert run.kinds.count("quiet") == told + 1
    quiet.heard(b"end\n")
    quiet._over()
    quiet.heard(b"begin")
    run.machine.paused = True
    quiet._over()
    assert run.kinds.count("quiet") == told + 1
    run.machine.paused = False
    run.machine.ranks[0].kill()


def test_stop_kills_what_does_not_end(run):
    run.start("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done")
    while b"ready" not in run.output:
        run.loop.turn(time.monotonic() + 0.1)
    run.machine.grace = 0.2
    run.machine.stop()
    run.until("idle")
    assert run.kinds.count("ended") == 1


def test_sigterm_is_for_a_rank_and_what_it_has_left_is_told_then(run):
    """A DataLoader's workers are needed until the rank has ended; the program behind a shell would never hear of it."""
    child = "trap 'echo child told; exit' TERM; echo child; while :; do sleep 0.05; done"
    run.start("sh", "-c", f'sh -c "{child}" & trap "sleep 0.5; echo saved; exit 0" TERM; echo rank; while :; do sleep 0.05; done')
    while b"child" not in run.output or b"rank" not in run.output:
        run.loop.turn(time.monotonic() + 0.1)
    run.output = b""
    run.machine.signal(signal.SIGTERM)
    run.until("idle")
    assert run.output.startswith(b"saved\n") and b"child told\n" in run.output


def test_a_signal_that_ends_a_shell_is_told_to_its_program(run):
    run.start("sh", "-c", "sh -c \"trap 'echo told; exit' USR1; echo child; while :; do sleep 0.05; done\"; :")
    while b"child" not in run.output:
        run.loop.turn(time.monotonic() + 0.1)
    run.output = b""
    run.machine.signal(signal.SIGUSR1)
    run.until("idle")
    assert b"told\n" in run.output


def test_what_does_not_end_when_its_rank_has_is_killed(run):
    """By SIGTERM, which was for the rank to be saved by: nobody says stop()."""
    child = "trap '' TERM; echo child; while :; do sleep 0.05; done"
    run.machine.start_ranks([[0, {}]], ["sh", "-c", f'sh -c "{child}" & trap "exit 0" TERM; while :; do sleep 0.05; done'], {}, grace=0.3)
    while b"child" not in run.output:
        run.loop.turn(time.monotonic() + 0.1)
    run.machine.signal(signal.SIGTERM)
    run.until("idle")
    assert not run.machine.left


def test_who_has_heard_a_signal_and_ended_later_leaves_what_it_likes(run):
    run.start("sh", "-c", "trap 'exec 1>&-; exit 0' USR1; sleep 1000 >/dev/null 2>&1 & echo $!; while :; do sleep 0.05; done")
    while b"\n" not in run.output:
        run.loop.turn(time.monotonic() + 0.1)
    run.machine.signal(signal.SIGUSR1)
    run.until("idle")
    os.kill(int(run.output.split()[0]), signal.SIGKILL)  # it was there


def test_ctrl_c_is_for_all_of_a_rank(run):
    child = "trap 'echo child told; exit' INT; echo child; while :; do sleep 0.05; done"
    parent = f"import signal, subprocess; signal.signal(2, lambda *_: 0); subprocess.call({child!r}, shell=True); print('end')"
    run.start(sys.executable, "-c", parent)
    while b"child" not in run.output:
        run.loop.turn(time.monotonic() + 0.1)
    run.output = b""
    run.machine.signal(signal.SIGINT)
    run.until("idle")
    assert run.output == b"child told\nend\n"
