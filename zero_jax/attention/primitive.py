"""Fused attention as three primitives: the values, their tangents, and the cotangents of the operands.

To every transform an attention is one operation whose operands and results have examples along their leading dims. What
runs is decided when it is lowered: there the platform is known, and which mesh axes an outer `shard_map` has taken.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from zero_jax.attention import cudnn, splash, xla
from zero_jax.attention.placement import KernelPlacement, on_shards
from zero_jax.attention.xla import Band, Case, Operands

# The name of the results and of their log-sum-exps, for remat policies: with both no kernel runs twice.
RESIDUALS = "zero_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What a fused attention does, beside its operands.

    Attributes:
      kernel: `splash` or `cudnn`.
      scale: what logits are multiplied by.
      band: which keys a query sees by its place.
      soft_cap: c, where logits x are replaced by c tanh(x / c).
      placement: the devices.
    """

    kernel: str
    scale: float
    band: Band
    soft_cap: float | None
    placement: KernelPlacement


# Operands: query [B, T, N, H], key [B, S, K, H], value [B, S, K, V], and of a kernel's own, each with B in front: the
# segments [B, T] and [B, S] (splash), the lengths [B] and [B] (cuDNN).
attention_p = jex_core.Primitive("zero_attention")  # -> result [B, T, N, V], log-sum-exp [B, N, T] in float32
tangent_p = jex_core.Primitive("zero_attention_tangent")  # + result, log-sum-exp, three tangents -> [B, T, N, V]
cotangents_p = jex_core.Primitive("zero_attention_cotangents")  # + result, log-sum-exp, cotangent -> three
attention_p.multiple_results = cotangents_p.multiple_results = True
PRIMITIVES = (attention_p, tangent_p, cotangents_p)


def attention(query: jax.Array, key: jax.Array, value: jax.Array, extras: Sequence[jax.Array], call: Call) -> jax.Array:
    """Returns the attention `[B, T, N, V]` by a kernel."""
    return attention_p.bind(query, key, value, *extras, call=call)[0]


# --- shapes, derivatives, batches -------------------------------------------------------------------------------------


def _attention_shapes(query: Any, key: Any, value: Any, *extras: Any, call: Call) -> list[Any]:
    del key, extras, call
    b, t, n, _ = query.shape
    return [query.update(shape=(b, t, n, value.shape[-1])), query.update(shape=(b, n, t), dtype=jnp.dtype("float32"))]


def _attention_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> Any:
    out, lse = (checkpoint_name(x, RESIDUALS) for x in attention_p.bind(*primals, call=call))
    moved = [ad.instantiate_zeros(tangent) for tangent in tangents[:3]]
    tangent = tangent_p.bind(*primals, out, lse, *moved, call=call)
    return [out, lse], [tangent, ad.Zero(jax.typeof(lse))]


def _tangent_transpose(cotangent: Any, *operands: Any, call: Call) -> list[Any]:
    known = operands[:-3]
    if isinstance(cotangent, ad.Zero):
        return [None] * len(operands)
    cotangents = cotangents_p.bind(*known, cotangent, call=call)
    linear = [ad.is_undefined_primal(x) for x in operands[-3:]]
    return [*[None] * len(known), *(x if wanted else None for x, wanted in zip(cotangents, linear, strict=True))]


def _batch(primitive: Any, axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], *, call: Call) -> Any:
    """Makes the mapped dim a part of the batch: the major part if it is sharded over devices, else the minor one."""
    at = 0 if axis_data.spmd_name is not None else 1
    # An order of the axes other than that of the batch's parts would move all operands and results.
    call = dataclasses.replace(call, placement=call.placement.mapped_over(axis_data.spmd_name or ()))

    def merge(x: Any, dim: Any) -> Any:
        x = jnp.broadcast_to(x[None], (axis_data.size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        x = jnp.moveaxis(x, 0, at)
        return x.reshape(-1, *x.shape[2:])

    results = primitive.bind(*(merge(x, dim) for x, dim in zip(operands, dims, strict=True)), call=call)
    split = lambda x: x.reshape(*((axis_data.size, -1) if at == 0 else (-1, axis_data.size)), *x.shape[1:])  # noqa: E731
    if not primitive.multiple_results:
        return split(results), at
    return [split(x) for x in results], [at] * len(results)


def _case(call: Call, of: Operands) -> Case:
    case = Case(
        scale=call.scale,
        mask=xla.in_band(call.band, of.query.shape[1], of.key.shape[1])[None, None],
        logits_soft_cap=call.soft_cap,
    )
    if not of.extras:
        return case
    if call.kernel == "cudnn":
        return dataclasses.replace(case, key_value_seq_lengths=of.extras[1])
    return dataclasses.replace(case, segment_ids=(of.extras[0], of.extras[1]))


def _plain(call: Call, extras: Sequence[Any]) -> Callable[..., Any]:
    """Returns the attention of queries, keys and values by XLA, which may be differentiated at will."""

    def attention(query: Any, key: Any, value: Any) -> Any:
        return xla.attention(query, key, value, _case(call, Operands(query, key, value, extras)))

    return attention


def _second_order(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> Any:
    """Differentiates the cotangents by the plain form: of second derivatives there is no kernel."""

    def cotangents(query: Any, key: Any, value: Any, cotangent: Any) -> Any:
        return jax.vjp(_plain(call, primals[3:-3]), query, key, value)[1](cotangent)

    moved = [ad.instantiate_zeros(tangents[i]) for i in (0, 1, 2, -1)]
    _, out = jax.jvp(cotangents, [*primals[:3], primals[-1]], moved)
    return cotangents_p.bind(*primals, call=call), list(out)


attention_p.def_abstract_eval(_attention_shapes)
tangent_p.def_abstract_eval(lambda *avals, call: _attention_shapes(*avals, call=call)[0])
cotangents_p.def_abstract_eval(lambda *avals, call: list(avals[:3]))
ad.primitive_jvps[attention_p] = _attention_jvp
ad.primitive_jvps[cotangents_p] = _second_order
ad.primitive_transposes[tangent_p] = _tangent_transpose
for _primitive in PRIMITIVES:
    _primitive.def_impl(jax.jit(_primitive.bind, static_argnames="call"))
    batching.fancy_primitive_batchers[_primitive] = functools.partial(_batch, _primitive)


# --- what runs --------------------------------------------------------------------------------------------------------


def _forward(*operands: Any, call: Call, kernel: Any) -> Any:
    query, key, value, *extras = operands
    of = Operands(query, key, value, extras)
    if kernel is not None:
        return kernel.forward(of, call)
    case = _case(call, of)
    return [xla.attention(query, key, value, case), xla.log_sum_exp(query, key, case)]


def _backward(*operands: Any, call: Call, kernel: Any) -> Any:
    query, key, value, *extras, out, lse, cotangent = operands
    if kernel is not None:
        of = Operands(query, key, value, extras)
        return kernel.backward(of, call, out=out, lse=lse, cotangent=cotangent)
    return list(jax.vjp(_plain(call, extras), query, key, value)[1](cotangent))


def _tangent(*operands: Any, call: Call, kernel: Any) -> Any:
    del kernel  # of forward mode there is none
    primals, extras, tangents = operands[:3], operands[3:-5], operands[-3:]
    return [jax.jvp(_plain(call, extras), primals, tangents)[1]]


# The kernel of a platform; on others the plain form runs.
_KERNELS = {
    ("splash", "tpu"): splash.Splash(interpret=False),
    ("splash", "cpu"): splash.Splash(interpret=True),
    ("cudnn", "cuda"): cudnn,
}


def _lower(run: Callable[..., Any], platform: str, ctx: Any, *operands: Any, call: Call) -> Any:
    """Lowers a kernel to one call on every device, on its examples and heads; other forms as they are."""
    kernel = _KERNELS.get((call.kernel, platform)) if run is not _tangent else None
    function = functools.partial(run, call=call, kernel=kernel)
    if kernel is not None:
        manual = getattr(ctx.module_context.axis_context, "manual_axes", frozenset())
        function = functools.partial(on_shards, function, call.placement, manual)
    return mlir.lower_fun(function)(ctx, *operands)


for _primitive, _run in ((attention_p, _forward), (tangent_p, _tangent), (cotangents_p, _backward)):
    mlir.register_lowering(_primitive, functools.partial(_lower, _run, "other"))
    for _platform in ("tpu", "cpu", "cuda"):
        mlir.register_lowering(_primitive, functools.partial(_lower, _run, _platform), platform=_platform)
