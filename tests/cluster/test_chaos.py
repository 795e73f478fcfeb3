#!/usr/bin/env python3
"""Short runs of scripts/chaos with fixed seeds."""
import argparse, json, os, shutil, signal, subprocess, sys, tempfile, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
import numpy_or_skip  # noqa: F401
import script

chaos = script.load('chaos')


def need_python_trainers():
    if SANITIZED:
        raise Skip('Python trainers cannot load a library with a sanitizer')


class OneStops(chaos.Run):
    def disturb(self, seconds):
        next(rank for rank in self.ranks if rank.job == 'c').signal(signal.SIGSTOP)
        end = time.monotonic() + seconds
        self.progress(lambda: time.monotonic() > end)


def test_a_job_that_hangs_beside_others_ends_the_run():
    need_python_trainers()
    args = argparse.Namespace(no_netns=True, source='coordinator', longest=3 * SCALE, python=sys.executable)
    with OneStops(args) as run:
        run.train(DEADLINE)
    assert run.hangs and all(hang.startswith('c.') for hang in run.hangs), run.hangs


def run_chaos(*arguments):
    if '--elastic' not in arguments:
        need_python_trainers()
    if not has_failpoints() and '--stalls' not in arguments:
        arguments += '--without-failpoints',
    with tempfile.NamedTemporaryFile(suffix='.json') as file:
        out = subprocess.run([sys.executable, chaos.__file__, '--json', file.name, *arguments], capture_output=True, text=True, timeout=500)
        print(out.stdout + out.stderr, flush=True)
        assert not out.returncode, f'status {out.returncode}'
        table = json.load(file)
    Cluster.n_rdma += 1  # its own, which go by RDMA alone as well
    if 'rows' in table:
        return table
    for name in ('jobs that ended', 'differing results', 'lost or double rounds', 'hangs'):
        assert table.get(name, 0) == 0, table
    assert table['ok'], table
    return table


def test_an_elastic_job():
    if not os.environ.get('BPS_LONG') and SANITIZED:
        raise Skip('BPS_LONG is not set')
    table = run_chaos('--elastic', '--settled', '--seed', '20261374', '--kills', '9')
    assert table['runs'] > 3 and table['kills'] > 3, table


def test_twenty_faults():
    table = run_chaos('--seed', '20261121', '--kills', '20', '--no-netns')
    assert table['kills'] >= 8 and table['results'] > 1000, table
    assert table['failpoints armed'] > table['of them not met'] or not has_failpoints(), table


def test_stalls_are_measured():
    rows = {row['name']: row['values'] for row in run_chaos('--stalls', '1', '--no-netns')['rows']}
    assert all(len(values) == 1 for name, values in rows.items() if not name.startswith('silent')), rows


def test_a_few_with_etcd_and_links():
    if not os.environ.get('BPS_LONG'):
        raise Skip('BPS_LONG is not set')
    if not shutil.which('etcd'):
        raise Skip('etcd-server is not installed')
    run_chaos('--seed', '20261121', '--kills', '8', '--source', 'etcd')


def test_everything_for_long():
    if not os.environ.get('BPS_LONG'):
        raise Skip('BPS_LONG is not set')
    run_chaos('--seed', '20261121', '--kills', '60')


run(globals())
