"""Masks: values that are one of two numbers, by conditions on the indices of an array."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from zero_jax.transforms.attention.dims import Index, Indices, common, leaves, new_indices, renamed, shape_of
from zero_jax.transforms.attention.static import MAX_ELEMENTS, Known, compute, known, without_broadcasts

Names = Mapping[Index, Index]


@dataclasses.dataclass(frozen=True)
class Band:
    """`low <= first - second <= high`; None does not bound."""

    first: Index
    second: Index
    low: int | None
    high: int | None

    def renamed(self, names: Names) -> Band | None:
        """Returns the same condition on other indices; None if one of them has no other name."""
        first, second = renamed([self.first], names), renamed([self.second], names)
        if first is None or second is None or len(first) != 1 or len(second) != 1:
            return None
        return Band(first[0], second[0], self.low, self.high)

    def complement(self) -> Band | None:
        """Returns the opposite condition, if it is a band."""
        if self.high is None and self.low is not None:
            return Band(self.first, self.second, None, self.low - 1)
        if self.low is None and self.high is not None:
            return Band(self.first, self.second, self.high + 1, None)
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


Term = Band | Same | Pattern


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
class Choice:
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

    def flipped(self) -> Choice | None:
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
            indices = term.indices if isinstance(term, Pattern) else (term.first, term.second)
            if isinstance(term, Same) or any(index not in place for index in indices):
                return None
            if isinstance(term, Band):
                difference = np.arange(term.first.size)[:, None] - np.arange(term.second.size)
                low, high = (-math.inf if term.low is None else term.low), (math.inf if term.high is None else term.high)
                array = (difference >= low) & (difference <= high)
            else:
                array = term.array
            order = sorted(range(len(indices)), key=lambda i: place[indices[i]])
            shape = [1] * len(self.shape)
            for index in indices:
                shape[place[index]] = index.size
            mask = mask & array.transpose(order).reshape(shape)
        return np.broadcast_to(np.where(mask, self.on, self.off), self.shape)


Static = Known | Affine | Choice


def as_known(value: Static) -> Known:
    """Returns values one by one."""
    return value if isinstance(value, Known) else value.known()


def as_choice(value: Static, *, below: float | None = None) -> Choice | None:
    """Returns an array of two different numbers as a choice, `on` being the larger one; None for any other.

    Args:
      value: the array.
      below: if not None, several numbers that are all less than it count as the largest of them.
    """
    if not isinstance(value, Known):
        return value if isinstance(value, Choice) else None
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
    term = Pattern(is_on, varying) if band is None else Band(varying[0], varying[1], *band)
    return Choice(indices, frozenset([term]), on, rest.max(), value.shape)


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


# --- operations --------------------------------------------------------------------------------------------------------


def operation(eqn: Any, operands: Sequence[Static]) -> Static | None:
    """Returns the result of an equation on values that depend on no input, or on masks; None if it cannot be said."""
    name = eqn.primitive.name
    if name == "iota":
        indices = new_indices(eqn.params["shape"], broadcast=True)
        dim = eqn.params["dimension"]
        own = new_indices(eqn.params["shape"])[dim]
        indices = (*indices[:dim], own, *indices[dim + 1 :])
        line = Affine(indices, dict.fromkeys(own, 1), 0, tuple(eqn.params["shape"]))
        return line if _is_wide(eqn.params["dtype"]) else Known(line.shape, lambda: np.asarray(line.known().array).astype(eqn.params["dtype"]))
    if not operands:
        return None
    result: Static | None = None
    if name in ("slice", "dynamic_slice") and not isinstance(operands[0], Known):
        result = _sliced(eqn, operands)
    elif any(isinstance(x, Choice) for x in operands):
        result = _choice(eqn, operands)
    elif any(isinstance(x, Affine) for x in operands):
        result = _affine(eqn, operands)
    if result is None and not any(isinstance(t, Same) for x in operands if isinstance(x, Choice) for t in x.terms):
        result = compute(eqn, [as_known(x) for x in operands])
    if result is None or isinstance(result, Known):
        return result
    shape = eqn.outvars[0].aval.shape  # operands of size 1 are broadcast
    dims = zip(result.indices, new_indices(shape, broadcast=True), strict=True)
    return dataclasses.replace(result, indices=tuple(own or new for own, new in dims), shape=shape)


def _is_wide(dtype: Any) -> bool:
    """Tells whether a linear function of indices is the same in a dtype as in all integers."""
    return np.issubdtype(dtype, np.signedinteger) and np.dtype(dtype).itemsize >= 4


def _evaluate(eqn: Any) -> Callable[..., Any]:
    """Returns an equation as a function of numbers; None where it cannot be computed."""

    def evaluate(*numbers: Any) -> Any:
        scalar = _Scalar(eqn)
        found = compute(scalar, [known(number) for number in numbers])
        return None if found is None or found.array is None else found.array[()]

    return evaluate


class _Scalar:
    """An elementwise equation on numbers in place of arrays."""

    def __init__(self, eqn: Any):
        self.primitive, self.params = eqn.primitive, eqn.params
        aval = eqn.outvars[0].aval
        self.outvars = [type("Var", (), {"aval": type("Aval", (), {"shape": (), "dtype": aval.dtype})})]


_NOT_ELEMENTWISE = frozenset(
    "broadcast_in_dim reshape transpose squeeze expand_dims slice dynamic_slice rev concatenate reduce_and reduce_or "
    "reduce_max reduce_min reduce_sum cumsum".split()
)


def _choice(eqn: Any, operands: Sequence[Static]) -> Choice | None:
    if eqn.primitive.name in _NOT_ELEMENTWISE or len(eqn.outvars) != 1:
        return None
    numbers = [x.scalar if isinstance(x, Known) else None for x in operands]
    choices: dict[int, Choice] = {}
    for i, (x, number) in enumerate(zip(operands, numbers, strict=True)):
        if number is None:
            choice = as_choice(x)
            if choice is None:
                return None
            choices[i] = choice
    evaluate = _evaluate(eqn)

    def at(values: Mapping[int, Any]) -> Any:
        return evaluate(*(values.get(i, number) for i, number in enumerate(numbers)))

    if len(choices) == 1:
        ((i, x),) = choices.items()
        on, off = at({i: x.on}), at({i: x.off})
        return None if on is None or off is None else dataclasses.replace(x, on=on, off=off)
    if len(choices) != 2:
        return None
    (i, x), (j, y) = choices.items()
    for a, b in itertools.product((x, x.flipped()), (y, y.flipped())):
        if a is not None and b is not None and (found := _both(a, b, lambda u, v: at({i: u, j: v}))):
            return found
    return None


def _both(x: Choice, y: Choice, at: Callable[[Any, Any], Any]) -> Choice | None:
    """Returns a function of two choices as one."""
    shared = common(x.indices, y.indices)
    if shared is None:
        return None
    indices, left, right = shared
    first, second = x.renamed(left), y.renamed(right)
    corners = [at(u, v) for u in (x.on, x.off) for v in (y.on, y.off)]
    if first is None or second is None or any(corner is None for corner in corners):
        return None
    both, only_first, only_second, neither = corners
    shape = shape_of(indices)
    if first == second:
        return Choice(indices, first, both, neither, shape)
    if only_first == only_second == neither:
        return Choice(indices, first | second, both, neither, shape)
    if both == only_first and only_second == neither:
        return Choice(indices, first, both, neither, shape)
    if both == only_second and only_first == neither:
        return Choice(indices, second, both, neither, shape)
    return None


def _affine(eqn: Any, operands: Sequence[Static]) -> Static | None:
    name, aval = eqn.primitive.name, eqn.outvars[0].aval
    if name == "convert_element_type":
        return operands[0] if _is_wide(aval.dtype) else None
    terms = [_as_affine(x) for x in operands]
    if None in terms or len(terms) not in (1, 2):
        return None
    x, y = terms[0], terms[-1]
    assert x is not None and y is not None
    if name == "neg":
        return _sum(x, x, (-1, 0))
    if name in ("add", "sub"):
        return _sum(x, y, (1, 1 if name == "add" else -1))
    if name == "mul" and (not x.on_leaves or not y.on_leaves):
        return _sum(x, y, (y.offset, 0)) if not y.on_leaves else _sum(x, y, (0, x.offset))
    if name in ("lt", "le", "gt", "ge", "eq", "ne"):
        difference = _sum(x, y, (1, -1))
        return None if difference is None else _compared(name, difference)
    return None


def _as_affine(x: Static) -> Affine | None:
    if isinstance(x, Affine):
        return x
    number = x.scalar if isinstance(x, Known) else None
    if number is None or not np.issubdtype(np.asarray(number).dtype, np.integer):
        return None
    return Affine(new_indices(x.shape, broadcast=True), {}, int(number), x.shape)


def _sum(x: Affine, y: Affine, weights: tuple[int, int]) -> Affine | None:
    """Returns a weighted sum."""
    rank = max(len(x.shape), len(y.shape))
    one, other = (z.indices if z.shape else ((),) * rank for z in (x, y))
    shared = common(one, other)
    if shared is None:
        return None
    indices, left, right = shared
    factors: dict[Index, int] = {}
    for z, names, weight in ((x, left, weights[0]), (y, right, weights[1])):
        for index, factor in z.on_leaves.items():
            factors[names[index]] = factors.get(names[index], 0) + weight * factor
    return Affine(indices, factors, weights[0] * x.offset + weights[1] * y.offset, shape_of(indices))


def _compared(name: str, x: Affine) -> Choice | None:
    """Returns where `x` compares with 0 as said, if that is a band."""
    factors = x.on_leaves
    if len(factors) != 2 or sum(factors.values()):
        return None
    (first, factor), (second, _) = factors.items()
    if factor < 0:
        first, second, factor = second, first, -factor
    # factor * (first - second) + offset
    least, most = -(x.offset // factor), -x.offset // factor  # of what is not negative, and of what is not positive
    bounds = {
        "ge": (least, None),
        "gt": (most + 1, None),
        "le": (None, most),
        "lt": (None, least - 1),
        "eq": (least, most),
        "ne": (least, most),
    }
    low, high = bounds[name]
    if low is not None and high is not None and low > high:
        return None
    on = np.bool_(name != "ne")
    return Choice(x.indices, frozenset([Band(first, second, low, high)]), on, ~on, x.shape)


def _sliced(eqn: Any, operands: Sequence[Static]) -> Static | None:
    x, shape = operands[0], eqn.outvars[0].aval.shape
    assert not isinstance(x, Known)
    if eqn.primitive.name == "slice":
        starts, strides = eqn.params["start_indices"], eqn.params["strides"]
        if strides is not None and any(stride != 1 for stride in strides):
            return None
    else:
        found = [start.scalar if isinstance(start, Known) else None for start in operands[1:]]
        if any(start is None for start in found):
            return None
        starts = [min(max(int(s), 0), n - m) for s, n, m in zip(found, x.shape, shape, strict=True)]  # pyright: ignore[reportArgumentType]
    names: dict[Index, Index] = {}
    begins: dict[Index, int] = {}
    made: list[tuple[Index, ...]] = []
    for dim, old, new, start in zip(x.indices, x.shape, shape, starts, strict=True):
        if old == new:
            made.append(dim)
            names.update((index, index) for index in leaves(dim))
            continue
        if len(leaves(dim)) != 1 or new <= 1:
            return None
        index = Index(new, broadcast=leaves(dim)[0].broadcast)
        names[leaves(dim)[0]], begins[index] = index, start
        made.append((index,))
    if isinstance(x, Affine):
        factors = {names[index]: factor for index, factor in x.on_leaves.items()}
        offset = x.offset + sum(factor * begins.get(index, 0) for index, factor in factors.items())
        return Affine(tuple(made), factors, offset, shape)
    terms: list[Term] = []
    for term in x.renamed(names) or ():
        if isinstance(term, Band):
            moved = begins.get(term.first, 0) - begins.get(term.second, 0)
            low, high = (None if bound is None else bound - moved for bound in (term.low, term.high))
            terms.append(Band(term.first, term.second, low, high))
        elif isinstance(term, Same) and not {*term.first, *term.second} & begins.keys():
            terms.append(term)
        else:
            return None
    return Choice(tuple(made), frozenset(terms), x.on, x.off, shape) if len(terms) == len(x.terms) else None
