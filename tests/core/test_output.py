"""A reader that stops reading stops no program."""

import io
import os
import threading

import pytest

from zero_jax.core import output
from zero_jax.core.output import UnstalledStream


@pytest.fixture
def pipe(monkeypatch):
    """Returns the reading end of a pipe, and a stream to its other end."""
    monkeypatch.setattr(output, "PATIENCE_SECONDS", 0.05)
    reading, writing = os.pipe()
    with open(reading, encoding="utf-8") as reader, open(writing, "w", encoding="utf-8") as writer:
        yield reader, writer


def in_time(call):
    """Makes a call in a thread, which it may block for ever."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_a_reader_that_stops_reading_loses_lines_and_is_told_how_many(pipe):
    reader, writer = pipe
    stream = UnstalledStream(lambda: writer)

    def write():
        for k in range(4000):
            stream.write(f"line {k} {'x' * 100}\n")

    in_time(write)
    os.set_blocking(reader.fileno(), False)
    before = reader.read().splitlines()
    assert 100 < len(before) < 4000 and before[0].startswith("line 0 ")
    print("the end", file=stream, flush=True)
    after = reader.read().split("\n")
    dropped = 4000 - sum(line.endswith("x" * 100) for line in before)
    assert after == ["", f"({dropped} lines are missing here: nothing read this output)", "the end", ""]


def test_text_that_is_longer_than_a_pipe_is_not_waited_for(pipe):
    reader, writer = pipe
    in_time(lambda: UnstalledStream(lambda: writer).write("\xe9" * 300_000))
    os.set_blocking(reader.fileno(), False)
    assert {*reader.read()} == {"\xe9"}


def test_a_stream_in_memory_gets_all_and_a_reader_that_has_ended_is_an_error(pipe):
    text = io.StringIO()
    print("a" * 5000, file=UnstalledStream(lambda: text))
    assert text.getvalue() == "a" * 5000 + "\n"
    reader, writer = pipe
    reader.close()
    with pytest.raises(BrokenPipeError):
        UnstalledStream(lambda: writer).write("a line\n")
    with open(os.devnull, "w") as other:  # which the writer closes instead, as it has text that it cannot flush
        os.dup2(other.fileno(), writer.fileno())
