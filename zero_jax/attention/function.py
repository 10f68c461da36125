"""The public function: arguments are checked, and the implementation is chosen."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.typing import ArrayLike

from zero_jax.attention import cudnn, fused, xla
from zero_jax.attention.placement import KernelPlacement, current_placement
from zero_jax.attention.xla import Band, Case, band_of
from zero_jax.core.field_checks import check_value, check_word
from zero_jax.core.signatures import check_arguments
from zero_jax.core.tree import shown

Implementation = Literal["fused", "splash", "cudnn", "xla"]
_BY_PLATFORM = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}
# Splash attention may be asked for on CPUs, where Pallas interprets it.
_PLATFORMS = {"splash": ("tpu", "cpu"), "cudnn": ("gpu", "cuda")}
_FEW = 128  # places to which the kernels pad a sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The implementation of an attention."""

    implementation: str  # `splash`, `cudnn` or `xla`
    reason: str = ""  # why it is `xla`; empty for a kernel


def choose(query: Any, key: Any, value: Any, case: Case, *, wanted: str | None, placement: KernelPlacement) -> Choice:
    """Returns the implementation of an attention, from the shapes of its operands.

    Raises:
      ValueError: a kernel by name that cannot do it, or that there is none of.
    """
    check_word("implementation", wanted, get_args(Implementation), is_optional=True)
    if wanted == "xla":
        return Choice(implementation="xla", reason="implementation='xla'")
    kernel = wanted if wanted in _PLATFORMS else _BY_PLATFORM.get(placement.platform)
    if kernel is None:
        return Choice(implementation="xla", reason=f"there is no kernel for the platform {placement.platform!r}")
    reason = _why_not(kernel, query, key, value, case, placement)
    if reason and wanted == kernel:
        raise ValueError(f"implementation={wanted!r} cannot do this attention: {reason}; or give implementation=None")
    if not reason and wanted != kernel and min(query.shape[1], key.shape[1]) < _FEW:
        reason = f"sequences of less than {_FEW} places"
    return Choice(implementation="xla" if reason else kernel, reason=reason)


def _why_not(kernel: str, query: Any, key: Any, value: Any, case: Case, placement: KernelPlacement) -> str:
    """Says why a kernel cannot do a case, and what to do; empty if it can."""
    (_, num_queries, num_heads, _), num_keys = query.shape, key.shape[1]
    if placement.platform not in _PLATFORMS[kernel]:
        return f"it is for {' and '.join(_PLATFORMS[kernel])}, and the devices are {placement.platform}"
    if placement.unknown:
        return placement.unknown
    if kernel == "cudnn" and _major(placement) < 8:  # Ampere
        return f"it needs compute capability 8.0, and the devices have {placement.compute_capability}"
    if case.bias is not None:
        return "a bias is for XLA alone"
    if case.mask is not None:
        return "a mask is for XLA alone: say what it masks by is_causal, local_window_size, segment_ids or lengths"
    if not isinstance(case.scale, numbers.Real):
        return "the scale is an array: give a number, and multiply the queries by the rest"
    if 0 in (*query.shape, *key.shape, *value.shape):
        return f"there is nothing in query {query.shape}, key {key.shape} or value {value.shape}"
    band = band_of(case, num_queries, num_keys)
    if band.has_unseeing(num_queries, num_keys):
        return "some queries see no key: give a wider local_window_size"
    if num_heads % placement.num_head_shards:
        return f"the {num_heads} heads do not divide over the {placement.num_head_shards} devices of the model axis"
    return _not_splash(query, case) if kernel == "splash" else _not_cudnn(query, key, value, case, band, placement)


def _major(placement: KernelPlacement) -> int:
    """Returns the major compute capability of NVIDIA GPUs: Hopper's, where it is not known."""
    own = placement.compute_capability.partition(".")[0]
    return int(own) if own.isdigit() else 9


def _not_splash(query: Any, case: Case) -> str:
    if query.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it takes bfloat16 and float32, not {query.dtype}"
    if case.segment_ids is not None and any(x.dtype.itemsize > 4 for x in case.segment_ids):
        return "segment_ids have 64 bits: give int32"
    return ""


def _not_cudnn(query: Any, key: Any, value: Any, case: Case, band: Band, placement: KernelPlacement) -> str:
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {query.dtype}"
    sizes, major = (query.shape[-1], value.shape[-1]), _major(placement)
    most = cudnn.WIDE_HEAD_SIZE if major in cudnn.WITH_WIDE_HEADS else cudnn.MAX_HEAD_SIZE
    takes_segments = major in cudnn.WITH_SEGMENTS
    has_own_values = sizes == cudnn.OWN_VALUES and takes_segments
    if not has_own_values and (sizes[0] != sizes[1] or sizes[0] % 8 or sizes[0] > most):
        pair = " or {} and {}".format(*cudnn.OWN_VALUES) if takes_segments else ""
        return f"heads are {sizes[0]} and {sizes[1]} wide: it takes equal multiples of 8 up to {most}{pair}"
    if case.logits_soft_cap is not None:
        return "logits_soft_cap is for XLA alone on GPUs"
    if band.right not in (None, 0) or (band.left is not None and band.right is None):
        return "its windows are causal: give is_causal=True"
    has_lengths = case.query_seq_lengths is not None or case.key_value_seq_lengths is not None
    if band.left is not None and has_lengths:
        return "it takes windows or lengths, not both"
    if case.segment_ids is not None:
        if not takes_segments:
            return f"segments need compute capability 9 or 10, and the devices have {placement.compute_capability}"
        if case.segment_ids[0] is not case.segment_ids[1]:
            return "it takes one array of segment_ids, not a pair for queries and keys"
        if band.left is not None or has_lengths or sizes[0] != sizes[1]:
            return "it takes segments or windows, lengths and values of another width, not both"
    if band.right == 0 and query.shape[1] != key.shape[1]:
        return "it is causal for queries and keys of one length alone"
    version = cudnn.installed_version()
    if not version:
        return f"cuDNN is not installed: {cudnn.INSTALL}"
    if has_own_values and version < cudnn.FIRST_WITH_OWN_VALUES:
        return f"heads are {sizes[0]} and {sizes[1]} wide: cuDNN takes them from 9.10 on, and {version} is installed"
    return ""


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
    out = _attention(q, k, v, case, implementation, _placement(mesh))
    return out if np.ndim(query) == 4 else out[0]


def _attention(q: Array, k: Array, v: Array, case: Case, wanted: str | None, placement: KernelPlacement) -> Array:
    kernel = choose(q, k, v, case, wanted=wanted, placement=placement).implementation
    if kernel == "xla":
        return xla.attention(q, k, v, case)
    return fused.attention(q, k, v, case, kernel=kernel, placement=placement)


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
    q, k, v = (_array(name, x, 4) for name, x in (("query", query), ("key", key), ("value", value)))
    _check_shapes(q, k, v)
    everything: dict[str, Any] = {"scale": None} | options
    raw = Case(**everything)  # as the user gives it
    _check_numbers(raw)
    scale = 1 / math.sqrt(q.shape[-1]) if raw.scale is None else raw.scale
    wanted = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    case = dataclasses.replace(
        raw,
        scale=scale if isinstance(scale, jax.Array) else float(scale),
        bias=_of_logits("bias", raw.bias, wanted),
        mask=_of_logits("mask", raw.mask, wanted),
        query_seq_lengths=_lengths("query_seq_lengths", raw.query_seq_lengths, q),
        key_value_seq_lengths=_lengths("key_value_seq_lengths", raw.key_value_seq_lengths, k),
        local_window_size=_window(raw.local_window_size),
        segment_ids=_segments(raw.segment_ids, q, k),
        logits_soft_cap=None if raw.logits_soft_cap is None else float(raw.logits_soft_cap),
    )
    if case.mask is not None and case.mask.dtype != bool:
        raise ValueError(f"mask is {case.mask.dtype}: give bool, False where a query does not see a key")
    return q, k, v, case


def _array(name: str, x: Any, num_dims: int | None = None) -> Array:
    """Returns an array, with a leading dim of size 1 if it has one less than `num_dims`, else raises `ValueError`."""
    if not isinstance(x, jax.Array | np.ndarray) or not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool):
        raise ValueError(f"{name}={shown(x)} is no array of numbers: give a JAX or numpy array")
    if num_dims is not None and x.ndim not in (num_dims, num_dims - 1):
        raise ValueError(f"{name} has shape {x.shape}: give {num_dims} dims, or {num_dims - 1} without a batch")
    return jnp.asarray(x) if num_dims in (None, x.ndim) else jnp.asarray(x)[None]


def _of_logits(name: str, x: Any, wanted: tuple[int, ...]) -> Array | None:
    if x is None:
        return None
    array = _array(name, x, 4)
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


def _check_numbers(raw: Case) -> None:
    """Raises `ValueError` for a scale, a switch or a cap of another kind; a scale may be traced."""
    if not (isinstance(raw.scale, jax.Array) and raw.scale.shape == ()):
        check_value("scale", raw.scale, float, is_optional=True)
    check_value("is_causal", raw.is_causal, bool)
    check_value("logits_soft_cap", raw.logits_soft_cap, float, is_optional=True)
    if raw.logits_soft_cap is not None and raw.logits_soft_cap <= 0:
        raise ValueError(f"logits_soft_cap={raw.logits_soft_cap}: give a positive number, or None for no cap")


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
    first = _array("segment_ids", of_query, 2)
    second = first if of_key is of_query else _array("segment_ids", of_key, 2)
    for x, wanted in ((first, query.shape[:2]), (second, key.shape[:2])):
        if x.shape != wanted:
            raise ValueError(f"segment_ids have shape {x.shape}: give {wanted}, one for each place")
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"segment_ids are {x.dtype}: give integers")
    return first, second
