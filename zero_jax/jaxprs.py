"""What zero_jax knows of JAX's internals: how jaxprs are opened and bound, and the primitive that moves shards.

Everything here that differs between JAX releases is hidden behind one small function and tested on the oldest and the
newest supported release. No other module looks into an equation's parameters by release.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import NamedSharding, PartitionSpec

if jax.__version_info__ < (0, 10):
    raise ImportError(f"zero_jax needs JAX 0.10 or newer, but this is {jax.__version__}: run `pip install -U jax`")

Jaxpr = Any
JaxprEqn = Any


def open_jaxpr(jaxpr: Jaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns an open jaxpr and its constants, from an open or a closed one (JAX 0.12 merged the two types)."""
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def inner_jaxprs(eqn: JaxprEqn) -> tuple[Jaxpr, ...]:
    """Returns the jaxprs among an equation's parameters, branches included."""
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "eqns"):
                found.append(item)
    return tuple(found)


def is_literal(atom: Any) -> bool:
    """Tells whether an input of an equation is a literal rather than a variable."""
    return isinstance(atom, jex_core.Literal)


@contextlib.contextmanager
def source_context(eqn: JaxprEqn) -> Iterator[None]:
    """Gives what is traced inside the source line, name stack and trace-time settings of an equation."""
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack), eqn.ctx.manager:
        yield


def bind(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Evaluates an equation on values and returns its results, always as a list."""
    params = eqn.primitive.get_bind_params(eqn.params)
    subfuns: Sequence[Any] = ()
    if isinstance(params, tuple):  # releases before 0.10.1 returned the subfunctions apart
        subfuns, params = params
    with source_context(eqn):
        result = eqn.primitive.bind(*subfuns, *values, **params)
    return list(result) if eqn.primitive.multiple_results else [result]


def source_line(eqn: JaxprEqn) -> str:
    """Returns `file:line (function)` of the user's code that an equation came from."""
    return source_info_util.summarize(eqn.source_info)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanParts:
    """The parts of a `scan` equation: `jaxpr` takes `num_consts` constants, `num_carry` carries, then slices."""

    jaxpr: Jaxpr
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int


def scan_parts(eqn: JaxprEqn) -> ScanParts:
    """Returns the parts of a `scan` equation (JAX 0.12 keeps the counts in a tree, `ft_in`)."""
    params = eqn.params
    if "num_consts" in params:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    else:
        num_consts, num_carry, _ = (len(part) for part in params["ft_in"].unpack())
    return ScanParts(
        jaxpr=params["jaxpr"],
        num_consts=num_consts,
        num_carry=num_carry,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )


def has_explicit_shardings(eqn: JaxprEqn) -> bool:
    """Tells whether a `jit` equation fixes the sharding of an argument or a result."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)


# --- the primitive ---------------------------------------------------------------------------------------------------
# `reshard` is linear: it moves an array through a chain of shardings, and its transpose moves the cotangent through
# another chain. A primitive, not a `custom_vjp`, because forward mode must work too, and because a remat policy has to
# be able to tell a gathered param from everything else.

reshard_p = jex_core.Primitive("zero_reshard")


@dataclasses.dataclass(frozen=True)
class Chain:
    """Shardings that an array is moved through, in order, in the dtype given (None: its own)."""

    shardings: tuple[NamedSharding, ...] = ()
    dtype: Any = None
    barrier: bool = False


def reshard(x: jax.Array, *, forward: Chain, backward: Chain) -> jax.Array:
    """Moves `x` through the forward chain; its cotangent goes through the backward chain."""
    if not forward.shardings and not backward.shardings:
        return x
    return reshard_p.bind(x, forward=forward, backward=backward)


def _apply_chain(x: jax.Array, *, forward: Chain, backward: Chain) -> jax.Array:
    del backward
    dtype = x.dtype
    if forward.dtype is not None and jax.numpy.issubdtype(dtype, np.inexact):
        x = x.astype(forward.dtype)
    if forward.barrier:
        # Without it XLA:GPU moves a gather above the cast before it, and gathers the wider type.
        x = lax.optimization_barrier(x)
    for sharding in forward.shardings:
        x = lax.with_sharding_constraint(x, sharding)
    return x.astype(dtype)


def _transpose(cotangent: Any, x: Any, *, forward: Chain, backward: Chain) -> list[Any]:
    del x
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    return [reshard_p.bind(cotangent, forward=backward, backward=forward)]


def _batch(args: Any, dims: Any, *, forward: Chain, backward: Chain) -> tuple[Any, int]:
    (x,), (dim,) = args, dims

    def lift(chain: Chain) -> Chain:
        specs = (PartitionSpec(PartitionSpec.UNCONSTRAINED, *s.spec) for s in chain.shardings)
        lifted = tuple(NamedSharding(s.mesh, spec) for s, spec in zip(chain.shardings, specs, strict=True))
        return dataclasses.replace(chain, shardings=lifted)

    return reshard_p.bind(jax.numpy.moveaxis(x, dim, 0), forward=lift(forward), backward=lift(backward)), 0


reshard_p.def_abstract_eval(lambda x, **_: x)
reshard_p.def_impl(lambda x, **chains: jax.jit(_apply_chain, static_argnames=("forward", "backward"))(x, **chains))
ad.deflinear2(reshard_p, _transpose)
batching.primitive_batchers[reshard_p] = _batch
mlir.register_lowering(reshard_p, mlir.lower_fun(_apply_chain, multiple_results=False))


def refuse_gathered(policy: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Returns a remat policy which never saves a gathered param and otherwise is the one given."""
    if policy is None:
        return None

    def refusing(primitive: Any, *args: Any, **params: Any) -> Any:
        return False if primitive is reshard_p else policy(primitive, *args, **params)

    return refusing


def used_inputs(fn: Callable[..., Any], avals: list[Any]) -> list[bool]:
    """Tells which of a list of inputs the results of `fn(inputs)` depend on, by the trace of `fn`."""
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(fn)(avals))
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return list(used)
