#!/usr/bin/env python3
"""What benchmarks work out, without measuring: optima, and what a report says of a target."""
import argparse, contextlib, io, json, math, os, sys, tempfile
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
import harness
from cluster import run


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


run(globals())
