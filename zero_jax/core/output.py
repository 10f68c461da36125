"""A text stream to a terminal or pipe that no program waits for longer than some seconds."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import time
from collections.abc import Callable
from typing import TextIO, cast

PATIENCE_SECONDS = 5.0
# At most 4096 bytes, for which a pipe has room if it has any.
_PIECES = re.compile(r"(?s:.{1,1024})")
# A terminal that has any room has it for 256 bytes. What ends a line takes two, after a text for which there was room.
_PIECES_OF_TERMINALS = re.compile(r"\n|[^\n]{1,60}")


def unstalled(stream: TextIO) -> TextIO:
    """Returns a stream like another one, which no writer waits for longer than some seconds."""
    return cast(TextIO, UnstalledStream(lambda: stream))


class UnstalledStream(io.TextIOBase):
    """A text stream whose writer goes on if its reader stops reading, as after Ctrl-S or in a pager.

    What has no room within `PATIENCE_SECONDS` is dropped, and so is what follows while there is no room; then a line
    says how many lines are missing. Files always have room. `stream` is called at each write: `sys.stdout` may be
    replaced, and is None in a process that has none, which drops all.
    """

    def __init__(self, stream: Callable[[], TextIO | None]):
        self._stream = stream
        self._pending = ""  # of a line whose end is not there, so that lines of several processes are not mixed
        self._missing: int | None = None  # lines that were dropped since there was room

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The encoding of the stream."""
        return getattr(self._stream(), "encoding", None) or "utf-8"

    def fileno(self) -> int:
        """Returns the stream's file descriptor."""
        stream = self._stream()
        return super().fileno() if stream is None else stream.fileno()

    def isatty(self) -> bool:
        """Returns whether the stream is a terminal."""
        stream = self._stream()
        return stream is not None and stream.isatty()

    def write(self, text: str) -> int:
        """Writes text, or drops it, if it ends a line, and else at the next `flush`; returns its length."""
        self._pending += text
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Writes the beginning of a line, too."""
        (text, self._pending), stream = (self._pending, ""), self._stream()
        if not text or stream is None:
            return
        if encoding := getattr(stream, "encoding", None):  # or the pieces before a character that it lacks are there
            with contextlib.suppress(LookupError):
                text.encode(encoding, getattr(stream, "errors", None) or "strict")
        descriptor, missing, notice = _descriptor(stream), self._missing, ""
        # While lines are dropped nothing is waited for, or a run would take seconds for each of them.
        until = time.monotonic() + (PATIENCE_SECONDS if missing is None else 0)
        if missing is not None:
            notice = f"\n({missing} lines are missing here: nothing read this output)\n"
        is_terminal = descriptor is not None and os.isatty(descriptor)
        for piece in (_PIECES_OF_TERMINALS if is_terminal else _PIECES).finditer(notice + text):
            if descriptor is not None and not _has_room(descriptor, until - time.monotonic()):
                begin = piece.start() - len(notice)
                self._missing = (missing or 0) * (begin < 0) + text.count("\n", max(begin, 0))
                return
            stream.write(piece[0])
            stream.flush()
        self._missing = None


def _descriptor(stream: TextIO) -> int | None:
    """Returns the file descriptor of a stream; None of one in memory, or that is closed, which its `write` says."""
    if not isinstance(stream, io.TextIOWrapper):
        return None  # that of a notebook is not where its text goes
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _has_room(descriptor: int, seconds: float) -> bool:
    """Returns whether a pipe or terminal takes some text at once, or does within some seconds."""
    try:
        room = select.poll()
        room.register(descriptor, select.POLLOUT)
    except (AttributeError, OSError, ValueError):
        return True
    return bool(room.poll(max(seconds, 0) * 1000))
