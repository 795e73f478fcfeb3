"""Runs the test suites of Horovod and BytePS, from a folder that somebody has, with bps, for scripts/peer-suites.

Each test is a job of its own, of processes forked from one that has imported the file and the framework once. An import of
their package finds bps's module of that name instead. peer_suites.txt names the tests that are to fail, with the
difference that each shows; any other that fails, and any of those that passes, is an error, but those that "sometimes" do.
"""

import argparse
import collections
import faulthandler
import fnmatch
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import signal
import sys
import time
import traceback
import unittest

import pytest

EXPECTED = pathlib.Path(__file__).with_name("peer_suites.txt")
PEERS = ("horovod", "byteps")
PARENT = {"horovod.torch.mpi_ops": "bps.torch", "horovod.tensorflow.mpi_ops": "bps.tensorflow"}


def arguments():
    parser = argparse.ArgumentParser(prog="peer-suites")
    parser.add_argument("-np", "--ranks", type=int, default=2, help="processes of each test (2)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds after which a test has failed (60)")
    parser.add_argument("--list", action="store_true", help="say which tests there are")
    parser.add_argument("--quiet", action="store_true", help="say only what failed, and the counts")
    parser.add_argument("--log", metavar="FILE", help="where all other output goes (none: nowhere else)")
    parser.add_argument("files", metavar="FILE[:TEST]", nargs="+", help="files of tests; the test's name may hold a *")
    return parser.parse_args()


# -- Their package is ours


def _threads():
    import threading

    def in_thread(target, args=(), name=None, daemon=True, silent=False):
        thread = threading.Thread(target=target, args=args, name=name, daemon=daemon)
        thread.start()
        return thread

    return {"in_thread": in_thread}


def _env():
    return {"get_env_rank_and_size": lambda: (int(os.environ["BPS_RANK"]), int(os.environ["BPS_SIZE"]))}


def _util():
    from packaging import version

    # The tests take what stands for Gloo: a transport that can be begun anew after shutdown().
    return {
        "gloo_built": lambda *_: True,
        "mpi_built": lambda *_: False,
        "is_version_greater_equal_than": lambda have, wanted: version.parse(have) >= version.parse(wanted),
    }


def _tensorflow():
    import tensorflow

    return {"_executing_eagerly": tensorflow.executing_eagerly}


# What the tests themselves take from a module of ours that is no program's to take.
INTERNAL = {"horovod.tensorflow": _tensorflow}
# What the helpers of the tests take from modules that are none of those that programs use.
HELPERS = {
    "horovod.common.util": _util,
    "horovod.runner.common.util.env": _env,
    "horovod.runner.util.threads": _threads,
    "horovod.tensorflow.util": _tensorflow,
}


class Renaming(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds bps.x for horovod.x and byteps.x."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in PEERS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        name = module.__spec__.name
        if name in HELPERS:
            vars(module).update(HELPERS[name]())
        elif not any(helper.startswith(f"{name}.") for helper in HELPERS if not helper.startswith("horovod.tensorflow")):
            ours = PARENT.get(name, f"bps{name[name.index('.') :]}" if "." in name else "bps")
            try:
                sys.modules[name] = importlib.import_module(ours)
                vars(sys.modules[name]).update(INTERNAL.get(name, dict)())
            except ModuleNotFoundError as error:
                raise ModuleNotFoundError(f"bps has no {error.name} for {name}", name=name) from None


def _skip(reason=""):
    raise unittest.SkipTest(reason)


def load(path):
    """The classes of tests of a file."""
    pytest.skip = _skip  # for unittest, which runs them
    sys.meta_path.insert(0, Renaming())
    sys.path[:0] = [str(path.parent), str(path.parent.parent / "utils")]
    try:
        from tensorflow.python.framework import test_util
    except ImportError:
        pass
    else:
        # Graphs of TensorFlow 1, in which nothing has an order, are refused: see bps_names(7).
        test_util.run_all_in_graph_and_eager_modes = lambda cls: cls
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if hasattr(module, "torch") and hasattr(module.torch.optim, "Muon"):
        # Tests make an optimizer of each class in torch.optim for layers with biases, which this one, newer than they, refuses.
        module.torch.optim.Muon.__module__ = "newer"
    for each in vars(module).values():
        if isinstance(each, type) and skips(each):
            each.__init__ = unittest.TestCase.__init__  # theirs may need what they are skipped for
    return unittest.defaultTestLoader.loadTestsFromModule(module)


def cases(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from cases(test)
        elif isinstance(test, unittest.loader._FailedTest):
            raise test._exception
        elif test._testMethodName != "test_session":  # tf.test.TestCase's own
            yield test


# -- One test


def skips(marked):
    """Why pytest, whose marks unittest does not know, would skip this class or function."""
    for mark in getattr(marked, "pytestmark", []):
        if mark.name == "skip" or mark.name == "skipif" and any(mark.args):
            return mark.kwargs.get("reason", "skipped")
    return None


def run_rank(test):
    """(what, why)"""
    why = skips(type(test)) or skips(getattr(test, test._testMethodName))
    if why is not None:
        return "skipped", why
    result = unittest.TestResult()
    test = type(test)(test._testMethodName)  # anew: some call init() in their constructors
    unittest.TestSuite([test]).run(result)  # with what its class sets up
    if result.skipped:
        return "skipped", result.skipped[0][1]
    wrong = result.errors + result.failures
    return ("failed", wrong[0][1]) if wrong else ("passed", "")


def fork_rank(test, number, rank, size, timeout):
    """(pid, the end of a pipe in which it says how it ended)"""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid, ours
    os.setsid()  # it may have children of its own
    faulthandler.dump_traceback_later(0.9 * timeout)  # for the log
    where = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    for prefix in ("BPS", "HOROVOD"):
        os.environ.update({f"{prefix}_{key}": str(value) for key, value in where.items()})
    os.environ["BPS_JOB"] = f"{os.environ['BPS_JOB']}.{number}"
    try:
        what, why = run_rank(test)
    except BaseException:
        what, why = "failed", traceback.format_exc()
    os.write(theirs, f"{what}\n{why}".encode()[:60000])
    try:
        sys.modules["bps._client"].shutdown()
    finally:
        os._exit(0)


def last_line(text):
    return (text.strip().splitlines() or [""])[-1]


def run_test(test, number, size, timeout):
    ranks = [fork_rank(test, number, rank, size, timeout) for rank in range(size)]
    deadline, ended = time.monotonic() + timeout, []

    def late(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    for rank, (pid, pipe) in enumerate(ranks):
        with os.fdopen(pipe, "rb") as file:
            try:
                signal.setitimer(signal.ITIMER_REAL, max(0.01, deadline - time.monotonic()))
                said = file.read().decode(errors="replace")
                os.waitpid(pid, 0)
            except TimeoutError:
                said = f"failed\nrank {rank} has not ended after {timeout:g} s"
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        what, _, why = said.partition("\n")
        ended.append((what, why) if what else ("failed", f"rank {rank} has crashed"))
    for what in ("failed", "passed", "skipped"):
        whys = [why for other, why in ended if other == what]
        if whys:
            print(test.id(), *whys, sep="\n", file=sys.stderr, flush=True)
            return what, "; ".join(dict.fromkeys(last_line(why) for why in whys))
    raise AssertionError


# -- All


def expected_differences():
    """[(file, test, reason)]"""
    lines = EXPECTED.read_text().splitlines()
    return [line.split(maxsplit=2) for line in lines if line and not line.startswith("#")]


class Report:
    def __init__(self, quiet, out):
        self.quiet, self.out = quiet, out
        self.counts = collections.defaultdict(collections.Counter)  # of each file

    def say(self, name, what, seconds=0.0, why=""):
        self.counts[name.partition(":")[0]][what] += 1
        if what == "failed" or not self.quiet:
            print(f"{what:8} {name} ({seconds:.1f} s){': ' if why else ''}{why}", file=self.out, flush=True)

    def settle(self, name, what, why, seconds, expected):
        """What it is after the table was looked at."""
        if expected is not None and what == "failed":
            what, why = "differs", expected
        elif expected is not None and what == "passed" and not expected.startswith("sometimes "):
            what, why = "failed", "it passes, but peer_suites.txt has it among the differences"
        self.say(name, what, seconds, why)

    def total(self):
        return sum(self.counts.values(), collections.Counter())

    def sum_up(self):
        files = dict(self.counts)
        if len(files) != 1:
            files["all"] = self.total()
        for file, n in files.items():
            n_run = n["passed"] + n["differs"] + n["failed"]
            share = f"{n['passed'] / max(1, n_run):.1%} of {n_run}"
            others = f"{n['differs']} in the table, {n['failed']} failed, {n['skipped']} skipped"
            print(f"{file}: {n['passed']} passed ({share}), {others}", file=self.out, flush=True)


def run_file(path, patterns, options, report):
    table = [(test, reason) for file, test, reason in expected_differences() if fnmatch.fnmatch(path.stem, file)]

    def reason_of(name):
        return next((reason for test, reason in table if fnmatch.fnmatch(name, test)), None)

    try:
        tests = list(cases(load(path)))
    except (Exception, unittest.SkipTest):
        report.settle(f"{path.stem}:import", "failed", last_line(traceback.format_exc()), 0.0, reason_of("import"))
        return
    for number, test in enumerate(tests):
        name = test._testMethodName
        if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            continue
        if options.list:
            print(f"{path}:{name}", file=report.out, flush=True)
            continue
        began = time.monotonic()
        what, why = run_test(test, f"{path.stem}.{number}", options.ranks, options.timeout)
        report.settle(f"{path.stem}:{name}", what, why, time.monotonic() - began, reason_of(name))


def main():
    options = arguments()
    out = sys.stdout
    if options.log:  # for what the tests and the frameworks say while they run
        out = os.fdopen(os.dup(1), "w")
        log = os.open(options.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    report = Report(options.quiet, out)
    for each in options.files:
        file, _, pattern = each.partition(":")
        run_file(pathlib.Path(file).resolve(), [pattern or "*"], options, report)
    if options.list:
        return 0
    report.sum_up()
    total = report.total()
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
