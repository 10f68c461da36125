"""The sharding of a traced value, kinds of primitives, and what is alive as a jaxpr is run in its order.

The bytes of activations are those before a compiler has seen them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Sequence
from typing import Any

from zero_jax.dims.primitives import ALIASES, SAME_ELEMENTS
from zero_jax.program.dataflow import Dataflow
from zero_jax.program.jaxprs import is_literal, variables
from zero_jax.program.subcalls import equations_of
from zero_jax.sharding.spec import Dims

# Linear in one input: a partial sum stays one.
KEEPS_PARTIAL = ALIASES | SAME_ELEMENTS | {"neg", "reduce_sum", "sharding_constraint", "zero_reshard", "jit"}
SUMS = frozenset({"add", "sub", "add_any"})
# What reads its inputs from memory and leaves its results there; all else is fused into one of these.
HEAVY = frozenset({
    "dot_general", "conv_general_dilated", "gather", "scatter", "scatter-add", "scan", "while", "cond", "remat2",
    "sort", "top_k", "custom_vjp_call", "pallas_call", "ragged_dot_general",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueSharding:
    """The sharding of a traced value, whose sum over some axes may still be due."""

    dims: Dims  # the mesh axes that each dim is sharded over
    partial: tuple[str, ...] = ()  # the axes over which each device has a part of a sum
    itemsize: int = 0  # bytes of an element of such a sum when it was made; 0 for the value's own
    varies: bool = False  # whether it depends on more than the params

    @functools.cached_property
    def axes(self) -> frozenset[str]:
        """All axes that the value is sharded over."""
        return frozenset(axis for dim in self.dims for axis in dim)


def is_heavy(eqn: Any) -> bool:
    """Tells whether an equation, or one that it calls, leaves its results in memory."""
    return any(each.primitive.name in HEAVY for each in equations_of(eqn))


def is_elementwise(eqn: Any) -> bool:
    """Guesses that an equation can work on a shard: its arrays have the same shape, but for dims of size 1."""
    shapes = [shape for x in (*eqn.invars, *eqn.outvars) if (shape := getattr(x.aval, "shape", ()))]
    return len({len(shape) for shape in shapes}) <= 1 and all(
        len(set(sizes) - {1}) <= 1 for sizes in zip(*shapes, strict=True)
    )


class Alive:
    """Bytes alive as a jaxpr is run in its order; what only elementwise work reads and makes counts as fused."""

    def __init__(self, jaxpr: Any, ends: Collection[int]):
        self.peak, self.now, self.place = 0.0, 0.0, -1
        self.roots: dict[Any, Any] = {}  # of what is the same bytes as another value, that
        self.alive_bytes: dict[Any, float] = {}
        heavy_reads, last = set(), {}
        for i, eqn in enumerate(jaxpr.eqns):
            if eqn.primitive.name in ALIASES:
                pairs = zip(eqn.outvars, eqn.invars, strict=False)
                self.roots.update((out, self.root(x)) for out, x in pairs if not is_literal(x))
            roots = [self.root(var) for var in variables(eqn)]
            last.update(dict.fromkeys(roots, i))
            heavy_reads.update(roots if eqn.primitive.name in HEAVY else ())
        self.outputs = {self.root(x) for x in jaxpr.outvars if not is_literal(x)}
        self.ends = {self.root(x) for x in jaxpr.outvars if id(x) in ends}
        self.is_heavy = {i for i, eqn in enumerate(jaxpr.eqns) if is_heavy(eqn)}
        self.heavy_reads = heavy_reads
        self.loops = {i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name in ("scan", "while")}
        self.dies: dict[int, list[Any]] = {}
        for root, i in last.items():
            self.dies.setdefault(i, []).append(root)

    def root(self, var: Any) -> Any:
        """Returns the value that a reshaped or transposed one is."""
        return self.roots.get(var, var)

    def step(self, made: Sequence[tuple[Any, float]], inner_peak: float) -> None:
        """Counts what the next equation makes, what is alive while it runs, and what dies after it.

        What a call makes is among its own peak; what loops make grows while they run.
        """
        self.place += 1
        i, before = self.place, self.now
        for var, num_bytes in made:
            root = self.root(var)
            is_stored = i in self.is_heavy or root in self.heavy_reads or root in self.outputs
            if root is var and is_stored and root not in self.ends:
                self.alive_bytes[root] = num_bytes
                self.now += num_bytes
        self.peak = max(self.peak, self.now, (self.now if i in self.loops else before) + inner_peak)
        for root in self.dies.get(i, ()):
            if root not in self.outputs:
                self.now -= self.alive_bytes.pop(root, 0.0)


def sources(jaxpr: Any) -> dict[Any, tuple[Any, ...]]:
    """Returns for each result the values in memory that elementwise work makes it of; itself, if it is one."""
    made_of = _Sources().run(jaxpr, [(var,) for var in jaxpr.invars])
    return {var: of for var, of in zip(jaxpr.outvars, made_of, strict=True) if not is_literal(var)}


class _Sources(Dataflow[tuple[Any, ...]]):
    def constant(self, atom: Any) -> tuple[Any, ...]:
        return () if is_literal(atom) else (atom,)

    def operation(self, eqn: Any, operands: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        if is_heavy(eqn):
            return [(var,) for var in eqn.outvars]
        return [tuple(dict.fromkeys(itertools.chain(*operands)))] * len(eqn.outvars)
