"""Lookups in a sharded table that move the rows between devices rather than the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from zero_jax.mesh import Axes, axis_size
from zero_jax.spec import Dims, carries, move_steps, without


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupPlan:
    """The specs that a lookup takes table, indices and result through."""

    columns: tuple[Dims, ...]  # of the table: from its own sharding to features over `data`
    rows: tuple[Dims, ...]  # of the result, from features over `data` to examples over `data`
    indices: Dims


def plan_lookup(eqn: Any, dims: Dims, *, mesh: Mesh, axes: Axes, batch_sizes: frozenset[int]) -> LookupPlan | None:
    """Plans a lookup in a sharded table (a `gather` equation), or returns None where the table should move.

    Moving rows costs examples x features, both ways; gathering the table costs its size. Each device looks all tokens
    up in its share of the features, and all-to-alls turn shares of features into shares of examples.

    Args:
      eqn: the equation; its first input is the table.
      dims: how the table is sharded.
      mesh: the mesh.
      axes: the roles of its axes.
      batch_sizes: the sizes that tell the dim of examples in the result.
    """
    data, batch = axes.data, axes.batch
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    table, indices, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    if numbers.operand_batching_dims or carries(without(dims, data), mesh.axis_names):
        return None
    shape, num_shards = table.shape, axis_size(mesh, data)
    kept = [i for i in range(len(shape)) if i not in numbers.collapsed_slice_dims]
    features = [i for i in kept if sizes[i] == shape[i] and shape[i] % num_shards == 0]
    row_dims = [i for i in range(out.ndim) if i not in numbers.offset_dims]
    batched = [i for i, dim in enumerate(row_dims) if out.shape[dim] in batch_sizes]
    batched = [i for i in batched if out.shape[row_dims[i]] % axis_size(mesh, batch) == 0]
    if not features or not batched:
        return None
    num_moved = 2 * out.size // axis_size(mesh, batch) + 2 * indices.size  # features one way, indices the other
    if num_moved >= 2 * table.size:
        return None
    feature, row = max(features, key=lambda i: shape[i]), batched[0]
    out_feature, out_row = numbers.offset_dims[kept.index(feature)], row_dims[row]
    columns = [dims, *move_steps(dims, feature, data)]
    # The table has no other axes (above), so its features now carry all of `data`, in some order.
    start: list[tuple[str, ...]] = [()] * out.ndim
    start[out_feature] = columns[-1][feature]
    start[out_row] = axes.replica
    rows = [tuple(start), *_to_rows(tuple(start), out_row, data)]
    index_dims = tuple(axes.replica if i == row else () for i in range(indices.ndim))
    return LookupPlan(columns=tuple(columns), rows=tuple(rows), indices=index_dims)


def _to_rows(start: Dims, row: int, data: Sequence[str]) -> list[Dims]:
    """Returns the specs from features over `data` to examples over `data`, by axis where their order allows."""
    by_axis = move_steps(start, row, tuple(reversed(data)))
    goal = tuple((*dim, *data) if i == row else () for i, dim in enumerate(start))
    return by_axis if by_axis[-1] == goal else [goal]
