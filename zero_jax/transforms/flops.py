"""Counts the floating-point operations of a traced function: matrix products, convolutions, and kernels of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.numpy as jnp

from zero_jax.program.dataflow import Dataflow, Flags
from zero_jax.program.jaxprs import inner_jaxprs, open_jaxpr
from zero_jax.program.subcalls import CALLS, KINDS, equations, kind_of, subcall

_EXPONENTIALS = ("exp", "exp2")


def count_flops(jaxpr: Any) -> int:
    """Counts the operations of a jaxpr's matrix products and convolutions, two for each multiply-add.

    Nothing else is counted, as is the custom for MFU (Chowdhery et al., "PaLM", appendix B); `training_flops` counts
    those of a step. Kernels count by their own cost estimate, else by the products of their body at each step of the
    grid, whether a mask skips it or not; so attention counts whole, by a kernel as without. A `while_loop`'s body
    counts once, of `cond` the costliest branch.
    """
    return _count(jaxpr, None)


def training_flops(jaxpr: Any, trained: Sequence[bool], *, attention_only: bool = False) -> int:
    """Counts the operations of a loss and of its gradients, from the loss's jaxpr.

    A product counts once, and once more for each operand that depends on a trained input: its cotangent is a product,
    too. Where all params are trained, that is three times the forward pass. What rematerialization repeats is no
    progress, and is not counted. With `attention_only` the products of attention count, of which a causal one needs
    half.
    """
    scores = _Scores()
    if attention_only:
        scores.run(jaxpr, [_NOTHING] * len(trained))
    return _count(jaxpr, scores.notes if attention_only else None, trained)


def _count(jaxpr: Any, wanted: Collection[int] | None, trained: Sequence[bool] | None = None) -> int:
    """Counts the operations of all products, or of those whose equation's `id` is wanted, and of gradients if any."""
    counted = _Flops(wanted)
    counted.run(jaxpr, trained or [False] * len(open_jaxpr(jaxpr)[0].invars))
    return counted.flops


def equation_flops(eqn: Any) -> int:
    """Counts the operations of a product or convolution; 0 for other equations."""
    rule = _RULES.get(eqn.primitive.name)
    return rule(eqn) if rule else 0


def _num_shards(eqn: Any) -> int:
    """Returns how many different parts of its operands the devices of a `shard_map` compute on; 1 of another call."""
    specs = eqn.params.get("in_specs") if kind_of(eqn) == "shard_map" else None
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
    return steps * sum(map(count_flops, inner_jaxprs(eqn)))


def _cudnn_attention(num_products: int, eqn: Any) -> int:
    query, key = (operand.aval.shape for operand in eqn.invars[:2])
    batch, head_dim = query[0], query[-1]
    length_dim = 2 if eqn.params.get("layout") == 1 else 1  # [batch, heads, length, dim], else heads third
    heads = query[3 - length_dim]
    return 2 * num_products * batch * heads * query[length_dim] * key[length_dim] * head_dim


_CUDNN = {
    f"dot_product_attention{dtype}_{name}{wrapper}": functools.partial(_cudnn_attention, num_products)
    for name, num_products in (("fwd", 2), ("bwd", 5))
    for dtype in ("", "_fp8")
    for wrapper in ("", "_wrapper")
}


def _attention(num_products: int, eqn: Any) -> int:
    """Of `zero_jax.attention`, all queries with all keys, masked or not."""
    (b, t, n, h), (_, s, _, _), (*_, v) = (atom.aval.shape for atom in eqn.invars[:3])
    return num_products * b * n * t * s * (h + v)  # half of the products have the size h, half v


_ATTENTION = {
    "zero_attention": functools.partial(_attention, 2),
    "zero_attention_cotangents": functools.partial(_attention, 5),
    **_CUDNN,
}
_RULES: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "pallas_call": _kernel,
    **_ATTENTION,
}

_PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
_ENTERED = (frozenset(KINDS.values()) | CALLS) - {"while"}


class _Flops(Flags):
    """Counts the operations of a loss and its gradients; values are known by whether they depend on a trained input."""

    enters = _ENTERED

    def __init__(self, wanted: Collection[int] | None):
        super().__init__()
        self.wanted = wanted

    @property
    def flops(self) -> int:
        """Operations so far: a note, since of the rounds of a loop only the last counts."""
        return self.notes.get("flops", 0)

    def equation(self, eqn: Any, operands: list[bool]) -> Sequence[bool]:
        sub, before = subcall(eqn), self.flops
        if sub is None or sub.kind not in self.enters:
            return self.operation(eqn, operands)
        if sub.kind == "cond":
            costliest = before
            results = [False] * len(eqn.outvars)
            for branch in sub.branches:
                self.notes["flops"] = before
                results = list(map(self.join, results, self.run(branch, operands[1:])))
                costliest = max(costliest, self.flops)
            self.notes["flops"] = costliest
            return results
        results = super().equation(eqn, operands)
        self.notes["flops"] = before + sub.length * _num_shards(eqn) * (self.flops - before)
        return results

    def operation(self, eqn: Any, operands: list[bool]) -> Sequence[bool]:
        # Of a `while_loop`, whose gradient is the model's own affair, the products count as those of a kernel.
        if rule := _RULES.get(eqn.primitive.name):
            forward = rule(eqn) if self.wanted is None or id(eqn) in self.wanted else 0
        else:
            forward = sum(_count(inner, self.wanted) for inner in inner_jaxprs(eqn))
        if forward:
            self.notes["flops"] = self.flops + forward + round(forward * _num_cotangents(eqn, operands))
        depends = any(operands) and eqn.primitive.name != "stop_gradient"
        return [depends and jnp.issubdtype(out.aval.dtype, jnp.inexact) for out in eqn.outvars]


def _num_cotangents(eqn: Any, depends: Sequence[bool]) -> float:
    """Returns how many times its own operations the backward pass of an equation takes."""
    if eqn.primitive.name in _PRODUCTS:
        return sum(depends[:2])
    if eqn.primitive.name in _ATTENTION:
        query, key, value = depends[:3]
        return (query + key + (query or key) + value) / 2  # of the scores, and of their product with the values
    return 2.0 if any(depends) else 0.0


# The batched products that a value is computed from, and those that went through an exponential.
Origins = tuple[frozenset[int], frozenset[int]]
_NOTHING: Origins = (frozenset(), frozenset())


class _Scores(Dataflow[Origins]):
    """Finds the products of attention: the scores, and their use; `notes` has the `id`s of their equations.

    These are batched products whose result, through an exponential, is an operand of another batched product, and
    kernels of both.
    """

    enters = _ENTERED

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
