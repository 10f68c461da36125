"""Computes elementwise results of arrays that are partly in host memory, a chunk of each device's shard at a time.

While a chunk is computed and written back, the next one is fetched. XLA does not read an array while it writes a part
of it. So the last array is written before its next chunk is fetched, and the others are fetched before they are
written: one moves in while another moves out, and both directions of the link are busy.

On GPUs the first row of a chunk depends on an earlier chunk, through a 0 that is computed from it. Without that
dependence XLA:GPU does not know the order of reads and writes, and copies a whole array in host memory before each
write. It also annotates rows that depend on the loop's counter alone with wrong offsets (`dynamic_slice_config`, XLA of
JAX 0.10).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zero_jax.core.device_put import default_layout
from zero_jax.dims import ELEMENTWISE
from zero_jax.program import jaxprs
from zero_jax.program.dataflow import Dependence
from zero_jax.program.evaluation import evaluate
from zero_jax.sharding.device_order import GPUS
from zero_jax.sharding.spec import dims_of
from zero_jax.training.optimizer.rows import ChunkedRows, Rows

_CHUNKED = ELEMENTWISE | {"bitcast_convert_type", "sharding_constraint"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Argument:
    """An argument of a function that is streamed."""

    array: jax.Array  # its value
    # How it is sharded on the devices; None for what is not on the host and is not replaced by a result
    sharding: NamedSharding | None = None
    on_host: bool = False  # whether it is in host memory


@dataclasses.dataclass(frozen=True)
class Unit:
    """Results that share arrays of the host."""

    results: list[int]  # their indices
    into: list[int]  # for each of them the index of the argument that it replaces
    on_host: list[int]  # the indices of the arrays of the host
    jaxpr: Any  # the jaxpr of these results, of all arguments
    consts: Sequence[Any]  # the values of its constants


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A jaxpr whose results are elementwise in the arrays of the host, so that chunks can be computed one by one."""

    shape: tuple[int, ...]  # the shape of all arrays that are cut into chunks
    jaxpr: Any  # the jaxpr that is evaluated on chunks, of arrays of that shape and scalars
    before: Any  # the jaxpr of the inputs that are computed unchunked, before the loop
    unchunked: list[Any]  # the variables of its results

    @classmethod
    def of(cls, jaxpr: Any, on_host: Sequence[bool]) -> Loop | None:
        """Returns the loop of a jaxpr, or None if a result is not known to be elementwise."""
        shapes = {var.aval.shape for var in jaxpr.outvars}
        if len(shapes) != 1 or () in shapes or any(jaxprs.is_literal(var) for var in jaxpr.outvars):
            return None
        (shape,) = shapes
        jaxpr = jaxprs.without_dead_code(jaxpr)
        needs_host: dict[Any, frozenset[int]] = {}
        Dependence().run(jaxpr, [frozenset([0] if flag else []) for flag in on_host], needs_host)
        used = {*jaxpr.outvars, *(var for eqn in jaxpr.eqns for var in jaxprs.variables(eqn))}
        if any(needs_host[var] and var.aval.shape != shape for var in used.intersection(jaxpr.invars)):
            return None
        # What may be computed chunk by chunk; all else must not need the host, and is computed before the loop.
        eqns = []
        for eqn in jaxpr.eqns:
            if _is_chunked(eqn, shape) and all(x.aval.shape in (shape, ()) for x in eqn.invars):
                eqns.append(eqn)
            elif any(needs_host[var] for var in jaxprs.variables(eqn)):
                return None
        # From the results back: what a chunk needs, down to inputs and to what is computed before.
        needed, needed_eqns = dict.fromkeys(jaxpr.outvars), []
        for eqn in reversed(eqns):
            if any(var in needed for var in eqn.outvars):
                needed_eqns.append(eqn)
                needed.update(dict.fromkeys(jaxprs.variables(eqn)))
        computed = {var for eqn in needed_eqns for var in eqn.outvars}
        unchunked = [var for eqn in jaxpr.eqns for var in eqn.outvars if var in needed and var not in computed]
        before = jaxprs.without_dead_code(jaxprs.with_results(jaxpr, unchunked))
        inputs = [var for var in needed if var not in computed]
        chunked = jaxpr.replace(constvars=[], invars=inputs, eqns=needed_eqns[::-1])
        return cls(shape=shape, jaxpr=chunked, before=before, unchunked=unchunked)

    def evaluate(
        self, values: dict[Any, Any], shape: tuple[int, ...], index: Callable[[int, tuple[int, ...]], Any]
    ) -> list[Any]:
        """Returns the results for a chunk of a shape, from the values of the inputs there.

        `index(dim, shape)` returns the index of its elements along a dim of the arrays.
        """

        def equation(eqn: Any, operands: list[Any]) -> list[Any]:
            if eqn.primitive.name == "broadcast_in_dim":
                return [jnp.broadcast_to(operands[0], shape)]
            if eqn.primitive.name == "iota":
                return [index(eqn.params["dimension"], shape).astype(eqn.outvars[0].aval.dtype)]
            return operands if eqn.primitive.name == "sharding_constraint" else jaxprs.bind(eqn, operands)

        return evaluate(self.jaxpr, (), [values[var] for var in self.jaxpr.invars], equation)


def _is_chunked(eqn: Any, shape: tuple[int, ...]) -> bool:
    """Tells whether each element of an equation's results needs only that element of its operands, or its index."""
    if not eqn.outvars or any(var.aval.shape != shape for var in eqn.outvars):
        return False
    return (
        eqn.primitive.name in _CHUNKED
        or (eqn.primitive.name == "iota" and not eqn.invars)
        or (eqn.primitive.name == "broadcast_in_dim" and eqn.invars[0].aval.shape == () and len(eqn.invars) == 1)
    )


def run_chunks(
    loop: Loop, unit: Unit, arguments: Sequence[Argument], *, start: Any, window_bytes: int
) -> tuple[list[Any], Any]:
    """Returns the results of a unit, computed chunk by chunk, and a 0 that depends on them.

    The arguments are those of the whole function, of which those of the unit are sharded alike. The first fetch depends
    on `start`, a 0; a chunk has `window_bytes` on a device.
    """
    jaxpr, arrays = unit.jaxpr, [x.array for x in arguments]
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*unit.consts, *arrays), strict=True))
    env.update(zip(loop.unchunked, evaluate(loop.before, unit.consts, arrays), strict=True))
    replaced = {jaxpr.invars[i]: var for i, var in zip(unit.into, jaxpr.outvars, strict=True)}
    on_host = [jaxpr.invars[i] for i in unit.on_host]
    sharding = arguments[unit.on_host[0]].sharding
    assert sharding is not None
    device = sharding.mesh.devices.flat[0]  # pyright: ignore[reportOptionalMemberAccess]
    names = list(dict.fromkeys([*replaced, *on_host, *loop.jaxpr.invars]))
    on_gpus = device.platform in GPUS
    dims = dims_of(sharding.spec, len(loop.shape))

    def run_shard(start: Any, *shard_arrays: Any) -> tuple[list[Any], Any]:
        state = dict(zip(names, shard_arrays, strict=True))
        shape = state[on_host[0]].shape
        rows = Rows.of(shape, [default_layout(device, shape, var.aval.dtype) for var in on_host])
        state = {var: rows.view(x) if jnp.ndim(x) else x for var, x in state.items()}

        def index(dim: int, start: Any, chunk: tuple[int, ...]) -> Any:
            # Of an `iota`, which counts the elements of the unsharded array.
            before = lax.axis_index(dims[dim]) * shape[dim] if dims[dim] else 0
            return rows.index(dim, start, chunk) + jnp.asarray(before, jnp.uint32)

        for piece in rows.pieces([var.aval.dtype.itemsize for var in on_host], window_bytes):
            pipeline = _Pipeline(
                rows=piece, loop=loop, index=index, on_host=on_host, replaced=replaced, on_gpus=on_gpus
            )
            state, start = pipeline.run(state, start)
        return [rows.unview(state[var]) for var in replaced], start

    spec = [sharding.spec if jnp.ndim(env[var]) else PartitionSpec() for var in names]
    scalar = PartitionSpec()
    run = jax.shard_map(
        run_shard,
        mesh=sharding.mesh,
        in_specs=(scalar, *spec),
        out_specs=([sharding.spec] * len(replaced), scalar),
        check_vma=False,  # each device knows for itself when its chunks have come
    )
    return run(start, *(env[var] for var in names))


def zero_after(x: Any) -> Any:
    """Returns a 0 that depends on an array: XLA removes optimization barriers before it schedules."""
    if not jnp.size(x):
        return jnp.int32(0)
    number = lax.convert_element_type(jnp.real(x[(0,) * jnp.ndim(x)]), jnp.int32)
    return lax.convert_element_type((number | 1) == 0, jnp.int32)  # never true, but XLA keeps it


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pipeline:
    """The loop over the chunks of some rows; arrays are keyed by the variables of a jaxpr."""

    rows: ChunkedRows  # the chunks
    loop: Loop  # what is computed of them
    # Of a dim, a row and the shape of a chunk that begins there: the index of its elements along that dim
    index: Callable[[int, Any, tuple[int, ...]], Any]
    on_host: list[Any]  # the variables of the arrays in host memory
    replaced: dict[Any, Any]  # from the variables of arrays that are replaced to those of what replaces them
    on_gpus: bool  # whether the devices are GPUs

    def run(self, state: dict[Any, Any], start: Any) -> tuple[dict[Any, Any], Any]:
        """Returns the arrays with the rows replaced, and a 0 that depends on them."""
        current = [self.fetch(state[var], start) for var in self.on_host]
        fixed = {var: x for var, x in state.items() if var not in self.replaced}

        def body(i: Any, carry: Any) -> Any:
            arrays, current = carry
            state = {**fixed, **dict(zip(self.replaced, arrays, strict=True))}
            # The last iteration fetches its own chunk once more, and nothing reads it.
            state, following = self.advance(state, current, i, jnp.minimum(i + 1, self.rows.num_chunks - 1))
            return [state[var] for var in self.replaced], following

        arrays, current = lax.fori_loop(0, self.rows.num_chunks, body, ([state[var] for var in self.replaced], current))
        return {**fixed, **dict(zip(self.replaced, arrays, strict=True))}, zero_after(current[-1])

    def advance(
        self, state: dict[Any, Any], current: Sequence[Any], i: Any, following: Any
    ) -> tuple[dict[Any, Any], list[Any]]:
        """Replaces a chunk, and fetches the following one."""
        state, values = dict(state), dict(zip(self.on_host, current, strict=True))
        i = self.after(current[0], i)
        for var in self.loop.jaxpr.invars:
            if var not in values:
                values[var] = state[var] if not jnp.ndim(state[var]) else self.cut(state[var], i)
        index = lambda dim, shape: self.index(dim, self.rows.offset(i), shape)  # noqa: E731
        new = self.loop.evaluate(values, current[0].shape, index)
        following = self.after(new[0], following)
        unwritten, fetched = dict(zip(self.replaced, new, strict=True)), []

        def write(var: Any, i: Any = i) -> None:
            if var in unwritten:
                x = unwritten.pop(var)
                x = jax.device_put(x, jax.memory.Space.Host) if var in self.on_host else x
                state[var] = lax.dynamic_update_slice_in_dim(state[var], x, self.rows.offset(i), 0)

        # XLA does not read an array while it writes to it: the last one is written first and read then, so that one
        # moves in while another moves out.
        for var in self.on_host:
            if var is self.on_host[-1] and len(self.on_host) > 1:
                write(var)
            fetched.append(self.fetch(state[var], following))
            write(var, self.after(fetched[-1], i))  # nothing, where it is written already
        for var in list(unwritten):  # those on the device
            write(var)
        return state, fetched

    def after(self, chunk: Any, i: Any) -> Any:
        """Returns the index of a chunk; on GPUs it depends on another chunk, so that XLA orders the two."""
        return i + zero_after(chunk) if self.on_gpus else i

    def cut(self, x: Any, i: Any) -> Any:
        return lax.dynamic_slice_in_dim(x, self.rows.offset(i), self.rows.size, 0)

    def fetch(self, x: Any, i: Any) -> Any:
        return jax.device_put(self.cut(x, i), jax.memory.Space.Device)
