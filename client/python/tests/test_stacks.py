"""Each program of examples/stacks has the losses over bps that it has over gloo, bit for bit."""

import re
import sys

import pytest
from conftest import PYTHON, needs_build

for package in ("accelerate", "lightning", "torch", "transformers"):
    pytest.importorskip(package)
pytestmark = needs_build
PRELOADED = ("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")
STACKS = PYTHON / "examples" / "stacks"


@pytest.mark.parametrize(
    "script, n",
    [
        ("fsdp2.py", 2),
        ("hsdp.py", 4),
        ("two_d.py", 4),
        ("accelerated.py", 2),
        ("trainer.py", 2),
        ("lightning_ddp.py", 2),
    ],
)
def test_stack(run_launch, script, n):
    def losses(*backend):
        done = run_launch("-np", n, sys.executable, STACKS / script, *backend, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return [re.findall(rf"^\[{rank}\] loss (\S+)", done.stdout, re.M) for rank in range(n)]

    ours = losses()
    assert len(ours[0]) == len(set(ours[0])) == 10  # each step is of another model
    assert ours == losses("gloo")


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
