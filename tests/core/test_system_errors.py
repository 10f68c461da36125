"""Errors of the system name the file, the reason and what to do."""

import errno
import os

import pytest
from command_line import run

from zero_jax.cli import commands
from zero_jax.core.files.system_errors import with_remedy


@pytest.mark.parametrize("number", errno.errorcode, ids=errno.errorcode.get)
def test_every_error_of_the_system_has_a_file_a_reason_and_a_remedy(number):
    told = with_remedy(OSError(number, os.strerror(number), "runs/a b/ü%41"))
    assert told.startswith(f"runs/a b/ü%41: {os.strerror(number)} (") and ": " in told.partition("(")[2]
    assert "Errno" not in told and with_remedy(OSError(number, os.strerror(number)))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EXDEV, "Invalid link", "a", None, "b"), "a -> b: Invalid link ("),
        (OSError(errno.ENOSPC, None, b"a"), "a: No space left on device (the disk is full"),
        (OSError(errno.EIO, "Input/output error", 7), "Input/output error (the disk"),
        (OSError("x is in the way: move it away\nmore"), "x is in the way: move it away"),
        (ValueError("writing: Disk quota exceeded [tensorstore_spec='{}']"), "writing: Disk quota exceeded (the"),
        (ValueError(), "ValueError"),
    ],
)  # fmt: skip
def test_whatever_an_error_has_is_told(error, told):
    assert with_remedy(error).startswith(told)


def test_a_link_that_leads_nowhere_is_the_reason(tmp_path):
    """Creating a folder there fails with `EEXIST`, below it with `ENOTDIR` or `ENOENT`."""
    (tmp_path / "disk").symlink_to("unmounted")
    for number in (errno.ENOENT, errno.EEXIST, errno.ENOTDIR):
        error = OSError(number, os.strerror(number), str(tmp_path / "disk" / "a"))
        assert "(a part of the path is a link to a place that does not exist: mount its disk" in with_remedy(error)


def test_a_current_folder_that_was_removed_is_the_reason(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.setattr(commands, "_silence", lambda: None)
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    status, _, told = run(["inspect", "runs/mine"], capsys)
    assert status in (1, 2) and told.count("\n") == 1
    assert "No such file or directory (the current folder was removed: change to one that exists)" in told


def test_an_error_of_the_system_in_any_command_is_a_line_with_the_remedy(monkeypatch, capsys):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a.png")

    parsed = commands.parse(["plot", "runs/mine"])
    parsed.run = full
    monkeypatch.setattr(commands, "parse", lambda _: parsed)
    monkeypatch.setattr(commands, "_silence", lambda: None)
    assert run(["plot", "runs/mine"], capsys)[::2] == (
        1, "zero-jax plot: error: a.png: No space left on device (the disk is full: free some space)\n",
    )  # fmt: skip
