"""A reader that stops reading stops no program."""

import contextlib
import io
import os
import subprocess
import sys
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


def test_a_slow_reader_loses_nothing(pipe):
    reader, writer = pipe
    stream = UnstalledStream(lambda: writer)
    lines = [f"line {k} {'x' * 100}\n" for k in range(4000)]
    in_time(lambda: [stream.write(line) for line in lines])
    read = []
    os.set_blocking(reader.fileno(), False)
    for k in range(20):  # each makes room for some of what is held
        read.append(reader.read())
        stream.write(f"late {k}\n")
    writer.close()
    read.append(reader.read())
    assert "".join(read) == "".join([*lines, *(f"late {k}\n" for k in range(20))])
    with open(os.devnull, "w") as other:  # which the fixture closes instead
        os.dup2(other.fileno(), reader.fileno())


def test_what_is_held_is_written_at_the_end_of_a_program():
    program = "from zero_jax.core.output import unstalled; import sys; out = unstalled(sys.stdout)\n"
    program += "from zero_jax.core import output; output.PATIENCE_SECONDS = 0.05\n"
    program += "[print(k, 'x' * 100, file=out) for k in range(4000)]; print('all', file=sys.stderr, flush=True)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1, text=True) as process:
        assert process.stderr.readline() == "all\n"
        assert process.stdout.read().splitlines() == [f"{k} {'x' * 100}" for k in range(4000)]


def test_a_reader_that_stops_reading_loses_lines_and_is_told_how_many(pipe, monkeypatch):
    monkeypatch.setattr(output, "MAX_HELD", 0)
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
    in_time(lambda: print("\xe9" * 300_000, end="", file=UnstalledStream(lambda: writer), flush=True))
    os.set_blocking(reader.fileno(), False)
    assert {*reader.read()} == {"\xe9"}


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals here")
def test_a_terminal_that_nothing_reads_stops_nothing_whatever_the_lengths_of_lines(monkeypatch):
    """As of a connection that hangs: no Ctrl-S says so, and what has room for a line may have none for its end."""
    monkeypatch.setattr(output, "PATIENCE_SECONDS", 0.05)
    leader, follower = os.openpty()
    with open(follower, "w") as terminal:
        stream = UnstalledStream(lambda: terminal)
        in_time(lambda: [stream.write("x" * (k * 37 % 300) + "\n") for k in range(3000)])
        reader = threading.Thread(target=lambda: [*iter(lambda: read_or_end(leader), b"")], daemon=True)
        reader.start()
    reader.join(60)
    os.close(leader)


def read_or_end(descriptor):
    try:
        return os.read(descriptor, 65536)
    except OSError:  # EIO, of a terminal that is closed
        return b""


def test_a_line_is_one_write_and_its_beginning_is_written_when_asked_for(pipe):
    """Lines of processes that share a pipe would be mixed."""
    reader, writer = pipe
    stream = UnstalledStream(lambda: writer)
    print("a", "b", file=stream)
    print("c", end="", file=stream)
    assert os.read(reader.fileno(), 100) == b"a b\n"
    stream.flush()
    assert os.read(reader.fileno(), 100) == b"c"


def test_of_a_line_with_a_character_that_the_encoding_lacks_nothing_is_written(tmp_path):
    with open(tmp_path / "log", "w", encoding="ascii") as file:
        with pytest.raises(UnicodeEncodeError):
            print("a" * 2000 + "\xe9", file=UnstalledStream(lambda: file))
    assert (tmp_path / "log").read_text() == ""


def test_a_process_without_stdout_and_a_notebook_lose_nothing_that_they_had(pipe):
    """A notebook's stream has the descriptor of the terminal that its server was started in, which may be stopped."""
    print("a line", file=UnstalledStream(lambda: None), flush=True)
    assert not UnstalledStream(lambda: None).isatty()
    _, writer = pipe
    os.set_blocking(writer.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer.fileno(), b"x" * 4096)
    notebook = io.StringIO()
    notebook.fileno = writer.fileno
    print("a line", file=UnstalledStream(lambda: notebook))
    assert notebook.getvalue() == "a line\n"


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


def test_lines_of_several_threads_are_each_there_once(pipe):
    """As those of a save in the background beside those of the steps: a run ended with an `IndexError`."""
    reader, writer = pipe
    stream, failures = UnstalledStream(lambda: writer), []

    def work(name):
        try:
            for k in range(300):
                print(f"{name} {k}", file=stream)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    read = [reader.readline() for _ in range(4 * 300)] if not failures else []
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(read) == sorted(f"{name} {k}\n" for name in "abcd" for k in range(300))


def test_a_line_of_a_signal_before_a_line_is_not_written_twice(pipe):
    reader, writer = pipe
    waiting = [lambda: print("signal", file=stream)]

    def interrupted():
        for handler in [waiting.pop()] if waiting else []:
            handler()
        return writer

    stream = UnstalledStream(interrupted)
    print("step", file=stream)
    writer.write("end\n")
    writer.flush()
    assert [reader.readline() for _ in range(3)] == ["signal\n", "step\n", "end\n"]


def test_a_line_of_a_signal_within_a_line_comes_after_it(pipe):
    reader, writer = pipe
    stream = UnstalledStream(lambda: writer)
    flush = writer.flush

    def interrupted():
        writer.flush = flush
        print("signal", file=stream)
        flush()

    writer.flush = interrupted
    print("step", file=stream)
    assert [reader.readline() for _ in range(2)] == ["step\n", "signal\n"]
