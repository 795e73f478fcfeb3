"""What goes wrong, each in ranks of its own."""

import re
import sys

import pytest
from conftest import RANKS, needs_build

pytestmark = needs_build

WELL = [
    "a_rank_leaves",
    "a_rank_does_not_come",
    "a_rank_does_not_join",
    "an_impatient_wait",
    "a_canceled_request",
    "ctrl_c_in_a_wait",
    "ctrl_c_in_init",
    "others_run_meanwhile",
    "several_threads",
    "a_fork",
    "a_dead_daemon",
    "finalizers_wait_for_no_lock",
    "shutdown_in_a_signal_handler",
    "no_more_threads",
    "shutdown_and_init_again",
    "shutdown_under_a_wait",
    "exit_with_requests_under_way",
]


@pytest.mark.parametrize("trouble", WELL)
def test_trouble(run_ranks, trouble):
    run_ranks("trouble.py", 2, trouble)


def test_operations_differ(run_ranks):
    run_ranks("mismatch.py", 4)


def test_operations_differ_through_a_server(run_ranks):
    checks = "check_sizes", "check_shapes", "check_shapes_of_names", "check_operations", "check_the_order"
    names = "check_names_differ", "check_the_order_of_calls_with_names", "check_what_is_under_way"
    run_ranks("mismatch.py", 4, *checks, *names, BPS_FORCE_DISTRIBUTED=1)


def test_a_rank_is_killed(run_launch):
    done = run_launch("-np", 3, sys.executable, RANKS / "trouble.py", "a_rank_is_killed")
    assert done.returncode == 137, done.stderr
    assert re.fullmatch(r"rank 1 \(pid \d+\) was killed by signal 9 \(SIGKILL\)", done.stderr.splitlines()[-1])


def test_the_status_of_the_rank_that_left_is_the_jobs(run_launch):
    done = run_launch("-np", 3, sys.executable, RANKS / "trouble.py", "an_exit_after_shutdown")
    assert done.returncode == 3, done.stderr
    assert re.fullmatch(r"rank 1 \(pid \d+\) exited with status 3", done.stderr.splitlines()[-1])


def test_others_are_told_of_an_exception(run_launch):
    done = run_launch("-np", 3, sys.executable, RANKS / "trouble.py", "an_exception_is_told")
    assert done.returncode == 1
    told = [line for line in done.stdout.splitlines() if line.endswith("] told")]
    assert sorted(told) == ["[0] told", "[2] told"], done.stdout + done.stderr


def test_an_exception_ends_the_job(run_launch):
    done = run_launch("-np", 2, sys.executable, RANKS / "trouble.py", "an_exception")
    assert done.returncode == 1
    assert "[1] RuntimeError: out of ideas" in done.stderr
