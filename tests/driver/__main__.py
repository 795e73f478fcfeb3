"""Runs the tests: scripts/test, which has set up what this needs, says how. Arguments: gate, full, "names" NAME..., or "changed" [COMMIT]."""
import subprocess, sys, time

from . import select, standing
from .build import BuildError
from .group import kill_running, together
from .leftovers import run_folder, take_signals
from .outcome import Outcome
from .report import print_outcomes, total
from .tiers import TIERS

MAX_AGAIN, MAX_FLAKY = 2, 3
BEGAN = time.monotonic()


def say(text):
    print(f'\n== {text}   ({time.monotonic() - BEGAN:.0f} s)', flush=True)


def chosen(how, *words):
    if how == 'names':
        return select.by_names(words)
    return select.by_change(*words or [None]) if how == 'changed' else TIERS[how]()


def run_groups(lists):
    outcomes = []
    for groups in lists:
        say(', '.join(group.name for group in groups))
        outcomes += (done := [*unmade(groups), *together(groups)])
        for outcome in done:
            print(f'{outcome.group}: {outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped, '
                  f'{outcome.seconds:.0f} s')
            for failure in outcome.failures:
                print(f'failed: {failure.name}', flush=True)
    return outcomes


def unmade(groups):
    """Takes out those that cannot be built, and returns an outcome of each."""
    outcomes = []
    for group in groups[:]:
        try:
            group.make()
        except (BuildError, subprocess.CalledProcessError, OSError) as error:
            groups.remove(group)
            outcomes.append(Outcome(group.name))
            outcomes[-1].fail(f'{group.name}: build', str(error), lambda: (False, 'a build is not tried again'))
    return outcomes


def run_again(outcomes):
    """What failed, each by itself, while nothing else runs. Where so much failed that it would be red all the same, nothing is."""
    failures = [(outcome, failure) for outcome in outcomes for failure in outcome.failures]
    if not failures or len(failures) > MAX_FLAKY:
        return
    say('what failed, again')
    for outcome, failure in failures:
        for _ in range(MAX_AGAIN):
            if failure.is_verdict():
                print(f'{failure.name}: not again: this is no matter of chance', flush=True)
                break
            passed, log = failure.again()
            print(f'{failure.name}: {"passed" if passed else "failed"}', flush=True)
            if passed:
                outcome.forgive(failure)
                break
            failure.log += f'\n-- again\n{log}'


def is_green(all):
    return all.passed and not all.failed and len(all.flaky) <= MAX_FLAKY


def main(arguments):
    take_signals(kill_running)
    try:
        with run_folder():
            outcomes = run_groups(chosen(*arguments))
            run_again(outcomes)
    except (select.Unknown, BuildError) as error:
        print(f'test: {error}', file=sys.stderr)
        return 2
    if arguments[0] == 'full':
        standing.write(outcomes)
    print_outcomes(outcomes)
    all = total(outcomes)
    print(f'{all.passed} passed, {all.failed} failed, {all.skipped} skipped')
    return 0 if is_green(all) or not outcomes else 1  # nothing depends on what has changed


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
