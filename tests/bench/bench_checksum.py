#!/usr/bin/env python3
"""What checksums cost: goodput and CPU time of two nodes and a server with `checksum` on and off, in interleaved pairs.

    bench_checksum.py [--bytes N] [--repeats N] [--steps N] [--rate RATE] [--json FILE]

push_pull of --bytes by 2 nodes of one rank and a spare server, over TCP. First over links of --rate each way (needs root), as
between machines; then over the loopback: there every byte is checked four times by processors that have everything else to do
as well, which is the worst case. Both clusters stand all the time and take turns.
"""
from harness import *


def table(report, options, found, target):
    report.row('goodput without checksums', [options.bytes / off / 1e6 for _, (off, _) in found], 'MB/s', 0)
    report.row('goodput with checksums', [options.bytes / on / 1e6 for (on, _), _ in found], 'MB/s', 0)
    lost = [100 * (1 - off / on) for (on, _), (off, _) in found]
    if target:
        report.against('goodput lost', lost, target, at_most=True, unit='%')
    else:
        report.row('goodput lost', lost, '%')
    report.row('CPU time of the daemons, more', [100 * (on / off - 1) for (_, on), (_, off) in found], '%')


def main():
    options, report = parse_arguments('checksum', __doc__, repeats=9, bytes=32 * MIB, steps=12, rate='2gbit')
    with shaped(3, options.rate, prefix=f'b{os.getpid() % 10000}on') as on, \
            shaped(3, options.rate, prefix=f'b{os.getpid() % 10000}of') as off:
        report.heading(f'push_pull of {options.bytes / MIB:g} MiB by 2 nodes and a server, links of {options.rate}')
        table(report, options, list(switched('checksum', options, (on, off))), 3)
    report.heading(f'push_pull of {options.bytes / MIB:g} MiB by 2 nodes and a server, TCP on the loopback')
    table(report, options, list(switched('checksum', options)), None)
    report.close()


main()
