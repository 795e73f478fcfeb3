"""What Horovod and BytePS programs ask about the job, in several ranks; and leaving and coming back."""

import errno
import os

import numpy as np

import bps
from bps import _horovod as names


def check_where_it_is():
    assert names.cross_size() == 1 and names.cross_rank() == 0 and names.is_homogeneous()
    assert not names.mpi_built() and not names.gloo_enabled() and names.nccl_built() == 0


def check_process_sets():
    everybody = names.ProcessSet(range(bps.size()))
    assert everybody.size() == bps.size() and everybody.rank() == bps.rank() and everybody.included()
    for good in (None, 0, names.global_process_set, everybody):
        names.check_process_set(good)
    assert names.add_process_set(names.global_process_set) is names.global_process_set
    refused(lambda: names.add_process_set(range(bps.size())), "in use already")
    assert not names.remove_process_set(names.global_process_set) and not names.remove_process_set(everybody)
    some = names.ProcessSet([1])
    assert some.size() is some.rank() is some.process_set_id is None and some.included() == (bps.rank() == 1)
    for wrong in (some, 7, "gpus"):
        refused(lambda wrong=wrong: names.check_process_set(wrong), repr(wrong), "new_group")


def check_a_forked_child_has_no_process_sets():
    first = names.add_process_set([0])
    child = os.fork()
    if not child:
        os._exit(first.process_set_id is not None)
    assert os.waitpid(child, 0)[1] == 0
    assert names.remove_process_set(first)


def check_timeline():
    try:
        names.start_timeline("/tmp/timeline.json")
        raise AssertionError("a timeline was begun")
    except bps.BpsError as error:
        assert error.errno == errno.EOPNOTSUPP and "bpsctl" in str(error)
    names.stop_timeline()


def check_suspend_and_resume():
    rank, size = bps.rank(), bps.size()
    ones = np.ones(10, "float32")
    assert bps.push_pull(ones, average=False, name="before")[0] == size
    bps.barrier()
    names.suspend()
    assert not bps.is_initialized()
    try:
        names.resume(0, 0)
        raise AssertionError("a job on no machine was joined")
    except bps.BpsValueError:
        pass
    names.resume(1, 0)
    assert (bps.rank(), bps.size()) == (rank, size)
    assert bps.push_pull(ones * 2, average=False, name="before")[0] == 2 * size


def refused(function, *words):
    try:
        function()
    except bps.BpsValueError as error:
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError(f"taken: {words}")


def main():
    refused(lambda: names.init([0, 1]), "[0, 1]", "by name")
    refused(lambda: names.init("/run/bps.sock"), "socket=")
    refused(lambda: names.init(comm=[0]), "launcher")
    assert not bps.is_initialized()
    try:
        names.resume(1, 0)
        raise AssertionError("what was never suspended was resumed")
    except bps.BpsError as error:
        assert "suspend" in str(error)
    names.init(True, comm=None, process_sets="dynamic")
    bps.barrier()
    bps.shutdown()
    one = names.ProcessSet([1])
    for wrong, words in (
        ([names.ProcessSet([2])], ["ProcessSet([2])", "2 ranks"]),
        ([names.ProcessSet(range(2))], ["ProcessSet([0, 1])", "in use already"]),
        ([one, names.ProcessSet([1])], ["ProcessSet([1])", "in use already"]),
    ):
        refused(lambda wrong=wrong: names.init(process_sets=wrong), *words)
        assert not bps.is_initialized() and one.process_set_id is None
    names.init(process_sets=[one])
    assert one.process_set_id and one.size() == 1 and one.rank() == (0 if bps.rank() == 1 else None)
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
    assert one.process_set_id is None  # since suspend()
    bps.barrier()
    print("done", flush=True)


if __name__ == "__main__":
    main()
