"""Which lines of the agent, the server and the library each tier meets, by clang's source-based coverage:

    python3 -m tests.driver.coverage [TIER...]     runs the tiers (both, without one), and prints the table of what lies there

What needs a build of its own, or is a guest, is left out. A tier's counters are in build-coverage/TIER; those of the full tier count
what the gate has met, too, as all that the gate runs is in it.
"""
import collections, os, re, shutil, subprocess, sys

from .build import TOP, Build
from .group import Programs, Pytest, kill_running, together
from .leftovers import run_folder, take_signals
from .report import print_outcomes, total
from .tiers import TIERS, is_guest

PRODUCT = re.compile(r'^(daemon|client)/')
FAILPOINT = re.compile(r'\bFAILPOINT\w*\("')


def groups_of(tier, build):
    """The tier's groups that can run from this build, each program once."""
    seen, lists = False, []
    for groups in TIERS[tier]():
        mine = []
        for group in groups:
            if isinstance(group, Pytest):
                mine.append(group)
            elif isinstance(group, Programs) and not seen:
                seen, wanted = True, group.wanted
                group.wanted = lambda test, wanted=wanted: wanted(test) and not is_guest(test)
                mine.append(group)
        for group in mine:
            group.build = build
        lists.append(mine)
    return [groups for groups in lists if groups]


def run(tier, build):
    """Runs a tier's groups with counters of their own. Returns how many tests failed."""
    folder = build.folder / tier
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.chmod(0o777)  # tests become other users
    os.environ['LLVM_PROFILE_FILE'] = f'{folder}/%m%c.profraw'
    outcomes = []
    try:
        with run_folder():
            for groups in groups_of(tier, build):
                for group in groups:
                    group.make()
                outcomes += together(groups)
    finally:
        del os.environ['LLVM_PROFILE_FILE']
    print_outcomes(outcomes)
    return total(outcomes).failed


def lines_met(build, *tiers):
    """{file: {line: how often}} of the product, by the counters of these tiers."""
    profile = build.folder / f'{"-".join(tiers)}.profdata'
    raw = [str(path) for tier in tiers for path in (build.folder / tier).glob('*.profraw')]
    subprocess.run(['llvm-profdata', 'merge', '--failure-mode=all', '-o', profile, *raw], check=True)
    objects = [file for target in build.introspect('targets') if target['type'] in ('executable', 'shared library')
               for file in target['filename'] if os.path.exists(file)]
    text = subprocess.run(['llvm-cov', 'export', '--format=lcov', f'--instr-profile={profile}', objects[0],
                           *(f'--object={file}' for file in objects[1:])], check=True, capture_output=True, text=True).stdout
    found = collections.defaultdict(dict)
    for line in text.splitlines():
        word, _, rest = line.partition(':')
        if word == 'SF':
            lines = found[os.path.relpath(rest, TOP)]
        elif word == 'DA':
            number, count = map(int, rest.split(',')[:2])
            lines[number] = lines.get(number, 0) + count
    return {path: lines for path, lines in found.items() if PRODUCT.match(path)}


def failpoints(path, lines):
    """Those of these lines that are places of BPS_FAILPOINTS."""
    text = (TOP / path).read_text().splitlines()
    return {number: count for number, count in lines.items() if FAILPOINT.search(text[number - 1])}


def print_table(gate, full):
    folders, failing = collections.defaultdict(dict), {}
    for path, lines in sorted(full.items()):
        found = {(path, number): (count, gate.get(path, {}).get(number, 0)) for number, count in lines.items()}
        folders[os.path.dirname(path)] |= found
        failing |= {(path, number): found[path, number] for number in failpoints(path, lines)}
    everything = {place: counts for found in folders.values() for place, counts in found.items()}
    print(f'{"":20} {"lines":>7} {"full":>7} {"gate":>7}  gate of full')
    for name, found in [*folders.items(), ('all lines', everything), ('failpoints', failing)]:
        by_full = [by_gate for count, by_gate in found.values() if count]
        met = sum(map(bool, by_full))
        print(f'{name:20} {len(found):7} {len(by_full):7} {met:7} {100 * met / max(len(by_full), 1):7.1f} %')
    for (path, number), (count, by_gate) in failing.items():
        if count and not by_gate:
            print(f'failpoint that only the full tier meets: {path}:{number}')


def main(tiers):
    take_signals(kill_running)
    build, failed = Build('build-coverage'), 0
    for tier in tiers or TIERS:
        failed += run(tier, build)
    without = [tier for tier in TIERS if not any((build.folder / tier).glob('*.profraw'))]
    if without:
        print(f'coverage: no counters of tier {", ".join(without)}: run scripts/coverage {without[0]} too', file=sys.stderr)
        return 1
    print_table(lines_met(build, 'gate'), lines_met(build, 'gate', 'full'))
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
