#!/usr/bin/env python3
"""Many small tensors beside the same bytes as one tensor, in turns.

On a shaped cluster; over loopback, with servers of their own and without; on one machine."""
from harness import *

MORE = 4  # rounds by which one run is longer than the other


def run(cluster, layout, options, repeats):
    """A run's milliseconds for a round, and the CPU seconds that it cost daemons and ranks."""
    before = spent_s(cluster)
    ms = op_ms(cluster, layout, options.bytes, '--tensors', options.tensors, repeats=repeats)
    return ms, [after - b for after, b in zip(spent_s(cluster), before)]


def measure(options, report, where, cluster, layout, target=None, prefix=None):
    n, size, cores = options.tensors, options.bytes, os.cpu_count()
    one, many, costs, links = [], [], [], []
    for _ in range(options.repeats):
        if prefix:
            links.append(1e3 * optimum_s(len(layout), len(layout), n * size, link_bytes_s(prefix)))
        one.append(op_ms(cluster, layout, n * size, repeats=3))
        _, short = run(cluster, layout, options, 3)
        ms, long = run(cluster, layout, options, 3 + MORE)
        many.append(ms)
        costs.append([1e6 * (l - s) / (MORE * n * sum(layout)) for l, s in zip(long, short)])
    report.heading(f'{n} tensors of {size} bytes: {where}')
    report.row('as one tensor', one, 'ms')
    report.row('as small ones', many, 'ms')
    ratios = [m / o for m, o in zip(many, one)]
    if target:
        report.against('small / one', ratios, target, at_most=True)
    else:
        report.row('small / one', ratios, 'times')
    report.row('CPU of all daemons for a tensor of a rank', [c[0] for c in costs], 'us')
    report.row('CPU of its trainer', [c[1] for c in costs], 'us')
    if links:
        report.row('lower bound: the links, for the bytes alone', links, 'ms')
        report.row('small / lower bound', [m / l for m, l in zip(many, links)], 'times')
    busy = [sum(c) * n * sum(layout) / cores / 1e3 for c in costs]
    report.row(f'that CPU, on {cores} cores', busy, 'ms')
    report.row('small / that CPU', [m / b for m, b in zip(many, busy)], 'times')


def main():
    options, report = parse_arguments('small', __doc__, tensors=10000, bytes=1024, nodes=4, rate='1gbit')
    n = options.nodes
    with shaped(2 * n, options.rate) as prefix, Cluster(n, n, colocated=False, netns=prefix) as cluster:
        measure(options, report, f'{n} nodes + {n} spare servers at {options.rate}', cluster, (1,) * n, 1.5, prefix)
    with Cluster(2, 2, colocated=False) as cluster:
        measure(options, report, '2 nodes + 2 servers on loopback', cluster, (1, 1))
    with Cluster(2) as cluster:
        measure(options, report, '2 nodes on loopback, each a server of both', cluster, (1, 1))
    with Cluster(1) as cluster:
        measure(options, report, '2 ranks of one machine', cluster, (2,))
    report.close()


main()
