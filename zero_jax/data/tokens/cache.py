"""The token cache: a source is tokenized once, then read from a folder."""

import contextlib
import os
import pathlib
import re
import shutil
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator

from zero_jax.core.files.system_errors import with_remedy
from zero_jax.core.files.user_cache import evict_oldest, in_use
from zero_jax.data.sources import Source
from zero_jax.data.tokenizer import Tokenizer
from zero_jax.data.tokens.chunks import open_token_file, source_chunks
from zero_jax.data.tokens.store import Chunk, TokenFile, Tokens, make_tokens, open_folder

Log = Callable[[str], None]
MAX_BYTES = 20 * 10**9  # of all tokens in the cache; entries in use stay, whatever their size
_VERSION = "2"  # of how sources are read; a new version invalidates the cache
_LOG_SECONDS = 5.0
_AT_ONCE_BYTES = 1 << 30


def read_tokens(
    source: Source, tokenizer: Tokenizer, *, text_field: str, token_dtype: str, cache: pathlib.Path | None, log: Log
) -> Tokens:
    """Returns the tokens of a source, from the cache (None: in memory), which has a token file's offsets alone."""

    def make(folder: pathlib.Path | None) -> Tokens:
        is_in_place = folder is not None and source.format == "tokens" and len(source.files) == 1
        token_file = open_token_file(source.files[0], token_dtype=token_dtype) if is_in_place else None
        chunks = source_chunks(source, tokenizer, text_field=text_field, token_dtype=token_dtype)
        chunks = log_progress(chunks, source.name, log=log)
        return make_tokens(chunks, source.name, tokenizer, folder=folder, token_file=token_file, is_cache=True)

    if cache is None:
        return make(None)
    stem = pathlib.Path(source.files[0].name if len(source.files) == 1 else source.name).name
    key = source.fingerprint(_VERSION, tokenizer.fingerprint, text_field, token_dtype)
    folder = cache / f"{''.join(c if c.isalnum() else '-' for c in stem)[:40]}-{key}"
    if folder.exists():
        damaged = folder.stat()  # before it is opened: another process may replace it meanwhile
        try:
            return _in_use(verify_if_small(open_folder(folder, is_cache=True)), folder)
        except ValueError as error:
            log(f"{error}; making it anew")
            _remove(folder, damaged)
    try:
        tokens = _in_use(make(folder), folder)
        is_entry = lambda x: re.fullmatch(r".*-[0-9a-f]{16,}", x.name) is not None and (x / "meta.json").is_file()  # noqa: E731
        evict_oldest(cache, is_own=is_entry, max_bytes=MAX_BYTES, keep=folder)
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
    # Unlocked when nothing reads the tokens any more.
    weakref.finalize(tokens.tokens, use.close)
    return tokens


def verify_if_small(tokens: Tokens) -> Tokens:
    """Verifies the checksums of a file of up to 1 GiB, in about a second; larger files as they are read."""
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
