"""Reuses the device memory of batches: allocated once for each shape, overwritten by every batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zero_jax.core.tree import PyTree


class BatchBuffers:
    """Keeps the batches of a loop in the same device memory, so that it does not fragment.

    JAX cannot copy from the host into an existing array. So a batch is put into new memory, copied on the device into
    the donated buffers of its shape, and its new memory is freed at once: the runtime allocates and frees blocks of
    always the same size. Each shape of batch, such as that of an evaluation, has its own buffers. This costs the memory
    of one more batch for each shape, and a copy on the device.

    The next `fill` with a shape deletes the arrays that the last one returned for it.
    """

    def __init__(self) -> None:
        """Allocates nothing yet."""
        self._buffers: dict[Any, list[jax.Array]] = {}
        self._write = jax.jit(_write, donate_argnums=0)

    def fill(self, batch: PyTree) -> PyTree:
        """Copies a batch into the buffers of its shape, and deletes it.

        Args:
          batch: a pytree of `jax.Array`s with the shardings of the step's batch. Other leaves, and PRNG keys, are
            returned as they are.

        Returns:
          The batch in its buffers, with the same shapes, dtypes and shardings.
        """
        leaves, tree = jax.tree.flatten(batch)
        places = [place for place, leaf in enumerate(leaves) if _is_buffered(leaf)]
        arrays = [leaves[place] for place in places]
        key = tree, tuple((place, x.shape, x.dtype, x.sharding) for place, x in zip(places, arrays, strict=True))
        buffers = self._buffers.pop(key, None) or [jnp.zeros(x.shape, x.dtype, device=x.sharding) for x in arrays]
        filled = self._write(buffers, arrays)
        for x in arrays:
            x.delete()  # the runtime keeps the memory until the copy is done
        self._buffers[key] = filled
        for place, x in zip(places, filled, strict=True):
            leaves[place] = x
        return tree.unflatten(leaves)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, over all devices."""
        return sum(x.nbytes for buffers in self._buffers.values() for x in buffers)


def _write(buffers: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
    # An update in place of all elements: `lambda old, new: new` would return the input arrays.
    return [lax.dynamic_update_slice(old, new, (0,) * new.ndim) for old, new in zip(buffers, arrays, strict=True)]


def _is_buffered(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
