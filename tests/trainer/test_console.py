"""A bar on terminals, plain lines everywhere else."""

import contextlib
import functools
import io
import os
import sys
import termios

import pytest

from zero_jax.core import output
from zero_jax.trainer.reporting import console as console_module
from zero_jax.trainer.reporting.console import Console, figures, format_duration, lasting

RECORD = {
    "kind": "train",
    "step": 3,
    "loss": 3.14159,
    "grad_norm": 0.5,
    "learning_rate": 3e-3,
    "tokens_per_second": 12345.6,
    "mfu": 0.4123,
    "per_device_memory_bytes": 3 << 29,
    "data_wait_seconds": 0.0,
    "skipped": False,
    "nonfinite_leaf": None,
    "loss_scale": None,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Takes away what would make rich think otherwise of a stream."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")


def run(console, steps, **fields):
    for step in steps:
        console.step({**RECORD, "step": step, **fields})


def test_a_line_has_every_figure_that_there_is():
    assert figures(RECORD) == "loss 3.142  grad norm 0.50  lr 3.00e-03  12,346 tokens/s  MFU 41.2%  1.61 GB/device"
    assert figures({"kind": "train", "step": 1, "loss": 1.0, "mfu": None}) == "loss 1.000"
    small = {"kind": "train", "step": 1, "loss": 0.00012, "grad_norm": 0.004}
    assert figures(small) == "loss 0.00012  grad norm 0.004"  # and not 0.000, 0.00
    assert figures({"kind": "validation", "step": 1, "loss": 1.0, "ema_loss": 0.5}) == (
        "validation loss 1.000  validation loss of the average 0.500"
    )
    assert "data wait 0.50 s" in figures({**RECORD, "data_wait_seconds": 0.5})
    assert figures({**RECORD, "skipped": True, "nonfinite_leaf": "a/b"}).endswith(
        "skipped: the gradient of a/b was not finite"
    )
    assert "loss nan" in figures({"loss": float("nan"), "skipped": True})


def test_lines_come_at_the_first_the_last_and_every_so_many_steps():
    lines = []
    with contextlib.closing(Console(10, 4, log=lines.append)) as console:
        run(console, range(1, 11))
    assert [line.split("  loss")[0].split("  validation")[0] for line in lines] == [
        "step  1/10",
        "step  4/10",
        "step  8/10",
        "step 10/10",
    ]


def test_a_resumed_run_shows_its_first_step_and_skipped_steps_always_show():
    lines = []
    console = Console(100, 50, log=lines.append, first_step=60)
    run(console, [61, 62])
    run(console, [63], skipped=True)
    console.step({"kind": "validation", "step": 63, "loss": 1.0})
    assert [line.split("  loss")[0].split("  validation")[0] for line in lines] == [
        "step  61/100",
        "step  63/100",
        "step  63/100",
    ]
    assert lines[-1].endswith("validation loss 1.000")


def test_the_time_left_leaves_out_the_first_step(monkeypatch):
    lines, now = [], [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    console = Console(10, 1, log=lines.append)
    for step in range(1, 11):
        now[0] += 100 if step == 1 else 10
        run(console, [step])
    assert not lines[0].endswith("left")
    assert lines[1].endswith("1 min left")
    assert lines[8].endswith("10 s left")
    assert not lines[9].endswith("left")


def test_no_terminal_no_escape_codes():
    file = io.StringIO()
    console = Console(10, 1, log=lambda text: print(text, file=file), terminal=file)
    console.line("[bold]data[/bold] :smile: 3")
    run(console, [1, 2])
    console.close()
    assert "\x1b" not in file.getvalue() and "\r" not in file.getvalue()
    assert file.getvalue().splitlines()[0] == "[bold]data[/bold] :smile: 3"


def test_a_terminal_has_a_bar_with_the_lines_above():
    terminal, lines = Terminal(), []
    console = Console(10, 5, log=lines.append, terminal=terminal)
    console.line("[bold]data[/bold] :smile: 3")
    run(console, range(1, 8))
    console.close()
    console.line("after")
    shown = terminal.getvalue()
    assert lines == ["after"]
    assert "[bold]data[/bold] :smile: 3\n" in shown
    assert "7/10" in shown and " 70%" in shown
    assert "step  5/10  loss 3.142" in shown and "step  7/10  loss 3.142" in shown
    assert "\x1b[?25h" in shown  # the cursor is back


def test_a_line_longer_than_the_terminal_is_not_broken(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    with contextlib.closing(Console(10, 5, terminal=terminal)) as console:
        console.line("word " * 30)
    assert "word " * 30 in terminal.getvalue()


def test_a_dumb_terminal_has_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    lines, terminal = [], Terminal()
    console = Console(10, 1, log=lines.append, terminal=terminal)
    run(console, [1])
    assert len(lines) == 1 and not terminal.getvalue()


def read_or_end(terminal: int) -> bytes:
    """What a pseudo-terminal hands over next; nothing once its other end is closed and all of it has been read."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux ends it with EIO
        return b""


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals here")
def test_on_a_real_terminal():
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as terminal:
        with contextlib.closing(Console(10, 5, terminal=terminal)) as console:
            run(console, [1, 2])
            console.line("done")
    shown = b"".join(iter(lambda: read_or_end(leader), b"")).decode()
    os.close(leader)
    assert "done" in shown and "step  1/10" in shown


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals here")
def test_a_terminal_that_was_stopped_by_ctrl_s_stops_no_run(monkeypatch):
    monkeypatch.setattr(output, "PATIENCE_SECONDS", 0.05)
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)  # which the bar puts itself in the place of
        stream = output.unstalled(sys.stdout)
        with contextlib.closing(Console(10, 1, terminal=stream)) as console:
            run(console, [1])
            termios.tcflow(follower, termios.TCOOFF)
            run(console, [2, 3])
            termios.tcflow(follower, termios.TCOON)
            run(console, [4])
    shown = b"".join(iter(lambda: read_or_end(leader), b"")).decode()
    os.close(leader)
    assert "step  1/10" in shown and "step  4/10" in shown and "step  3/10" not in shown
    assert "lines are missing here" in shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0 s"), (59, "59 s"), (90, "2 min"), (3600, "1 h 0 min"), (9000, "2 h 30 min"), (190_000, "2 days 5 h")],
)
def test_times_for_people(seconds, shown):
    assert format_duration(seconds) == shown


def test_a_log_writes_what_a_terminal_cannot_show_as_escapes():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    lasting(functools.partial(print, file=stream, flush=True))("a caf\xe9, \ufffd")
    assert stream.buffer.getvalue() == b"a caf\\xe9, \\ufffd\n"


def test_a_log_on_a_full_disk_ends_nothing_and_a_reader_that_has_gone_does():
    errors, lines = [OSError(28, "No space left on device"), BrokenPipeError(), None], []

    def log(line):
        if error := errors.pop(0):
            raise error
        lines.append(line)

    told = lasting(log)
    told("lost")
    with pytest.raises(BrokenPipeError):
        told("nobody reads")
    told("written")
    assert lines == ["written"]
