"""The command `zero-jax tokenize`: a vocabulary trained on the user's text, and the text as a folder of tokens."""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

from zero_jax import data
from zero_jax.checkpoint import check_outside
from zero_jax.cli.options import field_values, log_line, print_result
from zero_jax.core.files.system_errors import with_remedy
from zero_jax.core.files.untrusted import user_path

_SAMPLE_BYTES = 4_000_000  # of text, for the tokens per byte


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizeResult:
    """What `zero-jax tokenize` made."""

    data: str  # the text
    tokenizer: str  # the tokenizer's file, or `bytes`
    vocab_size: int  # number of different tokens
    # Of the text (1 for bytes), the ends of documents left out; None if there was no text
    tokens_per_byte: float | None
    tokens: str | None = None  # the token folder, or None
    num_tokens: int | None = None  # tokens in it
    num_documents: int | None = None  # documents in it
    num_replaced: int | None = None  # places in the text that were no valid Unicode

    def __str__(self) -> str:
        lines = [f"tokenizer  {self.tokenizer}, {self.vocab_size:,} tokens"]
        if self.tokens_per_byte is not None:
            lines.append(f"text       1 token a byte before, {self.tokens_per_byte:.3f} now")
        if self.tokens is not None:
            documents = f"{self.num_documents:,} document{'s' if self.num_documents != 1 else ''}"
            lines.append(f"tokens     {self.tokens}: {self.num_tokens:,} tokens, {documents}")
        if self.num_replaced:
            lines.append(f"replaced   {self.num_replaced:,} places that were no valid Unicode")
        options = f"--data {self.tokens}" if self.tokens else f"--data {self.data} --tokenizer {self.tokenizer}"
        return "\n".join([*lines, f"next       zero-jax train {options} --vocab-size {self.vocab_size}"])


def tokenize(options: argparse.Namespace) -> int:
    """Runs `zero-jax tokenize`."""
    try:
        result = _make(options, data.DataConfig(**field_values(data.DataConfig, options)))
    except KeyboardInterrupt:  # tokenizers and folders appear in one move
        print("stopped; nothing was left half-written", file=sys.stderr)
        return 130
    print_result(options, result)
    return 0


def _make(options: argparse.Namespace, config: data.DataConfig) -> TokenizeResult:
    _check_options(options, config)
    source = data.find_source(config.data, format=config.format)
    is_text = source.format not in ("tokens", "arrayrecord")
    if options.vocab_size is None:
        file = "bytes" if config.tokenizer == "auto" else config.tokenizer
        tokenizer = data.load_tokenizer(file)
    elif is_text:
        file = options.out or "tokenizer.json"
        texts = (piece.text for piece in data.read_text(source, text_field=config.text_field))
        tokenizer = data.train_bpe(texts, vocab_size=options.vocab_size, path=file, progress=sys.stderr.isatty())
    else:
        raise ValueError(f"{source.name} holds tokens: a tokenizer is trained on text")
    written: dict[str, Any] = {}
    if options.tokens:
        tokens = _write(options.tokens, source, tokenizer, config)
        written = {"tokens": options.tokens, "num_tokens": tokens.tokens.size, "num_documents": len(tokens.hashes)}
        written["num_replaced"] = tokens.meta.num_replaced
    ratio = _tokens_per_byte(data.read_text(source, text_field=config.text_field), tokenizer) if is_text else None
    size = tokenizer.vocab_size
    return TokenizeResult(data=config.data, tokenizer=file, vocab_size=size, tokens_per_byte=ratio, **written)


def _check_options(options: argparse.Namespace, config: data.DataConfig) -> None:
    if options.vocab_size is None and options.tokens is None:
        raise ValueError(
            "nothing to make: give --vocab-size N to train a tokenizer, --tokens FOLDER to write tokens, or both"
        )
    if options.vocab_size is None and options.out is not None:
        raise ValueError(f"--out {options.out} is for a tokenizer that is trained: give --vocab-size N as well")
    if options.vocab_size is not None and config.tokenizer != "auto":
        raise ValueError(
            f"--vocab-size trains a tokenizer, --tokenizer {config.tokenizer} takes one that is there: give one of them"
        )
    if data.is_token_folder(user_path(config.data)):
        raise ValueError(f"{config.data} holds tokens already: train on it with `zero-jax train --data {config.data}`")
    if options.tokens:
        check_outside(user_path(options.tokens))
    if options.tokens and pathlib.Path(options.tokens).exists():
        raise ValueError(f"{options.tokens} exists already: give another --tokens FOLDER, or remove it")


def _write(folder: str, source: data.Source, tokenizer: data.Tokenizer, config: data.DataConfig) -> data.Tokens:
    chunks = data.source_chunks(source, tokenizer, text_field=config.text_field, token_dtype=config.token_dtype)
    chunks = data.log_progress(chunks, source.name, log=log_line)
    try:
        return data.make_tokens(chunks, source.name, tokenizer, folder=user_path(folder))
    except OSError as error:
        raise ValueError(f"cannot write {folder}: {with_remedy(error)}") from error


def _tokens_per_byte(pieces: Iterable[data.Piece], tokenizer: data.Tokenizer) -> float:
    """Returns the tokens per byte of the first megabytes of text."""
    num_bytes = num_tokens = 0
    for piece in pieces:
        num_bytes += len(piece.text.encode())
        num_tokens += len(tokenizer.encode(piece.text))
        if num_bytes >= _SAMPLE_BYTES:
            break
    return num_tokens / max(num_bytes, 1)
