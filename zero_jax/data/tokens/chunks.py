"""Reads a source as chunks of tokens: tokenizes text, reads token files and ArrayRecords."""

import hashlib
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from zero_jax.core.extras import extra
from zero_jax.core.files.untrusted import open_array
from zero_jax.core.text_tables import printable
from zero_jax.data.documents import Piece, of_each_file, read_text
from zero_jax.data.sources import Source, SourceFile, offsets_beside
from zero_jax.data.tokenizer import Tokenizer
from zero_jax.data.tokens.store import Chunk, TokenFile, open_tokens

_BLOCK_TOKENS = 1 << 22
_BATCH_CHARACTERS = 1 << 20
_BATCH_RECORDS = 256


def source_chunks(source: Source, tokenizer: Tokenizer, *, text_field: str, token_dtype: str) -> Iterator[Chunk]:
    """Reads a source of any format as chunks of tokens."""
    ends = {"token_dtype": token_dtype, "end_of_document": tokenizer.end_of_document}
    read = {"tokens": _file_chunks, "arrayrecord": _record_chunks}.get(source.format)
    if read is not None:
        return of_each_file(source, lambda file: read(file, **ends))
    return _text_chunks(read_text(source, text_field=text_field), tokenizer)


def _text_chunks(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[Chunk]:
    """Tokenizes pieces of documents with text, and counts the others; hashes are of texts, whatever the tokenizer."""
    waiting: list[tuple[Piece, int | None]] = []
    num_characters, num_bytes, digest = 0, 0, _digest()
    for piece in pieces:
        raw = piece.text.encode()
        digest.update(raw)
        num_bytes += len(raw)
        if piece.ends and not num_bytes:
            yield Chunk(tokens=np.zeros(0, np.uint8), num_empty=1)
            continue
        waiting.append((piece, _number(digest) if piece.ends else None))
        num_characters += len(piece.text)
        if piece.ends:
            num_bytes, digest = 0, _digest()
        if num_characters >= _BATCH_CHARACTERS:
            yield from _tokenized(waiting, tokenizer)
            waiting, num_characters = [], 0
    yield from _tokenized(waiting, tokenizer)


def _tokenized(waiting: list[tuple[Piece, int | None]], tokenizer: Tokenizer) -> Iterator[Chunk]:
    encoded = tokenizer.encode_all([piece.text for piece, _ in waiting])
    for (piece, document_hash), tokens in zip(waiting, encoded, strict=True):
        yield Chunk(
            tokens=_ended(tokens, tokenizer.end_of_document) if piece.ends else tokens,
            document_hash=document_hash,
            num_text_bytes=len(piece.text.encode()),
            num_replaced=piece.num_replaced,
        )


def _ended(tokens: np.ndarray, end_of_document: int) -> np.ndarray:
    # In int64: the token that ends a document may not fit the dtype of the others.
    return np.append(tokens.astype(np.int64), end_of_document)


def _file_chunks(file: SourceFile, *, token_dtype: str, end_of_document: int) -> Iterator[Chunk]:
    """Cuts a token file after end-of-document tokens or at the offsets beside it; hashes are without dtype and end."""
    tokens = open_token_file(file, token_dtype=token_dtype)
    offsets, digest = _read_offsets(file.path, num_tokens=len(tokens)), _digest()
    for start in range(0, len(tokens), _BLOCK_TOKENS):
        block = tokens.read([(start, min(start + _BLOCK_TOKENS, len(tokens)))])
        if offsets is None:
            ends = np.flatnonzero(block == end_of_document) + 1
            if start + len(block) == len(tokens):
                ends = np.union1d(ends, [len(block)])  # the last document needs no end-of-document token
        else:
            ends = offsets[slice(*np.searchsorted(offsets, (start, start + len(block)), "right"))] - start
        for i, part in enumerate(np.split(block, ends)):
            is_end = i < len(ends)
            if part.size:
                has_token = is_end and part[-1] == end_of_document
                digest.update(part[: part.size - has_token].astype("<u4").tobytes())
                yield Chunk(tokens=part, document_hash=_number(digest) if is_end else None)
            if is_end:
                digest = _digest()


def open_token_file(file: SourceFile, *, token_dtype: str) -> TokenFile:
    """Opens a `.npy` file of tokens, or a raw file of tokens of a dtype."""
    if file.path.suffix.lower() != ".npy":
        return open_tokens(file, dtype=np.dtype(token_dtype).newbyteorder("<"))
    try:
        array = open_array(file.path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is no array of numpy ({printable(error)}): write it again with numpy.save") from error
    if array.ndim != 1 or array.dtype.kind not in "ui" or not array.size:
        raise ValueError(
            f"{file} holds {array.dtype} {list(array.shape)}: give a vector of integers, one document after the other"
        )
    return TokenFile(file=file, dtype=array.dtype, size=array.size, start_bytes=array.offset)


def _read_offsets(path: pathlib.Path, *, num_tokens: int) -> np.ndarray | None:
    """Returns the offsets of the documents in a token file, 0 first and its end last, from `NAME.documents.npy`."""
    beside = offsets_beside(path)
    if not beside.is_file():
        return None
    try:
        offsets = np.array(open_array(beside))
    except (OSError, ValueError) as error:
        raise ValueError(f"{beside} is no array of numpy ({error}): write it again with numpy.save") from error
    is_vector = offsets.ndim == 1 and offsets.dtype.kind in "ui" and offsets.size > 0
    if is_vector and offsets[-1] != num_tokens:
        offsets = np.append(offsets, num_tokens)
    if not is_vector or offsets[0] != 0 or (np.diff(offsets.astype(np.int64)) <= 0).any():
        raise ValueError(
            f"{beside} must hold where each document of {path.name} begins, going up from 0, below {num_tokens:,}: "
            "write it again, or remove it"
        )
    return offsets.astype(np.int64)


def _record_chunks(file: SourceFile, *, token_dtype: str, end_of_document: int) -> Iterator[Chunk]:
    """Reads ArrayRecords, one a document: little-endian tokens, which may end with that of the end."""
    dtype = np.dtype(token_dtype).newbyteorder("<")
    for number, record in enumerate(_read_records(file)):
        if len(record) % dtype.itemsize:
            raise ValueError(
                f"record {number} of {file} has {len(record):,} bytes, no multiple of the {dtype.itemsize} "
                f"that a token of {token_dtype} takes: give the right --token-dtype"
            )
        tokens = np.frombuffer(record, dtype)
        tokens = tokens[:-1] if tokens.size and tokens[-1] == end_of_document else tokens
        if tokens.size:
            digest = _digest(tokens.astype("<u4").tobytes())
            yield Chunk(tokens=_ended(tokens, end_of_document), document_hash=_number(digest))
        else:
            yield Chunk(tokens=tokens, num_empty=1)


def _read_records(file: SourceFile) -> Iterator[bytes]:
    with extra("train"):
        import grain

    start = None
    try:
        records: Any = grain.sources.ArrayRecordDataSource(str(file.path))  # its type hides what it inherits
        with records:
            for start in range(0, len(records), _BATCH_RECORDS):
                yield from records.__getitems__(range(start, min(start + _BATCH_RECORDS, len(records))))
        if start is None:
            raise RuntimeError("it has no records")
    except RuntimeError as error:
        bad = "is no ArrayRecord file, is empty or was cut off"
        bad = bad if start is None else f"is damaged at record {start} or soon after"
        raise ValueError(f"{file} {bad} ({error}): write it again") from error


def _digest(content: bytes = b"") -> "hashlib.blake2b":
    return hashlib.blake2b(content, digest_size=8)


def _number(digest: "hashlib.blake2b") -> int:
    return int.from_bytes(digest.digest(), "little")
