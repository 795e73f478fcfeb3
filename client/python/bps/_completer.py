"""Who watches handles for those that cannot wait: other libraries, which want to be called.

Threads of each client, the first begun with the first handle, take turns: one watches the client's descriptor, and when
a handle is complete it lets another watch and tells the outcome itself; what that calls runs in it. So what is called may
wait for other handles, and keeps no other handle's outcome from being told: the PowerSGD hook of PyTorch does. There are two threads, and one more for each callback that waits.
They sleep while no handle waits, and end with the client: in shutdown(), which also happens at exit. What is not complete
then fails with BpsCanceledError. In a child made by fork there is no thread, and no client.
"""

import contextlib
import errno
import os
import select
import sys
import threading
import time

from ._client import CLOSE_TIMEOUT_S, SLICE_MS
from ._errors import BpsCanceledError


def outcome(handle):
    """(result, error) of a handle that is complete."""
    try:
        return handle.wait(), None  # not wait(0): another thread may hold the handle for a moment, to poll it
    except Exception as error:  # whatever it is, the one who waits for the future is to hear of it
        return None, error


def completer_of(client):
    with client.lock:
        client.check_open()
        if client.completer is None:
            client.completer = Completer(client)
        return client.completer


class Completer:
    """The threads of a client. add() and stop() may be called from any thread; everything else is theirs.

    A future is whatever has set_result((result, error)).
    """

    def __init__(self, client):
        self._client = client
        self._fd = client.call(client.lib.bps_client_fd, client.pointer)
        self._watch = threading.Lock()  # of the thread that watches
        self._pending = []  # under _watch: (handle, future)
        self._lock = threading.RLock()  # taken last; a signal handler may call shutdown()
        self._added = []  # under the lock: what no thread has seen yet
        self._stopping = False  # under the lock
        self._closed = False  # under the lock: no thread watches any more
        self._threads = []  # under the lock
        self._n_waiting = 0  # under the lock: threads that are to watch next
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with self._lock:
            self._begin_thread()

    def add(self, handle, future):
        with self._lock:
            if not self._stopping:
                self._added.append((handle, future))
                self._wake()
                return
        future.set_result((None, _shut_down()))

    def stop(self):
        """Ends the threads. Whatever is under way fails; it is the daemon's until the client is closed."""
        with self._lock:
            if not self._stopping:
                self._stopping = True
                self._wake()
            threads = [t for t in self._threads if t is not threading.current_thread()]
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _begin_thread(self):
        """With the lock."""
        thread = threading.Thread(target=self._run, name="bps-futures", daemon=True)
        thread.start()
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        self._n_waiting += 1

    def _wake(self):
        """With the lock, before _closed."""
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            pass  # it is full: readable already

    def _run(self):
        told = False
        while not told or self._waits_again():
            with self._watch:
                ended = self._ended()
            if not ended:
                break
            for future, what in ended:
                try:
                    future.set_result(what)
                except Exception:  # of what it calls: others are to hear of theirs all the same
                    _report()
            told = True

    def _waits_again(self):
        """Whether this thread, which has told what it had to, is needed: one that watches and one that waits to are enough."""
        with self._lock:
            if self._n_waiting:
                return False
            self._n_waiting += 1
            return True

    def _ended(self):
        """[(future, (result, error))] of a handle that is complete, once there is one; at the end of all; then of none."""
        with self._lock:
            self._n_waiting -= 1
            if self._closed:
                return []
        ended = []
        try:
            while not ended and self._take_added():
                self._client.dispatch()
                ended = self._complete(1)
                if not ended:
                    self._sleep()
            if not ended:
                self._client.dispatch()
                return self._complete(len(self._pending)) + self._close(_shut_down())
        except Exception as error:  # whoever waits must not wait for a thread that is gone
            _report()
            return self._close(error)
        with self._lock:
            if not self._n_waiting:
                with contextlib.suppress(RuntimeError):  # there can be no more threads: this one watches again when it has told
                    self._begin_thread()
        return ended

    def _close(self, error):
        """What is left, which fails. Nothing is added afterwards."""
        with self._lock:
            self._stopping = self._closed = True
            left = self._pending + self._added
            self._pending, self._added = [], []
            os.close(self._wake_write)
            os.close(self._wake_read)
        return [(future, (None, error)) for _, future in left]

    def _take_added(self):
        with self._lock:
            added, self._added = self._added, []
            self._pending += added
            return not self._stopping

    def _complete(self, most):
        """Takes out the first that are complete."""
        ended, still = [], []
        for handle, future in self._pending:
            if len(ended) < most and handle.poll():
                ended.append((future, outcome(handle)))
            else:
                still.append((handle, future))
        self._pending = still
        return ended

    def _sleep(self):
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        if self._pending:
            poll.register(self._fd, select.POLLIN)
        # The descriptor tells of everything but what another thread, out of slots, has taken in at one side: see
        # Client.sweep(). Hence the look from time to time.
        poll.poll(5 * SLICE_MS if self._pending else None)
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            pass


def _report():
    """The exception at hand, as of a thread that it ends."""
    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


def _shut_down():
    return BpsCanceledError(errno.ECANCELED, "bps was shut down before it was complete")
