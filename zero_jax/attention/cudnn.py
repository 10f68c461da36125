"""Attention on NVIDIA GPUs: the flash attention of cuDNN, through JAX's primitives for it."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.attention.xla import Band, Operands
from zero_jax.core.extras import pip_install

INSTALL = f'{pip_install("zero-jax[cuda]")}, or "zero-jax[gpu-compiler]" for plans on machines without a GPU'
MAX_HEAD_SIZE = 128  # 256 from Hopper on, which JAX asks a device for that a plan does not have


def is_installed() -> bool:
    """Tells whether the library is there, which the compiler asks for the kernels."""
    versions = importlib.import_module("jax._src.lib").cuda_versions
    try:
        return versions is not None and versions.cudnn_get_version() > 0
    except RuntimeError:
        return False


def forward(of: Operands, call: Any) -> list[jax.Array]:
    """Returns results `[B, T, N, V]` and log-sum-exps `[B, N, T]`."""
    return list(_kernels()._dot_product_attention_fwd_impl(**_arguments(of, call), is_training=True))


def backward(of: Operands, call: Any, *, out: jax.Array, lse: jax.Array, cotangent: jax.Array) -> list[jax.Array]:
    """Returns the cotangents of query, key and value."""
    results = {"activation": lse, "fwd_output": out, "grad_output": cotangent}
    return list(_kernels()._dot_product_attention_bwd_impl(**_arguments(of, call), **results))


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")


def _arguments(of: Operands, call: Any) -> dict[str, Any]:
    kernels, unused = _kernels(), jnp.zeros(0, of.query.dtype)
    mask, window = mask_and_window(call.band, has_lengths=bool(of.extras))
    of_query, of_key = of.extras or (unused, unused)
    arguments: dict[str, Any] = dict.fromkeys(
        ("bias", "q_offsets", "kv_offsets", "page_table_k", "page_table_v"), unused
    )
    arguments |= dict(
        query=of.query,
        key=of.key,
        value=of.value,
        q_seqlen=of_query,
        kv_seqlen=of_key,
        scale=call.scale,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=kernels.MaskType[mask],
        layout=kernels.AttentionLayout.BTNH.value,
        sliding_window_length=window,
    )
    if "score_mod" in inspect.signature(kernels._dot_product_attention_fwd_impl).parameters:  # JAX 0.12
        arguments |= {"score_mod": None, "score_mod_args": ()}
    return arguments


def mask_and_window(band: Band, *, has_lengths: bool) -> tuple[str, int | None]:
    """Returns cuDNN's kind of mask, and the number of keys that a query sees, itself included."""
    kinds = ["PADDING"] * has_lengths + ["CAUSAL"] * (band.right == 0)
    return "_".join(kinds) or "NO_MASK", None if band.left is None else band.left + 1
