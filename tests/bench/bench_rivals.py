#!/usr/bin/env python3
"""bps beside other systems on one machine, each with its best settings, and beside what the machine itself takes, in turns.

tcp        push_pull by 2 workers and 2 servers over loopback TCP, 64 MiB: beside the time that plain TCP and the sum take on all
           cores together; and 4 KiB, all asleep: beside two TCP messages one way. All by reno, which does not pace
allreduce  2 ranks on 2 daemons over loopback TCP, 64 MiB: beside Intel MPI, Open MPI and Gloo. The congestion control is the
           fastest of this kernel for the rival, and bps has the same (needs root)
local      ranks of one machine through shared memory: beside Intel MPI and Open MPI
wakeups    2 ranks of one machine, 1 KiB: beside bare wake-ups
The settings of a rival are searched first, for each number of ranks and size, with few repeats (rivals.py). The best are named, and
measured in pairs with bps, which has its defaults. A target is for bps with memory of its own (bps_memory_alloc). Rivals have the
trainer's ordinary memory, and bps with that stands below. A reference is the time of bare processes that hand over the same in the
same order, and do nothing else.
Open MPI is Debian's, Intel MPI is PyPI's (.venv-mpi), Gloo is torch.distributed's: scripts/bench rivals installs them. One that is
missing is left out, and said so.
"""
from harness import *
from rivals import *


def sum_gb_s():
    """Bytes of one operand that a thread sums, 2 inputs out of cache, by the best kernel."""
    out = subprocess.run([BENCH, 'sum', '--dtype', 'float32', '--inputs', '2', '--bytes', str(64 * MIB), '--rounds', '3', '--json',
                          '/dev/stdout'], capture_output=True, text=True, check=True).stdout
    results = json.JSONDecoder().raw_decode(out)[0]['results']
    return max(row['gb_s'] for row in results) / 3  # its unit is memory traffic: two inputs and an output


def plain_ms(n_bytes, tcp_bytes):
    """What plain TCP of so many bytes and a sum of n_bytes take on all cores, if none is ever idle; and the CPU seconds of TCP for a GB."""
    cpu = stream(None, '127.0.0.1', 256 * MIB, congestion='reno')[1]
    return 1e3 * (tcp_bytes * cpu + n_bytes / 1e9 / sum_gb_s()) / min(4, os.cpu_count()), cpu * 1e9


def tcp(options, report):
    """Every byte is pushed and pulled, and summed once."""
    n, references, times, small, messages, bare, costs, plain = options.bytes, [], [], [], [], [], [], []
    with Cluster(2, 2, colocated=False, options=['--congestion=reno']) as cluster:
        for _ in range(options.repeats):
            reference, cpu = plain_ms(n, 4 * n)
            references.append(reference)
            plain.append(cpu)
            before, rounds = cpu_s(cluster.daemons), 20 + WARM_UP
            times.append(op_ms(cluster, (1, 1), n, repeats=20, warmup=WARM_UP))
            costs.append((cpu_s(cluster.daemons) - before) / (4 * n / 1e9 * rounds))
            messages.append(2 * message_ns(4096) / 1e3)
            bare.append(limit_ns('relay', 4096) / 1e3)
            small.append(1e3 * op_ms(cluster, (1, 1), 4096, repeats=500, warmup=50, SPIN_US=0))
    report.heading(f'push_pull over loopback TCP, 2 workers + 2 servers, {n >> 20} MiB')
    report.row('reference: plain TCP and the sum on all cores', references, 'ms', 1)
    report.row('bps', times, 'ms', 1)
    report.against('bps / reference', [t / x for t, x in zip(times, references)], 1.35, at_most=True)
    report.row('plain TCP: CPU, both ends', plain, 's/GB', 3)
    report.row('bps: CPU of the daemons, for each GB moved', costs, 's/GB', 3)
    report.against('bps / plain TCP: CPU', [c / p for c, p in zip(costs, plain)], 1.3, at_most=True)
    report.heading('push_pull over loopback TCP, 2 workers + 2 servers, 4 KiB, all asleep')
    report.row('two TCP messages one way', messages, 'us', 1)
    report.row('bps', small, 'us', 1)
    report.against('bps / two messages', [t / m for t, m in zip(small, messages)], 2, at_most=True)
    report.row('reference: the same wake-ups and messages by bare processes', bare, 'us', 1)
    report.row('bps / reference', [t / b for t, b in zip(small, bare)], 'times')


def paired(options, report, cluster, layout, name, rival, n_bytes, target, repeats, reference=None):
    """A rival and bps with each kind of memory, in turns. reference: its name, and what measures its ms."""
    own, ordinary, others, references = [], [], [], []
    turns = [lambda: own.append(op_ms(cluster, layout, n_bytes, repeats=repeats, warmup=WARM_UP)),
             lambda: others.append(rival.ms(n_bytes, repeats)),
             lambda: ordinary.append(op_ms(cluster, layout, n_bytes, '--copied', repeats=repeats, warmup=WARM_UP))]
    if reference:
        turns.append(lambda: references.append(reference[1]()))
    in_turns(options.repeats, *turns)
    unit, scale = ('ms', 1) if n_bytes > MIB else ('us', 1e3)
    for text, values in (name, others), ('bps', own), ('bps, ordinary memory', ordinary):
        report.row(text, [scale * v for v in values], unit)
    ratios = [o / t for o, t in zip(others, own)]
    if target:
        report.against(f'{name} / bps', ratios, target)
    else:
        report.row(f'{name} / bps', ratios, 'times')
    report.row(f'{name} / bps, ordinary memory', [o / t for o, t in zip(others, ordinary)], 'times')
    if references:
        report.row(f'reference: {reference[0]}', [scale * x for x in references], unit)
        report.row('bps / reference', [t / x for t, x in zip(own, references)], 'times')


def allreduce(options, report):
    """Each rival with its best settings and, with these, the best congestion control."""
    for name, target in ('Intel MPI', 1.1), ('Open MPI', None), ('Gloo', 1.4):
        def start(settings):
            return gloo(None, 2) if name == 'Gloo' else mpi(name, 2, 'tcp', settings)

        with loopback('reno'):
            settings = search(name, start, options.bytes, SETTINGS.get(name, []))
        if settings is None:
            report.heading(f'{name} is not installed here and is left out')
            continue
        taken = {}
        for congestion in congestion_controls():
            with loopback(congestion), start(settings) as rival:
                taken[congestion] = rival.ms(options.bytes, 10)
        congestion = min(taken, key=taken.get)
        report.heading(f'all-reduce over loopback TCP, 2 ranks on 2 daemons, {options.bytes >> 20} MiB: beside {name}',
                       congestion=congestion, **settings)
        with loopback(congestion), start(settings) as rival, Cluster(2) as cluster:
            # Each node pushes half and is sent half.
            paired(options, report, cluster, (1, 1), name, rival, options.bytes, target, 10,
                   ('plain TCP and the sum on all cores', lambda: plain_ms(options.bytes, 2 * options.bytes)[0]))


# Ranks, bytes (None: --bytes), targets and repeats.
LOCAL = (2, None, {'Intel MPI': 1.8}, 20), (2, MIB, {'Intel MPI': 1.5}, 50), (4, None, {'Intel MPI': 2, 'Open MPI': 4}, 5)


def local(options, report):
    for n, n_bytes, targets, repeats in LOCAL:
        n_bytes = n_bytes or options.bytes
        for name in SHARED_MEMORY:
            best = search(name, lambda settings: mpi(name, n, 'shm', settings), n_bytes, SETTINGS[name] + SHARED_MEMORY[name])
            if best is None:
                report.heading(f'{name} is not installed here and is left out')
                continue
            report.heading(f'{n} ranks of one machine, shared memory, {n_bytes >> 20} MiB: beside {name}, {os.cpu_count()} cores', **best)
            with Cluster(1) as cluster, mpi(name, n, 'shm', best) as rival:
                paired(options, report, cluster, (n,), name, rival, n_bytes, targets.get(name), repeats,
                       ('two bare processes that sum half each', lambda: limit_ns('halves', n_bytes) / 1e6)
                       if n == 2 and n_bytes <= MIB else None)


def wake_ups(options, report):
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
    report.row('reference: the same wake-ups by bare processes', meet, 'us', 1)
    report.row('bps / reference', [t / b for t, b in zip(times, meet)], 'times')
    report.heading('the same, ranks that poll for 0.1 ms, their default')
    report.row('bps', looking, 'us', 1)
    report.heading('the same, ranks and daemon that spin (spin_us = 100)')
    report.row('a word there and back between threads that spin', spins, 'us')
    report.row('bps', spinning, 'us', 1)
    report.against('bps / a round trip', [t / s for t, s in zip(spinning, spins)], 10, at_most=True)
    report.row(f'reference: three bare processes that poll and yield, {os.cpu_count()} cores', spin_meet, 'us', 1)
    report.row('bps / reference', [t / b for t, b in zip(spinning, spin_meet)], 'times')
    report.row('bps, one rank beside its daemon', alone, 'us', 1)
    report.row('bps, one rank / a round trip', [t / s for t, s in zip(alone, spins)], 'times')


def main():
    options, report = parse_arguments('rivals', __doc__, bytes=64 * MIB, only='tcp,allreduce,local,wakeups')
    for part in options.only.split(','):
        {'tcp': tcp, 'allreduce': allreduce, 'local': local, 'wakeups': wake_ups}[part](options, report)
    report.close()


main()
