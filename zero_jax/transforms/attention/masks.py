"""Masks: values that are one of two numbers, by conditions on the indices of an array."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from zero_jax.transforms.attention.dims import Index, Indices, leaves, new_indices, renamed
from zero_jax.transforms.attention.static import MAX_ELEMENTS, Known, without_broadcasts

Names = Mapping[Index, Index]


@dataclasses.dataclass(frozen=True)
class BandTerm:
    """`low <= first - second <= high`; None does not bound."""

    first: Index
    second: Index
    low: int | None
    high: int | None

    def renamed(self, names: Names) -> BandTerm | None:
        """Returns the same condition on other indices; None if one of them has no other name."""
        first, second = renamed([self.first], names), renamed([self.second], names)
        if first is None or second is None or len(first) != 1 or len(second) != 1:
            return None
        return BandTerm(first[0], second[0], self.low, self.high)

    def complement(self) -> BandTerm | None:
        """Returns the opposite condition, if it is a band."""
        if self.high is None and self.low is not None:
            return BandTerm(self.first, self.second, None, self.low - 1)
        if self.low is None and self.high is not None:
            return BandTerm(self.first, self.second, self.high + 1, None)
        return None


@dataclasses.dataclass(frozen=True)
class Same:
    """An array of integers has the same value at two places, each an index for each of its dims that is not 1."""

    leaf: Leaf
    first: tuple[Index, ...]
    second: tuple[Index, ...]

    def renamed(self, names: Names) -> Same | None:
        """Returns the same condition on other indices; None if one of them has no other name."""
        first, second = renamed(self.first, names), renamed(self.second, names)
        return None if first is None or second is None else Same(self.leaf, first, second)

    def complement(self) -> None:
        """Returns None: no condition says that two values differ."""
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class Pattern:
    """Any other condition, `bool[...]` by indices."""

    array: np.ndarray
    indices: tuple[Index, ...]

    def renamed(self, names: Names) -> Pattern | None:
        """Returns the same condition on other indices; None if one of them has no other name."""
        indices = renamed(self.indices, names)
        return None if indices is None or len(indices) != len(self.indices) else Pattern(self.array, indices)

    def complement(self) -> Pattern:
        """Returns the opposite condition."""
        return Pattern(~self.array, self.indices)


Term = BandTerm | Same | Pattern


@dataclasses.dataclass(eq=False)
class Leaf:
    """A value that nothing is known of; `array` is there when it is evaluated."""

    shape: tuple[int, ...]
    dtype: Any
    array: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """An array with the elements of a leaf: `axes` are the indices of its dims that are not 1, broken up by dim."""

    leaf: Leaf
    indices: Indices
    axes: Indices

    @classmethod
    def whole(cls, leaf: Leaf) -> View:
        """Returns the view that is the leaf."""
        indices = new_indices(leaf.shape)
        return cls(leaf, indices, indices)


@dataclasses.dataclass(frozen=True, eq=False)
class Affine:
    """Integers that are a linear function of the indices: `offset + sum(factor * index)`."""

    indices: Indices
    factors: Mapping[Index, int]
    offset: int
    shape: tuple[int, ...]

    @property
    def on_leaves(self) -> dict[Index, int]:
        """The factors that are not 0, of indices as they are after all splits."""
        found: dict[Index, int] = {}
        for index, factor in self.factors.items():
            for leaf in reversed(leaves([index])):
                found[leaf], factor = factor, factor * leaf.size
        return {index: factor for index, factor in found.items() if factor}

    def known(self) -> Known:
        """Returns the values."""
        return Known(self.shape, self._array)

    def _array(self) -> np.ndarray | None:
        total, factors = np.asarray(self.offset), self.on_leaves
        for i, dim in enumerate(self.indices):
            line = np.zeros((), np.int64)
            for index in leaves(dim):
                line = (line[..., None] + factors.get(index, 0) * np.arange(index.size)).reshape(-1)
            if line.any():
                total = total + line.reshape(-1, *(1,) * (len(self.shape) - 1 - i))
                if total.size > MAX_ELEMENTS:
                    return None
        return np.broadcast_to(total, self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Masked:
    """An array that is `on` where all of the terms hold, and `off` elsewhere."""

    indices: Indices
    terms: frozenset[Term]
    on: Any
    off: Any
    shape: tuple[int, ...]

    def renamed(self, names: Names) -> frozenset[Term] | None:
        """Returns the terms on other indices; None if one of them has no other name."""
        terms = [term.renamed(names) for term in self.terms]
        return None if None in terms else frozenset(terms)  # pyright: ignore[reportReturnType]

    def flipped(self) -> Masked | None:
        """Returns the same array with `on` and `off` exchanged, if that can be said."""
        if len(self.terms) != 1:
            return None
        opposite = next(iter(self.terms)).complement()
        return opposite and dataclasses.replace(self, terms=frozenset([opposite]), on=self.off, off=self.on)

    def known(self) -> Known:
        """Returns the values."""
        return Known(self.shape, self._array)

    def _array(self) -> np.ndarray | None:
        place = {leaves(dim)[0]: i for i, dim in enumerate(self.indices) if len(leaves(dim)) == 1}
        mask = np.ones((1,) * len(self.shape), bool)
        for term in self.terms:
            if isinstance(term, Same):
                return None
            indices = term.indices if isinstance(term, Pattern) else (term.first, term.second)
            if any(index not in place for index in indices):
                return None
            if isinstance(term, BandTerm):
                difference = np.arange(term.first.size)[:, None] - np.arange(term.second.size)
                low, high = (
                    (-math.inf if term.low is None else term.low),
                    (math.inf if term.high is None else term.high),
                )
                array = (difference >= low) & (difference <= high)
            else:
                array = term.array
            order = sorted(range(len(indices)), key=lambda i: place[indices[i]])
            shape = [1] * len(self.shape)
            for index in indices:
                shape[place[index]] = index.size
            mask = mask & array.transpose(order).reshape(shape)
        return np.broadcast_to(np.where(mask, self.on, self.off), self.shape)


Static = Known | Affine | Masked


def as_known(value: Static) -> Known:
    """Returns values one by one."""
    return value if isinstance(value, Known) else value.known()


def as_masked(value: Static, *, below: float | None = None) -> Masked | None:
    """Returns an array of two different numbers as a choice, `on` being the larger one; None for any other.

    Args:
      value: the array.
      below: if not None, several numbers that are all less than it count as the largest of them.
    """
    if not isinstance(value, Known):
        return value if isinstance(value, Masked) else None
    if value.array is None or not value.array.size:
        return None
    array = without_broadcasts(value.array)
    on = array.max()
    is_on = array == on
    rest = array[~is_on]
    if not rest.size or (rest.min() != rest.max() and not (below is not None and rest.max() < below)):
        return None
    indices = tuple(
        tuple(Index(index.size, broadcast=array.shape[i] == 1) for index in dim)
        for i, dim in enumerate(new_indices(value.shape))
    )
    varying = tuple(indices[i][0] for i, size in enumerate(array.shape) if size > 1)
    is_on = is_on.squeeze()
    band = band_of(is_on) if len(varying) == 2 else None
    term = Pattern(is_on, varying) if band is None else BandTerm(varying[0], varying[1], *band)
    return Masked(indices, frozenset([term]), on, rest.max(), value.shape)


def band_of(mask: np.ndarray) -> tuple[int | None, int | None] | None:
    """Returns the bounds of `row - column` that a mask `[rows, columns]` stands for; None if it is no band."""
    num_rows, num_columns = mask.shape
    is_any = mask.any(1)
    if not is_any.any():
        return None
    rows = np.arange(num_rows)
    first = mask.argmax(1)
    last = num_columns - 1 - mask[:, ::-1].argmax(1)
    low, high = int((rows - last)[is_any].min()), int((rows - first)[is_any].max())
    starts, ends = np.maximum(0, rows - high), np.minimum(num_columns - 1, rows - low)
    expected = np.maximum(ends - starts + 1, 0)
    is_band = (mask.sum(1) == expected).all() and ((first == starts) & (last == ends) | ~is_any).all()
    if not is_band:
        return None
    return (None if low <= 1 - num_columns else low), (None if high >= num_rows - 1 else high)
