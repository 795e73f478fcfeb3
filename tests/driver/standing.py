"""Where the full tier stands: tests/full.json and the table of it, tests/full.md, which its runs write.

    python3 -m tests.driver.standing            prints the table
    python3 -m tests.driver.standing --check    fails where tests/full.md has another
"""
import collections, datetime, json, os, re, subprocess, sys

from .build import TOP

FILE = TOP / 'tests/full.json'
PAGE = TOP / 'tests/full.md'
COLUMNS = ['group', 'passed', 'failed', 'flaky', 'skipped', 'seconds', 'cpu_seconds']


def write(outcomes):
    def git(*words):
        return subprocess.run(['git', *words], cwd=TOP, check=True, capture_output=True, text=True).stdout.strip()
    with open('/proc/cpuinfo') as file:
        model = re.search(r'^model name\s*: (.*)$', file.read(), re.M)
    reasons = collections.Counter(reason for outcome in outcomes for reason in outcome.reasons)
    FILE.write_text(json.dumps({
        'commit': git('rev-parse', 'HEAD'), 'changed_since': len(git('status', '--porcelain').splitlines()),
        'machine': f'{os.cpu_count()} processors, {model[1] if model else os.uname().machine}, Linux {os.uname().release}',
        'date': datetime.date.today().isoformat(),
        'groups': [{'group': o.group, 'passed': o.passed, 'failed': o.failed, 'flaky': len(o.flaky), 'skipped': o.skipped,
                    'seconds': round(o.seconds), 'cpu_seconds': round(o.cpu_seconds)} for o in outcomes],
        'not_passed': sorted(failure.name for o in outcomes for failure in [*o.failures, *o.flaky]),
        'skipped': dict(reasons.most_common()),
    }, indent=1) + '\n')
    PAGE.write_text(table())


def table():
    """As Markdown."""
    run = json.loads(FILE.read_text())
    lines = [f'The full tier of {run["date"]}, commit {run["commit"][:7]}, {run["machine"]}:', '',
             '| group | passed | failed | flaky | skipped | s | CPU-s |', '| --- | --- | --- | --- | --- | --- | --- |']
    lines += ['| ' + ' | '.join(str(group[column]) for column in COLUMNS) + ' |' for group in run['groups']]
    return '\n'.join(lines) + '\n'


def main(arguments):
    if arguments == ['--check']:
        if table() in PAGE.read_text():
            return 0
        print(f'{PAGE.name}: its table of the full tier is not that of tests/full.json: python3 -m tests.driver.standing prints it')
        return 1
    print(table(), end='')
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
