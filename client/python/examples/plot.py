#!/usr/bin/env python3
"""Compares two logs of train_mnist.py: draws their curves, prints a table, and says whether they agree.

    python plot.py single.json distributed.json [--png curves.png]

They agree when the losses of every step differ by less than TOLERANCE, relative to the larger of the loss and 0.1, and the
test accuracies by at most 0.5 points. Equal they cannot be: a mean over four shares of a batch rounds otherwise than a
mean over the batch, and training amplifies the last bit from step to step. What a mistake would do is far larger:
a sum in place of an average, a lost or a stale gradient moves the loss by tenths within a few steps.
"""

import argparse
import json
import pathlib
import sys

TOLERANCE = 0.01
ACCURACY_TOLERANCE = 0.005


def difference(a, b):
    return abs(a - b) / max(abs(a), abs(b), 0.1)


def draw(single, distributed, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curve, bars) = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 1), layout="constrained")
    curve.plot(single["losses"], label="one process, whole batch", linewidth=3, alpha=0.4)
    curve.plot(distributed["losses"], label=f"bps, {distributed['size']} ranks", linewidth=1, color="black")
    curve.set(xlabel="step", ylabel="training loss", yscale="log", title="Loss of each batch")
    curve.legend()
    names = ["one process", f"{distributed['size']} ranks"]
    drawn = bars.bar(names, [100 * single["accuracy"], 100 * distributed["accuracy"]], color=["tab:blue", "black"])
    bars.bar_label(drawn, fmt="%.1f %%")
    bars.set(ylim=(0, 110), title="Test accuracy")
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("single")
    parser.add_argument("distributed")
    parser.add_argument("--png", help="picture to write")
    arguments = parser.parse_args()
    single, distributed = (json.loads(pathlib.Path(p).read_text()) for p in (arguments.single, arguments.distributed))

    n = len(single["losses"])
    if n == 0 or n != len(distributed["losses"]):
        sys.exit(f"plot.py: the logs have {n} and {len(distributed['losses'])} steps")
    if arguments.png:
        draw(single, distributed, arguments.png)
    print(f"{'step':>6} {'one process':>12} {str(distributed['size']) + ' ranks':>12} {'difference':>11}")
    shown = sorted({0, 1, n - 1} | set(range(0, n, max(1, n // 8))))
    for i in shown:
        a, b = single["losses"][i], distributed["losses"][i]
        print(f"{i:6} {a:12.6f} {b:12.6f} {difference(a, b):11.1e}")
    worst = max(range(n), key=lambda i: difference(single["losses"][i], distributed["losses"][i]))
    gap = difference(single["losses"][worst], distributed["losses"][worst])
    accuracy = abs(single["accuracy"] - distributed["accuracy"])
    print(f"accuracy {single['accuracy']:.1%} and {distributed['accuracy']:.1%}")
    agree = gap < TOLERANCE and accuracy <= ACCURACY_TOLERANCE
    print(
        f"{'agree' if agree else 'DISAGREE'}: largest difference of loss {gap:.1e} at step {worst} (limit {TOLERANCE:g}), "
        f"of accuracy {100 * accuracy:.1f} points (limit {100 * ACCURACY_TOLERANCE:g})"
    )
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
