"""The trainers in C that come with the source."""

import re

import pytest
from conftest import BUILD, TOP, needs_build

pytestmark = needs_build
DATA = TOP / "client/examples/iris.csv"


def program(name):
    return str(BUILD / f"client/examples/bps-example-{name}")


def reference():
    """The same training in float64: the loss of every 200th step, and how many are right at the end."""
    numpy = pytest.importorskip("numpy")
    rows = numpy.loadtxt(DATA, delimiter=",")
    x = numpy.hstack([rows[:, :4] / 8, numpy.ones((len(rows), 1))])
    classes = rows[:, 4].astype(int)
    wanted, weight, losses = numpy.eye(3)[classes], numpy.zeros((3, 5)), []

    def forward():
        z = numpy.exp(x @ weight.T)
        return z / z.sum(1, keepdims=True)

    for step in range(1000):
        p = forward()
        losses.append(-numpy.log(p[numpy.arange(len(x)), classes]).mean())
        weight -= 3 * (p - wanted).T @ x / len(x)
    return losses[199::200], int((forward().argmax(1) == classes).sum())


@pytest.mark.parametrize("n", [1, 3])
def test_train(run_launch, n):
    done = run_launch("-np", n, program("train"), DATA)
    assert done.returncode == 0, done.stderr
    losses, right = reference()
    printed = [float(loss) for loss in re.findall(r"^\[0\] step \d+: loss ([\d.]+)$", done.stdout, re.M)]
    assert printed == pytest.approx(losses, abs=2e-3)
    found = re.findall(rf"^\[(\d)\] rank (\d) of {n}: (\d+) of 150 are right$", done.stdout, re.M)
    assert sorted(found) == [(str(r), str(r), found[0][2]) for r in range(n)]
    assert right >= 144 and abs(int(found[0][2]) - right) <= 1


def test_train_on_what_is_no_data(run_launch):
    done = run_launch(program("train"), TOP / "NEWS")
    assert done.returncode == 1 and "NEWS, line 1: not x,x,x,x,class" in done.stderr
    assert run_launch(program("train")).returncode == 2


def test_overlap(run_launch):
    done = run_launch("-np", 2, program("overlap"))
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"a step takes [\d.]+ ms one by one, [\d.]+ ms overlapped", done.stdout)) == 2
