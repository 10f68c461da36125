"""What equations make of values between the product of queries and keys and that with the values (`followed`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zero_jax.dims import CASTS, COPIES, PLACES, dim_map
from zero_jax.program.jaxprs import is_literal
from zero_jax.transforms.attention.dims import Index, after, all_leaves, leaves, new_indices
from zero_jax.transforms.attention.followed import (
    LOWEST,
    MASKED,
    Followed,
    Logits,
    Lost,
    Product,
    RowTest,
    Sum,
    number_of,
    stopped,
)
from zero_jax.transforms.attention.tables import Table, conditions

# 1 + x is 1 in float32.
_NOTHING = 2.0**-24

_NO_MASK = "a bias that is no mask is added to the logits"
_COMPUTED_BIAS = "a bias that is computed from params or data is added to the logits"
_SCALED = "the logits are scaled by computed values"
_DROPOUT = "the weights are multiplied or divided by computed values (dropout?)"


def logits_of(eqn: Any) -> Followed:
    """Returns the result of a `dot_general` as logits, with indices for its operands and its result."""
    lhs, rhs = sides = [[Index(size) for size in atom.aval.shape] for atom in eqn.invars]
    known = dim_map(eqn)
    for (_, i), (_, j) in (dims for dims in (*known.reduced, *known.kept) if len(dims) == 2):
        rhs[j] = lhs[i]
    out = [sides[side][dim] for (side, dim), *_ in known.kept]
    by_dim = lambda indices: tuple((index,) if index.size != 1 else () for index in indices)  # noqa: E731
    variables = [None if is_literal(atom) else atom for atom in eqn.invars]
    product = Product(eqn, ((variables[0], by_dim(lhs)), (variables[1], by_dim(rhs))), by_dim(out))
    return Followed(logits=Logits(product), indices=product.indices)


def attended(eqn: Any, weights: Followed, place: int) -> Followed | None:
    """Returns the product of weights, at a place among the operands of a `dot_general`, with values."""
    known, other = dim_map(eqn), eqn.invars[1 - place]
    values = list(new_indices(other.aval.shape))
    for dims in (dims for dims in (*known.reduced, *known.kept) if len(dims) == 2):  # contracted, and of the batch
        pair = dict(dims)
        values[pair[1 - place]] = weights.indices[pair[place]]
    sides = {place: weights.indices, 1 - place: values}
    over = frozenset(leaves(index for dims in known.reduced for index in weights.indices[dims[place][1]]))
    product = weights.product
    assert product is not None
    all_there = {*all_leaves(weights.indices)} == {*all_leaves(product.indices)}
    if not over or not all_there or is_literal(other):
        return None
    out = tuple(sides[side][dim] for (side, dim), *_ in known.kept)
    values = other, tuple(values)
    return dataclasses.replace(weights, indices=out, values=values, contracted=over, result=eqn.outvars[0])


def follow(eqn: Any, operands: Sequence[Any]) -> Followed | RowTest | Lost | None:
    """Returns the result of an equation on followed values; None if it is nothing that is followed."""
    name, first = eqn.primitive.name, operands[0]
    if name in CASTS:
        return first if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating) else None
    if name in (COPIES | PLACES) - {"stop_gradient"}:
        return first
    if len(operands) == 1 and (indices := after(eqn, first.indices)) is not None:
        return dataclasses.replace(first, indices=indices)
    if name == "select_n":
        return _selected(*operands)
    if any(isinstance(x, RowTest) for x in operands):
        return dataclasses.replace(first, holds=not first.holds) if name == "not" else None
    has_logits = [isinstance(x, Followed) and x.logits is not None for x in operands]
    place = (has_logits if any(has_logits) else [isinstance(x, Followed) for x in operands]).index(True)
    x, others = operands[place], [other for i, other in enumerate(operands) if i != place]
    if x.is_constant and x.logits is not None:
        return x.reduced(eqn, "max") if name == "reduce_max" else x if name == "stop_gradient" else None
    if not others:
        return _alone(eqn, x)
    rule = _of_exponentials if x.is_exp else _of_logits if x.logits is not None else _of_rows
    return rule(name, x, others[0], place)


def number(x: Any) -> float | None:
    """Returns the number that all elements of an array are, if that is known."""
    value = x.number if isinstance(x, Table) else None
    return None if value is None or np.iscomplexobj(value) else float(value)


def _alone(eqn: Any, x: Followed) -> Followed | RowTest | None:
    name, is_row = eqn.primitive.name, x.logits is None
    if x.values:
        return None
    match name:
        case "reduce_max" if not x.is_exp and not is_row:
            return x.reduced(eqn, "max")
        case "reduce_sum" if x.is_exp and not is_row:
            return x.reduced(eqn, "lse")
        case "exp" if not x.is_exp:
            return dataclasses.replace(x, is_exp=True)
        case "exp2" if not x.is_exp:
            scaled = x.times(math.log(2))
            return scaled and dataclasses.replace(scaled, is_exp=True)
        case "log" if x.is_exp:
            return dataclasses.replace(x, is_exp=False)
        case "neg" if not x.is_exp:
            return x.times(-1)
        case "tanh" if not x.is_exp and x.logits and not x.shift and not x.logits.terms and x.logits.cap is None:
            return dataclasses.replace(x, logits=dataclasses.replace(x.logits, cap=1.0))
        case "stop_gradient" if is_row:
            return dataclasses.replace(x, shift=stopped(x.shift))
        case "stop_gradient" if not x.is_exp:
            return dataclasses.replace(x, is_constant=True)
        case "is_finite" if is_row:
            return RowTest(x.indices, True, x.product)
        case "abs" if is_row and x.is_exp:
            return x
        case "integer_pow" if is_row and x.is_exp and eqn.params["y"] == -1:
            return x.times(-1)
    return None


def _of_logits(name: str, x: Followed, other: Any, place: int) -> Followed | Lost | None:
    value = number(other)
    if name in ("add", "sub"):
        is_shift = value is not None or (isinstance(other, Followed) and other.fits(x.indices))
        return _sum(name, x, other, place) or (None if is_shift else _biased(name, x, place, other))
    if name in ("mul", "div") and value is not None:
        factor = value if name == "mul" else 1 / value if value else 0.0
        return None if name == "div" and place else x.times(factor)
    if name == "mul":
        visible = _ones(other)
        if visible is None or x.shift:
            return Lost(_SCALED, False)
        return x.masked(conditions(visible, x.indices), 0.0)
    if name == "max" and value is not None and value <= LOWEST:
        return x
    return Lost(_SCALED, False) if name == "div" else None


def _sum(name: str, x: Followed, other: Any, place: int) -> Followed | None:
    """Returns the sum or difference of logits, or of numbers of rows, with a number or numbers of rows."""
    value = number(other)
    if value is not None and math.isfinite(value):
        shift = number_of(value)
    elif isinstance(other, Followed) and other.fits(x.indices) and not other.is_exp:
        shift = other.shift
    else:
        return None
    negated = x.times(-1) if name == "sub" and place else x
    return negated and negated.plus(shift, -1 if name == "sub" and not place else 1)


def _biased(name: str, x: Followed, place: int, other: Any) -> Followed | Lost | None:
    """Adds an array that is a mask: one number where it holds, and much less elsewhere."""
    if not isinstance(other, Table):
        return Lost(_COMPUTED_BIAS, False)
    array = other.array
    if array is None or not array.size or (name == "sub" and place):
        return Lost(_NO_MASK, False)
    array = -array if name == "sub" else array
    visible = array.max()  # what is added to the logits that the mask leaves
    masked = array[array != visible]
    if not masked.size or (masked.min() != masked.max() and not masked.max() < MASKED):
        return Lost(_NO_MASK, False)
    terms = conditions(other.change(lambda _: array == visible, other.axes), x.indices)
    if terms is None or not math.isfinite(visible):
        return Lost(_COMPUTED_BIAS, False)
    assert x.logits is not None
    gap = float(masked.max()) - float(visible)
    if x.logits.terms and x.logits.fill > MASKED:  # masked by 0 before
        if x.logits.terms != terms or gap > MASKED:
            return None
        logits = dataclasses.replace(x.logits, fill=x.logits.fill + gap)
    elif gap > MASKED:
        return Lost(_NO_MASK, False)
    else:
        logits = x.logits.masked(terms, gap)
    return dataclasses.replace(x, logits=logits).plus(number_of(float(visible)))


def _ones(x: Any) -> Table | None:
    """Returns where a mask of ones and zeros is one."""
    array = x.array if isinstance(x, Table) else None
    if array is None or not ((array == 0) | (array == 1)).all() or x.number is not None:
        return None
    return x.change(lambda array: array == 1, x.axes)


def _selected(which: Any, *cases: Any) -> Followed | Lost | None:
    if len(cases) != 2 or isinstance(which, Followed):
        return None
    if isinstance(which, RowTest):
        case = cases[which.holds]
        # That no row is empty is found out for these logits alone.
        return case if isinstance(case, Followed) and case.product is which.product else None
    if isinstance(which, Table) and (chosen := which.number) is not None:
        return cases[bool(chosen)] if isinstance(cases[bool(chosen)], Followed) else None
    place = next((i for i, x in enumerate(cases) if isinstance(x, Followed) and x.logits and not x.values), None)
    if place is None:
        return None
    x, fill = cases[place], number(cases[1 - place])
    array = which.array if isinstance(which, Table) else None
    visible = None if array is None else which.change(lambda array: array == place, which.axes)
    terms = None if visible is None else conditions(visible, x.indices)
    if terms is None:
        what = "a mask of the weights after the softmax (dropout?)" if x.is_exp else "the mask"
        return Lost(f"{what} is computed from data, so rows may be empty", x.is_exp)
    if fill is None:
        return Lost(f"where the mask does not hold, {x.name} are not a number that is known", x.is_exp)
    if not x.is_exp:
        return None if x.is_constant and x.shift else x.masked(terms, fill)
    return x.dropped(terms) if fill == 0 else None


def _of_exponentials(name: str, x: Followed, other: Any, place: int) -> Followed | RowTest | Lost | None:
    value, is_row = number(other), x.logits is None
    if is_row and value is not None:
        return _exponentials_and_number(name, x, value, place)
    is_product = name == "mul" or (name == "div" and not place)
    if isinstance(other, Followed) and other.logits is None:
        fits = is_product and other.is_exp and other.fits(x.indices) and (not is_row or x.fits(other.indices))
        return x.plus(other.shift, -1 if name == "div" else 1) if fits else None
    if is_row or x.values or not is_product:
        return None
    visible = _ones(other) if name == "mul" else None
    return Lost(_DROPOUT, True) if visible is None else x.dropped(conditions(visible, x.indices))


def _exponentials_and_number(name: str, x: Followed, value: float, place: int) -> Followed | RowTest | None:
    if value == 0 and (name in ("eq", "ne") or (name == "gt" and not place)):
        return RowTest(x.indices, name != "eq", x.product)
    if name == "div" and place and value == 1:
        return x.times(-1)
    guards = (name == "max" and value <= 1) or (name == "add" and abs(value) <= _NOTHING)
    return x if guards and _at_least_one(x.shift) else None


def _of_rows(name: str, x: Followed, other: Any, place: int) -> Followed | RowTest | None:
    value = number(other)
    if value is not None and value <= LOWEST:
        if name in ("eq", "ne"):
            return RowTest(x.indices, name == "ne", x.product)
        return x if name == "max" else None
    if name not in ("add", "sub") or (value is None and not (isinstance(other, Followed) and x.fits(other.indices))):
        return None
    return _sum(name, x, other, place)


def _at_least_one(shift: Sum) -> bool:
    """Tells whether a row's number is the sum of weights of which the largest is 1."""
    kinds = {symbol.kind: (symbol, value) for symbol, value in shift}
    if len(shift) != 2 or kinds.keys() != {"max", "lse"}:
        return False
    (largest, minus), (total, plus_) = kinds["max"], kinds["lse"]
    return (minus, plus_) == (-1.0, 1.0) and (largest.logits, largest.over) == (total.logits, total.over)
