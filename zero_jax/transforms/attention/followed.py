"""What is known of a value between the product of queries and keys and that with the values, as algebra.

Logits are `scale * product`, perhaps under a soft cap, where a mask holds. A softmax takes numbers off each row and
divides each row by others; all of these are sums of the row's maximum and of its log-sum-exp, so a value is followed as
`logits + shift` or `exp(logits + shift)`. It is a softmax if the shift is minus the log-sum-exp of those very logits.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from zero_jax.transforms.attention.dims import Index, Indices, leaves
from zero_jax.transforms.attention.tables import Term

# What is added to a logit, or stands in its place, to mask it: GPT-2 adds -10,000, in bfloat16 a bit less.
MASKED = -9000.0
# No logit is as low.
LOWEST = -1e30

Operand = tuple[Any, Indices]  # a variable and the indices of its dims


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """A `dot_general` of activations; contracted indices are in both of its operands."""

    eqn: Any
    operands: tuple[Operand, Operand]
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


def plus(first: Sum, second: Sum, factor: float = 1.0) -> Sum:
    """Returns `first + factor * second`."""
    total = dict(first)
    for symbol, value in second:
        total[symbol] = total.get(symbol, 0.0) + factor * value
    return frozenset((symbol, value) for symbol, value in total.items() if value)


def number_of(amount: float) -> Sum:
    """Returns a number as a sum."""
    return plus(frozenset(), frozenset([(ONE, amount)]))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Followed:
    """`logits + shift`, or its exponential, or its product with values; without logits a number of rows."""

    indices: Indices  # the indices of its dims
    logits: Logits | None = None  # the logits
    shift: Sum = frozenset()  # what is added to them, the same for all keys
    is_exp: bool = False  # whether it is an exponential
    values: Operand | None = None  # what the exponential was multiplied with
    contracted: frozenset[Index] = frozenset()  # the indices that were summed over then
    result: Any = None  # the variable of that product
    is_constant: bool = False  # whether it is a constant of the derivative, after a `stop_gradient`

    @property
    def name(self) -> str:
        """What it is to a user."""
        return "the sum of the values" if self.values else "the weights" if self.is_exp else "the logits"

    @property
    def is_weights(self) -> bool:
        """Whether it is `exp(logits + shift)`."""
        return self.is_exp and self.logits is not None and not self.values

    @property
    def is_softmax(self) -> bool:
        """Whether the weights of the values are the softmax of the logits over the keys."""
        return self.shift == frozenset([(Symbol("lse", self.logits, self.contracted), -1.0)])

    @property
    def product(self) -> Product | None:
        """The product of queries and keys that it is made of."""
        all_logits = [self.logits, *(symbol.logits for symbol, _ in self.shift)]
        return next((logits.product for logits in all_logits if logits is not None), None)

    def plus(self, shift: Sum, factor: float = 1.0) -> Followed:
        """Returns `logits + shift`, or its exponential, with a further shift."""
        return dataclasses.replace(self, shift=plus(self.shift, shift, factor))

    def times(self, factor: float) -> Followed | None:
        """Returns `logits + shift` times a number."""
        shift = frozenset((symbol, value * factor) for symbol, value in self.shift)
        if self.logits is None:
            return dataclasses.replace(self, shift=shift)
        logits = self.logits.times(factor)
        if logits is None or any(symbol is not ONE for symbol, _ in self.shift):
            return None
        return dataclasses.replace(self, logits=logits, shift=shift)

    def masked(self, terms: frozenset[Term] | None, fill: float) -> Followed | None:
        """Returns the logits under a mask: what is masked holds `fill`, whatever was taken off the row before."""
        assert self.logits is not None
        if terms is None or (any(symbol is not ONE for symbol, _ in self.shift) and fill > LOWEST):
            return None
        fill -= sum(value for symbol, value in self.shift if symbol is ONE)
        return dataclasses.replace(self, logits=self.logits.masked(terms, fill))

    def dropped(self, terms: frozenset[Term] | None) -> Followed | None:
        """Returns the weights set to 0 where a mask does not hold."""
        assert self.logits is not None
        if terms is None or (terms <= self.logits.terms and self.logits.fill <= MASKED):
            return None if terms is None else self
        return dataclasses.replace(self, logits=self.logits.masked(terms, -math.inf))

    def reduced(self, eqn: Any, kind: str) -> Followed | None:
        """Returns the maximum of logits, or the sum of weights, as a number of each row."""
        axes = {*eqn.params["axes"]}
        over = frozenset(leaves(index for i in axes for index in self.indices[i]))
        if not over:
            return None
        symbol = Symbol(kind, self.logits, over, stopped=self.is_constant)
        rest = tuple(dim for i, dim in enumerate(self.indices) if i not in axes)
        shift = plus(stopped(self.shift) if self.is_constant else self.shift, frozenset([(symbol, 1.0)]))
        return Followed(indices=rest, shift=shift, is_exp=self.is_exp)

    def fits(self, indices: Indices) -> bool:
        """Tells whether this is a number of each row, beside the elements of its row in an array of these indices."""
        if self.logits is not None or len(self.indices) != len(indices):
            return False
        dims = [(leaves(own), leaves(other)) for own, other in zip(self.indices, indices, strict=True)]
        return all(
            all(index.broadcast for index in own)
            or (len(own) == len(other) and all(a is b or a.broadcast for a, b in zip(own, other, strict=True)))
            for own, other in dims
        )


def stopped(shift: Sum) -> Sum:
    """Returns the same numbers as constants of the derivative."""
    return frozenset((symbol if symbol is ONE else dataclasses.replace(symbol, stopped=True), v) for symbol, v in shift)


@dataclasses.dataclass(frozen=True, eq=False)
class RowTest:
    """A condition on the rows of a product's logits that holds always or never where no row is empty."""

    indices: Indices
    holds: bool
    product: Product | None


@dataclasses.dataclass(frozen=True, eq=False)
class Lost:
    """What was logits or weights before an equation that no attention kernel has; `is_core`: after the exponential."""

    reason: str
    is_core: bool
