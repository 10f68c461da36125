"""Data sets: documents of text or tokens from files, split into training and validation."""

import dataclasses
import hashlib
import pathlib

import numpy as np

from zero_jax.core.field_checks import check_fields, hinted
from zero_jax.core.files.untrusted import user_path
from zero_jax.core.files.user_cache import cache_folder
from zero_jax.core.signatures import check_arguments
from zero_jax.core.text_tables import printable
from zero_jax.data.chat_template import find_chat_template
from zero_jax.data.conversations import load_conversations
from zero_jax.data.parts import Dataset, TokenPart, split_documents
from zero_jax.data.sources import HUB, Format, find_source
from zero_jax.data.stream import open_stream
from zero_jax.data.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from zero_jax.data.tokens.cache import Log, read_tokens, verify_if_small
from zero_jax.data.tokens.store import TOKENIZER_FILE, TokenDtype, Tokens, is_token_folder, open_folder

_MOST_PREFETCHED = 1024  # batches; more than that would fill the memory


@hinted
@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The documents to train on, and how to read them.

    Attributes:
      data: the documents: `stdlib` is the source code of Python's own standard library, anything else is the path of
        a text file, of a folder of them, of .jsonl, .parquet, ArrayRecord, .npy or .bin files, or of a folder that
        `zero-jax tokenize` wrote; `hf:NAME` (`hf:NAME:SUBSET@SPLIT`) is a data set of the Hugging Face hub, or of a
        folder, by the package `datasets`.
      format: how to read it; `auto` goes by the names of the files, `chat` are conversations or prompts with
        completions in JSON Lines, messages by the chat template beside the tokenizer's file if there is one.
      text_field: field of a JSON line, or column of a Parquet file, that holds the text.
      tokenizer: `bytes`, or the path of a JSON file of the tokenizers library; `auto` takes a token folder's own, and
        bytes for everything else.
      token_dtype: dtype of the tokens in .bin files and ArrayRecords.
      token_cache: folder where the tokens of a text are cached; `default` is zero_jax in the user's cache folder, none
        keeps them in memory.
      validation_fraction: share of the tokens for validation: entire documents, or the end of a single one.
      validation_data: documents to validate on, in the form of `data`, of which all is trained on then.
      separate_documents: give the model the document of each token (`segments`), so that attention stays within it;
        otherwise tokens attend to the documents before theirs. The loss never crosses documents either way.
      prefetch_batches: batches to read while the devices compute.
      streaming: read the text of hf:NAME as it is needed, shuffled within blocks of rows; otherwise all of it first,
        shuffled as a whole, as for every other format and for conversations.

    Example:
      >>> zero.data.DataConfig(data="texts/", validation_fraction=0.05)
      DataConfig(data='texts/', validation_fraction=0.05)
    """

    data: str = "stdlib"
    format: Format = "auto"
    text_field: str = "text"
    tokenizer: str = "auto"
    token_dtype: TokenDtype = "uint16"
    token_cache: str | None = "default"
    validation_fraction: float = 0.1
    validation_data: str | None = None
    separate_documents: bool = False
    prefetch_batches: int = 2
    streaming: bool = True

    def __post_init__(self):
        """Raises `ValueError` for invalid values."""
        check_fields(self, lowest={"prefetch_batches": 0}, highest={"prefetch_batches": _MOST_PREFETCHED})
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction={self.validation_fraction} leaves nothing on one side: choose it between 0 "
                "and 1, 0.1 for example"
            )
        if self.validation_data is not None and self.validation_fraction != DataConfig.validation_fraction:
            raise ValueError(
                f"validation_data={self.validation_data!r} and validation_fraction={self.validation_fraction} both say "
                "what to validate on: leave out one of them"
            )
        for name in ("data", "text_field", "tokenizer", "token_cache", "validation_data"):
            if getattr(self, name) == "":
                raise ValueError(f"{name}='' says nothing: leave it out for {getattr(DataConfig, name)!r}")

    @property
    def has_segments(self) -> bool:
        """Whether batches have `segments`: conversations never see one another."""
        return self.separate_documents or self.format == "chat"

    @property
    def cache(self) -> pathlib.Path | None:
        """The folder of the token cache, or None."""
        if self.token_cache == "default":
            return cache_folder("tokens")
        return None if self.token_cache is None else user_path(self.token_cache)


def load_dataset(
    config: DataConfig,
    *,
    seq_len: int,
    tokenizer: Tokenizer | None = None,
    held_out: bool = False,
    log: Log = lambda line: None,
) -> Dataset:
    """Loads a data set: reads and tokenizes the documents, or takes their tokens from the cache, and splits them.

    Args:
      config: which documents, and how to read them.
      seq_len: tokens in a row; each part must have enough for one.
      tokenizer: the tokenizer; None takes the one that the config names.
      held_out: whether all documents are for validation, and none to train on.
      log: called with progress lines.

    Returns:
      The data set; tokens in a file are read on demand.

    Raises:
      ValueError: there is no such path, a file cannot be read (with its name, and line or row), the tokens were made
        with another tokenizer, or there are too few for a row.
    """
    check_arguments(seq_len=seq_len)
    if held_out or config.validation_data is None:
        return _load(config, 1.0 if held_out else config.validation_fraction, seq_len, tokenizer, log)
    loaded = _load(config, 0.0, seq_len, tokenizer, log)
    other = dataclasses.replace(config, data=config.validation_data, validation_data=None)
    validation = _load(other, 1.0, seq_len, loaded.tokenizer, log)
    num_known = int(np.isin(validation.hashes, loaded.hashes).sum())
    known = f"; {num_known:,} of these documents are trained on too" if num_known else ""
    return dataclasses.replace(
        loaded,
        # Its vocabulary may be larger: of conversations it has the special tokens that they use.
        tokenizer=validation.tokenizer,
        validation=validation.validation,
        fingerprint=hashlib.sha256(f"{loaded.fingerprint} {validation.fingerprint}".encode()).hexdigest()[:32],
        notes=(*loaded.notes, f"validation on {validation}{known}"),
    )


def _load(config: DataConfig, fraction: float, seq_len: int, tokenizer: Tokenizer | None, log: Log) -> Dataset:
    """Loads a data set, a fraction of its tokens for validation: 0 for none, 1 for all of them."""
    folder = user_path(config.data)

    def chosen(own: str = "bytes") -> Tokenizer:
        return tokenizer or load_tokenizer(own if config.tokenizer == "auto" else config.tokenizer)

    if config.format == "chat":
        source, tokenizer, template = find_source(config.data, format="chat"), chosen(), None
        if isinstance(tokenizer, JsonTokenizer) and config.tokenizer != "auto":
            template = find_chat_template(user_path(config.tokenizer).parent)
        return load_conversations(source, tokenizer, template=template, seq_len=seq_len, validation_fraction=fraction)
    num_left_out, is_hub = 0, config.data.startswith(HUB)
    if is_hub and config.format not in ("auto", "text"):
        raise ValueError(f"format={config.format!r}: {config.data} has rows: leave it out, or give 'chat'")
    if is_hub and config.streaming and fraction < 1:
        how = {"text_field": config.text_field, "seq_len": seq_len, "validation_fraction": fraction}
        return open_stream(config.data, chosen(), **how)
    if config.data != "stdlib" and config.format in ("auto", "tokens") and is_token_folder(folder):
        name, tokens = str(folder), verify_if_small(open_folder(folder))
        tokenizer = chosen(token_folder_tokenizer(folder))
        if tokenizer.fingerprint != tokens.meta.tokenizer_fingerprint:
            made_with = printable(f"{tokens.meta.tokenizer} ({tokens.meta.tokenizer_fingerprint})")
            raise ValueError(
                f"{folder} was made with the tokenizer {made_with}, not with {tokenizer.name} "
                f"({tokenizer.fingerprint}): leave out --tokenizer, or make the folder again"
            )
    else:
        source = find_source(config.data, format=config.format)
        name, num_left_out, tokenizer = source.name, source.num_left_out, chosen()
        how = {"text_field": config.text_field, "token_dtype": config.token_dtype}
        tokens = read_tokens(source, tokenizer, **how, cache=config.cache, log=log)
    train, validation = split_documents(tokens, validation_fraction=fraction)
    if fraction < 1:
        train.check_size(name, "training", seq_len, fraction=fraction)
    if fraction:
        validation.check_size(name, "validation", seq_len, fraction=fraction)
    return Dataset(
        name=name,
        tokenizer=tokenizer,
        num_documents=len(tokens.hashes),
        train=train,
        validation=validation,
        fingerprint=_fingerprint(tokens, train, validation),
        notes=_notes(tokens, num_left_out, validation.size, asked=int(fraction * int(tokens.offsets[-1]))),
        hashes=tokens.hashes,
    )


def token_folder_tokenizer(folder: pathlib.Path) -> str:
    """Returns the file of the tokenizer of a token folder, or `bytes`."""
    return str(folder / TOKENIZER_FILE) if (folder / TOKENIZER_FILE).is_file() else "bytes"


def _fingerprint(tokens: Tokens, train: TokenPart, validation: TokenPart) -> str:
    meta = tokens.meta
    digest = hashlib.sha256(repr((meta.tokenizer_fingerprint, meta.vocab_size, meta.end_of_document)).encode())
    for vector in (tokens.offsets, tokens.hashes, train.starts, train.offsets, validation.starts, validation.offsets):
        # With its length: else numbers could move from one vector to the next.
        digest.update(len(vector).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(vector, "<u8").tobytes())
    return digest.hexdigest()[:32]


def _notes(tokens: Tokens, num_left_out: int, num_validated: int, *, asked: int) -> tuple[str, ...]:
    counts = {
        "empty, binary or other files left out": num_left_out,
        "empty documents left out": tokens.meta.num_empty,
        "places that were no valid Unicode replaced": tokens.meta.num_replaced,
    }
    notes = [f"{count:,} {text}" for text, count in counts.items() if count]
    if num_validated < asked / 2:
        notes.append(f"other documents are longer than the {asked:,} tokens that are asked for to validate on")
    return tuple(notes)
