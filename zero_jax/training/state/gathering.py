"""The params of stages that do not shard them: copies of the master params, gathered after an update."""

from __future__ import annotations

import collections
import dataclasses
import math

import jax
from jax import lax

from zero_jax.core.tree import PyTree
from zero_jax.sharding.chains import Chain, gather_scope, gather_shardings, reshard
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.precision import cast_floating
from zero_jax.sharding.quantized import blocks_of_leaf
from zero_jax.sharding.rules import LeafPlacement
from zero_jax.training.state.placement import Placement

# Whole params above this size are gathered in parts.
_GATHERED_AT_ONCE_BYTES = 1 << 26


def gathered_params(placement: Placement, masters: PyTree, *, into: PyTree) -> PyTree:
    """Gathers params one mesh axis at a time, in the narrower dtype, written over the old params `into`.

    Large stacks of layers are gathered layer by layer into the params that they replace, as XLA:TPU would otherwise
    hold a full stack beside them; those that are sharded along the layers in as many parts of features. Stacks of
    equally many parts share a loop, so that several gathers run at once.
    """
    mesh, param_axes = placement.mesh, placement.axes_of_group("params")
    dtype = placement.precision.param if placement.keeps_copy else None
    if axis_size(mesh, [axis for axis in placement.axes_of_group("master") if axis not in param_axes]) == 1:
        return cast_floating(masters, dtype)  # nothing to gather: stage 0, or one device
    leaves = jax.tree.leaves(lax.with_sharding_constraint(masters, placement.param_shardings("master")))
    placed = [dataclasses.replace(x, dims=x.update_dims or x.dims) for x in jax.tree.leaves(placement.params)]
    gathered, stacks = list(jax.tree.leaves(into)), collections.defaultdict(list)
    for i, (leaf, x) in enumerate(zip(placed, leaves, strict=True)):
        at = _dim_of_parts(leaf)
        num_parts = 1 if at is None else math.gcd(x.shape[0], x.shape[at])  # the layers, where `at` is their dim
        if num_parts > 1 and gathered[i].nbytes > _GATHERED_AT_ONCE_BYTES:
            stacks[num_parts].append(i)
        else:
            gathered[i] = _gather_leaf(placement, leaf, cast_floating(x, dtype))
    for num_parts, indices in stacks.items():

        def gather_parts(number: jax.Array, params: list[jax.Array]) -> list[jax.Array]:
            new = []
            for i, param in zip(indices, params, strict=True):  # noqa: B023 - called in this iteration
                at, x = _dim_of_parts(placed[i]), leaves[i]
                assert at is not None
                size = x.shape[at] // num_parts  # noqa: B023
                part = cast_floating(lax.dynamic_slice_in_dim(x, number * size, size, at), param.dtype)
                part = _gather_leaf(placement, placed[i], part)
                new.append(lax.dynamic_update_slice_in_dim(param, part, number * size, at))
            return new

        # Two parts at a time: while one is written, the other is gathered.
        stacked = lax.fori_loop(0, num_parts, gather_parts, [gathered[i] for i in indices], unroll=2)
        for i, x in zip(indices, stacked, strict=True):
            gathered[i] = x
    return jax.tree.unflatten(jax.tree.structure(masters), gathered)


def _gather_leaf(placement: Placement, leaf: LeafPlacement, x: jax.Array) -> jax.Array:
    mesh, param_axes = placement.mesh, placement.axes_of_group("params")
    not_over = (*param_axes, *leaf.pipe)  # the result is sharded over these
    steps = gather_shardings(mesh, leaf.dims, [axis for axis in placement.axes.data if axis not in not_over])
    # A secondary shard is made at full precision: its own gathers, one for each use, are quantized.
    quantize = None if param_axes else placement.quantize
    coding = blocks_of_leaf(quantize, "gathers", leaf, mesh=mesh, shape=x.shape)
    with gather_scope(leaf.path):
        return reshard(x, forward=Chain(steps, barrier=True, coding=coding), backward=Chain())


def _dim_of_parts(leaf: LeafPlacement) -> int | None:
    """Returns the dim along which a stack of layers is gathered in parts: one that is not sharded; None for others."""
    unsharded = [i for i, axes in enumerate(leaf.dims) if not axes] if len(leaf.shape) > 2 else []
    return next((i for i in unsharded if i == 0 or leaf.update_dims is not None), None)
