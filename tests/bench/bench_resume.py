#!/usr/bin/env python3
"""What it costs that jobs outlive their daemons: two nodes and a server with `resume` on and off, in interleaved pairs.

    bench_resume.py [--bytes N] [--repeats N] [--steps N] [--rate RATE] [--json FILE]

push_pull of --bytes by 2 nodes of one rank and a spare server, over TCP. First over links of --rate each way (needs root), as
between machines: goodput. Then over the loopback: CPU time of the daemons for each byte, which is what is kept, acknowledged
and copied once more. Both clusters stand all the time and take turns; a job's beginning is not counted.
"""
from harness import *


def table(report, options, found, goodput=None, cpu=None):
    report.row('goodput without', [options.bytes / off / 1e6 for _, (off, _) in found], 'MB/s', 0)
    report.row('goodput with resume', [options.bytes / on / 1e6 for (on, _), _ in found], 'MB/s', 0)
    report.row('CPU time without, for each byte', [off / options.bytes * 1e9 for _, (_, off) in found], 'ns')
    report.row('CPU time with resume, for each byte', [on / options.bytes * 1e9 for (_, on), _ in found], 'ns')
    for name, values, target in (('goodput lost', [100 * (1 - off / on) for (on, _), (off, _) in found], goodput),
                                 ('CPU time of the daemons, more', [100 * (on / off - 1) for (_, on), (_, off) in found], cpu)):
        if target:
            report.against(name, values, target, at_most=True, unit='%')
        else:
            report.row(name, values, '%')


def main():
    options, report = parse_arguments('resume', __doc__, repeats=9, bytes=32 * MIB, steps=24, rate='2gbit')
    with shaped(3, options.rate, prefix=f'b{os.getpid() % 10000}on') as on, \
            shaped(3, options.rate, prefix=f'b{os.getpid() % 10000}of') as off:
        report.heading(f'push_pull of {options.bytes / MIB:g} MiB by 2 nodes and a server, links of {options.rate}')
        table(report, options, list(switched('resume', options, (on, off))), 5, 10)
    report.heading(f'push_pull of {options.bytes / MIB:g} MiB by 2 nodes and a server, TCP on the loopback')
    table(report, options, list(switched('resume', options)), None, 10)
    report.close()


main()
