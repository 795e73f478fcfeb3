#!/usr/bin/env python3
"""RDMA on two soft-RoCE devices, in a guest of scripts/vm: the contract of transport/, and a cluster's jobs."""
import os, subprocess, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import Skip, run

HERE = os.path.dirname(os.path.abspath(__file__))
VM = os.path.join(HERE, '..', '..', 'scripts', 'vm')
BUILD = os.environ['BPS_BUILD_DIR']
os.environ['BPS_TESTS'] = os.path.join(HERE, '..')
LIMIT = 1000  # seconds; some 60 on an idle machine


def guest(command):
    """Runs a command in the guest; its output, once it has ended well."""
    out = subprocess.run([VM, '--check'], capture_output=True, text=True, timeout=600)
    if out.returncode == 77:
        raise Skip(out.stderr.strip())
    assert out.returncode == 0, out
    out = subprocess.run([VM, '--rdma', '--timeout', str(LIMIT), '--', 'sh', '-c', command], stdin=subprocess.DEVNULL,
                         capture_output=True, text=True, timeout=LIMIT + 120)
    assert out.returncode == 0, f'{out.returncode}:\n{out.stdout[-6000:]}\n{out.stderr[-3000:]}'
    return out.stdout


def passed(text):
    """Of the runner's last line: how many tests; none failed, and none was skipped but what soft-RoCE cannot do."""
    words = text.strip().splitlines()[-1].split()
    assert words[1:4] == ['passed,', '0', 'failed,'] and words[4] in ('0', '1'), text[-3000:]
    return int(words[0])


def test_contract_and_what_rdma_adds():
    out = guest('export BPS_TEST_RDMA="$RDMA_A $RDMA_B"; cd "$BPS_BUILD_DIR" && '
                'tests/contract/test-contract-transport-rdma && tests/unit/transport/test-transport-rdma')
    totals = [passed(line) for line in out.splitlines() if ' passed, ' in line]
    assert len(totals) == 2 and min(totals) > 10, out[-3000:]


def test_jobs_of_a_cluster():
    """A selection of the cluster tests; each file can be run so, all of them take half an hour."""
    out = guest('export BPS_TEST_RDMA="$RDMA_A $RDMA_B" BPS_TEST_SCALE=4; cd "$BPS_TESTS/cluster" && '
                f'{sys.executable} test_bits.py part_size && {sys.executable} test_failures.py dead_server dead_agent')
    totals = [passed(line) for line in out.splitlines() if ' passed, ' in line]
    assert totals == [1, 2], out[-3000:]


run(globals())
