"""Gradients of a stage's layers, added in place, layer by layer and tick by tick.

The gradient of what a loop takes slices of is made for all of its layers before it is added to another one. So a sum
goes with what the loops over layers and over ticks carry, of no value (zeros) and with the gradient of all layers of a
stage as its own, to which that of a layer is added where it is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax import lax

from zero_jax.sharding.precision import wide


@jax.custom_vjp
def sum_of(stack: jax.Array) -> jax.Array:
    """Returns the sum of a stack before the loop, whose gradient is that of the stack."""
    return jnp.zeros(stack.shape, wide(stack.dtype))


sum_of.defvjp(
    lambda stack: (jnp.zeros(stack.shape, wide(stack.dtype)), jnp.zeros((), stack.dtype)),
    lambda like, cotangent: (cotangent.astype(like.dtype),),
)


@functools.cache
def _added_at(dim: int) -> Callable[..., jax.Array]:
    """Returns a function that adds an array to a sum, at an index of a dim.

    XLA adds in place, where the array is made. Of an update by index `jax.vmap` makes a scatter: XLA:TPU copies the
    old slice for it, and reads it twice.
    """

    @jax.custom_batching.custom_vmap
    def add(sums: jax.Array, x: jax.Array, number: jax.Array) -> jax.Array:
        starts = [number if i == dim else jnp.zeros_like(number) for i in range(sums.ndim)]
        x = jnp.expand_dims(x, dim)
        return lax.dynamic_update_slice(sums, lax.dynamic_slice(sums, starts, x.shape) + x, starts)

    @add.def_vmap
    def mapped(size: int, is_mapped: list[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
        each = zip(operands, is_mapped, strict=True)
        sums, x, number = (x if flag else jnp.broadcast_to(x, (size, *x.shape)) for x, flag in each)
        if not is_mapped[2]:
            return _added_at(dim + 1)(sums, x, operands[2]), True
        at_one = lambda old, x, i: lax.dynamic_index_in_dim(old, i, dim, keepdims=False) + x  # noqa: E731
        put = lambda old, x, i: lax.dynamic_update_index_in_dim(old, at_one(old, x, i), i, dim)  # noqa: E731
        return jax.vmap(put)(sums, x, number), True

    return add


@jax.custom_vjp
def added_to(sums: jax.Array, x: jax.Array, number: jax.Array, is_own: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a sum `[layers, ...]` and the param `x` of a layer, whose gradient is added to that of the sum.

    Args:
      sums: the sum.
      x: the param; a gradient of its own it has not.
      number: the number of the layer in the sum.
      is_own: whether there is a microbatch. Of none there is no gradient: derivatives may be infinite then.
    """
    return sums, x


def _backward(places: tuple[jax.Array, jax.Array], cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    (number, is_own), (sums, own) = places, cotangents
    added = jnp.where(is_own, own, jnp.zeros_like(own)).astype(sums.dtype)
    return _added_at(0)(sums, added, number), None, None, None


added_to.defvjp(lambda sums, x, *places: ((sums, x), places), _backward)
