#!/usr/bin/env python3
"""The numbers of the main job, beside what the machine can do at all, measured in turns in the same run.

    bench_basic.py [--bytes N] [--repeats N] [--json FILE]

start      from starting bpslaunch to the first reduced tensor (1 KiB, NumPy), with a daemon of its own
local      push_pull of --bytes by 4 ranks of one machine; limit: copying each rank's bytes once, memcpy on all cores, best
           of five. The sum may beat it: it streams past the cache, and reads all inputs before it writes
cluster    push_pull by 4 nodes of one rank and 4 spare servers, over TCP; limit: one TCP stream of the machine, which
           8 daemons share here: each byte crosses it 2 x 4 times
rows       push_pull_rows of 1 % of the rows of a table, by 2 nodes and a server: bytes that cross the network, beside push_pull of
           all of the table
Goodput is bytes of one rank's tensor over the time of the slowest rank. Medians; [lowest ... highest].
"""
import argparse, json, os, statistics, struct, subprocess, sys, time
from harness import LIMITS, TOP, link_bytes_s, op_ms
from cluster import *


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


def spread(values, digits):
    return f'{statistics.median(values):9.{digits}f} [{min(values):.{digits}f} ... {max(values):.{digits}f}]'


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--bytes', type=int, default=256 << 20)
    parser.add_argument('--repeats', type=int, default=5)
    parser.add_argument('--json')
    options = parser.parse_args()
    n, turns, rows = options.bytes, options.repeats, []

    def row(name, unit, values, digits=2, **more):
        rows.append({'name': name, 'unit': unit, 'median': statistics.median(values), 'values': values, **more})
        print(f'{name:58}{spread(values, digits)} {unit}', flush=True)

    start_ms(1)  # the package is compiled when it is first imported
    for ranks in (1, 4):
        row(f'start: bpslaunch to first result, {ranks} rank{"s"[:ranks > 1]}', 'ms', [start_ms(ranks) for _ in range(turns)], 0)

    local, copies = [], []
    with Cluster(1) as cluster:
        for turn in range(turns):
            copies += [n * min(4, os.cpu_count()) / copy_ns(n, min(4, os.cpu_count()))]
            local += [n / op_ms(cluster, (4,), n, warmup=2) / 1e6]
    row(f'local: memcpy of this machine, {min(4, os.cpu_count())} threads together', 'GB/s', copies)
    row(f'local: push_pull of {n >> 20} MiB, 4 ranks', 'GB/s', local)
    limit = statistics.median(copies) / 4
    row('local: share of the limit (a copy for each rank)', '%', [100 * x / limit for x in local], 1)

    prefix, network = netns(8) if not os.geteuid() and shutil.which('ip') else (None, None)
    import contextlib
    shared, streams = [], []
    with network or contextlib.nullcontext(), Cluster(4, 4, colocated=False, netns=prefix) as cluster:
        host = cluster.addresses[1].rsplit(':', 1)[0]
        for turn in range(turns):
            streams += [link_bytes_s(prefix, host, n) / 1e9]
            shared += [n / op_ms(cluster, (1, 1, 1, 1), n, warmup=2) / 1e6]
    where = 'network namespaces' if prefix else 'loopback'
    row(f'cluster: one TCP stream of this machine ({where})', 'GB/s', streams)
    row(f'cluster: push_pull of {n >> 20} MiB, 4 nodes + 4 servers', 'GB/s', shared)
    limit = statistics.median(streams) / 8
    row('cluster: share of the limit (every byte through one stream)', '%', [100 * x / limit for x in shared], 1)
    sparse, dense = wire_bytes(0.01) / 1e6, wire_bytes(None) / 1e6
    row('rows: on the wire for all of a table of 16 MiB, 2 nodes', 'MB', [dense])
    row('rows: on the wire for 1 % of its rows on each', 'MB', [sparse])
    if options.json:
        with open(options.json, 'w') as file:
            json.dump({'benchmark': 'basic', 'bytes': n, 'cores': os.cpu_count(), 'rows': rows}, file, indent=1)


main()
