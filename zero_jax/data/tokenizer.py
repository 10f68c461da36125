"""Tokenizers: bytes, or a vocabulary of the `tokenizers` library, loaded from its JSON file or trained."""

import abc
import contextlib
import dataclasses
import functools
import hashlib
import math
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath

from zero_jax.core.extras import extra
from zero_jax.core.files.partial_folder import partial_folder
from zero_jax.core.files.untrusted import parse_json, read_file, user_path
from zero_jax.core.text_tables import is_unicode, printable

# Names of the end-of-document token in tokenizer files, the most frequent first.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<end_of_text>", "[SEP]", "[EOS]")
_NUM_BYTES = 256
_MAX_FILE_BYTES, _MAX_VOCAB_SIZE = 1 << 28, 1 << 24
_MAX_GROWTH = 1000  # of a text's length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer(abc.ABC):
    """Turns text into tokens and back.

    Example:
      >>> tokenizer = zero.data.load_tokenizer("bytes")
      >>> tokenizer.decode(tokenizer.encode("zero")), tokenizer.vocab_size
      ('zero', 256)
    """

    name: str = dataclasses.field(compare=False)  # for people
    fingerprint: str  # a hash: tokenizers with the same one make the same tokens
    vocab_size: int  # one more than the largest token that text can become, or that ends a document
    end_of_document: int  # the token after each document

    def encode(self, text: str) -> np.ndarray:
        """Returns the text's tokens, a vector of any integer dtype, without special tokens."""
        return self.encode_all([text])[0]

    @abc.abstractmethod
    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the tokens of each of several texts."""

    @abc.abstractmethod
    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text of tokens, also of invalid sequences and ends of documents."""


class ByteTokenizer(Tokenizer):
    """Each byte of the UTF-8 text is a token; byte 0, which no text has, ends a document."""

    def __init__(self) -> None:
        super().__init__(name="bytes", fingerprint="bytes", vocab_size=_NUM_BYTES, end_of_document=0)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the bytes of each text, as `uint8`."""
        if not all(map(is_unicode, texts)):
            raise ValueError("the text has a lone surrogate, which is no character: replace it")
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text; invalid UTF-8 shows as replacement characters."""
        return np.asarray(tokens).astype(np.uint8).tobytes().decode(errors="replace")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library; `load_tokenizer` reads it from its JSON file."""

    content: bytes = dataclasses.field(repr=False, compare=False)  # what is in the file
    library: Any = dataclasses.field(repr=False, compare=False)  # the library's own object

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the tokens of each text, as `uint32`; the library takes several threads."""
        with _errors_of(self.name):
            encoded = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(text.ids, np.uint32) for text in encoded]

    def encode_rendered(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of a text that a chat template rendered, special ones parsed, and where each ends in it.

        Special tokens end without the spaces that the library strips behind some of them.
        """
        with _errors_of(self.name):
            encoded = self._with_special_tokens.encode(text, add_special_tokens=False)
        ends = np.array([end for _, end in encoded.offsets], np.int64)
        for i, (token, (first, end)) in enumerate(zip(encoded.ids, encoded.offsets, strict=True)):
            if token in self._special and (at := text.find(self._special[token].content, first, end)) >= 0:
                ends[i] = at + len(self._special[token].content)
        return np.array(encoded.ids, np.uint32), ends

    @functools.cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The texts of the special tokens."""
        return tuple(entry.content for entry in self._special.values())

    def hidden_special(self, texts: Sequence[str]) -> str | None:
        """Returns a special token that one of the texts has after normalization, if there is one."""
        normalized = {token: entry.content for token, entry in self._special.items() if entry.normalized}
        if not normalized or self.library.normalizer is None:
            return None
        tokens = {token for text in texts for token in self.encode_rendered(text)[0].tolist()}
        return next((text for token, text in normalized.items() if token in tokens), None)

    @functools.cached_property
    def _special(self) -> dict[int, Any]:
        entries = self.library.get_added_tokens_decoder().items()
        return {token: entry for token, entry in entries if entry.special}

    @functools.cached_property
    def _with_special_tokens(self) -> Any:
        from tokenizers import processors

        library = _parse(self.content, pathlib.Path(self.name))
        library.encode_special_tokens = False
        # Without special tokens it changes nothing but offsets, from which some leave out spaces.
        library.post_processor = processors.ByteLevel(trim_offsets=False)
        return library

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text, end-of-document tokens included."""
        with _errors_of(self.name):
            return self.library.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)


@contextlib.contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Raises `ValueError` where the library fails: for text with lone surrogates, or an expression that backtracks."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":  # which is no Exception
            why = printable(error) or type(error).__name__
            raise ValueError(
                f"the tokenizer {name} cannot encode or decode this ({why}): mend the text, or take another tokenizer"
            ) from error
        raise


def load_tokenizer(name: str | pathlib.Path) -> Tokenizer:
    """Loads a tokenizer: `bytes`, or the path of a `tokenizers` JSON file.

    Truncation and padding of the file are turned off, and text that looks like a special token stays text.

    Raises:
      ValueError: the file cannot be read, is no tokenizer, or has no end-of-document token.

    Example:
      >>> zero.data.load_tokenizer("bytes").encode("zero").tolist()
      [122, 101, 114, 111]
    """
    if name == "bytes":
        return ByteTokenizer()
    path = user_path(name)
    try:
        content = read_file(epath.Path(path), limit_bytes=_MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"cannot read the tokenizer {name} ({why}): give 'bytes', or the path of a file that the "
            "tokenizers library wrote, such as tokenizer.json"
        ) from error
    library = _parse(content, path)
    ends = [token for token in map(library.token_to_id, _ENDS) if token is not None]
    if not ends:
        raise ValueError(
            f"{path} has no token that ends a document (none of {', '.join(_ENDS)}): add one to its added_tokens, "
            "or train a tokenizer with `zero-jax tokenize --vocab-size N --out FILE`"
        )
    added = {token for token, entry in library.get_added_tokens_decoder().items() if not entry.special}
    # Those of plain text; special ones may exceed a model's vocabulary.
    vocab_size = max(added | set(library.get_vocab(with_added_tokens=False).values()) | {ends[0]}) + 1
    if vocab_size > _MAX_VOCAB_SIZE:
        raise ValueError(
            f"{path} has the token {vocab_size - 1:,}: tokens go up to {_MAX_VOCAB_SIZE - 1:,}; mend or replace it"
        )
    return JsonTokenizer(
        name=path.name,
        fingerprint=hashlib.sha256(content).hexdigest()[:32],
        vocab_size=vocab_size,
        end_of_document=ends[0],
        content=content,
        library=library,
    )


def _parse(content: bytes, path: pathlib.Path) -> Any:
    with extra("train"):
        import tokenizers

    try:
        library = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(
            f"{path} is no tokenizer of the tokenizers library ({printable(error)}): give its JSON file, often called "
            "tokenizer.json"
        ) from error
    growth = math.prod(map(_growth, (library.normalizer, library.pre_tokenizer, library.decoder)))
    if growth > _MAX_GROWTH:
        raise ValueError(
            f"{path} may make text more than {_MAX_GROWTH:,} times longer, by its 'Replace' or 'Prepend': mend or "
            "replace it"
        )
    library.no_truncation()
    library.no_padding()
    # Despite its name: special tokens in a text are encoded as the text that they are.
    library.encode_special_tokens = True
    return library


def _growth(component: Any) -> int:
    """Returns how much longer a part of a tokenizer may make a text, by what it puts in the place of characters."""
    growth, waiting = 1, [] if component is None else [parse_json(component.__getstate__())]
    while waiting and growth <= _MAX_GROWTH:
        value = waiting.pop()
        if isinstance(value, dict):
            growth *= max(1, *(len(str(value.get(name, ""))) for name in ("content", "prepend")))
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return growth


def train_bpe(texts: Iterable[str], *, vocab_size: int, path: str | pathlib.Path, progress: bool = False) -> Tokenizer:
    """Trains a byte-level BPE, which is lossless for any text, and writes it as a `tokenizers` JSON file.

    Args:
      texts: the text, in pieces, read once.
      vocab_size: most tokens: `<|endoftext|>`, the 256 bytes, and merges of them. Little text makes fewer.
      path: the file to write, which must not exist yet.
      progress: whether the library shows a progress bar.

    Raises:
      ValueError: the vocabulary has no room for the bytes, there is a file already, or it cannot be written.
    """
    with extra("train"):
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers, trainers

    path = user_path(path)
    if vocab_size < _NUM_BYTES + 1:
        raise ValueError(
            f"vocab_size={vocab_size}: give at least {_NUM_BYTES + 1}, for the bytes and the end of a document; "
            "8192 for example"
        )
    if path.exists():
        raise ValueError(f"{path} exists already: give another path, or remove it")
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_ENDS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    with partial_folder(path) as partial:  # fails now rather than after an hour
        library.train_from_iterator(texts, trainer)
        # Not `library.save`, whose error of a full disk is a bare `Exception`.
        (partial / path.name).write_text(library.to_str(pretty=True), encoding="utf-8")
        (partial / path.name).replace(path)
    return load_tokenizer(path)
