"""Chains of shardings that an array is moved through, and the primitive that moves it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from zero_jax.program.jaxprs import define_tangents

# `reshard` is linear: it moves an array through a chain of shardings, and its transpose moves the cotangent through
# another chain. A primitive, not a `custom_vjp`, because forward mode must work too, and because a remat policy has to
# be able to tell a gathered param from everything else.

reshard_p = jex_core.Primitive("zero_reshard")


@dataclasses.dataclass(frozen=True)
class Chain:
    """Shardings that an array is moved through, in order, in the dtype given (None: its own).

    They are of the array with its last two dims swapped, if `swapped`. With a `coding`, what is moved is
    `coding.encode(x)`, arrays of as many dims that divide alike, and `coding.decode(arrays, dtype)` is the result.
    """

    shardings: tuple[NamedSharding, ...] = ()
    dtype: Any = None
    barrier: bool = False
    swapped: bool = False
    coding: Any = None


def reshard(x: jax.Array, *, forward: Chain, backward: Chain) -> jax.Array:
    """Moves `x` through the forward chain; its cotangent goes through the backward chain."""
    if not forward.shardings and not backward.shardings:
        return x
    return reshard_p.bind(x, forward=forward, backward=backward)


def _apply_chain(x: jax.Array, *, forward: Chain, backward: Chain) -> jax.Array:
    del backward
    dtype = x.dtype
    if forward.dtype is not None and jax.numpy.issubdtype(dtype, np.floating):  # complex ones keep theirs
        x = x.astype(forward.dtype)
    parts = [x] if forward.coding is None else forward.coding.encode(x)
    if forward.barrier:
        # Without it XLA:GPU moves a gather above the cast before it, and gathers the wider type.
        parts = lax.optimization_barrier(parts)
    parts = [jax.numpy.swapaxes(part, -1, -2) for part in parts] if forward.swapped else parts
    for sharding in forward.shardings:
        parts = [lax.with_sharding_constraint(part, sharding) for part in parts]
    parts = [jax.numpy.swapaxes(part, -1, -2) for part in parts] if forward.swapped else parts
    return parts[0].astype(dtype) if forward.coding is None else forward.coding.decode(parts, dtype)


def _result(x: jax.Array, *, forward: Chain, backward: Chain) -> jax.Array:
    return x if forward == Chain() else reshard_p.bind(x, forward=forward, backward=backward)


def _tangent(dot: Any, *, forward: Chain, backward: Chain) -> Any:
    exact = dataclasses.replace(forward, coding=None)  # codes are steps, without a slope: straight through
    return dot if isinstance(dot, ad.Zero) else reshard_p.bind(dot, forward=exact, backward=backward)


def _transpose(cotangent: Any, x: Any, *, forward: Chain, backward: Chain) -> list[Any]:
    del x
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    return [reshard_p.bind(cotangent, forward=backward, backward=forward)]


def lifted(chain: Chain) -> Chain:
    """Returns the chain for an array with one more dim in front."""
    specs = [(s.mesh, PartitionSpec(PartitionSpec.UNCONSTRAINED, *s.spec)) for s in chain.shardings]
    return dataclasses.replace(chain, shardings=tuple(NamedSharding(*each) for each in specs))


def _batch(args: Any, dims: Any, *, forward: Chain, backward: Chain) -> tuple[Any, int]:
    (x,), (dim,) = args, dims
    return reshard_p.bind(jax.numpy.moveaxis(x, dim, 0), forward=lifted(forward), backward=lifted(backward)), 0


reshard_p.def_abstract_eval(lambda x, **_: x)
reshard_p.def_impl(lambda x, **chains: jax.jit(_apply_chain, static_argnames=("forward", "backward"))(x, **chains))
define_tangents(reshard_p, _result, _tangent)
ad.primitive_transposes[reshard_p] = _transpose
batching.primitive_batchers[reshard_p] = _batch
mlir.register_lowering(reshard_p, mlir.lower_fun(_apply_chain, multiple_results=False))
