#!/usr/bin/env python3
"""Two jobs on the same nodes and servers, of which one has 8 times the ranks, and so posts 8 times the bytes: their shares.

The greedy job always has work waiting, and the modest one but for the ends of its rounds of 64 tensors. The network interface of node
0 counts what it receives in so many rounds of the modest job, alone and beside the greedy one. The quotient is the modest job's share.
"""
from harness import *

TENSORS = 64


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


def received(prefix):
    """Bytes of packets that have come to node 0."""
    out = subprocess.run(inside(prefix, 0, ['cat', '/sys/class/net/eth0/statistics/rx_bytes']), capture_output=True, check=True).stdout
    return int(out)


def main():
    options, report = parse_arguments('fair', __doc__, repeats=3, nodes=2, rate='200mbit', bytes=MIB, rounds=2)
    n = options.nodes
    with shaped(2 * n, options.rate) as prefix, Cluster(n, n, colocated=False, netns=prefix) as cluster:
        def bytes_of(rounds):
            """What node 0 receives in rounds of the modest job, whoever receives it, and in a job's beginning and one round more."""
            before = received(prefix)
            op_ms(cluster, (1,) * n, options.bytes, '--tensors', TENSORS, repeats=rounds, warmup=1)
            return received(prefix) - before

        def longer():
            return bytes_of(1 + options.rounds) - bytes_of(1)

        alone = longer()
        greedy = ranks_of(cluster, 'greedy', 8, n, TENSORS, options.bytes)
        try:
            before = received(prefix)
            wait_for('the greedy job runs', lambda: received(prefix) - before > 8 * options.bytes, 60)
            both = [longer() for _ in range(options.repeats)]
        finally:
            for rank in greedy:
                rank.kill()
            for rank in greedy:
                rank.wait()
    shares = [100 * alone / x for x in both]
    report.heading(f'two jobs on {n} nodes + {n} servers at {options.rate}, one with 8 times the ranks')
    report.row('packets to node 0 for a round of the modest job, alone', [alone / options.rounds / 1e6], 'MB', 1)
    report.row('packets to node 0 meanwhile, of both', [x / options.rounds / 1e6 for x in both], 'MB', 1)
    report.row('share of the modest job', shares, '%', 1)
    report.against('error of its share', [abs(2 * s - 100) for s in shares], 5, at_most=True, unit='%', digits=1)
    report.close()


main()
