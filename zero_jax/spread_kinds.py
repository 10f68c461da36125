"""How a value lies on a mesh, and the kinds of primitives that make one of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from zero_jax.jaxprs import inner_jaxprs, open_jaxpr
from zero_jax.spec import Dims

# Results that are their input under another shape.
ALIASES = frozenset(
    {"reshape", "transpose", "squeeze", "expand_dims", "name", "copy", "optimization_barrier", "zero_order"}
)
# Linear in one input: a partial sum stays one.
KEEPS_PARTIAL = ALIASES | {
    "neg", "convert_element_type", "reduce_precision", "broadcast_in_dim", "reduce_sum", "sharding_constraint",
    "zero_reshard", "jit", "pjit",
}  # fmt: skip
SUMS = frozenset({"add", "sub", "add_any"})
# Linear in all inputs together, or in each where the others are given.
_LINEAR = KEEPS_PARTIAL | SUMS | {
    "concatenate", "stack", "unstack", "slice", "dynamic_slice", "dynamic_update_slice", "pad", "split", "gather",
    "rev", "cumsum", "device_put", "pvary",
}  # fmt: skip
_BILINEAR = frozenset({"mul", "dot_general"})
# What reads its inputs from memory and leaves its results there; all else is fused into one of these.
HEAVY = frozenset({
    "dot_general", "conv_general_dilated", "gather", "scatter", "scatter-add", "scan", "while", "cond", "checkpoint",
    "remat2", "sort", "top_k", "custom_vjp_call", "pallas_call", "custom_call", "ragged_dot_general",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Laid:
    """How a value lies on a mesh.

    Attributes:
      dims: the axes of each dim.
      partial: the axes over which each device holds a part of a sum.
      itemsize: bytes of an element of such a sum when it was made; 0 for the value's own.
      varies: whether it depends on more than the params.
      of_params: whether it depends on the params.
      summed: whether it was made of a sum over axes that are counted.
    """

    dims: Dims
    partial: tuple[str, ...] = ()
    itemsize: int = 0
    varies: bool = False
    of_params: bool = False
    summed: bool = False

    @property
    def axes(self) -> set[str]:
        """All axes that the value is cut over."""
        return {axis for dim in self.dims for axis in dim}


def is_heavy(eqn: Any) -> bool:
    """Tells whether an equation, or one that it calls, leaves its results in memory."""
    inner = (open_jaxpr(jaxpr)[0] for jaxpr in inner_jaxprs(eqn))
    return eqn.primitive.name in HEAVY or any(is_heavy(one) for jaxpr in inner for one in jaxpr.eqns)


def is_linear(eqn: Any, inputs: Sequence[Laid]) -> bool:
    """Tells whether the sums of what depends on the params, among the inputs of an equation, are used as a mean is."""
    name, sums = eqn.primitive.name, [x.summed and x.of_params for x in inputs]
    if name in _BILINEAR:  # a mean is divided by its weight: only a divisor is known for one (`weights.py`)
        return not any(sums) or sum(x.summed for x in inputs) == 1
    if name == "div":
        return not sums[1]
    if name == "select_n":
        return not sums[0]
    return name in _LINEAR or not any(sums)


def is_elementwise(eqn: Any) -> bool:
    """Tells whether the arrays of an equation have one shape but for dims of size 1, so that it can work on a shard."""
    shapes = [shape for x in (*eqn.invars, *eqn.outvars) if (shape := getattr(x.aval, "shape", ()))]
    return len({len(shape) for shape in shapes}) <= 1 and all(
        len(set(sizes) - {1}) <= 1 for sizes in zip(*shapes, strict=True)
    )
