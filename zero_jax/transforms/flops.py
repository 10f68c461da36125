"""The floating-point operations of a function, counted on its jaxpr: what MFU is measured against."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax

from zero_jax.core.jaxprs import inner_jaxprs, open_jaxpr
from zero_jax.core.subcalls import subcall


def forward_flops(fn: Callable[..., Any], *args: Any) -> int:
    """Counts the operations of a function's matrix products and convolutions, two for each multiply-add.

    Nothing else is counted, as is the custom for MFU (Chowdhery et al., "PaLM", appendix B). A training step has three
    times as many (twice the forward pass's in the backward pass); what rematerialization repeats is no progress.

    Args:
      fn: the function.
      *args: arrays or `ShapeDtypeStruct`s.

    Returns:
      Operations of one call, over all devices. A `while_loop`'s body counts once, of `cond` the costliest branch.
    """
    return count_flops(jax.make_jaxpr(fn)(*args))


def count_flops(jaxpr: Any) -> int:
    """Counts the operations of a jaxpr, as `forward_flops` does those of a function."""
    total = 0
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        sub = subcall(eqn)
        if rule := _RULES.get(eqn.primitive.name):
            total += rule(eqn)
        elif sub is not None and sub.branches:
            total += max(map(count_flops, sub.branches))
        else:
            total += (1 if sub is None else sub.length) * sum(map(count_flops, inner_jaxprs(eqn)))
    return total


def _dot(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)


def _convolution(eqn: Any) -> int:
    numbers, kernel = eqn.params["dimension_numbers"], eqn.invars[1].aval.shape
    out_features = kernel[numbers.rhs_spec[0]]
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // out_features


def _attention(eqn: Any) -> int:
    """Counts both products of fused attention, of all queries with all keys, masked or not."""
    (b, t, n, h), (_, s, _, _), (*_, v) = (atom.aval.shape for atom in eqn.invars[:3])
    return 2 * b * n * t * s * (h + v)


_RULES = {"dot_general": _dot, "conv_general_dilated": _convolution, "zero_attention": _attention}
