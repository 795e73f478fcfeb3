"""Arrays, in several ranks, through one daemon."""

import pytest
from conftest import needs_build

pytest.importorskip("numpy")
pytestmark = needs_build


def test_operations(run_ranks):
    run_ranks("numpy_ops.py", 3)


def test_operations_through_a_server_in_small_parts(run_ranks):
    options = ("--daemon-option", "part_size=8K")
    run_ranks("numpy_ops.py", 2, options=options, BPS_FORCE_DISTRIBUTED=1, BPS_PART_BYTES="8K")


def test_ranks_that_join(run_ranks):
    run_ranks("joining.py", 4)


def test_ranks_that_join_through_a_server(run_ranks):
    run_ranks("joining.py", 3, BPS_FORCE_DISTRIBUTED=1)


def test_names_of_horovod_and_byteps(run_ranks):
    run_ranks("horovod_names.py", 2)


def test_names_without_end(run_ranks):
    run_ranks("numpy_names.py", 3, options=("--daemon-option", "max_tensors=256"))
