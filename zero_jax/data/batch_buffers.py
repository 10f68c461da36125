"""Device memory for batches that is allocated once for each shape of batch, and written over by every batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zero_jax.core.tree import PyTree


class BatchBuffers:
    """Keeps the batches of a loop in the same device memory from the first step to the last.

    A batch comes from the host into memory of its own: JAX cannot write from there into an array that exists. A donated
    copy on the device takes it on into the buffers of its shape, and the memory it came in is given back at once. So
    each step reads its batch at one place, and what the runtime allocates and frees in between are blocks of always the
    same size. Batches of another shape, such as those of an evaluation, have buffers of their own, made at the first of
    them. The price is the memory of one more batch for each shape, and a copy on the device.

    The arrays that `fill` returned for a shape are gone once it is called again with that shape.
    """

    def __init__(self) -> None:
        """Has no buffers yet."""
        self._buffers: dict[Any, list[jax.Array]] = {}
        self._write = jax.jit(_write, donate_argnums=0)

    def fill(self, batch: PyTree) -> PyTree:
        """Moves a batch into the buffers of its shape.

        Args:
          batch: a pytree of `jax.Array`s, placed as the step takes them, that nobody else holds: they are deleted.
            Leaves that are none, and PRNG keys, are returned as they are.

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
    # An update in place, of all of it: `lambda old, new: new` would return the arrays that came in.
    return [lax.dynamic_update_slice(old, new, (0,) * new.ndim) for old, new in zip(buffers, arrays, strict=True)]


def _is_buffered(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
