"""The train/validation split: which documents are for validation, and both parts as streams of tokens."""

import dataclasses

import numpy as np

from zero_jax.data.tokens.store import TokenFile, Tokens


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenPart:
    """The documents of a training or validation part as one stream of tokens; nothing is copied.

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
