"""The conditions under which a logit counts, as the indices of queries and keys that they are about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from zero_jax.transforms.attention.dims import Index, Indices, all_leaves, paired
from zero_jax.transforms.attention.tables import Diagonal, Same, Table


class BandTerm(NamedTuple):
    """`low <= first - second <= high`."""

    first: Index
    second: Index
    low: int
    high: int


class Pattern:
    """Any other condition on indices."""


Term = BandTerm | Same | Pattern


def conditions(visible: Table, indices: Indices) -> frozenset[Term] | None:
    """Returns the conditions that hold together where a mask is True.

    Args:
      visible: the mask.
      indices: the indices of the array that it is applied to.

    Returns:
      The conditions; None if they are not known to be such.
    """
    names = dict(paired(visible.indices, indices) or ())
    if not names.keys() >= {*all_leaves(visible.indices)}:
        return None
    mask = visible.renamed(indices, names)
    terms, axes, array = set[Term](), list(mask.axes), mask.array
    if array is None:
        return None
    for axis in [axis for axis in axes if isinstance(axis, Same)]:
        differ, equal = np.moveaxis(array, axes.index(axis), 0)
        if differ.any():
            return None
        terms.add(axis)
        axes.remove(axis)
        array = equal
    if not array.all():
        terms.add(_band(array, axes) or Pattern())
    return frozenset(terms)


def _band(mask: np.ndarray, axes: Sequence[Any]) -> BandTerm | None:
    """Returns what a mask stands for if it is a band of two indices."""
    if len(axes) == 2 and all(isinstance(axis, Index) for axis in axes) and (mask[1:, 1:] == mask[:-1, :-1]).all():
        axes, mask = [Diagonal(*axes)], np.concatenate([mask[0, ::-1], mask[1:, 0]])
    if len(axes) != 1 or not isinstance(axes[0], Diagonal) or not mask.any():
        return None
    (first, second), places = axes[0], np.flatnonzero(mask)
    low, high = int(places[0]), int(places[-1])
    is_whole = len(places) == high - low + 1
    return BandTerm(first, second, low + 1 - second.size, high + 1 - second.size) if is_whole else None
