#!/usr/bin/env python3
"""One of 8 links at a quarter of the speed: placement by bandwidth beside equal placement and beside the optimum, in turns.

n nodes and n spare servers; the first spare server's link is the slow one. The optimum is that of unequal links (bps-internals(7),
PLACEMENT), in which the nodes sum a little, too. Equal placement is what the same daemons do when nobody tells them the links'
speeds. Several senders meet before the slow link. A congestion control that fills the queue there until something is lost (cubic)
makes all of them wait. So all is measured with each of --congestion, which the network's routes set.
"""
from harness import *


def measure(options, report, congestion):
    n, rate = options.nodes, options.rate
    bounds, placed, equal = [], [], []
    known = [rate] * n + [rate / 4] + [rate] * (n - 1)
    with shaped(2 * n, f'{rate}mbit', congestion=congestion) as prefix:
        for space, device in ((f'{prefix}{n}', 'eth0'), (f'{prefix}-sw', f'p{n}')):
            subprocess.run(['tc', '-n', space, 'qdisc', 'replace', 'dev', device, 'root', 'tbf', 'rate', f'{rate / 4}mbit',
                            'burst', '256k', 'limit', '1m'], check=True)
        for _ in range(options.repeats):
            link, slow = link_bytes_s(prefix), link_bytes_s(prefix, f'10.88.0.{n + 1}', host=n)
            bounds.append(1e3 * optimum_of_links_s([link] * n, [slow] + [link] * (n - 1), options.bytes))
            # One after the other: both would use the same addresses.
            for times, bandwidths in (placed, known), (equal, None):
                with Cluster(n, n, netns=prefix, bandwidths=bandwidths) as cluster:
                    times.append(op_ms(cluster, (1,) * n, options.bytes, repeats=options.rounds))
    report.heading(f'{n} nodes + {n} spare servers at {rate} Mbit/s, one of these at a quarter; {options.bytes >> 20} MiB, {congestion}')
    report.row('lower bound: the optimum', bounds, 'ms', 1)
    report.row('bps, links known', placed, 'ms', 1)
    report.row('bps, links taken for equal', equal, 'ms', 1)
    report.against('share of the optimum', [100 * b / t for b, t in zip(bounds, placed)], 90, bound=100, unit='%', digits=1)
    report.against('known / equal', [p / e for p, e in zip(placed, equal)], 0.6, at_most=True)


def main():
    options, report = parse_arguments('hetero', __doc__, nodes=4, rate=500, bytes=64 * MIB, rounds=3, congestion='bbr,cubic')
    for congestion in options.congestion.split(','):
        measure(options, report, congestion)
    report.close()


main()
