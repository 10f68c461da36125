"""The sharding of a traced value, and kinds of primitives."""

from __future__ import annotations

import dataclasses
from typing import Any

from zero_jax.dims.primitives import ALIASES, SAME_ELEMENTS
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
    """The sharding of a traced value, whose sum over some axes may still be due.

    Attributes:
      dims: the mesh axes that each dim is sharded over.
      partial: the axes over which each device has a part of a sum.
      itemsize: bytes of an element of such a sum when it was made; 0 for the value's own.
      varies: whether it depends on more than the params.
    """

    dims: Dims
    partial: tuple[str, ...] = ()
    itemsize: int = 0
    varies: bool = False

    @property
    def axes(self) -> set[str]:
        """All axes that the value is sharded over."""
        return {axis for dim in self.dims for axis in dim}


def is_heavy(eqn: Any) -> bool:
    """Tells whether an equation, or one that it calls, leaves its results in memory."""
    return any(each.primitive.name in HEAVY for each in equations_of(eqn))


def is_elementwise(eqn: Any) -> bool:
    """Guesses that an equation can work on a shard: its arrays have the same shape, but for dims of size 1."""
    shapes = [shape for x in (*eqn.invars, *eqn.outvars) if (shape := getattr(x.aval, "shape", ()))]
    return len({len(shape) for shape in shapes}) <= 1 and all(
        len(set(sizes) - {1}) <= 1 for sizes in zip(*shapes, strict=True)
    )
