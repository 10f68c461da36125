"""Sharding propagation: the shardings of all values of a jaxpr, and the collectives that they need.

The shardings of the inputs are carried forward through every equation, as Megatron's authors count on paper and as
XLA's partitioner mostly decides: a product whose contracted dim is sharded is a partial sum; sums of partial sums stay
partial; whatever needs the value itself reduces it first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from zero_jax.core.device_put import is_on_host
from zero_jax.dims.shardings.rules import RULES, merge
from zero_jax.dims.shardings.sharding import KEEPS_PARTIAL, SUMS, Alive, ValueSharding, is_elementwise
from zero_jax.program.dataflow import Dataflow, fixed_point
from zero_jax.program.jaxprs import is_literal, name_stack, open_jaxpr, source_line
from zero_jax.program.subcalls import CALLS, Subcall, subcall
from zero_jax.sharding.spec import Dims, without


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move:
    """A collective that a function needs."""

    kind: str  # 'all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all' or 'collective-permute'
    axes: tuple[str, ...]  # the mesh axes
    dtype: str  # NumPy's name of the dtype
    phase: str  # 'forward', 'backward' or 'update'
    sent_bytes: float  # what one device sends each time
    times: int = 1  # how often
    source: str = ""  # `file:line (function)` of the user's code; empty for what the update moves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Propagation:
    """The shardings of a function's results, and what they cost."""

    outputs: tuple[ValueSharding, ...]  # the shardings of its results
    local_bytes: tuple[float, ...]  # bytes of each result on one device
    moves: tuple[Move, ...]  # the collectives over the counted axes
    # Bytes of the values alive at once on one device, inputs and what depends on params alone left out; elementwise
    # work counts as fused into what reads it
    peak_bytes: float
    # Bytes on one device of the params that an iteration of a loop takes, where it takes most
    sliced_param_bytes: float
    unknown: str  # why `moves` are not the whole of it; empty where they are
    # The shardings of all values, those of inner jaxprs as in their last run
    values: Mapping[Any, ValueSharding] = dataclasses.field(repr=False)


def propagate_shardings(
    jaxpr: Any,
    inputs: Sequence[ValueSharding],
    *,
    sizes: Mapping[str, int],
    counted: Sequence[str],
    kept: Sequence[int] = (),
) -> Propagation:
    """Propagates the shardings of a jaxpr's inputs through it.

    The collectives over the `counted` axes are wanted; partial sums over others are taken for reduced. Results whose
    numbers are `kept` are elsewhere, such as gradients: they do not count as alive.
    """
    walk = _Shardings(sizes=sizes, counted=tuple(axis for axis in counted if sizes[axis] > 1))
    opened, _ = open_jaxpr(jaxpr)
    outputs = walk.run_settled(opened, inputs, ends={id(opened.outvars[i]) for i in kept})
    sizes_of = [walk.local_bytes(var.aval, out) for var, out in zip(opened.outvars, outputs, strict=True)]
    return Propagation(
        outputs=tuple(outputs),
        local_bytes=tuple(sizes_of),
        moves=tuple(walk.moves),
        peak_bytes=walk.peak,
        sliced_param_bytes=walk.sliced_param_bytes,
        unknown=walk.unknown,
        values=walk.values,
    )


class _Shardings(Dataflow[ValueSharding]):
    """Carries shardings through equations; the rules of single primitives are in `rules`."""

    def __init__(self, *, sizes: Mapping[str, int], counted: tuple[str, ...]):
        super().__init__()
        self.sizes, self.counted = sizes, counted
        self.moves: list[Move] = []
        self.unknown, self.sliced_param_bytes = "", 0.0
        self.values: dict[Any, ValueSharding] = {}
        self.times, self.phase, self.source = 1, "forward", ""
        self.peak = 0.0  # of what is alive, in the jaxpr that was run last
        self.alive: Any = None

    # What rules ask for.

    def size(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def local_bytes(self, aval: Any, sharding: ValueSharding, *, itemsize: int = 0) -> float:
        shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", None)
        width = itemsize or getattr(dtype, "itemsize", 0)
        return math.prod(shape) * width / self.size([axis for dim in sharding.dims for axis in dim])

    def move(self, kind: str, axes: Sequence[str], num_bytes: float, aval: Any) -> None:
        """Notes a collective over those of `axes` that count; `num_bytes` is the larger of input and result."""
        axes = tuple(axis for axis in self.sizes if axis in axes and axis in self.counted)
        size = self.size(axes)
        if size == 1 or not num_bytes:
            return
        share = {"all-reduce": 2 * (size - 1) / size, "collective-permute": 1.0}.get(kind, (size - 1) / size)
        place = {"phase": self.phase, "times": self.times, "source": self.source}
        self.moves.append(Move(kind=kind, axes=axes, dtype=aval.dtype.name, sent_bytes=share * num_bytes, **place))

    def gather(self, sharding: ValueSharding, aval: Any, axes: Sequence[str]) -> ValueSharding:
        gathered = dataclasses.replace(sharding, dims=without(sharding.dims, axes))
        self.move("all-gather", axes, self.local_bytes(aval, gathered), aval)
        return gathered

    def settled(self, sharding: ValueSharding, aval: Any) -> ValueSharding:
        if not sharding.partial:
            return sharding
        self.move("all-reduce", sharding.partial, self.local_bytes(aval, sharding, itemsize=sharding.itemsize), aval)
        return dataclasses.replace(sharding, partial=(), itemsize=0)

    def placed(self, sharding: ValueSharding, aval: Any, target: Dims) -> ValueSharding:
        before, wanted = sharding.axes, {axis for dim in target for axis in dim}
        after = dataclasses.replace(sharding, dims=target, partial=(), itemsize=0)
        if sharding.partial:
            kind = "reduce-scatter" if set(sharding.partial) <= wanted else "all-reduce"
            self.move(kind, sharding.partial, self.local_bytes(aval, sharding, itemsize=sharding.itemsize), aval)
        lost = [axis for axis in before if axis not in wanted]
        self.move("all-gather", lost, self.local_bytes(aval, after), aval)
        moved = [a for a in before & wanted if _dim_of(sharding.dims, a) != _dim_of(target, a)]
        self.move("all-to-all", moved, self.local_bytes(aval, after), aval)
        return after

    def give_up(self, why: str) -> None:
        """Notes the first thing that is not known."""
        self.unknown = self.unknown or f"{why} ({self.source})"

    # The walk.

    def constant(self, atom: Any) -> ValueSharding:
        return ValueSharding(dims=((),) * len(getattr(atom.aval, "shape", ())))

    def run(
        self,
        jaxpr: Any,
        inputs: Sequence[ValueSharding],
        env: dict[Any, ValueSharding] | None = None,
        *,
        ends: Collection[int] = (),
    ) -> list[ValueSharding]:
        """Returns the shardings of the results of a jaxpr; `ends` has the `id`s of those that are kept elsewhere."""
        opened, _ = open_jaxpr(jaxpr)
        env = {} if env is None else env
        outer, self.alive = self.alive, Alive(opened, ends)
        results = super().run(opened, inputs, env)
        self.alive, self.peak = outer, self.alive.peak
        self.values.update(env)
        return results

    def run_settled(
        self, jaxpr: Any, inputs: Sequence[ValueSharding], *, ends: Collection[int] = ()
    ) -> list[ValueSharding]:
        """Returns the shardings of the results of a jaxpr, partial sums added up."""
        opened, _ = open_jaxpr(jaxpr)
        outs = self.run(opened, inputs, ends=ends)
        return [self.settled(out, var.aval) for out, var in zip(outs, opened.outvars, strict=True)]

    def visit(self, eqn: Any, env: dict[Any, ValueSharding]) -> list[ValueSharding]:
        """Returns the shardings of the results of an equation, after those partial sums that it needs the values of."""
        sub, source, phase = subcall(eqn), self.source, self.phase
        self.source, self.phase, self.peak = source_line(eqn) or source, _phase(name_stack(eqn), phase), 0.0
        if sub is not None and sub.kind in CALLS:
            outs = self.call(eqn, sub.jaxpr, env)
        else:
            self.settle_inputs(eqn, env)
            outs = list(super().visit(eqn, env))
        made = [
            (var, self.local_bytes(var.aval, out) if out.varies and not is_on_host(var.aval) else 0.0)
            for var, out in zip(eqn.outvars, outs, strict=True)
        ]
        self.alive.step(made, self.peak)
        self.source, self.phase = source, phase
        return outs

    def equation(self, eqn: Any, operands: list[ValueSharding]) -> list[ValueSharding]:
        if (sub := subcall(eqn)) is not None:
            if sub.kind == "scan":
                return self.loop(eqn, sub, operands)
            if sub.kind == "while":  # its body counts once
                return self.run(sub.jaxpr, operands[sub.num_test_consts :])
            if sub.kind == "cond":
                return self.branches(sub, operands)
        rule = RULES.get(eqn.primitive.name) or (merge if is_elementwise(eqn) else None)
        outs = rule(self, eqn, operands) if rule else self.opaque(eqn, operands)
        varies = any(x.varies for x in operands)
        return [dataclasses.replace(x, varies=varies) for x in outs]

    def settle_inputs(self, eqn: Any, env: dict[Any, ValueSharding]) -> None:
        """Sums the partial sums that an equation needs the values of, once for all that read them."""
        name, inputs = eqn.primitive.name, self.of_atoms(eqn.invars, env)
        if name in KEEPS_PARTIAL or (name in SUMS and len({x.partial for x in inputs}) == 1):
            return
        for atom, sharding in zip(eqn.invars, inputs, strict=True):
            if sharding.partial:
                env[atom] = self.settled(env[atom], atom.aval)

    def opaque(self, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
        """Takes the results of an unknown primitive for unsharded, but for a leading dim of the size of an input's."""
        name = eqn.primitive.name
        if any(axis in self.counted for x in inputs for dim in x.dims for axis in dim):
            self.give_up(f"what the primitive {name!r} does with a sharded input is not known")
        leading = [
            (a.aval.shape[0], x.dims[0]) for a, x in zip(eqn.invars, inputs, strict=True) if x.dims and x.dims[0]
        ]
        outs = []
        for var in eqn.outvars:
            shape = getattr(var.aval, "shape", ())
            first = next((dim for size, dim in leading if shape and shape[0] == size), ())
            outs.append(ValueSharding(dims=((first,) + ((),) * (len(shape) - 1)) if shape else ()))
        return outs

    def call(self, eqn: Any, jaxpr: Any, env: dict[Any, ValueSharding]) -> list[ValueSharding]:
        """Propagates through a call; what it sums is summed outside too."""
        opened, _ = open_jaxpr(jaxpr)
        inner: dict[Any, ValueSharding] = {}
        outs = self.run(opened, self.of_atoms(eqn.invars, env), inner)
        for atom, var in zip(eqn.invars, opened.invars, strict=True):
            if not is_literal(atom) and env[atom].partial and not inner[var].partial:
                env[atom] = inner[var]
        return outs

    def loop(self, eqn: Any, sub: Subcall, inputs: list[ValueSharding]) -> list[ValueSharding]:
        """Propagates through the body of a scan until the shardings of its carries are those of every iteration."""
        opened, _ = open_jaxpr(sub.jaxpr)
        consts, carry, slices = sub.split(inputs)
        for x, atom in zip(slices, sub.split(eqn.invars)[2], strict=True):
            if x.dims[0]:
                self.gather(x, atom.aval, x.dims[0])
        slices = [dataclasses.replace(x, dims=x.dims[1:]) for x in slices]
        of_params = zip(sub.split(opened.invars)[2], slices, strict=True)
        taken = sum(self.local_bytes(var.aval, x) for var, x in of_params if not x.varies)
        self.sliced_param_bytes = max(self.sliced_param_bytes, taken)
        outer, moves, unknown = self.times, len(self.moves), self.unknown
        self.times *= sub.length

        def body(carry: list[ValueSharding]) -> list[ValueSharding]:
            del self.moves[moves:]  # those of the last run alone hold for all iterations
            self.unknown = unknown
            return self.run_settled(opened, [*consts, *carry, *slices])

        carry, outs = fixed_point(body, carry, _joined)
        for x, out, var in zip(carry, outs, opened.outvars, strict=False):
            if lost := [axis for dim, new in zip(x.dims, out.dims, strict=True) for axis in new if axis not in dim]:
                self.gather(out, var.aval, lost)
        self.times = outer
        stacked = [dataclasses.replace(out, dims=((), *out.dims)) for out in outs[sub.num_carry :]]
        return [*carry, *stacked]

    def branches(self, sub: Subcall, inputs: list[ValueSharding]) -> list[ValueSharding]:
        """Propagates through the branch of a `cond` that moves most."""
        moves, best = len(self.moves), None
        for branch in sub.branches:
            outs = self.run_settled(branch, inputs[1:])
            taken = self.moves[moves:]
            del self.moves[moves:]
            if best is None or sum(x.sent_bytes for x in taken) > sum(x.sent_bytes for x in best[2]):
                best = outs, self.peak, taken
        assert best is not None
        outs, self.peak, taken = best
        self.moves += taken
        return outs


def _dim_of(dims: Dims, axis: str) -> int:
    return next(i for i, dim in enumerate(dims) if axis in dim)


def _joined(before: ValueSharding, after: ValueSharding) -> ValueSharding:
    """The sharding of a carry that goes in with one and comes out with another: sharded, where that is possible."""
    taken = {axis for dim in before.dims for axis in dim}
    dims = tuple(
        new if not old and not taken & set(new) else old for old, new in zip(before.dims, after.dims, strict=True)
    )
    return ValueSharding(dims=dims, varies=before.varies or after.varies)


def _phase(stack: str, outer: str) -> str:
    return "backward" if "transpose(" in stack or "rematted_computation" in stack else outer
