"""The params of one of several groups of a stage's layers, which is another one from tick to tick.

The gradient of an index is written into zeros of the size of all before it is added. So a sum goes with the loop over
ticks, of no value (zeros) and with the gradient of all groups as its own, to which that of a group is added in place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from zero_jax.dims import is_float
from zero_jax.sharding.precision import wide


def group_of(num_groups: int, sums: jax.Array, stack: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the sum, and the params `[layers, ...]` of a group of a stage's layers of those of all its groups."""
    shape = num_groups, stack.shape[0] // num_groups, *stack.shape[1:]
    if not is_float(stack):
        return sums, stack.reshape(shape)[number]
    sums, taken = _taken(sums.reshape(shape), lax.stop_gradient(stack).reshape(shape), number)
    return sums.reshape(stack.shape), taken


@jax.custom_vjp
def sum_of(stack: jax.Array) -> jax.Array:
    """Returns the sum of a stack before the loop, whose gradient is that of the stack."""
    return jnp.zeros(stack.shape, wide(stack.dtype))


sum_of.defvjp(
    lambda stack: (jnp.zeros(stack.shape, wide(stack.dtype)), jnp.zeros((), stack.dtype)),
    lambda like, cotangent: (cotangent.astype(like.dtype),),
)


def _take(sums: jax.Array, groups: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    return sums, lax.dynamic_index_in_dim(groups, number, 0, keepdims=False)


def _taken_backward(number: jax.Array, cotangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None, None]:
    sums, group = cotangents
    own = lax.dynamic_index_in_dim(sums, number, 0, keepdims=False) + group.astype(sums.dtype)
    return lax.dynamic_update_index_in_dim(sums, own, number, 0), None, None


_taken = jax.custom_vjp(_take)
_taken.defvjp(lambda sums, groups, number: (_take(sums, groups, number), number), _taken_backward)
