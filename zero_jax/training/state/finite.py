"""Checks the params of a train state for NaN and infinities."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.core.device_put import map_on_device
from zero_jax.core.tree import leaf_names
from zero_jax.training.state.train_state import TrainState


class NonfiniteState(ValueError):
    """Raised for a state whose params contain NaN or infinities.

    Attributes:
      leaves: paths of the non-finite leaves, such as `params/embed`.
    """

    def __init__(self, step: int, leaves: Sequence[str]):
        """Says which leaves, and what to do."""
        self.leaves = tuple(leaves)
        others = f" and {len(leaves) - 1} other leaves" if len(leaves) > 1 else ""
        super().__init__(
            f"the state of step {step} is not saved: NaN or infinities in {leaves[0]}{others}. Go on from an earlier "
            "checkpoint, with a smaller learning rate; allow_nonfinite=True saves it all the same"
        )


def nonfinite_leaves(state: TrainState, *, mesh: Mesh) -> list[str]:
    """Returns the paths of the leaves of params and master params that contain NaN or infinities.

    Every process gets the same result. The optimizer state is not checked: optax stores infinities there on purpose,
    as the best value so far of `reduce_on_plateau`.
    """
    groups = {"params": state.params} | ({} if state.master is None else {"master": state.master})
    leaves = zip(leaf_names(groups), jax.tree.leaves(groups), strict=True)
    floating = {name: x for name, x in leaves if jnp.issubdtype(x.dtype, jnp.inexact) and x.size}
    if not floating:
        return []
    check = jax.jit(_are_finite, out_shardings=NamedSharding(mesh, PartitionSpec()))
    finite = np.asarray(check(list(floating.values())))
    return [name for name, is_finite in zip(floating, finite, strict=True) if not is_finite]


def _are_finite(leaves: Sequence[jax.Array]) -> jax.Array:
    """Returns for each array whether it is all finite: `bool[num_leaves]`, without a copy of any."""

    def is_finite(x: jax.Array) -> jax.Array:
        # One-byte types have no `isfinite`.
        return jnp.isfinite(x if x.dtype.itemsize > 1 else lax.convert_element_type(x, jnp.float32)).all()

    return jnp.stack(map_on_device(is_finite, leaves))
