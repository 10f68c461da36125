"""A text stream to a terminal or pipe that no program waits for longer than some seconds."""

from __future__ import annotations

import atexit
import collections
import contextlib
import io
import os
import re
import select
import threading
import time
from collections.abc import Callable
from typing import TextIO, cast

PATIENCE_SECONDS = 5.0
# At the end of a program, as long as nothing that is held is taken.
LAST_PATIENCE_SECONDS = 10.0
# The characters that are held for a pipe without room, whose reader may only be slow.
MAX_HELD = 16_000_000
# At most 4096 bytes, for which a pipe has room if it has any.
_PIECES = re.compile(r"(?s:.{1,1024})")
# A terminal that has any room has it for 256 bytes. What ends a line takes two, after a text for which there was room.
_PIECES_OF_TERMINALS = re.compile(r"\n|[^\n]{1,60}")


def unstalled(stream: TextIO) -> TextIO:
    """Returns a stream like another one, which no writer waits for longer than some seconds."""
    return cast(TextIO, UnstalledStream(lambda: stream))


class UnstalledStream(io.TextIOBase):
    """A text stream whose writer goes on if its reader stops reading, as after Ctrl-S or in a pager.

    What a pipe has no room for within `PATIENCE_SECONDS` is held until it has, at the end of the program for some
    seconds more. What is more than `MAX_HELD` characters, or what a terminal has no room for, is dropped; then a line
    says how many lines are missing. Files always have room. `stream` is called at each write: `sys.stdout` may be
    replaced, and is None in a process that has none, which drops all.
    """

    _is_unread = False  # whether one was not read at the end of the program: for others nothing is waited

    def __init__(self, stream: Callable[[], TextIO | None]):
        self._stream = stream
        # `text` of a line whose end is not there, so that lines of several processes or threads are not mixed
        self._pending = threading.local()
        self._lock = threading.RLock()  # not of one thread alone: the handler of a signal writes within a write
        self._is_writing = False
        # What there was no room for: text, and how many lines are missing where some were dropped
        self._held: collections.deque[str | int] = collections.deque()
        self._num_held = 0  # its characters
        self._is_drained = False  # whether it is written at the end of the program

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
        self._pending.text = getattr(self._pending, "text", "") + text
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Writes the beginning of a line, too."""
        text, stream = vars(self._pending).pop("text", ""), self._stream()
        if not text or stream is None:
            return
        if encoding := getattr(stream, "encoding", None):  # or the pieces before a character that it lacks are there
            with contextlib.suppress(LookupError):
                text.encode(encoding, getattr(stream, "errors", None) or "strict")
        with self._lock:
            # While text is held nothing is waited for, or a run would take seconds for each line.
            seconds = 0.0 if self._held else PATIENCE_SECONDS
            self._held.append(text)
            self._num_held += len(text)
            if self._is_writing:  # which goes on with this text
                return
            self._is_writing = True
            try:
                self._write_held(stream, seconds)
                self._drop(0 if _is_terminal(stream) else MAX_HELD)
            finally:
                self._is_writing = False
            if self._num_held and not self._is_drained:
                self._is_drained = True
                atexit.register(self._drain)

    def _write_held(self, stream: TextIO, seconds: float) -> None:
        """Writes what is held, as far as there is room within some seconds."""
        descriptor, until = _descriptor(stream), time.monotonic() + seconds
        pieces = _PIECES_OF_TERMINALS if _is_terminal(stream) else _PIECES
        try:
            while self._held:
                item = self._held[0]
                text = _notice(item) if isinstance(item, int) else item
                for piece in pieces.finditer(text):
                    if descriptor is not None and not _has_room(descriptor, until - time.monotonic()):
                        if piece.start():
                            self._held[0] = text[piece.start() :]
                            self._num_held += len(text) - piece.start() - _num_characters(item)
                        return
                    stream.write(piece[0])
                    stream.flush()
                self._held.popleft()
                self._num_held -= _num_characters(item)
        except (OSError, ValueError):  # nothing will read it
            self._held.clear()
            self._num_held = 0
            raise

    def _drop(self, most: int) -> None:
        """Drops the newest of what is held, down to so many characters."""
        missing = 0
        while self._num_held > most or (missing and self._held and isinstance(self._held[-1], int)):
            item = self._held.pop()
            missing += item if isinstance(item, int) else item.count("\n")
            self._num_held -= _num_characters(item)
        if missing:
            self._held.append(missing)

    def _drain(self) -> None:
        """Writes what is held as long as something reads it."""
        with contextlib.suppress(OSError, ValueError), self._lock:
            while (num := self._num_held) and (stream := self._stream()) is not None:
                self._write_held(stream, 0.0 if UnstalledStream._is_unread else LAST_PATIENCE_SECONDS)
                if self._num_held == num:
                    UnstalledStream._is_unread = True
                    return


def _notice(missing: int) -> str:
    return f"\n({missing} lines are missing here: nothing read this output)\n"


def _num_characters(item: str | int) -> int:
    return 0 if isinstance(item, int) else len(item)


def _descriptor(stream: TextIO) -> int | None:
    """Returns the file descriptor of a stream; None of one in memory, or that is closed, which its `write` says."""
    if not isinstance(stream, io.TextIOWrapper):
        return None  # that of a notebook is not where its text goes
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _is_terminal(stream: TextIO) -> bool:
    descriptor = _descriptor(stream)
    return descriptor is not None and os.isatty(descriptor)


def _has_room(descriptor: int, seconds: float) -> bool:
    """Returns whether a pipe or terminal takes some text at once, or does within some seconds."""
    try:
        room = select.poll()
        room.register(descriptor, select.POLLOUT)
    except (AttributeError, OSError, ValueError):
        return True
    return bool(room.poll(max(seconds, 0) * 1000))
