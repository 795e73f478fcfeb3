#!/usr/bin/env python3
"""What authentication of messages costs: goodput and CPU time of two nodes and a server with `checksum` on and off, in
interleaved pairs. The clusters have a key: each message has a tag by AES-GMAC. --key 0: none, checksums by CRC-32C.

    bench_checksum.py [--bytes N] [--repeats N] [--steps N] [--rate RATE] [--key 0] [--json FILE]

push_pull of --bytes by 2 nodes of one rank and a spare server, over TCP. First over links of --rate each way (needs root), as
between machines; then over the loopback: there every byte is tagged or checked four times by processors that have everything else to do
as well, which is the worst case. Both clusters stand all the time and take turns.
"""
import tempfile
from harness import *


def table(report, options, found, target):
    report.row('goodput without', [options.bytes / off / 1e6 for _, (off, _) in found], 'MB/s', 0)
    report.row('goodput with', [options.bytes / on / 1e6 for (on, _), _ in found], 'MB/s', 0)
    lost = [100 * (1 - off / on) for (on, _), (off, _) in found]
    if target:
        report.against('goodput lost', lost, target, at_most=True, unit='%')
    else:
        report.row('goodput lost', lost, '%')
    report.row('CPU time of the daemons, more', [100 * (on / off - 1) for (_, on), (_, off) in found], '%')


def main():
    options, report = parse_arguments('checksum', __doc__, repeats=9, bytes=32 * MIB, steps=12, rate='2gbit', key=1)
    with tempfile.NamedTemporaryFile('w') as key:
        key.write('k' * 32)
        key.flush()
        measure(options, report, [f'--cluster-key-file={key.name}'] if options.key else [])
    report.close()


def measure(options, report, both):
    how = 'with a key' if options.key else 'without a key'
    with shaped(3, options.rate, prefix=f'b{os.getpid() % 10000}on') as on, \
            shaped(3, options.rate, prefix=f'b{os.getpid() % 10000}of') as off:
        report.heading(f'push_pull of {options.bytes / MIB:g} MiB by 2 nodes and a server, links of {options.rate}, {how}')
        table(report, options, list(switched('checksum', options, (on, off), both=both)), 2)
    report.heading(f'push_pull of {options.bytes / MIB:g} MiB by 2 nodes and a server, TCP on the loopback, {how}')
    table(report, options, list(switched('checksum', options, both=both)), None)


main()
