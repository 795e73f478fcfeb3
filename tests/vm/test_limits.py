#!/usr/bin/env python3
"""What the units' limits and devices come to on a kernel that has them all: systemd in a guest of scripts/vm."""
import os, re, shutil, subprocess, sys
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..', 'lib'))
from cluster import BUILD, run, wait_for

TOP = os.path.abspath(os.path.join(HERE, '..', '..'))
VM, DEPLOY = TOP + '/scripts/vm', TOP + '/deploy'
UNIT = 'bps-daemon.service'
LONG = 300  # seconds; each call of systemctl takes some, on an emulated CPU
GROUP = '/sys/fs/cgroup/bps.slice'

# A job of one rank, as a user in the group bps; its result has to be what it put in.
JOB = '''
import numpy as np, bps
bps.init(job="limits", rank=0, size=1, local_rank=0, local_size=1)
x = np.arange(100000, dtype=np.float32)
assert np.array_equal(np.asarray(bps.push_pull(x, average=False, name="x")), x)
bps.shutdown()
print("the sum is right")
'''

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


def sh(command, check=True):
    out = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         text=True, timeout=LONG)
    assert not check or out.returncode == 0, f'{command}: {out.returncode}\n{out.stdout}'
    return out.stdout


def control(name, group=GROUP):
    with open(f'{group}/{name}') as file:
        return file.read().strip()


def install():
    """The units and the daemon of the build; a second copy of the unit runs DEVICES instead."""
    with open(f'{BUILD}/deploy/{UNIT}') as file:
        unit = file.read()
    program = re.search(r'^ExecStart=(.*)$', unit, re.M)[1]
    os.makedirs(os.path.dirname(program), exist_ok=True)
    shutil.copy(f'{BUILD}/daemon/bps-daemon', program)
    devices = unit.replace('Type=notify', 'Type=oneshot').replace(program, '/usr/bin/python3 /run/devices.py')
    devices = re.sub('^(Restart|RestartSec|WatchdogSec|Requires)=.*\n', '', devices, flags=re.M)
    for name, text in (('system/' + UNIT, unit), ('system/bps-devices.service', devices)):
        with open('/etc/systemd/' + name, 'w') as file:
            file.write(text)
    for name in ('bps-daemon.socket', 'bps.slice'):
        shutil.copy(f'{DEPLOY}/{name}', '/etc/systemd/system')
    sh(f'systemd-sysusers {DEPLOY}/bps-daemon.sysusers')
    with open('/run/devices.py', 'w') as file:
        file.write(DEVICES)
    sh('useradd --no-create-home --groups bps alice')
    sh('systemctl daemon-reload')


def test_the_daemon_comes_up_and_sums():
    install()
    sh(f'systemctl start {UNIT}')
    with open('/run/job.py', 'w') as file:
        file.write(JOB)
    environment = f'PYTHONPATH={TOP}/client/python BPS_LIBRARY={BUILD}/client/libbps_client.so.0 BPS_TIMEOUT={LONG}s'
    out = sh(f'setpriv --reuid=alice --regid=alice --init-groups env {environment} /usr/bin/python3 /run/job.py')
    assert 'the sum is right' in out, out


def test_the_slice_is_in_force():
    with open('/proc/meminfo') as file:
        total = int(re.search(r'MemTotal:\s+(\d+)', file.read())[1]) * 1024
    for name, share in (('memory.high', 0.85), ('memory.max', 0.95)):
        assert abs(int(control(name)) - total * share) <= 1 << 20, (name, control(name), total)
    assert control('cpu.weight') == '300'
    assert control('pids.max') == '8192'
    own = f'{GROUP}/{UNIT}'
    assert control('pids.max', own) == '4096'
    pid = control('cgroup.procs', own).split()[0]
    with open(f'/proc/{pid}/limits') as file:
        limits = {line[:26].strip(): line[26:].split()[0] for line in file}
    assert limits['Max locked memory'] == 'unlimited' and limits['Max open files'] == '1048576', limits
    with open(f'/proc/{pid}/oom_score_adj') as file:
        assert file.read().strip() == '-500'


def test_rdma_devices_can_be_opened_and_no_others():
    os.chmod('/dev/hpet', 0o666)
    sh('systemctl start bps-devices.service')
    out = wait_for('it has said which', lambda: sh('journalctl --quiet --boot -o cat -u bps-devices.service -g ^opens', check=False),
                   LONG)
    assert out.split() == ['opens', 'infiniband/uverbs0', 'infiniband/uverbs1', 'infiniband/rdma_cm'], out


def outside():
    out = subprocess.run([VM, '--check'], capture_output=True, text=True)
    if out.returncode == 77:
        print(f'skip all: {out.stderr.strip()}\n0 passed, 0 failed, 1 skipped')
        sys.exit(77)
    sys.exit(subprocess.run([VM, '--systemd', '--rdma', '--timeout', '900', '--', '/usr/bin/python3',
                             os.path.abspath(__file__), '--inside', *sys.argv[1:]]).returncode)


if sys.argv[1:2] != ['--inside']:
    outside()
del sys.argv[1]
run(globals())
