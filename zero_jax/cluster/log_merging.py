"""Merges the output of several processes into one log, line by line."""

import collections
import contextlib
import os
import re
import threading
from typing import TextIO

# Noise of gloo and XLA's C++. Gloo's threads write piece by piece into each other's lines.
_GLOO_SIGN = re.compile(r"\[Gloo\] Rank|connected to \d* ?peer ranks|connected peer ranks is :")
_GLOO_PIECE = re.compile(
    r"\[Gloo\] Rank \d*| ?is connected to \d*| ?peer ranks\. ?|Expected number of connected .* : ?\d*"
)
_GLOO_REST = re.compile(r"[\s\d]*")
_NOISE = re.compile(r"^\s*(?:PC: )?@ |^\*\*\* Check failure stack trace|^=== Source Location|^external/xla|^\s*$")
_MAX_CHARACTERS = 1 << 16  # of a line: a progress bar is one that may take days to end
_COLORS = (36, 33, 35, 32, 34, 31)


class Merger:
    """Writes the output of several processes, one complete line at a time, to two streams; see `launch`."""

    def __init__(self, out: TextIO, err: TextIO):
        self._out = out
        self._err = err
        self._lock = threading.Lock()
        self._has_color = err.isatty() and "NO_COLOR" not in os.environ

    def say(self, line: str) -> None:
        """Writes a line of the launcher's own."""
        self._write(self._err, f"zero-jax launch: {line}")

    def read(self, stream: TextIO, index: int, is_stderr: bool, last: collections.deque[str] | None) -> None:
        """Passes on the lines of a process's stream until it ends; `last` collects lines that may explain a failure."""
        is_gloo, prefix = False, f"[{index}]"
        if self._has_color:
            prefix = f"\x1b[{_COLORS[index % len(_COLORS)]}m{prefix}\x1b[0m"
        with stream:
            for text in iter(lambda: stream.readline(_MAX_CHARACTERS), ""):
                line = text.rstrip("\r\n").rpartition("\r")[2]  # the last state of a progress bar
                if _GLOO_SIGN.search(line):
                    is_gloo = True
                    line = _GLOO_PIECE.sub("", line)
                is_gloo = is_gloo and _GLOO_REST.fullmatch(line) is not None
                if is_gloo:
                    continue
                if last is not None and not _NOISE.match(line):
                    last.append(line)
                if index == 0 and not is_stderr:
                    self._write(self._out, line)
                else:
                    self._write(self._err, f"{prefix} {line}")

    def _write(self, to: TextIO, line: str) -> None:
        # Go on reading the processes after our own reader, such as `head`, has ended.
        with self._lock, contextlib.suppress(OSError, ValueError):
            to.write(line + "\n")
            to.flush()
