"""Lines of several streams to one place."""

import pytest

from bps._launch import output


class Target(output.Target):
    def __init__(self):
        super().__init__(-1)
        self.written = b""

    def write(self, data):
        self.written += data

    def taken(self):
        written, self.written = self.written, b""
        return written


class Loop:
    """after() comes when the test says so."""

    def __init__(self):
        self.callbacks = []

    def after(self, _, callback):
        self.callbacks.append(callback)
        return callback

    def time_passes(self):
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()


@pytest.fixture
def place():
    target, loop = Target(), Loop()
    return target, loop, *(output.Lines(f"[{rank}] ", target, loop) for rank in range(2))


def test_lines_are_whole(place):
    target, loop, first, second = place
    first.feed(b"one\nbegin")
    second.feed(b"other\n\n")
    first.feed(b" and end\n")
    loop.time_passes()
    assert target.taken() == b"[0] one\n[1] other\n[1] \n[0] begin and end\n"


def test_a_beginning_shows_after_a_moment(place):
    target, loop, first, second = place
    first.feed(b"go on? ")
    assert target.taken() == b""
    loop.time_passes()
    assert target.taken() == b"[0] go on? "
    first.feed(b"yes\n")
    assert target.taken() == b"yes\n"
    first.feed(b"half")
    loop.time_passes()
    second.feed(b"other\n")
    first.feed(b" and half\n")
    assert target.taken() == b"[0] half\n[1] other\n[0]  and half\n"


def test_what_grows_is_waited_for_but_not_for_long(place):
    target, loop, first, second = place
    first.feed(b"begin")
    first.feed(b" and")
    loop.time_passes()
    second.feed(b"other\n")
    first.feed(b" end\n")
    assert target.taken() == b"[1] other\n[0] begin and end\n"
    for _ in range(2 * output.SHOW_MAX):
        first.feed(b".")
        loop.time_passes()
    assert target.taken().startswith(b"[0] " + b"." * output.SHOW_MAX)


def test_a_bar_is_written_over(place):
    target, loop, first, second = place
    first.feed(b"\rbar 1\rbar 2\r")
    assert target.taken() == b"[0] bar 1\r[0] bar 2"
    first.feed(b"bar 3")
    loop.time_passes()
    assert target.taken() == b"\r[0] bar 3"
    second.feed(b"other\n")
    first.feed(b"\rbar 4\n")
    assert target.taken() == b"\n[1] other\n[0] bar 4\n"


def test_lines_that_end_as_windows_has_it(place):
    target, _, first, _ = place
    first.feed(b"one\r")
    first.feed(b"\ntwo\r\n")
    assert target.taken() == b"[0] one\n[0] two\n"


def test_the_end_of_a_stream_ends_its_line(place):
    target, loop, first, second = place
    first.feed(b"bar\r")
    first.feed(b"")
    second.feed(b"half")
    loop.time_passes()
    second.feed(b"")
    assert target.taken() == b"[0] bar\n[1] half\n"


def test_words_of_our_own_are_lines(place):
    target, loop, first, _ = place
    first.feed(b"half")
    loop.time_passes()
    target.say("bpslaunch: words")
    first.feed(b" more\n")
    assert target.taken() == b"[0] half\nbpslaunch: words\n[0]  more\n"


def test_files_get_the_same_bytes(place, tmp_path):
    target, loop, _, _ = place
    with open(tmp_path / "stdout", "wb") as file:
        lines = output.Lines("[0] ", target, loop, file=file)
        for data in (b"\rbar 1", b"\rbar 2\n", b"half", b""):
            lines.feed(data)
    assert (tmp_path / "stdout").read_bytes() == b"\rbar 1\rbar 2\nhalf"
