"""A text stream to a terminal or pipe that no program waits for longer than some seconds."""

from __future__ import annotations

import io
import select
import time
from collections.abc import Callable
from typing import TextIO, cast

PATIENCE_SECONDS = 5.0
_PIECE_CHARACTERS = 1024  # at most 4096 bytes, for which a pipe has room if it has any


def unstalled(stream: TextIO) -> TextIO:
    """Returns a stream like another one, which no writer waits for longer than some seconds."""
    return cast(TextIO, UnstalledStream(lambda: stream))


class UnstalledStream(io.TextIOBase):
    """A text stream whose writer goes on if its reader stops reading, as after Ctrl-S or in a pager.

    What has no room within `PATIENCE_SECONDS` is dropped, and so is what follows while there is no room; then a line
    says how many lines are missing. Files always have room. `stream` is called at each write: `sys.stdout` may be
    replaced.
    """

    def __init__(self, stream: Callable[[], TextIO]):
        self._stream = stream
        self._missing: int | None = None  # lines that were dropped since there was room

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The encoding of the stream."""
        return getattr(self._stream(), "encoding", None) or "utf-8"

    def fileno(self) -> int:
        """Returns the stream's file descriptor."""
        return self._stream().fileno()

    def isatty(self) -> bool:
        """Returns whether the stream is a terminal."""
        return self._stream().isatty()

    def write(self, text: str) -> int:
        """Writes text and flushes, or drops it; returns its length."""
        stream = self._stream()
        # While lines are dropped nothing is waited for, or a run would take seconds for each of them.
        until = time.monotonic() + (PATIENCE_SECONDS if self._missing is None else 0)
        for start in range(0, len(text), _PIECE_CHARACTERS):
            if not _has_room(stream, until - time.monotonic()):
                self._missing = (self._missing or 0) + text.count("\n", start)
                break
            if self._missing is not None:
                stream.write(f"\n({self._missing} lines are missing here: nothing read this output)\n")
                self._missing = None
            stream.write(text[start : start + _PIECE_CHARACTERS])
            stream.flush()
        return len(text)


def _has_room(stream: TextIO, seconds: float) -> bool:
    """Returns whether a stream takes some text at once, or does within some seconds."""
    try:
        room = select.poll()
        room.register(stream.fileno(), select.POLLOUT)
    except (AttributeError, OSError, ValueError):  # in memory, or closed, which its `write` says
        return True
    return bool(room.poll(max(seconds, 0) * 1000))
