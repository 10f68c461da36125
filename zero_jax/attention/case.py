"""The arguments of an attention, as its implementations look at them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What an attention is to do, beside queries, keys and values.

    Attributes:
      scale: what logits are multiplied by: a number, or for XLA alone a scalar array.
      bias: what is added to the logits, broadcastable to `[B, N, T, S]`.
      mask: False where a query does not see a key, broadcastable to `[B, N, T, S]`.
      is_causal: whether a query at place t sees keys up to place t only.
      query_seq_lengths: `[B]`, int32: queries from there on are padding, whose results are 0.
      key_value_seq_lengths: `[B]`, int32: keys from there on are padding, which no query sees.
      local_window_size: how many keys to the left and to the right of its own place a query sees.
      segment_ids: of the queries `[B, T]` and of the keys `[B, S]`: a query sees the keys of its own segment.
      logits_soft_cap: c, where logits x are replaced by c tanh(x / c).
    """

    scale: Any
    bias: Array | None = None
    mask: Array | None = None
    is_causal: bool = False
    query_seq_lengths: Array | None = None
    key_value_seq_lengths: Array | None = None
    local_window_size: tuple[int, int] | None = None
    segment_ids: tuple[Array, Array] | None = None
    logits_soft_cap: float | None = None


class Operands(NamedTuple):
    """The arrays of a kernel on one device: queries, keys, values, and its segments (splash) or lengths (cuDNN)."""

    query: Array
    key: Array
    value: Array
    extras: Sequence[Array]


@dataclasses.dataclass(frozen=True)
class Band:
    """Which keys a query sees by its place alone: those from `t - left` to `t + right`, all where that is None."""

    left: int | None
    right: int | None

    def sees_itself(self) -> bool:
        """Tells whether a query sees the key at its own place."""
        return all(side is None or side >= 0 for side in (self.left, self.right))

    def first(self, num_queries: int) -> np.ndarray:
        """Returns the first key that each query sees, which may be beyond the last one."""
        places = np.arange(num_queries)
        return np.zeros_like(places) if self.left is None else np.maximum(places - self.left, 0)

    def last(self, num_queries: int, num_keys: int) -> np.ndarray:
        """Returns the last key that each query sees, which may be before the first one."""
        places = np.arange(num_queries)
        last = np.full_like(places, num_keys - 1)
        return last if self.right is None else np.minimum(places + self.right, last)

    def has_unseeing(self, num_queries: int, num_keys: int) -> bool:
        """Tells whether there is a query that sees no key."""
        is_empty = self.left is not None and self.right is not None and self.left + self.right < 0
        first_has_none = num_keys < 1 or (self.right is not None and self.right < 0)
        last_has_none = self.left is not None and num_queries - 1 - self.left > num_keys - 1
        return num_queries > 0 and (is_empty or first_has_none or last_has_none)


def band_of(case: Case, num_queries: int, num_keys: int) -> Band:
    """Returns the band of keys that `is_causal` and `local_window_size` leave, without bounds that exclude nothing."""
    left, right = case.local_window_size or (num_queries, num_keys)
    right = min(right, 0) if case.is_causal else right
    return Band(None if left >= num_queries - 1 else int(left), None if right >= num_keys - 1 else int(right))
