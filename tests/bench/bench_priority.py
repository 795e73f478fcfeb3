#!/usr/bin/env python3
"""What it is worth that urgent layers go first: a step in order of birth (FIFO) beside one by priority, in turns.

50 layers alike, forward to backward as 1 to 2, and as much communication as computing, on n nodes and n spare servers. FIFO
brings the first layer's result last, so the forward pass is not overlapped: 4/3 of the time at best. The same step is worked out
for links that never idle, nodes that work in step and parts that cost nothing but their bytes: that is the bound of this set-up.
"""
from harness import *

LAYERS = 50


def main():
    options, report = parse_arguments('priority', __doc__, nodes=4, rate='500mbit', shrink=2)
    n, links, fifo, priority, latencies = options.nodes, [], [], [], []
    layer_bytes = 500000 // options.shrink * 4
    with shaped(2 * n, options.rate) as prefix, Cluster(n, n, colocated=False, netns=prefix) as cluster:
        link = link_bytes_s(prefix)
        exchange = 1e3 * LAYERS * layer_bytes / link
        more = ['--shrink', options.shrink, '--forward-ms', f'{exchange / 3:.3f}', '--backward-ms', f'{exchange * 2 / 3:.3f}',
                '--update-ms', 0]
        for _ in range(options.repeats):
            links.append(link_bytes_s(prefix))
            latencies.append(op_ms(cluster, (1,) * n, 4, repeats=20))
            fifo.append(replay_ms(cluster, (1,) * n, 'uniform', *more, '--fifo')[0])
            priority.append(replay_ms(cluster, (1,) * n, 'uniform', *more)[0])
    layers = [(layer_bytes, 1 / LAYERS)] * LAYERS

    def ideal(by_priority, way_ms=0, levels=None):
        return [ideal_step_ms(layers, b, exchange / 3, exchange * 2 / 3, 0, latency + way_ms, by_priority, levels=levels)
                for b, latency in zip(links, latencies)]

    bound_fifo, bound_priority = ideal(False), ideal(True)
    way_fifo, way_priority = ideal(False, WAY_MS), ideal(True, WAY_MS, levels_of(layers))
    report.heading(f'{n} nodes + {n} spare servers at {options.rate}: {exchange:.0f} ms of computing, as much of communication')
    report.row('a link', [x / 1e6 for x in links], 'MB/s', 1)
    report.row('push_pull of 4 bytes', latencies, 'ms')
    report.row('FIFO: a step', fifo, 'ms', 1)
    report.row('by priority: a step', priority, 'ms', 1)
    report.row('FIFO, ideal: a step', bound_fifo, 'ms', 1)
    report.row('by priority, ideal: a step', bound_priority, 'ms', 1)
    bound = report.row('FIFO / priority, ideal', [f / p for f, p in zip(bound_fifo, bound_priority)], 'times')
    report.row(f'model, by priority: eight levels, {WAY_MS} ms on the way: a step', way_priority, 'ms', 1)
    report.row('model: FIFO / priority', [f / p for f, p in zip(way_fifo, way_priority)], 'times')
    report.against('FIFO / priority', [f / p for f, p in zip(fifo, priority)], 1.25, bound=bound)
    report.close()


main()
