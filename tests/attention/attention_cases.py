"""Attention of random arrays, by several implementations."""

import jax
import jax.numpy as jnp

import zero_jax as zero


def random_arrays(*, b=2, t=24, s=24, n=4, k=2, h=8, v=None, dtype=jnp.float32):
    """Returns random queries, keys and values."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((b, t, n, h), (b, s, k, h), (b, s, k, v or h))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def random_segments(num_places, *, b=2):
    """Returns documents of several lengths, the same number of which are in every row."""
    return (jnp.arange(num_places) * 3 // num_places + 7 * jnp.arange(b)[:, None]).astype(jnp.int32)


def values_and_grads(arrays, implementation, **options):
    """Returns the attention of arrays, and the gradients of a weighted sum of it."""

    def total(*arrays):
        out = zero.dot_product_attention(*arrays, implementation=implementation, **options)
        weights = jax.random.normal(jax.random.key(1), out.shape)
        return (out.astype(jnp.float32) * weights).sum(), out

    grads, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return out, grads
