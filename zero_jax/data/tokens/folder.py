"""Token folders: a tokenized data set on disk, written and opened.

`tokens.bin` has the tokens, little endian, each document followed by its end-of-document token; `documents.npy` the
offsets where documents begin, and the end of the last; `hashes.npy` a hash of each document; `sums.npy` the checksums
of the tokens; `meta.json` the rest, with the checksums of the other files and its own.
"""

import contextlib
import dataclasses
import io
import json
import pathlib
import shutil
import uuid
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, Literal

import numpy as np
from etils import epath

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
from zero_jax.core.files.user_cache import PARTIAL
from zero_jax.core.text_tables import printable
from zero_jax.data.sources import SourceFile, source_file
from zero_jax.data.tokens.token_file import CHUNK_BYTES, ChunkChecksums, RunningChecksums, TokenFile, open_tokens

TokenDtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]
_VERSION = 2
_WITHOUT_CHECKSUMS = 1  # a version that is still read
_TOKENS, _DOCUMENTS, _HASHES, _META = "tokens.bin", "documents.npy", "hashes.npy", "meta.json"
_CHECKSUMS = "sums.npy"
_MAX_META_BYTES, _BLOCK_BYTES = 1 << 20, 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens to write to a folder, with their counts.

    Attributes:
      tokens: a part of a document, a vector of integers.
      document_hash: a hash of the document if it ends here, or None.
      num_text_bytes: bytes of the text that was tokenized.
      num_replaced: invalid Unicode that was replaced in that text.
      num_empty: documents left out here because they have no text.
    """

    tokens: np.ndarray
    document_hash: int | None = None
    num_text_bytes: int = 0
    num_replaced: int = 0
    num_empty: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenMeta:
    """The fields of `meta.json` about the source of the tokens.

    Attributes:
      source: name of the data set.
      tokenizer: name of the tokenizer.
      tokenizer_fingerprint: its fingerprint.
      vocab_size: upper bound of the tokens, exclusive.
      end_of_document: the token after each document.
      num_text_bytes: bytes of the text, 0 if the source was tokens.
      num_replaced: invalid Unicode that was replaced in the text.
      num_empty: documents left out because they have no text.
    """

    source: str
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    end_of_document: int
    num_text_bytes: int = 0
    num_replaced: int = 0
    num_empty: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """The documents of a data set, as tokens.

    Attributes:
      tokens: all tokens, a vector, in a file or in memory.
      offsets: the index of each document's first token, and the end of the last: int64 `[num_documents + 1]`.
      hashes: a hash of each document: uint64 `[num_documents]`.
      meta: the source of the tokens.
      file: size and modification time of the tokens' file when it was opened, if there is one.
    """

    tokens: np.ndarray | TokenFile
    offsets: np.ndarray
    hashes: np.ndarray
    meta: TokenMeta
    file: SourceFile | None = None


class _Writer:
    """Writes the tokens of chunks, and collects offsets, hashes, checksums and counts."""

    def __init__(self, stream: BinaryIO | None, dtype: np.dtype, meta: TokenMeta):
        self._stream, self._dtype, self._meta = stream, dtype, meta
        self._num_tokens, self.checksums = 0, RunningChecksums()
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
            self.checksums.add(raw)
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
    token_file: TokenFile | None = None,
    attached: Mapping[str, bytes] | None = None,
) -> None:
    """Writes a token folder under a temporary name and renames it when it is complete.

    Several processes may do this at once: the folder of the first to finish stays.

    The counts of `meta` are replaced by those of the chunks. With a `token_file` of the tokens only the other files are
    written, and refer to it. `attached` are further files by name.

    Raises:
      OSError: the folder cannot be written, and was removed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f"{PARTIAL}{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        with contextlib.nullcontext() if token_file else (temporary / _TOKENS).open("wb") as stream:
            writer = _Writer(stream, dtype, meta)
            for chunk in chunks:
                writer.add(chunk)
        offsets, hashes, meta = writer.finish()
        np.save(temporary / _DOCUMENTS, offsets)
        np.save(temporary / _HASHES, hashes)
        np.save(temporary / _CHECKSUMS, writer.checksums.finish())
        record = {
            "version": _VERSION,
            "dtype": dtype.str,
            "num_tokens": int(offsets[-1]),
            "num_documents": len(hashes),
            "tokens_file": str(token_file.path.resolve()) if token_file else _TOKENS,
            "tokens_start_bytes": token_file.start_bytes if token_file else 0,
            **dataclasses.asdict(meta),
            "sums": {name: zlib.crc32((temporary / name).read_bytes()) for name in (_DOCUMENTS, _HASHES, _CHECKSUMS)},
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
    """Collects the tokens in memory, without files."""
    stream = io.BytesIO()
    writer = _Writer(stream, dtype, meta)
    for chunk in chunks:
        writer.add(chunk)
    offsets, hashes, meta = writer.finish()
    return Tokens(tokens=np.frombuffer(stream.getbuffer(), dtype), offsets=offsets, hashes=hashes, meta=meta)


def is_token_folder(path: pathlib.Path) -> bool:
    """Returns whether a path is a token folder."""
    return (path / _META).is_file() and (path / _DOCUMENTS).is_file()


def open_folder(folder: pathlib.Path, *, is_cache: bool = False) -> Tokens:
    """Opens a token folder; the tokens are verified when they are read, the other files now.

    Damaged tokens invalidate a folder of the cache (`is_cache`), so that the next run tokenizes again.

    Raises:
      ValueError: it is incomplete, damaged, or of an unknown version.
    """
    remedy = "write the folder again, with `zero-jax tokenize --tokens FOLDER`"
    try:
        record = _read_meta(folder)
        offsets, hashes = (_vector(folder / name) for name in (_DOCUMENTS, _HASHES))
        expected = _vector(folder / _CHECKSUMS) if record["version"] != _WITHOUT_CHECKSUMS else None
        kinds = {int: whole_number, str: text}
        fields = {field.name: kinds[field.type](record[field.name]) for field in dataclasses.fields(TokenMeta)}
        num_tokens, num_documents = (whole_number(record[name]) for name in ("num_tokens", "num_documents"))
        path, dtype = folder / text(record["tokens_file"]), np.dtype(text(record["dtype"]))
        if dtype.kind not in "ui":
            raise ValueError(f"{_META} has tokens of {dtype}, no integers")
        tokens = open_tokens(path, dtype=dtype, start_bytes=whole_number(record["tokens_start_bytes"]))
        if expected is not None and len(expected) != -(-tokens.nbytes // CHUNK_BYTES):
            raise ValueError(f"{_CHECKSUMS} has {len(expected):,} checksums for {tokens.nbytes:,} bytes of tokens")
    except KeyError as error:
        raise ValueError(f"{folder / _META} has no {error}: {remedy}") from error
    except (OSError, ValueError, TypeError, SyntaxError) as error:  # numpy's, for what is no dtype
        raise ValueError(f"cannot read the token folder {folder} ({printable(error)}): {remedy}") from error
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
        checksums = _chunk_checksums(expected, tokens, folder, remedy, is_cache=is_cache)
        tokens = dataclasses.replace(tokens, checksums=checksums)
    return Tokens(tokens=tokens, offsets=offsets, hashes=hashes, meta=TokenMeta(**fields), file=source_file(path))


def _read_meta(folder: pathlib.Path) -> dict[str, Any]:
    """Reads `meta.json`, and verifies the checksums of it and of the other files, `tokens.bin` excepted."""
    record = dict(mapping(parse_json(read_file(epath.Path(folder / _META), limit_bytes=_MAX_META_BYTES))))
    version = record["version"]
    if version == _WITHOUT_CHECKSUMS and not (folder / _CHECKSUMS).exists():
        return {**record, "dtype": np.dtype(text(record["dtype"])).newbyteorder("<").str}
    if version != _VERSION:
        raise ValueError(f"{_META} is of version {version}, not {_VERSION}")
    if record.pop("sum") != json_checksum(record):
        raise ValueError(f"{_META} does not have the checksum that it says")
    for name, expected in mapping(record["sums"], keys={_DOCUMENTS, _HASHES, _CHECKSUMS}).items():
        with open_regular(folder / name) as file:
            checksum = 0
            while block := file.read(_BLOCK_BYTES):
                checksum = zlib.crc32(block, checksum)
        if checksum != expected:
            raise ValueError(f"{name} does not have the checksum that {_META} says")
    return record


def _vector(path: pathlib.Path) -> np.ndarray:
    array = open_array(path)
    if array.ndim != 1 or array.dtype.kind not in "ui":
        raise ValueError(f"{path.name} holds {array.dtype} {list(array.shape)}, no vector of integers")
    return np.array(array)  # a mapped file that is cut would end the process


def _chunk_checksums(
    expected: np.ndarray, tokens: TokenFile, folder: pathlib.Path, remedy: str, *, is_cache: bool
) -> ChunkChecksums:
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

    return ChunkChecksums(expected=expected, verified=np.zeros(len(expected), bool), on_damage=on_damage)
