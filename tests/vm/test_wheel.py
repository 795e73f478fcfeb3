#!/usr/bin/env python3
"""The wheel of scripts/wheel: what a newcomer does, in an environment and in a container with Python in them and nothing else."""
import glob, os, re, shutil, subprocess, sys, tempfile, time
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..', 'lib'))
from cluster import Skip, run

TOP = os.path.abspath(os.path.join(HERE, '..', '..'))
ALICE = 4321
LONG = 1200

# The gradients of each rank's own points, averaged. Plain Python: nothing else is installed.
TRAIN = '''
import array, os, random, time
import bps
bps.init()
points = random.Random(bps.rank())
w = array.array("f", [0, 0])
for step in range(50):
    loss, g = 0.0, array.array("f", [0, 0])
    for _ in range(100):
        x = points.uniform(-1, 1)
        error = w[0] * x + w[1] - (3 * x + 1)
        loss += error * error / 100
        g[0] += 2 * error * x / 100
        g[1] += 2 * error / 100
    g = bps.push_pull(g, average=True, name="g")
    w = array.array("f", [w[0] - 0.3 * g[0], w[1] - 0.3 * g[1]])
    if step % 49 == 0:
        print(f"step {step} loss {loss:.4f} after {time.time() - float(os.environ['BEGAN']):.1f} s", flush=True)
assert abs(w[0] - 3) < 0.1 and abs(w[1] - 1) < 0.1, w
bps.shutdown()
print("trained")
'''


def done(command, **keys):
    """What it printed; it must end well."""
    out = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LONG, **keys)
    assert out.returncode == 0, f'{command}: status {out.returncode}\n{out.stdout}'
    return out.stdout


def wheel():
    if not wheel.path:
        made = done([os.path.join(TOP, 'scripts', 'wheel'), work + '/wheels'])
        wheel.path = made.split()[-1]
        glibc = re.search(r'-py3-none-manylinux_2_(\d+)_', wheel.path)
        assert glibc and int(glibc[1]) <= 36, f'{wheel.path}: Debian 12 has glibc 2.36'
    return wheel.path


wheel.path = None


def train(folder, before=()):
    """The two commands, with nothing of this machine's environment. Returns what they printed."""
    with open(folder + '/train.py', 'w') as file:
        file.write(TRAIN)
    shutil.copy(wheel(), folder)
    name = os.path.basename(wheel())
    inside = '/home' if before else folder
    out = done([*before, '/usr/bin/env', '-i', 'PATH=/usr/bin:/bin', 'HOME=' + inside, f'BEGAN={time.time()}', '/bin/sh', '-euc', f'''
        cd {inside}
        python3 -m venv v
        v/bin/pip install --quiet --no-index {name}
        v/bin/bpslaunch -np 4 v/bin/python train.py
        v/bin/bpsctl --version
        v/bin/bps-bench --version || v/bin/bps-bench --help
        v/bin/bpslaunch --check-build
    '''])
    first = re.findall(r'step 0 loss \S+ after (\S+) s', out)
    print(f'     from nothing to the first loss on all of 4 ranks: {max(map(float, first))} s')
    for rank in range(4):
        assert re.search(rf'^\[{rank}\] step 0 loss \d', out, re.M) and f'[{rank}] trained' in out, out
    for part in ('libbps_client', 'bps-daemon', 'bpsctl'):
        assert re.search(rf'\[X\] {part}  \(.*/_bundled/', out), out
    return out


def test_an_environment_with_nothing_else():
    folder = work + '/environment'
    os.mkdir(folder)
    train(folder)
    (bundled,) = glob.glob(folder + '/v/lib/python3*/site-packages/bps/_bundled/bps-daemon')
    libraries = done(['ldd', bundled])
    assert re.search(r'libgrpc\S* => \S*/bps\.libs/', libraries), libraries


def test_a_container_with_nothing_else():
    """Debian's essential packages and Python, no network, an ordinary user."""
    if os.geteuid():
        raise Skip('needs root')
    root = work + '/root'
    made = subprocess.run(['mmdebstrap', '--quiet', '--variant=essential', '--include=python3,python3-venv', '--format=directory',
                           '--aptopt=Acquire::Retries "5"', 'bookworm', root], capture_output=True, text=True)
    if made.returncode and re.search(r'Failed to fetch|Could not (resolve|connect)|apt-get update', made.stderr):
        raise Skip('Debian packages cannot be had: ' + made.stderr.strip().splitlines()[-1])
    assert made.returncode == 0, made.stderr
    assert not os.path.exists(root + '/usr/lib/x86_64-linux-gnu/libgrpc.so.29')
    home = root + '/home'
    os.chown(home, ALICE, ALICE)
    enter = f'''
        mount -t proc proc {root}/proc
        mount -t tmpfs tmpfs {root}/dev
        mknod -m 666 {root}/dev/null c 1 3
        mknod -m 666 {root}/dev/urandom c 1 9
        exec chroot {root} setpriv --reuid={ALICE} --regid={ALICE} --clear-groups --no-new-privs "$@"
    '''
    apart = ['unshare', '--mount', '--pid', '--ipc', '--uts', '--net', '--fork', '--kill-child']
    train(home, [*apart, '/bin/sh', '-euc', enter, 'sh'])


def test_who_lacks_what_building_takes_is_told():
    """pip install of the source tree builds by meson."""
    folder = work + '/empty'
    os.makedirs(folder + '/client')
    shutil.copytree(os.path.join(TOP, 'client', 'python'), folder + '/client/python',
                    ignore=shutil.ignore_patterns('build', '*.egg-info', '__pycache__', 'tests', 'examples'))
    shutil.copy(os.path.join(TOP, 'meson.build'), folder)  # of which meson finds no folder
    done(['/usr/bin/python3', '-m', 'venv', '--system-site-packages', folder + '/v'])
    command = [folder + '/v/bin/pip', 'wheel', '--no-deps', '--no-build-isolation', '--no-index', '-w', folder, folder + '/client/python']
    out = subprocess.run(command, capture_output=True, text=True, timeout=LONG)
    text = out.stdout + out.stderr
    assert out.returncode and 'scripts/deps build' in text and 'BPS_BUNDLE_DIR=none' in text, text
    assert 'bps-0.1.0-py3-none-any.whl' in done(command, env={**os.environ, 'BPS_BUNDLE_DIR': 'none'})


with tempfile.TemporaryDirectory(prefix='bps-test-wheel-') as work:
    os.chmod(work, 0o755)
    run(globals())
