"""Trees of gradients without entries for untrained params: their norm, gaps and leaf indices."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from zero_jax.core.jaxprs import inline_jit
from zero_jax.core.tree import PyTree
from zero_jax.training.noise_scale import squared
from zero_jax.training.optimizer.frozen import flags_of_all
from zero_jax.training.state.train_state import trainable


@inline_jit
def _sum_of_squares(x: jax.Array) -> jax.Array:
    return squared(x).sum()


def keep_same(old: PyTree, new: PyTree, same: list[bool]) -> PyTree:
    """Returns the new params, or the old ones where `same` (a flag for each trainable param) is true."""
    tree = jax.tree.structure(old)
    of_each = zip(jax.tree.leaves(old), tree.flatten_up_to(new), flags_of_all(old, same), strict=True)
    return tree.unflatten([x if flag else y for x, y, flag in of_each])


def norm_and_first_nonfinite(grads: PyTree) -> tuple[jax.Array, jax.Array]:
    """Returns the global norm, and the index of the first non-finite gradient (-1 if none)."""
    leaves = jax.tree.leaves(grads)
    if not leaves:
        return jnp.float32(0), jnp.int32(-1)
    # One vector of sums of squares: one small all-reduce, and a leaf's sum is not finite where the leaf is not.
    squares = jnp.stack([_sum_of_squares(g) for g in leaves])
    bad = ~jnp.isfinite(squares)
    first = jnp.where(bad.any(), jnp.argmax(bad).astype(jnp.int32), -1)
    return jnp.sqrt(squares.sum()), first


def fill_zeros(grads: PyTree, masters: PyTree) -> PyTree:
    """Returns a gradient for each trainable param, with zeros in place of None."""
    fill = lambda p, g: None if p is None else jnp.zeros_like(p) if g is None else g  # noqa: E731
    return jax.tree.map(fill, trainable(masters), grads, is_leaf=lambda x: x is None)


def leaf_index(index: jax.Array, some: PyTree, masters: PyTree) -> jax.Array:
    """Converts an index among gradients or trainable params (None excluded) to an index among all params."""
    present = [i for i, x in enumerate(jax.tree.structure(masters).flatten_up_to(some)) if x is not None]
    if not present:
        return index
    return jnp.where(index < 0, -1, jnp.asarray(present, jnp.int32)[index])
