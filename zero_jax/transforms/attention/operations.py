"""Operations on values that depend on no input, and on masks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from zero_jax.transforms.attention.dims import Index, common, leaves, new_indices, shape_of
from zero_jax.transforms.attention.masks import Affine, BandTerm, Masked, Same, Static, Term, as_known, as_masked
from zero_jax.transforms.attention.static import Known, compute, evaluated


def operation(eqn: Any, operands: Sequence[Static]) -> Static | None:
    """Returns the result of an equation on values that depend on no input, or on masks; None if it cannot be said."""
    name = eqn.primitive.name
    if name == "iota":
        indices = new_indices(eqn.params["shape"], broadcast=True)
        dim = eqn.params["dimension"]
        own = new_indices(eqn.params["shape"])[dim]
        indices = (*indices[:dim], own, *indices[dim + 1 :])
        line = Affine(indices, dict.fromkeys(own, 1), 0, tuple(eqn.params["shape"]))
        dtype = eqn.params["dtype"]
        return line if _is_wide(dtype) else Known(line.shape, lambda: np.asarray(line.known().array).astype(dtype))
    if not operands:
        return None
    result: Static | None = None
    if name in ("slice", "dynamic_slice") and not isinstance(operands[0], Known):
        result = _sliced(eqn, operands)
    elif any(isinstance(x, Masked) for x in operands):
        result = _choice(eqn, operands)
    elif any(isinstance(x, Affine) for x in operands):
        result = _affine(eqn, operands)
    if result is None and not any(isinstance(t, Same) for x in operands if isinstance(x, Masked) for t in x.terms):
        result = compute(eqn, [as_known(x) for x in operands])
    if result is None or isinstance(result, Known):
        return result
    shape = eqn.outvars[0].aval.shape  # operands of size 1 are broadcast
    dims = zip(result.indices, new_indices(shape, broadcast=True), strict=True)
    return dataclasses.replace(result, indices=tuple(own or new for own, new in dims), shape=shape)


def _is_wide(dtype: Any) -> bool:
    """Tells whether a linear function of indices is the same in a dtype as in all integers."""
    return np.issubdtype(dtype, np.signedinteger) and np.dtype(dtype).itemsize >= 4


def _choice(eqn: Any, operands: Sequence[Static]) -> Masked | None:
    if len(eqn.outvars) != 1:
        return None
    numbers = [x.scalar if isinstance(x, Known) else None for x in operands]
    choices: dict[int, Masked] = {}
    for i, (x, number) in enumerate(zip(operands, numbers, strict=True)):
        if number is None:
            choice = as_masked(x)
            if choice is None:
                return None
            choices[i] = choice

    def at(values: Mapping[int, Any]) -> Any:
        return evaluated(eqn, [values.get(i, number) for i, number in enumerate(numbers)])

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


def _both(x: Masked, y: Masked, at: Callable[[Any, Any], Any]) -> Masked | None:
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
        return Masked(indices, first, both, neither, shape)
    if only_first == only_second == neither:
        return Masked(indices, first | second, both, neither, shape)
    if both == only_first and only_second == neither:
        return Masked(indices, first, both, neither, shape)
    if both == only_second and only_first == neither:
        return Masked(indices, second, both, neither, shape)
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


def _compared(name: str, x: Affine) -> Masked | None:
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
    return Masked(x.indices, frozenset([BandTerm(first, second, low, high)]), on, ~on, x.shape)


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
        if isinstance(term, BandTerm):
            moved = begins.get(term.first, 0) - begins.get(term.second, 0)
            low, high = (None if bound is None else bound - moved for bound in (term.low, term.high))
            terms.append(BandTerm(term.first, term.second, low, high))
        elif isinstance(term, Same) and not {*term.first, *term.second} & begins.keys():
            terms.append(term)
        else:
            return None
    return Masked(tuple(made), frozenset(terms), x.on, x.off, shape) if len(terms) == len(x.terms) else None
