"""What equations make of logits, weights and the numbers of their rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zero_jax.transforms.attention.dims import Indices, after, leaves, paired
from zero_jax.transforms.attention.masks import Affine, Masked, Term, as_known, as_masked
from zero_jax.transforms.attention.scores import (
    MASKED,
    ONE,
    ZERO,
    Attended,
    Followed,
    Lost,
    RowShift,
    RowTest,
    Scores,
    Sum,
    Symbol,
    Weights,
    plus,
    stopped,
)
from zero_jax.transforms.attention.static import Known

# No logit is as low.
_LOWEST = -1e30
# 1 + x is 1 in float32.
_NOTHING = 2.0**-24

IDENTITY = frozenset("copy copy_p sharding_constraint name reduce_precision convert_element_type zero_reshard".split())


def follow(eqn: Any, operands: Sequence[Any]) -> Followed | Lost | None:
    """Returns the result of an equation on followed values; None if it is nothing that is followed."""
    name, first = eqn.primitive.name, operands[0]
    if name in IDENTITY:
        is_float = name != "convert_element_type" or jnp.issubdtype(eqn.params["new_dtype"], jnp.floating)
        return first if is_float else None
    if len(operands) == 1 and (indices := after(eqn, first.indices)) is not None:
        return dataclasses.replace(first, indices=indices)
    if name == "select_n":
        return _select(operands)
    place = next((i for i, x in enumerate(operands) if isinstance(x, Scores | Weights | Attended)), None)
    if place is None:
        return _row(name, eqn, operands)
    x = operands[place]
    others = [other for i, other in enumerate(operands) if i != place]
    if isinstance(x, Scores):
        return _scores(eqn, x, place, others)
    if isinstance(x, Weights):
        return _weights(eqn, x, place, others)
    if name in ("div", "mul") and _fits(others[0], x.indices) and others[0].is_exp and (name == "mul" or not place):
        return dataclasses.replace(x, shift=plus(x.shift, others[0].shift, -1 if name == "div" else 1))
    return None


def number(x: Any) -> float | None:
    """Returns the number that all elements of an array are, if that is known."""
    if not isinstance(x, Known | Affine):
        return None
    value = as_known(x).scalar
    return None if value is None or np.iscomplexobj(value) else float(value)


def _fits(row: Any, indices: Indices) -> bool:
    """Tells whether each element of an array is beside the number of its own row."""
    if not isinstance(row, RowShift):
        return False
    pairs = paired(row.indices, indices) if len(row.indices) == len(indices) else None
    return pairs is not None and all(a is b or a.broadcast for a, b in pairs)


def _scores(eqn: Any, x: Scores, place: int, others: list[Any]) -> Followed | Lost | None:
    name = eqn.primitive.name
    if name == "reduce_max":
        return _reduced(eqn, x, "max")
    if name == "stop_gradient":
        return dataclasses.replace(x, constant=True)
    if x.constant:
        return None
    if name in ("exp", "exp2"):
        scaled = x if name == "exp" else _times(x, math.log(2))
        return scaled and Weights(logits=scaled.logits, indices=x.indices, shift=scaled.shift)
    if name == "tanh":
        free = not x.shift and not x.logits.terms and x.logits.cap is None
        return dataclasses.replace(x, logits=dataclasses.replace(x.logits, cap=1.0)) if free else None
    if name == "neg":
        return _times(x, -1)
    if not others:
        return None
    other, value = others[0], number(others[0])
    if name in ("add", "sub") and (value is not None or _fits(other, x.indices)):
        amount = other.shift if value is None else frozenset([(ONE, value)]) if value else ZERO
        if (value is not None and not math.isfinite(value)) or (value is None and other.is_exp):
            return None
        negated = _times(x, -1) if name == "sub" and place else x
        sign = -1 if name == "sub" and not place else 1
        return negated and dataclasses.replace(negated, shift=plus(negated.shift, amount, sign))
    if name in ("add", "sub"):
        return _biased(eqn, x, place, other)
    if name in ("mul", "div") and value is not None:
        return None if name == "div" and place else _times(x, value if name == "mul" else 1 / value if value else 0.0)
    if name == "mul":
        return _multiplied(eqn, x, other)
    if name == "max" and value is not None and value <= _LOWEST:
        return x
    return Lost("the logits are scaled by computed values", False) if name in ("mul", "div") else None


def _times(x: Scores, factor: float) -> Scores | None:
    logits = x.logits.times(factor)
    if logits is None or any(symbol is not ONE for symbol, _ in x.shift):
        return None
    return dataclasses.replace(x, logits=logits, shift=frozenset((symbol, v * factor) for symbol, v in x.shift))


def _reduced(eqn: Any, x: Scores | Weights, kind: str) -> RowShift | None:
    axes = set(eqn.params["axes"])
    over = frozenset(leaves(index for i in axes for index in x.indices[i]))
    if not over:
        return None
    rest = tuple(dim for i, dim in enumerate(x.indices) if i not in axes)
    is_constant = isinstance(x, Scores) and x.constant
    shift = stopped(x.shift) if is_constant else x.shift
    symbol = Symbol(kind, x.logits, over, stopped=is_constant)
    return RowShift(indices=rest, shift=plus(shift, frozenset([(symbol, 1.0)])), is_exp=kind == "lse")


def terms_on(choice: Masked, indices: Indices) -> frozenset[Term] | None:
    """Returns the terms of a mask on the indices of an array that it is applied to."""
    pairs = paired(choice.indices, indices) if len(choice.indices) == len(indices) else None
    return None if pairs is None else choice.renamed(dict(pairs))


def _mask(x: Scores, terms: frozenset[Term] | None, fill: float) -> Scores | None:
    """Applies a mask; what is masked holds `fill`, whatever was taken off the row before."""
    if terms is None or (any(symbol is not ONE for symbol, _ in x.shift) and fill > _LOWEST):
        return None
    fill -= sum(value for symbol, value in x.shift if symbol is ONE)
    return dataclasses.replace(x, logits=x.logits.masked(terms, fill))


def _biased(eqn: Any, x: Scores, place: int, other: Any) -> Scores | Lost | None:
    """Adds an array that is a mask."""
    computed = Lost("a bias that is computed from params or data is added to the logits", False)
    choice = as_masked(other, below=MASKED) if isinstance(other, Known | Affine | Masked) else None
    if choice is None or (eqn.primitive.name == "sub" and place):
        static = isinstance(other, Known | Affine | Masked)
        return Lost("a bias that is no mask is added to the logits", False) if static else computed
    sign = -1.0 if eqn.primitive.name == "sub" else 1.0
    on, off = sign * float(choice.on), sign * float(choice.off)
    if off > on:
        flipped = choice.flipped()
        if flipped is None:
            return computed
        choice, on, off = flipped, off, on
    terms = terms_on(choice, x.indices)
    if terms is None or not math.isfinite(on):
        return computed
    gap = off - on
    same = x.logits.terms == terms
    if x.logits.terms and x.logits.fill > MASKED:  # masked by 0 before
        if not same or gap > MASKED:
            return None
        logits = dataclasses.replace(x.logits, fill=x.logits.fill + gap)
    elif gap > MASKED:
        return Lost("a bias that is no mask is added to the logits", False)
    else:
        logits = x.logits.masked(terms, gap)
    shift = plus(x.shift, frozenset([(ONE, on)])) if on else x.shift
    return dataclasses.replace(x, logits=logits, shift=shift)


def _multiplied(eqn: Any, x: Scores, other: Any) -> Scores | Lost | None:
    """Multiplies by a mask of ones and zeros."""
    del eqn
    choice = _zero_or_one(other)
    if choice is None or x.shift:
        return Lost("the logits are scaled by computed values", False)
    return _mask(x, terms_on(choice, x.indices), 0.0)


def _zero_or_one(x: Any) -> Masked | None:
    """Returns a mask of ones and zeros with `on` being one."""
    choice = as_masked(x) if isinstance(x, Known | Masked) else None
    if choice is not None and choice.on == 0 and choice.off == 1:
        choice = choice.flipped()
    return choice if choice is not None and choice.on == 1 and choice.off == 0 else None


def _select(operands: Sequence[Any]) -> Followed | Lost | None:
    which, *cases = operands
    if isinstance(which, RowTest) and len(cases) == 2:
        return cases[which.holds] if isinstance(cases[which.holds], Followed) else None
    if len(cases) != 2 or isinstance(which, Followed):
        return None
    place = next((i for i, x in enumerate(cases) if isinstance(x, Scores | Weights)), None)
    if place is None:
        return None
    x, fill = cases[place], number(cases[1 - place])
    kind = "logits" if isinstance(x, Scores) else "weights"
    choice = as_masked(which) if isinstance(which, Known | Masked) else None
    if isinstance(which, Known) and which.scalar is not None:
        return cases[bool(which.scalar)] if isinstance(cases[bool(which.scalar)], Followed) else None
    if choice is None:
        what = "a mask of the weights after the softmax (dropout?)" if kind == "weights" else "the mask"
        return Lost(f"{what} is computed from data, so rows may be empty", kind == "weights")
    if bool(choice.on) != bool(place):
        choice = choice.flipped()
    if choice is None or fill is None:
        return Lost(f"where the mask does not hold, the {kind} are not a number that is known", kind == "weights")
    terms = terms_on(choice, x.indices)
    if isinstance(x, Scores):
        return None if x.constant and x.shift else _mask(x, terms, fill)
    return _drop(x, terms) if fill == 0 else None


def _drop(x: Weights, terms: frozenset[Term] | None) -> Weights | None:
    """Sets the weights to 0 where a mask does not hold."""
    if terms is None:
        return None
    if terms <= x.logits.terms and x.logits.fill <= MASKED:
        return x
    return dataclasses.replace(x, logits=x.logits.masked(terms, -math.inf))


def _weights(eqn: Any, x: Weights, place: int, others: list[Any]) -> Followed | Lost | None:
    name = eqn.primitive.name
    if name == "reduce_sum":
        return _reduced(eqn, x, "lse")
    if name == "log":
        return Scores(logits=x.logits, indices=x.indices, shift=x.shift)
    if name in ("mul", "div") and (name == "mul" or not place):
        if _fits(others[0], x.indices) and others[0].is_exp:
            return dataclasses.replace(x, shift=plus(x.shift, others[0].shift, -1 if name == "div" else 1))
        choice = _zero_or_one(others[0])
        if name == "mul" and choice is not None:
            return _drop(x, terms_on(choice, x.indices))
        if not isinstance(others[0], RowShift):
            return Lost("the weights are multiplied or divided by computed values (dropout?)", True)
    return None


def _row(name: str, eqn: Any, operands: Sequence[Any]) -> Followed | None:
    x = operands[0]
    if isinstance(x, RowTest):
        return dataclasses.replace(x, holds=not x.holds) if name == "not" else None
    if len(operands) == 1:
        return _row_alone(name, eqn, x)
    place = 0 if isinstance(x, RowShift) else 1
    x, other = operands[place], operands[1 - place]
    value = number(other)
    if value is not None:
        return _row_and_number(name, x, place, value)
    if not isinstance(other, RowShift) or not _fits(other, x.indices) or not _fits(x, other.indices):
        return None
    left, right = (x, other) if not place else (other, x)
    allowed = {"mul": 1, "div": -1} if x.is_exp else {"add": 1, "sub": -1}
    if left.is_exp != right.is_exp or name not in allowed:
        return None
    return dataclasses.replace(left, shift=plus(left.shift, right.shift, allowed[name]))


def _row_alone(name: str, eqn: Any, x: RowShift) -> Followed | None:
    if name == "stop_gradient":
        return dataclasses.replace(x, shift=stopped(x.shift))
    if name == "is_finite":
        return RowTest(indices=x.indices, holds=True)
    if x.is_exp:
        if name == "log":
            return dataclasses.replace(x, is_exp=False)
        if name == "integer_pow" and eqn.params["y"] == -1:
            return dataclasses.replace(x, shift=plus(ZERO, x.shift, -1))
        return x if name == "abs" else None
    if name == "exp":
        return dataclasses.replace(x, is_exp=True)
    return dataclasses.replace(x, shift=plus(ZERO, x.shift, -1)) if name == "neg" else None


def _row_and_number(name: str, x: RowShift, place: int, value: float) -> Followed | None:
    if not x.is_exp:
        if name == "max" and value <= _LOWEST:
            return x
        if name in ("eq", "ne") and value <= _LOWEST:
            return RowTest(indices=x.indices, holds=name == "ne")
        if name == "add" or (name == "sub" and not place):
            amount = value if name == "add" else -value
            return dataclasses.replace(x, shift=plus(x.shift, frozenset([(ONE, amount)]))) if amount else x
        return None
    if value == 0 and name in ("eq", "ne", "gt"):
        return RowTest(indices=x.indices, holds=name != "eq") if not place or name != "gt" else None
    if name == "div" and place and value == 1:
        return dataclasses.replace(x, shift=plus(ZERO, x.shift, -1))
    if _at_least_one(x.shift) and ((name == "max" and value <= 1) or (name == "add" and abs(value) <= _NOTHING)):
        return x
    return None


def _at_least_one(shift: Sum) -> bool:
    """Tells whether a row's number is the sum of weights of which the largest is 1."""
    kinds = {symbol.kind: (symbol, value) for symbol, value in shift}
    if len(shift) != 2 or kinds.keys() != {"max", "lse"}:
        return False
    (largest, minus), (total, plus_) = kinds["max"], kinds["lse"]
    return (minus, plus_) == (-1.0, 1.0) and (largest.logits, largest.over) == (total.logits, total.over)
