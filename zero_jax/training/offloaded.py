"""The update of a train state that is partly in host memory: what is there streams through the devices in chunks.

The jaxpr of the update shows which results depend on which arrays of the host. Results that share none are computed one
after another: chunk by chunk if they are elementwise (`optimizer/chunks.py`), else in full.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from zero_jax.core.tree import PyTree, shapes_of
from zero_jax.core.variables import MODEL_STATE
from zero_jax.program import jaxprs
from zero_jax.program.dataflow import Dependence
from zero_jax.program.evaluation import evaluate, flattened, trace_flat
from zero_jax.program.subcalls import primitives_in
from zero_jax.sharding.mesh import Axes
from zero_jax.sharding.spec import dims_of
from zero_jax.training.optimizer.chunks import Argument, Loop, Unit, run_chunks, zero_after
from zero_jax.training.optimizer.matrices import OF_MATRICES, MatrixProgram
from zero_jax.training.optimizer.update import TracedUpdate
from zero_jax.training.state.placement import Placement, pinned
from zero_jax.training.state.train_state import TrainState, flags_of_all


class UpdatedState(NamedTuple):
    """What an update makes of a state: new master params, their low-precision copy, and the optimizer's state."""

    masters: PyTree
    low: PyTree
    opt_state: PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadedState:
    """A train state within a step, and by group a flag for each leaf, whether it is on the host."""

    state: TrainState
    placement: Placement
    on_host: dict[str, list[bool]]

    @classmethod
    def of(cls, state: TrainState, placement: Placement) -> OffloadedState | None:
        """Returns a state with flags for its leaves on the host; None if no leaf that the update changes is there."""
        flags = placement.on_host(state) if placement.offload is not None else {}
        is_offloaded = any(any(each) for group, each in flags.items() if group != MODEL_STATE)
        return cls(state=state, placement=placement, on_host=flags) if is_offloaded else None

    @property
    def _master_flags(self) -> list[bool]:
        """The flags of the leaves of `state.masters`."""
        return self.on_host["params" if self.state.master is None else "master"]

    def masters(self) -> PyTree:
        """Returns the sharded master params, with shapes for those on the host."""
        leaves, tree = jax.tree.flatten(self.state.masters)
        leaves = [shapes_of(x) if on_host else x for x, on_host in zip(leaves, self._master_flags, strict=True)]
        return tree.unflatten(pinned(leaves, self.placement.param_shardings("master"), but=self._master_flags))

    def update(
        self, traced: TracedUpdate, function: Callable[..., UpdatedState], *extras: PyTree, unchanged: list[bool]
    ) -> UpdatedState:
        """Returns the updated state, in the memories of the old one.

        The function maps master params, optimizer state and `extras`, on the devices, to what an update makes of them;
        the copy is None if there is none. Trainable params that the update never changes (`unchanged`) are not moved.

        Raises:
          ValueError: an optimizer that calls functions of the params.
        """
        state, placement = self.state, self.placement
        assert placement.offload is not None
        if traced.calls_functions:
            raise ValueError(
                "offload: the optimizer computes losses at other params (a line search), which needs all of them on "
                "the devices: leave offload out, or give an optimizer that takes gradients alone"
            )
        master_shardings = placement.param_shardings("master")
        arguments = [
            *_arguments(state.masters, master_shardings, self._master_flags),
            *_arguments(state.opt_state, placement.opt_shardings(state.opt_state), self.on_host["opt_state"]),
        ]
        num_masters, num_updated = len(jax.tree.leaves(state.masters)), len(arguments)
        arguments += [Argument(array=x) for x in jax.tree.leaves(extras)]
        num_inputs = len(arguments)
        # For each result, in the order of `UpdatedState`, the argument that it is written over.
        into = [*range(num_masters)]
        if placement.keeps_copy:
            into += range(num_inputs, num_inputs + num_masters)
            arguments += self._copies(master_shardings)
        into += range(num_masters, num_updated)
        tree = jax.tree.structure((state.masters, state.opt_state, *extras))

        def flat(*arrays: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(function(*tree.unflatten(arrays[:num_inputs])))

        frozen = flags_of_all(state.masters, unchanged) * (1 + placement.keeps_copy)  # of masters, and of copies
        window_bytes, axes = placement.offload.window_bytes, placement.axes
        results = stream(flat, arguments, into, window_bytes=window_bytes, unchanged=frozen, axes=axes)
        old = UpdatedState(state.masters, state.masters if placement.keeps_copy else None, state.opt_state)
        updated = jax.tree.unflatten(jax.tree.structure(old), results)
        return updated if placement.keeps_copy else updated._replace(low=updated.masters)

    def _copies(self, shardings: PyTree) -> list[Argument]:
        """Returns the arrays that new low-precision params are written to: the old ones if they are sharded alike."""
        trees = self.state.params, self.placement.param_shardings("params"), shardings
        arguments = []
        for x, old, new in zip(*map(jax.tree.leaves, trees), strict=True):
            # At stages 1 and 2 params are whole: each device makes its shard, which is gathered after (`params_of`).
            array = x if old == new else lax.with_sharding_constraint(jnp.zeros(x.shape, x.dtype), new)
            arguments.append(Argument(array=array, sharding=new))
        return arguments


def _arguments(tree: PyTree, shardings: PyTree, on_host: list[bool]) -> list[Argument]:
    arrays = pinned(jax.tree.leaves(tree), shardings, but=on_host)
    of_each = zip(arrays, jax.tree.leaves(shardings), on_host, strict=True)
    return [Argument(array=x, sharding=sharding, on_host=flag) for x, sharding, flag in of_each]


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
