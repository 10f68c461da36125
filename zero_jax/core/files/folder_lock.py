"""A lock of a folder: a file with the process that writes there, which keeps others from writing."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

from etils import epath

from zero_jax.core.files.untrusted import is_bucket, parse_json, read_file

_MAX_BYTES = 1 << 16
_ATTEMPTS = 100
# A link is refused, and a pipe is not waited for.
_OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FolderInUse(ValueError):
    """Raised for a folder that another run writes to."""


class FolderLock:
    """An advisory lock of a folder, until it is released or the process ends.

    On a file system with locks (`flock`: local ones, NFS, Lustre, GPFS, CephFS) the system releases the lock when the
    process ends in any way; a file that is left behind is reused. Elsewhere, and in buckets, the content of the file is
    the lock: it refuses while its process is alive on this host, and replaces a holder on another host, whose next
    `take` raises.
    """

    def __init__(self, file: epath.Path, *, run: str = "") -> None:
        """Takes the path of the lock file, in the folder to lock, and the name of this run for errors of others."""
        self.file, self._run, self._token = file, run, secrets.token_hex(8)
        self._descriptor: int | None = None
        self._pid = 0  # of the process that took it, not of its forks

    def __enter__(self) -> FolderLock:
        self.take()
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()

    def __del__(self) -> None:  # a Checkpointer that was not closed unlocks the folder
        self._close()

    def take(self) -> None:
        """Takes the lock, or checks that it is still ours."""
        # The lock is of the file that was opened: one that has its place since then is not locked.
        if self._descriptor is not None and _is_file(self._descriptor, self.file):
            return self._write(self._descriptor)
        # Held by content: a lock by `flock` has a descriptor. If the file has another token now, it was taken from us.
        had_it = self._pid == os.getpid() and self._descriptor is None
        self._close()
        is_taken = not is_bucket(self.file) and self._take_from_system()
        if not is_taken:
            self._take_by_content(had_it)
        self._pid = os.getpid()

    def seen(self) -> str:
        """Returns the token in the file, or '' where there is none: it tells two folders of one path apart."""
        with contextlib.suppress(OSError, ValueError):
            return self._holder().get("token", "")
        return ""

    def check(self) -> None:
        """Raises as `take` would, without taking the lock; the file has to exist, and is removed if it is stale."""
        if not is_bucket(self.file):
            self.take()
            self.release()
        elif (holder := self._holder()).get("host") == socket.gethostname() and _is_alive(holder):
            raise self.refusal()

    def release(self) -> None:
        """Releases the lock and removes its file, if we have it."""
        # In a fork: to close its copy of the descriptor leaves the parent's lock as it is.
        if self._pid != os.getpid():
            return self._close()
        with contextlib.suppress(OSError):
            is_own = self._descriptor is not None and _is_file(self._descriptor, self.file)
            if is_own or (self._descriptor is None and self._holder().get("token") == self._token):
                # Before the descriptor is closed: afterwards the file may be the lock of another run.
                self.file.unlink()
        self._close()
        self._pid = 0

    def _take_from_system(self) -> bool:
        """Takes the lock by `flock`; returns whether the file system has locks."""
        for _ in range(_ATTEMPTS):
            try:
                descriptor = os.open(self.file, _OPEN_FLAGS, 0o666)
            except OSError:
                self._holder()  # refuses a link or a folder
                raise
            with contextlib.ExitStack() as opened:
                opened.callback(os.close, descriptor)
                try:
                    # Not `lockf`, whose locks a process loses as it closes any descriptor of the file (`_holder`).
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise self.refusal() from error
                except OSError:
                    return False
                self._holder()  # refuses a file that is not a lock
                if not _is_file(descriptor, self.file):  # its owner has just removed it
                    continue
                # It may have the content of a process that has ended, which `_write` would leave.
                os.ftruncate(descriptor, 0)
                self._write(descriptor)
                opened.pop_all()
            self._descriptor = descriptor
            return True
        raise FolderInUse(f"{self.file} is made and removed all the time: is a run started there again and again?")

    def _write(self, descriptor: int) -> None:
        """Writes the content of a lock that has none: on a full disk it holds without, and the next `take` tries."""
        with contextlib.suppress(OSError):
            content = self._content().encode()
            if not os.fstat(descriptor).st_size and os.pwrite(descriptor, content, 0) < len(content):
                os.ftruncate(descriptor, 0)

    def _take_by_content(self, had_it: bool) -> None:
        holder = self._holder()
        if holder.get("token") != self._token:
            if holder and (had_it or (holder.get("host") == socket.gethostname() and _is_alive(holder))):
                raise self.refusal()
            self.file.write_text(self._content())
        # Read again: where two wrote at once, both read the content of the later one.
        if self._holder().get("token") != self._token:
            raise self.refusal()

    def _holder(self) -> dict[str, Any]:
        """Returns the content of the file, about the owner of the lock; raises `FolderInUse` if it is not a lock."""
        if not (self.file.exists() or os.path.lexists(self.file)):
            return {}
        error = FolderInUse(f"{self.file} is not a lock file of zero_jax: move it away, or choose another folder")
        if os.path.islink(self.file):
            raise error
        try:
            text = read_file(self.file, limit_bytes=_MAX_BYTES)
            holder = parse_json(text) if text else {}
        except (ValueError, IsADirectoryError):
            raise error from None
        if not isinstance(holder, dict) or (holder and holder.get("zero_jax") != "lock"):
            raise error
        return holder

    def _content(self) -> str:
        holder = {
            "zero_jax": "lock",
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "run": self._run,
            "process_start": _start_of(os.getpid()),
            "token": self._token,
        }
        return json.dumps(holder) + "\n"

    def refusal(self) -> FolderInUse:
        """Returns the error for a folder that the process in the file writes to."""
        try:
            holder = self._holder()
        except (OSError, FolderInUse):
            holder = {}
        who = "a process that left no name"
        if holder:
            run = f", run {holder['run']}" if holder.get("run") else ""
            who = f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}{run}"
        is_here = holder.get("pid") == os.getpid() and holder.get("host") == socket.gethostname()
        end = "close its Checkpointer in this process" if is_here else "stop that one or wait until it ends"
        return FolderInUse(
            f"{self.file.parent} is in use by another run ({who}): {end}, or choose another folder or name. If there "
            f"is none any more, remove {self.file}"
        )

    def _close(self, close: Callable[[int], None] = os.close) -> None:  # at the end of a process `os` is empty
        if self._descriptor is not None:
            close(self._descriptor)
        self._descriptor = None


def _is_file(descriptor: int, path: epath.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def _is_alive(holder: dict[str, Any]) -> bool:
    """Returns whether the process of this host that a lock names is still alive, and not another of its number."""
    pid = holder.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        # Signal 0 only asks whether the process exists.
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    starts = holder.get("process_start"), _start_of(pid)
    # The system gives the number of a process that has ended to a later one, which started at another time.
    return None in starts or starts[0] == starts[1]


def _start_of(pid: int) -> str | None:
    """Returns the start time of a process in the system's units, or None where it is unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # Field 22 of the line, counted from behind the program's name, which is in parentheses and may have some,
            # and spaces.
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
