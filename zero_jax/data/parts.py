"""Data sets and their parts, for training and validation: the rows of each, and which documents are in which."""

import dataclasses
import hashlib
from typing import NamedTuple, Protocol

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
      hashes: a hash of each document, uint64 `[num_documents]`; none of a stream.
    """

    name: str
    tokenizer: Tokenizer
    num_documents: int
    train: Part
    validation: Part
    fingerprint: str
    notes: tuple[str, ...] = ()
    hashes: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.uint64), repr=False)

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
    """

    tokens: np.ndarray | TokenFile  # the tokens of the data set
    starts: np.ndarray  # the index in `tokens` of each document's first token: `[num_documents]`
    offsets: np.ndarray  # its index in the stream, and the end of the last document: `[num_documents + 1]`

    @property
    def size(self) -> int:
        """Number of tokens."""
        return int(self.offsets[-1])

    def num_rows(self, *, seq_len: int) -> int:
        """Returns the number of rows; the last one may be shorter."""
        return -(-(self.size - 1) // seq_len)

    def check_size(self, name: str, what: str, seq_len: int, *, fraction: float) -> None:
        """Raises `ValueError` for less than one row; `fraction` is that of the tokens to validate on."""
        if self.size < seq_len + 1:
            remedy = "more text, a shorter --seq-len, or another --validation-fraction"
            raise ValueError(
                f"{name} has {self.size:,} tokens for {what}, but one sequence takes seq_len + 1 = {seq_len + 1:,}: "
                f"give {remedy if 0 < fraction < 1 else 'more text, or a shorter --seq-len'}"
            )

    def cut_rows(self, rows: np.ndarray, *, seq_len: int) -> dict[str, np.ndarray]:
        """Returns rows by their numbers, as `Part` has it."""
        # `NO_ROW` begins at the end, so that it has no tokens.
        first = np.where(rows == NO_ROW, self.size, rows.astype(np.int64) * seq_len).clip(max=self.size)
        last = (first + seq_len + 1).clip(max=self.size)
        pieces = self._pieces(first, last)
        lengths, row = pieces.stop - pieces.start, pieces.row
        tokens = np.zeros((len(rows), seq_len + 1), np.int32)
        segments = np.zeros((len(rows), seq_len + 1), np.int32)
        weights = np.ones((len(rows), seq_len), np.float32)
        numbers = pieces.document - pieces.document[np.searchsorted(row, row)]  # from 0 in each row
        columns = pieces.start - first[row]
        # The target before a document's first token is that token, which the document before does not predict.
        weights[row[columns > 0], columns[columns > 0] - 1] = 0
        exists = np.arange(seq_len + 1) < (last - first)[:, None]
        if exists.all():
            tokens[:] = self._read(pieces).reshape(tokens.shape)
            segments[:] = np.repeat(numbers, lengths).reshape(tokens.shape)
        else:
            tokens[exists] = self._read(pieces)
            beyond = np.zeros(len(rows), np.int64)  # what is beyond the end is in a document of its own
            # `at`, because several pieces are of one row, of which an assignment would take one.
            np.maximum.at(beyond, row, numbers + 1)
            segments[:] = beyond[:, None]
            segments[exists] = np.repeat(numbers, lengths)
            weights[~exists[:, 1:]] = 0
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights, "segments": segments[:, :-1]}

    def _pieces(self, first: np.ndarray, last: np.ndarray) -> "_Pieces":
        """Cuts ranges of the stream, from `first` to before `last`, into the pieces of documents."""
        documents = np.searchsorted(self.offsets, (first, last - 1), side="right") - 1
        counts = np.where(last > first, documents[1] - documents[0] + 1, 0)
        row = np.repeat(np.arange(len(first)), counts)
        document = np.arange(len(row)) + (documents[0] - np.cumsum(counts) + counts)[row]
        start = np.maximum(self.offsets[document], first[row])
        stop = np.minimum(self.offsets[document + 1], last[row])
        has_any = start < stop  # a document may be empty
        return _Pieces(*(x[has_any] for x in (row, document, start, stop)))

    def _read(self, pieces: "_Pieces") -> np.ndarray:
        """Returns the tokens of pieces, one after the other; what is contiguous is read at once."""
        shift = self.starts[pieces.document] - self.offsets[pieces.document]
        start, stop = pieces.start + shift, pieces.stop + shift
        is_new = np.append(True, start[1:] != stop[:-1])[: len(start)]
        runs = zip(start[is_new].tolist(), stop[np.roll(is_new, -1)].tolist(), strict=True)
        if isinstance(self.tokens, TokenFile):
            return self.tokens.read(list(runs))
        return np.concatenate([self.tokens[:0], *(self.tokens[a:b] for a, b in runs)])


class _Pieces(NamedTuple):
    """Pieces of documents in rows: the row of each, the document of the part, and where it is in the stream."""

    row: np.ndarray
    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def split_documents(tokens: Tokens, *, validation_fraction: float) -> tuple[TokenPart, TokenPart]:
    """Splits documents: those with the lowest hashes are for validation, as many as fit into its share of the tokens.

    The hash is of the content: the split does not depend on names, order or machine, and a document that occurs twice
    is in one part. Where no document fits, as with a single one, validation gets the end of the longest.
    """
    lengths = np.diff(tokens.offsets)
    room = int(validation_fraction * int(tokens.offsets[-1]))
    is_validation = lowest_that_fit(tokens.hashes, lengths, room)
    starts = np.asarray(tokens.offsets[:-1])
    if is_validation.any():
        train, validation = (_part(tokens, starts[x], lengths[x]) for x in (~is_validation, is_validation))
        return train, validation
    longest = np.flatnonzero(lengths == lengths.max())
    # Of several as long the one of the lowest hash, whatever their order.
    cut = longest[np.argmin(tokens.hashes[longest])]
    room = min(room, int(lengths[cut]) - 1)
    lengths[cut] -= room
    end = np.array([starts[cut] + lengths[cut]])
    return _part(tokens, starts, lengths), _part(tokens, end[:room], np.array([room])[:room])


def _part(tokens: Tokens, starts: np.ndarray, lengths: np.ndarray) -> TokenPart:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return TokenPart(tokens=tokens.tokens, starts=starts, offsets=offsets)


def lowest_that_fit(hashes: np.ndarray, lengths: np.ndarray, room: int) -> np.ndarray:
    """Returns a mask of the documents with the lowest hashes, each that still fits; equal hashes go together."""
    _, group = np.unique(hashes, return_inverse=True)
    sizes = np.bincount(group, weights=lengths).astype(np.int64)
    selected = np.zeros(len(sizes), bool)
    remaining = np.arange(len(sizes))
    while True:
        remaining = remaining[sizes[remaining] <= room]
        if not remaining.size:
            return selected[group]
        totals = np.cumsum(sizes[remaining])
        # The first one fits by itself, so that each round selects one at least, and the loop ends.
        num_fitting = int(np.searchsorted(totals, room, side="right"))
        selected[remaining[:num_fitting]] = True
        room -= int(totals[num_fitting - 1])
        remaining = remaining[num_fitting:]


def hash_of(content: bytes) -> int:
    """Returns the hash of a document's content, of 64 bits, by which it is for training or for validation."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
