"""The token cache: a source is tokenized once, then read from a folder."""

import contextlib
import functools
import os
import pathlib
import re
import shutil
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from zero_jax.core.files.system_errors import with_remedy
from zero_jax.core.files.user_cache import evict_oldest, in_use
from zero_jax.data.documents import read_text
from zero_jax.data.sources import Source
from zero_jax.data.tokenizer import JsonTokenizer, Tokenizer
from zero_jax.data.tokens.chunks import (
    array_chunks,
    file_chunks,
    open_token_file,
    read_offsets,
    record_chunks,
    text_chunks,
)
from zero_jax.data.tokens.folder import Chunk, TokenMeta, Tokens, keep_in_memory, open_folder, write_folder
from zero_jax.data.tokens.token_file import TokenFile

Log = Callable[[str], None]
TOKENIZER_FILE = "tokenizer.json"  # in a token folder: what decodes it
MAX_BYTES = 20 * 10**9  # of all tokens in the cache; entries in use stay, whatever their size
_VERSION = "2"  # of how sources are read; a new version invalidates the cache
_LOG_SECONDS = 5.0
_AT_ONCE_BYTES = 1 << 30


def read_tokens(
    source: Source, tokenizer: Tokenizer, *, text_field: str, token_dtype: str, cache: pathlib.Path | None, log: Log
) -> Tokens:
    """Returns the tokens of a source, from the cache or tokenized now; with `cache=None` in memory.

    A single token file is not copied: the cache has the offsets of its documents only.

    Raises:
      ValueError: the source cannot be read, changed meanwhile, or has no document.
    """
    make = functools.partial(_make, source, tokenizer, text_field=text_field, token_dtype=token_dtype, log=log)
    if cache is None:
        return make(None)
    stem = pathlib.Path(source.files[0].name).name if len(source.files) == 1 else pathlib.Path(source.name).name
    key = source.fingerprint(_VERSION, tokenizer.fingerprint, text_field, token_dtype)
    folder = cache / f"{''.join(c if c.isalnum() else '-' for c in stem)[:40]}-{key}"
    if folder.exists():
        damaged = folder.stat()
        try:
            return _in_use(verify_if_small(open_folder(folder, is_cache=True)), folder)
        except ValueError as error:
            log(f"{error}; making it anew")
            _remove(folder, damaged)
    try:
        tokens = _in_use(make(folder), folder)
        evict_oldest(cache, is_own=_is_entry, max_bytes=MAX_BYTES, keep=folder)
        return tokens
    except OSError as error:
        why = with_remedy(error)
        log(f"cannot keep the tokens in {folder}: {why}. They stay in memory, and the next run makes them again")
        return make(None)


def _in_use(tokens: Tokens, folder: pathlib.Path) -> Tokens:
    """Keeps all processes of this machine from evicting a folder while its tokens are in use."""
    use = contextlib.ExitStack()
    with contextlib.suppress(OSError):  # another process has replaced it
        use.enter_context(in_use(folder))
    weakref.finalize(tokens.tokens, use.close)
    return tokens


def _is_entry(path: pathlib.Path) -> bool:
    return re.fullmatch(r".*-[0-9a-f]{16,}", path.name) is not None and (path / "meta.json").is_file()


def verify_if_small(tokens: Tokens) -> Tokens:
    """Verifies the checksums of a file of up to 1 GiB, in about a second; larger files are verified as they are read.

    Raises:
      ValueError: the tokens are damaged.
    """
    if isinstance(tokens.tokens, TokenFile) and tokens.tokens.nbytes <= _AT_ONCE_BYTES:
        tokens.tokens.verify()
    return tokens


def _remove(folder: pathlib.Path, damaged: os.stat_result) -> None:
    """Removes a damaged folder, unless another process has replaced it meanwhile."""
    aside = folder.with_name(f".{folder.name}.damaged-{uuid.uuid4().hex[:12]}")
    with contextlib.suppress(OSError):
        if folder.stat().st_ino == damaged.st_ino:
            folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _make(
    source: Source, tokenizer: Tokenizer, folder: pathlib.Path | None, *, text_field: str, token_dtype: str, log: Log
) -> Tokens:
    token_file = None
    if folder and source.format == "tokens" and len(source.files) == 1:
        token_file = open_token_file(source.files[0], token_dtype=token_dtype)
        offsets = read_offsets(token_file.path, num_tokens=token_file.size)
        chunks = array_chunks(token_file, end_of_document=tokenizer.end_of_document, offsets=offsets)
    else:
        chunks = source_chunks(source, tokenizer, text_field=text_field, token_dtype=token_dtype)
    chunks = log_progress(chunks, source.name, log=log)
    return make_tokens(chunks, source.name, tokenizer, folder=folder, token_file=token_file, is_cache=True)


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

    Raises:
      ValueError: there is no document among them.
      OSError: the folder cannot be written.
    """
    meta = TokenMeta(
        source=name,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
    )
    dtype = token_file.dtype if token_file else np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    chunks = _check_not_empty(chunks, name)
    if folder is None:
        return keep_in_memory(chunks, meta=meta, dtype=dtype)
    attached = {TOKENIZER_FILE: tokenizer.content} if isinstance(tokenizer, JsonTokenizer) else {}
    write_folder(folder, chunks, meta=meta, dtype=dtype, token_file=token_file, attached=attached)
    return open_folder(folder, is_cache=is_cache)


def source_chunks(source: Source, tokenizer: Tokenizer, *, text_field: str, token_dtype: str) -> Iterator[Chunk]:
    """Reads a source of any format as chunks of tokens."""
    ends = {"token_dtype": token_dtype, "end_of_document": tokenizer.end_of_document}
    if source.format == "tokens":
        return file_chunks(source, **ends)
    if source.format == "arrayrecord":
        return record_chunks(source, **ends)
    return text_chunks(read_text(source, text_field=text_field), tokenizer)


def _check_not_empty(chunks: Iterable[Chunk], name: str) -> Iterator[Chunk]:
    has_document = False
    for chunk in chunks:
        has_document = has_document or chunk.document_hash is not None
        yield chunk
    if not has_document:
        raise ValueError(f"{name} holds no text: all of its documents are empty")


def log_progress(chunks: Iterable[Chunk], name: str, *, log: Log) -> Iterator[Chunk]:
    """Yields chunks, and logs every five seconds how many tokens there were."""
    started = logged = time.monotonic()
    num_tokens = num_bytes = 0
    for chunk in chunks:
        num_tokens, num_bytes = num_tokens + chunk.tokens.size, num_bytes + chunk.num_text_bytes
        if time.monotonic() - logged > _LOG_SECONDS:
            logged = time.monotonic()
            of_text = f" of {num_bytes / 1e6:,.0f} MB of text" if num_bytes else ""
            log(f"reading {name}: {num_tokens:,} tokens{of_text} in {logged - started:.0f} s")
        yield chunk
