"""The work of a fused attention, for estimates of time before anything is compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from zero_jax.attention import splash
from zero_jax.attention.primitive import Call

_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5  # scores and result; the scores again, and four gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """The work of one execution of a fused attention, over all devices.

    Attributes:
      flops: operations of its products, for the keys that a query sees; of splash attention, in all blocks it visits.
      summed_bytes: bytes that are moved to add the parts in which splash attention makes the queries' cotangents.
    """

    flops: float
    summed_bytes: float = 0.0


def attention_work(query: Any, key: Any, value: Any, *, call: Call, backward: bool) -> AttentionWork:
    """Returns the work of a fused attention.

    Args:
      query: `[B, T, N, H]`, shape and dtype.
      key: `[B, S, K, H]`, likewise.
      value: `[B, S, K, V]`, likewise.
      call: what it does beside.
      backward: whether the work is that of the cotangents.
    """
    if call.kernel == "splash":
        flops, summed_bytes = splash.work(query, key, value, call.band, backward=backward)
        return AttentionWork(flops=flops, summed_bytes=summed_bytes)
    (b, t, n, h), num_keys = query.shape, key.shape[1]
    seen = np.maximum(call.band.last(t, num_keys) - call.band.first(t) + 1, 0).sum()
    products = _BACKWARD_PRODUCTS if backward else _FORWARD_PRODUCTS
    return AttentionWork(flops=2.0 * products * b * n * h * float(seen))
