"""Runs PyTorch's own tests of torch.distributed, which come with it, with the backend bps, for scripts/torch-suite.

Each test is run by a number of processes, forked from this one, which has imported PyTorch once. Tests that
torch_suite.txt names are expected to fail, for the reason it gives; any other that fails, and any of those that passes,
is an error.

Many tests are only for some backends that they know, mostly for gloo or for mpi, though they hold for any. --as gloo
lets bps pass for that when the tests are chosen.
"""

import argparse
import os
import pathlib
import sys
import tempfile
import time
import unittest

EXPECTED = pathlib.Path(__file__).with_name("torch_suite.txt")


def arguments():
    parser = argparse.ArgumentParser(prog="torch-suite")
    parser.add_argument("-np", "--ranks", type=int, default=4, help="processes of each test (4)")
    parser.add_argument("--as", dest="name", default="bps", choices=["bps", "gloo", "mpi"], help="whose tests (bps)")
    parser.add_argument("--list", action="store_true", help="say which tests there are")
    parser.add_argument("--quiet", action="store_true", help="say only what failed, and the counts")
    parser.add_argument("--log", metavar="FILE", help="where all other output goes (none: nowhere else)")
    parser.add_argument("tests", nargs="*", help="their names, or parts of names with a * (all)")
    return parser.parse_args()


def expected_failures(backend):
    """{name of a test: reason}"""
    lines = [line.split(maxsplit=2) for line in EXPECTED.read_text().splitlines() if line and not line.startswith("#")]
    return {name: reason for backends, name, reason in lines if backend in backends.split(",")}


def suite(options, folder):
    """The class of tests. torch takes what is to be tested from the environment when its module is imported."""
    os.environ.update(
        BACKEND=options.name,
        WORLD_SIZE=str(options.ranks),
        TEMP_DIR=folder,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",  # a free one; groups find each other through a file
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="120",
    )
    import bps.torch  # noqa: F401  it registers the backend
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in ("ddp", "gpu", "plugin", "subgroup"):  # gpu: what a test needs besides, it asks for
        DistTestCases.backend_feature[feature].update({"bps", options.name})
    DistTestCases.skip_collective["sendrecv anysource"].update({"bps", options.name})

    from torch.testing._internal.distributed import distributed_test
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    distributed_test.BACKEND = "bps"  # when they run; which of them run has been decided
    for backends in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
        getattr(distributed_test, backends).clear()  # events of the profiler, which are gloo's and mpi's own

    class Bps(TestDistBackend, DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._fork_processes()

        def _fork_processes(self):
            import torch.multiprocessing

            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def id(self):
            return self._testMethodName

    return Bps


class Result(unittest.TestResult):
    def __init__(self, expected, quiet, out):
        super().__init__()
        self.out = out
        self.expected = expected
        self.quiet = quiet
        self.counts = {"passed": 0, "failed": 0, "skipped": 0, "failed as expected": 0}
        self.began = 0.0

    def startTest(self, test):
        super().startTest(test)
        self.began = time.monotonic()

    def say(self, test, what, why=""):
        self.counts[what] += 1
        if what == "failed" or not self.quiet:
            seconds = time.monotonic() - self.began
            print(f"{what:18} {test.id()} ({seconds:.1f} s){': ' if why else ''}{why}", file=self.out, flush=True)

    def addSuccess(self, test):
        if test.id() in self.expected:
            self.say(test, "failed", "it passes, but is listed as a failure to expect")
        else:
            self.say(test, "passed")

    def addSkip(self, test, reason):
        self.say(test, "skipped", reason)

    def addFailure(self, test, error):
        if test.id() in self.expected:
            self.say(test, "failed as expected", self.expected[test.id()])
        else:
            self.say(test, "failed", self._exc_info_to_string(error, test))

    addError = addFailure


def main():
    options = arguments()
    out = sys.stdout
    if options.log:  # for what the tests and torch say while they run
        out = os.fdopen(os.dup(1), "w")
        log = os.open(options.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    with tempfile.TemporaryDirectory() as folder:
        loader = unittest.TestLoader()
        loader.testNamePatterns = [f"*.{name}" for name in options.tests] or None
        tests = loader.loadTestsFromTestCase(suite(options, folder))
        if options.list:
            print("\n".join(test.id() for test in tests), file=out, flush=True)
            return 0
        result = Result(expected_failures(options.name), options.quiet, out)
        tests.run(result)
    print(", ".join(f"{count} {what}" for what, count in result.counts.items()), file=out, flush=True)
    return 1 if result.counts["failed"] or not result.counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
