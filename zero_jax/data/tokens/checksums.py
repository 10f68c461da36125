"""Checksums of token files: what was written is what is read.

A file is summed in chunks of 64 KiB (CRC-32), so that a few rows of a large file can be checked without the rest of it.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable

import numpy as np

CHUNK_BYTES = 1 << 16


class RunningSums:
    """Sums what is written, in whatever pieces it comes."""

    def __init__(self) -> None:
        """Starts with nothing."""
        self._sums: list[int] = []
        self._sum, self._left = 0, CHUNK_BYTES

    def add(self, data: bytes) -> None:
        """Takes the next bytes."""
        view = memoryview(data)
        while view:
            part, view = view[: self._left], view[self._left :]
            self._sum, self._left = zlib.crc32(part, self._sum), self._left - len(part)
            if not self._left:
                self._end()

    def finish(self) -> np.ndarray:
        """Returns the checksums of all chunks, the last of which may be shorter: `uint32[num_chunks]`."""
        if self._left < CHUNK_BYTES:
            self._end()
        return np.array(self._sums, np.uint32)

    def _end(self) -> None:
        self._sums.append(self._sum)
        self._sum, self._left = 0, CHUNK_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """The checksums that the chunks of a file should have, and which of them were seen to have them.

    Attributes:
      expected: `uint32[num_chunks]`.
      verified: chunks that were read and right, `bool[num_chunks]`; they are not looked at again.
      on_damage: called with the number of the first byte of a chunk that is not right; it raises the error.
    """

    expected: np.ndarray
    verified: np.ndarray
    on_damage: Callable[[int], None]

    def verify(self, first: int, last: int, read: Callable[[int, int], bytes | bytearray]) -> None:
        """Checks the chunks that hold the bytes from `first` up to `last`.

        Args:
          first: the first byte, from 0 on.
          last: the byte after the last one.
          read: returns so many bytes (second argument) from a place on (first argument), fewer at the end of the file.
        """
        start, stop = first // CHUNK_BYTES, -(-last // CHUNK_BYTES)
        if self.verified[start:stop].all():
            return
        for chunk in (np.flatnonzero(~self.verified[start:stop]) + start).tolist():
            if zlib.crc32(read(chunk * CHUNK_BYTES, CHUNK_BYTES)) != self.expected[chunk]:
                self.on_damage(chunk * CHUNK_BYTES)
            self.verified[chunk] = True
