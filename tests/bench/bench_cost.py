#!/usr/bin/env python3
"""What the daemon between trainer and network costs: a post, a hop and back, and a daemon with nothing to do; and a whole
push_pull of 1 MiB and more by 4 nodes at 1 Gbit/s, beside the same line, servers and transport called inside the rank's process
(in_process.c; needs root, --only=hop,idle leaves it out)."""
from harness import *
from rivals import Rival


def idle_wake_ups(cluster, seconds):
    """Of the daemon and all its threads, a second, with 8 ranks joined that do nothing."""
    ranks = cluster.job((8,))
    for rank in ranks:
        rank.call('tensor', 0, 'x', FLOAT32, 1000)
        rank.submit(0, 0, bytes(4000), out=1000)
    for rank in ranks:
        rank.wait(0)
    time.sleep(0.5)
    before = cluster.daemons[0].switches()
    time.sleep(seconds)
    return (cluster.daemons[0].switches() - before) / seconds


def in_process(prefix, n, folder):
    """Ranks that are nodes themselves, which stay: as Rival."""
    addresses = [f'10.88.0.{i + 1}:9691' for i in range(n)]
    file = os.path.join(folder, 'in-process.conf')
    with open(file, 'w') as out:
        for i, address in enumerate(addresses):
            out.write(f'[node n{i}]\naddress = {address}\nroles = agent,server\n')
    program = os.path.join(BUILD, 'tests', 'bench', 'in_process')
    return Rival(prefix, [[program, file, f'n{i}', addresses[i], i, n] for i in range(n)], [{}] * n)


def cluster_cost(options, report):
    n = options.nodes
    sizes = [int(size) * MIB for size in options.mib.split(',')]
    times, inside_times, links = {size: [] for size in sizes}, {size: [] for size in sizes}, []
    with shaped(n, options.rate) as prefix, Cluster(n, netns=prefix) as cluster, in_process(prefix, n, cluster.folder) as ranks:
        for i in range(options.repeats):
            links.append(link_bytes_s(prefix))
            for size in sizes:
                turns = [lambda: times[size].append(op_ms(cluster, (1,) * n, size, repeats=options.rounds)),
                         lambda: inside_times[size].append(ranks.ms(size, options.rounds, 0))]
                for turn in turns if i % 2 else turns[::-1]:
                    turn()
    report.heading(f'push_pull by {n} nodes at {options.rate}, servers beside the agents')
    report.row('a link', [x / 1e6 for x in links], 'MB/s', 1)
    for size in sizes:
        text = f'{size >> 20} MiB'
        report.row(f'{text}: lower bound: the optimum', [1e3 * optimum_s(n, 0, size, x) for x in links], 'ms', 1)
        report.row(f'{text}: in process', inside_times[size], 'ms', 2)
        report.row(f'{text}: bps', times[size], 'ms', 2)
        report.against(f'{text}: bps / in process', [t / x for t, x in zip(times[size], inside_times[size])], 1.01, at_most=True, digits=3)


def hop(options, report):
    """Hops at once and after a pause. All sleep before both, but what a hop runs through is cold after a pause: the longer, the colder."""
    rows = {}
    with Cluster(1) as cluster:
        for _ in range(options.repeats):
            for name, figure in run_ranks(cluster, (1,), ['ring'], SPIN_US=0).items():
                if isinstance(figure, dict):
                    rows.setdefault(name, []).append(figure['p50_us'])
    report.heading('the hop to the daemon and back')
    report.against('post to a busy daemon', rows['post'], 1, at_most=True, unit='us')
    for when, text in ('at_once', 'at once'), ('asleep', 'after 1 ms'):
        hops, bare, lines = (rows[f'{what}_{when}'] for what in ('hop', 'bare', 'lines'))
        report.row(f'a hop, {text}', hops, 'us')
        report.row(f'an eventfd there and back, {text}', bare, 'us')
        report.against(f'hop / eventfd, {text}', [h / b for h, b in zip(hops, bare)], 1.5, at_most=True)
        report.row(f'reference: the eventfd through as many lines of code, {text}', lines, 'us')
        report.row(f'hop / reference, {text}', [h / l for h, l in zip(hops, lines)], 'times')


def idle(options, report):
    report.heading('an idle daemon')
    with Cluster(1) as cluster:
        report.against('wake-ups a second, 8 idle sessions', [idle_wake_ups(cluster, options.seconds)], 2, at_most=True, unit='1/s')


def main():
    options, report = parse_arguments('cost', __doc__, seconds=5, only='hop,idle,cluster', nodes=4, rate='1gbit', mib='1,4,16,64',
                                      rounds=5)
    for part in options.only.split(','):
        {'hop': hop, 'idle': idle, 'cluster': cluster_cost}[part](options, report)
    report.close()


main()
