"""Build folders: one for each way to compile, made with ccache, of which only what a group of tests needs is built."""
import json, os, pathlib, shutil, subprocess

TOP = pathlib.Path(__file__).resolve().parent.parent.parent

# -O1: to compile a sanitizer's checks at -O2 takes half as long again, and they see the same. Of what a compiler warns that
# follows values less far, the plain build is the judge. -g1: reports of sanitizers name lines, not variables, whose descriptions
# make a daemon three times as large.
SANITIZER = ['-Dfailpoints=true', '-Db_lundef=false', '-Doptimization=1', '-Ddebug=true', '-Dc_args=-g1', '-Dwerror=false']
OPTIONS = {
    'build': ['-Dfailpoints=true'],
    'build-asan': ['-Db_sanitize=address,undefined', *SANITIZER],
    'build-tsan': ['-Db_sanitize=thread', *SANITIZER],
    'build-clang': ['-Dbuildtype=debug'],
    'build-release': ['-Dbuildtype=release', '-Db_lto=true', '-Dtests=false'],
    # A process maps the file of its counters, so that a killed process has counted, too.
    'build-coverage': ['-Dfailpoints=true', '-Dwerror=false', '-Doptimization=1', '-Ddebug=true',
                       '-Dc_args=-fprofile-instr-generate -fcoverage-mapping -mllvm -runtime-counter-relocation=true',
                       '-Dc_link_args=-fprofile-instr-generate'],
    'build-fuzz': ['-Dfuzz=true', '-Db_sanitize=address,undefined', '-Db_lundef=false'],
}
COMPILER = {'build-clang': 'clang', 'build-coverage': 'clang', 'build-fuzz': 'clang'}


def environment(**more):
    """In which what is compiled in one clone is found in ccache by the next."""
    return {**os.environ, 'CCACHE_BASEDIR': str(TOP), 'CCACHE_NOHASHDIR': '1', 'CCACHE_SLOPPINESS': 'locale', **more}


class Build:
    def __init__(self, name):
        self.name, self.folder = name, TOP / name
        self.is_set_up, self.described = False, {}

    def set_up(self):
        """A folder that is there may be scripts/demo's, or an older one, with other options, or one that was never finished."""
        if self.is_set_up:
            return
        options, stamp = OPTIONS[self.name], self.folder / '.options'
        if not (self.folder / 'build.ninja').exists():
            if self.folder.exists():
                shutil.rmtree(self.folder)
            self.run('meson', 'setup', self.folder, *options)
        elif not stamp.exists() or stamp.read_text() != ' '.join(options):
            self.run('meson', 'configure', self.folder, *options)
        self.run('ninja', '-C', self.folder, 'build.ninja')  # which may be older than the meson.build of today
        stamp.write_text(' '.join(options))
        self.is_set_up = True

    def run(self, *command):
        env = environment(**({'CC': COMPILER[self.name]} if self.name in COMPILER else {}))
        done = subprocess.run(command, cwd=TOP, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f'{self.name}: {" ".join(map(str, command))}\n{done.stdout[-6000:]}{done.stderr[-2000:]}')
        return done.stdout

    def make(self, targets=()):
        """Files within the folder; none: all."""
        self.set_up()
        self.run('ninja', '-C', self.folder, *targets)

    def introspect(self, what):
        self.set_up()
        if what not in self.described:
            self.described[what] = json.loads(self.run('meson', 'introspect', self.folder, '--' + what))
        return self.described[what]

    def tests(self):
        """All test programs, by name, as meson describes them."""
        return {test['name']: test for test in self.introspect('tests')}

    def files_of(self, tests):
        """What has to be built for these."""
        files = {target['id']: target['filename'] for target in self.introspect('targets')}
        needed = {self.within(path) for test in tests for id in test['depends'] for path in files.get(id, [])}
        return sorted(needed)

    def within(self, path):
        return os.path.relpath(path, self.folder)


class BuildError(Exception):
    pass
