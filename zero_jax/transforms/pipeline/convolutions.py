"""Convolutions as matrix products, which XLA partitions rightly where each stage or device has gradients of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zero_jax.program.jaxprs import source_context
from zero_jax.program.loss import Traced
from zero_jax.program.walk import Rewriting
from zero_jax.sharding.precision import wide


def convolutions_as_products(traced: Traced) -> Traced:
    """Returns a program whose convolutions are matrix products, but for those within functions of other kinds."""
    return traced.rewritten(_Products().rewritten(traced.closed))


class _Products(Rewriting):
    """Evaluates convolutions as products."""

    def changes(self, eqn: Any) -> bool:
        return eqn.primitive is lax.conv_general_dilated_p and eqn.params["batch_group_count"] == 1

    def changed(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        with source_context(eqn):
            return [_products(values[0], values[1], eqn.params)]


def _products(x: jax.Array, kernel: jax.Array, params: dict[str, Any]) -> jax.Array:
    """Returns a convolution as a product for each place of its window; as one where windows do not overlap.

    Args:
      x: what is convolved, of any layout.
      kernel: the kernel.
      params: the parameters of an equation `conv_general_dilated` whose `batch_group_count` is 1.
    """
    dims, groups, strides = params["dimension_numbers"], params["feature_group_count"], params["window_strides"]
    dilation, out_dtype = params["rhs_dilation"], params["preferred_element_type"] or x.dtype
    kernel = kernel.transpose(dims.rhs_spec)  # [features out, features in of a group, *window]
    padding = [(0, 0, 0)] * 2 + [(*x, d - 1) for x, d in zip(params["padding"], params["lhs_dilation"], strict=True)]
    x = lax.pad(x.transpose(dims.lhs_spec), jnp.zeros((), x.dtype), padding)  # [examples, features in, *space]
    x = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    kernel = kernel.reshape(groups, -1, *kernel.shape[1:])
    window, space = kernel.shape[3:], x.shape[3:]
    spans = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
    size = [(n - span) // stride + 1 for n, span, stride in zip(space, spans, strides, strict=True)]
    number = len(window)

    def product(x: jax.Array, kernel: jax.Array, places: Sequence[int] = ()) -> jax.Array:
        """Sums over the features in, and over dims of both that are places of the window."""
        out = range(4, 4 + number)
        types = {"precision": params["precision"], "preferred_element_type": wide(out_dtype)}
        return jnp.einsum(x, [0, 1, 2, *out, *places], kernel, [1, 3, 2, *places], [0, 1, 3, *out], **types)

    if tuple(window) == tuple(strides) and set(dilation) == {1}:
        x = x[(..., *(slice(n * k) for n, k in zip(size, window, strict=True)))]
        x = x.reshape(*x.shape[:3], *itertools.chain(*zip(size, window, strict=True)))
        x = x.transpose(0, 1, 2, *range(3, 3 + 2 * number, 2), *range(4, 3 + 2 * number, 2))
        y = product(x, kernel, range(4 + number, 4 + 2 * number))
    else:
        y = jnp.zeros((), wide(out_dtype))
        for place in np.ndindex(*window):
            starts = [i * d for i, d in zip(place, dilation, strict=True)]
            ends = [i + (n - 1) * stride + 1 for i, n, stride in zip(starts, size, strides, strict=True)]
            taken = x[(..., *map(slice, starts, ends, strides))]
            y += product(taken, kernel[(..., *place)])
    y = y.reshape(y.shape[0], -1, *size).astype(out_dtype)
    return y.transpose(np.argsort(dims.out_spec))
