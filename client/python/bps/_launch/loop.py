"""One selector for pipes, timers and signals. Everything of a run happens in turn()."""

import heapq
import itertools
import selectors
import signal
import socket
import time

MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Timer:
    """Of Loop.after(); cancel() may be called at any time."""

    def __init__(self, callback):
        self.callback = callback

    def cancel(self):
        self.callback = None


class Loop:
    def __init__(self):
        self.selector = selectors.DefaultSelector()
        self.timers = []  # a heap of (when, number, Timer)
        self.numbers = itertools.count()
        self.wakeup, self.wakeup_writer = socket.socketpair()

    def on_signals(self, numbers, callback):
        """callback(number) in a turn after each signal. Of the main thread, for the rest of the process."""
        self.wakeup.setblocking(False)
        self.wakeup_writer.setblocking(False)
        self.watch(self.wakeup, lambda: [callback(number) for number in self.wakeup.recv(4096)])
        signal.set_wakeup_fd(self.wakeup_writer.fileno(), warn_on_full_buffer=False)
        for number in numbers:
            # What nohup, or a shell in the background, has us ignore stays ignored, here and in the ranks.
            if number in MAY_BE_IGNORED and signal.getsignal(number) is signal.SIG_IGN:
                continue
            signal.signal(number, lambda *_: None)  # the wakeup socket tells the loop

    def watch(self, file, callback, events=selectors.EVENT_READ):
        """Calls callback whenever the file is ready, in place of what was called before."""
        if file.fileno() in self.selector.get_map():
            self.selector.modify(file, events, callback)
        else:
            self.selector.register(file, events, callback)

    def forget(self, file):
        if file.fileno() in self.selector.get_map():
            self.selector.unregister(file)

    def after(self, seconds, callback):
        timer = Timer(callback)
        heapq.heappush(self.timers, (time.monotonic() + seconds, next(self.numbers), timer))
        return timer

    def turn(self, deadline=None):
        """Waits until something happens, and handles it. deadline: on time.monotonic(), when to return at the latest."""
        until = [when for when in (deadline, self.timers[0][0] if self.timers else None) if when is not None]
        timeout = max(0.0, min(until) - time.monotonic()) if until else None
        for key, _ in self.selector.select(timeout):
            if key.fd in self.selector.get_map():  # not forgotten by one before it
                key.data()
        while self.timers and self.timers[0][0] <= time.monotonic():
            timer = heapq.heappop(self.timers)[2]
            if timer.callback is not None:
                timer.callback()
