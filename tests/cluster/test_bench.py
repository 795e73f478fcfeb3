#!/usr/bin/env python3
"""bps-bench: its figures are there and consistent, on one machine and over servers. How large they are is not asked."""
import json, os, subprocess, sys, tempfile
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *

BENCH = os.path.join(BUILD, 'daemon', 'bench', 'bps-bench')


def bench(socket, *argv, timeout=120, **more):
    """Runs it and returns (figures, what it printed)."""
    env = {k: v for k, v in os.environ.items() if not k.startswith('BPS_')}
    env.update({'BPS_SOCKET': socket}, **{k: str(v) for k, v in more.items()})
    with tempfile.NamedTemporaryFile('r', suffix='.json') as file:
        done = subprocess.run([BENCH, *map(str, argv), '--json', file.name], env=env, capture_output=True, text=True,
                              timeout=timeout * SCALE)
        assert done.returncode == 0, done.stderr
        return json.load(file), done.stdout


def test_every_operation():
    with Cluster(1) as cluster:
        socket = cluster.daemons[0].socket
        for operation in ('push_pull', 'broadcast', 'all_gather', 'reduce_scatter', 'all_to_all', 'barrier'):
            for memory in ((), ('--copied',)):
                figures, text = bench(socket, 'op', '--ranks', 3, '--operation', operation, '--sizes', '1K,10000', '--tensors', 2,
                                      '--repeats', 3, '--warmup', 1, *memory)
                assert figures['ranks'] == 3 and figures['operation'] == operation
                rows = figures['rows']
                assert len(rows) == (1 if operation == 'barrier' else 2)
                if operation != 'barrier':
                    # Cut down to what three ranks can share: 255 of 256 floats, 2499 of 2500.
                    assert [row['bytes'] for row in rows] == [1020, 9996]
                for row in rows:
                    assert 0 < row['min_us'] <= row['p50_us'] <= row['p99_us'], row
                    assert text.count('\n') >= 2 + len(rows)


def test_counts():
    uprobes = '/sys/bus/event_source/devices/uprobe/type'
    if os.geteuid() or not os.path.exists(uprobes) or not os.path.exists('/sys/kernel/tracing/events'):
        raise Skip('counting takes root and a kernel with tracepoints and uprobes')
    with Cluster(1) as cluster:
        path = os.path.join(BUILD, 'daemon', 'admin') + ':' + os.environ['PATH']
        figures, text = bench(cluster.daemons[0].socket, 'op', '--ranks', 2, '--sizes', '1M', '--repeats', 20, '--count',
                              PATH=path, BPS_ADMIN_SOCKET=cluster.daemons[0].admin)
        row, = figures['rows']
        assert row['parts'] >= 1, row
        assert row['daemon_system_calls_per_part'] > 0, row
        assert row['rank_system_calls_per_operation'] >= 0, row  # none where each answer comes while the rank looks for it
        assert row['daemon_allocations_per_part'] < 1, 'the data path takes memory from the C library'
        assert 0 <= row['copied_per_byte'] <= 1, row  # from where it is kept to each of two results
        assert 'copied/byte' in text


def test_over_servers():
    with Cluster(2, 1) as cluster:
        ranks = []
        for node in range(2):
            env = {**os.environ, 'BPS_SOCKET': cluster.daemons[node].socket, 'BPS_JOB': 'bench', 'BPS_RANK': str(node),
                   'BPS_SIZE': '2', 'BPS_LOCAL_RANK': '0', 'BPS_LOCAL_SIZE': '1', 'BPS_NODE': str(node), 'BPS_NODES': '2'}
            ranks.append(subprocess.Popen([BENCH, 'op', '--sizes', '1M', '--dtype', 'bfloat16', '--reduction', 'average', '--repeats',
                                           '3', '--json', '-'], env=env, stdout=subprocess.PIPE, text=True))
        out = [rank.communicate(timeout=60 * SCALE)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0]
        assert out[1] == '', 'only rank 0 prints'
        assert json.loads(out[0][out[0].index('{'):])['rows'][0]['bytes'] == 1 << 20


def test_ring():
    with Cluster(1) as cluster:
        figures, text = bench(cluster.daemons[0].socket, 'ring', '--repeats', 300, '--warmup', 5, '--pause-us', 100)
        for name in ('post', 'hop_asleep', 'bare_asleep', 'lines_asleep', 'hop_at_once', 'bare_at_once', 'lines_at_once'):
            assert 0 < figures[name]['p50_us'] <= figures[name]['p99_us'], figures
        assert 'both asleep / bare wake-up' in text


def test_replay_of_every_model():
    # Bytes of parameters, as the papers have them; in this file's own arithmetic, padded to 64 bytes a tensor.
    sizes = {'vgg16': 138357544, 'resnet50': 25557032, 'bert-large': 336226108, 'gpt2': 124439808}
    with Cluster(1) as cluster:
        for model, parameters in sizes.items():
            quick = ('--shrink', 1000, '--forward-ms', 1, '--backward-ms', 2, '--update-ms', 0, '--repeats', 2, '--warmup', 1)
            figures, _ = bench(cluster.daemons[0].socket, 'replay', '--ranks', 2, '--model', model, *quick)
            assert figures['compute_ms'] == 3 and figures['step_p50_ms'] >= 3, figures
            assert figures['bytes'] >= 4 * parameters // 1000 - 4 * 400, (figures, parameters)
        figures, _ = bench(cluster.daemons[0].socket, 'replay', '--ranks', 1, '--model', 'gpt2', '--fifo', '--barrier', '--scale',
                           0.001, '--repeats', 1, '--warmup', 1)
        padding = figures['bytes'] - 4 * sizes['gpt2']
        assert 0 <= padding < 148 * 64 and figures['fifo'] and figures['barrier']


def test_sum():
    for memory, more in (('blocks', ()), ('pages', ('--alike',))):
        figures, text = bench('/nonexistent', 'sum', '--rounds', 1, '--bytes', 4096, '--dtype', 'float32', '--inputs', 2,
                              '--inputs', 9, *more)
        assert {row['n_inputs'] for row in figures['results']} == {2, 9}
        assert all(row['gb_s'] > 0 and row['limit_gb_s'] > 0 and row['of_limit'] > 0 for row in figures['results'])
        assert figures['memory'] == memory and memory in text
        assert 'memcpy' in text and 'of the limit' in text


def test_wrong_usage_is_said():
    for argv, words in ((['fly'], 'no command "fly"'), (['op', '--sizes', '4Q'], '"4Q" is not a list of sizes'),
                        (['op', '--sizes', '0'], 'above 0'), (['op', '--operation', 'fly'], 'no "fly"'),
                        (['op', '--sizes', '1K:1M:1'], 'FROM:TO:FACTOR'), (['replay'], 'name a --model'),
                        (['replay', '--model', 'alexnet'], 'no "alexnet"'), (['op', 'more'], '"more" is too much')):
        done = subprocess.run([BENCH, *argv], capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr, (argv, done.stderr)


def test_without_a_daemon():
    env = {**os.environ, 'BPS_SOCKET': '/nonexistent/bps.sock'}
    done = subprocess.run([BENCH, 'op', '--ranks', '2'], env=env, capture_output=True, text=True, timeout=60 * SCALE)
    assert done.returncode == 1 and 'no bps-daemon listens at /nonexistent/bps.sock' in done.stderr


run(globals())
