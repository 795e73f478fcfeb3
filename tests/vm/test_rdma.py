#!/usr/bin/env python3
"""RDMA on two soft-RoCE devices, in a guest of scripts/vm: the contract of transport/, and a cluster's jobs."""
import os, re, subprocess, sys
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


NOT_IN_SOFTWARE = 'soft-RoCE does not look at the bounds of a window'


def passed(out, may_skip=()):
    """How many tests passed in each run; none failed, and what was skipped was so for these reasons."""
    skipped = [line.partition(': ')[2] for line in out.splitlines() if line.startswith('skip ')]
    assert set(skipped) <= set(may_skip), skipped
    totals = [list(map(int, words)) for words in re.findall(r'^(\d+) passed, (\d+) failed, (\d+) skipped$', out, re.M)]
    assert not sum(failed for _, failed, _ in totals) and sum(n for _, _, n in totals) == len(skipped), out[-3000:]
    return [n for n, _, _ in totals]


def test_contract_and_what_rdma_adds():
    out = guest('export BPS_TEST_RDMA="$RDMA_A $RDMA_B"; cd "$BPS_BUILD_DIR" && '
                'tests/contract/test-contract-transport-rdma && tests/unit/transport/test-transport-rdma')
    totals = passed(out, [NOT_IN_SOFTWARE])
    assert len(totals) == 2 and min(totals) > 10, out[-3000:]


def test_jobs_of_a_cluster():
    """A selection of the cluster tests; each file can be run so, all of them take half an hour."""
    out = guest('export BPS_TEST_RDMA="$RDMA_A $RDMA_B" BPS_TEST_SCALE=4; cd "$BPS_TESTS/cluster" && '
                f'{sys.executable} test_bits.py part_size && {sys.executable} test_failures.py dead_server dead_agent')
    totals = passed(out)
    assert totals == [1, 2], out[-3000:]


run(globals())
