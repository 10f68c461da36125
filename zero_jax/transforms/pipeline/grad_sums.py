"""Gradients of a stage's layers, added in place, layer by layer and tick by tick.

The gradient of what a loop takes slices of is made for all of its layers before it is added to another one. So a sum
goes with what the loops over layers and over ticks carry, of no value (zeros) and with the gradient of all layers of a
stage as its own, to which that of a layer is added where it is made.
"""

from __future__ import annotations

from typing import Any

import jax
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
    added += lax.dynamic_index_in_dim(sums, number, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(sums, added, number, 0), None, None, None


added_to.defvjp(lambda sums, x, *places: ((sums, x), places), _backward)
