#!/usr/bin/env python3
"""The numbers of the main job, beside what the machine itself takes, measured in turns in the same run.

    bench_basic.py [--bytes N] [--repeats N] [--json FILE]

start      from starting bpslaunch to the first reduced tensor (1 KiB, NumPy), with a daemon of its own
local      push_pull of --bytes by 4 ranks of one machine; reference: copying each rank's bytes once, memcpy on all cores, best
           of five. The sum may beat it: it streams past the cache, and reads all inputs before it writes
cluster    push_pull by 4 nodes of one rank and 4 spare servers, over TCP; reference: each byte crosses one TCP stream of the
           machine 2 x 4 times. Eight daemons on all cores may beat it
rows       push_pull_rows of 1 % of the rows of a table, by 2 nodes and a server: bytes that cross the network, beside push_pull of
           all of the table
Goodput is bytes of one rank's tensor over the time of the slowest rank. Medians; [lowest ... highest].
"""
import struct
from harness import *


def copy_ns(n_bytes, threads):
    return int(subprocess.run([LIMITS, 'copy', str(n_bytes), str(threads)], capture_output=True, check=True).stdout)


def start_ms(n_ranks):
    """bpslaunch of a script whose rank 0 prints the time, on the clock that all processes share, of its first result."""
    script = ('import time, bps\n'
              'import array\n'
              'bps.init()\n'
              'x = array.array("f", [1.0]) * 256\n'
              'y = bps.push_pull(x, average=False, name="first")\n'
              'if bps.rank() == 0: print(time.monotonic_ns(), flush=True)\n'
              'bps.shutdown()\n')
    env = {**os.environ, 'BPS_DAEMON': os.path.join(BUILD, 'daemon', 'bps-daemon'),
           'BPS_LIBRARY': os.path.join(BUILD, 'client', 'libbps_client.so.0'),
           'PYTHONPATH': os.path.join(TOP, 'client', 'python')}
    env.pop('BPS_SOCKET', None)
    began = time.monotonic_ns()
    out = subprocess.run([sys.executable, os.path.join(TOP, 'client', 'python', 'bps', 'launch.py'), '--daemon-option', 'log_level=warning',
                          '-np', str(n_ranks), sys.executable, '-c', script], env=env, capture_output=True, text=True)
    if out.returncode:
        raise SystemExit(f'bench: bpslaunch: {out.stderr}')
    first = min(int(line.split()[-1]) for line in out.stdout.splitlines() if line.split()[-1].isdigit())
    return (first - began) / 1e6


def wire_bytes(share, table=65536, width=64):
    """Bytes in and out of the server for one operation on a table of float32: on that share of its rows, or whole (None)."""
    with Cluster(2, 1, colocated=False) as cluster:
        ranks, count = cluster.job((1, 1)), lambda: cluster.daemons[-1].ctl('status')
        for k, rank in enumerate(ranks):
            rank.call('tensor', 0, 'table', FLOAT32, table * width)
        for request in range(2):  # the first brings the declaration along
            before = count()
            for k, rank in enumerate(ranks):
                if share is None:
                    rank.submit(request, 0, bytes(4 * table * width), out=table * width)
                else:
                    rows = struct.pack(f'<{int(table * share)}q', *((i * 9973 + k) % table for i in range(int(table * share))))
                    rank.submit_rows(request, 0, rows, bytes(len(rows) // 8 * 4 * width), width, table)
            for rank in ranks:
                rank.wait(request)
            used = sum(int(count()[key]) - int(before[key]) for key in ('bytes_in', 'bytes_out'))
        return used


def main():
    options, report = parse_arguments('basic', __doc__, bytes=256 << 20)
    n, turns = options.bytes, options.repeats
    report.heading('the main job')
    start_ms(1)  # the package is compiled when it is first imported
    for ranks in (1, 4):
        report.row(f'start: bpslaunch to first result, {ranks} rank{"s"[:ranks > 1]}', [start_ms(ranks) for _ in range(turns)], 'ms', 0)

    local, copies, threads = [], [], min(4, os.cpu_count())
    with Cluster(1) as cluster:
        for _ in range(turns):
            copies.append(n * threads / copy_ns(n, threads))
            local.append(n / op_ms(cluster, (4,), n, warmup=2) / 1e6)
    report.row(f'local: memcpy of this machine, {threads} threads together', copies, 'GB/s')
    report.row(f'local: push_pull of {n >> 20} MiB, 4 ranks', local, 'GB/s')
    report.row('local: share of the reference (a copy for each rank)', [400 * x / c for x, c in zip(local, copies)], '%', 1)

    shared, streams = [], []
    with shaped(8, '') as prefix, Cluster(4, 4, colocated=False, netns=prefix) as cluster:
        for _ in range(turns):
            streams.append(link_bytes_s(prefix, n_bytes=n) / 1e9)
            shared.append(n / op_ms(cluster, (1, 1, 1, 1), n, warmup=2) / 1e6)
    report.row('cluster: one TCP stream of this machine (network namespaces)', streams, 'GB/s')
    report.row(f'cluster: push_pull of {n >> 20} MiB, 4 nodes + 4 servers', shared, 'GB/s')
    report.row('cluster: share of the reference (every byte through one stream)', [800 * x / s for x, s in zip(shared, streams)], '%', 1)
    report.row('rows: on the wire for all of a table of 16 MiB, 2 nodes', [wire_bytes(None) / 1e6], 'MB')
    report.row('rows: on the wire for 1 % of its rows on each', [wire_bytes(0.01) / 1e6], 'MB')
    report.close()


main()
