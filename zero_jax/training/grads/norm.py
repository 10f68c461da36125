"""Global norms that are right for all finite arrays.

The square of a float32 overflows from 1.8e19 on. So squares are summed twice at once, as they are and scaled down, and
the second sum counts where the first overflows (Blue, "A Portable Fortran Program to Find the Euclidean Norm of a
Vector", 1978).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zero_jax.core.device_put import map_on_device
from zero_jax.core.tree import PyTree
from zero_jax.sharding.precision import promoted, wide


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalNorm:
    """The global norm of arrays, as `scaled / scale`: the norm of large arrays can overflow where none of them does."""

    scaled: jax.Array  # the norm times `scale`, `float32[]` or wider; NaN or infinite if an array is not finite
    scale: jax.Array  # a power of two: 1, but for norms whose square overflows
    first_nonfinite: jax.Array  # the index of the first array that is not finite, -1 if there is none, `int32[]`

    @property
    def value(self) -> jax.Array:
        """The norm; infinite where its dtype has no number as large."""
        return self.scaled / self.scale

    def clip(self, arrays: PyTree, limit: float) -> PyTree:
        """Scales arrays of this norm down to a norm of `limit`."""
        exceeds = self.scaled > limit * self.scale
        # Two factors: a single one would underflow for norms above 1e38.
        factors = jnp.where(exceeds, self.scale, 1), jnp.where(exceeds, limit / self.scaled, 1)
        return jax.tree.map(lambda x: x * factors[0].astype(x.dtype) * factors[1].astype(x.dtype), arrays)


def global_norm(arrays: Sequence[jax.Array]) -> GlobalNorm:
    """Returns the global norm of traced arrays, those in host memory included."""
    if not arrays:
        return GlobalNorm(scaled=jnp.float32(0), scale=jnp.float32(1), first_nonfinite=jnp.int32(-1))
    dtype = jnp.finfo(promoted(*(wide(x.dtype) for x in arrays))).dtype
    sums_of = functools.partial(_squares, dtype=dtype)
    # One vector of all sums: one small all-reduce.
    sums = lax.concatenate(map_on_device(sums_of, arrays), 0).reshape(len(arrays), -1)
    # A scaled sum is finite where the array is.
    bad, totals = ~jnp.isfinite(sums[:, 1]), sums.sum(0)
    fits = jnp.isfinite(totals[0])
    return GlobalNorm(
        scaled=jnp.sqrt(jnp.where(fits, totals[0], totals[1])),
        scale=jnp.where(fits, 1, _scale(dtype)).astype(dtype),
        first_nonfinite=jnp.where(bad.any(), jnp.argmax(bad).astype(jnp.int32), -1),
    )


def _scale(dtype: Any) -> float:
    """Returns the scale at which the sum of 2^32 squares of a dtype's largest number is finite.

    What underflows is below the rounding of norms whose square overflows.
    """
    return 2.0 ** -(5 * jnp.finfo(dtype).maxexp // 8)


@functools.partial(jax.jit, static_argnames="dtype")
def _squares(x: jax.Array, *, dtype: Any) -> jax.Array:
    """Returns two numbers: the sum of squares of an array, and that of the array scaled down."""
    parts = [y.astype(dtype) for y in ((x.real, x.imag) if jnp.iscomplexobj(x) else (x,))]
    # The squares of what is below 1 underflow. Without the selection XLA would square scalars before it scales them:
    # (y * c) * (y * c) becomes (y * y) * (c * c).
    scaled = [lax.select(lax.abs(y) < 1, lax.full_like(y, 0), y * _scale(dtype)) for y in parts]
    return jnp.stack([jnp.sum(functools.reduce(operator.add, map(lax.square, x))) for x in (parts, scaled)])
