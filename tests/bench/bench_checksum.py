#!/usr/bin/env python3
"""What checksums cost: goodput and CPU time of two nodes and a server with `checksum` on and off, in interleaved pairs.

    bench_checksum.py [--bytes N] [--repeats N] [--steps N] [--json FILE]

push_pull of --bytes by 2 nodes of one rank and a spare server, over TCP on the loopback: every byte is checked four times by
processors that have everything else to do as well, which is the worst case. Both clusters stand all the time and take turns.
"""
from harness import *


def cpu_s(cluster):
    """Of all its daemons so far."""
    ticks = 0
    for daemon in cluster.daemons:
        with open(f'/proc/{daemon.pid}/stat') as file:
            ticks += sum(map(int, file.read().rpartition(')')[2].split()[11:13]))
    return ticks / os.sysconf('SC_CLK_TCK')


def turn(cluster, options):
    """Seconds of one operation, and CPU seconds of the daemons for each."""
    before = cpu_s(cluster)
    took = op_ms(cluster, (1, 1), options.bytes, repeats=options.steps, warmup=1) / 1e3
    return took, (cpu_s(cluster) - before) / (options.steps + 1)


def main():
    options, report = parse_arguments('checksum', __doc__, repeats=9, bytes=32 * MIB, steps=12)
    pairs = []
    with Cluster(2, 1, colocated=False, options=['--checksum=on']) as on, \
            Cluster(2, 1, colocated=False, options=['--checksum=off']) as off:
        for i in range(options.repeats):
            order = (on, off) if i % 2 else (off, on)
            figures = {cluster: turn(cluster, options) for cluster in order}
            pairs.append((figures[on], figures[off]))
    report.heading(f'push_pull of {options.bytes / MIB:g} MiB by 2 nodes and a server, TCP on the loopback')
    report.row('goodput without checksums', [options.bytes / off / 1e6 for _, (off, _) in pairs], 'MB/s', 0)
    report.row('goodput with checksums', [options.bytes / on / 1e6 for (on, _), _ in pairs], 'MB/s', 0)
    report.against('goodput lost', [100 * (1 - off / on) for (on, _), (off, _) in pairs], 3, at_most=True, unit='%')
    report.row('CPU time of the daemons, more', [100 * (on / off - 1) for (_, on), (_, off) in pairs], '%')
    report.close()


main()
