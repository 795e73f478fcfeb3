#!/usr/bin/env python3
"""All benchmarks that compare, one after the other; last, each figure that has a target: the target, the best possible, the median.

--json has the JSON of each. --results writes tests/bench/results/NAME.json, from which scripts/figures makes the tables of pages. When
one fails, the others go on.
"""
import argparse, json, os, subprocess, sys, tempfile

TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')
NAMES = 'basic', 'rivals', 'grid', 'replay', 'priority', 'small', 'fair', 'hetero', 'cost', 'adapter', 'checksum', 'resume'


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0], prog='scripts/bench all')
    parser.add_argument('--json', help='write the figures to this file too')
    parser.add_argument('--only', default=','.join(NAMES), help='some of them: %(default)s')
    parser.add_argument('--repeats', type=int, help='of each, if not its own')
    parser.add_argument('--results', action='store_true', help='write tests/bench/results/NAME.json too')
    options = parser.parse_args()
    found, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        if options.results:
            folder = os.path.join(TOP, 'tests', 'bench', 'results')
            os.makedirs(folder, exist_ok=True)
        for name in options.only.split(','):
            print(f'\n=== {name}', flush=True)
            path = os.path.join(folder, name + '.json')
            more = ['--repeats', str(options.repeats)] if options.repeats else []
            if subprocess.run([os.path.join(TOP, 'scripts', 'bench'), name, '--json', path, *more]).returncode:
                failed.append(name)
                continue
            with open(path) as file:
                found.append(json.load(file))
    print(f'\n{"":76}{"target":>12}{"at best":>10}{"median":>10}')
    for benchmark in found:
        for row in benchmark['rows']:
            if 'target' in row:
                bound = '' if row['bound'] is None else f"{row['bound']:.2f}"
                target = f"{'<=' if row['at_most'] else '>='} {row['target']:g}"
                print(f"{benchmark['benchmark']}: {row['where']}")
                print(f"  {row['name']:74}{target:>12}{bound:>10}{row['median']:>10.2f} {'reached' if row['reached'] else 'missed'}")
    if options.json:
        with open(options.json, 'w') as file:
            json.dump(found, file, indent=1)
    if failed:
        sys.exit(f'bench: failed: {", ".join(failed)}')


main()
