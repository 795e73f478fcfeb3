#!/usr/bin/env python3
"""Two jobs on the same nodes and servers, of which one has 8 times the ranks, and so posts 8 times the bytes: their shares.

Both always have work waiting. What a job has had is what bpsctl says of it on node 0, over --seconds.
"""
from harness import *


def ranks_of(cluster, job, local_size, n, tensors, n_bytes):
    """bps-bench op without end, as a job of its own. Returns its processes."""
    made = []
    for rank in range(local_size * n):
        node, local_rank = divmod(rank, local_size)
        env = {k: v for k, v in os.environ.items() if not k.startswith('BPS_')}
        env.update({'BPS_SOCKET': cluster.daemons[node].socket, 'BPS_JOB': job})
        env.update({'BPS_' + k: str(v) for k, v in {
            'RANK': rank, 'SIZE': local_size * n, 'LOCAL_RANK': local_rank, 'LOCAL_SIZE': local_size, 'NODE': node, 'NODES': n}.items()})
        argv = [BENCH, 'op', '--sizes', n_bytes, '--tensors', tensors, '--repeats', '1000000', '--warmup', '0']
        made.append(subprocess.Popen(inside(cluster.netns, node, argv), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    return made


def bytes_of(cluster):
    return {job['job']: int(job['bytes']) for job in cluster.daemons[0].ctl('jobs')['jobs']}


def main():
    options, report = parse_arguments('fair', __doc__, nodes=2, rate='200mbit', bytes=MIB, seconds=5)
    n, errors, shares = options.nodes, [], []
    with shaped(2 * n, options.rate) as prefix, Cluster(n, n, colocated=False, netns=prefix) as cluster:
        ranks = ranks_of(cluster, 'modest', 1, n, 64, options.bytes) + ranks_of(cluster, 'greedy', 8, n, 64, options.bytes)
        try:
            wait_for('both jobs run', lambda: all(bytes_of(cluster).get(job, 0) > 8 * options.bytes for job in ('modest', 'greedy')), 60)
            for _ in range(options.repeats):
                before = bytes_of(cluster)
                time.sleep(options.seconds)
                after = bytes_of(cluster)
                had = {job: after[job] - before[job] for job in after}
                shares.append(had['modest'] / sum(had.values()))
                errors.append(100 * abs(2 * shares[-1] - 1))
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.wait()
    report.heading(f'two jobs on {n} nodes + {n} servers at {options.rate}, one with 8 times the ranks')
    report.row('share of the modest job', [100 * s for s in shares], '%', 1)
    report.against(f'error of its share over {options.seconds} s', errors, 5, at_most=True, unit='%', digits=1)
    report.close()


main()
