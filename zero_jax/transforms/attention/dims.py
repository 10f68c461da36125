"""Dims of traced values that are followed through transposes, reshapes and broadcasts."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class Index:
    """An index of an array: a dim, or one of the factors of a dim that a reshape merged or split.

    It takes `size` values; with `broadcast` the array is the same for all of them.
    """

    def __init__(self, size: int, *, broadcast: bool = False):
        self.size, self.broadcast = size, broadcast
        self.parts: tuple[Index, Index] | None = None  # that a reshape split it into, major first

    def split(self, size: int) -> tuple[Index, Index]:
        """Splits it into a major index of `size` values and a minor one."""
        assert self.parts is None and self.size % size == 0
        self.parts = (Index(size, broadcast=self.broadcast), Index(self.size // size, broadcast=self.broadcast))
        return self.parts


# For each dim of an array the indices that it is made of, major first; none for a dim of size 1.
Indices = tuple[tuple[Index, ...], ...]


def new_indices(shape: Sequence[int], *, broadcast: bool = False) -> Indices:
    """Returns an index for each dim of a shape."""
    return tuple((Index(size, broadcast=broadcast),) if size != 1 else () for size in shape)


def leaves(indices: Iterable[Index]) -> tuple[Index, ...]:
    """Returns indices with those that were split replaced by their parts."""
    found: list[Index] = []
    for index in indices:
        found.extend(leaves(index.parts) if index.parts else (index,))
    return tuple(found)


def all_leaves(indices: Indices) -> tuple[Index, ...]:
    """Returns the indices of all dims in order."""
    return leaves(index for dim in indices for index in dim)


def regroup(indices: Iterable[Index], shape: Sequence[int]) -> Indices | None:
    """Groups indices into the dims of a shape and splits them where needed; None if they do not fit."""
    if 0 in shape:
        return None
    pending = collections.deque(leaves(indices))
    dims: list[tuple[Index, ...]] = []
    for size in shape:
        dim: list[Index] = []
        while size > 1:
            if not pending:
                return None
            index = pending.popleft()
            if size % index.size and index.size % size == 0:  # its major part is the rest of this dim
                index, rest = index.split(size)
                pending.appendleft(rest)
            elif size % index.size:
                return None
            dim.append(index)
            size //= index.size
        dims.append(tuple(dim))
    return None if pending else tuple(dims)


def after(eqn: Any, indices: Indices) -> Indices | None:
    """Returns the indices of the result of a transpose, reshape, broadcast or squeeze; None for anything else."""
    params, shape = eqn.params, eqn.outvars[0].aval.shape
    match eqn.primitive.name:
        case "transpose":
            return tuple(indices[i] for i in params["permutation"])
        case "squeeze" | "expand_dims":
            return regroup(all_leaves(indices), shape)
        case "reshape" if params.get("dimensions") is None:
            return regroup(all_leaves(indices), shape)
        case "broadcast_in_dim":
            made = list(new_indices(shape, broadcast=True))
            for i, dim in zip(params["broadcast_dimensions"], indices, strict=True):
                made[i] = dim if dim else made[i]
            return tuple(made)
        case "slice" if shape == eqn.invars[0].aval.shape:
            return indices
    return None


def paired(first: Sequence[Sequence[Index]], second: Sequence[Sequence[Index]]) -> list[tuple[Index, Index]] | None:
    """Pairs the indices of two arrays, dim by dim; splits them where needed. None if they do not fit.

    A dim of size 1 fits any other, and makes no pair with it.
    """
    pairs: list[tuple[Index, Index]] = []
    for one, other in zip(first, second, strict=True):
        left, right = collections.deque(leaves(one)), collections.deque(leaves(other))
        while left and right:
            a, b = left.pop(), right.pop()  # the minor ones first
            if a.size > b.size and a.size % b.size == 0:
                major, a = a.split(a.size // b.size)
                left.append(major)
            elif b.size > a.size and b.size % a.size == 0:
                major, b = b.split(b.size // a.size)
                right.append(major)
            elif a.size != b.size:
                return None
            pairs.append((a, b))
        if one and other and (left or right):
            return None
    return pairs


def before(eqn: Any, indices: Indices) -> Indices | None:
    """Returns the indices of the operand from those of the result, as `after` does the other way round."""
    own = new_indices(eqn.invars[0].aval.shape)
    result = after(eqn, own)
    pairs = None if result is None else paired(result, indices)
    if pairs is None:
        return None
    names = dict(pairs)
    return tuple(tuple(names[index] for index in leaves(dim)) for dim in own)


Names = Mapping[Index, Index]


def common(arrays: Sequence[Indices]) -> tuple[Indices, Sequence[Names]] | None:
    """Returns new indices for a function of arrays, and for each array their names by its own; None if these differ."""
    names: list[dict[Index, Index]] = [{} for _ in arrays]
    dims: list[tuple[Index, ...]] = []
    rank = max(map(len, arrays))
    for parts in zip(*(indices or ((),) * rank for indices in arrays), strict=True):
        full = [dim for dim in parts if dim]
        # What the last one splits the first one into, the others are split into by the second round.
        if any(paired([full[0]], [other]) is None for other in full[1:] * 2):
            return None
        made = tuple(Index(index.size) for index in leaves(full[0])) if full else ()
        for own, dim in zip(names, parts, strict=True):
            own.update(zip(leaves(dim), made, strict=bool(dim)))
        dims.append(made)
    return tuple(dims), names


def shape_of(indices: Indices) -> tuple[int, ...]:
    """Returns the shape of an array."""
    return tuple(math.prod(index.size for index in dim) for dim in indices)
