"""Tandem repeats in a sequence of numbers, and how alike two sequences are."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

import numpy as np

# Numbers that are rarer than others are left out at as many thresholds.
_MAX_THRESHOLDS = 6


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Repeat:
    """A stretch of a sequence that equals itself at a distance.

    Attributes:
      places: The indices of its numbers in the sequence; those between them are left out.
      period: The distance, counted in `places`; at most half as many as there are.
    """

    places: np.ndarray
    period: int


def tandem_repeats(numbers: np.ndarray) -> Iterator[Repeat]:
    """Yields the longest tandem repeats of each period: of the sequence, and of its numbers that occur often.

    What only some of the turns have is rarer than what all have, so without it they are equal.
    """
    _, kinds, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    often = counts[kinds.reshape(-1)]
    seen: set[int] = set()
    for threshold in [1, *np.unique(counts[counts > 1])[:_MAX_THRESHOLDS]]:
        places = np.flatnonzero(often >= threshold)
        if len(places) in seen:
            continue
        seen.add(len(places))
        row = numbers[places]
        for period in range(1, len(row) // 2 + 1):
            equal = np.concatenate([[False], row[:-period] == row[period:], [False]])
            edges = np.flatnonzero(equal[1:] != equal[:-1])
            for first, last in zip(edges[::2], edges[1::2], strict=True):
                if last - first >= period:
                    yield Repeat(places=places[first : last + period], period=period)


def num_edits(pattern: np.ndarray, text: np.ndarray) -> np.ndarray:
    """Returns how many insertions and deletions make `pattern` of each beginning of `text`, the empty one first."""
    steps = np.arange(len(text) + 1)
    edits = steps
    for number in pattern:
        kept = np.where(text == number, edits[:-1], len(pattern) + len(text))
        edits = np.minimum.accumulate(np.append(edits[0] + 1, np.minimum(edits[1:] + 1, kept)) - steps) + steps
    return edits


def overlap(first: collections.Counter[int], second: collections.Counter[int]) -> float:
    """Returns which share of two counts of numbers both have: 1 if they are the same."""
    return 2 * (first & second).total() / max(first.total() + second.total(), 1)
