"""The public function: arguments are checked, and the implementation is chosen."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.typing import ArrayLike

from zero_jax.attention import fused, xla
from zero_jax.attention.case import Case
from zero_jax.attention.choice import Choice, choose
from zero_jax.attention.placement import KernelPlacement, current_placement
from zero_jax.core.field_checks import check_value
from zero_jax.core.signatures import check_arguments
from zero_jax.core.tree import shown

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

    Example:
      >>> x = jnp.ones((2, 16, 4, 8))
      >>> zero.dot_product_attention(x, x, x, is_causal=True).shape
      (2, 16, 4, 8)
    """
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    masks = {"is_causal": is_causal, "local_window_size": local_window_size, "segment_ids": segment_ids}
    logits = {"scale": scale, "bias": bias, "mask": mask, "logits_soft_cap": logits_soft_cap}
    q, k, v, case = _checked(query, key, value, lengths | masks | logits)
    placement = _placement(mesh)
    choice = choose(q, k, v, case, wanted=implementation, placement=placement)
    if choice.implementation == "xla":
        out = xla.attention(q, k, v, case)
    else:
        out = fused.attention(q, k, v, case, kernel=choice.implementation, placement=placement)
    return out if np.ndim(query) == 4 else out[0]


def attention_choice(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, mesh: Mesh | None = None, **options: Any
) -> Choice:
    """Returns which implementation `dot_product_attention` takes, and why it is no kernel.

    Arguments are those of `dot_product_attention`, but for `implementation`.
    """
    return choose(*_checked(query, key, value, options), wanted=None, placement=_placement(mesh))


def _placement(mesh: Mesh | None) -> KernelPlacement:
    if mesh is not None:
        check_arguments(mesh=mesh)
    return current_placement(mesh)


def _checked(query: Any, key: Any, value: Any, options: dict[str, Any]) -> tuple[Array, Array, Array, Case]:
    arrays = {name: _array(name, x) for name, x in (("query", query), ("key", key), ("value", value))}
    q, k, v = (_with_dims(name, x, 4) for name, x in arrays.items())
    _check_shapes(q, k, v)
    everything: dict[str, Any] = {"scale": None} | options
    given = Case(**everything)
    _check_numbers(given)
    scale = 1 / math.sqrt(q.shape[-1]) if given.scale is None else given.scale
    wanted = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    case = Case(
        scale=scale if isinstance(scale, jax.Array) else float(scale),
        bias=_of_logits("bias", given.bias, wanted),
        mask=_of_logits("mask", given.mask, wanted),
        is_causal=given.is_causal,
        query_seq_lengths=_lengths("query_seq_lengths", given.query_seq_lengths, q),
        key_value_seq_lengths=_lengths("key_value_seq_lengths", given.key_value_seq_lengths, k),
        local_window_size=_window(given.local_window_size),
        segment_ids=_segments(given.segment_ids, q, k),
        logits_soft_cap=None if given.logits_soft_cap is None else float(given.logits_soft_cap),
    )
    if case.mask is not None and case.mask.dtype != bool:
        raise ValueError(f"mask is {case.mask.dtype}: give bool, False where a query does not see a key")
    return q, k, v, case


def _array(name: str, x: Any) -> Array:
    """Returns an array; raises `ValueError` for what is none, such as a list."""
    if not isinstance(x, jax.Array | np.ndarray) or not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool):
        raise ValueError(f"{name}={shown(x)} is no array of numbers: give a JAX or numpy array")
    return jnp.asarray(x)


def _of_logits(name: str, x: Any, wanted: tuple[int, ...]) -> Array | None:
    if x is None:
        return None
    array = _with_dims(name, _array(name, x), 4)
    if any(size not in (1, full) for size, full in zip(array.shape, wanted, strict=True)):
        raise ValueError(f"{name} has shape {array.shape}: give {wanted} or 1 for any of these sizes")
    return array


def _lengths(name: str, x: Any, of: Array) -> Array | None:
    if x is None:
        return None
    lengths = _array(name, x)
    if lengths.shape != of.shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"{name} is {lengths.dtype}{list(lengths.shape)}: give integers of shape [{of.shape[0]}]")
    return lengths


def _window(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    sizes = (size, size) if isinstance(size, numbers.Integral) else size
    are_two = isinstance(sizes, Sequence) and len(sizes) == 2
    is_count = lambda n: isinstance(n, numbers.Integral) and not isinstance(n, bool) and int(n) >= 0  # noqa: E731
    if not are_two or not all(map(is_count, sizes)):
        raise ValueError(f"local_window_size={shown(size)}: give a number of places, or a pair (left, right), or None")
    return int(sizes[0]), int(sizes[1])


def _check_numbers(given: Case) -> None:
    """Raises `ValueError` for a scale, a switch or a cap of another kind; a scale may be traced."""
    if not (isinstance(given.scale, jax.Array) and given.scale.shape == ()):
        check_value("scale", given.scale, float, is_optional=True)
    check_value("is_causal", given.is_causal, bool)
    check_value("logits_soft_cap", given.logits_soft_cap, float, is_optional=True)
    if given.logits_soft_cap is not None and given.logits_soft_cap <= 0:
        raise ValueError(f"logits_soft_cap={given.logits_soft_cap}: give a positive number, or None for no cap")


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
    if is_pair and (len(segment_ids) != 2 or isinstance(segment_ids, str | bytes)):
        raise ValueError(f"segment_ids={shown(segment_ids)}: give one array, or a pair for queries and keys")
    of_query, of_key = segment_ids if is_pair else (segment_ids, segment_ids)
    first = _with_dims("segment_ids", _array("segment_ids", of_query), 2)
    second = first if of_key is of_query else _with_dims("segment_ids", _array("segment_ids", of_key), 2)
    for x, wanted in ((first, query.shape[:2]), (second, key.shape[:2])):
        if x.shape != wanted:
            raise ValueError(f"segment_ids have shape {x.shape}: give {wanted}, one for each place")
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"segment_ids are {x.dtype}: give integers")
    return first, second
