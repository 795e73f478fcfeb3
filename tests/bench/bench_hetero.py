#!/usr/bin/env python3
"""One of 8 links at a quarter of the speed: placement by bandwidth beside equal placement and beside the optimum, in turns.

n nodes and n spare servers; the first spare server's link is the slow one. The optimum is that of unequal links (bps-internals(7),
PLACEMENT), in which the nodes sum a little, too. Equal placement is what the same daemons do when nobody tells them the links'
speeds. Before the slow link several senders meet. Algorithms that fill the queue there until something is lost (cubic) make all
wait for it at the end; so daemons run with --congestion (bbr if not given), and, for comparison, as the network says (cubic,
unless BPS_NETNS_CC is another).
"""
from harness import *


def main():
    options, report = parse_arguments('hetero', __doc__, nodes=4, rate=500, bytes=64 * MIB, rounds=3, congestion='bbr')
    n, rate = options.nodes, options.rate
    links, slows, placed, other, equal = [], [], [], [], []
    known = [rate] * n + [rate / 4] + [rate] * (n - 1)
    with shaped(2 * n, f'{rate}mbit') as prefix:
        for space, device in ((f'{prefix}{n}', 'eth0'), (f'{prefix}-sw', f'p{n}')):
            subprocess.run(['tc', '-n', space, 'qdisc', 'replace', 'dev', device, 'root', 'tbf', 'rate', f'{rate / 4}mbit',
                            'burst', '256k', 'limit', '1m'], check=True)
        for _ in range(options.repeats):
            links.append(link_bytes_s(prefix))
            slows.append(link_bytes_s(prefix, f'10.88.0.{n + 1}', 16 * MIB, host=n))
            # One after the other: all would use the same addresses.
            for times, congestion, bandwidths in ((placed, options.congestion, known), (other, '', known),
                                                  (equal, options.congestion, None)):
                with Cluster(n, n, netns=prefix, bandwidths=bandwidths, options=[f'--congestion={congestion}']) as cluster:
                    times.append(op_ms(cluster, (1,) * n, options.bytes, repeats=options.rounds))
    report.heading(f'{n} nodes + {n} spare servers at {rate} Mbit/s, one of these at a quarter; {options.bytes >> 20} MiB')
    link = report.row('one TCP stream over a link', [x / 1e6 for x in links], 'MB/s', 1) * 1e6
    slow = report.row('and over the slow one', [x / 1e6 for x in slows], 'MB/s', 1) * 1e6
    bound = 1e3 * optimum_of_links_s([link] * n, [slow] + [link] * (n - 1), options.bytes)
    report.row(f'bps, links known, {options.congestion}', placed, 'ms', 1)
    report.row('bps, links known, congestion as the network says', other, 'ms', 1)
    report.row(f'bps, links taken for equal, {options.congestion}', equal, 'ms', 1)
    report.against(f'share of the optimum, {bound:.0f} ms', [100 * bound / t for t in placed], 90, unit='%', digits=1)
    report.row('the same, congestion as the network says', [100 * bound / t for t in other], '%', 1)
    report.against('known / equal', [p / e for p, e in zip(placed, equal)], 0.6, at_most=True)
    report.close()


main()
