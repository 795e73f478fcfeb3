"""bpslaunch over ssh: a real sshd on loopback addresses, each of which is a machine."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import BUILD, LAUNCH, RANKS, clean_environment, needs_build
from sshd import SSHD, Sshd, children
from test_launch import FAKE, is_gone, slow_reader

A, B, C = "127.0.0.2", "127.0.0.3", "127.0.0.4"
TRAINER = BUILD and str(BUILD / "client/examples/bps-example-allreduce")
pytestmark = pytest.mark.skipif(not SSHD or not shutil.which("ssh"), reason="no openssh-server and openssh-client")


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    server = Sshd(tmp_path_factory.mktemp("sshd"), [A, B, C])
    yield server
    server.close()


@pytest.fixture
def run(sshd, run_launch):
    def run(*arguments, **more):
        return run_launch(*sshd.options, *arguments, **{"BPS_DAEMON": FAKE, **more})

    return run


@pytest.fixture
def start(sshd):
    processes = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, str(LAUNCH), *sshd.options, *map(str, arguments)],
            env=clean_environment(BPS_DAEMON=FAKE),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ranks_of(done):
    return sorted(done.stdout.splitlines())


@needs_build
def test_job_of_three_machines_by_real_daemons(run):
    done = run("-H", f"{A}:2,localhost,{B}", TRAINER, BPS_DAEMON=os.environ["BPS_DAEMON"])
    assert done.returncode == 0, done.stderr
    assert ranks_of(done) == [f"[{rank}] rank {rank} of 4: every element is 6" for rank in range(4)]


@needs_build
def test_servers_sum(run):
    done = run("-H", f"{A},{B}", "--servers", C, "--verbose", TRAINER, BPS_DAEMON=os.environ["BPS_DAEMON"])
    assert done.returncode == 0, done.stderr
    assert ranks_of(done) == [f"[{rank}] rank {rank} of 2: every element is 1" for rank in range(2)]
    assert re.search(rf"\[node {C}\]\naddress = {C}:\d+\nroles = server\n", done.stderr)
    assert f"[daemon {C}] " in done.stderr and "has 3 members, 3 of them servers" in done.stderr


def test_environment(run, tmp_path):
    code = (
        "import os, glob\n"
        "secret = os.environ['BPS_SECRET'].encode()\n"
        "for path in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try: line = open(path, 'rb').read()\n"
        "    except OSError: continue\n"
        "    assert secret not in line, line\n"
        "print(*(os.environ.get('BPS_' + name) for name in 'RANK SIZE LOCAL_RANK LOCAL_SIZE NODE NODES'.split()), os.getcwd(),"
        " os.environ['GIVEN'], os.environ['TAKEN'], os.environ['OMP_NUM_THREADS'])\n"
    )
    done = run(
        "-H",
        f"{A}:2,{B}:4",
        "-np",
        3,
        "-x",
        "GIVEN=only-here",
        "--wdir",
        tmp_path,
        sys.executable,
        "-c",
        code,
        TAKEN="too",
    )
    assert done.returncode == 0, done.stderr
    assert ranks_of(done) == [
        f"[0] 0 3 0 2 0 2 {tmp_path} only-here too 1",
        f"[1] 1 3 1 2 0 2 {tmp_path} only-here too 1",
        f"[2] 2 3 0 1 1 2 {tmp_path} only-here too 1",
    ]


def test_first_failure_ends_all(run):
    done = run("-H", f"{A},{B}", "sh", "-c", "[ $BPS_RANK != 1 ] || exit 3; exec sleep 100")
    assert done.returncode == 3
    assert re.fullmatch(rf"rank 1 on {B} \(pid \d+\) exited with status 3", done.stderr.splitlines()[-1])
    done = run("-H", f"{A},{B}", "sh", "-c", "[ $BPS_RANK != 0 ] || kill -9 $$; exec sleep 100")
    assert done.returncode == 137
    assert re.fullmatch(rf"rank 0 on {A} \(pid \d+\) was killed by signal 9 \(SIGKILL\)", done.stderr.splitlines()[-1])


def started(process, n):
    """The process numbers that ranks have printed, with those of their agents and daemons."""
    ranks = [int(process.stdout.readline().split()[1]) for _ in range(n)]
    agents = {
        int(re.search(r"^PPid:\s+(\d+)", pathlib.Path(f"/proc/{rank}/status").read_text(), re.M)[1]) for rank in ranks
    }
    return sorted({*ranks, *agents, *(child for agent in agents for child in children(agent))})


def test_all_end_with_a_killed_launcher(start):
    process = start("-H", f"{A}:2,{B}", "sh", "-c", "echo $$; exec sleep 100")
    pids = started(process, 3)
    assert len(pids) == 3 + 2 + 2
    process.kill()
    assert all(is_gone(pid) for pid in pids)


def test_all_end_with_a_lost_connection(start):
    process = start("-H", f"{A},{B}", "sh", "-c", "echo $$; exec sleep 100")
    pids = started(process, 2)
    ssh = [pid for pid in children(process.pid) if B.encode() in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(ssh[0], signal.SIGKILL)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"bpslaunch: {B}: ssh was killed by signal 9 (SIGKILL)" in error.splitlines()
    assert all(is_gone(pid) for pid in pids)


def test_all_end_with_a_killed_agent(start):
    process = start("-H", f"{A},{B}", "sh", "-c", "echo $$; exec sleep 100")
    pids = started(process, 2)
    agents = [pid for pid in pids if b"--agent" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(agents) == 2
    os.kill(agents[0], signal.SIGKILL)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert re.search(r"^bpslaunch: 127.0.0.[23]: ssh exited with status 255$", error, re.M), error
    assert all(is_gone(pid) for pid in pids)


def test_signals_reach_all_ranks(start):
    script = "trap 'echo got it; exit 0' USR1; echo ready; while :; do sleep 0.05; done"
    process = start("-H", f"{A},{B}", "sh", "-c", script)
    assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert sorted(out.splitlines()) == ["[0] got it", "[1] got it"]


def test_input_is_of_rank_0(run, tmp_path):
    text = "".join(f"line {i}\n" for i in range(30000))
    code = "import sys; data = sys.stdin.read(); print(len(data), data[-11:-1])"
    done = run("-H", f"{A},{B}", sys.executable, "-c", code, input=text)
    assert ranks_of(done) == [f"[0] {len(text)} line 29999", "[1] 0 "]


def test_output_of_any_size_arrives(run):
    code = "import sys; sys.stdout.write(('x' * 99 + '\\n') * 50000)"
    done = run("-H", f"{A},{B}", sys.executable, "-c", code)
    assert done.returncode == 0
    # On a machine that stands still for a while a line may come in two.
    assert done.stdout.count("x") == 2 * 50000 * 99 and done.stdout.count("\n[0]") + done.stdout.count("\n[1]") >= 2 * 50000 - 1


def test_nothing_is_lost_on_a_slow_reader(sshd):
    arguments = [*sshd.options, "-H", f"{A},{B}"]
    assert slow_reader(arguments, clean_environment(BPS_DAEMON=FAKE)) == 2 * 6000 * 99


def test_network_interfaces(run):
    done = run("-H", f"{A},{B}", "--network-interfaces", "nosuch0,lo", "--verbose", "true")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^address = 127.0.0.1:\d+$", done.stderr, re.M)) == 2
    done = run("-H", f"{A},{B}", "--network-interfaces", "nosuch0", "true")
    assert done.returncode == 1
    assert re.search(
        r"bpslaunch: 127.0.0.[23]: no network interface nosuch0 with an IPv4 address; there are: .*lo", done.stderr
    )


def test_output_files(run, tmp_path):
    done = run("-H", f"{A},{B}", "--output-filename", tmp_path / "out", "sh", "-c", "echo $BPS_RANK; echo err >&2")
    assert ranks_of(done) == ["[0] 0", "[1] 1"]
    for rank in (0, 1):
        assert (tmp_path / f"out/rank.{rank}/stdout").read_text() == f"{rank}\n"
        assert (tmp_path / f"out/rank.{rank}/stderr").read_text() == "err\n"


def test_what_cannot_be_reached_is_named(run, run_launch, sshd, tmp_path):
    done = run("-H", f"{A},127.0.0.9", "true")  # nobody listens there
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "bpslaunch: 127.0.0.9: ssh exited with status 255"
    assert "[127.0.0.9] ssh: connect to host" in done.stderr
    done = run("-H", A, "--wdir", "/no/such/folder", "true")
    assert done.returncode == 1
    assert f"bpslaunch: {A}: no folder /no/such/folder here" in done.stderr
    done = run("-H", f"{A},{B}", "/no/such/program")
    assert done.returncode == 1
    assert "cannot start /no/such/program: No such file or directory" in done.stderr
    done = run("-H", f"{A},{B}", "--remote-python", "/no/such/python", "true")
    assert done.returncode == 1
    assert "/no/such/python" in done.stderr
    assert re.search(r"bpslaunch: 127.0.0.[23]: ssh exited with status 12[67]", done.stderr.splitlines()[-1])
    done = run("-H", f"{A},{B}", "true", BPS_DAEMON="/bin/false")
    assert done.returncode == 1
    assert re.search(r"bpslaunch: bps-daemon on 127.0.0.[23] exited with status 1 before it was ready", done.stderr)


def test_machine_that_does_not_answer_in_time(run, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec cat >/dev/null\n")
    python.chmod(0o755)
    done = run("-H", f"{A}:1,{B}:1", "--remote-python", python, "--start-timeout", 0.5, "true")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"bpslaunch: {A}, {B}: no answer within 0.5 s (--start-timeout)"


def test_chatter_of_a_login_is_not_ours(run, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "Welcome to this machine"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = run("-H", A, "--remote-python", python, "echo", "hello")
    assert done.returncode == 0
    assert done.stdout == "[0] hello\n"
    assert f"[{A}] Welcome to this machine\n" in done.stderr


def test_daemons_that_listen_are_used(run, tmp_path):
    import socket

    path = str(tmp_path / "system.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        done = run("-H", f"{A},{B}", "--socket", path, "--no-daemon", "sh", "-c", "echo $BPS_SOCKET")
        assert ranks_of(done) == [f"[0] {path}", f"[1] {path}"], done.stderr
        assert f"bpslaunch: {A}: the daemon at {path} does not say whether it is in a cluster, and is used: " in done.stderr
    done = run("-H", f"{A},{B}", "--socket", path, "--no-daemon", "true")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"bpslaunch: {A}: no daemon listens at {path}: leave out --no-daemon")


def test_the_library_of_who_starts_the_run_asks(run, tmp_path):
    """Another may lie on the machine's path, or in its source tree: one with a sanitizer, which no Python can load."""
    import socket

    path, library = str(tmp_path / "system.sock"), tmp_path / "chosen.so"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        done = run("-H", f"{A},{B}", "--socket", path, "--no-daemon", "true", BPS_LIBRARY=library)
    assert f"$BPS_LIBRARY: {library}: cannot open shared object file" in done.stderr


@needs_build
def test_daemons_without_a_cluster_are_not_enough(run, tmp_path):
    """What a fresh installation has on each machine."""
    daemon = subprocess.Popen(
        [
            os.environ["BPS_DAEMON"],
            "--config=",
            f"--socket={tmp_path}/bps.sock",
            f"--admin-socket={tmp_path}/admin.sock",
        ],
        stderr=subprocess.PIPE,
    )
    try:
        assert any(b"ready" in line for line in daemon.stderr)
        more = {"BPS_DAEMON": os.environ["BPS_DAEMON"]}
        done = run("-H", f"{A},{B}", "--socket", tmp_path / "bps.sock", TRAINER, **more)
        assert ranks_of(done) == [f"[{rank}] rank {rank} of 2: every element is 1" for rank in range(2)], done.stderr
        done = run("-H", f"{A},{B}", "--socket", tmp_path / "bps.sock", "--no-daemon", TRAINER, **more)
        assert done.returncode == 1
        assert f"bpslaunch: the daemon at {tmp_path}/bps.sock is in no cluster: see bps-cluster.conf(5)" in done.stderr
    finally:
        daemon.kill()
        daemon.communicate()


def test_other_ways_than_ssh(run_launch, tmp_path):
    """Such as kubectl exec, in a script that takes a host and a command."""
    shell = tmp_path / "rsh"
    shell.write_text(f'#!/bin/sh\necho "$1" >>{tmp_path}/called\nshift\nunset SSH_CONNECTION\nexec "$@"\n')
    shell.chmod(0o755)
    done = run_launch("--ssh", shell, "-H", f"{A},{B}", "sh", "-c", "echo $BPS_NODE", BPS_DAEMON=FAKE)
    assert ranks_of(done) == ["[0] 0", "[1] 1"], done.stderr
    assert sorted((tmp_path / "called").read_text().split()) == [A, B]


def test_closed_input(sshd, run_launch):
    command = 'exec "$0" "$@" <&-'
    arguments = [sys.executable, str(LAUNCH), *sshd.options, "-H", A, "cat"]
    done = subprocess.run(
        ["sh", "-c", command, *arguments], env=clean_environment(BPS_DAEMON=FAKE), capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


SCRIPTS = LAUNCH.parent.parent.parent.parent / "scripts"


@pytest.fixture
def namespaces():
    """Two hosts in namespaces of the network; a function that runs scripts/netns on them."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and iproute2 for network namespaces")
    prefix = f"l{os.getpid() % 100000}x"
    environment = {**os.environ, "BPS_NETNS": prefix}

    def netns(*words):
        subprocess.run([str(SCRIPTS / "netns"), *words], env=environment, check=True)

    netns("up", "2")
    yield prefix, netns
    netns("down")


def test_a_machine_that_falls_silent_is_given_up(namespaces, tmp_path):
    """A cable is cut: nobody is told. Both sides end what they have."""
    prefix, netns = namespaces
    server = Sshd(tmp_path, ["10.88.0.2"], port=2222, netns=prefix + "1")
    code = f"import sys; sys.path.insert(0, {str(LAUNCH.parent.parent)!r})\n"
    code += "from bps import launch; from bps._launch import node; node.BEAT_S = 0.2; node.SILENCE_S = 10.0\n"
    code += "sys.exit(launch.main(sys.argv[1:]))"
    command = ["ip", "netns", "exec", prefix + "0", sys.executable, "-c", code, *server.options]
    command += ["-H", "localhost,10.88.0.2", "sh", "-c", "echo $$; exec sleep 1000"]
    process = subprocess.Popen(
        command,
        env=clean_environment(BPS_DAEMON=FAKE),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        pids = started(process, 2)
        netns("drop", "1")
        _, error = process.communicate(timeout=120)
        assert process.returncode == 1
        assert "bpslaunch: 10.88.0.2: not heard of for 10 s" in error.splitlines()
        deadline = time.monotonic() + 60
        while not all(is_gone(pid) for pid in pids):
            assert time.monotonic() < deadline
    finally:
        process.kill()
        process.communicate()
        server.close()


@pytest.fixture
def elastic(sshd, run_launch):
    """An elastic job of tests/ranks/elastic_steps.py."""
    pytest.importorskip("numpy")

    def run(options, *steps, then=None):
        command = [sys.executable, str(LAUNCH), *sshd.options, *options, sys.executable, RANKS / "elastic_steps.py", "-", *steps]
        process = subprocess.Popen(
            [*map(str, command)], env=clean_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        lines = []
        try:
            for line in process.stdout:
                lines.append((int(line[1 : line.index("]")]), json.loads(line.partition(" ")[2])))
                if then and "step" in lines[-1][1]:
                    then(lines[-1][1]["step"])
            errors = process.stderr.read()
            assert process.wait(60) == 0, f"{lines[-3:]}\n{errors}"
        finally:
            process.kill()
            process.communicate()
        return sorted(rank for rank, said in lines if "done" in said), lines, errors

    return run


@needs_build
def test_a_rank_of_an_elastic_job_is_replaced(elastic):
    """On the machine with room for it, and the job has ranks on both from the first to the last."""
    done, lines, errors = elastic(["-H", f"{A}:2,{B}:2", "-np", 3, "--min-np", 1], 8, 3, "1:die@3")
    assert done == [0, 2, 3], errors
    assert f"rank 1 on {A} (pid " in errors and "rank 3 is started on " in errors, errors
    last = max(said["step"] for _, said in lines if "step" in said)
    assert all(said["came"] == [0, 2, 3] for _, said in lines if said.get("step") == last), lines[-12:]


@needs_build
def test_an_elastic_job_goes_on_without_a_machine(elastic, sshd):
    """The way to one breaks; its agent ends what it has there."""
    gone = []

    def cut(step):
        if step == 3 and not gone:
            gone.append(sshd.sessions()[-1])
            os.kill(gone[0], signal.SIGKILL)

    done, _, errors = elastic(["-H", f"{A},{B}", "--min-np", 1], 8, 1, then=cut)
    assert len(done) == 1 and re.search(r"with its ranks: [01]: 1 go on", errors), errors


@needs_build
def test_machines_of_an_elastic_job_are_asked_for(elastic, tmp_path):
    """What the script says is how many there are to be, where."""
    script = tmp_path / "hosts"
    script.write_text(f"#!/bin/sh\necho {A}:1\necho {B}:2\necho stranger:7\n")
    script.chmod(0o755)
    done, lines, errors = elastic(["-H", f"{A},{B}", "--max-np", 3, "--host-discovery-script", script], 4, 3)
    assert done == [0, 1, 2], errors
    assert f"rank 2 is started on {B}" in errors and errors.count("stranger") == 1, errors


@needs_build
def test_machines_without_a_rank_at_the_start_get_some(elastic, tmp_path):
    """When more are asked for than the first has room for; and where all ranks of a machine have failed."""
    script = tmp_path / "hosts"
    script.write_text(f"#!/bin/sh\necho {A}:1\necho {B}:2\n")
    script.chmod(0o755)
    options = ["-H", f"{A},{B}:2", "-np", 1, "--max-np", 3, "--host-discovery-script", script]
    done, _, errors = elastic(options, 4, 3)
    assert done == [0, 1, 2], errors
    assert f"rank 1 is started on {B}" in errors and f"rank 2 is started on {B}" in errors, errors
    done, _, errors = elastic(["-H", f"{A},{B}", "--min-np", 1], 8, 2, "1:die@3")
    assert done == [0, 2] and f"rank 2 is started on {B}" in errors, errors
