"""Which tests have a name, and which depend on files that have changed."""
import pathlib, re, subprocess

from .build import TOP, Build
from .group import N_PROCESSORS, Programs, Pytest
from .tiers import PYTHON, is_judged_by_code, suites

PACKAGE = TOP / 'client/python'
C_TEST = re.compile(r'^TEST(?:_\w+)?\((\w+)[,)]', re.M)
PYTHON_TEST = re.compile(r'^def (test_\w+)', re.M)
PYTEST_FILES = sorted([*PACKAGE.glob('tests/test_*.py'), *TOP.glob('tests/driver/test_*.py')])
IMPORT = re.compile(r'^\s*(?:from|import) ([\w.]+)', re.M)
# In which environment a file of the package's tests runs, by what its name begins with; the others need no framework.
ENVIRONMENT = {'test_torch': 'keras-torch', 'test_examples': 'keras-torch', 'test_stacks': 'stacks', 'test_keras': 'keras-torch',
               'test_tensorflow': 'tensorflow', 'test_jax': 'jax', 'test_mxnet': 'mxnet'}
# What tests the files of the package, by the first of these that one lies under. Of C, no test of the package counts as dependent:
# each runs the daemon and the library, as those do that the build knows of.
PACKAGE_TESTS = [
    ('bps/torchcomms', 'test_torch_process_group'), ('tests/doubles/torchcomms', 'test_torch_process_group'),
    ('bps/torch/', 'test_torch'), ('bps/_torch', 'test_torch'), ('bps/tensorflow/', 'test_tensorflow'), ('bps/keras/', 'test_keras'),
    ('bps/jax', 'test_jax'), ('bps/mxnet/', 'test_mxnet'), ('bps/launch.py', 'test_launch'), ('bps/_launch/', 'test_launch'),
    ('examples/stacks/', 'test_stacks'), ('examples/', 'test_examples'), ('bps/', 'test_'),
]


class Unknown(Exception):
    pass


def sources(build):
    """{test program: the source files of its own target, or the script that it is}. Those of libraries that it links are not among them."""
    made_of = {}
    for target in build.introspect('targets'):
        files = {pathlib.Path(path) for group in target['target_sources'] for path in group.get('sources', [])}
        made_of.update({path: files for path in target['filename']})
    found = {}
    for name, test in build.tests().items():
        files = {pathlib.Path(word).resolve() for word in test['cmd'] if word.endswith(('.py', '.sh'))}
        found[name] = files.union(*(made_of.get(word, set()) for word in test['cmd']))
    return found


def by_names(names):
    """Lists of groups, as those of a tier: what has these names. Raises Unknown."""
    build = Build('build-asan')
    programs, files = build.tests(), sources(build)
    plain = set(Build('build').tests()) - set(programs)
    whole, parts, nodes = set(), {}, []
    for name in names:
        found = False
        for program in [*programs, *plain]:
            if name in (program, program.partition(' ')[2]):
                whole.add(program)
                found = True
        for program, paths in files.items():
            for path in paths:
                if path == (TOP / name).resolve():
                    whole.add(program)
                    found = True
                elif path.suffix in ('.c', '.py') and 'tests' in path.parts and name in tests_in(path):
                    parts.setdefault(program, []).append(name)
                    found = True
        for path in PYTEST_FILES:
            if (TOP / name.partition('::')[0]).resolve() == path:
                nodes.append((path, name.partition('::')[2]))
                found = True
            elif name in tests_in(path):
                nodes.append((path, name))
                found = True
        if not found:
            raise Unknown(f'{name}: neither a test program, nor a test, nor a file of tests')
    return programs_of(programs, whole, parts) + pytests(nodes)


def tests_in(path):
    try:
        text = path.read_text()
    except OSError:
        return []
    return (C_TEST if path.suffix == '.c' else PYTHON_TEST).findall(text)


def programs_of(programs, whole, parts):
    """Groups of whole programs, and of some tests of others. Those that a sanitizer cannot judge come from the plain build."""
    groups = []
    for build in 'build-asan', 'build':
        def wanted(test, build=build):
            judged = test['name'] in programs and not suites(test) & {'python', 'vm', 'bench'}
            return (test['name'] in whole or test['name'] in parts) and judged == (build == 'build-asan')
        if any(wanted(test) for test in Build(build).tests().values()):
            only = {name: words for name, words in parts.items() if name not in whole}
            groups.append([Programs(f'C, {build}', 'full', build, wanted, only=only)])
    return groups


def pytests(nodes):
    groups = {}
    for path, name in nodes:
        environment = next((venv for begin, venv in ENVIRONMENT.items() if path.name.startswith(begin)), PYTHON)
        groups.setdefault(environment, []).append(f'{path.relative_to(TOP)}::{name}' if name else str(path.relative_to(TOP)))
    return [[Pytest('Python' if venv == PYTHON else venv, 'full', venv, paths, ['-n', str(N_PROCESSORS)])]
            for venv, paths in groups.items()]


def changed_since(commit):
    """Files that differ from a commit, those that git does not know yet too."""
    def git(*words):
        return subprocess.run(['git', *words], cwd=TOP, check=True, capture_output=True, text=True).stdout.splitlines()
    if commit is None:
        commit = 'HEAD' if git('status', '--porcelain') else 'HEAD^'
    return {TOP / path for path in git('diff', '--name-only', commit) + git('ls-files', '--others', '--exclude-standard')}


def by_change(commit):
    """Lists of groups: what the gate has that depends on files that have changed."""
    changed = changed_since(commit)
    build = Build('build-asan')
    tests = {name: test for name, test in build.tests().items() if is_judged_by_code(test)}
    depends = dependencies(build, tests)
    whole = {name for name in tests if depends[name] & changed}
    nodes = [(path, '') for path in PYTEST_FILES if depends_on(path, changed)]
    print(f'{len(changed)} files have changed, on which {len(whole)} test programs and {len(nodes)} files of the package depend')
    return [[Programs('C, ASan and UBSan', 'quick', 'build-asan', lambda test: test['name'] in whole)]] * bool(whole) + pytests(nodes)


def dependencies(build, tests):
    """{test program: all files in the tree that it is made from, or that it runs}, as ninja and the imports of Python say."""
    headers, at = {}, None
    for line in build.run('ninja', '-C', build.folder, '-t', 'deps').splitlines():
        if line.startswith(' '):
            headers[at].add((build.folder / line.strip()).resolve())
        elif ':' in line:
            at = line.partition(':')[0]
            headers[at] = set()
    inputs, found = {}, {}
    for name, test in tests.items():
        files = set()
        for target in build.files_of([test]):
            if target not in inputs:
                lines = build.run('ninja', '-C', build.folder, '-t', 'inputs', target).split('\n')
                inputs[target] = {(build.folder / line).resolve() for line in lines if line}.union(*(headers.get(line, ()) for line in lines))
            files |= inputs[target]
        scripts = {pathlib.Path(word).resolve() for word in test['cmd'] if word.endswith(('.py', '.sh'))}
        found[name] = files.union(scripts, *(imports(path) for path in scripts))
    return found


def imports(path):
    """The files beside a program in Python, and in tests/lib, that it imports, and those that they do."""
    found, open_paths = set(), [path]
    while open_paths:
        here = open_paths.pop()
        for module in IMPORT.findall(here.read_text()) if here.suffix == '.py' else ():
            for folder in here.parent, TOP / 'tests/lib':
                file = folder / f'{module}.py'
                if file.exists() and file not in found:
                    found.add(file)
                    open_paths.append(file)
    return found


def depends_on(path, changed):
    """Whether a file of the package's tests does: on itself, on what it imports, on a script of ranks/ that it names, by the table."""
    text = path.read_text()
    for file in changed:
        if file == path or file in imports(path):
            return True
        if file.parent == PACKAGE / 'tests/ranks' and file.name in text:
            return True
        if file.is_relative_to(PACKAGE):
            begin = next((tests for under, tests in PACKAGE_TESTS if str(file.relative_to(PACKAGE)).startswith(under)), None)
            if begin and path.name.startswith(begin):
                return True
    return False
