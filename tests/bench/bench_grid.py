#!/usr/bin/env python3
"""n nodes and k spare servers at a rate: time of a push_pull beside the optimum for the links, and beside Gloo.

The optimum is that of the OSDI'20 paper for the links' payload rate, which is measured in each turn. Gloo's ring on the same
n nodes is what a user would run without bps; its own bound is 2 (n - 1) / n of the bytes.
"""
from harness import *


def measure(options, report, n, k, rate, prefix, rival):
    """One point of the grid: link, bps and rival in turns."""
    links, times, others = [], [], []
    # With as many spare servers as nodes the optimum leaves nothing for the nodes themselves to sum.
    with Cluster(n, k, colocated=k < n, netns=prefix) as cluster:
        for _ in range(options.repeats):
            links.append(link_bytes_s(prefix))
            times.append(op_ms(cluster, (1,) * n, options.bytes))
            if rival:
                others.append(rival.ms(options.bytes))
    report.heading(f'{n} nodes + {k} spare servers at {rate}, {options.bytes >> 20} MiB of float32')
    link = report.row('one TCP stream over a link', [x / 1e6 for x in links], 'MB/s', 1) * 1e6
    bound = 1e3 * optimum_s(n, k, options.bytes, link)
    point = {'n': n, 'k': k, 'rate': rate}
    report.row('bps', times, 'ms', 1, **point)
    target = 98.5 if not k else 95 if n <= 4 else 93
    report.against(f'bps: share of the optimum, {bound:.0f} ms', [100 * bound / t for t in times], target, unit='%', digits=1, **point)
    if others:
        ring = 1e3 * optimum_s(n, 0, options.bytes, link)
        report.row('Gloo (torch.distributed)', others, 'ms', 1, **point)
        report.row(f'Gloo: share of the bound of a ring, {ring:.0f} ms', [100 * ring / t for t in others], '%', 1, **point)
        ratios = [g / t for g, t in zip(others, times)]
        if k == n:  # its ring can be 0.95 of 2 (n - 1) / n
            report.against('Gloo / bps', ratios, {4: 1.42, 8: 1.62}.get(n, 0.95 * 2 * (n - 1) / n), **point)
        else:
            report.row('Gloo / bps', ratios, 'times', 2, **point)


def main():
    options, report = parse_arguments('grid', __doc__, nodes='4,8', rates='500mbit,1gbit', bytes=64 * MIB, rivals=1)
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
