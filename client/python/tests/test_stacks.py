"""Each program of examples/stacks has the losses over bps that it has over gloo, bit for bit."""

import re
import subprocess
import sys

import pytest
from conftest import PYTHON, clean_environment, needs_build

for package in ("accelerate", "deepspeed", "lightning", "ray", "torch", "torchft", "transformers"):
    pytest.importorskip(package)
pytestmark = needs_build
PRELOADED = ("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")
STACKS = PYTHON / "examples" / "stacks"


@pytest.mark.parametrize(
    "script, n, steps",
    [
        ("fsdp2.py", 2, 10),
        ("hsdp.py", 4, 10),
        ("two_d.py", 4, 10),
        ("accelerated.py", 2, 10),
        ("trainer.py", 2, 10),
        ("deepspeed_zero.py", 2, 30),  # of three stages
        ("ray_train.py", 1, 10),  # which starts two workers
    ],
)
def test_stack(run_launch, script, n, steps):
    def losses(*backend):
        done = run_launch("-np", n, sys.executable, STACKS / script, *backend, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return [re.findall(rf"^\[{rank}\] loss (\S+)", done.stdout, re.M) for rank in range(n)]

    ours = losses()
    assert len(ours[0]) == len(set(ours[0])) == steps  # each step is of another model
    assert ours == losses("gloo")


def test_lightning(run_launch):
    """Its strategies have the same losses, whoever starts the processes."""

    def losses(*arguments, launches):
        program = [sys.executable, STACKS / "lightning_fit.py", *arguments]
        if launches:
            done = run_launch("-np", 2, *program, timeout=300)
        else:
            environment = clean_environment(BPS_START_DAEMON=1)
            done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return [re.findall(rf"\[{rank}\] loss (\S+)", done.stdout) for rank in range(2)]

    expected = losses("gloo", launches=True)
    assert len(expected[0]) == len(set(expected[0])) == 10  # each step is of another model
    for strategy, launches in [("ddp", True), ("fsdp2", True), ("ddp", False), ("ddp_spawn", False), ("fsdp2", False)]:
        assert losses("bps", strategy, launches=launches) == expected, (strategy, launches)


def test_replicas_that_leave_and_come(run_launch):
    """How many steps one takes alone is torchft's to say: so is what the model comes to, which is the same on both."""
    done = run_launch("-np", 2, sys.executable, STACKS / "torchft_ddp.py", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    ends = re.findall(r"in the end (\S+)", done.stdout)
    assert len(ends) == 2 and len(set(ends)) == 1
    for rank in range(2):
        assert len(re.findall(rf"^\[{rank}\] loss \S+, a step of 2", done.stdout, re.M)) >= 8
    assert re.search(r"^\[0\] loss \S+, a step of 1", done.stdout, re.M)


def test_ranks_that_begin_again(run_launch, tmp_path):
    """As if no rank had failed. gloo's ranks do not find each other again after that, so over gloo none fails."""
    program = (sys.executable, STACKS / "restarted.py")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", 1)

    def losses(*arguments, **environment):
        done = run_launch(*arguments, timeout=300, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("rank 1 fails" in done.stderr) == (not environment)
        return sorted(re.findall(r"loss (\S+)", done.stdout))

    ours = losses("-np", 1, "--", program[0], *torchrun, program[1], tmp_path / "bps")
    assert len(ours) == len(set(ours)) == 20
    assert ours == losses("-np", 2, *program, tmp_path / "gloo", "gloo", TORCHELASTIC_RESTART_COUNT=1)
