"""Real text without a download: bytes of source files, split into training and validation, cut into windows.

A batch is a pure function of the seed and the step, so a run that resumes sees what an unbroken one would have seen.
Text becomes tokens through a `Tokenizer`; bytes are the one that needs no vocabulary file.
"""

import dataclasses
import pathlib
import sysconfig
import zlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

# Tables, generated text and code about other code's syntax: none of it reads like the Python that people write.
_STDLIB_SKIPPED = frozenset(
    "site-packages dist-packages test tests idlelib idle_test lib2to3 encodings pydoc_data turtledemo".split()
)


class Tokenizer(Protocol):
    """Turns text into tokens and back."""

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""
        ...

    @property
    def end_of_document(self) -> int:
        """The token that is put after each document."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Returns the text's tokens, a vector of any integer dtype."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text of tokens, however badly a model chose them."""
        ...


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """Takes each byte of the UTF-8 text as a token; byte 0, which no text has, ends a document."""

    vocab_size: int = dataclasses.field(default=256, init=False)
    end_of_document: int = dataclasses.field(default=0, init=False)

    def encode(self, text: str) -> np.ndarray:
        """Returns the bytes of the text, as `uint8`."""
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text; bytes that are no UTF-8 show as replacement characters."""
        return np.asarray(tokens).astype(np.uint8).tobytes().decode(errors="replace")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Says which text a model is trained on.

    Attributes:
      data: where the text comes from: `stdlib` is the source code of Python's own standard library, anything else is
        the path of a text file or of a folder of them.
      validation_fraction: share of the text that is kept for validation: whole files of a folder, or the end of a
        single file.
    """

    data: str = "stdlib"
    validation_fraction: float = 0.1

    def __post_init__(self):
        """Refuses a fraction that leaves one of the parts empty."""
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction={self.validation_fraction} leaves nothing on one side: choose it between 0 "
                "and 1, 0.1 for example"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Tokens of a text, in two parts.

    Attributes:
      name: what the text is.
      tokenizer: what made the tokens.
      num_files: files that were read.
      train: tokens to learn from, a vector.
      validation: tokens to measure on, a vector.
    """

    name: str
    tokenizer: Tokenizer
    num_files: int
    train: np.ndarray
    validation: np.ndarray

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.num_files:,} file{'s' if self.num_files != 1 else ''}, "
            f"{self.train.size:,} tokens to train on, {self.validation.size:,} to validate on"
        )


def load(config: DataConfig, *, seq_len: int, tokenizer: Tokenizer | None = None) -> Dataset:
    """Reads the text and splits it.

    Args:
      config: which text.
      seq_len: tokens in the windows that will be cut from it.
      tokenizer: what makes tokens of it; bytes if None.

    Returns:
      The tokens of both parts.

    Raises:
      ValueError: there is no such path, no text there, or too little of it for a window.
    """
    tokenizer = tokenizer or ByteTokenizer()
    if config.data == "stdlib":
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        name, files = f"Python's standard library ({root})", _stdlib_files(root)
    else:
        root = pathlib.Path(config.data).expanduser()
        name, files = str(root), _text_files(root)
    documents = {path: tokenizer.encode(path.read_text(encoding="utf-8", errors="replace")) for path in files}
    if len(documents) == 1:
        (tokens,) = documents.values()
        train, validation = _cut_tail(tokens, config.validation_fraction)
    else:
        names = [path.relative_to(root).as_posix() for path in documents]
        train, validation = _split_by_file(
            names, list(documents.values()), config.validation_fraction, tokenizer.end_of_document
        )
    for part, tokens in (("training", train), ("validation", validation)):
        if tokens.size < seq_len + 1:
            raise ValueError(
                f"{name} has {tokens.size:,} tokens for {part}, but one sequence takes seq_len + 1 = {seq_len + 1:,}: "
                f"give more text, a shorter --seq-len, or another --validation-fraction"
            )
    return Dataset(name=name, tokenizer=tokenizer, num_files=len(documents), train=train, validation=validation)


def train_batch(dataset: Dataset, step: int, *, seed: int, batch_size: int, seq_len: int) -> dict[str, np.ndarray]:
    """Cuts the batch of one step: windows from anywhere in the training part, chosen by the seed and the step alone.

    Args:
      dataset: the tokens.
      step: number of the optimizer step, from 0.
      seed: chooses among sequences of batches.
      batch_size: windows in the batch, over all devices.
      seq_len: tokens in a window.

    Returns:
      `inputs` and, one token later, `targets`: int32 `[batch_size, seq_len]`.
    """
    starts = np.random.default_rng((seed, step)).integers(0, dataset.train.size - seq_len, batch_size)
    return _windows(dataset.train, starts, seq_len)


def validation_batches(
    dataset: Dataset, *, num_batches: int, batch_size: int, seq_len: int
) -> list[dict[str, np.ndarray]]:
    """Cuts batches from evenly spaced places of the validation part: the same ones whenever it is called."""
    last_start = dataset.validation.size - seq_len - 1
    starts = np.linspace(0, last_start, num_batches * batch_size).astype(np.int64)
    return [_windows(dataset.validation, some, seq_len) for some in starts.reshape(num_batches, batch_size)]


def _windows(tokens: np.ndarray, starts: np.ndarray, seq_len: int) -> dict[str, np.ndarray]:
    windows = tokens[starts[:, None] + np.arange(seq_len + 1)].astype(np.int32)
    return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def _stdlib_files(root: pathlib.Path) -> list[pathlib.Path]:
    files = sorted(path for path in root.rglob("*.py") if _STDLIB_SKIPPED.isdisjoint(path.relative_to(root).parts))
    if not files:
        raise ValueError(f"this Python has no .py files at {root}: give the path of some text with --data PATH")
    return files


def _text_files(root: pathlib.Path) -> list[pathlib.Path]:
    if not root.exists():
        raise ValueError(
            f"there is no {root}: give the path of a text file or of a folder of them, or 'stdlib' for the source code "
            "of Python's standard library"
        )
    if root.is_file():
        candidates = [root]
    else:
        shown = (path for path in root.rglob("*") if not any(p.startswith(".") for p in path.relative_to(root).parts))
        candidates = sorted(path for path in shown if path.is_file())
    files = [path for path in candidates if _is_text(path)]
    if not files:
        raise ValueError(
            f"{root} holds no text (files that are empty, hidden, or have a NUL byte do not count): give the path of a "
            "text file or of a folder of them"
        )
    return files


def _is_text(path: pathlib.Path) -> bool:
    """Tells text from binary as git does: by the absence of NUL from the first 8,000 bytes."""
    with path.open("rb") as file:
        head = file.read(8000)
    return bool(head) and b"\0" not in head


def _cut_tail(tokens: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    num_train = tokens.size - int(tokens.size * fraction)
    return tokens[:num_train], tokens[num_train:]


def _split_by_file(
    names: Sequence[str], documents: Sequence[np.ndarray], fraction: float, end_of_document: int
) -> tuple[np.ndarray, np.ndarray]:
    """Gives validation the files whose names hash lowest, as many as fit into its share of the tokens.

    A hash of the name, because neighbours in a folder are alike and the split must not depend on the machine. Where not
    one file fits, validation gets the end of the whole text.
    """
    ended = [np.append(document, np.asarray(end_of_document, document.dtype)) for document in documents]
    room = fraction * sum(document.size for document in ended)
    in_validation = set()
    for index in sorted(range(len(names)), key=lambda index: (zlib.crc32(names[index].encode()), names[index])):
        if ended[index].size <= room:
            room -= ended[index].size
            in_validation.add(index)
    if not in_validation:
        return _cut_tail(np.concatenate(ended), fraction)
    train = [document for index, document in enumerate(ended) if index not in in_validation]
    return np.concatenate(train), np.concatenate([ended[index] for index in sorted(in_validation)])
