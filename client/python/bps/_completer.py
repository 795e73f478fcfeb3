"""Who watches handles for those that cannot wait: other libraries, which want to be called.

One thread for each client, begun with the first handle, watches the client's descriptor, sees to what has come and
tells the outcome; what that calls runs in it. It sleeps while no handle waits, and ends with the client: in shutdown(),
which also happens at exit. What is not complete then fails with BpsCanceledError. In a child made by fork there is no
thread, and no client.
"""

import errno
import os
import select
import threading

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
    """The thread of a client. add() may be called from any thread; everything else is the thread's own.

    A future is whatever has set_result((result, error)).
    """

    def __init__(self, client):
        self._client = client
        self._fd = client.call(client.lib.bps_client_fd, client.pointer)
        self._lock = threading.Lock()
        self._added = []  # under the lock: what the thread has not seen yet
        self._stopping = False  # under the lock
        self._pending = []  # (handle, future)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="bps-futures", daemon=True)
        self._thread.start()

    def add(self, handle, future):
        with self._lock:
            if not self._stopping:
                self._added.append((handle, future))
                self._wake()
                return
        future.set_result((None, _shut_down()))

    def stop(self):
        """Ends the thread. Whatever is under way fails; it is the daemon's until the client is closed."""
        with self._lock:
            if not self._stopping:
                self._stopping = True
                self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _wake(self):
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            pass  # it is full: readable already

    def _run(self):
        try:
            while self._take_added():
                self._client.dispatch()
                self._complete()
                self._sleep()
            self._client.dispatch()
            self._complete()
        except Exception as error:  # whoever waits must not wait for a thread that is gone
            self._fail_all(error)
            raise
        finally:
            with self._lock:
                self._stopping = True
                self._pending += self._added
                self._added = []
                os.close(self._wake_write)
                os.close(self._wake_read)
            self._fail_all(_shut_down())

    def _take_added(self):
        with self._lock:
            self._pending += self._added
            self._added = []
            return not self._stopping

    def _complete(self):
        still = []
        for handle, future in self._pending:
            if handle.poll():
                future.set_result(outcome(handle))
            else:
                still.append((handle, future))
        self._pending = still

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

    def _fail_all(self, error):
        pending, self._pending = self._pending, []
        for _, future in pending:
            future.set_result((None, error))


def _shut_down():
    return BpsCanceledError(errno.ECANCELED, "bps was shut down before it was complete")
