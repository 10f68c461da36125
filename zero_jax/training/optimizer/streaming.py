"""Evaluates a function whose arguments are partly in host memory, a chunk of them at a time.

The jaxpr of the function says which results need which arrays of the host. Results that share none are computed one
after another. Where they are elementwise, a loop fetches the next chunk while it computes one and writes it back.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from zero_jax.core import jaxprs
from zero_jax.core.evaluation import evaluate, flattened, trace_flat
from zero_jax.sharding.spec import dims_of, num_shards
from zero_jax.training.optimizer.offload import HOST
from zero_jax.transforms import ELEMENTWISE

_CHUNKED = ELEMENTWISE | {"convert_element_type", "sharding_constraint"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Argument:
    """An argument of the function.

    Attributes:
      array: its value.
      sharding: how it is sharded on the devices; None for what is not on the host and is not replaced by a result.
      on_host: whether it is in host memory.
    """

    array: jax.Array
    sharding: NamedSharding | None = None
    on_host: bool = False


@dataclasses.dataclass(frozen=True)
class _Unit:
    """Results that share arrays of the host: their indices, those of the arrays, and the jaxpr of these results."""

    results: list[int]
    on_host: list[int]
    jaxpr: Any


def stream(
    function: Callable[..., list[Any]], arguments: Sequence[Argument], into: Sequence[int], *, window_bytes: int
) -> list[Any]:
    """Returns the results of a function, each in the memory and the sharding of the argument that it replaces.

    Args:
      function: of arrays on devices, to a list of arrays on devices.
      arguments: its arguments.
      into: for each result the index of the argument that it replaces, of its shape and dtype.
      window_bytes: bytes of a chunk on a device.
    """
    arrays = [x.array for x in arguments]
    closed = trace_flat(function, arrays)
    jaxpr, consts = jaxprs.open_jaxpr(flattened(*jaxprs.open_jaxpr(closed)))
    results: list[Any] = [None] * len(into)
    for i, var in enumerate(jaxpr.outvars):
        if var is jaxpr.invars[into[i]]:  # unchanged: it stays where it is
            results[i] = arrays[into[i]]
    todo = [i for i, result in enumerate(results) if result is None]
    units = _units(jaxpr, arguments, todo, into)
    streamed = {i for unit in units for i in unit.results}
    rest = [i for i in todo if i not in streamed]
    for i, x in zip(rest, _evaluate(jaxpr, rest, consts, arrays), strict=True):
        results[i] = _pinned(x, arguments[into[i]].sharding)
    token = None
    for unit in units:
        loop = _Loop.of(unit.jaxpr, [x.on_host for x in arguments])
        run = _run_whole if loop is None else functools.partial(_run_chunks, loop, window_bytes)
        made, token = run(unit, arguments, into, consts, token)
        for i, x in zip(unit.results, made, strict=True):
            results[i] = x
    return results


def _pinned(x: Any, sharding: NamedSharding | None) -> Any:
    return x if sharding is None else lax.with_sharding_constraint(x, sharding)


def _evaluate(jaxpr: Any, which: Sequence[int], consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Returns some of a jaxpr's results; nothing else is computed."""
    some = jaxprs.without_dead_code(jaxprs.with_results(jaxpr, [jaxpr.outvars[i] for i in which]))
    return evaluate(some, consts, values)


def _units(jaxpr: Any, arguments: Sequence[Argument], todo: Sequence[int], into: Sequence[int]) -> list[_Unit]:
    """Returns the results that need arrays of the host, or replace them, by the arrays that they share."""
    needs: dict[Any, frozenset[int]] = {
        var: frozenset([i] if x.on_host else []) for i, (var, x) in enumerate(zip(jaxpr.invars, arguments, strict=True))
    }
    for eqn in jaxpr.eqns:
        found = frozenset().union(*(needs.get(x, frozenset()) for x in eqn.invars if not jaxprs.is_literal(x)))
        needs.update((var, found) for var in eqn.outvars)
    groups: list[tuple[set[int], list[int]]] = []  # arrays of the host, results
    for i in todo:
        var = jaxpr.outvars[i]
        found = set() if jaxprs.is_literal(var) else set(needs.get(var, ()))
        if arguments[into[i]].on_host:
            found.add(into[i])
        if not found:
            continue
        same = [group for group in groups if group[0] & found]
        groups = [group for group in groups if group not in same]
        groups.append((found.union(*(g[0] for g in same)), [*(i for g in same for i in g[1]), i]))
    return [
        _Unit(sorted(which), sorted(arrays), jaxprs.with_results(jaxpr, [jaxpr.outvars[i] for i in sorted(which)]))
        for arrays, which in groups
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loop:
    """A jaxpr whose results are elementwise in what they need of the host: any part of them can be computed alone.

    Attributes:
      shape: the shape of all arrays that are cut into chunks.
      eqns: the equations to evaluate on chunks.
      before: the jaxpr of what chunks need and is computed before, whole.
      whole: the variables of its results.
    """

    shape: tuple[int, ...]
    eqns: list[Any]
    before: Any
    whole: list[Any]

    @classmethod
    def of(cls, jaxpr: Any, on_host: Sequence[bool]) -> _Loop | None:
        """Returns the loop of a jaxpr, or None where a result is not elementwise, or not known to be."""
        shapes = {var.aval.shape for var in jaxpr.outvars}
        if len(shapes) != 1 or () in shapes or any(jaxprs.is_literal(var) for var in jaxpr.outvars):
            return None
        (shape,) = shapes
        jaxpr = jaxprs.without_dead_code(jaxpr)
        needs_host = {var for var, flag in zip(jaxpr.invars, on_host, strict=True) if flag}
        used = {x for eqn in jaxpr.eqns for x in eqn.invars if not jaxprs.is_literal(x)} | set(jaxpr.outvars)
        if any(var.aval.shape != shape for var in needs_host & used):
            return None
        eqns = []
        for eqn in jaxpr.eqns:
            operands = [x for x in eqn.invars if not jaxprs.is_literal(x)]
            if _is_chunked(eqn, shape) and all(x.aval.shape in (shape, ()) for x in eqn.invars):
                eqns.append(eqn)
                needs_host.update(eqn.outvars if needs_host.intersection(operands) else ())
            elif needs_host.intersection(operands):
                return None
        # From the results back: what a chunk needs, down to inputs and to what is computed before.
        wanted, needed_eqns = set(jaxpr.outvars), []
        for eqn in reversed(eqns):
            if wanted.intersection(eqn.outvars):
                needed_eqns.append(eqn)
                wanted.update(x for x in eqn.invars if not jaxprs.is_literal(x))
        made = {var for eqn in needed_eqns for var in eqn.outvars}
        whole = [var for eqn in jaxpr.eqns for var in eqn.outvars if var in wanted and var not in made]
        before = jaxprs.without_dead_code(jaxprs.with_results(jaxpr, whole))
        return cls(shape=shape, eqns=needed_eqns[::-1], before=before, whole=whole)


def _is_chunked(eqn: Any, shape: tuple[int, ...]) -> bool:
    """Tells whether each element of an equation's result needs only that element of its operands."""
    if len(eqn.outvars) != 1 or eqn.outvars[0].aval.shape != shape:
        return False
    return eqn.primitive.name in _CHUNKED or (
        eqn.primitive.name == "broadcast_in_dim" and eqn.invars[0].aval.shape == () and len(eqn.invars) == 1
    )


def _run_whole(
    unit: _Unit, arguments: Sequence[Argument], into: Sequence[int], consts: Any, token: Any
) -> tuple[list[Any], Any]:
    """Computes results whose arrays of the host have to be on the device whole."""
    arrays = [x.array for x in arguments]
    fetched = _after(token, [arrays[i] for i in unit.on_host])
    for i, x in zip(unit.on_host, fetched, strict=True):
        arrays[i] = jax.device_put(x, arguments[i].sharding)
    made = _evaluate(unit.jaxpr, range(len(unit.results)), consts, arrays)
    results = []
    for i, x in zip(unit.results, made, strict=True):
        goal = arguments[into[i]]
        x = _pinned(x, goal.sharding)
        results.append(jax.device_put(x, _host(goal.sharding)) if goal.on_host else x)
    return results, _scalar_of(made[0])


def _run_chunks(
    loop: _Loop,
    window_bytes: int,
    unit: _Unit,
    arguments: Sequence[Argument],
    into: Sequence[int],
    consts: Any,
    token: Any,
) -> tuple[list[Any], Any]:
    """Computes elementwise results chunk by chunk."""
    jaxpr, arrays = unit.jaxpr, [x.array for x in arguments]
    before = evaluate(loop.before, consts, arrays)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arrays), strict=True))
    env.update(zip(loop.whole, before, strict=True))
    sharding = arguments[unit.on_host[0]].sharding
    assert sharding is not None
    size = sum(math.prod(loop.shape) * arrays[i].dtype.itemsize for i in unit.on_host)
    dim, num_chunks = _cut(loop.shape, sharding, size, window_bytes)
    chunk = loop.shape[dim] // num_chunks
    chunk_shape = (*loop.shape[:dim], chunk, *loop.shape[dim + 1 :])
    goals = [arguments[into[i]] for i in unit.results]
    # What chunks are cut from: results replace some of it in place.
    replaced = [jaxpr.invars[into[i]] for i in unit.results]
    fetched = [jaxpr.invars[i] for i in unit.on_host]

    def cut(x: Any, i: Any) -> Any:
        return lax.dynamic_slice_in_dim(x, i * chunk, chunk, dim)

    def fetch(state: dict[Any, Any], i: Any) -> list[Any]:
        parts = [cut(state.get(var, env[var]), i) for var in fetched]
        return [jax.device_put(x, arguments[j].sharding) for x, j in zip(parts, unit.on_host, strict=True)]

    def body(i: Any, carry: Any) -> Any:
        old, current = carry
        state = dict(zip(replaced, old, strict=True))
        following = fetch(state, jnp.minimum(i + 1, num_chunks - 1))
        values = dict(zip(fetched, current, strict=True))

        def value_of(atom: Any) -> Any:
            if jaxprs.is_literal(atom):
                return atom.val
            if atom not in values:
                x = state.get(atom, env.get(atom))
                values[atom] = x if jnp.shape(x) == () else cut(x, i)
            return values[atom]

        for eqn in loop.eqns:
            operands = [value_of(x) for x in eqn.invars]
            if eqn.primitive.name == "broadcast_in_dim":
                values[eqn.outvars[0]] = jnp.broadcast_to(operands[0], chunk_shape)
            elif eqn.primitive.name == "sharding_constraint":
                values[eqn.outvars[0]] = operands[0]
            else:
                (values[eqn.outvars[0]],) = jaxprs.bind(eqn, operands)
        new = []
        for var, goal, whole in zip(jaxpr.outvars, goals, old, strict=True):
            x = _pinned(value_of(var), goal.sharding)
            x = jax.device_put(x, _host(goal.sharding)) if goal.on_host else x
            new.append(lax.dynamic_update_slice_in_dim(whole, x, i * chunk, dim))
        return new, following

    start = jnp.int32(0) if token is None else _after(token, [jnp.int32(0)])[0]
    state = {var: env[var] for var in replaced}
    new, last = lax.fori_loop(start, num_chunks, body, ([env[var] for var in replaced], fetch(state, start)))
    return new, _scalar_of(last[0])


def _cut(shape: Sequence[int], sharding: NamedSharding, num_bytes: int, window_bytes: int) -> tuple[int, int]:
    """Returns the dim to cut along and the number of chunks, the fewest that fit the window: along an unsharded dim."""
    dims = dims_of(sharding.spec, len(shape))
    here = num_bytes / num_shards(sharding.mesh, dims)  # pyright: ignore[reportArgumentType]
    free = [i for i, axes in enumerate(dims) if not axes and shape[i] > 1]
    if not free:
        return 0, 1
    dim = free[0]
    fitting = (n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0 and here / n <= window_bytes)
    return dim, next(fitting, shape[dim])


def _host(sharding: NamedSharding | None) -> NamedSharding:
    assert sharding is not None
    return sharding.with_memory_kind(HOST)


def _after(token: Any, arrays: list[Any]) -> list[Any]:
    """Returns arrays, not before a value is there."""
    return arrays if token is None else list(lax.optimization_barrier((*arrays, token)))[:-1]


def _scalar_of(x: Any) -> Any:
    """Returns one element of an array: what is there when the array is."""
    return x[(0,) * jnp.ndim(x)] if jnp.size(x) else None
