"""The params of one of several groups of a stage's layers, which is another one from tick to tick.

A primitive, because the gradient of an index is written into zeros before it is added: that of a group is selected.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from zero_jax.dims import is_float

group_p = jex_core.Primitive("zero_group")


def group_of(num_groups: int, number: jax.Array, stack: jax.Array, dtype: Any) -> jax.Array:
    """Returns the params `[layers, ...]` of a group of a stage's layers, of those of all groups, in a dtype."""
    if num_groups == 1:
        return stack if stack.dtype == dtype else stack.astype(dtype)
    groups = stack.reshape(num_groups, stack.shape[0] // num_groups, *stack.shape[1:])
    return group_p.bind(groups, number, dtype=dtype) if is_float(stack) else groups[number]


def _taken(groups: jax.Array, number: jax.Array, *, dtype: Any) -> jax.Array:
    take = lambda x, i: lax.dynamic_index_in_dim(x, i, 0, keepdims=False)  # noqa: E731
    for _ in range(number.ndim):
        take = jax.vmap(take)
    return take(groups, number).astype(dtype)


def _batch(arrays: Any, dims: Any, **params: Any) -> tuple[Any, int]:
    size = next(x.shape[dim] for x, dim in zip(arrays, dims, strict=True) if dim is not None)
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(arrays, dims, strict=True)
    ]
    return group_p.bind(*moved, **params), 0


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    (groups, number), dot = primals, tangents[0]
    made = group_p.bind(groups, number, **params)
    return made, ad.Zero.from_primal_value(made) if isinstance(dot, ad.Zero) else group_p.bind(dot, number, **params)


def _transpose(cotangent: Any, groups: Any, number: Any, **_: Any) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [None, None]
    aval, depth = groups.aval, number.ndim
    is_own = jnp.arange(aval.shape[depth]) == number[..., None]
    cotangent = jnp.expand_dims(cotangent.astype(aval.dtype), depth)
    is_own = is_own.reshape(*is_own.shape, *[1] * (cotangent.ndim - is_own.ndim))
    return [jnp.where(is_own, cotangent, jnp.zeros_like(cotangent)), None]


group_p.def_impl(_taken)
group_p.def_abstract_eval(
    lambda groups, number, *, dtype: groups.update(
        shape=(*groups.shape[: number.ndim], *groups.shape[number.ndim + 1 :]), dtype=jnp.dtype(dtype)
    )
)
ad.primitive_jvps[group_p] = _jvp
ad.primitive_transposes[group_p] = _transpose
batching.primitive_batchers[group_p] = _batch
mlir.register_lowering(group_p, mlir.lower_fun(_taken, multiple_results=False))
