"""torch.distributed over bps, in several ranks. A rank takes seconds to import PyTorch, so each spawn makes many checks."""

import pytest
from conftest import needs_build

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
