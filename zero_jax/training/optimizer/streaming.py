"""Evaluates a function whose arguments are partly in host memory, a chunk of them at a time.

The jaxpr of the function shows which results depend on which arrays of the host. Results that share none are computed
one after another: chunk by chunk if they are elementwise (`chunks`), else in full.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from zero_jax.program import jaxprs
from zero_jax.program.dataflow import Dependence
from zero_jax.program.evaluation import evaluate, flattened, trace_flat
from zero_jax.program.subcalls import primitives_in
from zero_jax.sharding.mesh import Axes
from zero_jax.sharding.spec import dims_of
from zero_jax.training.optimizer.chunks import Argument, Loop, Unit, run_chunks, zero_after
from zero_jax.training.optimizer.matrices import OF_MATRICES, MatrixProgram


def stream(
    function: Callable[..., list[Any]],
    arguments: Sequence[Argument],
    into: Sequence[int],
    *,
    window_bytes: int,
    unchanged: Sequence[bool],
    axes: Axes,
) -> list[Any]:
    """Returns the results of a function of arrays on devices, in the memory and sharding of what each replaces.

    `into` has for each result the index of the argument that it replaces, of its shape and dtype; `unchanged` tells of
    the first results whether they equal that. A chunk has `window_bytes` on a device.
    """
    arrays = [x.array for x in arguments]
    closed = trace_flat(function, arrays)
    jaxpr, consts = jaxprs.open_jaxpr(flattened(closed))
    results: list[Any] = [None] * len(into)
    for i, var in enumerate(jaxpr.outvars):
        if var is jaxpr.invars[into[i]] or any(unchanged[i : i + 1]):  # it stays where it is
            results[i] = arrays[into[i]]
    computed = [i for i, result in enumerate(results) if result is None]
    units = _units(jaxpr, consts, arguments, {i: into[i] for i in computed})
    streamed = {i for unit in units for i in unit.results}
    on_devices = [i for i in computed if i not in streamed]
    run_whole = functools.partial(_evaluate, shardings=[x.sharding for x in arguments], axes=axes)
    for i, x in zip(on_devices, run_whole(jaxpr, on_devices, consts, arrays), strict=True):
        results[i] = _pinned(x, arguments[into[i]].sharding)
    start = jnp.int32(0)  # a 0 that each unit makes of its results: the next one fetches nothing before that
    for unit in units:
        loop = Loop.of(unit.jaxpr, [x.on_host for x in arguments]) if _sharded_alike(unit, arguments) else None
        if loop is None:
            outputs, start = _run_unchunked(run_whole, unit, arguments, start)
        else:
            outputs, start = run_chunks(loop, unit, arguments, start=start, window_bytes=window_bytes)
        for i, x in zip(unit.results, outputs, strict=True):
            results[i] = x
    return results


def _pinned(x: Any, sharding: NamedSharding | None) -> Any:
    return x if sharding is None else lax.with_sharding_constraint(x, sharding)


def _evaluate(
    jaxpr: Any,
    which: Sequence[int],
    consts: Sequence[Any],
    values: Sequence[Any],
    *,
    shardings: Sequence[NamedSharding | None],
    axes: Axes,
) -> list[Any]:
    """Returns some of a jaxpr's results; nothing else is computed."""
    part = jaxprs.without_dead_code(jaxprs.with_results(jaxpr, [jaxpr.outvars[i] for i in which]))
    mesh = next((sharding.mesh for sharding in shardings if sharding is not None), None)
    if not isinstance(mesh, Mesh) or OF_MATRICES.isdisjoint(primitives_in(part)):
        return evaluate(part, consts, values)
    part = part.replace(constvars=[], invars=[*part.constvars, *part.invars])
    dims = [
        dims_of(x, len(var.aval.shape)) for var, x in zip(part.invars, [*[None] * len(consts), *shardings], strict=True)
    ]
    return MatrixProgram.of(part, dims, mesh=mesh, axes=axes).evaluate(*consts, *values)


def _units(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Argument], into: Mapping[int, int]) -> list[Unit]:
    """Returns the results that need arrays of the host, or replace them, by the arrays that they share.

    `into` has for each result that is computed the index of the argument that it replaces.
    """
    needs = Dependence().run(jaxpr, [frozenset([i] if x.on_host else []) for i, x in enumerate(arguments)])
    groups: list[tuple[set[int], list[int]]] = []  # arrays of the host, results
    for i, replaced in into.items():
        host_arrays = {*needs[i], *([replaced] if arguments[replaced].on_host else [])}
        if not host_arrays:
            continue
        sharing = [group for group in groups if group[0] & host_arrays]
        groups = [group for group in groups if group not in sharing]
        groups.append((host_arrays.union(*(g[0] for g in sharing)), [*(i for g in sharing for i in g[1]), i]))
    units = []
    for arrays, results in groups:
        results.sort()
        own = jaxprs.with_results(jaxpr, [jaxpr.outvars[i] for i in results])
        units.append(Unit(results, [into[i] for i in results], sorted(arrays), own, consts))
    return units


def _sharded_alike(unit: Unit, arguments: Sequence[Argument]) -> bool:
    """Tells whether all arrays that a unit fetches or replaces have the same sharding."""
    shardings = set()
    for i in (*unit.on_host, *unit.into):
        sharding = arguments[i].sharding
        if sharding is None:
            return False
        shardings.add((sharding.mesh, dims_of(sharding.spec, jnp.ndim(arguments[i].array))))
    return len(shardings) == 1


def _run_unchunked(
    run: Callable[..., list[Any]], unit: Unit, arguments: Sequence[Argument], start: Any
) -> tuple[list[Any], Any]:
    """Computes results that are not elementwise, by `run`: their arrays of the host are fetched in full."""
    arrays = [x.array for x in arguments]
    for i in unit.on_host:
        x, _ = lax.optimization_barrier((arrays[i], start))  # after the unit before it
        arrays[i] = jax.device_put(x, jax.memory.Space.Device)
    outputs = run(unit.jaxpr, range(len(unit.results)), unit.consts, arrays)
    results = []
    for i, x in zip(unit.into, outputs, strict=True):
        replaced = arguments[i]
        x = _pinned(x, replaced.sharding)
        results.append(jax.device_put(x, jax.memory.Space.Host) if replaced.on_host else x)
    return results, zero_after(outputs[0])
