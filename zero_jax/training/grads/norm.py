"""Global norms that are right for all finite arrays.

The square of a float32 overflows from 1.8e19 on, and is 0 below 1e-23. So squares are summed at three scales at once,
and the largest scale whose sum is finite counts (Blue, "A Portable Fortran Program to Find the Euclidean Norm of a
Vector", 1978). The scales are powers of two: they round nothing, and ordinary norms are what one sum of squares gives.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.core.device_put import map_on_device
from zero_jax.core.jaxprs import inline_jit
from zero_jax.core.tree import PyTree
from zero_jax.sharding.precision import promoted, wide


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalNorm:
    """The global norm of arrays, as `scaled / scale`: the norm of large arrays can overflow where none of them does.

    Attributes:
      scaled: the norm times `scale`, `float32[]` or wider; NaN or infinite if an array is not finite.
      scale: a power of two, 1 for ordinary norms.
      first_nonfinite: the index of the first array that is not finite, -1 if there is none, `int32[]`.
    """

    scaled: jax.Array
    scale: jax.Array
    first_nonfinite: jax.Array

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
    sums_of = functools.partial(_scaled_squares, dtype=dtype)
    # One vector of all sums: one small all-reduce.
    sums = jnp.stack(jax.tree.leaves(map_on_device(sums_of, arrays))).reshape(len(arrays), -1)
    # At the smallest scale a sum is finite where the array is.
    bad = ~jnp.isfinite(sums[:, -1])
    totals, scales = sums.sum(0), jnp.asarray(_scales(dtype), dtype)
    finite = jnp.isfinite(totals)
    largest = lambda x: jnp.where(finite[0], x[0], jnp.where(finite[1], x[1], x[2]))  # noqa: E731
    return GlobalNorm(
        scaled=jnp.sqrt(largest(totals)),
        scale=largest(scales),
        first_nonfinite=jnp.where(bad.any(), jnp.argmax(bad).astype(jnp.int32), -1),
    )


def _scales(dtype: Any) -> tuple[float, float, float]:
    """Returns the scales, the largest first.

    At the smallest one the sum of 2^64 squares of the dtype's largest number is finite; what underflows at a scale is
    below the rounding of the norms that it is for.
    """
    exponent = 3 * jnp.finfo(dtype).maxexp // 4
    return 2.0**exponent, 1.0, 2.0**-exponent


@functools.partial(inline_jit, static_argnames="dtype")
def _scaled_squares(x: jax.Array, *, dtype: Any) -> list[jax.Array]:
    """Returns the sum of squares of an array at each scale."""
    up, _, down = _scales(dtype)
    parts = [y.astype(dtype) for y in ((x.real, x.imag) if jnp.iscomplexobj(x) else (x,))]
    # The selections change no square: those of 1 and more overflow at the largest scale, and others are 0 at the
    # smallest. Without them XLA squares scalars before it scales them: (x * c) * (x * c) becomes (x * x) * (c * c).
    of_each = [
        [jnp.where(jnp.abs(y) < 1, y * up, jnp.inf) for y in parts],
        parts,
        [jnp.where(jnp.abs(y) < 1, 0, y * down) for y in parts],
    ]
    return [jnp.sum(sum(map(jnp.square, scaled))) for scaled in of_each]
