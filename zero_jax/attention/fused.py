"""An attention by a kernel, as three primitives: the values, their tangents, and the cotangents of the operands.

To every transform an attention is one operation whose operands and results have examples along their leading dims. What
runs is decided when it is lowered: there the platform is known, and which mesh axes an outer `shard_map` has taken.
What the kernel does not know of a case is done around it (`attention`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from zero_jax.attention import cudnn, splash, xla
from zero_jax.attention.placement import KernelPlacement, on_shards
from zero_jax.attention.xla import Band, Case, Operands, band_of, visible

# The name of the results and of their log-sum-exps, for remat policies: with both no kernel runs twice.
RESIDUALS = "zero_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What a fused attention does, beside its operands."""

    kernel: str  # `splash` or `cudnn`
    scale: float  # what logits are multiplied by
    band: Band  # which keys a query sees by its place
    soft_cap: float | None  # c, where logits x are replaced by c tanh(x / c)
    placement: KernelPlacement  # the devices


# Operands: query [B, T, N, H], key [B, S, K, H], value [B, S, K, V], and of a kernel's own, each with B in front: the
# segments [B, T] and [B, S] (splash); the segments [B, T], or the lengths [B] and [B] (cuDNN).
attention_p = jex_core.Primitive("zero_attention")  # -> result [B, T, N, V], log-sum-exp [B, N, T] in float32
tangent_p = jex_core.Primitive("zero_attention_tangent")  # + result, log-sum-exp, three tangents -> [B, T, N, V]
cotangents_p = jex_core.Primitive("zero_attention_cotangents")  # + result, log-sum-exp, cotangent -> three
attention_p.multiple_results = cotangents_p.multiple_results = True
PRIMITIVES = (attention_p, tangent_p, cotangents_p)


def _attention_shapes(query: Any, key: Any, value: Any, *extras: Any, call: Call) -> list[Any]:
    del key, extras, call
    b, t, n, _ = query.shape
    return [query.update(shape=(b, t, n, value.shape[-1])), query.update(shape=(b, n, t), dtype=jnp.dtype("float32"))]


def _attention_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> Any:
    out, lse = (checkpoint_name(x, RESIDUALS) for x in attention_p.bind(*primals, call=call))
    dots = [ad.instantiate_zeros(tangent) for tangent in tangents[:3]]
    tangent = tangent_p.bind(*primals, out, lse, *dots, call=call)
    # Of the log-sum-exps nothing is differentiated: only the backward kernel reads them.
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
    if of.extras[0].ndim == 1:
        return dataclasses.replace(case, key_value_seq_lengths=of.extras[1])
    return dataclasses.replace(case, segment_ids=(of.extras[0], of.extras[-1]))


def _plain(call: Call, extras: Sequence[Any]) -> Callable[..., Any]:
    """Returns the attention of queries, keys and values by XLA, which may be differentiated at will."""

    def attention(query: Any, key: Any, value: Any) -> Any:
        return xla.attention(query, key, value, _case(call, Operands(query, key, value, extras)))

    return attention


def _second_order(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> Any:
    """Differentiates the cotangents by the plain form: of second derivatives there is no kernel."""

    def cotangents(query: Any, key: Any, value: Any, cotangent: Any) -> Any:
        return jax.vjp(_plain(call, primals[3:-3]), query, key, value)[1](cotangent)

    dots = [ad.instantiate_zeros(tangents[i]) for i in (0, 1, 2, -1)]
    _, out = jax.jvp(cotangents, [*primals[:3], primals[-1]], dots)
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
        manual = getattr(ctx.module_context.axis_context, "manual_axes", frozenset())  # of outer `shard_map`s
        function = functools.partial(on_shards, function, call.placement, manual)
    return mlir.lower_fun(function)(ctx, *operands)


for _primitive, _run in ((attention_p, _forward), (tangent_p, _tangent), (cotangents_p, _backward)):
    mlir.register_lowering(_primitive, functools.partial(_lower, _run, "other"))
    for _platform in ("tpu", "cpu", "cuda"):
        mlir.register_lowering(_primitive, functools.partial(_lower, _run, _platform), platform=_platform)


def attention(query: Array, key: Array, value: Array, case: Case, *, kernel: str, placement: KernelPlacement) -> Array:
    """Returns the attention `[B, T, N, V]` of a case that a kernel can do."""
    band = band_of(case, query.shape[1], key.shape[1])
    call = Call(kernel=kernel, scale=case.scale, band=band, soft_cap=case.logits_soft_cap, placement=placement)
    if kernel == "splash":
        extras = _segments(query, key, case)
    else:
        extras = _lengths(query, key, case) if case.segment_ids is None else [case.segment_ids[0]]
    keys, values = (_repeated(x, query.shape[2], placement.num_head_shards) for x in (key, value))
    out = attention_p.bind(query, keys, values, *extras, call=call)[0]
    # As `jax.nn.dot_product_attention` has it: the kernels return something else for rows that see no key.
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
    # As few times as make one head a device; else as often as there are queries for it, whose heads divide.
    times = num_shards // num_heads if num_shards % num_heads == 0 else num_query_heads // num_heads
    return jnp.repeat(x, times, axis=2)


def _lengths(query: Array, key: Array, case: Case) -> list[Array]:
    """Returns the lengths of queries and keys, at least 1, if there are any."""
    if case.query_seq_lengths is None and case.key_value_seq_lengths is None:
        return []
    pairs = ((case.query_seq_lengths, query), (case.key_value_seq_lengths, key))
    lengths = (jnp.full(x.shape[0], x.shape[1], jnp.int32) if n is None else n for n, x in pairs)
    return [jnp.maximum(n, 1).astype(jnp.int32) for n in lengths]  # what no query sees is replaced by `attention`


def _segments(query: Array, key: Array, case: Case) -> list[Array]:
    """Returns the segments of queries and keys, of which keys that are padding have one of their own."""
    lengths, ids = case.key_value_seq_lengths, case.segment_ids
    if lengths is None:
        return [] if ids is None else [x.astype(jnp.int32) for x in ids]
    of_query, of_key = ids or (jnp.zeros(query.shape[:2], jnp.int32), jnp.zeros(key.shape[:2], jnp.int32))
    of_query, of_key = of_query.astype(jnp.int32), of_key.astype(jnp.int32)
    is_key = jnp.arange(key.shape[1]) < lengths[:, None]
    unused = jnp.min(of_query, axis=1, keepdims=True) - 1  # the segment of no query
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


def attention_work(query: Any, key: Any, value: Any, *, call: Call, backward: bool) -> tuple[float, float]:
    """Returns the work of one execution of a fused attention over all devices, or of its cotangents (`backward`).

    Of the arrays, `[B, T, N, H]`, `[B, S, K, H]` and `[B, S, K, V]`, only shapes and dtypes are read.

    Returns:
      Operations of its products, for the keys that a query sees (of splash attention, in all blocks it visits), and
      bytes that are moved to add the parts in which splash attention makes the queries' cotangents.
    """
    if call.kernel == "splash":
        return splash.work(query, key, value, call, backward=backward)
    (b, t, n, h), num_keys = query.shape, key.shape[1]
    seen = np.maximum(call.band.last(t, num_keys) - call.band.first(t) + 1, 0).sum()
    products = 5 if backward else 2  # scores and result; the scores again, and four gradients
    return 2.0 * products * b * n * h * float(seen), 0.0
