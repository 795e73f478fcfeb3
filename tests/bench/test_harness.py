#!/usr/bin/env python3
"""What benchmarks work out, without measuring: optima, searched settings, and what a report says of a target."""
import argparse, ast, contextlib, glob, io, json, math, os, sys, tempfile
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
import harness, rivals
from cluster import Skip, run


def test_equal_links_have_the_optimum_of_the_paper():
    for n in range(2, 9):
        for k in range(n + 1):
            t = harness.optimum_of_links_s([50.0] * n, [50.0] * k, 1e3)
            assert math.isclose(t, harness.optimum_s(n, k, 1e3, 50.0)), (n, k, t)


def test_two_nodes_wait_for_the_slower_link():
    """Each sends all that the other sums, and receives the rest, whatever servers there are."""
    for spares in [], [10.0, 1000.0]:
        assert harness.optimum_of_links_s([50.0, 100.0], spares, 1e3) == 20
    assert harness.optimum_of_links_s([50.0], [50.0], 1e3) == 0


def test_a_slow_server_sums_little():
    """Three nodes at 50 sum (t 50 - M) each, the spare server at 5 sums t 5 / 3: together M."""
    t = harness.optimum_of_links_s([50.0] * 3, [5.0], 1e3)
    assert math.isclose(3 * (50 * t - 1e3) + 5 * t / 3, 1e3), t


def test_settings_are_the_best_of_each_question():
    figures = {'': 9, 'a1': 7, 'a2': math.inf, 'a1 b1': 8, 'a1 c1': 5}
    asked = []

    def measure(settings):
        asked.append(' '.join(sorted(key + value for key, value in settings.items())))
        return figures[asked[-1]]

    questions = [[{}, {'a': '1'}, {'a': '2'}], [{}, {'b': '1'}], [{}, {'c': '1'}]]
    assert rivals.tune(questions, measure) == ({'a': '1', 'c': '1'}, 5)
    assert asked == list(figures)
    assert rivals.tune(questions, lambda _: math.inf) == ({}, math.inf)


def test_turns_go_both_ways():
    order = []
    harness.in_turns(3, lambda: order.append('a'), lambda: order.append('b'))
    assert ''.join(order) == 'baabba', order


def test_a_report_says_whether_a_target_is_reached():
    with tempfile.NamedTemporaryFile() as file, contextlib.redirect_stdout(io.StringIO()) as said:
        report = harness.Report('made up', argparse.Namespace(json=file.name, png=None, repeats=3))
        report.heading('somewhere', setting=1)
        report.against('ratio', [3, 1, 2], 4, bound=2.5)
        report.against('error', [3, 1, 2], 2, at_most=True)
        report.close()
        data = json.load(file)
    ratio, error = data.pop('rows')
    assert (ratio['where'], ratio['settings'], ratio['median']) == ('somewhere', {'setting': 1}, 2), ratio
    assert (ratio['target'], ratio['bound'], ratio['reached']) == (4, 2.5, False), ratio
    assert error['reached'] and error['bound'] is None, error
    assert 'target >= 4: missed; at best 2.50\n' in said.getvalue(), said.getvalue()
    assert set(data) == {'benchmark', 'command', 'commit', 'machine', 'load_at_start'}, data


def test_targets_are_declared():
    """The target of a figure is a number or a name, and nothing that is worked out of what was measured."""
    n = 0
    for path in glob.glob(os.path.join(harness.HERE, 'bench_*.py')):
        with open(path) as file:
            calls = [node for node in ast.walk(ast.parse(file.read())) if isinstance(node, ast.Call)]
        for call in calls:
            if getattr(call.func, 'attr', '') == 'against':
                n += 1
                worked_out = [part for part in ast.walk(call.args[2]) if isinstance(part, (ast.Call, ast.BinOp))]
                assert not worked_out, f'{os.path.basename(path)}:{call.lineno}'
    assert n > 20, n


def test_a_ring_rounds_at_each_hop_and_bps_does_not():
    try:
        import bench_accuracy as accuracy
    except ImportError as error:
        raise Skip(str(error)) from None
    np, ref = accuracy.np, accuracy.ref
    # What is exact is so by each way, of parts of whatever size.
    numbers = [np.arange(r, r + 13, dtype=np.float32) for r in range(5)]
    exact = sum(numbers)
    for name, total in accuracy.sums([ref.narrow(ref.BFLOAT16, x) for x in numbers]).items():
        assert (total == exact).all(), name
    # 256, of whose last place 1 is half, which rounds to even, and five times 1. The parts begin with each of them in turn.
    numbers = [np.full(6, 256 if r == 0 else 1, np.float32) for r in range(6)]
    for name, total in accuracy.sums([ref.narrow(ref.BFLOAT16, x) for x in numbers]).items():
        assert total.tolist() == {
            'bps, bfloat16 in and float32 out': [261] * 6,
            'bps, bfloat16 in and out': [260] * 6,
            'a ring in bfloat16': [260, 260, 260, 260, 256, 256],
        }[name], (name, total)


run(globals())
