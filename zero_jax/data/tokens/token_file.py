"""Tokens in a file: read on demand, and verified by checksums.

Each 64 KiB have a CRC-32, so that a few rows of a large file can be verified without reading the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator

import numpy as np

CHUNK_BYTES = 1 << 16
_BLOCK_BYTES = 64 * CHUNK_BYTES


class RunningChecksums:
    """Computes the checksums of chunks from bytes in pieces of any size."""

    def __init__(self) -> None:
        """Starts with no bytes."""
        self._checksums: list[int] = []
        self._crc, self._bytes_left = 0, CHUNK_BYTES

    def add(self, data: bytes) -> None:
        """Adds the next bytes."""
        view = memoryview(data)
        while view:
            part, view = view[: self._bytes_left], view[self._bytes_left :]
            self._crc, self._bytes_left = zlib.crc32(part, self._crc), self._bytes_left - len(part)
            if not self._bytes_left:
                self._end_chunk()

    def finish(self) -> np.ndarray:
        """Returns the checksums of all chunks, the last of which may be shorter: `uint32[num_chunks]`."""
        if self._bytes_left < CHUNK_BYTES:
            self._end_chunk()
        return np.array(self._checksums, np.uint32)

    def _end_chunk(self) -> None:
        self._checksums.append(self._crc)
        self._crc, self._bytes_left = 0, CHUNK_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ChunkChecksums:
    """The saved checksums of the chunks of a file, and which chunks are verified already.

    Attributes:
      expected: `uint32[num_chunks]`.
      verified: `bool[num_chunks]`, the chunks that were read and are undamaged.
      on_damage: called with the offset of a damaged chunk; raises the error.
    """

    expected: np.ndarray
    verified: np.ndarray
    on_damage: Callable[[int], None]

    def verify(self, first: int, last: int, read: Callable[[int, int], bytes | bytearray]) -> None:
        """Verifies the chunks of the bytes from `first` to before `last`, with `read(offset, num_bytes)`."""
        start, stop = first // CHUNK_BYTES, -(-last // CHUNK_BYTES)
        for chunk in (np.flatnonzero(~self.verified[start:stop]) + start).tolist():
            if zlib.crc32(read(chunk * CHUNK_BYTES, CHUNK_BYTES)) != self.expected[chunk]:
                self.on_damage(chunk * CHUNK_BYTES)
            self.verified[chunk] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenFile:
    """A vector of tokens in a file, indexed by slices or vectors of positions, which are read on demand.

    The file is not memory-mapped: if a mapped file is truncated, the system kills the process that reads it.

    Attributes:
      path: the file.
      dtype: dtype of the tokens.
      size: number of tokens.
      start_bytes: bytes before the first token.
      checksums: the checksums of the bytes after that, or None.
    """

    path: pathlib.Path
    dtype: np.dtype
    size: int
    start_bytes: int = 0
    checksums: ChunkChecksums | None = None

    def __len__(self) -> int:
        return self.size

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens."""
        return self.size * self.dtype.itemsize

    def __getitem__(self, positions: slice | np.ndarray) -> np.ndarray:
        """Reads tokens, consecutive positions at once.

        Raises:
          ValueError: the file cannot be read, was truncated, or is damaged there.
        """
        if isinstance(positions, slice):
            first, last, _ = positions.indices(self.size)
            starts, lengths = np.array([first]), np.array([last - first])
        else:
            breaks = np.flatnonzero(np.diff(positions) != 1) + 1
            edges = np.concatenate([[0], breaks, [len(positions)]])
            starts, lengths = positions[edges[:-1][: len(positions)]], np.diff(edges)[: len(positions)]
        tokens = np.empty(int(lengths.sum()), self.dtype)
        unread, width = tokens.view(np.uint8).data, self.dtype.itemsize
        with self._open() as descriptor:
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                self._fill(unread[: length * width], descriptor, self.start_bytes + start * width)
                self._verify(descriptor, start * width, (start + length) * width)
                unread = unread[length * width :]
        return tokens

    def verify(self) -> None:
        """Reads all tokens and verifies their checksums.

        Raises:
          ValueError: the file cannot be read, was cut, or is damaged.
        """
        with self._open() as descriptor:
            for start in range(0, self.nbytes, _BLOCK_BYTES):
                self._verify(descriptor, start, min(start + _BLOCK_BYTES, self.nbytes))

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        try:
            with self.path.open("rb", buffering=0) as stream:
                yield stream.fileno()
        except OSError as error:
            raise ValueError(f"cannot read {self.path} ({error.strerror}): make it readable, and run again") from error

    def _verify(self, descriptor: int, first: int, last: int) -> None:
        if self.checksums is not None:
            self.checksums.verify(first, last, functools.partial(self._read_bytes, descriptor))

    def _read_bytes(self, descriptor: int, first: int, num_bytes: int) -> bytearray:
        data = bytearray(min(num_bytes, self.nbytes - first))
        self._fill(memoryview(data), descriptor, self.start_bytes + first)
        return data

    def _fill(self, buffer: memoryview, descriptor: int, offset_bytes: int) -> None:
        while buffer:
            num_bytes = os.preadv(descriptor, [buffer], offset_bytes)
            if not num_bytes:
                raise ValueError(
                    f"{self.path} was cut while it was read: {len(buffer):,} bytes are missing at offset "
                    f"{offset_bytes:,}; it has {os.fstat(descriptor).st_size:,} bytes now and had "
                    f"{self.start_bytes + self.nbytes:,}. Write it again, and run again"
                )
            buffer, offset_bytes = buffer[num_bytes:], offset_bytes + num_bytes


def open_tokens(path: pathlib.Path, *, dtype: np.dtype, start_bytes: int = 0) -> TokenFile:
    """Returns the tokens of a file, from `start_bytes` to its end.

    Raises:
      ValueError: the file cannot be read, or its size is no multiple of a token's.
    """
    try:
        size = path.stat().st_size - start_bytes
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}): make it readable") from error
    if size % dtype.itemsize or size <= 0:
        raise ValueError(
            f"{path} has {size:,} bytes of tokens, no multiple of the {dtype.itemsize} that one of {dtype} takes: "
            "give the right --token-dtype, or write the file again"
        )
    return TokenFile(path=path, dtype=dtype, size=size // dtype.itemsize, start_bytes=start_bytes)
