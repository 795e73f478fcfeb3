#!/usr/bin/env python3
"""Many small tensors beside the same bytes as one tensor, in turns: on a shaped cluster, over loopback, on one machine."""
from harness import *

MORE = 4  # rounds by which one run is longer than the other
HEAD_BYTES = 96 + 4 + 4  # struct data_header and two checksums, each way


def run(cluster, layout, options, repeats):
    """A run's milliseconds for a round, and the CPU seconds that it cost daemons and ranks."""
    before = spent_s(cluster)
    ms = op_ms(cluster, layout, options.bytes, '--tensors', options.tensors, repeats=repeats)
    return ms, [after - b for after, b in zip(spent_s(cluster), before)]


def measure(options, report, where, cluster, layout, target=None, link_ms=None):
    n, size, cores = options.tensors, options.bytes, os.cpu_count()
    one, many, costs = [], [], []
    for _ in range(options.repeats):
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
    bounds = [sum(c) * n * sum(layout) / cores / 1e3 for c in costs]
    if link_ms:
        report.row('what binds: the links, with a header for each tensor', link_ms, 'ms')
        bounds = [max(b, l) for b, l in zip(bounds, link_ms)]
    report.row(f'what binds: {"the longer of that and " if link_ms else ""}that CPU, on {cores} cores', bounds, 'ms')
    report.row('small / what binds', [m / b for m, b in zip(many, bounds)], 'times')


def main():
    options, report = parse_arguments('small', __doc__, tensors=10000, bytes=1024, nodes=4, rate='1gbit')
    n, on_wire = options.nodes, options.tensors * (options.bytes + HEAD_BYTES)
    with shaped(2 * n, options.rate) as prefix:
        links = [1e3 * optimum_s(n, n, on_wire, link_bytes_s(prefix)) for _ in range(options.repeats)]
        with Cluster(n, n, colocated=False, netns=prefix) as cluster:
            measure(options, report, f'{n} nodes + {n} spare servers at {options.rate}', cluster, (1,) * n, 1.5, links)
    with Cluster(2, 2, colocated=False) as cluster:
        measure(options, report, '2 nodes + 2 servers on loopback', cluster, (1, 1))
    with Cluster(1) as cluster:
        measure(options, report, '2 ranks of one machine', cluster, (2,))
    report.close()


main()
