"""How a value of a batch relates to those of equal parts of the batch, and an operation as traced on both (`Pair`)."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.program.jaxprs import bind, of_some
from zero_jax.program.subcalls import Subcall, subcall


class Refused(Exception):
    """Says why the relation of a result is not known."""


def check(holds: bool, why: str = "mixed") -> None:
    """Refuses what does not hold."""
    if not holds:
        raise Refused(why)


class Kind(enum.Enum):
    """The relations."""

    SAME = "each part has the value of the whole"  # as a param
    ROWS = "each part has its block of the whole, along a dim"  # as the logits
    SUM = "the values of the parts add up to the value of the whole"  # as `losses.sum()`
    MAX = "the whole has the largest of the values of the parts, element by element: of booleans, any"
    MIN = "the whole has the smallest of the values of the parts, element by element: of booleans, all"
    POSITIONS = "counts from 0 along a dim, in a part as in the whole"  # as `jnp.arange(len(x))`
    COLUMNS = "indices whose columns have relations of their own"
    UNKNOWN = "not known, or none of these"


EXTREMA = frozenset({Kind.MAX, Kind.MIN})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relation:
    """The relation of one value on the whole batch to its values on the parts.

    `kind` relates the value of the whole to those of the n parts, scaled by `n ** -power`: a param is SAME, the logits
    of examples are ROWS, their sum is a SUM, and that sum over the batch size (a mean) is a SUM with power 1.
    """

    kind: Kind
    dim: Any = None  # the dim of examples, for ROWS and POSITIONS
    power: Fraction = Fraction(0)  # the exponent of the number of parts
    of_params: bool = False  # whether the value depends on the params
    is_false: bool = False  # whether a value is False everywhere
    number: float | None = None  # the number that the value is everywhere, if known
    repeats: int = 1  # how often each place is there before the next, for POSITIONS: as `jnp.repeat(positions, 4)`
    columns: tuple[Relation, ...] = ()  # the relations of the columns, for COLUMNS
    # Of ROWS, how many batches are behind one another along the dim, as in `jnp.concatenate([chosen, rejected])`; 0
    # where all rows are the same, or random, so that they are of any number
    batches: int = 1
    # Why it is UNKNOWN; for MAX, MIN and several batches, why the loss on parts may be another one
    why: str = ""

    @property
    def is_plain(self) -> bool:
        """Tells whether a part has exactly what the whole has, there where it has it: any function may be applied."""
        return self.kind in (Kind.SAME, Kind.ROWS) and not self.power

    @property
    def is_rows(self) -> bool:
        """Tells whether a part has examples of its own."""
        return self.kind is Kind.ROWS

    def agrees(self, other: Relation) -> bool:
        """Tells whether another relation says the same of a value, but for what it was made of."""
        are_as_many = self.batches == other.batches or 0 in (self.batches, other.batches)
        are_as_many &= self.repeats == other.repeats
        return are_as_many and (self.kind, self.dim, self.power) == (other.kind, other.dim, other.power)

    def of_elements(self) -> Relation:
        """Returns the relation of something made of the elements of this value, each by itself."""
        several = {"batches": self.batches, "why": self.why} if self.batches > 1 else {}
        return Relation(kind=self.kind, dim=self.dim, power=self.power, **several)

    def at(self, dim: int | None) -> Relation:
        """Returns the relation with the examples along another dim."""
        return dataclasses.replace(self, dim=dim)


SAME = Relation(kind=Kind.SAME)


def rows(dim: int, power: Fraction = Fraction(0)) -> Relation:
    """Returns the relation of a value with examples along a dim."""
    return Relation(kind=Kind.ROWS, dim=dim, power=power)


def unknown(why: str) -> Relation:
    """Returns the relation of a value that is not known."""
    return Relation(kind=Kind.UNKNOWN, why=why)


def constant_rows(whole: np.ndarray, part: np.ndarray, num_parts: int) -> Relation | None:
    """Returns the relation of constants as long as the batch and a part: equal rows, or places; None of any other.

    So are `np.zeros((len(x), 8))` and `np.arange(len(x))` of a loss function.
    """
    grows = [dim for dim, sizes in enumerate(zip(whole.shape, part.shape, strict=False)) if sizes[0] != sizes[1]]
    if whole.ndim != part.ndim or len(grows) != 1 or whole.dtype != part.dtype or not part.size:
        return None
    (dim,), kind = grows, whole.dtype.kind
    first, both = np.moveaxis(part, dim, 0)[0], [np.moveaxis(x, dim, 0) for x in (whole, part)]
    if len(both[0]) != len(both[1]) * num_parts:
        return None
    if all(np.array_equal(x, np.broadcast_to(first, x.shape), equal_nan=kind in "fc") for x in both):
        number = float(first.flat[0]) if kind in "biuf" and bool((first == first.flat[0]).all()) else None
        # Of places, which NumPy compares with 0 itself: none counts from the end.
        return dataclasses.replace(rows(dim), batches=0, number=number, is_false=kind == "b" and number == 0)
    if kind not in "iu":
        return None
    repeats = max(1, len(both[0]) // max(1, int(whole.max()) + 1))
    places = [(np.arange(len(x)) // repeats).reshape(-1, *[1] * first.ndim) for x in both]
    are_places = all(np.array_equal(x, np.broadcast_to(y, x.shape)) for x, y in zip(both, places, strict=True))
    return Relation(kind=Kind.POSITIONS, dim=dim, repeats=repeats) if are_places else None


def applied(inputs: Sequence[Relation]) -> Relation:
    """Returns the relation of any function of single elements of plain values of an example; raises `Refused` else."""
    dims = {x.dim for x in inputs if x.kind is Kind.ROWS}
    check(all(x.is_plain for x in inputs) and len(dims) < 2)
    return rows(dims.pop()) if dims else SAME


def joined(one: Relation, other: Relation) -> Relation:
    """Returns the relation of a sum, or of a value that is either by a choice that is the same; or raises `Refused`."""
    if not one.batches or not other.batches:  # rows that are all the same
        one, other = (
            dataclasses.replace(x, batches=x.batches or y.batches or 1, why=x.why or y.why)
            for x, y in ((one, other), (other, one))
        )
    if one.agrees(other) and one.kind in (Kind.SAME, Kind.ROWS, Kind.SUM):
        return one.of_elements()
    for x, y in ((one, other), (other, one)):
        if x.number == 0 and y.kind in (Kind.SAME, Kind.ROWS, Kind.SUM):
            is_spread = x.kind is Kind.ROWS and y.kind is Kind.SAME
            return dataclasses.replace(y.of_elements(), kind=Kind.ROWS, dim=x.dim) if is_spread else y.of_elements()
        if x.kind is Kind.SAME and x.is_plain:
            # All rows have the term, or all parts of a mean: the mean of what they have with it is the mean with it.
            if y.is_plain or (y.kind is Kind.SUM and y.power == 1):
                return y.of_elements()
    raise Refused("mixed")


def multiplied(one: Relation, other: Relation) -> Relation:
    """Returns the relation of a product; raises `Refused` if there is none."""
    kinds = {one.kind, other.kind}
    check(kinds <= {Kind.SAME, Kind.ROWS} or kinds == {Kind.SAME, Kind.SUM})
    check(kinds != {Kind.ROWS} or one.dim == other.dim)
    main = other if one.kind is Kind.SAME else one
    return Relation(
        kind=main.kind,
        dim=main.dim,
        power=one.power + other.power,
        number=0 if 0 in (one.number, other.number) else None,
    )


def divided(above: Relation, below: Relation) -> Relation:
    """Returns the relation of a quotient; raises `Refused` if there is none."""
    check(below.kind is not Kind.SUM)
    return multiplied(above, dataclasses.replace(below, power=-below.power, number=None))


def shared(x: Relation, power: Fraction) -> Relation | None:
    """Returns the relation of a part's share of what is the same in all parts, or of a sum; None if `x` is neither.

    The share is the value times `n ** (power - 1)`, or `n ** (power - x.power)` for a sum.
    """
    is_same = x.kind is Kind.SAME and x.is_plain and x.number != 0
    is_other = x.kind is Kind.SUM and x.power != power
    return dataclasses.replace(x, kind=Kind.SUM, power=power, number=None) if is_same or is_other else None


def all_joined(inputs: Sequence[Relation]) -> Relation:
    """Returns the relation of a value whose elements are of several values."""
    return functools.reduce(joined, inputs)


def dual(x: Relation, power: int) -> Relation:
    """Returns the relation of the cotangent of a value; raises `Refused` if there is none.

    `power` is 1 if the mean of the losses of parts is derived, 0 if the loss of the whole is.
    """
    kinds = {Kind.ROWS: Kind.ROWS, Kind.SAME: Kind.SUM, Kind.SUM: Kind.SAME}
    check(x.kind in kinds and x.batches < 2)
    # A value that is scaled by `n ** -power` has a cotangent by `n ** power`; of the mean a part has an n-th.
    return Relation(kind=kinds[x.kind], dim=x.dim if x.kind is Kind.ROWS else None, power=power - x.power)


Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """An equation as traced on the whole batch, and the same one as traced on a part."""

    whole: Any
    part: Any

    @property
    def both(self) -> tuple[Any, Any]:
        """The equation on the whole batch, and on a part."""
        return self.whole, self.part

    @property
    def params(self) -> Any:
        """The parameters on the whole batch; those that differ on a part are compared by the rules (`SIZED`)."""
        return self.whole.params

    def shapes(self, i: int) -> tuple[Shape, Shape]:
        """The shapes of an input, on the whole batch and on a part."""
        return self.whole.invars[i].aval.shape, self.part.invars[i].aval.shape

    def results(self, i: int = 0) -> tuple[Shape, Shape]:
        """The shapes of a result, on the whole batch and on a part."""
        return self.whole.outvars[i].aval.shape, self.part.outvars[i].aval.shape

    def subcalls(self) -> tuple[Subcall, Subcall]:
        """The jaxprs that the equation runs, on the whole batch and on a part."""
        whole, part = subcall(self.whole), subcall(self.part)
        assert whole is not None and part is not None
        return whole, part

    def growing(self) -> int | None:
        """Returns the dim of the result that is larger on the whole batch; None if there is none."""
        found = [i for i, (a, b) in enumerate(zip(*self.results(), strict=True)) if a != b]
        check(len(found) < 2, "sized")
        return found[0] if found else None


Rule = Callable[[Pair, Sequence[Relation]], list[Relation]]


def aval(atom: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an input or a result."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def floating(atoms: Sequence[Any]) -> list[int]:
    """Returns the places of the floating ones."""
    return [i for i, atom in enumerate(atoms) if jnp.issubdtype(atom.aval.dtype, jnp.inexact)]


def floating_results(eqn: Any, values: Sequence[Any], which: Sequence[int]) -> Callable[..., list[Any]]:
    """Returns an equation as a function of some of its inputs, to its floating results."""

    def results(*values: Any) -> list[Any]:
        made = bind(eqn, values)
        return [made[i] for i in floating(eqn.outvars)]

    return of_some(results, values, which)
