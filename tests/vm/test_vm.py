#!/usr/bin/env python3
"""scripts/vm: what comes back from a guest, what it may touch, and that nothing of it stays."""
import contextlib, os, shutil, signal, subprocess, sys, tempfile
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import Skip, run, wait_for

VM = os.path.join(os.path.dirname(__file__), '..', '..', 'scripts', 'vm')
BOOT = 240  # seconds; 7 on an idle machine


def check():
    out = subprocess.run([VM, '--check'], capture_output=True, text=True, timeout=600)
    if out.returncode == 77:
        raise Skip(out.stderr.strip())
    assert out.returncode == 0, out


@contextlib.contextmanager
def folder():
    """A folder for the guest, and what TMPDIR is for scripts/vm: empty again afterwards."""
    path = tempfile.mkdtemp(prefix='bps-test-vm-')
    try:
        os.mkdir(path + '/tmp')
        os.mkdir(path + '/shared')
        yield path
        assert os.listdir(path + '/tmp') == [], os.listdir(path + '/tmp')
        assert not guests(path), guests(path)
    finally:
        shutil.rmtree(path)


def guests(path):
    """Processes whose command line names the folder: QEMU, timeout, tail."""
    found = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError), open(f'/proc/{pid}/cmdline', 'rb') as file:
            line = file.read().replace(b'\0', b' ').decode(errors='replace')
            if path + '/tmp' in line:
                found.append((pid, line))
    return found


def start(path, *arguments):
    return subprocess.Popen([VM, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env={**os.environ, 'LC_ALL': 'C', 'TMPDIR': path + '/tmp', 'BPS_TEST_WORD': "it's here"})


def ended(process, status):
    out, log = process.communicate(timeout=BOOT + 60)
    assert process.returncode == status, f'{process.returncode}, not {status}:\n{out}\n{log}'
    return out, log


def test_two_guests_at_once():
    check()
    with folder() as path:
        command = f'''
            echo "kernel $(uname -r)"; echo "folder $PWD"; echo "word $BPS_TEST_WORD"; echo "user $(id -u)"; echo oops >&2
            echo written >{path}/shared/file; echo lost >{path}/elsewhere; cat {path}/elsewhere
            sleep 1000 & exit 7'''
        one = start(path, '--timeout', str(BOOT), '--writable', path + '/shared', '--', 'bash', '-c', command)
        two = start(path, '--timeout', str(BOOT), '--rdma', '--', 'sh', '-c', 'ls /sys/class/infiniband; echo $RDMA_A $RDMA_B')
        out, log = ended(one, 7)
        assert f'kernel {os.uname().release}\n' not in out and 'kernel ' in out, out
        for line in (f'folder {os.getcwd()}', "word it's here", 'user 0', 'oops', 'lost'):
            assert line + '\n' in out, (line, out)
        assert 'vm: the command ended with 7' in log and '9p' in log, log
        with open(path + '/shared/file') as file:
            assert file.read() == 'written\n'
        assert not os.path.exists(path + '/elsewhere')
        out, log = ended(two, 0)
        assert out == 'rxe_a\nrxe_b\nrxe_a rxe_b\n', out
        assert log == '', log


def test_the_time_is_up():
    check()
    with folder() as path:
        out, log = ended(start(path, '--timeout', '2', '--', 'sleep', '1000'), 124)
        assert 'not done after 2 s' in log, log


def test_whoever_started_it_dies():
    check()
    for number in (signal.SIGTERM, signal.SIGKILL):
        with folder() as path:
            vm = start(path, '--timeout', str(BOOT), '--', 'sleep', '1000')
            try:
                wait_for('QEMU runs', lambda: any('qemu-system' in line for _, line in guests(path)), 60)
                vm.send_signal(number)
                status = vm.wait(60)
                assert status == (143 if number == signal.SIGTERM else -signal.SIGKILL), status
                wait_for('QEMU has ended', lambda: not guests(path), 60)
            finally:
                vm.kill()
                vm.communicate()
            if number == signal.SIGKILL:  # nobody is left to tidy up
                for name in os.listdir(path + '/tmp'):
                    shutil.rmtree(f'{path}/tmp/{name}')


def test_wrong_arguments():
    for arguments in ([], ['--'], ['--nonsense', '--', 'true'], ['--writable', __file__, '--', 'true']):
        out = subprocess.run([VM, *arguments], capture_output=True, text=True, timeout=60)
        assert out.returncode and out.stderr, out


run(globals())
