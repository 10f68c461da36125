"""The public function: arguments are checked, and the implementation is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.typing import ArrayLike

from zero_jax.attention import fused, xla
from zero_jax.attention.case import Case
from zero_jax.attention.choice import choose
from zero_jax.attention.placement import current_placement

Implementation = Literal["fused", "splash", "cudnn", "xla"]


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    logits_soft_cap: float | None = None,
    implementation: Implementation | None = None,
    mesh: Mesh | None = None,
) -> Array:
    """Computes `softmax(scale * query @ key.T + bias) @ value`, by a fused kernel where the hardware has one.

    The first arguments, up to `local_window_size`, are those of `jax.nn.dot_product_attention`, and so are the
    results, rows that see no key included.

    Args:
      query: `[B, T, N, H]` or `[T, N, H]`.
      key: `[B, S, K, H]` or `[S, K, H]`; K divides N (grouped heads).
      value: `[B, S, K, V]` or `[S, K, V]`.
      bias: is added to the logits; 4-D, broadcastable to `[B, N, T, S]`.
      mask: bool, False where a query does not see a key; 4-D, broadcastable to `[B, N, T, S]`.
      scale: of the logits; None means `H ** -0.5`.
      is_causal: whether the query at place t sees keys up to place t only.
      query_seq_lengths: int32 `[B]`; queries from there on are padding, and their results are 0.
      key_value_seq_lengths: int32 `[B]`; keys from there on are padding.
      local_window_size: keys to the left and to the right of its own place that a query sees; one number for both.
      segment_ids: integers `[B, T]` (`[T]` for 3-D queries), or a pair of those of queries and keys, `[B, S]`: a query
        sees the keys of its own segment. One array needs T == S.
      logits_soft_cap: c: logits x become `c * tanh(x / c)`, before the bias.
      implementation: None and "fused" take the kernel of the hardware where there is one that can do the case, else
        XLA; "splash" and "cudnn" are those kernels; "xla" is none.
      mesh: the mesh of the arrays; None takes the one that the train step is traced for, else that of `jax.set_mesh`,
        else a single device.

    Returns:
      `[B, T, N, V]`, or `[T, N, V]`.

    Raises:
      ValueError: shapes that do not fit, or a kernel by name that cannot do the case.
    """
    arrays = {"query": jnp.asarray(query), "key": jnp.asarray(key), "value": jnp.asarray(value)}
    is_batched = arrays["query"].ndim == 4
    q, k, v = (_with_dims(name, x, 4) for name, x in arrays.items())
    _check_shapes(q, k, v)
    lengths = (None if x is None else jnp.asarray(x) for x in (query_seq_lengths, key_value_seq_lengths))
    query_seq_lengths, key_value_seq_lengths = lengths
    if isinstance(local_window_size, int):
        local_window_size = (local_window_size, local_window_size)
    case = Case(
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        segment_ids=_segments(segment_ids, q, k),
        logits_soft_cap=logits_soft_cap,
    )
    full_bias = None if bias is None else _with_dims("bias", jnp.asarray(bias), 4)
    full_mask = None if mask is None else _with_dims("mask", jnp.asarray(mask), 4)
    placement = current_placement(mesh)
    choice = choose(
        q, k, v, case, wanted=implementation, placement=placement, has_bias=bias is not None, has_mask=mask is not None
    )
    if choice.implementation == "xla":
        out = xla.attention(q, k, v, full_bias, full_mask, case)
    else:
        out = fused.attention(q, k, v, case, kernel=choice.implementation, placement=placement)
    return out if is_batched else out[0]


def _with_dims(name: str, x: Array, num_dims: int) -> Array:
    """Returns an array with leading dims of size 1 up to `num_dims`."""
    if x.ndim not in (num_dims, num_dims - 1):
        raise ValueError(f"{name} has shape {x.shape}: give {num_dims} dims, or {num_dims - 1} without a batch")
    return x if x.ndim == num_dims else x[None]


def _check_shapes(query: Array, key: Array, value: Array) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if query.shape[0] != key.shape[0] or query.shape[-1] != key.shape[-1] or key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"{shapes} do not fit: give [B, T, N, H], [B, S, K, H] and [B, S, K, V]")
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"{shapes}: the {query.shape[2]} query heads are no multiple of the {key.shape[2]} key heads")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query is {query.dtype}, key {key.dtype}, value {value.dtype}: cast them to one dtype")


def _segments(segment_ids: Any, query: Array, key: Array) -> tuple[Array, Array] | None:
    """Returns the segments of queries and keys, each with a batch dim."""
    if segment_ids is None:
        return None
    is_pair = isinstance(segment_ids, Sequence)
    of_query, of_key = segment_ids if is_pair else (segment_ids, segment_ids)
    first = _with_dims("segment_ids", jnp.asarray(of_query), 2)
    second = first if of_key is of_query else _with_dims("segment_ids", jnp.asarray(of_key), 2)
    for x, wanted in ((first, query.shape[:2]), (second, key.shape[:2])):
        if x.shape != wanted:
            raise ValueError(f"segment_ids have shape {x.shape}: give {wanted}, one for each place")
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"segment_ids are {x.dtype}: give integers")
    return first, second
