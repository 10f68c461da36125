"""Lookups in a sharded table: either the rows move between devices, or the table does.

XLA makes an all-reduce of the gradient of a plain lookup, a scatter-add of every device's tokens into a whole table.
Here it is a reduce-scatter in effect, whichever way is taken. A table may also be sharded over axes of the model: by
its rows (each device then looks up what it has, and XLA sums over those axes) or by its features.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from zero_jax.program.jaxprs import bind
from zero_jax.sharding.chains import Chain, reshard
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.precision import wide
from zero_jax.sharding.spec import Dims, carries, move_steps, named, without
from zero_jax.sharding.spec import num_shards as num_shards_of
from zero_jax.transforms.gather.per_device import split_dim
from zero_jax.transforms.weight_grads import product, summed_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupPlan:
    """How a lookup is made on a mesh, for a table sharded as `dims`."""

    mesh: Mesh
    axes: Axes
    dims: Dims
    feature: int | None  # the dim of the table that is sharded when rows move; None where the table moves
    out_feature: int  # that dim in the result
    row: int  # the dim of examples in the indices
    out_row: int  # and in the result


def plan_lookup(eqn: Any, dims: Dims, *, mesh: Mesh, axes: Axes, batch_sizes: frozenset[int]) -> LookupPlan | None:
    """Plans a lookup (a `gather` equation), or returns None where it is not one of examples in a table.

    Moving rows costs examples x features, there and back; moving the table, the first input, which is sharded as
    `dims`, costs its size, there and back. `batch_sizes` tell the dim of examples in the result.
    """
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    table, indices, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    if numbers.operand_batching_dims or carries(without(dims, axes.data), axes.replica):
        return None
    row_dims = [i for i in range(out.ndim) if i not in numbers.offset_dims]  # of the result, those of the indices
    num_shards = axis_size(mesh, axes.batch)
    rows = [i for i, dim in enumerate(row_dims) if out.shape[dim] in batch_sizes and out.shape[dim] % num_shards == 0]
    if not rows:
        return None
    # Dims of a slice, of which all is taken: a table may be sharded along one of them, by all axes of `data`.
    slice_dims = [i for i in range(table.ndim) if i not in numbers.collapsed_slice_dims]
    columns = {i: [dims, *move_steps(dims, i, axes.data)][-1][i] for i in slice_dims if sizes[i] == table.shape[i]}
    features = [
        i
        for i, column_axes in columns.items()
        if set(axes.data) <= set(column_axes) and table.shape[i] % axis_size(mesh, column_axes) == 0
    ]
    num_moved = out.size // num_shards + indices.size  # features one way, indices the other
    num_gathered = table.size // num_shards_of(mesh, without(dims, axes.data))  # axes of the model shard it still
    feature = max(features, key=lambda i: table.shape[i]) if features and num_moved < num_gathered else None
    return LookupPlan(
        mesh=mesh,
        axes=axes,
        dims=dims,
        feature=feature,
        out_feature=-1 if feature is None else numbers.offset_dims[slice_dims.index(feature)],
        row=rows[0],
        out_row=row_dims[rows[0]],
    )


def move_rows(
    eqn: Any, plan: LookupPlan, table: jax.Array, indices: jax.Array, *, stored_unsharded: bool, is_wide: bool
) -> jax.Array:
    """Looks all indices up in each device's share of the features, then turns features into examples by all-to-alls.

    The indices are sharded over examples. Of a table that is `stored_unsharded` only the gradient is sharded. If
    `is_wide`, a device sums the gradient of its share in float32.
    """
    assert plan.feature is not None
    mesh, data, replica = plan.mesh, plan.axes.data, plan.axes.replica
    # Of the table, from its own sharding to one of its features; of the result, from features to examples.
    columns = [plan.dims, *move_steps(plan.dims, plan.feature, data)]
    looked_up: list[tuple[str, ...]] = [()] * eqn.outvars[0].aval.ndim
    looked_up[plan.out_feature] = columns[-1][plan.feature]  # all of `data`, in some order
    looked_up[plan.out_row] = replica
    rows = [tuple(looked_up), *_to_rows(tuple(looked_up), plan.out_row, data)]
    to_columns, to_rows = (tuple(named(mesh, dims) for dims in steps) for steps in (columns, rows))
    # The first is how the table is sharded: without it, XLA calls what it moves by the cast before.
    table = reshard(
        table, forward=Chain(() if stored_unsharded else to_columns), backward=Chain(tuple(reversed(to_columns)))
    )
    index_dims = tuple(replica if i == plan.row else () for i in range(indices.ndim))
    everywhere = named(mesh, index_dims)
    if stored_unsharded:
        own = named(mesh, tuple(replica + tuple(data) if i == plan.row else () for i in range(indices.ndim)))
        dtype = wide(table.dtype) if is_wide else table.dtype
        return _look_up_own(eqn, table, indices, own=own, everywhere=everywhere, to_rows=to_rows, dtype=dtype)
    out = _looked_up(eqn, table, jax.lax.with_sharding_constraint(indices, everywhere), is_wide=is_wide)
    # The backward pass pins examples first, or the sharding of the features spreads through the entire model.
    return reshard(out, forward=Chain(to_rows), backward=Chain(tuple(reversed(to_rows))))


def _look_up_own(
    eqn: Any,
    table: jax.Array,
    indices: jax.Array,
    *,
    own: NamedSharding,
    everywhere: NamedSharding,
    to_rows: tuple[NamedSharding, ...],
    dtype: Any,
) -> jax.Array:
    """Looks a device's own indices up in the whole table; its gradient is summed over all indices, feature by feature.

    The transpose of the lookup itself would be of the device's own indices too: a whole table to reduce.
    """
    shape = jax.typeof(table)

    def look_up(table: jax.Array, indices: jax.Array) -> jax.Array:
        # XLA makes both of one copy of the indices, and looks all of them up, unless something stands between.
        indices = jax.lax.optimization_barrier(jax.lax.with_sharding_constraint(indices, own))
        return jax.lax.with_sharding_constraint(bind(eqn, [table, indices])[0], to_rows[-1])

    def forward(table: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        return look_up(table, indices), indices

    def backward(indices: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
        all_indices = jax.lax.with_sharding_constraint(indices, everywhere)
        columns = reshard(cotangent, forward=Chain(tuple(reversed(to_rows))), backward=Chain(to_rows))
        transpose = jax.linear_transpose(lambda t: bind(eqn, [t, all_indices])[0], shape.update(dtype=dtype))
        return transpose(columns.astype(dtype))[0].astype(shape.dtype), None

    differentiated = jax.custom_vjp(look_up)
    differentiated.defvjp(forward, backward)
    return differentiated(table, indices)


def move_table(eqn: Any, plan: LookupPlan, copies: jax.Array, indices: jax.Array, *, is_wide: bool) -> jax.Array:
    """Looks each device's indices up in its own copy of the whole table; gradients are summed shard by shard.

    If `is_wide`, a device sums its own in float32 before.
    """
    split = split_dim(indices, plan.row, copies.shape[0])
    mapped = jax.vmap(functools.partial(_looked_up, eqn, is_wide=is_wide), (0, plan.row), plan.out_row)
    return mapped(copies, split).reshape(eqn.outvars[0].aval.shape)


def _looked_up(eqn: Any, table: jax.Array, indices: jax.Array, *, is_wide: bool) -> jax.Array:
    """Evaluates a lookup; if `is_wide`, its gradient is summed in float32, and rounded to the dtype of the table.

    In bfloat16 the sum of some hundred cotangents of one row, as of a token that is often there, stays where it is.
    """
    if not is_wide:
        return bind(eqn, [table, indices])[0]
    return product(eqn, [table, indices], 0, summed_in(table, wide(table.dtype)))


def _to_rows(start: Dims, row: int, data: Sequence[str]) -> list[Dims]:
    """Returns the specs from features over `data` to examples over `data`, by axis where their order allows.

    Features that an axis of the model cuts as well are whole in the last one.
    """
    by_axis = move_steps(start, row, tuple(reversed(data)))
    goal = tuple((*dim, *data) if i == row else () for i, dim in enumerate(start))
    if not by_axis or by_axis[-1][row] != goal[row]:
        return [goal]
    return by_axis if by_axis[-1] == goal else [*by_axis, goal]
