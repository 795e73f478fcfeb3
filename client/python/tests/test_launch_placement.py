"""Where bpslaunch takes its place from when something else starts one on each machine; and BytePS's launch lines."""

import os
import signal
import socket
import subprocess
import sys

import pytest
from conftest import BUILD, LAUNCH, clean_environment, needs_build
from sshd import free_port
from test_launch import FAKE, variables

from bps._launch import LaunchError, arguments, byteps, placement

OUTER = (
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MPI_",
    "PET_",
    "DMLC_",
    "BYTEPS_",
    "BPS_NODE",
    "BPS_JOB",
    "BPS_SIZE",
    "JOB_COMPL",
)


def without_outer(environment):
    single = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    return {name: value for name, value in environment.items() if not name.startswith(OUTER) and name not in single}


@pytest.fixture
def outer(monkeypatch):
    """Sets the variables of an outer launcher, and nothing else of the kind."""
    for name in set(os.environ) - set(without_outer(os.environ)):
        monkeypatch.delenv(name)

    def outer(text):
        for pair in text.split():
            monkeypatch.setenv(*pair.split("=", 1))

    return outer


SRUN = "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NODEID=1 SLURM_STEP_NODELIST=n[01-02] "
WORKER = "DMLC_ROLE=worker DMLC_NUM_WORKER=2 DMLC_WORKER_ID=1 DMLC_NUM_SERVER=1 DMLC_PS_ROOT_URI=10.0.0.1 DMLC_PS_ROOT_PORT=9000 "


@pytest.mark.parametrize(
    "text, given, node, nodes, job, coordinator",
    [
        ("", "", 0, 1, None, None),
        ("", "--node 1 --nodes 2 --job j", 1, 2, "j", None),
        ("", "--node 1 --nodes 2 --job j --coordinator a", 1, 2, "j", "a:9691"),
        ("", "--node 1 --nodes 2 --job j --coordinator [fd00::1]:7", 1, 2, "j", "[fd00::1]:7"),
        ("BPS_NODE=1 BPS_NODES=3 BPS_JOB=j", "", 1, 3, "j", None),
        ("BPS_NODES=3 BPS_JOB=j JOB_COMPLETION_INDEX=2", "--coordinator j-0.j", 2, 3, "j", "j-0.j:9691"),
        (SRUN + "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2", "", 1, 2, "slurm-1.0", "n01:15016"),
        (SRUN + "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2", "--coordinator x:1 --job mine", 1, 2, "mine", "x:1"),
        (SRUN + "SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1", "", 0, 1, None, None),
        ("SLURM_JOB_ID=1 SLURM_PROCID=0 SLURM_NODEID=0 SLURM_NNODES=2", "", 0, 1, None, None),  # a batch script
        (
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1 PMIX_NAMESPACE=prte-7@1",
            "--coordinator a",
            1,
            2,
            "prte-7_1",
            "a:9691",
        ),
        ("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALNRANKS=1 BPS_JOB=j", "--coordinator a", 1, 2, "j", "a:9691"),
        ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_SIZE=1", "", 0, 1, None, None),
        ("PET_NNODES=3 PET_NODE_RANK=2 RANK=2 WORLD_SIZE=3 BPS_JOB=j", "", 2, 3, "j", None),
        ("RANK=2 WORLD_SIZE=3", "--job j", 2, 3, "j", None),
        (WORKER, "", 1, 2, "10.0.0.1-9000", "10.0.0.1:9000"),
        ("DMLC_ROLE=worker DMLC_NUM_WORKER=1 DMLC_WORKER_ID=0", "", 0, 1, None, None),
    ],
)
def test_place(outer, text, given, node, nodes, job, coordinator):
    outer(text)
    options = arguments.parse_arguments([*given.split(), "true"])
    assert (options.node, options.nodes, options.job, options.coordinator) == (node, nodes, job, coordinator)


@pytest.mark.parametrize(
    "text, words",
    [
        (SRUN + "SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2", "srun has started 4 bpslaunch on 2 machines"),
        (
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            "mpirun has started 4 bpslaunch",
        ),
        ("BPS_NODES=3", "BPS_NODES is set, but neither BPS_NODE nor JOB_COMPLETION_INDEX is"),
        ("BPS_NODES=three BPS_NODE=1", "BPS_NODES is 'three', which is not a number"),
        ("BPS_NODES=3 BPS_NODE=1", "--nodes needs --job"),
        ("BPS_NODES=3 BPS_NODE=3 BPS_JOB=j", "--node must be at least 0 and less than --nodes"),
        ("DMLC_ROLE=boss", "DMLC_ROLE is 'boss', which is none of worker, server, scheduler, joint"),
        ("DMLC_ROLE=worker", "DMLC_NUM_WORKER is not set, but DMLC_ROLE is"),
        ("DMLC_ROLE=worker DMLC_NUM_WORKER=2", "DMLC_WORKER_ID is not set, but DMLC_ROLE is"),
        ("DMLC_ROLE=worker DMLC_NUM_WORKER=2 DMLC_WORKER_ID=0", "DMLC_ROLE is worker, but DMLC_PS_ROOT_URI is not set"),
        ("DMLC_ROLE=server", "DMLC_ROLE is server, but DMLC_PS_ROOT_URI is not set"),
        ("DMLC_ROLE=scheduler DMLC_PS_ROOT_URI=a", "DMLC_PS_ROOT_PORT is not set, but DMLC_ROLE is"),
        (
            "DMLC_ROLE=scheduler DMLC_PS_ROOT_URI=a DMLC_PS_ROOT_PORT=x",
            "DMLC_PS_ROOT_PORT is 'x', which is not a number",
        ),
    ],
)
def test_one_line_says_what_is_wrong(outer, text, words, capsys):
    outer(text)
    with pytest.raises(SystemExit) as exit:
        arguments.parse_arguments(["true"])
    assert exit.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("bpslaunch: error: ") and words in line


@pytest.mark.parametrize(
    "text, first",
    [("n1", "n1"), ("n[07-09,12],m3", "n07"), ("n[3,5]-ib", "n3-ib"), ("a,b", "a"), ("r1n[1-2]", "r1n1"), ("", None)],
)
def test_first_of_nodelist(text, first):
    assert placement.first_of_nodelist(text) == first


@pytest.mark.parametrize(
    "text, n",
    [
        ("", 1),
        ("BYTEPS_LOCAL_SIZE=3 NVIDIA_VISIBLE_DEVICES=0", 3),
        ("NVIDIA_VISIBLE_DEVICES=0,1,2,3", 4),
        ("NVIDIA_VISIBLE_DEVICES=all", 1),
        ("CUDA_VISIBLE_DEVICES=4,5", 2),
        ("NVIDIA_VISIBLE_DEVICES=GPU-a1,GPU-b2", 2),
    ],
)
def test_ranks_of_a_byteps_worker(outer, text, n):
    outer(WORKER + text)
    options = arguments.parse_arguments(["true"])
    assert options.ranks == n and options.environment["BYTEPS_LOCAL_SIZE"] == str(n)
    assert arguments.parse_arguments(["-np", "7", "true"]).ranks == 7


def test_settings_of_byteps(outer):
    outer(WORKER + "BYTEPS_PARTITION_BYTES=4096000 BYTEPS_FORCE_DISTRIBUTED=1")
    options = arguments.parse_arguments(["-x", "BPS_MIN_SERVERS=5", "true"])
    assert options.environment == {
        "BYTEPS_LOCAL_SIZE": "1",
        "BPS_MIN_SERVERS": "5",
        "BPS_PART_BYTES": "4096000",
        "BPS_FORCE_DISTRIBUTED": "1",
    }
    assert options.bind == "byteps" and not options.sums and not options.coordinator_here
    outer("BYTEPS_NUMA_ON=0 DMLC_ROLE=joint")
    options = arguments.parse_arguments(["true"])
    assert options.bind == "none" and options.sums


def test_address_of_a_server(outer):
    outer("DMLC_INTERFACE=lo DMLC_PORT=7 DMLC_ROLE=server DMLC_PS_ROOT_URI=127.0.0.1 DMLC_PS_ROOT_PORT=9000")
    options = byteps.daemon_options("server", "127.0.0.1:9000", None)
    assert "address=127.0.0.1:7" in options and "roles=server" in options
    outer("DMLC_NODE_HOST=10.1.2.3")
    assert "address=10.1.2.3:7" in byteps.daemon_options("server", "127.0.0.1:9000", None)


@needs_build
def test_scheduler_of_kubernetes_listens_everywhere(start):
    port = free_port()
    more = {
        "DMLC_ROLE": "scheduler",
        "DMLC_PS_ROOT_URI": "localhost",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_USE_KUBERNETES": "1",
    }
    process = start(**more)
    assert process.stdout.readline().startswith(f"bpslaunch: scheduler at localhost:{port}: runs until it is stopped")
    socket.create_connection(("127.0.0.2", port)).close()


def test_no_such_interface(outer):
    outer("DMLC_INTERFACE=nosuch0")
    with pytest.raises(LaunchError, match="no network interface nosuch0 with an IPv4 address; there are: .*lo"):
        byteps.daemon_options("server", "127.0.0.1:9000", None)


def test_ranks_are_told_what_byteps_scripts_read(run_launch, tmp_path, outer):
    outer("DMLC_ROLE=worker DMLC_NUM_WORKER=1 DMLC_WORKER_ID=0 BYTEPS_LOCAL_SIZE=2 BYTEPS_NUMA_ON=0")
    done = run_launch("env", BPS_DAEMON=FAKE)
    for rank in range(2):
        seen = variables(done, rank)
        assert (seen["BYTEPS_LOCAL_RANK"], seen["BYTEPS_LOCAL_SIZE"], seen["BPS_RANK"]) == (str(rank), "2", str(rank))


# -- With real daemons


@pytest.fixture
def start(tmp_path):
    """Starts bpslaunch and leaves it running; ends it after the test, in order: nothing may stay of its daemon."""
    processes = []

    def start(*arguments, **more):
        process = subprocess.Popen(
            [sys.executable, str(LAUNCH), *map(str, arguments)],
            env={**without_outer(clean_environment(XDG_RUNTIME_DIR=tmp_path)), **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.terminate()
        process.communicate(timeout=120)
    assert not list(tmp_path.glob("bpslaunch-*"))


TRAINER = BUILD and str(BUILD / "client/examples/bps-example-allreduce")


def outputs(*processes):
    done = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), done
    return sorted(line for out, _ in done for line in out.splitlines())


@needs_build
def test_private_daemons_meet_at_the_coordinator(start):
    coordinator = f"127.0.0.1:{free_port()}"
    both = [
        start("-np", 2, "--node", node, "--nodes", 2, "--job", "j", "--coordinator", coordinator, TRAINER)
        for node in (1, 0)
    ]
    assert outputs(*both) == [f"[{rank}] rank {rank} of 4: every element is 6" for rank in range(4)]


def test_a_coordinator_whose_name_is_not_known(run_launch, outer):
    outer("")
    done = run_launch(
        "--node",
        1,
        "--nodes",
        2,
        "--job",
        "j",
        "--coordinator",
        "no-such-host.invalid",
        "--start-timeout",
        1,
        "true",
        BPS_DAEMON=FAKE,
    )
    assert done.returncode == 1
    assert "no way to the coordinator no-such-host.invalid:9691 is known here (--start-timeout)" in done.stderr


@needs_build
def test_daemons_of_the_machines_are_used(start, tmp_path):
    ports = [free_port() for _ in range(2)]
    (tmp_path / "cluster.conf").write_text("".join(f"[node n{i}]\naddress = 127.0.0.1:{ports[i]}\n" for i in range(2)))
    options = ["--config=", "--cluster=static", f"--cluster-file={tmp_path}/cluster.conf"]
    daemons = [
        subprocess.Popen(
            [
                os.environ["BPS_DAEMON"],
                *options,
                f"--node=n{i}",
                f"--socket={tmp_path}/{i}",
                f"--admin-socket={tmp_path}/a{i}",
            ],
            stderr=subprocess.PIPE,
        )
        for i in range(2)
    ]
    try:
        assert all(any(b" ready" in line for line in daemon.stderr) for daemon in daemons)
        both = [
            start(
                "-np", 2, "--no-daemon", "--node", i, "--nodes", 2, "--job", "j", "--socket", tmp_path / str(i), TRAINER
            )
            for i in range(2)
        ]
        assert outputs(*both) == [f"[{rank}] rank {rank} of 4: every element is 6" for rank in range(4)]
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.communicate()


@needs_build
def test_a_private_daemon_alone_is_refused(start):
    process = start("--node", 0, "--nodes", 2, "--job", "j", TRAINER)
    assert process.wait(60) == 1
    assert "a private one would be alone" in process.stderr.read()


@needs_build
def test_launch_lines_of_byteps(start):
    """scheduler, server and two workers, each started by hand, in no good order."""
    common = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port())}
    common.update(DMLC_NUM_WORKER="2", DMLC_NUM_SERVER="1", BYTEPS_NUMA_ON="0")
    workers = [
        start(TRAINER, **common, DMLC_ROLE="worker", DMLC_WORKER_ID=str(i), NVIDIA_VISIBLE_DEVICES="0,1")
        for i in range(2)
    ]
    server, scheduler = start(**common, DMLC_ROLE="server"), start(**common, DMLC_ROLE="scheduler")
    assert outputs(*workers) == [f"[{rank}] rank {rank} of 4: every element is 6" for rank in range(4)]
    for service, name in ((server, "server"), (scheduler, "scheduler")):
        assert service.stdout.readline().startswith(f"bpslaunch: {name} at 127.0.0.1:")
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0, service.stderr.read()
