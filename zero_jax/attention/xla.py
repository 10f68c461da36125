"""Attention by XLA, which can do every case: the definition of what the kernels compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from zero_jax.attention.case import Band, Case, band_of
from zero_jax.sharding.precision import wide

_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)


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
