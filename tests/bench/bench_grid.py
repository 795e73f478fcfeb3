#!/usr/bin/env python3
"""n nodes and k spare servers at a rate: time of a push_pull beside the optimum for the links, and beside Gloo.

The optimum is that of the OSDI'20 paper for the links' payload rate, which is measured in each turn. Gloo's ring on the same
n nodes is what a user would run without bps; its own bound is 2 (n - 1) / n of the bytes.
"""
from harness import *
from rivals import gloo

OF_GLOO = {4: 1.42, 5: 1.52, 8: 1.62}  # Gloo / bps with as many spare servers as nodes: about 0.95 of 2 (n - 1) / n


def measure(options, report, n, k, rate, prefix, rival):
    """One point of the grid: link, bps and rival in turns."""
    links, times, others = [], [], []
    # With as many spare servers as nodes the optimum leaves nothing for the nodes themselves to sum.
    with Cluster(n, k, colocated=k < n, netns=prefix) as cluster:
        turns = [lambda: links.append(link_bytes_s(prefix)), lambda: times.append(op_ms(cluster, (1,) * n, options.bytes))]
        if rival:
            turns.append(lambda: others.append(rival.ms(options.bytes, 1, 1)))
        in_turns(options.repeats, *turns)
    report.heading(f'{n} nodes + {k} spare servers at {rate}, {options.bytes >> 20} MiB of float32')
    report.row('a link', [x / 1e6 for x in links], 'MB/s', 1)
    report.row('bps', times, 'ms', 1)
    report.row('lower bound: the optimum', [1e3 * optimum_s(n, k, options.bytes, x) for x in links], 'ms', 1)
    target = 98.5 if not k else 95 if n <= 4 else 93
    shares = [1e5 * optimum_s(n, k, options.bytes, x) / t for x, t in zip(links, times)]
    report.against('bps: share of the optimum', shares, target, bound=100, unit='%', digits=1)
    if others:
        report.row('Gloo', others, 'ms', 1)
        rings = [1e3 * optimum_s(n, 0, options.bytes, x) for x in links]
        report.row('Gloo: share of the bound of a ring', [100 * r / t for r, t in zip(rings, others)], '%', 1)
        ratios, possible = [g / t for g, t in zip(others, times)], optimum_s(n, 0, 1, 1) / optimum_s(n, k, 1, 1)
        if k == n and n in OF_GLOO:
            report.against('Gloo / bps', ratios, OF_GLOO[n], bound=possible)
        else:
            report.row('Gloo / bps', ratios, 'times', bound=possible)


def main():
    options, report = parse_arguments('grid', __doc__, nodes='4,5,8', rates='500mbit,1gbit', bytes=64 * MIB, rivals=1)
    for n in map(int, options.nodes.split(',')):
        for rate in options.rates.split(','):
            with shaped(2 * n, rate) as prefix, contextlib.ExitStack() as stack:
                rival = gloo(prefix, n) if options.rivals else None
                if rival:
                    stack.enter_context(rival)
                for k in (0, n // 2, n):
                    measure(options, report, n, k, rate, prefix, rival)
    report.close()


main()
