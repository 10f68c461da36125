"""Counts the floating-point operations of a traced function: matrix products, convolutions, and kernels of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from zero_jax.core.jaxprs import inner_jaxprs, open_jaxpr
from zero_jax.core.passes import Pass
from zero_jax.core.subcalls import KINDS, equations, subcall

_EXPONENTIALS = ("exp", "exp2")


def forward_flops(fn: Callable[..., Any], *args: Any) -> int:
    """Counts the operations of a function's matrix products and convolutions, two for each multiply-add.

    Nothing else is counted, as is the custom for MFU (Chowdhery et al., "PaLM", appendix B). A training step has three
    times as many (twice the forward pass's in the backward pass); what rematerialization repeats is no progress.
    Kernels count by their own cost estimate, else by the products of their body at each step of the grid, whether a
    mask skips it or not; so attention counts whole, by a kernel as without.

    Args:
      fn: the function.
      *args: arrays or `ShapeDtypeStruct`s.

    Returns:
      Operations of one call, over all devices. A `while_loop`'s body counts once, of `cond` the costliest branch.
    """
    return count_flops(jax.make_jaxpr(fn)(*args))


def count_flops(jaxpr: Any) -> int:
    """Counts the operations of a jaxpr, as `forward_flops` does those of a function."""
    return _count(jaxpr, None)


def attention_flops(jaxpr: Any) -> int:
    """Counts those of the operations of a jaxpr that are attention's: the scores, and their use.

    These are batched products whose result, through an exponential, is an operand of another batched product, and
    kernels of both. Causal attention needs half of them.
    """
    scores = _Scores()
    scores.run(jaxpr, [_NOTHING] * len(open_jaxpr(jaxpr)[0].invars))
    return _count(jaxpr, scores.notes.keys())


def _count(jaxpr: Any, wanted: Collection[int] | None) -> int:
    """Counts the operations of all equations, or of those whose `id` is wanted."""
    total = 0
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        sub = subcall(eqn)
        if rule := _RULES.get(eqn.primitive.name):
            total += rule(eqn) if wanted is None or id(eqn) in wanted else 0
        elif sub is not None and sub.branches:
            total += max(_count(branch, wanted) for branch in sub.branches)
        else:
            times = 1 if sub is None else sub.length * _num_shards(eqn)
            total += times * sum(_count(inner, wanted) for inner in inner_jaxprs(eqn))
    return total


def equation_flops(eqn: Any) -> int:
    """Counts the operations of a product or convolution; 0 for other equations."""
    rule = _RULES.get(eqn.primitive.name)
    return rule(eqn) if rule else 0


def _num_shards(eqn: Any) -> int:
    """Returns how many different parts of its operands the devices of a `shard_map` compute on; 1 of another call."""
    specs = eqn.params.get("in_specs") if KINDS.get(eqn.primitive.name) == "shard_map" else None
    axes = {axis for spec in specs or () for dim in spec for axis in (dim if isinstance(dim, tuple) else (dim,))}
    return math.prod(size for axis, size in eqn.params["mesh"].shape.items() if axis in axes) if axes else 1


def _dot(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)


def _ragged_dot(eqn: Any) -> int:
    """Each row of the left operand is multiplied by the matrix of its own group."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    left, right = (operand.aval.shape for operand in eqn.invars[:2])
    shared = {*contracted, *batch, *numbers.rhs_group_dimensions}
    return 2 * math.prod(left) * math.prod(size for dim, size in enumerate(right) if dim not in shared)


def _convolution(eqn: Any) -> int:
    numbers, kernel = eqn.params["dimension_numbers"], eqn.invars[1].aval.shape
    out_features = kernel[numbers.rhs_spec[0]]
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // out_features


def _kernel(eqn: Any) -> int:
    """A `pallas_call`: its own estimate, or the operations of its body at every step of its grid."""
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None and estimate.flops:
        return int(estimate.flops)
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    steps = math.prod(size for size in grid if isinstance(size, int))
    return steps * sum(_count(inner, None) for inner in inner_jaxprs(eqn))


def _cudnn_attention(num_products: int) -> Callable[[Any], int]:
    def rule(eqn: Any) -> int:
        query, key = (operand.aval.shape for operand in eqn.invars[:2])
        batch, head_dim = query[0], query[-1]
        length_dim = 2 if eqn.params.get("layout") == 1 else 1  # [batch, heads, length, dim], else heads third
        heads = query[3 - length_dim]
        return 2 * num_products * batch * heads * query[length_dim] * key[length_dim] * head_dim

    return rule


_CUDNN = {
    f"dot_product_attention{dtype}_{name}{wrapper}": _cudnn_attention(num_products)
    for name, num_products in (("fwd", 2), ("bwd", 5))
    for dtype in ("", "_fp8")
    for wrapper in ("", "_wrapper")
}


def _attention(num_products: int) -> Callable[[Any], int]:
    """Of `zero_jax.attention`, all queries with all keys, masked or not."""

    def rule(eqn: Any) -> int:
        (b, t, n, h), (_, s, _, _), (*_, v) = (atom.aval.shape for atom in eqn.invars[:3])
        return num_products * b * n * t * s * (h + v)  # half of the products have the size h, half v

    return rule


_ATTENTION = {"zero_attention": _attention(2), "zero_attention_cotangents": _attention(5), **_CUDNN}
_RULES: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "pallas_call": _kernel,
    **_ATTENTION,
}

# The batched products that a value is computed from, and those that went through an exponential.
Origins = tuple[frozenset[int], frozenset[int]]
_NOTHING: Origins = (frozenset(), frozenset())


class _Scores(Pass[Origins]):
    """Finds the products of attention; `notes` has the `id`s of their equations."""

    enters = frozenset(KINDS.values()) - {"while"}

    def constant(self, atom: Any) -> Origins:
        return _NOTHING

    def join(self, first: Origins, second: Origins) -> Origins:
        return first[0] | second[0], first[1] | second[1]

    def operation(self, eqn: Any, operands: list[Origins]) -> Sequence[Origins]:
        name = eqn.primitive.name
        joined = frozenset().union(*(x for x, _ in operands)), frozenset().union(*(y for _, y in operands))
        result: Origins = joined
        if name == "dot_general":
            result = self.product(eqn, joined[1])
        elif name in _EXPONENTIALS:
            result = frozenset(), joined[0] | joined[1]
        elif name in _ATTENTION or (name == "pallas_call" and _is_attention(eqn)):
            self.notes[id(eqn)] = True
            result = _NOTHING
        elif name in _RULES:
            result = _NOTHING
        return [result] * len(eqn.outvars)

    def product(self, eqn: Any, probabilities: frozenset[int]) -> Origins:
        _, (batch, _) = eqn.params["dimension_numbers"]
        if not batch:
            return _NOTHING
        if probabilities:
            self.notes.update(dict.fromkeys((*probabilities, id(eqn)), True))
        return frozenset({id(eqn)}), frozenset()


def _is_attention(eqn: Any) -> bool:
    """Whether a kernel makes scores, takes their exponential and uses it in a product."""
    names = [inner.primitive.name for body in inner_jaxprs(eqn) for inner in equations(body)]
    return names.count("dot_general") > 1 and any(name in _EXPONENTIALS for name in names)
