"""What a run prints."""
import collections

from .outcome import Outcome


def print_outcomes(outcomes):
    for reason, n in collections.Counter(reason for outcome in outcomes for reason in outcome.reasons).most_common():
        print(f'skipped {n}: {reason}')
    for word, attribute in ('flaky: failed, and passed when run again', 'flaky'), ('failed', 'failures'):
        found = [failure for outcome in outcomes for failure in getattr(outcome, attribute)]
        if found:
            print(f'\n== {word}')
        for failure in found:
            print(f'\n{failure.name}')
            for line in failure.shown():
                print(f'  | {line}')
    print()
    print_table(outcomes)
    print()
    for outcome in outcomes:
        for failure in outcome.flaky:
            print(f'FLAKY {failure.name}')
        for failure in outcome.failures:
            print(f'FAILED {failure.name}')


def print_table(outcomes):
    print(f'{"group":24} {"passed":>7} {"failed":>7} {"flaky":>6} {"skipped":>8} {"s":>6} {"CPU-s":>6}')
    for o in [*outcomes, total(outcomes)]:
        print(f'{o.group:24} {o.passed:7} {o.failed:7} {len(o.flaky):6} {o.skipped:8} {o.seconds:6.0f} {o.cpu_seconds:6.0f}')


def total(outcomes):
    all = Outcome('all')
    for o in outcomes:
        all.count(o.passed, o.failed, o.skipped)
        all.flaky += o.flaky
        all.seconds += o.seconds
        all.cpu_seconds += o.cpu_seconds
    return all
