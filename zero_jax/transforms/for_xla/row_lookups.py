"""Lookups of one element of each row, such as the logit of a target, as comparisons of places on TPUs.

XLA:TPU looks up in arrays in memory, so it writes all logits in float32 for it, twice the bytes of those in bfloat16.
The gradient is a scatter, to another such array, where a device has one example or the rows are numbered, as in
`logits[jnp.arange(n), targets]`. A comparison of places with the index is fused with the sums beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from zero_jax.dims import CASTS, SAME_ELEMENTS, dim_map
from zero_jax.program.dataflow import Dataflow
from zero_jax.program.jaxprs import is_literal, open_jaxpr, source_context
from zero_jax.program.loss import Traced, pass_of
from zero_jax.program.subcalls import CALLS
from zero_jax.program.walk import Rewriting

# What is known of integers: the dim along which each is its own place, as of `jnp.arange`; that of each column of an
# array of indices; "false" of booleans that are; or nothing.
_Known = int | str | tuple[Any, ...] | None


@pass_of({"gather"})
def lookups_by_place(traced: Traced) -> Traced:
    """Transforms `loss_fn(params, batch, ...)` so that TPUs need no array in memory to look up an element of each row.

    The result computes the same values and has the same derivatives. Only lookups of floats change, one in each row, as
    `jnp.take_along_axis(logits, targets[..., None], -1)` and `logits[jnp.arange(n), targets]` make them.
    """
    places = _Places()
    places.run(traced.closed, [None] * len(open_jaxpr(traced.closed)[0].invars))
    return traced.rewritten(_Lookups(places.notes).rewritten(traced.closed))


class _Places(Dataflow[_Known]):
    """Finds the integers that are their own places; notes what is known of the indices of each lookup."""

    enters = CALLS | {"scan", "while", "cond"}

    def constant(self, atom: Any) -> _Known:
        return "false" if is_literal(atom) and atom.val is False else None

    def join(self, first: _Known, second: _Known) -> _Known:
        return first if first == second else None

    def slice_of(self, operand: _Known) -> _Known:
        return None

    def stack_of(self, result: _Known) -> _Known:
        return None

    def operation(self, eqn: Any, operands: list[_Known]) -> list[_Known]:
        if eqn.primitive.name == "gather":
            known = self.notes.get(id(eqn), operands[1])  # a jaxpr may be called several times
            self.notes[id(eqn)] = self.join(known, operands[1])
        return [self.result(eqn, operands)] * len(eqn.outvars)

    def result(self, eqn: Any, operands: list[_Known]) -> _Known:
        """Returns what is known of the result of an equation."""
        name, params, shapes = eqn.primitive.name, eqn.params, [x.aval.shape for x in eqn.invars]
        if name == "iota":
            return params["dimension"]
        known = operands[0] if operands else None
        if name == "select_n" and known == "false":  # of places that count from the end there are none
            return operands[1]
        if name == "concatenate" and params["dimension"] == len(shapes[0]) - 1 and all(x[-1] == 1 for x in shapes):
            return tuple(operands)
        if not isinstance(known, int):
            return None
        if name == "lt" and is_literal(eqn.invars[1]) and eqn.invars[1].val == 0:
            return "false"
        if name in CASTS:
            dtype, last = eqn.outvars[0].aval.dtype, shapes[0][known] - 1
            return known if jnp.issubdtype(dtype, jnp.integer) and last <= jnp.iinfo(dtype).max else None
        return dim_map(eqn).to((0, known)) if name in SAME_ELEMENTS else None


class _Lookups(Rewriting):
    """Evaluates equations, lookups of one element of each row as sums over the rows, of 0 but for that element.

    Args:
      places: what is known of the indices of lookups, by their ids.
    """

    # Traced one by one, they would leave reshapes that do nothing, and sharding constraints with open dims.
    traces_all = True

    def __init__(self, places: dict[int, _Known]):
        super().__init__()
        self.places = places

    def changes(self, eqn: Any) -> bool:
        return eqn.primitive.name == "gather" and _row_lookup(eqn, self.places.get(id(eqn))) is not None

    def changed(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        (rows, indices), mode = values, eqn.params["mode"]
        found = _row_lookup(eqn, self.places.get(id(eqn)))
        assert found is not None  # `changes` says so
        dim, column = found
        # An index as large as the last place, at least: of a smaller type it would wrap.
        index = indices[..., column].astype(jnp.promote_types(indices.dtype, "int32"))
        index, last = index.reshape(*rows.shape[:dim], 1, *rows.shape[dim + 1 :]), rows.shape[dim] - 1
        with source_context(eqn):
            places = lax.expand_dims(lax.iota(index.dtype, last + 1), [i for i in range(rows.ndim) if i != dim])
            clipped = jnp.clip(index, 0, last)
            element = jnp.where(places == clipped, rows, 0).sum(dim, keepdims=True)
            if mode == lax.GatherScatterMode.FILL_OR_DROP:
                fill = eqn.params["fill_value"]
                element = jnp.where(index == clipped, element, jnp.nan if fill is None else fill)
            return [element.astype(rows.dtype).reshape(eqn.outvars[0].aval.shape)]


def _row_lookup(eqn: Any, known: _Known) -> tuple[int, int] | None:
    """Returns the dim of rows, and the column of indices, of a lookup of one float of each row; None of any other.

    The other dims are of rows: those along which indices are mapped, and those of which they are the places (`known`).
    The rows are in the order of the indices.
    """
    (array, indices), numbers = (x.aval for x in eqn.invars), eqn.params["dimension_numbers"]
    of_rows = list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    looked_up = []
    for column, dim in enumerate(numbers.start_index_map):
        along = known[column] if isinstance(known, tuple) else None
        # Along the last dim of indices, which has a column for each dim to look up in, there are no rows.
        if isinstance(along, int) and along < indices.ndim - 1 and indices.shape[along] == array.shape[dim]:
            of_rows.append((dim, along))
        else:
            looked_up.append((dim, column))
    if not of_rows or len(looked_up) != 1 or set(eqn.params["slice_sizes"]) != {1}:
        return None
    dims, of_indices = zip(*sorted(of_rows), strict=True)
    others = [size for dim, size in enumerate(array.shape) if dim not in (*dims, looked_up[0][0])]
    num_rows = math.prod(array.shape[dim] for dim in dims)
    is_of_all = set(others) <= {1} and indices.size == num_rows * indices.shape[-1]
    is_ordered = list(of_indices) == sorted(set(of_indices))
    return looked_up[0] if is_of_all and is_ordered and jnp.issubdtype(array.dtype, jnp.floating) else None
