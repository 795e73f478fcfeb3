"""What the driver makes of what tests print: counts, names, and what is never run again."""
import signal
import subprocess
import sys
import time

import pytest

from tests.driver import __main__ as driver
from tests.driver.build import TOP
from tests.driver.outcome import Outcome
from tests.driver.report import total


def program(stdout, result='FAIL', **more):
    return {'name': 'bps:unit / unit base loop', 'stdout': stdout, 'stderr': '', 'result': result, 'returncode': 1, **more}


def outcome_of(test, again=lambda names: (True, '')):
    outcome = Outcome('group')
    outcome.add_program(test, again)
    return outcome


def test_a_program_counts_its_own_tests():
    outcome = outcome_of(program('ok one\nskip two: no moon\n1 passed, 0 failed, 1 skipped\n', 'OK'))
    assert (outcome.passed, outcome.failed, outcome.skipped) == (1, 0, 1)
    assert outcome.reasons == ['no moon'] and not outcome.failures


def test_failures_are_run_again_by_name():
    asked = []
    outcome = outcome_of(program('ok one\nFAIL two: exit status 1\nFAIL three\n1 passed, 2 failed, 0 skipped\n'),
                         lambda names: (asked.append(names), (True, ''))[1])
    assert [failure.name for failure in outcome.failures] == ['unit base loop: two', 'unit base loop: three']
    assert (outcome.passed, outcome.failed) == (1, 2)
    for failure in outcome.failures:
        failure.again()
    assert asked == [['two'], ['three']]


@pytest.mark.parametrize('stdout', ['', 'ok one\n', 'ok one\n1 passed, 0 failed, 0 skipped\n'])
def test_a_program_that_died_has_failed(stdout):
    outcome = outcome_of(program(stdout, returncode=-11))
    assert outcome.failed == 1 and outcome.failures[0].is_verdict()
    assert outcome_of(program(stdout, 'TIMEOUT')).failed == 1


@pytest.mark.parametrize('log', [
    'ERROR: AddressSanitizer: heap-use-after-free', 'x.c:3:4: runtime error: shift', 'WARNING: ThreadSanitizer: data race',
    'tests/unit/a.c:7: a and b differ in 16 bytes', 'FAIL x: signal 11 (Segmentation fault)', 't0 has ended with -6: ',
    'AssertionError: what: 8 bytes differ from the reference (8 bytes) at byte 0'])
def test_what_is_never_run_again(log):
    outcome = Outcome('group')
    outcome.fail('x', log, lambda: pytest.fail('was run again'))
    driver.run_again([outcome])
    assert outcome.failed == 1 and not outcome.flaky


def failing(n, passes_at):
    """n failures, each of which passes when it is run again for the passes_at-th time."""
    outcome = Outcome('group')
    for i in range(n):
        runs = iter(range(1, 100))
        outcome.fail(f'test {i}', 'tests/x.c:1: 1 == 2: 1 and 2', lambda runs=runs: (next(runs) >= passes_at, ''))
    driver.run_again([outcome])
    return outcome


def test_what_passes_again_is_flaky_and_passed():
    for passes_at in 1, 2:
        outcome = failing(3, passes_at)
        assert (outcome.passed, outcome.failed, len(outcome.flaky)) == (3, 0, 3)
        assert driver.is_green(total([outcome]))
    outcome = failing(1, 3)
    assert (outcome.passed, outcome.failed) == (0, 1) and not driver.is_green(total([outcome]))


def test_more_than_three_are_not_run_again():
    outcome = failing(4, 1)
    assert outcome.failed == 4 and not driver.is_green(total([outcome]))


def test_a_crash_when_run_again_ends_it():
    outcome = Outcome('group')
    runs = iter([(False, 'signal 11'), (True, '')])
    outcome.fail('x', 'no answer', lambda: next(runs))
    driver.run_again([outcome])
    assert outcome.failed == 1


def test_nothing_run_is_red():
    assert not driver.is_green(total([]))


def test_junit(tmp_path):
    path = tmp_path / 'x.xml'
    path.write_text('<testsuites><testsuite>'
                    '<testcase classname="client.python.tests.test_a" name="test_one[x y]"><failure>no</failure></testcase>'
                    '<testcase classname="client.python.tests.test_a" name="test_two"><skipped message="no moon"/></testcase>'
                    '<testcase classname="client.python.tests.test_a" name="test_three"/></testsuite></testsuites>')
    asked = []
    outcome = Outcome('group')
    outcome.add_suite(path, lambda node: asked.append(node))
    assert (outcome.passed, outcome.failed, outcome.skipped) == (1, 1, 1) and outcome.reasons == ['no moon']
    outcome.failures[0].again()
    assert asked == ['client/python/tests/test_a.py::test_one[x y]']


def test_tests_get_signals_in_the_background_too():
    code = 'from tests.driver.leftovers import take_signals; from tests.driver.group import kill_running, run; import os; take_signals(kill_running); ' \
        'print(*run(["grep", "SigIgn", "/proc/self/status"], os.environ))'
    before = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    try:
        ignored = subprocess.run([sys.executable, '-c', code], cwd=TOP, capture_output=True, text=True, check=True).stdout
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGQUIT, before[1])
    assert not int(ignored.split()[2], 16) & (1 << signal.SIGINT - 1 | 1 << signal.SIGQUIT - 1), ignored


def test_a_run_that_is_asked_to_end_does_not_wait_for_its_commands(tmp_path):
    code = 'import os, sys; from tests.driver.leftovers import take_signals; from tests.driver.group import *; take_signals(kill_running)\n' \
        'class Sleeper(Group):\n' \
        '    def run(self, outcome): run(["sh", "-c", f"echo > {sys.argv[1]}; exec sleep 1000"], os.environ)\n' \
        'together([Sleeper("a", "gate"), Sleeper("b", "gate")])'
    run = subprocess.Popen([sys.executable, '-c', code, tmp_path / 'begun'], cwd=TOP)
    while not (tmp_path / 'begun').exists():
        time.sleep(0.01)
    run.terminate()
    assert run.wait(120) == 128 + signal.SIGTERM
