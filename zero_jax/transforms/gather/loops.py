"""Params that enter a loop: slices of stacks as shards, and what every iteration uses gathered once before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from zero_jax.core.device_put import default_layout
from zero_jax.program.jaxprs import open_jaxpr
from zero_jax.program.subcalls import Subcall
from zero_jax.sharding.mesh import axis_size
from zero_jax.transforms.gather.deferred import Copies, Lazy, Value, as_it_is
from zero_jax.transforms.gather.param_uses import used_whole
from zero_jax.transforms.gather.per_device import only_multiplied

# `walk` is the `GatherWalk` that meets the loop.


def sliced(walk: Any, value: Lazy | Value, aval: Any, eqn: Any) -> Lazy | Value:
    """Returns a value as its slices are in a scan, made of stacks; `aval` is that of a slice."""
    if not isinstance(value, Lazy) or value.dims is None or value.dims[0]:
        return walk.before(value, eqn, "scan over its sharded dim")
    if not fetched_by_slice(walk, value):
        value = value.as_root()
    aval = aval.update(dtype=value.aval.dtype)
    return dataclasses.replace(value, aval=aval, dims=value.shard[1:], depth=0)


def fetched_by_slice(walk: Any, value: Lazy) -> bool:
    """Tells whether a stack is in host memory, and its slices can be fetched by themselves."""
    if not value.on_host or value.depth:
        return False
    mesh, stack = walk.options.mesh, value.roots[0]
    shape = [size // axis_size(mesh, axes) for size, axes in zip(stack.shape, value.shard, strict=True)]
    # XLA:TPU fetches slices along a dim that is not one of the two of a tile, which are last in memory.
    return len(shape) > 2 and default_layout(mesh.devices.flat[0], shape, stack.dtype)[0] == 0


def hoisted(walk: Any, eqn: Any, values: Sequence[Any], sub: Subcall) -> list[Lazy | Value]:
    """Decides which loop-invariant params are gathered once before the loop rather than in every iteration."""
    jaxpr, _ = open_jaxpr(sub.jaxpr)
    pairs = list(zip(values, jaxpr.invars, strict=False))
    invariant = {var for value, var in pairs if value.is_deferred and used_whole(jaxpr, var)}
    num_bytes = sum(v.aval.size * v.aval.dtype.itemsize for v, var in pairs if var in invariant)
    if sub.length < 2 or not (num_bytes <= walk.options.max_hoisted_bytes or walk.options.stored_whole):
        return list(values)
    return [_gathered_once(walk, eqn, sub, value, var) if var in invariant else value for value, var in pairs]


def _gathered_once(walk: Any, eqn: Any, sub: Subcall, value: Lazy, var: Any) -> Lazy | Value:
    """Gathers a param before a loop."""
    walk.notes.gather(value, eqn, f"once before {sub.length} iterations that use it", early=False)
    num_blocks, (jaxpr, _) = axis_size(walk.options.mesh, walk.options.axes.batch), open_jaxpr(sub.jaxpr)
    if value.is_shard and not walk.options.mapped and only_multiplied(jaxpr, var, walk.batch_sizes, num_blocks):
        return Copies(value.widened(walk.copies(value)), params_only=True)
    root = walk.whole(value)
    if walk.options.product_dtype is None:
        return Value(root, params_only=True)
    # As wide as the loop uses it: that is what its gradients are summed in over the iterations.
    return Lazy((root,), as_it_is, jax.typeof(root), value.path, ((),) * root.ndim)
