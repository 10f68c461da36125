"""Attention by XLA, which can do every case: the definition of what the kernels compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from zero_jax.attention.case import Case


def attention(query: Array, key: Array, value: Array, bias: Array | None, mask: Array | None, case: Case) -> Array:
    """Returns attention `[B, T, N, V]` of `query` `[B, T, N, H]`, `key` `[B, S, K, H]`, `value` `[B, S, K, V]`.

    Args:
      query: the queries.
      key: the keys.
      value: the values.
      bias: what is added to the logits, broadcastable to `[B, N, T, S]`.
      mask: False where a query does not see a key, broadcastable to `[B, N, T, S]`.
      case: everything else.
    """
    if case.segment_ids is not None:
        of_query, of_key = case.segment_ids
        same = of_query[:, None, :, None] == of_key[:, None, None, :]
        mask = same if mask is None else mask & same
    if case.logits_soft_cap is not None or value.shape[-1] != query.shape[-1]:
        return _explicit(query, key, value, bias, mask, case)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias,
        mask,
        scale=case.scale,
        is_causal=case.is_causal,
        query_seq_lengths=case.query_seq_lengths,
        key_value_seq_lengths=case.key_value_seq_lengths,
        local_window_size=case.local_window_size,
    )


def _explicit(query: Array, key: Array, value: Array, bias: Array | None, mask: Array | None, case: Case) -> Array:
    """Does what `jax.nn.dot_product_attention` does, with a soft cap and values of another size than the keys."""
    (b, t, n, h), (_, s, k, _) = query.shape, key.shape
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.reshape(b, t, k, n // k, h)
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=dtype).reshape(b, n, t, s)
    logits *= jnp.array(case.scale, dtype)
    if case.logits_soft_cap is not None:
        logits = case.logits_soft_cap * jnp.tanh(logits / case.logits_soft_cap)
    if bias is not None:
        logits = (logits + bias).astype(dtype)
    rows, columns = jnp.arange(t)[:, None], jnp.arange(s)
    visible = jnp.ones((1, 1, t, s), bool) if mask is None else mask
    if case.is_causal:
        visible &= rows >= columns
    if case.local_window_size is not None:
        left, right = case.local_window_size
        visible &= (columns >= rows - left) & (columns <= rows + right)
    if case.query_seq_lengths is not None:
        visible &= rows < case.query_seq_lengths[:, None, None, None]
    if case.key_value_seq_lengths is not None:
        visible &= columns < case.key_value_seq_lengths[:, None, None, None]
    # A row that sees nothing weighs all keys alike, as in `jax.nn.dot_product_attention`.
    logits = jnp.where(visible, logits, -0.7 * jnp.finfo(jnp.float32).max)
    weights = jax.nn.softmax(logits.astype(jnp.float32)).astype(key.dtype).reshape(b, k, n // k, t, s)
    out = jnp.einsum("bkgts,bskv->btkgv", weights, value).reshape(b, t, n, value.shape[-1])
    if case.query_seq_lengths is not None:
        out *= (jnp.arange(t) < case.query_seq_lengths[:, None])[:, :, None, None].astype(out.dtype)
    return out
