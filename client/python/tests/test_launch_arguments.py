"""What bpslaunch makes of its arguments: hosts, files of hosts, variables, and options of other launchers."""

import pytest

from bps._launch import LaunchError, arguments, hosts


@pytest.fixture(autouse=True)
def no_outer_launcher(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith(
            ("SLURM_", "OMPI_", "PMI_", "PMIX_", "PET_", "DMLC_", "BYTEPS_", "BPS_NODE", "BPS_JOB", "JOB_COMPL")
        ):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def pairs(found):
    return [(host.name, host.slots) for host in found]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a", [("a", 1)]),
        ("a:4,b:2", [("a", 4), ("b", 2)]),
        ("a,b,a", [("a", 2), ("b", 1)]),
        ("me@a.example.com:8", [("me@a.example.com", 8)]),
        ("[fd00::1]:4,10.0.0.2", [("fd00::1", 4), ("10.0.0.2", 1)]),
        ("me@[fd00::1]", [("me@fd00::1", 1)]),
    ],
)
def test_hosts(text, expected):
    assert pairs(hosts.parse_hosts(text)) == expected


@pytest.mark.parametrize("text", ["", "a,", "a:b", "a:0", "a:-1", "fd00::1", "a b", ":4", "a:4:4"])
def test_bad_hosts(text):
    with pytest.raises(LaunchError, match="is not HOST or HOST:SLOTS"):
        hosts.parse_hosts(text)


def test_a_host_without_its_user_is_the_name_of_the_machine():
    assert hosts.Host("me@a", 1).bare == "a" and not hosts.Host("me@localhost", 1).is_local
    assert hosts.Host("localhost", 1).is_local and not hosts.Host("127.0.0.2", 1).is_local


def test_hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text(
        "# of Horovod\na slots=4\n\nb.example.com slots=2  # a comment\n# of Open MPI\nc max_slots=8 slots=3\nd\nd\n# of MPICH\ne:5\n"
        "f slots=0\n"
    )
    assert pairs(hosts.parse_hostfile(path)) == [("a", 4), ("b.example.com", 2), ("c", 3), ("d", 2), ("e", 5)]


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "names no host"),
        ("# nothing\n", "names no host"),
        ("a\nb slots=many\n", ":2: 'slots=many' is not slots=N"),
        ("a cpus=4\n", ":1: 'cpus=4' is not slots=N"),
        ("a:x\n", ":1: 'a:x' is not HOST"),
    ],
)
def test_bad_hostfile(tmp_path, text, words):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(LaunchError) as error:
        hosts.parse_hostfile(path)
    assert words in str(error.value) and str(path) in str(error.value)


def test_hostfile_that_is_not_there():
    with pytest.raises(LaunchError, match="No such file"):
        hosts.parse_hostfile("/no/such/file")


@pytest.mark.parametrize(
    "text, n, expected",
    [
        ("a:2,b:2", None, [("a", [0, 1]), ("b", [2, 3])]),
        ("a:2,b:2", 3, [("a", [0, 1]), ("b", [2])]),
        ("a:2,b:2", 2, [("a", [0, 1])]),
        ("a,b:3", 4, [("a", [0]), ("b", [1, 2, 3])]),
    ],
)
def test_ranks_fill_one_host_after_the_other(text, n, expected):
    assert [(host.name, ranks) for host, ranks in hosts.assign(hosts.parse_hosts(text), n)] == expected


def test_more_ranks_than_slots():
    with pytest.raises(LaunchError, match="-np 5: the hosts have 4 slots"):
        hosts.assign(hosts.parse_hosts("a:2,b:2"), 5)


def test_lines_of_horovodrun():
    options = arguments.parse_arguments(
        "-np 4 -H a:2,b:2 -p 22 -i key --network-interface eth0,eth1 --network-interfaces ib0 --start-timeout 60 --verbose "
        "--output-filename out --prefix-output-with-timestamp -x PATH --servers c,d python train.py --lr 1".split()
    )
    assert (options.ranks, pairs(options.hosts), pairs(options.servers)) == (
        4,
        [("a", 2), ("b", 2)],
        [("c", 1), ("d", 1)],
    )
    assert (options.ssh_port, options.ssh_identity_file, options.start_timeout) == (22, "key", 60)
    assert options.interfaces == ["eth0", "eth1", "ib0"]
    assert options.timestamp and options.verbose and options.output_filename == "out"
    assert options.command == ["python", "train.py", "--lr", "1"]


def test_variables(monkeypatch):
    monkeypatch.setenv("FIRST", "1")
    monkeypatch.setenv("SECOND", "a=b")
    options = arguments.parse_arguments(
        ["-x", "FIRST,SECOND", "-x", "THIRD=x=y:z", "--env", "FOURTH:4", "-x", "EMPTY=", "true"]
    )
    assert options.environment == {"FIRST": "1", "SECOND": "a=b", "THIRD": "x=y:z", "FOURTH": "4", "EMPTY": ""}


@pytest.mark.parametrize(
    "given",
    [
        "--gloo",
        "--cycle-time-ms 3",
        "--mca btl tcp",
        "--fusion-threshold-mb 32",
        "--disable-cache",
        "--allow-run-as-root",
    ],
)
def test_options_of_others_without_a_meaning(given, capsys):
    assert arguments.parse_arguments([*given.split(), "-np", "3", "true"]).ranks == 3
    assert f"bpslaunch: {given.split()[0]} changes nothing: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "given, words",
    [
        ("-np 2 --min-np 3 true", "--min-np must be at least 1, and at most -np, which is 2"),
        ("-np 2 --max-np 1 true", "--max-np must be at least -np, which is 2"),
        ("--min-np 2 --job x --node 0 --nodes 2 true", "need one bpslaunch that starts all ranks"),
        ("--nproc_per_node 4 train.py", "--nproc_per_node: -np N does it here"),
        ("-WH hosts true", "-WH: --hostfile FILE does it here"),
        ("--bind-to core true", "--bind-to: --bind numa"),
        ("--map-by slot true", "--map-by: ranks fill one host after the other"),
        ("-H a --hostfile f true", "give one"),
        ("--servers c true", "--servers needs -H"),
        ("-H a,b --servers b true", "--servers b: trains, says -H"),
        ("-H a --node 1 true", "are for bpslaunch on each machine"),
        ("-H a --no-daemon --servers b true", "--no-daemon and --servers contradict"),
        ("-H a:x true", "'a:x' is not HOST"),
        ("--network-interfaces eth0 true", "--network-interfaces needs"),
        ("-x NOT_SET_AT_ALL true", "-x NOT_SET_AT_ALL: there is no such variable here"),
        ("--start-timeout 0 true", "--start-timeout"),
        ("--start-timeout inf true", "--start-timeout"),
        ("--bind socket true", "--bind"),
        ("--coordinator a:b --job j --nodes 2 true", "--coordinator a:b: not HOST or HOST:PORT"),
        ("--rank 2 true", "unrecognized"),
    ],
)
def test_one_line_says_why_not(given, words, capsys):
    with pytest.raises(SystemExit) as exit:
        arguments.parse_arguments(given.split())
    assert exit.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("bpslaunch: error: ") and words in line
