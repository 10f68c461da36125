"""Data sets and their parts, for training and validation: the rows of each, and which documents are in which."""

import dataclasses
from typing import Protocol

import numpy as np

from zero_jax.core.text_tables import Report
from zero_jax.data.tokenizer import Tokenizer
from zero_jax.data.tokens.store import TokenFile, Tokens

NO_ROW = -1


class Part(Protocol):
    """The tokens to train on or to validate on, in rows."""

    @property
    def size(self) -> int:
        """Number of tokens."""
        ...

    def num_rows(self, *, seq_len: int) -> int:
        """Returns the number of rows; the last one may be shorter."""
        ...

    def cut_rows(self, rows: np.ndarray, *, seq_len: int) -> dict[str, np.ndarray]:
        """Reads packed rows of tokens by their numbers; `NO_ROW` is a row of weight 0.

        Returns:
          `inputs` and `targets`, int32; `weights`, float32: 0 where the target is not to be predicted or is beyond the
          end, else 1; `segments`, int32: the document of each input, numbered from 0 in each row. All are
          `[len(rows), seq_len]`.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Dataset(Report):
    """A tokenized data set, split into training and validation.

    Attributes:
      name: the path of the documents, or `stdlib`.
      tokenizer: the tokenizer of the tokens.
      num_documents: documents that were read.
      train: tokens for training.
      validation: tokens for validation.
      fingerprint: a hash of the tokens and the split; the same on every machine.
      notes: lines about documents that were left out or replaced.
    """

    name: str
    tokenizer: Tokenizer
    num_documents: int
    train: Part
    validation: Part
    fingerprint: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.name}: {self.num_documents:,} document{'s' if self.num_documents != 1 else ''}, "
        if self.train.size:
            text += f"{self.train.size:,} tokens to train on, {self.validation.size:,} to validate on"
        else:
            text += f"{self.validation.size:,} tokens"
        return "; ".join([text, *self.notes])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenPart:
    """The documents of a part as one stream of tokens, of which nothing is copied.

    Row `r` has the `seq_len` tokens from `r * seq_len` on, each with the next token as its target, so that every token
    but the first is a target once. A target that begins another document has the weight 0.

    Attributes:
      tokens: the tokens of the data set.
      starts: the index in `tokens` of each document's first token: `[num_documents]`.
      offsets: its index in the stream, and the end of the last document: `[num_documents + 1]`.
    """

    tokens: np.ndarray | TokenFile
    starts: np.ndarray
    offsets: np.ndarray

    @property
    def size(self) -> int:
        """Number of tokens."""
        return int(self.offsets[-1])

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.starts)

    def take(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens at positions of the stream, a vector, and the document of the part that each belongs to.

        Raises:
          ValueError: the file of the tokens has changed or was cut.
        """
        documents = np.searchsorted(self.offsets, positions, side="right") - 1
        return self.tokens[positions + (self.starts - self.offsets[:-1])[documents]], documents

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns the tokens of a range of the stream."""
        return self.take(np.arange(start, self.size if stop is None else stop))[0]

    def num_rows(self, *, seq_len: int) -> int:
        """Returns the number of rows; the last one may be shorter."""
        return -(-(self.size - 1) // seq_len)

    def cut_rows(self, rows: np.ndarray, *, seq_len: int) -> dict[str, np.ndarray]:
        """Returns rows by their numbers, as `Part` has it."""
        positions = rows[:, None].astype(np.int64) * seq_len + np.arange(seq_len + 1)
        exists = (rows[:, None] != NO_ROW) & (positions < self.size)
        tokens, documents = np.zeros(exists.shape, np.int32), np.full(exists.shape, -1)
        tokens[exists], documents[exists] = self.take(positions[exists])
        documents = np.where(exists, documents, documents.max(axis=1, keepdims=True) + 1)
        same_document = exists[:, 1:] & (documents[:, 1:] == documents[:, :-1])
        return {
            "inputs": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "weights": same_document.astype(np.float32),
            "segments": (documents[:, :-1] - documents[:, :1]).astype(np.int32),
        }


def split_documents(tokens: Tokens, *, validation_fraction: float) -> tuple[TokenPart, TokenPart]:
    """Splits documents: those with the lowest hashes are for validation, as many as fit into its share of the tokens.

    The hash is of the content: the split does not depend on names, order or machine, and a document that occurs twice
    is in one part. Where no document fits, as with a single one, validation gets the end of the longest.

    Returns:
      The documents to train on, and those to validate on.
    """
    lengths = np.diff(tokens.offsets)
    room = int(validation_fraction * int(tokens.offsets[-1]))
    is_validation = lowest_that_fit(tokens.hashes, lengths, room)
    starts = np.asarray(tokens.offsets[:-1])
    if is_validation.any():
        return _part(tokens, starts[~is_validation], lengths[~is_validation]), _part(
            tokens, starts[is_validation], lengths[is_validation]
        )
    longest = np.flatnonzero(lengths == lengths.max())
    cut = longest[np.argmin(tokens.hashes[longest])]
    room = min(room, int(lengths[cut]) - 1)
    lengths[cut] -= room
    end = np.array([starts[cut] + lengths[cut]])
    return _part(tokens, starts, lengths), _part(tokens, end[:room], np.array([room])[:room])


def _part(tokens: Tokens, starts: np.ndarray, lengths: np.ndarray) -> TokenPart:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return TokenPart(tokens=tokens.tokens, starts=starts, offsets=offsets)


def lowest_that_fit(hashes: np.ndarray, lengths: np.ndarray, room: int) -> np.ndarray:
    """Selects documents by their hashes, the lowest first, each that still fits; those with equal hashes go together.

    Returns:
      A mask of the documents.
    """
    _, group = np.unique(hashes, return_inverse=True)
    sizes = np.bincount(group, weights=lengths).astype(np.int64)
    selected = np.zeros(len(sizes), bool)
    remaining = np.arange(len(sizes))
    while True:
        remaining = remaining[sizes[remaining] <= room]
        if not remaining.size:
            return selected[group]
        totals = np.cumsum(sizes[remaining])
        num_fitting = int(np.searchsorted(totals, room, side="right"))
        selected[remaining[:num_fitting]] = True
        room -= int(totals[num_fitting - 1])
        remaining = remaining[num_fitting:]
