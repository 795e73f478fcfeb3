#!/usr/bin/env python3
"""Compares logs of train_mnist.py: draws their curves, prints a table, and says whether they agree.

    python plot.py single.json distributed.json ... [--png curves.png]

The first log is what the others are held against. They agree with it when the losses of every step differ by less than
TOLERANCE, relative to the larger of the loss and 0.1, and the test accuracies by at most 0.5 points. Equal they cannot be:
a mean over the shares of a batch rounds otherwise than a mean over the batch, and training amplifies the last bit from
step to step (to some 1e-5 in 300 steps here). What a mistake does is far larger: a sum in place of an average, a lost or a
stale gradient moves the loss by a tenth within a few steps. With --compression of train_mnist.py, give a wider --tolerance.
"""

import argparse
import json
import pathlib
import sys

TOLERANCE = 0.001
ACCURACY_TOLERANCE = 0.005


def read(path):
    log = json.loads(pathlib.Path(path).read_text())
    log["label"] = f"{pathlib.Path(path).stem} ({log['size']} rank{'s' if log['size'] > 1 else ''})"
    return log


def difference(a, b):
    return abs(a - b) / max(abs(a), abs(b), 0.1)


def draw(logs, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curve, bars) = pyplot.subplots(1, 2, figsize=(12, 4), width_ratios=(3, 1), layout="constrained")
    for i, log in enumerate(logs):  # the later the thinner, so that curves that coincide are all seen
        curve.plot(log["losses"], label=log["label"], linewidth=1 + 3 * (len(logs) - 1 - i) / max(1, len(logs) - 1))
    curve.set(xlabel="step", ylabel="training loss", yscale="log", title="Loss of each batch")
    curve.legend()
    drawn = bars.barh([log["label"] for log in logs], [100 * log["accuracy"] for log in logs])
    for bar, i in zip(drawn, range(len(logs))):
        bar.set_color(f"C{i}")
    bars.bar_label(drawn, fmt="%.1f %%", label_type="center", color="white")
    bars.invert_yaxis()
    bars.set(xlim=(0, 100), title="Test accuracy")
    figure.savefig(path, dpi=120)


def print_table(logs):
    width = max(12, *(len(log["label"]) for log in logs)) + 2
    print(f"{'step':>8}" + "".join(f"{log['label']:>{width}}" for log in logs))
    n = len(logs[0]["losses"])
    for i in sorted({0, 1, n - 1} | set(range(0, n, max(1, n // 8)))):
        print(f"{i:8}" + "".join(f"{log['losses'][i]:{width}.6f}" for log in logs))
    print(f"{'accuracy':>8}" + "".join(f"{log['accuracy']:{width}.1%}" for log in logs))
    print(f"{'seconds':>8}" + "".join(f"{log['seconds']:{width}.1f}" for log in logs))


def compare(first, other, tolerance):
    """Prints one line; whether they agree."""
    pairs = list(zip(first["losses"], other["losses"]))
    worst = max(range(len(pairs)), key=lambda i: difference(*pairs[i]))
    gap = difference(*pairs[worst])
    accuracy = abs(first["accuracy"] - other["accuracy"])
    agree = gap < tolerance and accuracy <= ACCURACY_TOLERANCE
    print(
        f"{'agree' if agree else 'DISAGREE'}: {first['label']} and {other['label']}: largest difference of loss {gap:.1e} "
        f"at step {worst} (limit {tolerance:g}), of accuracy {100 * accuracy:.1f} points (limit {100 * ACCURACY_TOLERANCE:g})"
    )
    return agree


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("single", help="log of one process")
    parser.add_argument("distributed", nargs="+", help="logs to hold against it")
    parser.add_argument("--png", help="picture to write")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help=f"default: {TOLERANCE:g}")
    arguments = parser.parse_args()
    logs = [read(path) for path in (arguments.single, *arguments.distributed)]
    steps = [len(log["losses"]) for log in logs]
    if not steps[0] or len(set(steps)) > 1:
        sys.exit(f"plot.py: the logs have {', '.join(map(str, steps))} steps")
    if arguments.png:
        draw(logs, arguments.png)
    print_table(logs)
    results = [compare(logs[0], log, arguments.tolerance) for log in logs[1:]]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
