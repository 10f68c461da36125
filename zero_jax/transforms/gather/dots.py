"""Products with weights of several input or output dims, such as `[features, heads, head_dim]`, as matrix products.

XLA:TPU lays a gradient of such a shape out as it pads least: with 64 lanes for `head_dim`, features become the lanes.
These are the dim that is cut, and lanes are all-reduced rather than reduce-scattered (docs/gather_on_use.md). So the
weight's shard is transposed and reshaped before it is gathered, its gradient after it is scattered, and in between are
matrices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from zero_jax.program.jaxprs import source_context
from zero_jax.sharding.spec import Dims
from zero_jax.transforms.gather.deferred import Lazy, Value

Bind = Callable[[Any, Sequence[Any]], list[Any]]
Evaluate = Callable[[Sequence[Any], Bind], list[Any]]


def flat_product(eqn: Any, values: Sequence[Lazy | Value]) -> tuple[list[Lazy | Value], Evaluate]:
    """Returns an equation's inputs and how it is evaluated: a product with a weight as one with a matrix, if it can be.

    That is a function from the inputs' arrays (params gathered) and from what evaluates an equation, to the results.
    """
    places = [i for i, value in enumerate(values) if isinstance(value, Lazy)]
    flat = None
    if eqn.primitive.name == "dot_general" and len(places) == 1 and eqn.params.get("out_sharding") is None:
        flat = _plan(eqn, values[places[0]], places[0])
    if flat is None:
        return list(values), lambda inputs, bind: bind(eqn, inputs)
    weight, other_order, other_shape, product = flat
    out_shape = eqn.outvars[0].aval.shape

    def evaluate(inputs: Sequence[Any], bind: Bind) -> list[Any]:
        with source_context(eqn):
            factors = [
                x if i in places else x.transpose(other_order).reshape(other_shape) for i, x in enumerate(inputs)
            ]
            return [bind(product, factors)[0].reshape(out_shape)]

    return [weight if i in places else value for i, value in enumerate(values)], evaluate


def _plan(eqn: Any, value: Any, place: int) -> tuple[Lazy, list[int], tuple[int, ...], Any] | None:
    """Returns the weight as a matrix, the other factor's order of dims and shape, and the equation of both, or None."""
    contracting, batch = eqn.params["dimension_numbers"]
    other = eqn.invars[1 - place].aval.shape
    pairs = sorted(zip(contracting[1 - place], contracting[place], strict=True))
    partners, summed = [i for i, _ in pairs], [i for _, i in pairs]  # in the order of the other factor, the larger
    free = [i for i in range(value.aval.ndim) if i not in summed]
    if value.dims is None or batch[place] or not (free and partners) or max(len(summed), len(free)) < 2:
        return None
    groups = sorted((summed, free))
    order = [*groups[0], *groups[1]]
    if not _is_run(order):  # it is transposed anyway: then the dim that is cut comes first
        groups.sort(key=lambda group: not any(value.dims[i] for i in group))
        order = [*groups[0], *groups[1]]
    dims = _merged_dims(value.dims, value.aval.shape, groups)
    if dims is None:
        return None
    shape = tuple(math.prod(value.aval.shape[i] for i in group) for group in groups)
    build = value.build
    weight = dataclasses.replace(
        value,
        build=lambda *roots: build(*roots).transpose(order).reshape(shape),
        aval=value.aval.update(shape=shape),
        dims=dims,
    )
    rest = [i for i in range(len(other)) if i not in partners]
    first = partners[0] if _is_run(partners) else len(rest)
    other_order = [*rest[:first], *partners, *rest[first:]]
    other_shape = (*(other[i] for i in rest[:first]), shape[groups.index(summed)], *(other[i] for i in rest[first:]))
    sums = [(groups.index(summed),), (first,)]
    numbers = (tuple(sums[i] for i in ((0, 1) if place == 0 else (1, 0))), ((), ()))
    return weight, other_order, other_shape, eqn.replace(params={**eqn.params, "dimension_numbers": numbers})


def _is_run(dims: Sequence[int]) -> bool:
    """Tells whether dims follow one another, so that a reshape makes one of them."""
    return bool(dims) and list(dims) == list(range(dims[0], dims[0] + len(dims)))


def _merged_dims(dims: Dims, shape: Sequence[int], groups: Sequence[Sequence[int]]) -> Dims | None:
    """Returns how a matrix of merged dims is sharded; None where more is cut than the major dim of a group."""
    merged = []
    for group in groups:
        major = next((i for i in group if shape[i] > 1), group[0])
        if any(dims[i] for i in group if i != major):
            return None
        merged.append(dims[major])
    return tuple(merged)
