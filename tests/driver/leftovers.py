"""The folders of a run, where all lies that its tests make outside of the tree, and the end of what a killed run has left.

A run holds the lock of its folder as long as it lives, which the kernel lets go of when it does not, after a reboot as well. Tests
find the folder as TMPDIR. By that name their processes are found, and scripts/netns notes there what it makes.
"""
import contextlib, fcntl, glob, os, shutil, signal, subprocess, tempfile

from .build import TOP

PREFIX = 'bps-run-'
PLACES = ['/tmp', '/dev/shm']  # tests/lib/cluster.py uses the second, under the same name


_folder = None  # of this run


def take_signals(let_go):
    """A run that is asked to end calls let_go() and removes its folder first. It ends in the handler: an exception, wherever the main thread
    is just then, may leave locks of the interpreter's held, for which other threads wait. Handlers are not inherited, while a shell has
    what it runs in the background ignore SIGINT and SIGQUIT, and so would each child of the run that a test interrupts."""
    def end(number, _):
        let_go()
        if _folder:
            remove(_folder)
        os._exit(128 + number)
    for number in signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, end)


@contextlib.contextmanager
def run_folder():
    """Sweeps, and makes the folders of this run: for the length of a with-block, TMPDIR."""
    global _folder
    sweep()
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=PLACES[0])
    os.chmod(folder, 0o755)  # tests become other users
    with open(os.path.join(folder, 'lock'), 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        memory = os.path.join(PLACES[1], os.path.basename(folder))
        with contextlib.suppress(FileNotFoundError):
            os.mkdir(memory)
        before = os.environ.get('TMPDIR')
        os.environ['TMPDIR'] = folder
        _folder = folder
        try:
            yield folder
        finally:
            _folder = None
            if before is None:
                del os.environ['TMPDIR']
            else:
                os.environ['TMPDIR'] = before
            remove(folder)


def sweep():
    """Ends what dead runs have left: processes, network namespaces, folders. Never those of a living run."""
    for folder in glob.glob(f'{PLACES[0]}/{PREFIX}*'):
        try:
            with open(os.path.join(folder, 'lock'), 'w') as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                print(f'{folder}: left by a run that was killed; removed', flush=True)
                remove(folder)
        except BlockingIOError:
            pass  # that run lives
        except (FileNotFoundError, PermissionError):
            pass  # being made, or somebody else's


def remove(folder):
    for pid in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for note in glob.glob(f'{folder}/netns-*'):
        prefix = os.path.basename(note).removeprefix('netns-')
        subprocess.run([TOP / 'scripts/netns', 'down'], env={**os.environ, 'BPS_NETNS': prefix}, capture_output=True)
    for place in PLACES:
        shutil.rmtree(os.path.join(place, os.path.basename(folder)), ignore_errors=True)


def processes_of(folder):
    """Those whose TMPDIR it is, but for us."""
    wanted, found = f'TMPDIR={folder}'.encode(), []
    for path in glob.glob('/proc/[0-9]*/environ'):
        pid = int(path.split('/')[2])
        with contextlib.suppress(OSError), open(path, 'rb') as file:
            if pid != os.getpid() and wanted in file.read().split(b'\0'):
                found.append(pid)
    return found
