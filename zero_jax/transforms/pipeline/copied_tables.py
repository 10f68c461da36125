"""Params that examples are looked up in, with a copy for each stage: gradients are summed over stages once."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.dims import dim_map
from zero_jax.program import jaxprs
from zero_jax.transforms.facts import param_uses
from zero_jax.transforms.pipeline.cut import MOVED_WHOLE, Stages
from zero_jax.transforms.pipeline.place import StagePlace


def looked_up(jaxpr: Any, params: Collection[Any], stages: Stages) -> set[Any]:
    """Returns the params that examples are looked up in, and that each stage is to have a copy of."""
    lookups = [eqn for eqn in jaxpr.eqns if _takes_rows(eqn) and eqn.invars[0] in params]
    return {x.invars[0] for x in lookups if _are_many(x, stages) or _is_multiplied(jaxpr, x.invars[0])}


@dataclasses.dataclass(frozen=True, eq=False)
class CopiedTable:
    """A param that examples are looked up in, and a copy of it for each stage, `[stages, ...]`.

    The gradients of all uses of the copies are summed over stages once. Of one array XLA:TPU would all-reduce those of
    many lookups, move the rows of few, and sum those of products, as of a head that is the table, by themselves.
    """

    array: jax.Array
    copies: jax.Array
    place: StagePlace
    num_examples: int

    @classmethod
    def of(cls, array: jax.Array, place: StagePlace, num_examples: int) -> CopiedTable:
        """Returns a param with its copies."""
        copies = jnp.broadcast_to(array, (place.num_stages, *array.shape))
        return cls(array, place.pinned(copies, place.pipe), place, num_examples)

    def moved(self, eqn: Any) -> CopiedTable:
        """Returns the table with its elements elsewhere, or of another dtype."""
        (array,) = jaxprs.bind(eqn, [self.array])
        copies = jaxprs.bind_mapped(eqn, [self.copies], (0,), spmd_axis_name=self.place.pipe)
        return dataclasses.replace(self, array=array, copies=copies)

    def used(self, eqn: Any, values: Sequence[Any]) -> jax.Array | None:
        """Returns the result of a lookup or a product, on each stage by its copy; None where that is not possible.

        That is where the leading dim of the result is that of the other operand, of examples or of rows of them, which
        divide over stages.
        """
        (other,) = (i for i, x in enumerate(values) if x is not self)
        place, num_stages, (shape,) = self.place, self.place.num_stages, (x.aval.shape for x in eqn.outvars)
        is_of_examples = bool(shape) and shape[0] % self.num_examples == 0 and self.num_examples % num_stages == 0
        if not is_of_examples or (shape[0] > self.num_examples and len(shape) > 2):  # of a sequence, perhaps
            return None
        if dim_map(eqn).kept[0] != ((other, 0),):
            return None
        x = values[other]
        operands = [self.copies, place.pinned(x.reshape(num_stages, -1, *x.shape[1:]), place.pipe)]
        operands = operands if other == 1 else operands[::-1]
        result = jaxprs.bind_mapped(eqn, operands, (0, 0), spmd_axis_name=place.pipe)
        return place.pinned(result.reshape(shape), place.pipe)


def array_of(value: Any) -> Any:
    """Returns the array of a value, which may be such a table."""
    return value.array if isinstance(value, CopiedTable) else value


def _takes_rows(eqn: Any) -> bool:
    """Tells whether an equation looks whole rows of a table up."""
    if eqn.primitive.name != "gather":
        return False
    table, kept = eqn.invars[0].aval, dim_map(eqn).kept
    columns = [dims for dims in kept if not dims or dims[0][0] == 0]
    return columns == [((0, i),) for i in range(1, table.ndim)] and kept[:1] == (((1, 0),),)


def _are_many(eqn: Any, stages: Stages) -> bool:
    """Tells whether a lookup is of as many rows on each stage as the table has: else XLA:TPU moves them, not a sum."""
    return eqn.outvars[0].aval.size >= stages.num_stages * eqn.invars[0].aval.size


def _is_multiplied(jaxpr: Any, table: Any) -> bool:
    """Tells whether an input is an operand of a product, as it is or transposed: that has a sum over stages."""
    uses, _ = param_uses(jaxpr, table, forms=MOVED_WHOLE, enters=frozenset({"call"}))
    return any(eqn.primitive.name == "dot_general" for eqn, _ in uses)
