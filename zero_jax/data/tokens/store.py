"""Tokens of a data set, in a folder or in memory: written, opened, read on demand, and verified by checksums.

In a folder, `tokens.bin` has the tokens, little endian, each document followed by its end-of-document token;
`documents.npy` the offsets where documents begin, and the end of the last; `hashes.npy` a hash of each document;
`sums.npy` a CRC-32 of each 64 KiB of the tokens, so that a few rows can be verified without reading the rest;
`meta.json` the rest, with the checksums of the other files and its own.
"""

import array
import contextlib
import dataclasses
import functools
import io
import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, Literal

import numpy as np
from etils import epath

from zero_jax.core.files.partial_folder import hidden_folder
from zero_jax.core.files.untrusted import (
    json_checksum,
    mapping,
    open_array,
    open_regular,
    parse_json,
    read_file,
    text,
    whole_number,
)
from zero_jax.core.text_tables import printable
from zero_jax.data.sources import SourceFile, source_file
from zero_jax.data.tokenizer import JsonTokenizer, Tokenizer

TokenDtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]
CHUNK_BYTES = 1 << 16
TOKENIZER_FILE = "tokenizer.json"  # in a token folder: what decodes it
_VERSION = 2
_TOKENS, _DOCUMENTS, _HASHES, _META = "tokens.bin", "documents.npy", "hashes.npy", "meta.json"
_CHECKSUMS = "sums.npy"
_MAX_META_BYTES, _BLOCK_BYTES = 1 << 20, 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens to write, with their counts."""

    tokens: np.ndarray  # a part of a document, a vector of integers
    document_hash: int | None = None  # a hash of the document if it ends here, or None
    num_text_bytes: int = 0  # bytes of the text that was tokenized
    num_replaced: int = 0  # invalid Unicode that was replaced in that text
    num_empty: int = 0  # documents left out here because they have no text


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenMeta:
    """The fields of `meta.json` about the source of the tokens."""

    source: str  # name of the data set
    tokenizer: str  # name of the tokenizer
    tokenizer_fingerprint: str  # its fingerprint
    vocab_size: int  # upper bound of the tokens, exclusive
    end_of_document: int  # the token after each document
    num_text_bytes: int = 0  # bytes of the text, 0 if the source was tokens
    num_replaced: int = 0  # invalid Unicode that was replaced in the text
    num_empty: int = 0  # documents left out because they have no text


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenFile:
    """A vector of tokens in a file, read on demand: the system kills a process that maps a file which is cut."""

    file: SourceFile  # the file, which may not change while its tokens are read
    dtype: np.dtype  # dtype of the tokens
    size: int  # number of tokens
    start_bytes: int = 0  # bytes before the first token
    checksums: np.ndarray | None = None  # the CRC-32 of each 64 KiB after that, or None
    remedy: str = ""  # how the error ends if they differ
    # The folder of the cache that is given up if they differ, so that the next run makes it anew, or None
    cache: pathlib.Path | None = None

    def __len__(self) -> int:
        return self.size

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens."""
        return self.size * self.dtype.itemsize

    def read(self, runs: Sequence[tuple[int, int]]) -> np.ndarray:
        """Reads runs of tokens, each from a position to before another, one after the other."""
        tokens = np.empty(sum(last - first for first, last in runs), self.dtype)
        unread, width = tokens.view(np.uint8).data, self.dtype.itemsize
        with self._open() as descriptor:
            for first, last in runs:
                num_bytes = (last - first) * width
                self._read(descriptor, first * width, unread[:num_bytes])
                self._verify(descriptor, first * width, last * width)
                unread = unread[num_bytes:]
        return tokens

    def verify(self) -> None:
        """Reads all tokens and verifies their checksums."""
        with self._open() as descriptor:
            self._verify(descriptor, 0, self.nbytes)

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        self.file.check()
        try:
            with self.file.path.open("rb", buffering=0) as stream:
                yield stream.fileno()
        except OSError as error:
            raise ValueError(f"cannot read {self.file} ({error.strerror}): make it readable, and run again") from error

    @functools.cached_property
    def _is_verified(self) -> bytearray:
        """For each chunk 1 if it was read and is undamaged, else 0."""
        return bytearray([self.checksums is None]) * -(-self.nbytes // CHUNK_BYTES)

    def _verify(self, descriptor: int, first: int, last: int) -> None:
        """Verifies the chunks of the bytes from `first` to before `last`, each once."""
        chunk, stop = first // CHUNK_BYTES, -(-last // CHUNK_BYTES)
        while (chunk := self._is_verified.find(0, chunk, stop)) >= 0:
            begin = chunk * CHUNK_BYTES
            data = bytearray(min(CHUNK_BYTES, self.nbytes - begin))
            self._read(descriptor, begin, memoryview(data))
            assert self.checksums is not None
            if zlib.crc32(data) != self.checksums[chunk]:
                if self.cache is not None:
                    (self.cache / _META).unlink(missing_ok=True)
                raise ValueError(
                    f"{self.file} is damaged: bytes {begin:,} to {begin + len(data):,} of its tokens are not those "
                    f"that were written; {self.remedy}"
                )
            self._is_verified[chunk] = 1

    def _read(self, descriptor: int, first: int, buffer: memoryview) -> None:
        """Fills a buffer with the bytes of the tokens from `first` on."""
        offset = self.start_bytes + first
        while buffer:
            # It may read less than is asked for. A position of its own makes it safe for several threads.
            num_bytes = os.preadv(descriptor, [buffer], offset)
            if not num_bytes:
                raise ValueError(
                    f"{self.file} was cut while it was read: {len(buffer):,} bytes are missing at offset {offset:,}; "
                    f"it has {os.fstat(descriptor).st_size:,} bytes now and had {self.start_bytes + self.nbytes:,}. "
                    "Write it again, and run again"
                )
            buffer, offset = buffer[num_bytes:], offset + num_bytes


def open_tokens(file: SourceFile, *, dtype: np.dtype, start_bytes: int = 0) -> TokenFile:
    """Returns the tokens of a file, from `start_bytes` to its end."""
    num_bytes = file.size_bytes - start_bytes
    if num_bytes % dtype.itemsize or num_bytes <= 0:
        raise ValueError(
            f"{file} has {num_bytes:,} bytes of tokens, no multiple of the {dtype.itemsize} that one of {dtype} takes: "
            "give the right --token-dtype, or write the file again"
        )
    return TokenFile(file=file, dtype=dtype, size=num_bytes // dtype.itemsize, start_bytes=start_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """The documents of a data set, as tokens.

    Attributes:
      tokens: all tokens, a vector, in a file or in memory.
      offsets: the index of each document's first token, and the end of the last: int64 `[num_documents + 1]`.
      hashes: a hash of each document: uint64 `[num_documents]`.
      meta: the source of the tokens.
    """

    tokens: np.ndarray | TokenFile
    offsets: np.ndarray
    hashes: np.ndarray
    meta: TokenMeta


def make_tokens(
    chunks: Iterable[Chunk],
    name: str,
    tokenizer: Tokenizer,
    *,
    folder: pathlib.Path | None,
    token_file: TokenFile | None = None,
    is_cache: bool = False,
) -> Tokens:
    """Writes chunks as a token folder and opens it, or keeps the tokens in memory where `folder` is None.

    Several processes may write a folder at once: that of the first to finish stays. With a `token_file` of the tokens
    only the other files are written, and refer to it. Damaged tokens invalidate a folder of the cache (`is_cache`).

    Raises:
      ValueError: there is no document among them.
      OSError: the folder cannot be written, and was removed.
    """
    meta = TokenMeta(
        source=name,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
    )
    dtype = token_file.dtype if token_file else np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    if folder is None:
        stream = io.BytesIO()
        written = _Writer(stream, dtype, meta)
        written.write(chunks)
        tokens = np.frombuffer(stream.getbuffer(), dtype)  # without a copy
        return Tokens(tokens=tokens, offsets=written.offsets, hashes=written.hashes, meta=written.meta)
    # Beside it, as a folder that is empty is replaced. The cache removes one of a process that was killed, too.
    with hidden_folder(folder, "partial", folder=folder.parent) as temporary:
        with contextlib.nullcontext() if token_file else (temporary / _TOKENS).open("wb") as stream:
            written = _Writer(stream, dtype, meta)
            written.write(chunks)
        _write_record(temporary, written, token_file)
        if isinstance(tokenizer, JsonTokenizer):
            (temporary / TOKENIZER_FILE).write_bytes(tokenizer.content)
        try:
            temporary.rename(folder)
        except OSError:  # another process was first, or the disk fails
            if not is_token_folder(folder):
                raise
    return open_folder(folder, is_cache=is_cache)


class _Writer:
    """Writes the tokens of chunks, and collects offsets, hashes, checksums and counts in little memory."""

    def __init__(self, stream: BinaryIO | None, dtype: np.dtype, meta: TokenMeta):
        self.dtype, self.meta = dtype, meta
        self._stream, self._waiting, self._checksums = stream, bytearray(), array.array("I")

    def write(self, chunks: Iterable[Chunk]) -> None:
        offsets, hashes, num_tokens = array.array("q", [0]), array.array("Q"), 0
        counts = dict.fromkeys(("num_text_bytes", "num_replaced", "num_empty"), 0)
        for chunk in chunks:
            if chunk.tokens.size:
                self._check(int(chunk.tokens.min()), int(chunk.tokens.max()))
                # Checksums are of 64 KiB of the file, in whatever parts the documents come.
                self._waiting += chunk.tokens.astype(self.dtype, copy=False).tobytes()
                self._write(len(self._waiting) // CHUNK_BYTES * CHUNK_BYTES)
                num_tokens += chunk.tokens.size
            if chunk.document_hash is not None:
                offsets.append(num_tokens)
                hashes.append(chunk.document_hash)
            for name in counts:
                counts[name] += getattr(chunk, name)
        self._write(len(self._waiting))
        if not hashes:
            raise ValueError(f"{self.meta.source} holds no text: all of its documents are empty")
        self.offsets, self.hashes = np.array(offsets, np.int64), np.array(hashes, np.uint64)
        self.checksums = np.array(self._checksums, np.uint32)
        self.meta = dataclasses.replace(self.meta, **counts)

    def _check(self, low: int, high: int) -> None:
        if low < 0 or high >= self.meta.vocab_size:
            raise ValueError(
                f"{self.meta.source} has the token {low if low < 0 else high}, but the tokenizer {self.meta.tokenizer} "
                f"has tokens 0 to {self.meta.vocab_size - 1}: give the --tokenizer and the --token-dtype that it was "
                "made with"
            )

    def _write(self, num_bytes: int) -> None:
        """Writes the first of the bytes that wait, and takes the checksum of each chunk."""
        for start in range(0, num_bytes, CHUNK_BYTES):
            chunk = self._waiting[start : min(start + CHUNK_BYTES, num_bytes)]
            self._checksums.append(zlib.crc32(chunk))
            if self._stream is not None:
                self._stream.write(chunk)
        del self._waiting[:num_bytes]


def _write_record(folder: pathlib.Path, written: _Writer, token_file: TokenFile | None) -> None:
    vectors = {_DOCUMENTS: written.offsets, _HASHES: written.hashes, _CHECKSUMS: written.checksums}
    for name, vector in vectors.items():
        np.save(folder / name, vector)
    record = {
        "version": _VERSION,
        "dtype": written.dtype.str,
        "num_tokens": int(written.offsets[-1]),
        "num_documents": len(written.hashes),
        "tokens_file": str(token_file.file.path.resolve()) if token_file else _TOKENS,
        "tokens_start_bytes": token_file.start_bytes if token_file else 0,
        **dataclasses.asdict(written.meta),
        "sums": {name: _checksum(folder / name) for name in vectors},
    }
    record["sum"] = json_checksum(record)
    (folder / _META).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def is_token_folder(path: pathlib.Path) -> bool:
    """Returns whether a path is a token folder.

    Example:
      >>> zero.data.is_token_folder(folder)
      False
    """
    # Not `Path.is_file`, which raises for a name that is too long.
    return all(os.path.isfile(path / name) for name in (_META, _DOCUMENTS))


def open_folder(folder: pathlib.Path, *, is_cache: bool = False) -> Tokens:
    """Opens a token folder; its tokens are verified when they are read, and made again if damaged in the cache."""
    remedy = "write the folder again, with `zero-jax tokenize --tokens FOLDER`"
    try:
        return _open(folder, remedy, is_cache=is_cache)
    except (KeyError, OSError, ValueError, TypeError, SyntaxError) as error:  # numpy's, for what is no dtype
        why = f"{_META} has no {error}" if isinstance(error, KeyError) else printable(error)
        raise ValueError(f"cannot read the token folder {folder} ({why}): {remedy}") from error


def _open(folder: pathlib.Path, remedy: str, *, is_cache: bool) -> Tokens:
    record = _read_meta(folder)
    offsets, hashes, checksums = (_vector(folder / name) for name in (_DOCUMENTS, _HASHES, _CHECKSUMS))
    kinds = {int: whole_number, str: text}
    fields = {field.name: kinds[field.type](record[field.name]) for field in dataclasses.fields(TokenMeta)}
    num_tokens, num_documents = (whole_number(record[name]) for name in ("num_tokens", "num_documents"))
    path, dtype = folder / text(record["tokens_file"]), np.dtype(text(record["dtype"]))
    if dtype.kind not in "ui":
        raise ValueError(f"{_META} has tokens of {dtype}, no integers")
    tokens = open_tokens(source_file(path), dtype=dtype, start_bytes=whole_number(record["tokens_start_bytes"]))
    if len(checksums) != -(-tokens.nbytes // CHUNK_BYTES):
        raise ValueError(f"{_CHECKSUMS} has {len(checksums):,} checksums for {tokens.nbytes:,} bytes of tokens")
    if tokens.size != num_tokens or offsets.shape != (num_documents + 1,) or hashes.shape != (num_documents,):
        raise ValueError(
            f"{folder.name} has {tokens.size:,} tokens and {len(hashes):,} documents, but its {_META} says "
            f"{num_tokens:,} and {num_documents:,}: it was cut off"
        )
    if not num_documents or offsets[0] != 0 or offsets[-1] != num_tokens or (np.diff(offsets) <= 0).any():
        raise ValueError(f"{_DOCUMENTS} does not go up from 0 to {num_tokens:,}, the end of the tokens")
    is_own = path.parent == folder
    if not is_own:
        remedy = f"restore the file, or remove {folder} where it was changed on purpose"
    elif is_cache:
        remedy = "run again, and it is made anew"
    cache = folder if is_own and is_cache else None
    tokens = dataclasses.replace(tokens, checksums=checksums, remedy=remedy, cache=cache)
    return Tokens(tokens=tokens, offsets=offsets, hashes=hashes, meta=TokenMeta(**fields))


def _read_meta(folder: pathlib.Path) -> dict[str, Any]:
    """Reads `meta.json`, and verifies the checksums of it and of the other files, `tokens.bin` excepted."""
    record = dict(mapping(parse_json(read_file(epath.Path(folder / _META), limit_bytes=_MAX_META_BYTES))))
    if record["version"] != _VERSION:
        raise ValueError(f"{_META} is of version {record['version']}, not {_VERSION}")
    if record.pop("sum") != json_checksum(record):
        raise ValueError(f"{_META} does not have the checksum that it says")
    for name, expected in mapping(record["sums"], keys={_DOCUMENTS, _HASHES, _CHECKSUMS}).items():
        if _checksum(folder / name) != expected:
            raise ValueError(f"{name} does not have the checksum that {_META} says")
    return record


def _checksum(path: pathlib.Path) -> int:
    checksum = 0
    with open_regular(path) as file:
        while block := file.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _vector(path: pathlib.Path) -> np.ndarray:
    vector = open_array(path)
    if vector.ndim != 1 or vector.dtype.kind not in "ui":
        raise ValueError(f"{path.name} holds {vector.dtype} {list(vector.shape)}, no vector of integers")
    return np.array(vector)  # a mapped file that is cut would end the process
