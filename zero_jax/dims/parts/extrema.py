"""What operations make of the largest or the smallest of the values of examples: monotone ones keep it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from zero_jax.dims.parts.pair import Pair, check
from zero_jax.dims.parts.relations import EXTREMA, Kind, Relation
from zero_jax.dims.parts.rules import KEEPS
from zero_jax.dims.primitives import BY_INDEX, JOINS, MOVES, is_float, known_primitives

# Of one operand; of several that are the same extremum, or are the same in all parts; of one that is an extremum.
_INCREASING = frozenset(name for name, known in known_primitives().items() if known.increases)
_OF_ALL = {Kind.MAX: frozenset({"max", "or"}), Kind.MIN: frozenset({"min", "and"})}
_OF_ONE = frozenset({"max", "min", "or", "and", "add", "add_any", "clamp"})
_REDUCTIONS = {Kind.MAX: frozenset({"reduce_max", "reduce_or"}), Kind.MIN: frozenset({"reduce_min", "reduce_and"})}
_FLIPPED = {Kind.MAX: Kind.MIN, Kind.MIN: Kind.MAX}


def of_extrema(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    """Returns the relations of the results of an operation on extrema.

    Raises:
      Refused: it is not monotone.
    """
    name, found = pair.whole.primitive.name, [x for x in inputs if x.kind in EXTREMA]
    check(all(x.kind is found[0].kind for x in found))
    check(all(x.kind in EXTREMA or (x.kind is Kind.SAME and x.is_plain) for x in inputs))
    made = Relation(kind=found[0].kind, why=found[0].why)
    if not _keeps(name, pair, inputs, found):
        check(_flips(name, pair, inputs))
        made = dataclasses.replace(made, kind=_FLIPPED[made.kind])
    return [made] * len(pair.whole.outvars)


def _keeps(name: str, pair: Pair, inputs: Sequence[Relation], found: Sequence[Relation]) -> bool:
    kind, is_one, first = found[0].kind, len(found) == 1, inputs[0].kind in EXTREMA
    before, after = pair.whole.invars[0].aval, pair.whole.outvars[0].aval
    if name in KEEPS:
        grows = (
            before.dtype.kind in "biu" and after.dtype.kind in "iu" and after.dtype.itemsize >= before.dtype.itemsize
        )
        is_ordered = (
            before.dtype == after.dtype or is_float(after) or (before.dtype.kind in ("b", after.dtype.kind) and grows)
        )
        return is_ordered and (name == "zero_join" or pair.growing() is None)
    if name in ("or", "and", "reduce_or", "reduce_and") and before.dtype != bool:
        return False
    if name in ("mul", "div"):
        positive = [x.number is not None and x.number > 0 for x in inputs]
        return is_one and (positive[1] or (name == "mul" and positive[0]))
    of_one = name in _OF_ONE or (first and name in ("sub", "gt", "ge")) or (not first and name in ("lt", "le"))
    return name in _INCREASING | _OF_ALL[kind] | _REDUCTIONS[kind] | (MOVES | JOINS) - BY_INDEX or (is_one and of_one)


def _flips(name: str, pair: Pair, inputs: Sequence[Relation]) -> bool:
    first, is_one = inputs[0].kind in EXTREMA, sum(x.kind in EXTREMA for x in inputs) == 1
    if name == "not":
        return pair.whole.outvars[0].aval.dtype == bool
    decreases = (first and name in ("lt", "le")) or (not first and name in ("sub", "gt", "ge"))
    return name == "neg" or (is_one and decreases)
