"""Which implementation of attention a case gets, and why it gets no kernel."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, Literal, get_args

import jax.numpy as jnp

from zero_jax.attention import cudnn
from zero_jax.attention.case import Band, Case, band_of
from zero_jax.attention.placement import KernelPlacement
from zero_jax.core.field_checks import check_word

Implementation = Literal["fused", "splash", "cudnn", "xla"]
_BY_PLATFORM = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}
# Splash attention may be asked for on CPUs, where Pallas interprets it.
_PLATFORMS = {"splash": ("tpu", "cpu"), "cudnn": ("gpu", "cuda")}
_FEW = 128  # places to which the kernels pad a sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The implementation of an attention.

    Attributes:
      implementation: `splash`, `cudnn` or `xla`.
      reason: why it is `xla`; empty for a kernel.
    """

    implementation: str
    reason: str = ""


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
    version = placement.compute_capability.partition(".")[0]
    if kernel == "cudnn" and version.isdigit() and int(version) < 8:  # before Ampere
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
    return {"splash": _not_splash, "cudnn": _not_cudnn}[kernel](query, key, value, case, band)


def _not_splash(query: Any, key: Any, value: Any, case: Case, band: Band) -> str:
    del key, value, band
    if query.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it takes bfloat16 and float32, not {query.dtype}"
    if case.segment_ids is not None and any(x.dtype.itemsize > 4 for x in case.segment_ids):
        return "segment_ids have 64 bits: give int32"
    return ""


def _not_cudnn(query: Any, key: Any, value: Any, case: Case, band: Band) -> str:
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {query.dtype}"
    head_size = query.shape[-1]
    if value.shape[-1] != head_size or head_size % 8 or head_size > cudnn.MAX_HEAD_SIZE:
        sizes = f"{head_size} and {value.shape[-1]}"
        return f"heads are {sizes} wide: it takes equal multiples of 8 up to {cudnn.MAX_HEAD_SIZE}"
    if case.segment_ids is not None or case.logits_soft_cap is not None:
        return "segment_ids and logits_soft_cap are for XLA alone on GPUs"
    if band.right not in (None, 0) or (band.left is not None and band.right is None):
        return "its windows are causal: give is_causal=True"
    has_lengths = case.query_seq_lengths is not None or case.key_value_seq_lengths is not None
    if band.left is not None and has_lengths:
        return "it takes windows or lengths, not both"
    if band.right == 0 and query.shape[1] != key.shape[1]:
        return "it is causal for queries and keys of one length alone"
    if not cudnn.is_installed():
        return f"cuDNN is not installed: {cudnn.INSTALL}"
    return ""
