"""The arguments of an attention beside its arrays, as its implementations look at them."""

from __future__ import annotations

import dataclasses

from jax import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What an attention is to do, beside queries, keys, values, bias and mask.

    Attributes:
      scale: what logits are multiplied by.
      is_causal: whether a query at place t sees keys up to place t only.
      query_seq_lengths: `[B]`, int32: queries from there on are padding, whose results are 0.
      key_value_seq_lengths: `[B]`, int32: keys from there on are padding, which no query sees.
      local_window_size: how many keys to the left and to the right of its own place a query sees.
      segment_ids: of the queries `[B, T]` and of the keys `[B, S]`: a query sees the keys of its own segment.
      logits_soft_cap: c, where logits x are replaced by c tanh(x / c).
    """

    scale: float
    is_causal: bool
    query_seq_lengths: Array | None
    key_value_seq_lengths: Array | None
    local_window_size: tuple[int, int] | None
    segment_ids: tuple[Array, Array] | None
    logits_soft_cap: float | None
