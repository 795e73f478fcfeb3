#!/usr/bin/env python3
"""What it is worth that urgent layers go first: a step in order of birth (FIFO) beside one by priority, in turns.

50 layers alike, forward to backward as 1 to 2, and as much communication as computing, on n nodes and n spare servers. FIFO
brings the first layer's result last, so the forward pass is not overlapped: 4/3 of the time at best.
"""
from harness import *


def main():
    options, report = parse_arguments('priority', __doc__, nodes=4, rate='500mbit', shrink=2)
    n, links, fifo, priority = options.nodes, [], [], []
    with shaped(2 * n, options.rate) as prefix, Cluster(n, n, colocated=False, netns=prefix) as cluster:
        link = statistics.median(link_bytes_s(prefix) for _ in range(3))
        exchange = 1e3 * 50 * 500000 // options.shrink * 4 / link
        more = ['--shrink', options.shrink, '--forward-ms', f'{exchange / 3:.3f}', '--backward-ms', f'{exchange * 2 / 3:.3f}',
                '--update-ms', 0]
        for _ in range(options.repeats):
            links.append(link_bytes_s(prefix))
            fifo.append(replay_ms(cluster, (1,) * n, 'uniform', *more, '--fifo')[0])
            priority.append(replay_ms(cluster, (1,) * n, 'uniform', *more)[0])
    report.heading(f'{n} nodes + {n} spare servers at {options.rate}: {exchange:.0f} ms of computing, as much of communication')
    report.row('one TCP stream over a link', [x / 1e6 for x in links], 'MB/s', 1)
    report.row('FIFO: a step', fifo, 'ms', 1)
    report.row('by priority: a step', priority, 'ms', 1)
    report.against('FIFO / priority; 1.33 at best', [f / p for f, p in zip(fifo, priority)], 1.25)
    report.close()


main()
