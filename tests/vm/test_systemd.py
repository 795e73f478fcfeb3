#!/usr/bin/env python3
"""The Debian packages under a real systemd: installed, used, limited, restarted, killed, stopped, upgraded and purged.

Makes the packages and runs itself in a guest of scripts/vm; where none can be booted, or with
BPS_SYSTEMD=nspawn, which is ten times as fast, in a container of scripts/nspawn. Tests in there go through the life of an
installation in order.
"""
import grp, json, os, pwd, re, shlex, shutil, signal, struct, subprocess, sys, tempfile
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..', 'lib'))
from cluster import BUILD, Skip, Trainer, run, wait_for

TOP = os.path.abspath(os.path.join(HERE, '..', '..'))
UNIT, SOCKET = 'bps-daemon.service', 'bps-daemon.socket'
GROUP = '/sys/fs/cgroup/bps.slice'
LONG = 1200  # seconds, on an emulated CPU, of which others may have the most; the whole has a limit of its own
LIMIT = 1800
STEPS = 5  # of a job that goes on

# What the daemon's sandbox lets through to.
DEVICES = '''
import os
def opens(path):
    try:
        os.close(os.open(path, os.O_RDWR))
        return True
    except PermissionError:
        return False
names = ["infiniband/uverbs0", "infiniband/uverbs1", "infiniband/rdma_cm", "hpet"]
print("opens", " ".join(name for name in names if opens("/dev/" + name)))
'''

# A job of alice's: each rank goes on until it finds the file "enough"; every result must be exactly what it has to be.
# It takes its time, and leaves out what takes long to import: on an emulated CPU all else would wait for it.
JOB = '''
import array, os, time
import bps
def tensor(step, more):
    return array.array("f", [(i * (step % 7 + 1)) + more for i in range(1009)]) * 99
bps.init()
rank, size, step, over = bps.rank(), bps.size(), 0, 0
while not over:
    total = bps.push_pull(tensor(step, rank), average=False, name="x")
    expected = array.array("f", [2 * i * (step % 7 + 1) + 1 for i in range(1009)]) * 99
    assert bytes(total) == bytes(expected), (rank, step)
    flag = array.array("i", [rank == 0 and os.path.exists("enough")])
    over = memoryview(bps.push_pull(flag, average=False, name="over"))[0]
    step += 1
    time.sleep(0.1)
    if rank == 0:
        with open("steps.new", "w") as file:
            file.write(str(step))
        os.rename("steps.new", "steps")
bps.shutdown()
print("rank", rank, "of", size, "has seen", step, "steps", flush=True)
'''


def sh(command, check=True):
    out = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         text=True, timeout=LONG)
    assert not check or out.returncode == 0, f'{command}: {out.returncode}\n{out.stdout}'
    return out.stdout


def show(*names, unit=UNIT):
    """Properties of a unit, in one call: they take a while."""
    out = dict(line.split('=', 1) for line in sh(f'systemctl show -p {",".join(names)} {unit}').splitlines())
    return [out[name] for name in names] if len(names) > 1 else out[names[0]]


def pid():
    return int(show('MainPID'))


def active(unit=UNIT):
    return show('ActiveState', unit=unit)


def own_kernel():
    if not GUEST:
        raise Skip('needs a kernel of its own: scripts/vm')


def control(name, group=GROUP):
    with open(f'{group}/{name}') as file:
        return file.read().strip()


def journal():
    """What the daemon and systemd have said about it: one dictionary each."""
    lines = sh(f'journalctl --boot -u {UNIT} -o json --no-pager').splitlines()
    return [json.loads(line) for line in lines if line.startswith('{')]


def logged(text, since=0):
    return any(text in str(entry.get('MESSAGE')) for entry in journal()[since:])


def restarted(before):
    """Until systemd has the next daemon up."""
    def up():
        state, process = show('ActiveState', 'MainPID')
        return state == 'active' and int(process) not in (0, before)
    wait_for('a new daemon is up', up, LONG)


def as_user(user, command):
    return f'setpriv --reuid={user} --regid={user} --init-groups --reset-env sh -c ' + shlex.quote(
        f'cd && export BPS_TIMEOUT={LONG}s BPS_RESTART_TIMEOUT={LONG}s && ' + command)


class Job:
    """Two ranks of alice's; a with-block, at whose end both have to have seen every result right."""

    def __enter__(self):
        self.home = pwd.getpwnam('alice').pw_dir
        for name in ('steps', 'enough'):
            if os.path.exists(f'{self.home}/{name}'):
                os.unlink(f'{self.home}/{name}')
        with open(f'{self.home}/job.py', 'w') as file:
            file.write(JOB)
        self.process = subprocess.Popen(as_user('alice', 'exec bpslaunch -np 2 /usr/bin/python3 job.py'), shell=True,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.goes_on()
        return self

    def steps(self):
        if self.process.poll() is not None:
            raise AssertionError(f'the job has ended: {self.process.communicate()[0]}')
        try:
            with open(f'{self.home}/steps') as file:
                return int(file.read())
        except FileNotFoundError:
            return 0

    def goes_on(self):
        done = self.steps()
        wait_for('the job goes on', lambda: self.steps() > done + STEPS, LONG)

    def __exit__(self, kind, *_):
        if kind:
            sh('pkill --uid alice', check=False)  # the shell that we see has children
            print(self.process.communicate()[0])
            return
        with open(f'{self.home}/enough', 'w'):
            pass
        out = self.process.communicate(timeout=LONG)[0]
        assert self.process.returncode == 0, out
        for rank in (0, 1):
            assert re.search(rf'rank {rank} of 2 has seen \d+ steps', out), out


class Dropin:
    """Settings of the unit for the length of a with-block."""

    def __init__(self, text):
        self.text, self.folder = text, f'/run/systemd/system/{UNIT}.d'

    def __enter__(self):
        os.makedirs(self.folder)
        with open(self.folder + '/test.conf', 'w') as file:
            file.write(self.text)
        sh('systemctl daemon-reload')

    def __exit__(self, *_):
        shutil.rmtree(self.folder)
        sh('systemctl daemon-reload')


def written(noise='|'.join(['/(tmp|var/tmp|var/log|var/cache|vm)/.*', '/var/lib/(dpkg|apt|systemd|man-db|dbus)/.*', '.*/__pycache__/.*',
                             '/etc/(passwd|group|shadow|gshadow|subuid|subgid)-?', '/etc/(ld.so.cache|.*\\.lock|machine-id)'])):
    """The files that this system has made, changed or removed since it started, and folders with a name of ours."""
    found = set()
    for folder, folders, files in os.walk('/vm/changes'):
        paths = {os.path.join(folder, name)[len('/vm/changes'):] for name in files + [name for name in folders if 'bps' in name]}
        found |= {path for path in paths if 'bps' in path or not re.fullmatch(noise, path)}
    return {path for path in found if not path.startswith((TOP + '/', PACKAGES))}


BEFORE = set()


def test_install():
    if os.path.exists('/usr/sbin/policy-rc.d'):
        os.unlink('/usr/sbin/policy-rc.d')  # images of containers have one that forbids packages to start anything
    if os.path.exists('/var/lib/man-db/auto-update'):
        os.unlink('/var/lib/man-db/auto-update')  # each page of this machine would be read
    if GUEST:  # dpkg would read the lists of all packages' files each time, for longer than it works: here it has those of ours
        sh('mkdir -p /run/dpkg/info && cd /var/lib/dpkg && cp -a $(ls -A | grep -vx info) /run/dpkg && cp info/format /run/dpkg/info &&'
           ' mount --bind /run/dpkg /var/lib/dpkg')
    BEFORE.update(written())
    sh(f'dpkg -i {PACKAGES}/*.deb')
    assert active(SOCKET) == 'active' and active() == 'inactive', sh(f'systemctl status {SOCKET} {UNIT}', check=False)
    st = os.stat('/run/bps/bps.sock')
    bps = pwd.getpwnam('bps')
    assert (st.st_uid, st.st_gid, st.st_mode & 0o777) == (bps.pw_uid, bps.pw_gid, 0o660), st
    assert sh('systemctl is-enabled ' + SOCKET).strip() == 'enabled'
    assert sh(f'systemctl is-enabled {UNIT}', check=False).strip() == 'disabled'
    assert '/etc/bps/bps-daemon.conf' in sh("dpkg-query -W -f '${Conffiles}' bps-daemon")
    sh('dpkg --verify bps-daemon libbps-client0 libbps-client-dev python3-bps')
    sh('useradd --create-home --groups bps alice')
    sh('useradd --create-home mallory')
    sh('useradd --create-home --groups bps-admin oscar')


def test_the_first_trainer_brings_it_up():
    with Job():
        state, text, *rest = show('ActiveState', 'StatusText', 'User', 'Slice')
        assert state == 'active' and re.match(r'node \S+, agent server, cluster single', text), (state, text)
        assert rest == ['bps', 'bps.slice'], rest


def test_whoever_is_not_in_the_group_is_refused():
    out = sh(as_user('mallory', '/usr/bin/python3 -c "import bps; bps.init()"'), check=False)
    assert '/run/bps/bps.sock is not for this user: is he in the group bps?' in out, out


def test_operators_have_a_door_of_their_own():
    """Who may train may not operate the daemon, and the other way round."""
    with Job():
        st = os.stat('/run/bps/admin.sock')
        assert (st.st_uid, st.st_gid, st.st_mode & 0o777) == (pwd.getpwnam('bps').pw_uid, grp.getgrnam('bps-admin').gr_gid, 0o660), st
        assert json.loads(sh(as_user('oscar', 'bpsctl --json status')))['source'] == 'single'
        assert len(json.loads(sh('bpsctl --json jobs'))['jobs']) == 1
        for command in 'drain', 'jobs':
            out = sh(as_user('alice', f'bpsctl {command}; echo ended with $?'), check=False)
            assert "it is for operators: root, the daemon's user and the group bps-admin" in out and 'ended with 3' in out, out
        out = sh(as_user('oscar', '/usr/bin/python3 -c "import bps; bps.init()"'), check=False)
        assert 'is not for this user' in out, out


def test_it_has_no_privilege():
    with open(f'/proc/{pid()}/status') as file:
        status = dict(line.rstrip('\n').split(':\t', 1) for line in file if ':\t' in line)
    bps = pwd.getpwnam('bps')
    assert status['Uid'].split() == [str(bps.pw_uid)] * 4 and status['NoNewPrivs'] == '1', status
    assert status['Seccomp'] == '2' and int(status['CapEff'], 16) == int(status['CapBnd'], 16) == 0, status


def test_the_slice_is_in_force():
    own_kernel()
    with open('/proc/meminfo') as file:
        total = int(re.search(r'MemTotal:\s+(\d+)', file.read())[1]) * 1024
    for name, share in (('memory.high', 0.85), ('memory.max', 0.95)):
        assert abs(int(control(name)) - total * share) <= 1 << 20, (name, control(name), total)
    assert control('cpu.weight') == '300'
    assert control('pids.max') == '8192'
    own = f'{GROUP}/{UNIT}'
    assert control('pids.max', own) == '4096'
    process = control('cgroup.procs', own).split()[0]
    with open(f'/proc/{process}/limits') as file:
        limits = {line[:26].strip(): line[26:].split()[0] for line in file}
    assert limits['Max locked memory'] == 'unlimited' and limits['Max open files'] == '1048576', limits
    with open(f'/proc/{process}/oom_score_adj') as file:
        assert file.read().strip() == '-500'


def test_rdma_devices_can_be_opened_and_no_others():
    """A copy of the unit runs DEVICES in the daemon's place."""
    own_kernel()
    with open(f'/lib/systemd/system/{UNIT}') as file:
        unit = file.read()
    unit = unit.replace('Type=notify', 'Type=oneshot')
    unit = re.sub('^ExecStart=.*', 'ExecStart=/usr/bin/python3 /run/devices.py', unit, flags=re.M)
    unit = re.sub('^(Restart|RestartSec|WatchdogSec|Requires)=.*\n', '', unit, flags=re.M)
    for path, text in (('/run/devices.py', DEVICES), ('/run/systemd/system/test-devices.service', unit)):
        with open(path, 'w') as file:
            file.write(text)
    os.chmod('/dev/hpet', 0o666)
    sh('systemctl start test-devices.service')
    out = wait_for('it has said which', lambda: sh('journalctl --quiet --boot -o cat -u test-devices.service -g ^opens', check=False),
                   LONG)
    assert out.split() == ['opens', 'infiniband/uverbs0', 'infiniband/uverbs1', 'infiniband/rdma_cm'], out


def test_the_journal_has_its_fields():
    want = {'PRIORITY': '5', 'SYSLOG_IDENTIFIER': 'bps-daemon', '_SYSTEMD_UNIT': UNIT, '_SYSTEMD_SLICE': 'bps.slice',
            '_UID': str(pwd.getpwnam('bps').pw_uid)}

    def ready():
        return [entry for entry in journal() if str(entry.get('MESSAGE')).startswith('ready: node ')]
    wait_for(f'{want} of {ready()}', lambda: any(want.items() <= entry.items() for entry in ready()), LONG)


def test_restart_kill_and_upgrade_under_a_job():
    upgrade = f'dpkg -i {PACKAGES}/bps-daemon_*.deb {PACKAGES}/libbps-client0_*.deb'
    with Job() as job:
        for command in (f'systemctl restart {UNIT}', f'systemctl kill --kill-who=main -s KILL {UNIT}', upgrade,
                        f'systemctl stop {UNIT}'):  # at which the socket has the next trainer's call start it again
            before = pid()
            sh(command)
            restarted(before)
            job.goes_on()
    assert show('Result') == 'success'


def test_watchdog():
    with Dropin('[Service]\nWatchdogSec=8s\n'):
        sh(f'systemctl restart {UNIT}')
        with Job() as job:
            before, lines = pid(), len(journal())
            os.kill(before, signal.SIGSTOP)
            restarted(before)
            job.goes_on()
        wait_for('systemd says why', lambda: logged('Watchdog timeout', lines), LONG)
    sh(f'systemctl restart {UNIT}')


def test_reload():
    conf = '/etc/bps/bps-daemon.conf'
    before, lines = pid(), len(journal())
    with open(conf) as file:
        text = file.read()

    def reload(line):
        with open(conf, 'w') as file:
            file.write(text + line)
        sh(f'systemctl reload {UNIT}')
    reload('log_level = debug\n')
    wait_for('it has been read', lambda: logged('reload: done', lines), LONG)
    reload('no_such_option = 1\n')
    wait_for('it was refused', lambda: logged('no_such_option', lines), LONG)
    reload('')
    wait_for('it is well again', lambda: sum('reload: done' in str(e.get('MESSAGE')) for e in journal()[lines:]) == 2, LONG)
    assert pid() == before and active() == 'active'


def test_wrong_options_are_not_tried_again():
    with Dropin('[Service]\nExecStart=\nExecStart=/usr/bin/bps-daemon --no-such-option=1\n'):
        sh(f'systemctl restart {UNIT}', check=False)
        wait_for('it has failed', lambda: active() == 'failed', LONG)
        assert show('ExecMainStatus', 'NRestarts') == ['2', '0'], sh(f'systemctl status {UNIT}', check=False)
    sh(f'systemctl start {UNIT}')


def test_stop_waits_for_what_is_under_way():
    """Requests of a job that cannot go on under the next daemon are waited for."""
    folder = tempfile.mkdtemp(prefix='bps-test-', dir='/run')
    os.chmod(folder, 0o777)
    with open(f'{folder}/cluster.conf', 'w') as file:
        for i, node in enumerate('ab'):
            file.write(f'[node {node}]\naddress = 127.77.0.{i + 1}:9690\nroles = agent, server\n')
    cluster = f'--resume=off --cluster=static --cluster-file={folder}/cluster.conf'
    ranks = []
    with Dropin(f'[Service]\nExecStart=\nExecStart=/usr/bin/bps-daemon {cluster} --node=a --drain-timeout=100s\n'):
        try:
            sh(f'systemctl restart {UNIT}')
            sh(f'systemd-run --unit=bps-b -p Type=notify -p User=bps /usr/bin/bps-daemon {cluster} --node=b'
               f' --socket={folder}/b.sock --admin-socket=')
            for rank, socket in enumerate(['/run/bps/bps.sock', f'{folder}/b.sock']):
                ranks.append(Trainer(f't{rank}', folder))
                ranks[rank].call('open', socket, LONG * 1000, seconds=LONG)
            for rank, trainer in enumerate(ranks):
                keys = dict(job='drain', rank=rank, world_size=2, node=rank, local_rank=0, local_size=1, n_nodes=2,
                            timeout_ms=LONG * 1000)
                trainer.send('join', *(f'{key}={value}' for key, value in keys.items()))
            for trainer in ranks:
                trainer.answer(LONG)
            for trainer in ranks:
                trainer.send('tensor', 0, 'x', 2, 4)
            for trainer in ranks:
                trainer.answer(LONG)
            ranks[0].submit(1, 0, struct.pack('4f', 1, 2, 3, 4), out=4)
            before = pid()
            sh(f'systemctl stop --no-block {SOCKET} {UNIT}')
            wait_for('it says so', lambda: show('StatusText').endswith('; stopping, 1 requests under way'), LONG)
            assert active() == 'deactivating' and pid() == before
            ranks[1].submit(1, 0, struct.pack('4f', 10, 20, 30, 40), out=4)
            for trainer in ranks:
                trainer.wait(1, LONG * 1000)
                assert struct.unpack('4f', trainer.result(1)) == (11, 22, 33, 44)
            wait_for('it has stopped', lambda: active() == 'inactive', LONG)
            assert show('Result') == 'success'
        finally:
            for trainer in ranks:
                trainer.kill()
            sh('systemctl stop bps-b.service', check=False)
            shutil.rmtree(folder)
    assert not os.path.exists('/run/bps/bps.sock')


def test_purge_leaves_nothing():
    sh(f'systemctl start {UNIT}')
    daemon = pid()
    sh('dpkg --purge python3-bps libbps-client-dev bps-daemon libbps-client0')
    sh('userdel --remove alice; userdel --remove mallory; userdel --remove oscar', check=False)
    assert not os.path.exists(f'/proc/{daemon}')
    left = written() - BEFORE
    assert not left, sorted(left)
    left = sh("find /run /dev/shm -name 'bps*' -o -name 'libbps*' -o -name 'python3-bps*'")
    assert not left, left
    assert 'bps' not in sh('getent passwd; getent group'), sh('getent passwd; getent group')
    assert not sh("systemctl list-units --all --no-legend 'bps*'"), sh("systemctl list-units --all 'bps*'")


def place():
    """The command that runs another under a systemd of its own, and whether the kernel is its own too."""
    guest, container = TOP + '/scripts/vm', TOP + '/scripts/nspawn'
    reasons = []
    for script in [container] if os.environ.get('BPS_SYSTEMD') == 'nspawn' else [guest, container]:
        out = subprocess.run([script, '--check'], capture_output=True, text=True)
        if out.returncode == 0:
            print(*(f'not in a guest: {reason}' for reason in reasons), sep='\n', end='\n' * bool(reasons), flush=True)
            return [script, *(['--systemd', '--rdma'] if script == guest else []), '--timeout', str(LIMIT), '--'], script == guest
        assert out.returncode == 77, out
        reasons.append(out.stderr.strip())
    print(f'skip all: {"; ".join(reasons)}\n0 passed, 0 failed, 1 skipped')
    sys.exit(77)


def outside():
    command, guest = place()
    packages = os.path.abspath(BUILD) + '/packages'
    subprocess.run([TOP + '/scripts/package', packages], check=True, stdout=subprocess.DEVNULL)
    os.execv(command[0], [*command, '/usr/bin/python3', os.path.abspath(__file__), '--inside', 'guest' if guest else 'container',
                          packages, *sys.argv[1:]])


if sys.argv[1:2] != ['--inside']:
    outside()
GUEST, PACKAGES = sys.argv[2] == 'guest', sys.argv[3]
del sys.argv[1:4]
run(globals())
