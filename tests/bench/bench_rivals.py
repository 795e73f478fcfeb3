#!/usr/bin/env python3
"""bps beside what a user would otherwise run on one machine, and beside the machine's own limits, in turns.

tcp        push_pull by 2 workers and 2 servers over loopback TCP, 64 MiB: beside the time that plain TCP and the sum need on
           all cores together; and 4 KiB, all asleep: beside two TCP messages one way. Plain TCP is as the system has it; where
           that paces what it sends (bbr), bps does not over the loopback, so the same without pacing is there too
allreduce  2 ranks on 2 daemons over loopback TCP, 64 MiB: beside Intel MPI, Open MPI and Gloo over the same
local      ranks of one machine through shared memory: beside Intel MPI and Open MPI over theirs, and bare wake-ups
What binds small messages is measured beside them: processes that hand over the same in the same order and do nothing else.
Open MPI is Debian's, Intel MPI is PyPI's (.venv-mpi), Gloo is torch.distributed's: scripts/bench rivals installs them. One that is
missing is left out, and said so.
"""
from harness import *


def rival(stack, report, name, made):
    if made is None:
        report.heading(f'{name} is not installed here and is left out')
        return None
    return stack.enter_context(made)


def sum_gb_s():
    """Bytes of one operand that a thread sums, 2 inputs out of cache, by the best kernel."""
    out = subprocess.run([BENCH, 'sum', '--dtype', 'float32', '--inputs', '2', '--bytes', str(64 * MIB), '--rounds', '3', '--json',
                          '/dev/stdout'], capture_output=True, text=True, check=True).stdout
    results = json.JSONDecoder().raw_decode(out)[0]['results']
    return max(row['gb_s'] for row in results) / 3  # its unit is memory traffic: two inputs and an output


def tcp(options, report):
    """2 workers + 2 servers. Every byte is pushed and pulled, and summed once."""
    n, limits, times, small, bounds, bare, costs, plain, unpaced = options.bytes, [], [], [], [], [], [], [], []
    with Cluster(2, 2, colocated=False) as cluster:
        for _ in range(options.repeats):
            plain.append(1e9 * stream(None, '127.0.0.1', 256 * MIB)[1])
            moved = 2 * 2 * n / 1e9
            limits.append(1e3 * (moved * plain[-1] + n / 1e9 / sum_gb_s()) / min(4, os.cpu_count()))
            unpaced.append(1e9 * stream(None, '127.0.0.1', 256 * MIB, congestion='reno')[1])
            before, rounds = cpu_s(cluster.daemons), 21
            times.append(op_ms(cluster, (1, 1), n, repeats=rounds - 1))
            costs.append((cpu_s(cluster.daemons) - before) / (moved * rounds))
            bounds.append(2 * message_ns(4096) / 1e3)
            bare.append(limit_ns('relay', 4096) / 1e3)
            small.append(1e3 * op_ms(cluster, (1, 1), 4096, repeats=500, warmup=50, SPIN_US=0))
    report.heading(f'push_pull over loopback TCP, 2 workers + 2 servers, {n >> 20} MiB')
    report.row('limit: plain TCP and the sum on all cores', limits, 'ms', 1)
    report.row('bps', times, 'ms', 1)
    report.against('bps / limit', [t / x for t, x in zip(times, limits)], 1.35, at_most=True)
    report.row('plain TCP: CPU, both ends', plain, 's/GB', 3)
    report.row('bps: CPU of the daemons, for each GB moved', costs, 's/GB', 3)
    report.against('bps / plain TCP: CPU', [c / p for c, p in zip(costs, plain)], 1.3, at_most=True)
    report.row('plain TCP without pacing: CPU, both ends', unpaced, 's/GB', 3)
    report.row('bps / plain TCP without pacing: CPU', [c / p for c, p in zip(costs, unpaced)], 'times')
    report.heading('the same, 4 KiB, all asleep')
    report.row('two TCP messages one way', bounds, 'us', 1)
    report.row('bps', small, 'us', 1)
    report.against('bps / two messages', [t / b for t, b in zip(small, bounds)], 2, at_most=True)
    report.row('what binds: the same wake-ups and messages by bare processes', bare, 'us', 1)
    report.row('bps / bare processes', [t / b for t, b in zip(small, bare)], 'times')


def transfer_limit_ms(n_bytes, tcp_bytes, copied):
    """What plain TCP of so many bytes, a sum of n_bytes and copies take on all cores, were none ever idle."""
    cores = min(4, os.cpu_count())
    tcp = stream(None, '127.0.0.1', 256 * MIB, congestion='reno')[1]
    return 1e3 * (tcp_bytes * tcp + n_bytes / 1e9 / sum_gb_s() + copied * limit_ns('copy', 64 * MIB, 1) / 1e9 / (64 * MIB)) / cores


def beside(options, report, layout, daemons, rivals, n_bytes, targets, repeats, limit_ms=None):
    """bps and rivals in turns. targets: by name, what rival / bps should be. limit_ms(): what binds, measured with them."""
    times, limits, others = [], [], {name: [] for name, made in rivals.items() if made}
    with Cluster(daemons) as cluster:
        for _ in range(options.repeats):
            limits += [limit_ms()] if limit_ms else []
            times.append(op_ms(cluster, layout, n_bytes, repeats=repeats))
            for name in others:
                others[name].append(rivals[name].ms(n_bytes, repeats))
    unit, scale = ('ms', 1) if n_bytes >= MIB else ('us', 1e3)
    report.row('bps', [scale * t for t in times], unit)
    for name, values in others.items():
        report.row(name, [scale * t for t in values], unit)
        ratios = [o / t for o, t in zip(values, times)]
        if name in targets:
            report.against(f'{name} / bps', ratios, targets[name])
        else:
            report.row(f'{name} / bps', ratios, 'times')
    if limits:
        report.row('what binds: plain TCP, the sum and one copy on all cores', limits, 'ms', 1)
        report.row('bps / what binds', [t / x for t, x in zip(times, limits)], 'times')
    return times


def allreduce(options, report):
    with contextlib.ExitStack() as stack:
        rivals = {'Intel MPI (ofi/tcp)': rival(stack, report, 'Intel MPI', mpi('intel', 2, 'tcp')),
                  'Open MPI (tcp)': rival(stack, report, 'Open MPI', mpi('open', 2, 'tcp')),
                  'Gloo (torch.distributed)': rival(stack, report, 'PyTorch', gloo(None, 2))}
        report.heading(f'all-reduce over loopback TCP, 2 ranks on 2 daemons, {options.bytes >> 20} MiB')
        beside(options, report, (1, 1), 2, rivals, options.bytes,
               {'Intel MPI (ofi/tcp)': 1.1, 'Gloo (torch.distributed)': 1.4}, 10,
               # Each node pushes half and is sent half; half of each result is copied, which is what going on after a restart costs.
               lambda: transfer_limit_ms(options.bytes, 2 * options.bytes, options.bytes))


def local(options, report):
    with contextlib.ExitStack() as stack:
        two = {'Intel MPI (shared memory)': rival(stack, report, 'Intel MPI', mpi('intel', 2)),
               'Open MPI (shared memory)': rival(stack, report, 'Open MPI', mpi('open', 2))}
        for n_bytes, target in ((options.bytes, 1.8), (MIB, 1.5)):
            report.heading(f'2 ranks of one machine, shared memory, {n_bytes >> 20} MiB')
            times = beside(options, report, (2,), 1, two, n_bytes, {'Intel MPI (shared memory)': target}, 20)
            if n_bytes <= MIB:
                bare = [limit_ns('halves', n_bytes) / 1e6 for _ in range(options.repeats)]
                report.row('what binds: two bare processes that sum half each', bare, 'ms', 3)
                report.row('bps / bare processes', [t / b for t, b in zip(times, bare)], 'times')
    with contextlib.ExitStack() as stack:
        four = {'Intel MPI (shared memory)': rival(stack, report, 'Intel MPI', mpi('intel', 4)),
                'Open MPI (shared memory)': rival(stack, report, 'Open MPI', mpi('open', 4))}
        report.heading(f'4 ranks of one machine, shared memory, {options.bytes >> 20} MiB')
        beside(options, report, (4,), 1, four, options.bytes,
               {'Intel MPI (shared memory)': 2, 'Open MPI (shared memory)': 4}, 5)
    wakes, meet, times, spins, spin_meet, looking, spinning, alone = [], [], [], [], [], [], [], []
    with Cluster(1) as cluster, Cluster(1, options=['--spin-us=100']) as awake:
        for _ in range(options.repeats):
            wakes.append(limit_ns('futex') / 1e3)
            meet.append(limit_ns('meet', 'sleep') / 1e3)
            times.append(1e3 * op_ms(cluster, (2,), 1024, repeats=1000, warmup=50, SPIN_US=0))
            looking.append(1e3 * op_ms(cluster, (2,), 1024, repeats=1000, warmup=50))
            spins.append(limit_ns('spin') / 1e3)
            spin_meet.append(limit_ns('meet', 'spin') / 1e3)
            spinning.append(1e3 * op_ms(awake, (2,), 1024, repeats=1000, warmup=50))
            alone.append(1e3 * op_ms(awake, (1,), 1024, repeats=1000, warmup=50))
    report.heading('2 ranks of one machine, shared memory, 1 KiB, all asleep')
    report.row('a futex wakes a thread on another core', wakes, 'us', 1)
    report.row('bps', times, 'us', 1)
    report.against('bps / a wake-up', [t / w for t, w in zip(times, wakes)], 5, at_most=True)
    report.row('what binds: the same wake-ups by bare processes', meet, 'us', 1)
    report.row('bps / bare processes', [t / b for t, b in zip(times, meet)], 'times')
    report.heading('the same, ranks that look for 0.1 ms as they do unless told otherwise')
    report.row('bps', looking, 'us', 1)
    report.heading('the same, ranks and daemon that spin (spin_us = 100)')
    report.row('a word there and back between threads that spin', spins, 'us')
    report.row('bps', spinning, 'us', 1)
    report.against('bps / a round trip', [t / s for t, s in zip(spinning, spins)], 10, at_most=True)
    report.row(f'what binds: three bare processes that look and yield, {os.cpu_count()} cores', spin_meet, 'us', 1)
    report.row('bps / bare processes', [t / b for t, b in zip(spinning, spin_meet)], 'times')
    report.row('bps, one rank beside its daemon', alone, 'us', 1)
    report.row('bps, one rank / a round trip', [t / s for t, s in zip(alone, spins)], 'times')


def main():
    options, report = parse_arguments('rivals', __doc__, bytes=64 * MIB, only='tcp,allreduce,local')
    for part in options.only.split(','):
        {'tcp': tcp, 'allreduce': allreduce, 'local': local}[part](options, report)
    report.close()


main()
