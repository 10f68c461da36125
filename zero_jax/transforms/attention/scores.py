"""What becomes of a product of queries and keys on the way to the product with the values, as algebra.

Logits are `scale * product`, perhaps under a soft cap, where a mask holds. A softmax takes numbers off each row and
divides each row by others; all of these are sums of the row's maximum and of its log-sum-exp, so a value is followed as
`logits + shift` or `exp(logits + shift)`. It is a softmax if the shift is minus the log-sum-exp of those very logits.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from zero_jax.core.jaxprs import is_literal
from zero_jax.dims import dim_map
from zero_jax.transforms.attention.dims import Index, Indices, all_leaves, leaves, new_indices
from zero_jax.transforms.attention.masks import Term

# What is added to a logit, or stands in its place, to mask it: GPT-2 adds -10,000, in bfloat16 a bit less.
MASKED = -9000.0


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """A `dot_general` of activations: of each operand its variable and indices; contracted ones are in both."""

    eqn: Any
    operands: tuple[tuple[Any, Indices], tuple[Any, Indices]]
    indices: Indices


@dataclasses.dataclass(frozen=True)
class Logits:
    """`scale * product`, or `cap * tanh(scale * product)`; at most `fill` where not all of the terms hold."""

    product: Product
    scale: float = 1.0
    cap: float | None = None
    terms: frozenset[Term] = frozenset()
    fill: float = -math.inf

    def times(self, factor: float) -> Logits | None:
        """Returns the logits times a number."""
        if not factor or not math.isfinite(factor) or (self.terms and factor < 0):
            return None
        fill = self.fill * factor if self.terms else self.fill
        if self.cap is None:
            return dataclasses.replace(self, scale=self.scale * factor, fill=fill)
        return dataclasses.replace(self, cap=self.cap * factor, fill=fill)

    def masked(self, terms: frozenset[Term], fill: float) -> Logits:
        """Returns the logits where further terms hold."""
        fill = max(fill, self.fill) if self.terms else fill
        return dataclasses.replace(self, terms=self.terms | terms, fill=fill)


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A number of each row of logits: its maximum or its log-sum-exp over some indices; `one` is 1."""

    kind: str
    logits: Logits | None = None
    over: frozenset[Index] = frozenset()
    stopped: bool = False


ONE = Symbol("one")
Sum = frozenset[tuple[Symbol, float]]
ZERO: Sum = frozenset()


def plus(first: Sum, second: Sum, factor: float = 1.0) -> Sum:
    """Returns `first + factor * second`."""
    total = dict(first)
    for symbol, value in second:
        total[symbol] = total.get(symbol, 0.0) + factor * value
    return frozenset((symbol, value) for symbol, value in total.items() if value)


def stopped(shift: Sum) -> Sum:
    """Returns the same numbers as constants of the derivative."""
    return frozenset((symbol if symbol is ONE else dataclasses.replace(symbol, stopped=True), v) for symbol, v in shift)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Scores:
    """`logits + shift`; `constant` in the derivative after a `stop_gradient`."""

    logits: Logits
    indices: Indices
    shift: Sum = ZERO
    constant: bool = False


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Weights:
    """`exp(logits + shift)`."""

    logits: Logits
    indices: Indices
    shift: Sum = ZERO


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RowShift:
    """`shift`, or its exponential; the same for all keys."""

    indices: Indices
    shift: Sum
    is_exp: bool = False


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RowTest:
    """A condition on rows that holds always or never where no row is empty."""

    indices: Indices
    holds: bool


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Attended:
    """The product of `exp(logits + shift)` with values: an operand by its variable and indices."""

    logits: Logits
    values: tuple[Any, Indices]
    contracted: frozenset[Index]
    result: Any  # the variable of the product
    indices: Indices
    shift: Sum


@dataclasses.dataclass(frozen=True, eq=False)
class Lost:
    """What was logits or weights before an equation that no attention kernel has; `is_core`: after the exponential."""

    reason: str
    is_core: bool


Followed = Scores | Weights | RowShift | RowTest | Attended


def made_product(eqn: Any) -> Product:
    """Returns the product of a `dot_general`, with indices for its operands and its result."""
    lhs, rhs = sides = [[Index(size) for size in atom.aval.shape] for atom in eqn.invars]
    known = dim_map(eqn)
    for (_, i), (_, j) in (dims for dims in (*known.reduced, *known.kept) if len(dims) == 2):
        rhs[j] = lhs[i]
    out = [sides[side][dim] for (side, dim), *_ in known.kept]
    of = lambda indices: tuple((index,) if index.size != 1 else () for index in indices)  # noqa: E731
    variables = [None if is_literal(atom) else atom for atom in eqn.invars]
    return Product(eqn, ((variables[0], of(lhs)), (variables[1], of(rhs))), of(out))


def attended(eqn: Any, weights: Weights, place: int) -> Attended | None:
    """Returns the product of weights, at a place among the operands of a `dot_general`, with values."""
    known = dim_map(eqn)
    values = list(new_indices(eqn.invars[1 - place].aval.shape))
    pairs = [{side: dim for side, dim in dims} for dims in (*known.reduced, *known.kept) if len(dims) == 2]
    for pair in pairs:
        values[pair[1 - place]] = weights.indices[pair[place]]
    sides = {place: weights.indices, 1 - place: values}
    out = [sides[side][dim] for (side, dim), *_ in known.kept]
    over = frozenset(leaves(index for dims in known.reduced for index in weights.indices[dims[place][1]]))
    all_there = frozenset(all_leaves(weights.indices)) == frozenset(all_leaves(weights.logits.product.indices))
    if not over or not all_there or is_literal(eqn.invars[1 - place]):
        return None
    return Attended(
        logits=weights.logits,
        values=(eqn.invars[1 - place], tuple(values)),
        contracted=over,
        result=eqn.outvars[0],
        indices=tuple(out),
        shift=weights.shift,
    )


def is_softmax(x: Attended) -> bool:
    """Tells whether the weights are the softmax of the logits over the keys."""
    return x.shift == frozenset([(Symbol("lse", x.logits, x.contracted), -1.0)])
