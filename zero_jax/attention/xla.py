"""Attention by XLA, which can do every case: the definition of what the kernels compute, and of a case."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from zero_jax.sharding.precision import wide


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What an attention is to do, beside queries, keys and values."""

    scale: Any  # what logits are multiplied by: a number, or for XLA alone a scalar array
    bias: Array | None = None  # what is added to the logits, broadcastable to `[B, N, T, S]`
    mask: Array | None = None  # False where a query does not see a key, broadcastable to `[B, N, T, S]`
    is_causal: bool = False  # whether a query at place t sees keys up to place t only
    query_seq_lengths: Array | None = None  # `[B]`, int32: queries from there on are padding, whose results are 0
    key_value_seq_lengths: Array | None = None  # `[B]`, int32: keys from there on are padding, which no query sees
    # How many keys to the left and to the right of its own place a query sees
    local_window_size: tuple[int, int] | None = None
    # Of the queries `[B, T]` and of the keys `[B, S]`: a query sees the keys of its own segment
    segment_ids: tuple[Array, Array] | None = None
    logits_soft_cap: float | None = None  # c, where logits x are replaced by c tanh(x / c)


class Operands(NamedTuple):
    """The arrays of a kernel on one device: queries, keys, values, and its segments or lengths."""

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


_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite, as in `jax.nn`: of a row of -inf the softmax is NaN


def attention(query: Array, key: Array, value: Array, case: Case) -> Array:
    """Returns attention `[B, T, N, V]` of `query` `[B, T, N, H]`, `key` `[B, S, K, H]`, `value` `[B, S, K, V]`."""
    is_float16 = query.dtype == jnp.float16  # for which `jax.nn` asks for a product that only GPUs have
    if case.logits_soft_cap is not None or value.shape[-1] != query.shape[-1] or is_float16:
        return _explicit(query, key, value, case)
    mask = case.mask
    if case.segment_ids is not None:
        mask = _same_segment(case.segment_ids) if mask is None else mask & _same_segment(case.segment_ids)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        case.bias,
        mask,
        scale=case.scale,
        is_causal=case.is_causal,
        query_seq_lengths=case.query_seq_lengths,
        key_value_seq_lengths=case.key_value_seq_lengths,
        local_window_size=case.local_window_size,
    )


def _explicit(query: Array, key: Array, value: Array, case: Case) -> Array:
    """Does what `jax.nn.dot_product_attention` does, with a soft cap and values of another size than the keys."""
    (b, t, n, _), (_, s, k, _) = query.shape, key.shape
    logits = _logits(query, key, case)
    if case.bias is not None:
        logits = (logits + case.bias).astype(logits.dtype)
    # A row that sees nothing weighs all keys alike, as in `jax.nn.dot_product_attention`.
    logits = jnp.where(visible(query, key, case), logits, _HIDDEN)
    weights = jax.nn.softmax(logits.astype(jnp.float32)).astype(key.dtype).reshape(b, k, n // k, t, s)
    out = jnp.einsum("bkgts,bskv->btkgv", weights, value, preferred_element_type=logits.dtype)
    out = out.astype(value.dtype).reshape(b, t, n, value.shape[-1])
    if case.query_seq_lengths is not None:
        out *= (jnp.arange(t) < case.query_seq_lengths[:, None])[:, :, None, None].astype(out.dtype)
    return out


def visible(query: Array, key: Array, case: Case) -> Array:
    """Tells which queries see which keys, broadcastable to `[B, N, T, S]`."""
    num_queries, num_keys = query.shape[1], key.shape[1]
    seen = in_band(band_of(case, num_queries, num_keys), num_queries, num_keys)[None, None]
    seen = seen if case.mask is None else seen & case.mask
    if case.segment_ids is not None:
        seen &= _same_segment(case.segment_ids)
    if case.query_seq_lengths is not None:
        seen &= jnp.arange(num_queries)[:, None] < case.query_seq_lengths[:, None, None, None]
    if case.key_value_seq_lengths is not None:
        seen &= jnp.arange(num_keys) < case.key_value_seq_lengths[:, None, None, None]
    return seen


def _same_segment(segment_ids: tuple[Array, Array]) -> Array:
    of_query, of_key = segment_ids
    return of_query[:, None, :, None] == of_key[:, None, None, :]


def _logits(query: Array, key: Array, case: Case) -> Array:
    """Returns the logits `[B, N, T, S]`, in float32 or wider."""
    (b, t, n, h), (_, s, k, _) = query.shape, key.shape
    dtype = wide(query.dtype)
    grouped = query.reshape(b, t, k, n // k, h)
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=dtype).reshape(b, n, t, s)
    logits *= jnp.array(case.scale, dtype)
    cap = case.logits_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def log_sum_exp(query: Array, key: Array, case: Case) -> Array:
    """Returns the log-sum-exps `[B, N, T]` of the logits, in float32, of a case without lengths of queries."""
    logits = _logits(query, key, case).astype(jnp.float32)
    return jax.nn.logsumexp(jnp.where(visible(query, key, case), logits, _HIDDEN), axis=-1)


def in_band(band: Band, num_queries: int, num_keys: int) -> Array:
    """Tells which queries see which keys by their places, `[T, S]`."""
    rows, columns = jnp.arange(num_queries)[:, None], jnp.arange(num_keys)
    visible = jnp.ones((num_queries, num_keys), bool)
    if band.left is not None:
        visible &= columns >= rows - band.left
    return visible if band.right is None else visible & (columns <= rows + band.right)
