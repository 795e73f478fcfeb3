#!/usr/bin/env python3
"""One of 8 links at a quarter of the speed: placement by bandwidth beside equal placement and beside the optimum, in turns.

n nodes and n spare servers; the first spare server's link is the slow one. The optimum is that of unequal links (bps(7),
PLACEMENT). Equal placement is what the same daemons do when nobody tells them the links' speeds.
"""
from harness import *


def main():
    options, report = parse_arguments('hetero', __doc__, nodes=4, rate=500, bytes=64 * MIB)
    n, rate = options.nodes, options.rate
    links, slows, placed, equal = [], [], [], []
    with shaped(2 * n, f'{rate}mbit') as prefix, contextlib.ExitStack() as stack:
        for space, device in ((f'{prefix}{n}', 'eth0'), (f'{prefix}-sw', f'p{n}')):
            subprocess.run(['tc', '-n', space, 'qdisc', 'replace', 'dev', device, 'root', 'tbf', 'rate', f'{rate / 4}mbit',
                            'burst', '256k', 'limit', '1m'], check=True)
        for _ in range(options.repeats):
            links.append(link_bytes_s(prefix))
            slows.append(link_bytes_s(prefix, f'10.88.0.{n + 1}', 16 * MIB, host=n))
            # One after the other: both would use the same addresses.
            with Cluster(n, n, colocated=False, netns=prefix, bandwidths=[rate] * n + [rate / 4] + [rate] * (n - 1)) as cluster:
                placed.append(op_ms(cluster, (1,) * n, options.bytes))
            with Cluster(n, n, colocated=False, netns=prefix) as cluster:
                equal.append(op_ms(cluster, (1,) * n, options.bytes))
    report.heading(f'{n} nodes + {n} spare servers at {rate} Mbit/s, one of these at a quarter; {options.bytes >> 20} MiB')
    link = report.row('one TCP stream over a link', [x / 1e6 for x in links], 'MB/s', 1) * 1e6
    slow = report.row('and over the slow one', [x / 1e6 for x in slows], 'MB/s', 1) * 1e6
    bound = 1e3 * optimum_of_links_s([link] * n, [slow] + [link] * (n - 1), options.bytes)
    report.row('bps, links known', placed, 'ms', 1)
    report.row('bps, links taken for equal', equal, 'ms', 1)
    report.against(f'share of the optimum, {bound:.0f} ms', [100 * bound / t for t in placed], 90, unit='%', digits=1)
    report.against('known / equal', [p / e for p, e in zip(placed, equal)], 0.6, at_most=True)
    report.close()


main()
