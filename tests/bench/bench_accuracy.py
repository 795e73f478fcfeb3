#!/usr/bin/env python3
"""The error of sums of bfloat16 over many ranks, against float64: bps into float32, bps, and a ring in bfloat16.

Nothing runs: sums are made as bps(7), VALUES says, which the tests compare with daemons' bit by bit, of eight ranks on each node. A ring
gives each part of a tensor from rank to rank, where each adds its own and rounds.
"""
from harness import *
import numpy as np
import reference as ref

A_NODE = 8


def ring(contributions):
    """What ranks get of an all-reduce by a ring: the i-th of as many parts as there are ranks begins behind rank i, and ends there."""
    n, parts = len(contributions), []
    wide = [np.array_split(ref.widen(ref.BFLOAT16, x), len(contributions)) for x in contributions]
    for part in range(n):
        total = wide[(part + 1) % n][part]
        for hop in range(2, n + 1):
            total = ref.widen(ref.BFLOAT16, ref.narrow(ref.BFLOAT16, total + wide[(part + hop) % n][part]))
        parts.append(total)
    return np.concatenate(parts)


def sums(contributions):
    """By name: the sum as float32."""
    wide = [ref.widen(ref.BFLOAT16, x) for x in contributions]
    layout = [min(A_NODE, len(wide) - at) for at in range(0, len(wide), A_NODE)]
    return {
        'bps, bfloat16 in and float32 out': ref.reduce(ref.FLOAT32, ref.SUM, wide, layout),
        'bps, bfloat16 in and out': ref.widen(ref.BFLOAT16, ref.reduce(ref.BFLOAT16, ref.SUM, contributions, layout)),
        'a ring in bfloat16': ring(contributions),
    }


def errors(contributions):
    """By name: the root mean square of the error, and the largest, both over that of the sum in float64."""
    exact = sum(ref.widen(ref.BFLOAT16, x).astype(np.float64) for x in contributions)
    size = np.sqrt(np.mean(exact ** 2))
    off = {name: np.abs(total - exact) for name, total in sums(contributions).items()}
    return {name: (np.sqrt(np.mean(x ** 2)) / size, x.max() / size) for name, x in off.items()}


def main():
    options, report = parse_arguments('accuracy', __doc__, elements=1 << 16)
    for n in (8, 64, 512):
        turns = []
        for turn in range(options.repeats):
            rng = np.random.default_rng((n, turn))
            given = [ref.narrow(ref.BFLOAT16, rng.standard_normal(options.elements, np.float32)) for _ in range(n)]
            turns.append(errors(given))
        report.heading(f'{n} ranks, sums of {options.elements} normal numbers each, millionths of their size')
        for name in turns[0]:
            report.row(f'{name}, root mean square', [1e6 * turn[name][0] for turn in turns], 'ppm', 3)
            report.row(f'{name}, largest', [1e6 * turn[name][1] for turn in turns], 'ppm', 3)
    report.close()


if __name__ == '__main__':
    main()
