"""An attention by a kernel: what the kernel does not know of the case is done around it; and what it costs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from zero_jax.attention import primitive, splash
from zero_jax.attention.placement import KernelPlacement
from zero_jax.attention.xla import Band, Case, band_of, visible

_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5  # scores and result; the scores again, and four gradients


def attention(query: Array, key: Array, value: Array, case: Case, *, kernel: str, placement: KernelPlacement) -> Array:
    """Returns the attention `[B, T, N, V]` of a case that a kernel can do."""
    band = band_of(case, query.shape[1], key.shape[1])
    call = primitive.Call(
        kernel=kernel,
        scale=float(case.scale),
        band=band,
        soft_cap=None if case.logits_soft_cap is None else float(case.logits_soft_cap),
        placement=placement,
    )
    extras = _segments(query, key, case) if kernel == "splash" else _lengths(query, key, case)
    keys, values = (_repeated(x, query.shape[2], placement.num_head_shards) for x in (key, value))
    out = primitive.attention(query, keys, values, extras, call)
    sees = _sees_a_key(query, key, case, band)
    if sees is not None:
        mean = value.astype(jnp.float32).mean(1, keepdims=True).astype(out.dtype)
        mean = jnp.repeat(mean, query.shape[2] // key.shape[2], axis=2)
        out = jnp.where(sees[:, :, None, None], out, mean)
    if case.query_seq_lengths is not None:
        is_query = jnp.arange(query.shape[1]) < case.query_seq_lengths[:, None]
        out = jnp.where(is_query[:, :, None, None], out, 0)
    return out


def _repeated(x: Array, num_query_heads: int, num_shards: int) -> Array:
    """Repeats heads until they divide over the devices, each of which then has those that its queries see."""
    num_heads = x.shape[2]
    if num_heads % num_shards == 0:
        return x
    times = num_shards // num_heads if num_shards % num_heads == 0 else num_query_heads // num_heads
    return jnp.repeat(x, times, axis=2)


def _lengths(query: Array, key: Array, case: Case) -> list[Array]:
    """Returns the lengths of queries and keys, at least 1, if there are any."""
    if case.query_seq_lengths is None and case.key_value_seq_lengths is None:
        return []
    pairs = ((case.query_seq_lengths, query), (case.key_value_seq_lengths, key))
    lengths = (jnp.full(x.shape[0], x.shape[1], jnp.int32) if n is None else n for n, x in pairs)
    return [jnp.maximum(n, 1).astype(jnp.int32) for n in lengths]


def _segments(query: Array, key: Array, case: Case) -> list[Array]:
    """Returns the segments of queries and keys, of which keys that are padding have one of their own."""
    lengths, ids = case.key_value_seq_lengths, case.segment_ids
    if lengths is None:
        return [] if ids is None else [x.astype(jnp.int32) for x in ids]
    of_query, of_key = ids or (jnp.zeros(query.shape[:2], jnp.int32), jnp.zeros(key.shape[:2], jnp.int32))
    of_query, of_key = of_query.astype(jnp.int32), of_key.astype(jnp.int32)
    is_key = jnp.arange(key.shape[1]) < lengths[:, None]
    unused = jnp.min(of_query, axis=1, keepdims=True) - 1
    return [of_query, jnp.where(is_key, of_key, unused)]


def _sees_a_key(query: Array, key: Array, case: Case, band: Band) -> Array | None:
    """Tells which queries see a key, `[B, T]`; None if all do, whatever the segments and lengths are.

    Of a query that sees none, as of a row of equal logits, the result is the mean of all values.
    """
    ids, lengths = case.segment_ids, case.key_value_seq_lengths
    if ids is None:
        return None if lengths is None else jnp.asarray(band.first(query.shape[1])) < lengths[:, None]
    if lengths is None and ids[0] is ids[1] and band.sees_itself():
        return None
    return visible(query, key, case)[:, 0].any(-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """The work of one execution of a fused attention, over all devices.

    Attributes:
      flops: operations of its products, for the keys that a query sees; of splash attention, in all blocks it visits.
      summed_bytes: bytes that are moved to add the parts in which splash attention makes the queries' cotangents.
    """

    flops: float
    summed_bytes: float = 0.0


def attention_work(query: Any, key: Any, value: Any, *, call: primitive.Call, backward: bool) -> AttentionWork:
    """Returns the work of a fused attention.

    Of the arrays, `[B, T, N, H]`, `[B, S, K, H]` and `[B, S, K, V]`, only shapes and dtypes are read; with `backward`
    it is the work of the cotangents.
    """
    if call.kernel == "splash":
        flops, summed_bytes = splash.work(query, key, value, call.band, backward=backward)
        return AttentionWork(flops=flops, summed_bytes=summed_bytes)
    (b, t, n, h), num_keys = query.shape, key.shape[1]
    seen = np.maximum(call.band.last(t, num_keys) - call.band.first(t) + 1, 0).sum()
    products = _BACKWARD_PRODUCTS if backward else _FORWARD_PRODUCTS
    return AttentionWork(flops=2.0 * products * b * n * h * float(seen))
