#!/usr/bin/env python3
"""scripts/rdma-check on both doubles: memory of a GPU, and in words what there is not. Its figures are not asked for."""
import os, re, subprocess, sys, tempfile
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')
FAKEVERBS = os.path.join(BUILD, 'tests', 'fakeverbs')


def check(*argv, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(('FAKE', 'BPS_')) and k != 'LD_LIBRARY_PATH'}
    done = subprocess.run([os.path.join(ROOT, 'scripts', 'rdma-check'), '--double', '--build', BUILD, '--parts', '40', *argv],
                          env={**clean, **env}, capture_output=True, text=True, timeout=120 * SCALE)
    assert done.returncode == 0, f'{done.returncode}: {done.stdout}{done.stderr}'
    return done.stdout


def test_rows_of_gpu_memory():
    for ordering in ({}, {'FAKECUDA_RDMA': 'unordered'}):
        rows = dict(line.split()[1:] for line in check(**ordering).splitlines() if line.startswith('gpu '))
        assert set(rows) == {'registration_us', 'host_registration_us', 'host_to_host_mib_s', 'gpu_to_host_mib_s',
                             'host_to_gpu_mib_s', 'gpu_to_gpu_mib_s', 'bytes_copied_per_byte'}, rows
        assert all(float(value) > 0 for name, value in rows.items() if name.endswith('mib_s')), rows
        assert rows['bytes_copied_per_byte'] == '0', rows


def test_what_there_is_not_is_said():
    for env, words in (
            ({'FAKECUDA_DEVICES': '0'}, 'the driver does not start: cuInit: CUDA_ERROR_NO_DEVICE'),
            ({'FAKECUDA_RDMA': 'none'}, 'the driver has no dma-bufs of its memory'),
            ({'FAKECUDA_FAIL': 'cuMemGetHandleForAddressRange:0:801'}, 'cuMemGetHandleForAddressRange: CUDA_ERROR_NOT_SUPPORTED'),
            ({'FAKE_FAIL': 'ibv_reg_dmabuf_mr:95'}, 'its dma-buf cannot be registered: Operation not supported'),
            ({'LD_LIBRARY_PATH': os.path.join(FAKEVERBS, 'old')}, 'the rdma-core here has no ibv_reg_dmabuf_mr, 34 has it')):
        text = check(**env)
        assert re.search('^gpu left out: .*' + re.escape(words), text, re.M), text
        assert 'mib_s' not in text, text


def test_perftest_beside_it():
    """Whose help ends with 1, also where it was built with CUDA."""
    for options, words in (('--use_cuda_dmabuf', '1234.50'), ('', 'left out: the one here was built without CUDA (--use_cuda_dmabuf)')):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, 'ib_write_bw')
            with open(path, 'w') as out:
                out.write(f"""#!/bin/sh
case "$*" in
--help) echo 'Usage: {options}' && exit 1 ;;
*' --use_cuda=0 --use_cuda_dmabuf 127.0.0.1') echo ' 131072 40 1300.00 1234.50 0.009' ;;
esac
""")
            os.chmod(path, 0o755)
            rows = check(PATH=f'{folder}:{os.environ["PATH"]}').splitlines()
            assert [row for row in rows if row.startswith('ib_write_bw')] == ['ib_write_bw gpu_to_gpu_mib_s ' + words], rows


def test_parts_that_always_go_by_the_host():
    assert 'gpu left out: parts up to 1024 bytes go by the host' in check('--part', '1024')


run(globals())
