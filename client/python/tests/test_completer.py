"""What those hear whom the completer tells of an operation."""

import threading

from bps._completer import outcome
from bps._ops import Handle


class Complete:
    """A request that is complete."""

    turn = None

    def poll(self):
        return True

    def outcome(self):
        return None


def steps(result):
    yield Complete()
    return result


def test_the_outcome_is_told_while_another_thread_holds_the_handle():
    handle = Handle(steps("result"))
    assert handle.poll()
    got = []
    with handle._operation._lock:  # as another thread's poll() does
        thread = threading.Thread(target=lambda: got.append(outcome(handle)))
        thread.start()
        thread.join(0.05)  # the outcome cannot be told yet, and is no error
        assert not got
    thread.join()
    assert got == [("result", None)]
