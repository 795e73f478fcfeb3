"""bpslaunch with a daemon that does nothing: arguments, environment, output, signals, exit statuses."""

import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import BUILD, LAUNCH, clean_environment, needs_build

import bps
from bps._launch import arguments
from bps._launch.daemon import find_bpsctl

FAKE = str(pathlib.Path(__file__).parent / "fake_daemon.py")


@pytest.fixture
def run(run_launch, tmp_path):
    def run(*arguments, **more):
        return run_launch(*arguments, BPS_DAEMON=FAKE, XDG_RUNTIME_DIR=tmp_path, **more)

    return run


@pytest.fixture
def start(tmp_path):
    """Starts bpslaunch and leaves it running; ends it at the end of the test."""
    processes = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, str(LAUNCH), *map(str, arguments)],
            env=clean_environment(BPS_DAEMON=FAKE, XDG_RUNTIME_DIR=tmp_path),
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


def is_gone(pid):
    """Whether a process has ended, within two minutes; it may remain as a zombie of whoever must reap it."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_options_end_where_the_program_begins():
    options = arguments.parse_arguments(["-np", "2", "--timestamp", "python", "x.py", "--job", "z", "-np", "9"])
    assert (options.ranks, options.timestamp, options.job) == (2, True, None)
    assert options.command == ["python", "x.py", "--job", "z", "-np", "9"]
    assert arguments.parse_arguments(["--", "-x"]).command == ["-x"]


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["-np", "0", "true"],
        ["-np", "two", "true"],
        ["--nodes", "2", "true"],
        ["--nodes", "2", "--node", "2", "--job", "j", "true"],
        ["--no-daemon", "--daemon-option", "a=b", "true"],
        ["--daemon-option", "ab", "true"],
    ],
)
def test_bad_arguments_are_refused(given, capsys):
    with pytest.raises(SystemExit) as exit:
        arguments.parse_arguments(given)
    assert exit.value.code == 2
    assert "bpslaunch: error" in capsys.readouterr().err


def variables(done, rank):
    pairs = (
        line.partition("] ")[2].partition("=") for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")
    )
    return {name: value for name, _, value in pairs}


def test_environment(run):
    done = run("-np", 2, "env")
    assert done.returncode == 0
    both = [variables(done, rank) for rank in (0, 1)]
    for rank, seen in enumerate(both):
        assert (seen["BPS_RANK"], seen["BPS_LOCAL_RANK"]) == (str(rank), str(rank))
        assert (seen["BPS_SIZE"], seen["BPS_LOCAL_SIZE"], seen["BPS_NODE"], seen["BPS_NODES"]) == ("2", "2", "0", "1")
        assert seen["OMP_NUM_THREADS"] == "1"
        assert [seen[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == [str(rank), "2", str(rank), "2"]
        assert seen["MASTER_ADDR"] == "127.0.0.1" and seen["MASTER_PORT"] == both[0]["MASTER_PORT"]
    assert both[0]["BPS_SECRET"] == both[1]["BPS_SECRET"] and len(both[0]["BPS_SECRET"]) == 32
    assert both[0]["BPS_JOB"] == both[1]["BPS_JOB"]
    again = variables(run("env"), 0)
    assert again["BPS_SECRET"] != both[0]["BPS_SECRET"] and again["BPS_JOB"] != both[0]["BPS_JOB"]


def test_environment_of_the_second_node(run):
    done = run("-np", 2, "--node", 1, "--nodes", 3, "--job", "big", "--daemon-option", "cluster=static", "env")
    seen = variables(done, 3)
    assert (seen["BPS_RANK"], seen["BPS_LOCAL_RANK"], seen["BPS_SIZE"], seen["BPS_JOB"]) == ("3", "1", "6", "big")
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"]) == ("3", "6", "2") and "MASTER_PORT" not in seen
    assert "BPS_SECRET" not in seen  # it could not be the same on the other nodes


def test_secret_of_the_caller_stays(run):
    assert variables(run("env", BPS_SECRET="mine"), 0)["BPS_SECRET"] == "mine"


def test_output_is_prefixed_and_kept_apart(run):
    done = run("-np", 2, "sh", "-c", 'echo out; echo err >&2; printf "no newline"')
    assert sorted(done.stdout.splitlines()) == ["[0] no newline", "[0] out", "[1] no newline", "[1] out"]
    ranks = [line for line in done.stderr.splitlines() if not line.startswith("[daemon]")]
    assert sorted(ranks) == ["[0] err", "[1] err"]


def test_lines_of_any_length_arrive_whole(run):
    done = run(sys.executable, "-c", "print('x' * 50000); print('y' * 10)")
    assert done.stdout == "[0] " + "x" * 50000 + "\n[0] " + "y" * 10 + "\n"


def slow_reader(arguments, environment):
    """How much comes of 594 kB of "x", in lines, from each of two ranks when nobody reads for longer than output is waited for.

    Lines are not counted: one whose rest is late is ended, and its rest has a line of its own.
    """
    code = "import sys; sys.stdout.write(('x' * 99 + '\\n') * 6000)"
    done = subprocess.run(
        ["sh", "-c", '"$0" "$@" | (sleep 3; tr -cd x | wc -c)', sys.executable, LAUNCH, *arguments, sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=120,
    )
    return int(done.stdout)


def test_nothing_is_lost_on_a_slow_reader(tmp_path):
    environment = clean_environment(BPS_DAEMON=FAKE, XDG_RUNTIME_DIR=tmp_path)
    assert slow_reader(["-np", "2"], environment) == 2 * 6000 * 99


def test_who_holds_the_output_open_does_not_hold_the_run(run):
    done = run("-np", 2, "sh", "-c", "sleep 8 & yes & echo the end", timeout=120)
    assert done.returncode == 0
    assert "[0] the end\n" in done.stdout and "[1] the end\n" in done.stdout


def test_timestamp(run):
    assert re.fullmatch(r"\[0\] \d\d:\d\d:\d\d\.\d\d\d hello\n", run("--timestamp", "echo", "hello").stdout)


def test_lines_come_as_they_are_written(start):
    process = start("sh", "-c", "echo first; read never </dev/zero")
    assert process.stdout.readline() == "[0] first\n"


def test_input_is_of_rank_0(run):
    assert run("-np", 2, "cat", input="hello\n").stdout == "[0] hello\n"


def test_exit_status(run):
    done = run("-np", 3, "sh", "-c", "[ $BPS_RANK != 1 ] || exit 3; exec sleep 100")
    assert done.returncode == 3
    assert re.fullmatch(r"rank 1 \(pid \d+\) exited with status 3", done.stderr.splitlines()[-1])


def test_exit_by_signal(run):
    done = run("-np", 2, "sh", "-c", "[ $BPS_RANK != 0 ] || kill -9 $$; exec sleep 100")
    assert done.returncode == 137
    assert re.fullmatch(r"rank 0 \(pid \d+\) was killed by signal 9 \(SIGKILL\)", done.stderr.splitlines()[-1])


def test_the_stubborn_are_killed(run):
    stubborn = "trap '' TERM; [ $BPS_RANK != 1 ] || exit 4; while :; do sleep 0.1; done"
    done = run("-np", 2, "--grace", 0.3, "sh", "-c", stubborn)
    assert done.returncode == 4
    assert "rank 1 (pid" in done.stderr.splitlines()[-1]


def is_reaped(pid):
    deadline = time.monotonic() + 120
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.01)
    return not os.path.exists(f"/proc/{pid}")


def test_a_rank_that_saves_after_sigterm_has_its_time(start, tmp_path):
    """Another that ends by the signal does not have this one told again, and killed."""
    script = f"""
        [ $BPS_RANK = 0 ] || {{ echo $$; exec sleep 100; }}
        trap 'echo heard' TERM; echo ready
        while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; echo saved"""
    process = start("-np", 2, "sh", "-c", script)
    first = sorted(process.stdout.readline() for _ in range(2))
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "[0] heard\n"
    assert is_reaped(int(first[1].split()[1]))
    (tmp_path / "go").touch()
    out, err = process.communicate(timeout=120)
    assert out == "[0] saved\n"
    assert process.returncode == 128 + signal.SIGTERM, err


@pytest.mark.parametrize("where", [(), ("-H", "localhost:1")], ids=["here", "by an agent"])
def test_what_nohup_has_ignored_stays_so(tmp_path, where):
    script = f"echo ready; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; kill -HUP $$; echo alive"
    if where:  # two, since one machine that is this one needs no agent
        where = ("-H", "localhost:1,127.0.0.1:1")
    process = subprocess.Popen(
        ["nohup", sys.executable, str(LAUNCH), "-np", "2", *where, "sh", "-c", script],
        env=clean_environment(XDG_RUNTIME_DIR=tmp_path, **({} if where else {"BPS_DAEMON": FAKE})),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
        process.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert sorted(out.splitlines()) == ["[0] alive", "[1] alive"], err
    assert process.returncode == 0, err


def test_a_long_tmpdir(run_launch, tmp_path):
    """Batch systems set one; sockets in it would have too long a path."""
    long = tmp_path / ("scratch-of-job-" * 5) / ("x" * 60)
    long.mkdir(parents=True)
    done = run_launch("sh", "-c", "echo $BPS_SOCKET", BPS_DAEMON=FAKE, XDG_RUNTIME_DIR=long, TMPDIR=long)
    path = done.stdout.split()[1]
    assert done.returncode == 0, done.stderr
    assert len(path) < 100 and not os.path.exists(os.path.dirname(path))
    assert not list(long.iterdir())


def test_a_prompt_shows_before_its_line_ends(start):
    process = start("sh", "-c", "printf 'go on? '; read never </dev/zero")
    assert os.read(process.stdout.fileno(), 100) == b"[0] go on? "


def test_program_that_does_not_exist(run):
    done = run("-np", 2, "/no/such/program")
    assert done.returncode == 1
    assert "cannot start /no/such/program: No such file or directory" in done.stderr


def test_daemon_that_does_not_start(run_launch):
    done = run_launch("true", BPS_DAEMON="/bin/false")
    assert done.returncode == 1
    assert "bps-daemon exited with status 1 before it was ready" in done.stderr


def test_no_daemon(run):
    done = run("--no-daemon", "true")
    assert done.returncode == 1
    assert "no daemon listens at /nonexistent/bps.sock: leave out --no-daemon, or" in done.stderr
    assert done.stderr.endswith("start one: systemctl start bps-daemon.socket\n")


def test_running_daemon_is_used(run, tmp_path):
    path = str(tmp_path / "running.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        done = run("--no-daemon", "--socket", path, "env")
        assert variables(done, 0)["BPS_SOCKET"] == path
        assert variables(run("env", BPS_SOCKET=path), 0)["BPS_SOCKET"] == path
        # Options are for a daemon of our own.
        private = run("--daemon-option", "log_level=debug", "--daemon-option", "lanes=2", "env", BPS_SOCKET=path)
        assert variables(private, 0)["BPS_SOCKET"] != path
        assert "[daemon] arguments --set log_level=warning --set log_level=debug --set lanes=2\n" in private.stderr


def test_private_daemon_leaves_nothing(run, tmp_path):
    seen = variables(run("env"), 0)["BPS_SOCKET"]
    assert seen.startswith(str(tmp_path / "bpslaunch-"))
    assert list(tmp_path.iterdir()) == []


def test_private_daemon_at_a_given_socket(run, tmp_path):
    path = str(tmp_path / "given.sock")
    assert variables(run("--socket", path, "env"), 0)["BPS_SOCKET"] == path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_go_to_the_ranks(start, number):
    script = f"trap 'echo got it; exit 7' {number.name[3:]}; echo ready; while :; do sleep 0.05; done"
    process = start("-np", 2, "sh", "-c", script)
    assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert "got it" in out
    assert process.returncode == 7, err


def test_ranks_and_daemon_end_with_a_killed_launcher(start, tmp_path):
    process = start("sh", "-c", "echo $$; exec sleep 100")
    rank = int(process.stdout.readline().split()[1])
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    process.kill()
    process.wait()
    assert is_gone(rank)
    assert all(is_gone(int(pid)) for pid in children)


def test_reader_that_goes_away_ends_the_run(tmp_path):
    environment = clean_environment(BPS_DAEMON=FAKE, XDG_RUNTIME_DIR=tmp_path)
    process = subprocess.Popen(
        [sys.executable, str(LAUNCH), "yes"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout.read(6) == b"[0] y\n"
    process.stdout.close()
    assert process.wait(120) == 128 + signal.SIGPIPE


def test_installed_and_as_a_file_are_the_same():
    environment = clean_environment()
    one = subprocess.run([sys.executable, LAUNCH, "--help"], env=environment, capture_output=True, text=True)
    other = subprocess.run(
        [sys.executable, "-m", "bps.launch", "--help"], env=environment, capture_output=True, text=True, cwd=os.sep
    )
    assert one.returncode == other.returncode == 0
    assert one.stdout == other.stdout != ""


def test_check_build(run):
    done = run("--check-build")
    assert done.returncode == 0
    assert (
        f"    [X] bps-daemon  (0.0, {FAKE}: $BPS_DAEMON)" in done.stdout
        and "    [ ] a daemon that listens  (/nonexistent/bps.sock)" in done.stdout
    )
    assert re.search(r"^    \[.\] PyTorch", done.stdout, re.M)


@needs_build
@pytest.mark.parametrize("place", ["bpsctl", "admin/bpsctl"])
def test_bpsctl_belongs_to_the_daemon(place, tmp_path, monkeypatch):
    """Installed beside it, or built with it, whatever is on PATH and whichever build folder is newest."""
    mine = tmp_path / place
    other = tmp_path / "bin" / "bpsctl"
    for path in (mine, other):
        path.parent.mkdir(exist_ok=True)
        shutil.copy(BUILD / "daemon" / "admin" / "bpsctl", path)
    monkeypatch.setenv("PATH", str(other.parent))
    monkeypatch.setenv("BPS_DAEMON", str(tmp_path / "bps-daemon"))
    assert find_bpsctl() == (str(mine), "$BPS_DAEMON")
    monkeypatch.setenv("BPS_DAEMON", str(tmp_path / "elsewhere" / "bps-daemon"))
    assert find_bpsctl() == (str(other), f"the system's, not older than this package's {bps.__version__}")


def test_version(run):
    assert run("-v").stdout == f"bpslaunch {bps.__version__}\n"


def test_folder_and_variables(run, tmp_path):
    done = run("-x", "GIVEN=1", "--wdir", tmp_path, "sh", "-c", "echo $GIVEN $PWD")
    assert done.stdout == f"[0] 1 {tmp_path}\n"
    done = run("--wdir", "/no/such/folder", "true")
    assert done.returncode == 1 and "no folder /no/such/folder here" in done.stderr


def test_a_wrong_line_is_answered_by_one(run):
    done = run("--frobnicate", "true")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2  # how it is used, and what is wrong
