"""Ctrl-C outside a run: a line, never lost."""

import os
import signal
import subprocess
import sys
import time

import pytest

from zero_jax.cli import commands


@pytest.fixture
def hooks(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", lambda *_: print("other", file=sys.stderr))
    monkeypatch.setattr(sys, "unraisablehook", lambda _: print("other", file=sys.stderr))
    commands._prepare_interrupts.__wrapped__()


@pytest.mark.usefixtures("hooks")
def test_a_traceback_is_a_line_for_ctrl_c_alone(capsys):
    for error, told in [(KeyboardInterrupt(), "\nzero-jax: stopped by Ctrl-C\n"), (OSError(), "other\n")]:
        sys.excepthook(type(error), error, None)
        assert capsys.readouterr().err == told


@pytest.mark.usefixtures("hooks")
def test_ctrl_c_in_a_callback_is_not_lost(capsys):
    class Dying:
        def __init__(self, error):
            self.error = error

        def __del__(self):
            raise self.error

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        Dying(OSError())
        assert capsys.readouterr().err == "other\n"
        with pytest.raises(KeyboardInterrupt):
            Dying(KeyboardInterrupt())
            time.sleep(10)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_a_command_that_is_stopped_ends_by_the_signal_with_a_line():
    """So that a loop of a shell ends too."""
    code = "import zero_jax.cli.commands as c; c.parse = lambda _: __import__('signal').raise_signal(2); c.main([])"
    command = "import signal; signal.signal(2, signal.default_int_handler); " + code
    ended = subprocess.run([sys.executable, "-c", command], env=os.environ, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "\nzero-jax: stopped by Ctrl-C\n")
