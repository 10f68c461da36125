"""Token folders: a data set as a vector of tokens in a file, with where its documents are.

`tokens.bin` holds the tokens, little endian, each document followed by the token that ends it; `documents.npy` the
places where documents begin, and the end of the last; `hashes.npy` a hash of each document; `sums.npy` the checksums of
the tokens; `meta.json` the rest, with the checksums of the other files and its own.
"""

import contextlib
import dataclasses
import functools
import io
import json
import os
import pathlib
import shutil
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Literal

import numpy as np

from zero_jax.core.untrusted import json_checksum
from zero_jax.data.sources import SourceFile, source_file
from zero_jax.data.tokens.checksums import CHUNK_BYTES, RunningSums, Sums

TokenDtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]
_VERSION = 2
_WITHOUT_SUMS = 1  # a version that is still read
_TOKENS, _DOCUMENTS, _HASHES, _META = "tokens.bin", "documents.npy", "hashes.npy", "meta.json"
_SUMS = "sums.npy"
_BLOCK_BYTES = 64 * CHUNK_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens on their way into a folder.

    Attributes:
      tokens: a part of a document, a vector of integers.
      document_hash: a hash of the whole document if this is its end, or None.
      num_text_bytes: bytes of the text that the tokens were made of.
      num_replaced: places in that text that were no valid Unicode.
      num_empty: documents without text that were left out here.
    """

    tokens: np.ndarray
    document_hash: int | None = None
    num_text_bytes: int = 0
    num_replaced: int = 0
    num_empty: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenMeta:
    """What `meta.json` says of the tokens beside their number.

    Attributes:
      source: what they were made of.
      tokenizer: name of what made them.
      tokenizer_fingerprint: its fingerprint.
      vocab_size: all tokens are less.
      end_of_document: the token after each document.
      num_text_bytes: bytes of the text, 0 if the source was tokens.
      num_replaced: places in the text that were no valid Unicode.
      num_empty: documents without text, which were left out.
    """

    source: str
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    end_of_document: int
    num_text_bytes: int = 0
    num_replaced: int = 0
    num_empty: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenFile:
    """A vector of tokens that stays in its file; slices and vectors of places are read when they are asked for.

    Nothing is mapped: where a mapped file is cut while it is read, the system ends the process without a word.

    Attributes:
      path: the file.
      dtype: of the tokens in it.
      size: number of tokens.
      start_bytes: what comes before the first token.
      sums: the checksums of what follows; None checks nothing.
    """

    path: pathlib.Path
    dtype: np.dtype
    size: int
    start_bytes: int = 0
    sums: Sums | None = None

    def __len__(self) -> int:
        return self.size

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens."""
        return self.size * self.dtype.itemsize

    def __getitem__(self, places: slice | np.ndarray) -> np.ndarray:
        """Reads tokens, those at neighbouring places at once.

        Raises:
          ValueError: the file cannot be read, ends before the last of them, or is damaged there.
        """
        if isinstance(places, slice):
            first, last, _ = places.indices(self.size)
            starts, lengths = np.array([first]), np.array([last - first])
        else:
            breaks = np.flatnonzero(np.diff(places) != 1) + 1
            edges = np.concatenate([[0], breaks, [len(places)]])
            starts, lengths = places[edges[:-1][: len(places)]], np.diff(edges)[: len(places)]
        tokens = np.empty(int(lengths.sum()), self.dtype)
        left, width = tokens.view(np.uint8).data, self.dtype.itemsize
        with self._opened() as descriptor:
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                self._fill(left[: length * width], descriptor, self.start_bytes + start * width)
                self._verify(descriptor, start * width, (start + length) * width)
                left = left[length * width :]
        return tokens

    def verify(self) -> None:
        """Reads all tokens and compares them with their checksums.

        Raises:
          ValueError: the file cannot be read, was cut, or is damaged.
        """
        with self._opened() as descriptor:
            for start in range(0, self.nbytes, _BLOCK_BYTES):
                self._verify(descriptor, start, min(start + _BLOCK_BYTES, self.nbytes))

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            with self.path.open("rb", buffering=0) as stream:
                yield stream.fileno()
        except OSError as error:
            raise ValueError(f"cannot read {self.path} ({error.strerror}): make it readable, and run again") from error

    def _verify(self, descriptor: int, first: int, last: int) -> None:
        if self.sums is not None:
            self.sums.verify(first, last, functools.partial(self._bytes, descriptor))

    def _bytes(self, descriptor: int, first: int, num_bytes: int) -> bytearray:
        found = bytearray(min(num_bytes, self.nbytes - first))
        self._fill(memoryview(found), descriptor, self.start_bytes + first)
        return found

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
      ValueError: the file cannot be read, or has no whole number of tokens.
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """The documents of a data set.

    Attributes:
      tokens: all tokens, a vector, in a file or in memory.
      offsets: where each document begins, and the end of the last: int64 `[num_documents + 1]`.
      hashes: a hash of each document: uint64 `[num_documents]`.
      meta: what made the tokens.
      file: the file of the tokens as it was when it was opened, if they are in one.
    """

    tokens: np.ndarray | TokenFile
    offsets: np.ndarray
    hashes: np.ndarray
    meta: TokenMeta
    file: SourceFile | None = None


class _Writer:
    """Takes chunks, and keeps where documents begin."""

    def __init__(self, stream: BinaryIO | None, dtype: np.dtype, meta: TokenMeta):
        self._stream, self._dtype, self._meta = stream, dtype, meta
        self._num_tokens, self.sums = 0, RunningSums()
        self._ends, self._hashes = io.BytesIO(), io.BytesIO()
        self._counts = dict.fromkeys(("num_text_bytes", "num_replaced", "num_empty"), 0)

    def add(self, chunk: Chunk) -> None:
        if chunk.tokens.size:
            low, high = int(chunk.tokens.min()), int(chunk.tokens.max())
            if low < 0 or high >= self._meta.vocab_size:
                raise ValueError(
                    f"{self._meta.source} has the token {low if low < 0 else high}, but the tokenizer "
                    f"{self._meta.tokenizer} has tokens 0 to {self._meta.vocab_size - 1}: give the --tokenizer and the "
                    "--token-dtype that it was made with"
                )
            raw = chunk.tokens.astype(self._dtype, copy=False).tobytes()
            self.sums.add(raw)
            if self._stream is not None:
                self._stream.write(raw)
            self._num_tokens += chunk.tokens.size
        if chunk.document_hash is not None:
            self._ends.write(self._num_tokens.to_bytes(8, "little"))
            self._hashes.write(chunk.document_hash.to_bytes(8, "little"))
        for name in self._counts:
            self._counts[name] += getattr(chunk, name)

    def finish(self) -> tuple[np.ndarray, np.ndarray, TokenMeta]:
        ends = np.frombuffer(self._ends.getbuffer(), "<i8")
        hashes = np.frombuffer(self._hashes.getbuffer(), "<u8")
        return np.concatenate([[0], ends]), hashes, dataclasses.replace(self._meta, **self._counts)


def write_folder(
    folder: pathlib.Path,
    chunks: Iterable[Chunk],
    *,
    meta: TokenMeta,
    dtype: np.dtype,
    kept: TokenFile | None = None,
    attached: Mapping[str, bytes] | None = None,
) -> None:
    """Writes a token folder under another name and gives it its own when it is whole.

    Several processes may do this at once: the first to finish wins, and what it wrote is as good as the others'.

    Args:
      folder: where it goes.
      chunks: the documents.
      meta: what made the tokens; its counts are taken from the chunks.
      dtype: of the tokens in the folder.
      kept: a file that holds the tokens already and stays where it is, so that only the rest is written.
      attached: further files of the folder.

    Raises:
      OSError: it cannot be written; nothing is left behind.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:12]}"
    temporary.mkdir()
    try:
        with contextlib.nullcontext() if kept else (temporary / _TOKENS).open("wb") as stream:
            writer = _Writer(stream, dtype, meta)
            for chunk in chunks:
                writer.add(chunk)
        offsets, hashes, meta = writer.finish()
        np.save(temporary / _DOCUMENTS, offsets)
        np.save(temporary / _HASHES, hashes)
        np.save(temporary / _SUMS, writer.sums.finish())
        record = {
            "version": _VERSION,
            "dtype": dtype.str,
            "num_tokens": int(offsets[-1]),
            "num_documents": len(hashes),
            "tokens_file": str(kept.path.resolve()) if kept else _TOKENS,
            "tokens_start_bytes": kept.start_bytes if kept else 0,
            **dataclasses.asdict(meta),
            "sums": {name: zlib.crc32((temporary / name).read_bytes()) for name in (_DOCUMENTS, _HASHES, _SUMS)},
        }
        record["sum"] = json_checksum(record)
        for name, content in (attached or {}).items():
            (temporary / name).write_bytes(content)
        (temporary / _META).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        try:
            temporary.rename(folder)
        except OSError:
            if not is_token_folder(folder):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def keep_in_memory(chunks: Iterable[Chunk], *, meta: TokenMeta, dtype: np.dtype) -> Tokens:
    """Returns the documents without writing any file."""
    stream = io.BytesIO()
    writer = _Writer(stream, dtype, meta)
    for chunk in chunks:
        writer.add(chunk)
    offsets, hashes, meta = writer.finish()
    return Tokens(tokens=np.frombuffer(stream.getbuffer(), dtype), offsets=offsets, hashes=hashes, meta=meta)


def is_token_folder(path: pathlib.Path) -> bool:
    """Tells whether there is a token folder."""
    return (path / _META).is_file() and (path / _DOCUMENTS).is_file()


def open_folder(folder: pathlib.Path, *, is_cache: bool = False) -> Tokens:
    """Opens a token folder; all files but that of the tokens are checked, and those when they are read.

    Args:
      folder: the folder.
      is_cache: whether it can be made again: where its tokens turn out to be damaged, it is given up, so that the next
        one who opens it has to make it anew.

    Raises:
      ValueError: it is not whole, damaged, or of a version that is not known.
    """
    remedy = "write the folder again, with `zero-jax tokenize --tokens FOLDER`"
    try:
        record = _read_meta(folder)
        offsets = np.load(folder / _DOCUMENTS)
        hashes = np.load(folder / _HASHES)
        expected = np.load(folder / _SUMS) if record["version"] != _WITHOUT_SUMS else None
        fields = {field.name: record[field.name] for field in dataclasses.fields(TokenMeta)}
        num_tokens, num_documents = (record[name] for name in ("num_tokens", "num_documents"))
        path, dtype = folder / record["tokens_file"], np.dtype(record["dtype"])
        tokens = open_tokens(path, dtype=dtype, start_bytes=record["tokens_start_bytes"])
    except KeyError as error:
        raise ValueError(f"{folder / _META} has no {error}: {remedy}") from error
    except (OSError, ValueError, TypeError, EOFError, RecursionError) as error:
        raise ValueError(f"cannot read the token folder {folder} ({error}): {remedy}") from error
    if tokens.size != num_tokens or offsets.shape != (num_documents + 1,) or hashes.shape != (num_documents,):
        raise ValueError(
            f"{folder} has {tokens.size:,} tokens and {len(hashes):,} documents, but its {_META} says {num_tokens:,} "
            f"and {num_documents:,}: it was cut off; {remedy}"
        )
    if not num_documents or offsets[0] != 0 or offsets[-1] != num_tokens or (np.diff(offsets) <= 0).any():
        raise ValueError(
            f"{folder / _DOCUMENTS} does not go up from 0 to {num_tokens:,}, the end of the tokens: {remedy}"
        )
    if expected is not None:
        tokens = dataclasses.replace(tokens, sums=_sums(expected, tokens, folder, remedy, is_cache=is_cache))
    meta = TokenMeta(**fields)
    return Tokens(tokens=tokens, offsets=offsets, hashes=hashes, meta=meta, file=source_file(path))


def _read_meta(folder: pathlib.Path) -> dict[str, Any]:
    """Reads `meta.json`, and compares it and the files beside it with their checksums."""
    record = json.loads((folder / _META).read_text(encoding="utf-8"))
    version = record["version"]
    if version == _WITHOUT_SUMS and not (folder / _SUMS).exists():
        return {**record, "dtype": np.dtype(record["dtype"]).newbyteorder("<")}
    if version != _VERSION:
        raise ValueError(f"{_META} is of version {version}, not {_VERSION}")
    if record.pop("sum") != json_checksum(record):
        raise ValueError(f"{_META} does not have the checksum that it says")
    for name, expected in record["sums"].items():
        if zlib.crc32((folder / name).read_bytes()) != expected:
            raise ValueError(f"{name} does not have the checksum that {_META} says")
    return record


def _sums(expected: np.ndarray, tokens: TokenFile, folder: pathlib.Path, remedy: str, *, is_cache: bool) -> Sums:
    is_own = tokens.path.parent == folder
    if is_own and is_cache:
        remedy = "run again, and it is made anew"
    elif not is_own:
        remedy = f"restore the file, or remove {folder} where it was changed on purpose"

    def on_damage(first_byte: int) -> None:
        if is_own and is_cache:
            (folder / _META).unlink(missing_ok=True)
        last = min(first_byte + CHUNK_BYTES, tokens.nbytes)
        raise ValueError(
            f"{tokens.path} is damaged: bytes {first_byte:,} to {last:,} of its tokens are not those that were "
            f"written; {remedy}"
        )

    return Sums(expected=expected, verified=np.zeros(len(expected), bool), on_damage=on_damage)
