#!/usr/bin/env python3
"""A short run of scripts/chaos with a fixed seed, and its judge, which must see what it is there to see."""
import importlib.machinery, importlib.util, json, os, subprocess, sys, tempfile
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *

CHAOS = os.path.join(os.path.dirname(os.path.realpath(__file__)), '..', '..', 'scripts', 'chaos')
loader = importlib.machinery.SourceFileLoader('chaos', CHAOS)
chaos = importlib.util.module_from_spec(importlib.util.spec_from_loader('chaos', loader))
sys.dont_write_bytecode = True
loader.exec_module(chaos)
import chaos_elastic as elastic  # noqa: E402


def log(n, change=lambda lines: lines):
    return {('job', 'job.0.err'): change([(r, t, f'{r}{t}') for r in range(n) for t in 'ab'])}


def test_the_judge_sees_it():
    calm = log(5)
    assert chaos.judge(log(5), calm) == ([], []) == chaos.judge(log(3), calm)

    def replaced(at, line):
        return lambda lines: lines[:at] + line + lines[at + 1:]
    for change, n_differing, n_wrong in [
            (replaced(3, [(1, 'b', 'other')]), 1, 0),
            (replaced(3, []), 0, 1),                                       # lost
            (replaced(3, [(1, 'b', '1b'), (1, 'b', '1b')]), 0, 1),         # twice
            (lambda lines: lines[2:4] + lines[:2] + lines[4:], 0, 1),      # out of order
            (lambda lines: [], 0, 1)]:
        differing, wrong = chaos.judge(log(5, change), calm)
        assert (len(differing), len(wrong)) == (n_differing, n_wrong), (differing, wrong)
    assert chaos.judge(log(6), calm)[1], 'a round too many'
    assert chaos.judge(log(5), {})[1], 'nothing to compare with'


def test_a_seed_makes_the_same_schedule():
    kinds = list(chaos.KINDS)
    first = chaos.schedule(7, 100, kinds, True, False)
    assert first == chaos.schedule(7, 100, kinds, True, False) != chaos.schedule(8, 100, kinds, True, False)
    assert {fault['kind'] for fault in first} == set(kinds)
    assert any('point' in fault for fault in first) and not any('point' in f for f in chaos.schedule(7, 100, kinds, False, True))


def need_numpy():
    try:
        import numpy  # noqa: F401
    except ImportError:
        raise Skip('numpy is not installed') from None


def run_chaos(*arguments):
    if SANITIZED and '--elastic' not in arguments:
        raise Skip('Python trainers cannot load a library with a sanitizer')
    need_numpy()
    with tempfile.NamedTemporaryFile(suffix='.json') as file:
        out = subprocess.run([sys.executable, CHAOS, '--json', file.name, *arguments], capture_output=True, text=True, timeout=500)
        print(out.stdout + out.stderr, flush=True)
        assert not out.returncode, f'status {out.returncode}'
        table = json.load(file)
    Cluster.n_rdma += 1  # its own, which go by RDMA alone as well
    if 'rows' in table:
        return table
    for name in ('jobs that ended', 'differing hashes', 'lost or double rounds', 'hangs'):
        assert table.get(name, 0) == 0, table
    assert table['ok'], table
    return table


def elastic_logs(change=lambda logs: None):
    """Of two ranks on two nodes that do three rounds, of which the second is without rank 1 after it has died."""
    from chaos_elastic import Reference
    ref, logs = Reference(), {0: [['begin', '0', '0', '0', '2', '0']], 1: [['begin', '0', '0', '1', '2', '1']]}
    for r, who in enumerate(([0, 1], [0], [0])):
        for t, tensor in enumerate(elastic.TENSORS):
            value = ref.result(r, t, [(identity, identity) for identity in who])
            for identity in who:
                logs[identity].append(['result', str(r), tensor, ref.hash(value), ','.join(map(str, who)), str(3 - len(who)),
                                       str(len(who)), str(identity), str(len(who)), '1'])
            ref.next = [*getattr(ref, 'next', [])[:t], value]
        ref.state = ref.next
        for identity in who:
            logs[identity].append(['done', str(r)])
    change(logs)
    found = elastic.Judge(logs).judge()
    return len(found.differing), len(found.wrong), found.rounds


def test_the_judge_of_elastic_jobs_sees_it():
    need_numpy()
    assert elastic_logs() == (0, 0, 3)

    def change(identity, line, word, value):
        return lambda logs: logs[identity][line].__setitem__(word, value)
    assert elastic_logs(change(0, 1, 3, '0' * 16))[0] == 1, 'ranks have other values'
    assert elastic_logs(change(0, 5, 3, '0' * 16))[0] == 1, 'a value is wrong'
    assert elastic_logs(change(0, 1, 4, '0'))[1] > 0, 'ranks differ about who came'
    assert elastic_logs(change(0, 5, 4, '0,1'))[0] + elastic_logs(change(0, 5, 4, '0,1'))[1] > 0, 'another set'
    assert elastic_logs(change(0, 5, 8, '2'))[1] > 0, 'another number came than is in it'
    assert elastic_logs(change(0, 1, 7, '1'))[1] > 0, 'it is another rank'
    assert elastic_logs(lambda logs: logs[0].pop(4))[1] > 0, 'a round is not done'
    assert elastic_logs(lambda logs: logs[0].insert(5, logs[0][3]))[1] > 0, 'a result comes twice'
    assert elastic_logs(lambda logs: logs[0].clear() or logs[1].clear())[1] > 0, 'no round at all'


def test_an_elastic_job():
    if not os.environ.get('BPS_LONG') and SANITIZED:
        raise Skip('BPS_LONG is not set')
    table = run_chaos('--elastic', '--settled', '--seed', '20261374', '--kills', '9')
    assert table['runs'] > 3 and table['kills'] > 3, table


def test_twenty_faults():
    assert run_chaos('--seed', '20261121', '--kills', '20', '--no-netns')['kills'] >= 8


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
