"""What came of a group of tests: numbers, failures, reasons for skips. Knows nothing of how tests are run."""
import dataclasses, json, re, xml.etree.ElementTree as xml
from collections.abc import Callable

LINES = 30  # of a log that are shown
COUNT = re.compile(r'^(\d+) passed, (\d+) failed, (\d+) skipped$', re.M)
# Lines of a log that are shown wherever they stand.
LOUD = re.compile(r'^tests/\S+:\d+: |^process still runs|ERROR: \w+Sanitizer|WARNING: ThreadSanitizer|runtime error:')
# A failure that says one of these is a verdict, however seldom it comes: what a sanitizer found, wrong bits, a crash.
VERDICT = re.compile(r'''
    ERROR:\ (\w+Sanitizer|libFuzzer) | WARNING:\ ThreadSanitizer | runtime\ error: |
    differ\ in\ \d+\ bytes | bytes\ differ\ from\ the\ reference | of\ the\ reference\ \d+,\ differ |
    wrong\ values | round\ \d+\ is\ wrong | got\ different\ results | is\ not\ the\ reduction\ over |
    Arrays\ are\ not | Not\ equal\ to\ tolerance | Tensor-likes\ are\ not | Scalars\ are\ not | torch\.equal\( | array_equal\( |
    signal\ (4|6|7|8|11)\b | ended\ with\ (status\ )?-(4|6|7|8|11)\b | Segmentation\ fault | Fatal\ Python\ error
''', re.X)


@dataclasses.dataclass
class Failure:
    name: str  # "PROGRAM: TEST", or pytest's node
    log: str
    again: Callable[[], tuple[bool, str]]  # runs the test alone; whether it passed, and its log

    def is_verdict(self):
        return bool(VERDICT.search(self.log))

    def shown(self):
        lines = self.log.splitlines()
        return [line for line in lines[:-LINES] if LOUD.search(line)] + lines[-LINES:]


@dataclasses.dataclass
class Outcome:
    group: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list[Failure] = dataclasses.field(default_factory=list)
    reasons: list[str] = dataclasses.field(default_factory=list)  # of what was skipped
    flaky: list[Failure] = dataclasses.field(default_factory=list)  # failed, and passed when run again; among the passed
    seconds: float = 0
    cpu_seconds: float = 0

    def count(self, passed, failed, skipped):
        self.passed, self.failed, self.skipped = self.passed + passed, self.failed + failed, self.skipped + skipped

    def fail(self, name, log, again):
        self.count(0, 1, 0)
        self.failures.append(Failure(name, log, again))

    def forgive(self, failure):
        """A failure that did not come again."""
        self.failures.remove(failure)
        self.flaky.append(failure)
        self.count(1, -1, 0)

    def add_program(self, test, again):
        """One line of meson's testlog.json. again(names): runs the program with these arguments."""
        out, errors = test.get('stdout') or '', test.get('stderr') or ''
        good = test['result'] in ('OK', 'SKIP', 'EXPECTEDFAIL')
        program = test['name'].rpartition(' / ')[2]
        self.reasons += re.findall(r'^skip +(?:\S+: )?(.*)$', out, re.M | re.I)
        own = COUNT.findall(out)
        if own:
            passed, failed, skipped = map(int, own[-1])
            self.count(passed, 0, skipped)
        else:
            self.count(test['result'] == 'OK', 0, test['result'] == 'SKIP')
        if good:
            return
        names = re.findall(r'^FAIL (\S*?)(?::.*)?$', out, re.M)
        log = '\n'.join([line for line in out.splitlines() if not re.match(r'ok +\w', line)] + errors.splitlines())
        for name in names:
            self.fail(f'{program}: {name}', log, lambda name=name: again([name]))
        if not names:  # it died before it could count, or a sanitizer spoke at its end
            code = test.get('returncode') or 0
            how = f'signal {-code}' if code < 0 else f'exit status {code}'
            self.fail(program, f'{log}\n{test["result"].lower()}, {how}', lambda: again([]))

    def add_suite(self, path, again):
        """A junit file of pytest. again(node): runs one test."""
        for case in xml.parse(path).getroot().iter('testcase'):
            bad = [child for child in case if child.tag in ('failure', 'error')]
            skip = case.find('skipped')
            # A module that cannot be imported has no class.
            file = case.get('classname').replace('.', '/') + '.py' if case.get('classname') else ''
            node = f'{file}::{case.get("name")}' if file else case.get('name')
            if bad:
                log = '\n'.join(child.text or '' for child in case if child.tag != 'skipped')
                self.fail(node, log, lambda node=node: again(node))
            else:
                self.count(skip is None, 0, skip is not None)
            if skip is not None:
                self.reasons.append(skip.get('message'))


def read_testlog(path):
    with open(path) as file:
        return [json.loads(line) for line in file]
