#!/usr/bin/env python3
"""What the daemon between trainer and network costs: a post, a hop and back, and a daemon with nothing to do."""
from harness import *


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


def main():
    options, report = parse_arguments('cost', __doc__, seconds=5)
    posts, hops, bare, again, bare_again = [], [], [], [], []
    with Cluster(1) as cluster:
        for _ in range(options.repeats):
            figures = run_ranks(cluster, (1,), ['ring'])
            posts.append(figures['post']['p50_us'])
            hops.append(figures['hop_asleep']['p50_us'])
            bare.append(figures['bare_asleep']['p50_us'])
            again.append(figures['hop_at_once']['p50_us'])
            bare_again.append(figures['bare_at_once']['p50_us'])
        report.heading('the hop to the daemon and back')
        report.against('post to a busy daemon', posts, 1, at_most=True, unit='us')
        report.row('a hop, all asleep', hops, 'us')
        report.row('an eventfd there and back, all asleep', bare, 'us')
        report.against('hop / eventfd, all asleep', [h / b for h, b in zip(hops, bare)], 1.5, at_most=True)
        report.row('hop / eventfd, one after the other', [h / b for h, b in zip(again, bare_again)], 'times')
        report.heading('an idle daemon')
        report.against('wake-ups a second, 8 idle sessions', [idle_wake_ups(cluster, options.seconds)], 2, at_most=True, unit='1/s')
    report.close()


main()
