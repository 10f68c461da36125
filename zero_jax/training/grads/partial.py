"""Trees of gradients without entries for untrained params: their gaps and leaf indices."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from zero_jax.core.tree import PyTree
from zero_jax.training.optimizer.frozen import flags_of_all
from zero_jax.training.state.train_state import trainable


def keep_same(old: PyTree, new: PyTree, same: list[bool]) -> PyTree:
    """Returns the new params, or the old ones where `same` (a flag for each trainable param) is true."""
    tree = jax.tree.structure(old)
    of_each = zip(jax.tree.leaves(old), tree.flatten_up_to(new), flags_of_all(old, same), strict=True)
    return tree.unflatten([x if flag else y for x, y, flag in of_each])


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
