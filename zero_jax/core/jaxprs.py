"""What zero_jax knows of JAX's internals: how jaxprs are opened and bound, and the primitive that moves shards.

Everything here that differs between JAX releases is hidden behind one small function and tested on the oldest and the
newest supported release. No other module looks into an equation's parameters by release. `subcalls` lists the
primitives that run other jaxprs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import core, lax
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies
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


def with_results(jaxpr: Jaxpr, atoms: Sequence[Any], **parts: Any) -> Jaxpr:
    """Returns a jaxpr, open or closed, with other variables or literals for its results, and other `parts` of it."""
    if not hasattr(jaxpr, "consts"):
        return jaxpr.replace(outvars=list(atoms), **parts)
    return jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(outvars=list(atoms), **parts))


def conditional(pred: jax.Array, closed: Jaxpr, operands: Sequence[Any], *, otherwise: Sequence[Any]) -> list[Any]:
    """Returns the results of a closed jaxpr where `pred`, else some of its operands: `lax.cond` of what is traced.

    Args:
      pred: `bool[]`.
      closed: the jaxpr.
      operands: arrays that it takes.
      otherwise: those of them that are returned where `pred` is false, of the shapes and dtypes of the results.
    """
    jaxpr, _ = open_jaxpr(closed)
    variables = dict(zip(map(id, operands), jaxpr.invars, strict=True))
    old = [variables[id(x)] for x in otherwise]
    changed = {i for i, (var, same) in enumerate(zip(jaxpr.outvars, old, strict=True)) if var is not same}
    new = closed if len(changed) == len(old) else with_results(closed, [jaxpr.outvars[i] for i in sorted(changed)])
    branches = with_results(closed, [old[i] for i in sorted(changed)], eqns=[]), new
    made = iter(lax.cond_p.bind(lax.convert_element_type(pred, np.int32), *operands, branches=branches))
    return [next(made) if i in changed else x for i, x in enumerate(otherwise)]


def literal(value: Any) -> Any:
    """Returns a scalar as an atom of a jaxpr."""
    return jex_core.Literal(value, jax.typeof(value))


def stands_for(fn: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator of a function that calls `fn` on other arguments: JAX's errors are to name `fn`."""

    def decorate(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(wrapper)
        functools.update_wrapper(wrapper, fn)
        wrapper.__signature__ = signature  # type: ignore[attr-defined]
        return wrapper

    return decorate


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
    # Within JAX's own jitted functions there is no line of the user's: the one around them stays.
    traceback = eqn.source_info.traceback if source_line(eqn) else None
    with source_info_util.user_context(traceback, name_stack=name_stack), eqn.ctx.manager:
        yield


def bind(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Evaluates an equation on values and returns its results, always as a list."""
    with source_context(eqn):
        result = bind_primitive(eqn.primitive, eqn.params, *values)
    return list(result) if eqn.primitive.multiple_results else [result]


def bind_primitive(primitive: Any, params: dict[str, Any], *values: Any) -> Any:
    """Applies a primitive to values, with the parameters that its equation has."""
    params = primitive.get_bind_params(params)
    # Releases before 0.10.1 returned the subfunctions apart.
    subfuns, params = params if isinstance(params, tuple) else ((), params)
    if primitive.name.startswith("custom_"):  # jaxprs keep constants as numpy's, which rules of the user cannot index
        values = tuple(map(jax.numpy.asarray, values))
    return primitive.bind(*subfuns, *values, **params)


def source_line(eqn: JaxprEqn) -> str:
    """Returns `file:line (function)` of the user's code that an equation came from, or of the first in it with one.

    JAX traces the body of some equations with no line of the user's in sight: a scan's that is a `jax.checkpoint`, say.
    """
    if line := source_info_util.summarize(eqn.source_info):
        return line
    within = (inner_eqn for inner in inner_jaxprs(eqn) for inner_eqn in open_jaxpr(inner)[0].eqns)
    return next(filter(None, map(source_line, within)), "")


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


def _jvp(primals: Any, tangents: Any, *, forward: Chain, backward: Chain) -> tuple[Any, Any]:
    (x,), (dot,) = primals, tangents
    out = x if forward == Chain() else reshard_p.bind(x, forward=forward, backward=backward)
    exact = dataclasses.replace(forward, coding=None)  # codes are steps, without a slope: straight through
    return out, dot if isinstance(dot, ad.Zero) else reshard_p.bind(dot, forward=exact, backward=backward)


def _transpose(cotangent: Any, x: Any, *, forward: Chain, backward: Chain) -> list[Any]:
    del x
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    return [reshard_p.bind(cotangent, forward=backward, backward=forward)]


def _lift(chain: Chain) -> Chain:
    """Returns the chain for an array with one more dim in front."""
    specs = (PartitionSpec(PartitionSpec.UNCONSTRAINED, *s.spec) for s in chain.shardings)
    lifted = tuple(NamedSharding(s.mesh, spec) for s, spec in zip(chain.shardings, specs, strict=True))
    return dataclasses.replace(chain, shardings=lifted)


def _batch(args: Any, dims: Any, *, forward: Chain, backward: Chain) -> tuple[Any, int]:
    (x,), (dim,) = args, dims
    return reshard_p.bind(jax.numpy.moveaxis(x, dim, 0), forward=_lift(forward), backward=_lift(backward)), 0


reshard_p.def_abstract_eval(lambda x, **_: x)
reshard_p.def_impl(lambda x, **chains: jax.jit(_apply_chain, static_argnames=("forward", "backward"))(x, **chains))
ad.primitive_jvps[reshard_p] = _jvp
ad.primitive_transposes[reshard_p] = _transpose
batching.primitive_batchers[reshard_p] = _batch
mlir.register_lowering(reshard_p, mlir.lower_fun(_apply_chain, multiple_results=False))


# `join` is the identity on a value of which a copy is kept: `x, kept -> x`. Under `jax.checkpoint` the forward pass
# uses `x`, and the recomputation makes it again from `kept`. Without it the forward pass would use the copy, too, and
# XLA would move that there and back: JAX puts a `reduce_precision` on what is saved, and no move cancels through it.

join_p = jex_core.Primitive("zero_join")


def keep(x: jax.Array, *, name: str, shard: Chain, unshard: Chain) -> jax.Array:
    """Returns `x`, with a copy for a remat policy to keep by its name; the cotangent of `x` passes as it is.

    Args:
      x: an array.
      name: the name of the copy.
      shard: what the copy is moved through to where it is kept.
      unshard: what it is moved through to become `x` again.
    """
    kept = checkpoint_name(reshard(lax.stop_gradient(x), forward=shard, backward=Chain()), name)
    return join_p.bind(x, kept, unshard=unshard)


def _join_partial_eval(
    saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: JaxprEqn
) -> tuple[JaxprEqn | None, JaxprEqn, list[bool], list[bool], list[Any]]:
    """Splits an equation into what the forward pass runs and what the recomputation does."""
    del saveable
    missing = [v for v, is_there in zip(eqn.invars, instantiated, strict=True) if not (is_there or is_literal(v))]
    if any(unknown):
        return None, eqn, [True], [True], missing
    _, kept = eqn.invars
    params = {"forward": eqn.params["unshard"], "backward": Chain()}
    remade = eqn.replace(primitive=reshard_p, invars=[kept], params=params)
    return eqn, remade, [False], [True], [v for v in missing if v is kept]


def _join_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    return join_p.bind(*primals, **params), tangents[0]


def _join_batch(args: Any, dims: Any, *, unshard: Chain) -> tuple[Any, int]:
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    x, kept = (batching.bdim_at_front(x, dim, size) for x, dim in zip(args, dims, strict=True))
    return join_p.bind(x, kept, unshard=_lift(unshard)), 0


join_p.def_abstract_eval(lambda x, kept, **_: x)
join_p.def_impl(lambda x, kept, **_: x)
ad.primitive_jvps[join_p] = _join_jvp
batching.primitive_batchers[join_p] = _join_batch
mlir.register_lowering(join_p, lambda ctx, x, kept, **_: [x])
partial_eval.partial_eval_jaxpr_custom_rules[join_p] = _join_partial_eval


def keep_names(
    *, on_device: Sequence[str] = (), on_host: Sequence[str] = (), otherwise: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Returns a remat policy that keeps values by their names, some of them in pinned host memory.

    Args:
      on_device: names of values that stay where they are.
      on_host: names of values that move to the host after the forward pass, and back for the backward pass.
      otherwise: the policy for everything else; None keeps nothing else.
    """
    named = checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(on_device),
        names_which_can_be_offloaded=list(on_host),
        offload_src="device",
        offload_dst="pinned_host",
    )
    ours = {*on_device, *on_host}

    def policy(primitive: Any, *args: Any, **params: Any) -> Any:
        if any(jax.numpy.issubdtype(aval.dtype, np.complexfloating) for aval in args if hasattr(aval, "dtype")):
            return False  # jax.checkpoint rounds what it keeps by `reduce_precision`, which takes no complex numbers
        if otherwise is None or (primitive.name == "name" and params["name"] in ours):
            return named(primitive, *args, **params)
        return otherwise(primitive, *args, **params)

    return policy


def is_kept(policy: Callable[..., Any] | None, eqn: JaxprEqn) -> bool:
    """Tells whether a remat policy keeps the results of an equation on the device; what it offloads it keeps itself."""
    if policy is None:
        return False
    choice = policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)
    return choice if isinstance(choice, bool) else type(choice).__name__ == "SaveableType"


def refuse_gathered(policy: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Returns a remat policy which never saves a gathered param and otherwise is the one given."""
    if policy is None:
        return None

    def refusing(primitive: Any, *args: Any, **params: Any) -> Any:
        return False if primitive is reshard_p else policy(primitive, *args, **params)

    return refusing


def used_inputs(jaxpr: Jaxpr) -> list[bool]:
    """Tells which inputs of a jaxpr, open or closed, its results depend on."""
    opened, _ = open_jaxpr(jaxpr)
    _, used = partial_eval.dce_jaxpr(opened, [True] * len(opened.outvars))
    return list(used)


def is_traced(x: Any) -> bool:
    """Tells whether a value is of a trace, rather than an array with a place."""
    return isinstance(x, core.Tracer)


def is_array(x: Any) -> bool:
    """Tells whether a value is an array on devices."""
    return isinstance(x, jax.Array) and not is_traced(x)


def name_stack(eqn: JaxprEqn) -> str:
    """Returns the names that an equation was traced under, inside its own jaxpr: `jit(f)/transpose(jvp())`."""
    return str(eqn.source_info.name_stack)


def without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """Returns an open jaxpr of the same inputs and results, without what no result depends on, loops included."""
    opened, _ = open_jaxpr(jaxpr)
    return partial_eval.dce_jaxpr(opened, [True] * len(opened.outvars), instantiate=True)[0]


def is_on_host(aval: Any) -> bool:
    """Tells whether a traced value is in host memory."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


# --- `order` --------------------------------------------------------------------------------------------------------
# An `optimization_barrier` over values, over their cotangents, or over both. JAX has one over both, which in some
# releases makes zeros for cotangents that there are none of, and so gradients for params that are frozen.

order_p = jex_core.Primitive("zero_order")
order_p.multiple_results = True


def order(*arrays: jax.Array, forward: bool = True, backward: bool = True) -> list[jax.Array]:
    """Returns the arrays as they are, none before all are there; their cotangents likewise, if `backward`."""
    if len(arrays) < 2 or not (forward or backward):
        return list(arrays)
    return _bind_order(*arrays, forward=forward, backward=backward)


# Of the orders of equal layers, JAX differentiates one: it keeps the derivative of a nested `jit`.
@functools.partial(jax.jit, static_argnames=("forward", "backward"), inline=True)
def _bind_order(*arrays: jax.Array, forward: bool, backward: bool) -> list[jax.Array]:
    return order_p.bind(*arrays, forward=forward, backward=backward)


def _apply_order(*arrays: jax.Array, forward: bool, backward: bool) -> list[jax.Array]:
    del backward
    return lax.optimization_barrier(list(arrays)) if forward else list(arrays)


def _order_present(values: Sequence[Any], **directions: bool) -> list[Any]:
    present = [value for value in values if not isinstance(value, ad.Zero)]
    ordered = iter(order(*present, **directions))
    return [value if isinstance(value, ad.Zero) else next(ordered) for value in values]


def _order_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, forward: bool, backward: bool) -> Any:
    primals_out = order(*primals, forward=True, backward=backward) if forward else list(primals)
    return primals_out, _order_present(tangents, forward=False, backward=backward)


def _order_transpose(cotangents: Sequence[Any], *_: Any, forward: bool, backward: bool) -> list[Any]:
    return _order_present(cotangents, forward=backward, backward=forward)


order_p.def_abstract_eval(lambda *avals, **_: avals)
order_p.def_impl(lambda *xs, **directions: jax.jit(functools.partial(_apply_order, **directions))(*xs))
ad.primitive_jvps[order_p] = _order_jvp
ad.primitive_transposes[order_p] = _order_transpose
batching.primitive_batchers[order_p] = lambda arrays, dims, **directions: (order(*arrays, **directions), dims)
mlir.register_lowering(order_p, mlir.lower_fun(_apply_order, multiple_results=True))
