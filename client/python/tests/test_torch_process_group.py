"""torch.distributed over bps, in several ranks. A rank takes seconds to import PyTorch, so each spawn makes many checks."""

import sys

import pytest
from conftest import RANKS, needs_build

pytest.importorskip("torch")
pytestmark = needs_build


@pytest.fixture
def run_group(run_ranks, tmp_path):
    """As run_ranks, with a file of their own through which the ranks of a group find each other."""

    def run(script, n, *arguments, **more):
        return run_ranks(script, n, tmp_path / f"store-{n}", *arguments, **more)

    return run


@pytest.mark.parametrize("n", [1, 4])
def test_operations(run_group, n):
    run_group("process_group_ops.py", n)


def test_operations_through_a_server(run_group):
    checks = ("all_reduce", "moves", "uneven", "reduce", "reduce_scatter", "all_to_all", "messages", "many_at_once")
    run_group("process_group_ops.py", 3, *(f"check_{name}" for name in checks), BPS_FORCE_DISTRIBUTED=1)


@pytest.mark.parametrize("n", [2, 4])
def test_training(run_group, n):
    run_group("process_group_train.py", n)


def test_training_through_a_server(run_group):
    run_group("process_group_train.py", 2, "check_ddp", "check_fsdp2", BPS_FORCE_DISTRIBUTED=1)


TROUBLES = [
    "ranks_disagree_about_the_size",
    "ranks_disagree_about_the_call",
    "a_rank_does_not_call",
    "a_wait_of_its_own_length",
    "a_rank_does_not_come",
    "a_rank_has_no_daemon",
    "a_peer_is_gone",
    "destroyed_under_way",
    "a_fork",
    "ctrl_c",
    "exit_with_calls_under_way",
]


def test_troubles(run_group):
    run_group("process_group_trouble.py", 2, *TROUBLES)


def test_a_rank_is_killed(run_launch, tmp_path):
    arguments = (RANKS / "process_group_trouble.py", tmp_path / "store", "a_rank_is_killed")
    done = run_launch("-np", 3, sys.executable, *arguments)
    assert done.returncode == 137 and "AssertionError" not in done.stderr, done.stderr


def test_an_exception(run_launch, tmp_path):
    arguments = (RANKS / "process_group_trouble.py", tmp_path / "store", "an_exception")
    done = run_launch("-np", 2, sys.executable, *arguments)
    assert done.returncode == 1 and "RuntimeError: out of ideas" in done.stderr
    assert "AssertionError" not in done.stderr, done.stderr
