"""Values of a jaxpr that depend on no input, such as masks: arrays by what they depend on, computed when asked for.

What is the same along a dim has no axis for it, and what depends on the difference of two indices alone (a causal mask,
a window) has one axis for both: masks of long sequences are as small as these are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.dims import COPIES, PLACES, known_primitives
from zero_jax.program import jaxprs
from zero_jax.transforms.attention.dims import (
    Index,
    Indices,
    Names,
    after,
    all_leaves,
    common,
    leaves,
    new_indices,
    paired,
)

# Larger arrays are not computed while tracing.
MAX_ELEMENTS = 2**26


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """An array of which nothing is known."""

    shape: tuple[int, ...]
    dtype: Any


class Diagonal(NamedTuple):
    """The difference of two indices, from `1 - second.size` to `first.size - 1`."""

    first: Index
    second: Index


class Same(NamedTuple):
    """Whether an array has the same integer at two places, each an index for each of its dims that is not 1."""

    leaf: Leaf
    first: tuple[Index, ...]
    second: tuple[Index, ...]


Axis = Index | Diagonal | Same


def _size(axis: Axis) -> int:
    if isinstance(axis, Diagonal):
        return axis.first.size + axis.second.size - 1
    return axis.size if isinstance(axis, Index) else 2


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """An array by what it depends on."""

    indices: Indices  # the indices of its dims
    axes: tuple[Axis, ...]  # what its values depend on
    # Computes the values, with a dim for each of the axes; None if they are too many
    make: Callable[[], np.ndarray | None]

    @classmethod
    def known(cls, value: Any) -> Table:
        """Returns the table of an array that is at hand."""
        indices = new_indices(np.shape(value))
        return cls(indices, all_leaves(indices), functools.cache(lambda: np.asarray(value).squeeze()))

    @property
    def array(self) -> np.ndarray | None:
        """The values, with a dim for each of the axes; None if they are too many."""
        return self.make()

    @property
    def number(self) -> Any:
        """The number that all values are; None if they differ."""
        array = self.array
        if array is None or not array.size or (array != array.flat[0]).any():
            return None
        return array.flat[0]

    def change(
        self, change: Callable[[np.ndarray], np.ndarray], axes: Sequence[Axis], indices: Indices | None = None
    ) -> Table:
        """Returns a table of what a function makes of the values, with other axes."""
        make = functools.cache(lambda: None if self.array is None else change(self.array))
        return Table(self.indices if indices is None else indices, tuple(axes), make)

    def renamed(self, indices: Indices, names: Names) -> Table:
        """Returns the same values by other indices: an axis for each part of those that were split."""
        order = {index: i for i, index in enumerate(all_leaves(indices))}
        axes, expanded, flipped = list[Axis](), list[Diagonal](), list[int]()
        for axis in self.axes:
            if isinstance(axis, Same):
                places = [tuple(names[index] for index in leaves(place)) for place in axis[1:]]
                axes.append(Same(axis.leaf, *sorted(places, key=lambda place: [order[index] for index in place])))
            elif isinstance(axis, Index) or any(index.parts for index in axis):
                axes.extend(names[index] for index in leaves([axis] if isinstance(axis, Index) else axis))
                expanded.extend([] if isinstance(axis, Index) else [axis])
            else:
                first, second = (names[index] for index in axis)
                is_flipped = order[first] > order[second]
                flipped.extend([len(axes)] if is_flipped else [])
                axes.append(Diagonal(second, first) if is_flipped else Diagonal(first, second))

        def change(array: np.ndarray) -> np.ndarray:
            array, _ = _expanded(array, self.axes, expanded)
            return np.flip(array.reshape([*map(_size, axes)]), tuple(flipped))

        return self.change(change, axes, indices)

    def split(self) -> Table:
        """Returns the same values with an axis for each part of indices that were split."""
        return self.renamed(self.indices, {index: index for index in all_leaves(self.indices)})

    def along(self, axes: Sequence[Axis]) -> np.ndarray | None:
        """Returns the values with a dim for each of these axes, of size 1 where they do not depend on it."""
        if self.array is None:
            return None
        array, own = _expanded(self.array, self.axes, [axis for axis in self.axes if axis not in axes])
        array = array.transpose([own.index(axis) for axis in axes if axis in own])
        return array.reshape([_size(axis) if axis in own else 1 for axis in axes])


def _expanded(array: np.ndarray, axes: Sequence[Axis], diagonals: Sequence[Any]) -> tuple[np.ndarray, list[Axis]]:
    """Returns values and their axes with both indices in place of some diagonals."""
    found = list(axes)
    for first, second in diagonals:
        at = found.index(Diagonal(first, second))
        # The element of a difference of 0 is at `second.size - 1`.
        array = array.take(np.arange(first.size)[:, None] - np.arange(second.size) + second.size - 1, axis=at)
        found[at : at + 1] = first, second
    return array, found


def operation(eqn: Any, operands: Sequence[Table]) -> Table | None:
    """Returns the result of an equation on tables; None if it cannot be said."""
    name, aval = eqn.primitive.name, eqn.outvars[0].aval
    if name == "iota":
        indices = new_indices(aval.shape)
        axes = indices[dim := eqn.params["dimension"]]
        return Table(indices, axes, lambda: np.arange(aval.shape[dim], dtype=aval.dtype).squeeze())
    if not operands:
        return None
    indices = moved(eqn, operands[0].indices) if len(operands) == 1 else None
    if indices is not None and not _merges(operands[0], indices):
        return dataclasses.replace(operands[0], indices=indices)
    rule = _elementwise if name in _NUMPY else _sliced if name in ("slice", "dynamic_slice") else None
    result = rule and rule(eqn, operands)
    return _evaluated(eqn, operands) if result is None else result


def moved(eqn: Any, indices: Indices) -> Indices | None:
    """Returns the indices of the result of an equation that leaves the elements of its operand as they are."""
    return indices if eqn.primitive.name in COPIES | PLACES else after(eqn, indices)


def _merges(x: Table, indices: Indices) -> bool:
    """Tells whether a dim of these indices has several parts, and the values depend on all of them."""
    axes = {*x.split().axes} if any(len(leaves(dim)) > 1 for dim in indices) else set()
    return any(len(leaves(dim)) > 1 and axes.issuperset(leaves(dim)) for dim in indices)


def _elementwise(eqn: Any, operands: Sequence[Table]) -> Table | None:
    shared = common([x.indices for x in operands])
    if shared is None:
        return None
    indices, names = shared
    tables = [x.renamed(indices, own) for x, own in zip(operands, names, strict=True)]
    if len(tables) == 2 and (found := _of_difference(eqn, *tables)) is not None:
        return found
    axes = dict.fromkeys(axis for x in tables for axis in x.axes)
    while mixed := next((axis for axis in axes if isinstance(axis, Diagonal) and not axes.keys().isdisjoint(axis)), ()):
        del axes[mixed]
        axes |= dict.fromkeys(mixed)

    def make() -> np.ndarray | None:
        fits = math.prod(map(_size, axes)) <= MAX_ELEMENTS
        arrays = [x.along([*axes]) if fits else None for x in tables]
        return None if any(array is None for array in arrays) else _by_numpy(eqn, arrays)

    return Table(indices, tuple(axes), functools.cache(make))


def _of_difference(eqn: Any, x: Table, y: Table) -> Table | None:
    """Returns the sum, difference or comparison of two ranges, each along its own index, by the difference of these."""
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    is_sum = name in ("add", "sub") and np.issubdtype(dtype, np.integer)
    if not (is_sum or name in _COMPARISONS) or x.axes == y.axes or None in (lines := (_range(x), _range(y))):
        return None
    (start, step), (other, other_step) = lines  # pyright: ignore[reportGeneralTypeIssues]
    sign = 1 if name == "add" else -1
    if step + sign * other_step:  # then it is `(start + sign * other) + step * (first - second)`
        return None
    axes, order = [*x.axes, *y.axes], all_leaves(x.indices)
    if order.index(axes[0]) > order.index(axes[1]):  # pyright: ignore[reportArgumentType]
        axes, step = axes[::-1], -step
    axis = Diagonal(*axes)  # pyright: ignore[reportArgumentType]
    exact = start + sign * other + step * np.arange(1 - axis.second.size, axis.first.size)
    return Table(x.indices, (axis,), lambda: exact.astype(dtype) if is_sum else _NUMPY[name](exact, 0))


def _range(x: Table) -> tuple[int, int] | None:
    """Returns the start and the step of a range along an index; None for anything else."""
    if len(x.axes) != 1 or not isinstance(x.axes[0], Index) or (array := x.array) is None:
        return None
    if array.size < 2 or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        return None
    start, step = int(array[0]), int(array[1]) - int(array[0])
    return (start, step) if step and (array == start + step * np.arange(array.size)).all() else None


def _sliced(eqn: Any, operands: Sequence[Table]) -> Table | None:
    """Returns a part of an array; None if it is not one of the same axes."""
    (x, *begins), old, new = operands, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if eqn.primitive.name == "slice":
        starts = eqn.params["start_indices"]
        if any(stride != 1 for stride in eqn.params["strides"] or ()):
            return None
    else:
        numbers = [begin.number for begin in begins]
        if None in numbers:
            return None
        starts = [min(max(int(i), 0), n - m) for i, n, m in zip(numbers, old, new, strict=True)]
    names, cut, dims = {index: index for index in all_leaves(x.indices)}, dict[Index, int](), list[tuple[Index, ...]]()
    x = x.split()
    for dim, size, start, is_cut in zip(x.indices, new, starts, map(int.__ne__, old, new), strict=True):
        if is_cut and (size < 2 or len(leaves(dim)) != 1):
            return None
        if is_cut:
            names[leaves(dim)[0]], cut[leaves(dim)[0]] = Index(size), start
        dims.append(tuple(names[index] for index in leaves(dim)))
    axes, parts = list[Axis](), list[slice]()
    for axis in x.axes:
        if isinstance(axis, Same):
            made, first = axis, 0
            if not cut.keys().isdisjoint(axis.first + axis.second):
                return None
        elif isinstance(axis, Index):
            made, first = names[axis], cut.get(axis, 0)
        else:
            made = Diagonal(names[axis.first], names[axis.second])
            first = axis.second.size - made.second.size + cut.get(axis.first, 0) - cut.get(axis.second, 0)
        axes.append(made)
        parts.append(slice(first, first + _size(made)))
    return x.change(lambda array: array[tuple(parts)], axes, tuple(dims))


def _evaluated(eqn: Any, operands: Sequence[Table]) -> Table | None:
    """Returns the result of an equation by JAX, of all elements."""
    indices = new_indices(eqn.outvars[0].aval.shape)
    every = [(x.split(), all_leaves(x.indices)) for x in operands]  # now: they may be split before `make` is called
    is_known = eqn.primitive.name in known_primitives()
    is_sharded = any(isinstance(value, jax.sharding.Sharding) for value in eqn.params.values())
    if not is_known or is_sharded or any(isinstance(axis, Same) for x in operands for axis in x.axes):
        return None

    def make() -> np.ndarray | None:
        arrays: list[Any] = []
        is_small = all(math.prod(atom.aval.shape) <= MAX_ELEMENTS for atom in (*eqn.invars, *eqn.outvars))
        for (x, axes), atom in zip(every, eqn.invars, strict=True):
            array = x.along(axes) if is_small else None
            if array is None:
                return None
            arrays.append(np.broadcast_to(array, [*map(_size, axes)]).reshape(atom.aval.shape))
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            return np.asarray(jaxprs.bind(eqn, [jnp.asarray(array) for array in arrays])[0]).squeeze()

    return Table(indices, all_leaves(indices), functools.cache(make))


def _by_numpy(eqn: Any, arrays: Sequence[Any]) -> np.ndarray:
    rule, params = _NUMPY[eqn.primitive.name], eqn.params
    own = {name: params[name] for name in ("y", "new_dtype") if name in params}
    with np.errstate(all="ignore"):
        return np.asarray(rule(*arrays, **own)).astype(eqn.outvars[0].aval.dtype)


# Compiling an operation takes JAX 30 ms, and all the elementwise ones of a mask a second.
_COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_NUMPY: dict[str, Callable[..., Any]] = _COMPARISONS | {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "neg": np.negative,
    "abs": np.abs, "sign": np.sign, "not": np.invert, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "rem": np.fmod, "square": np.square, "sqrt": np.sqrt, "exp": np.exp, "log": np.log, "is_finite": np.isfinite,
    "floor": np.floor, "ceil": np.ceil, "tanh": np.tanh,
    "div": lambda x, y: np.trunc(x / y) if np.issubdtype(x.dtype, np.integer) else x / y,
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "integer_pow": lambda x, y: x**y if y >= 0 else 1 / x**-y,
    "convert_element_type": lambda x, new_dtype: x.astype(new_dtype),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """An array with the elements of a leaf: `axes` are the indices of the leaf's dims that are not 1."""

    leaf: Leaf
    indices: Indices
    axes: tuple[Index, ...]

    @classmethod
    def whole(cls, leaf: Leaf) -> View:
        """Returns the view that is the leaf."""
        indices = new_indices(leaf.shape)
        return cls(leaf, indices, all_leaves(indices))

    def moved(self, eqn: Any) -> View | None:
        """Returns the result of an equation if it has the same elements, if need be in a wider dtype."""
        if eqn.primitive.name == "convert_element_type":
            old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
            are_integers = all(jnp.issubdtype(dtype, jnp.signedinteger) for dtype in (old, new))
            return self if are_integers and new.itemsize >= old.itemsize else None
        indices = moved(eqn, self.indices)
        return None if indices is None else dataclasses.replace(self, indices=indices)


def compared(eqn: Any, operands: Sequence[Any]) -> Table | None:
    """Returns the comparison of an array of integers with itself at other places; None for anything else."""
    if eqn.primitive.name not in ("eq", "ne") or not all(isinstance(x, View) for x in operands):
        return None
    x, y = operands
    if x.leaf is not y.leaf or not jnp.issubdtype(x.leaf.dtype, jnp.integer):
        return None
    shared = common([x.indices, y.indices])
    if shared is None:
        return None
    indices, names = shared
    places = [tuple(own.get(i) for i in leaves(z.axes)) for z, own in zip((x, y), names, strict=True)]
    if places[0] == places[1] or None in places[0] + places[1]:
        return None
    same = Same(x.leaf, *places)  # pyright: ignore[reportArgumentType]
    return Table(indices, (same,), lambda: np.array([False, True]) ^ (eqn.primitive.name == "ne"))


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
    """Returns the conditions that hold together where a mask of an array of such indices is True; None if unknown."""
    names = dict(paired(visible.indices, indices) or ())
    if not names.keys() >= {*all_leaves(visible.indices)}:
        return None
    mask = visible.renamed(indices, names)
    terms, axes, array = set[Term](), list(mask.axes), mask.array
    if array is None:
        return None
    for axis in [axis for axis in axes if isinstance(axis, Same)]:
        differ, equal = np.moveaxis(array, axes.index(axis), 0)
        if differ.any():  # it may hold where the integers are not the same: no mask of segments
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
        # The same along each diagonal: its first row, from the last column on, and its first column have all of these.
        axes, mask = [Diagonal(*axes)], np.concatenate([mask[0, ::-1], mask[1:, 0]])
    if len(axes) != 1 or not isinstance(axes[0], Diagonal) or not mask.any():
        return None
    (first, second), places = axes[0], np.flatnonzero(mask)
    low, high = int(places[0]), int(places[-1])
    has_no_gaps = len(places) == high - low + 1
    return BandTerm(first, second, low + 1 - second.size, high + 1 - second.size) if has_no_gaps else None
