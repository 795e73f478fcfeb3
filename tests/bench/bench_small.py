#!/usr/bin/env python3
"""Many small tensors beside the same bytes as one tensor, in turns: on a shaped cluster, over loopback, on one machine."""
from harness import *


def measure(options, report, where, cluster, layout, target=None):
    n, size = options.tensors, options.bytes
    one, many, costs = [], [], []
    for _ in range(options.repeats):
        one.append(op_ms(cluster, layout, n * size, repeats=3))
        before = cpu_s(cluster.daemons)
        many.append(op_ms(cluster, layout, size, '--tensors', n, repeats=3))
        costs.append(1e6 * (cpu_s(cluster.daemons) - before) / (4 * n * len(layout)))
    report.heading(f'{n} tensors of {size} bytes: {where}')
    report.row('as one tensor', one, 'ms')
    report.row('as small ones', many, 'ms')
    report.row('CPU of the daemons for a tensor of a node, set-up counted in', costs, 'us')
    ratios = [m / o for m, o in zip(many, one)]
    if target:
        report.against('small / one', ratios, target, at_most=True)
    else:
        report.row('small / one', ratios, 'times')


def main():
    options, report = parse_arguments('small', __doc__, tensors=10000, bytes=1024, nodes=4, rate='1gbit')
    n = options.nodes
    with shaped(2 * n, options.rate) as prefix, Cluster(n, n, colocated=False, netns=prefix) as cluster:
        measure(options, report, f'{n} nodes + {n} spare servers at {options.rate}', cluster, (1,) * n, 1.5)
    with Cluster(2, 2, colocated=False) as cluster:
        measure(options, report, '2 nodes + 2 servers on loopback', cluster, (1, 1))
    with Cluster(1) as cluster:
        measure(options, report, '2 ranks of one machine', cluster, (2,))
    report.close()


main()
