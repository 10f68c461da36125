"""The documents of a source as chunks of tokens: from text by a tokenizer, from token files, from ArrayRecords."""

import hashlib
import pathlib
from collections.abc import Iterable, Iterator

import numpy as np

from zero_jax.core.extras import extra
from zero_jax.data.documents import Piece
from zero_jax.data.sources import Source, SourceFile
from zero_jax.data.tokenizer import Tokenizer
from zero_jax.data.tokens.files import Chunk, TokenFile, open_tokens

_BLOCK_TOKENS = 1 << 22
_BATCH_CHARACTERS = 1 << 20
_BATCH_RECORDS = 256


def text_chunks(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[Chunk]:
    """Tokenizes documents, several pieces at a time; documents without text are left out, and counted.

    The hash of a document is of its text, so that the split is the same whichever tokenizer is used.
    """
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
            tokens=_ended(tokens.astype(np.int64), tokenizer.end_of_document) if piece.ends else tokens,
            document_hash=document_hash,
            num_text_bytes=len(piece.text.encode()),
            num_replaced=piece.num_replaced,
        )


def _ended(tokens: np.ndarray, end_of_document: int) -> np.ndarray:
    return np.append(tokens, np.asarray(end_of_document, tokens.dtype))


def array_chunks(
    tokens: np.ndarray | TokenFile, *, end_of_document: int, offsets: np.ndarray | None = None
) -> Iterator[Chunk]:
    """Cuts a vector of tokens into documents: after each token that ends one, or where `offsets` says.

    The hash of a document is of its tokens without the one that ends it, whatever their dtype.
    """
    digest, held = _digest(), False
    for start in range(0, len(tokens), _BLOCK_TOKENS):
        block = np.asarray(tokens[start : start + _BLOCK_TOKENS])
        if offsets is None:
            ends = np.flatnonzero(block == end_of_document) + 1
        else:
            inside = np.searchsorted(offsets, (start, start + len(block)), "right")
            ends = offsets[slice(*inside)] - start
        wide = block.astype("<u4")
        for first, last in zip([0, *ends], [*ends, len(block)], strict=True):
            if first == last:
                continue
            is_end = len(ends) > 0 and last <= ends[-1]
            has_token = is_end and block[last - 1] == end_of_document
            digest.update(wide[first : last - 1 if has_token else last].tobytes())
            yield Chunk(tokens=block[first:last], document_hash=_number(digest) if is_end else None)
            held = not is_end
            if is_end:
                digest = _digest()
    if held:
        yield Chunk(tokens=np.zeros(0, np.uint8), document_hash=_number(digest))


def token_file(file: SourceFile, *, token_dtype: str) -> TokenFile:
    """Finds the tokens in a `.npy` file, or in a raw file of the given dtype.

    Raises:
      ValueError: the file holds something else than a vector of integers.
    """
    path = file.path
    if path.suffix.lower() != ".npy":
        return open_tokens(path, dtype=np.dtype(token_dtype).newbyteorder("<"))
    try:
        array = np.load(path, mmap_mode="r")  # of which only the header is read
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is no array of numpy ({error}): write it again with numpy.save") from error
    if array.ndim != 1 or array.dtype.kind not in "ui" or not array.size:
        raise ValueError(
            f"{path} holds {array.dtype} {list(array.shape)}: give a vector of integers, one document after the other"
        )
    return TokenFile(path=path, dtype=array.dtype, size=array.size, start_bytes=array.offset)


def read_offsets(path: pathlib.Path, *, num_tokens: int) -> np.ndarray | None:
    """Returns the places in a token file where documents begin, from the file `NAME.documents.npy` beside it.

    Returns:
      The offsets, 0 first and the number of tokens last, or None if there is no such file.

    Raises:
      ValueError: they do not go up from 0 to the number of tokens.
    """
    beside = path.with_name(f"{path.stem}.documents.npy")
    if not beside.is_file():
        return None
    try:
        offsets = np.load(beside)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{beside} is no array of numpy ({error}): write it again with numpy.save") from error
    whole = offsets.ndim == 1 and offsets.dtype.kind in "ui" and offsets.size > 1
    if whole and offsets[-1] != num_tokens:
        offsets = np.append(offsets, num_tokens)
    if not whole or offsets[0] != 0 or (np.diff(offsets.astype(np.int64)) <= 0).any():
        raise ValueError(
            f"{beside} must hold where each document of {path.name} begins, going up from 0, below {num_tokens:,}: "
            "write it again, or remove it"
        )
    return offsets.astype(np.int64)


def file_chunks(source: Source, *, token_dtype: str, end_of_document: int) -> Iterator[Chunk]:
    """Reads the documents of token files, one file after the other."""
    for file in source.files:
        tokens = token_file(file, token_dtype=token_dtype)
        offsets = read_offsets(file.path, num_tokens=len(tokens))
        yield from array_chunks(tokens, end_of_document=end_of_document, offsets=offsets)
        file.check()


def record_chunks(source: Source, *, token_dtype: str, end_of_document: int) -> Iterator[Chunk]:
    """Reads ArrayRecord files whose records are documents: tokens of the given dtype, little endian.

    Raises:
      ValueError: a file is no ArrayRecord or was cut off, or a record is no whole number of tokens.
    """
    with extra("train"):
        from array_record.python.array_record_module import ArrayRecordReader

    dtype = np.dtype(token_dtype).newbyteorder("<")
    for file in source.files:
        reader = ArrayRecordReader(str(file.path))
        if not reader.ok() or not reader.num_records():
            raise ValueError(f"{file.path} is no ArrayRecord file, is empty or was cut off: write it again")
        for start in range(0, reader.num_records(), _BATCH_RECORDS):
            records = reader.read(start, min(start + _BATCH_RECORDS, reader.num_records()))
            if not reader.ok():
                raise ValueError(f"{file.path} is damaged at record {start} or soon after: write it again")
            for number, record in enumerate(records, start):
                if len(record) % dtype.itemsize:
                    raise ValueError(
                        f"record {number} of {file.path} has {len(record):,} bytes, no multiple of the "
                        f"{dtype.itemsize} that a token of {token_dtype} takes: give the right --token-dtype"
                    )
                yield from _record(np.frombuffer(record, dtype), end_of_document)
        reader.close()
        file.check()


def _record(tokens: np.ndarray, end_of_document: int) -> Iterator[Chunk]:
    """Makes a document of a record, ended whether or not the record itself ends with the token for that."""
    content = tokens[:-1] if tokens.size and tokens[-1] == end_of_document else tokens
    if not content.size:
        yield Chunk(tokens=content, num_empty=1)
        return
    digest = _digest()
    digest.update(content.astype("<u4").tobytes())
    yield Chunk(tokens=_ended(content.astype(np.int64), end_of_document), document_hash=_number(digest))


def _digest() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=8)


def _number(digest: "hashlib.blake2b") -> int:
    return int.from_bytes(digest.digest(), "little")
