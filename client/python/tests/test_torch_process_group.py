"""torch.distributed over bps. A rank takes seconds to import PyTorch, so each spawn makes many checks."""

import os
import re
import subprocess
import sys

import pytest
from conftest import BUILD, DOUBLES, PYTHON, RANKS, TOP, clean_environment, needs_build
from sshd import free_port

pytest.importorskip("torch")
pytestmark = needs_build
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor",
)


@pytest.fixture
def run_group(run_ranks, tmp_path):
    """As run_ranks, with a file of their own through which the ranks of a group find each other."""

    def run(script, n, *arguments, **more):
        return run_ranks(script, n, tmp_path / f"store-{n}", *arguments, **more)

    return run


ONE_RANK = pytest.param(1, marks=pytest.mark.full_tier("one rank: two pass the same lines"))


@pytest.mark.parametrize("n", [ONE_RANK, 2, pytest.param(4, marks=pytest.mark.full_tier("four ranks, takes 10 s"))])
def test_operations(run_group, n):
    run_group("process_group_ops.py", n)


@pytest.mark.full_tier("three ranks")
def test_operations_through_a_server(run_group):
    checks = ("all_reduce", "moves", "uneven", "reduce", "reduce_scatter", "reduce_scatter_to_float32", "all_to_all")
    checks += ("messages", "many_at_once")
    run_group("process_group_ops.py", 3, *(f"check_{name}" for name in checks), BPS_FORCE_DISTRIBUTED=1)


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.full_tier("four ranks, takes 8 s"))])
def test_training(run_group, n):
    run_group("process_group_train.py", n)


def test_training_through_a_server(run_group):
    run_group("process_group_train.py", 2, "check_ddp", "check_fsdp2", BPS_FORCE_DISTRIBUTED=1)


@pytest.mark.skipif(sys.version_info < (3, 10), reason="torchcomms is for Python 3.10 and newer")
def test_torchcomms(run_ranks):
    """Of a double: the package on PyPI is empty."""
    run_ranks("torchcomms_ops.py", 3, PYTHONPATH=os.pathsep.join([str(PYTHON), str(DOUBLES)]))


def test_checkpoints_beside_a_training_that_imports_nothing_of_bps(run_ranks, tmp_path):
    run_ranks("process_group_checkpoint.py", 2, tmp_path / "checkpoint")


TROUBLES = [
    "ranks_disagree_about_the_size",
    "ranks_disagree_about_the_call",
    "ranks_disagree_about_the_type",
    "one_rank_has_come_to_a_barrier",
    "a_rank_does_not_call",
    "a_wait_of_its_own_length",
    "a_rank_does_not_come",
    "a_rank_has_no_daemon",
    "a_peer_is_gone",
    "destroyed_under_way",
    "a_fork",
    "ctrl_c",
    "exit_with_calls_under_way",
]


def test_troubles(run_group):
    run_group("process_group_trouble.py", 2, *TROUBLES)


def test_a_rank_is_killed(run_launch, tmp_path):
    arguments = (RANKS / "process_group_trouble.py", tmp_path / "store", "a_rank_is_killed")
    done = run_launch("-np", 3, sys.executable, *arguments)
    assert done.returncode == 137 and "AssertionError" not in done.stderr, done.stderr


def test_an_exception(run_launch, tmp_path):
    arguments = (RANKS / "process_group_trouble.py", tmp_path / "store", "an_exception")
    done = run_launch("-np", 2, sys.executable, *arguments)
    assert done.returncode == 1 and "RuntimeError: out of ideas" in done.stderr
    assert "AssertionError" not in done.stderr, done.stderr


def of_each_rank(output, n):
    return sorted(re.findall(r"rank \d of \d over \w+", output)) == [
        f"rank {rank} of {n} over ProcessGroupBps" for rank in range(n)
    ]


@pytest.fixture
def installed(tmp_path):
    """What pip knows of an installed package, beside the package in the source tree: its entry points."""
    entry = re.search(r'"torch.backends": \["(bps = .*)"\]', (PYTHON / "setup.py").read_text())[1]
    folder = tmp_path / "bps-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: bps\nVersion: 0.1.0\n")
    (folder / "entry_points.txt").write_text(f"[torch.backends]\n{entry}\n")
    return os.pathsep.join([str(PYTHON), str(tmp_path)])


@pytest.mark.full_tier("five processes import PyTorch, takes 11 s")
def test_unchanged_script_under_torchrun(run_launch, installed):
    """bpslaunch is there for its daemon alone."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", 3, "--rdzv-backend", "c10d")
    torchrun += ("--rdzv-endpoint", "127.0.0.1:0", RANKS / "process_group_script.py")
    done = run_launch("-np", 1, "--", sys.executable, *torchrun, PYTHONPATH=installed)
    assert done.returncode == 0 and of_each_rank(done.stdout, 3), done.stdout + done.stderr


@pytest.mark.full_tier("three processes import PyTorch, takes 14 s")
def test_unchanged_script_that_spawns():
    """Without bpslaunch, without a daemon until the script starts, and from the source tree, which pip does not know."""
    environment = clean_environment(
        PYTHONPATH=str(PYTHON), MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), BPS_START_DAEMON=1, PYTHONUNBUFFERED=1
    )
    done = subprocess.run(
        [sys.executable, RANKS / "process_group_script.py", "2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and of_each_rank(done.stdout, 2), done.stdout + done.stderr


@pytest.mark.full_tier("four processes import PyTorch, takes 9 s")
@pytest.mark.parametrize("machines", [[0, 1, 0, 1], [0, 0, 1, 0]])
def test_several_machines(tmp_path, monkeypatch, machines):
    """Each a daemon of its own; one has more ranks than the other, and neighbours are apart."""
    monkeypatch.syspath_prepend(str(TOP / "tests" / "lib"))
    monkeypatch.setenv("BPS_BUILD_DIR", str(BUILD))
    import cluster

    monkeypatch.setattr(cluster, "BUILD", str(BUILD))
    ranks = []
    with cluster.Cluster(2) as daemons:
        try:
            for rank, machine in enumerate(machines):
                command = [sys.executable, RANKS / "process_group_machines.py", tmp_path / "store", rank]
                environment = clean_environment(BPS_SOCKET=daemons.daemons[machine].socket)
                ranks.append(
                    subprocess.Popen(
                        [*map(str, command), ",".join(map(str, machines))],
                        env=environment,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )
            for process in ranks:
                output, _ = process.communicate(timeout=1200)
                assert process.returncode == 0 and output.endswith("done\n"), output
        finally:
            for process in ranks:
                process.kill()
                process.wait()


@pytest.mark.full_tier("takes 14 s")
def test_some_of_what_pytorch_tests():
    """All of it: scripts/torch-suite, and again with --as gloo and --as mpi."""
    command = [TOP / "scripts" / "torch-suite", "--as", "gloo", "-np", "3", "--quiet"]
    tests = ["test_all_reduce_sum", "test_isend", "test_DistributedDataParallelCPU", "test_all_gather_into_cat_tensor*"]
    tests += ["test_barrier_timeout_global", "test_ddp_uneven_inputs*", "test_sparse_all_reduce_sum", "test_irecv"]
    environment = clean_environment(BPS_BUILD=BUILD, BPS_PYTHON=sys.executable)
    done = subprocess.run([*command, *tests], env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0 and " 0 failed" in done.stdout, done.stdout + done.stderr
