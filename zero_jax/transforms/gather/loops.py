"""Params that enter a loop: slices of stacks as shards, and what every iteration uses gathered once before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from zero_jax.core.device_put import default_layout
from zero_jax.sharding.mesh import axis_size
from zero_jax.transforms.gather.deferred import Copies, Lazy, Value, as_it_is
from zero_jax.transforms.gather.param_uses import used_whole
from zero_jax.transforms.gather.per_device import only_multiplied

# `walk` is the `GatherWalk` that meets the loop.


def scanned(walk: Any, eqn: Any, values: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the arrays to scan over, those of each value, and what their slices are in the body."""
    arrays: list[Any] = []
    slices: list[Lazy | Value] = []
    for value, var in zip(values, variables, strict=True):
        if isinstance(value, Lazy) and value.dims is not None and not value.dims[0]:
            aval = var.aval.update(dtype=value.aval.dtype)
            sliced = Lazy((), as_it_is, aval, value.path, value.dims[1:], cast=value.cast, formats=value.formats)
            if fetched_by_slice(walk, value):
                arrays.append(value.roots)
                slices.append(dataclasses.replace(sliced, build=value.build, on_host=True))
            else:
                arrays.append((value.build(*value.roots),))
                slices.append(sliced)
        else:
            whole = walk.before(value, eqn, "scan over its sharded dim")
            arrays.append((whole.array,))
            slices.append(whole)
    return arrays, slices


def fetched_by_slice(walk: Any, value: Lazy) -> bool:
    """Tells whether a stack is in host memory, and its slices can be fetched by themselves."""
    if not value.on_host or value.depth:
        return False
    mesh, stack = walk.options.mesh, value.roots[0]
    shape = [size // axis_size(mesh, axes) for size, axes in zip(stack.shape, value.dims or (), strict=True)]
    # XLA:TPU fetches slices along a dim that is not one of the two of a tile, which are last in memory.
    return len(shape) > 2 and default_layout(mesh.devices.flat[0], shape, stack.dtype)[0] == 0


def hoisted(walk: Any, eqn: Any, values: Sequence[Any], jaxpr: Any, length: int) -> list[Lazy | Value]:
    """Decides which loop-invariant params are gathered once before the loop rather than in every iteration."""
    invariant = [
        isinstance(value, Lazy) and value.is_deferred and used_whole(jaxpr, var)
        for value, var in zip(values, jaxpr.invars, strict=False)
    ]
    num_bytes = sum(v.aval.size * v.aval.dtype.itemsize for v, used in zip(values, invariant, strict=True) if used)
    hoisted = length > 1 and (num_bytes <= walk.options.max_hoisted_bytes or walk.options.stored_whole)
    num_blocks = axis_size(walk.options.mesh, walk.options.axes.batch)
    consts: list[Lazy | Value] = []
    for value, used, var in zip(values, invariant, jaxpr.invars, strict=False):
        if not (used and hoisted):
            consts.append(value)
            continue
        walk.notes.gather(value, eqn, f"once before {length} iterations that use it", early=False)
        if value.is_shard and not walk.options.mapped and only_multiplied(jaxpr, var, walk.batch_sizes, num_blocks):
            consts.append(Copies(value.widened(walk.copies(value)), pure=True))
        elif walk.options.product_dtype is None:
            consts.append(Value(walk.whole(value, *value.roots), pure=True))
        else:
            # As wide as the loop uses it: that is what its gradients are summed in over the iterations.
            root = walk.whole(value, *value.roots)
            consts.append(Lazy((root,), as_it_is, jax.typeof(root), value.path, ((),) * root.ndim))
    return consts
