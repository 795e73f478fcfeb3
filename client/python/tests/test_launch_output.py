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


@pytest.fixture
def place():
    target = Target()
    return target, *(output.Lines(f"[{rank}] ", target) for rank in range(2))


def test_lines_are_whole(place):
    target, first, second = place
    first.feed(b"one\nbegin")
    second.feed(b"other\n\n")
    first.feed(b" and end\n")
    first.show()
    assert target.taken() == b"[0] one\n[1] other\n[1] \n[0] begin and end\n"


def test_a_beginning_is_shown_when_nothing_follows(place):
    target, first, second = place
    first.feed(b"go on? ")
    assert target.taken() == b""
    first.show()
    assert target.taken() == b"[0] go on? "
    first.feed(b"yes\n")
    assert target.taken() == b"yes\n"
    first.feed(b"half")
    first.show()
    second.feed(b"other\n")
    first.feed(b" and half\n")
    assert target.taken() == b"[0] half\n[1] other\n[0]  and half\n"


def test_a_bar_is_written_over(place):
    target, first, second = place
    first.feed(b"\rbar 1\rbar 2\r")
    assert target.taken() == b"[0] bar 1\r[0] bar 2"
    first.feed(b"bar 3")
    first.show()
    assert target.taken() == b"\r[0] bar 3"
    second.feed(b"other\n")
    first.feed(b"\rbar 4\n")
    assert target.taken() == b"\n[1] other\n[0] bar 4\n"


def test_lines_that_end_as_windows_has_it(place):
    target, first, _ = place
    first.feed(b"one\r")
    first.feed(b"\ntwo\r\n")
    assert target.taken() == b"[0] one\n[0] two\n"


def test_the_end_of_a_stream_ends_its_line(place):
    target, first, second = place
    first.feed(b"bar\r")
    first.feed(b"")
    second.feed(b"half")
    second.show()
    second.feed(b"")
    assert target.taken() == b"[0] bar\n[1] half\n"


def test_words_of_our_own_are_lines(place):
    target, first, _ = place
    first.feed(b"half")
    first.show()
    target.say("bpslaunch: words")
    first.feed(b" more\n")
    assert target.taken() == b"[0] half\nbpslaunch: words\n[0]  more\n"


def test_files_get_the_same_bytes(place, tmp_path):
    target, _, _ = place
    with open(tmp_path / "stdout", "wb") as file:
        lines = output.Lines("[0] ", target, file=file)
        for data in (b"\rbar 1", b"\rbar 2\n", b"half", b""):
            lines.feed(data)
    assert (tmp_path / "stdout").read_bytes() == b"\rbar 1\rbar 2\nhalf"
