"""Operations that are linear in a weight, evaluated on its factors: `x @ W + scale (x @ A) @ B`.

So the full gradient of `W` is never computed, and what is summed across devices are the gradients of `A` and `B`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zero_jax.program.jaxprs import bind, source_context
from zero_jax.transforms.low_rank.weight import IN, OUT, STACK, Weight

# From an equation's inputs, weights among them, to its results.
Evaluate = Callable[[Sequence[Any]], list[Any]]
# From the weight and the other input to the result.
Product = Callable[[Weight, Any], jax.Array]


def product_of(eqn: Any, weight: Weight, place: int) -> Evaluate | None:
    """Returns how to evaluate an equation on the factors of its input at `place`; None if it cannot be."""
    rule = _RULES.get(eqn.primitive.name) if weight.factors else None
    product = None if rule is None else rule(eqn, weight, place)
    return None if product is None else lambda inputs: [product(inputs[place], inputs[1 - place])]


# --- matrix products -------------------------------------------------------------------------------------------------


def _dot(eqn: Any, weight: Weight, place: int) -> Product | None:
    """A product that sums over all dims of one side, with the stack as batch dims."""
    contracting, batch = (pair[place] for pair in eqn.params["dimension_numbers"])
    other_contracting, other_batch = (pair[1 - place] for pair in eqn.params["dimension_numbers"])
    side = next((side for side in (IN, OUT) if sorted(contracting) == weight.places(side)), None)
    if side is None or sorted(batch) != weight.places(STACK) or eqn.params.get("out_sharding") is not None:
        return None
    far = OUT if side == IN else IN
    near_dims, far_dims = weight.places(STACK + side), weight.places(STACK + far)
    options = {"precision": eqn.params["precision"], "preferred_element_type": eqn.params["preferred_element_type"]}

    def evaluate(w: Weight, x: Any) -> jax.Array:
        gain = w.gain() if w.is_dora else None
        if gain is not None and side == OUT:  # the outputs are what is summed over
            x = x * _placed(gain, x, other_batch, other_contracting, weight, batch, contracting)
        y = bind(eqn, [x, w.base()] if place else [w.base(), x])[0]
        with source_context(eqn):
            near = [near_dims.index(i) for i in contracting], [near_dims.index(i) for i in batch]
            numbers = ((other_contracting, near[0]), (other_batch, near[1]))
            h = lax.dot_general(x, w.factor(side).astype(x.dtype), numbers, **options)
            b = w.factor(far).astype(x.dtype)
            num_batch = len(batch)
            far_batch = [far_dims.index(i) for i in batch]
            numbers = (([h.ndim - 1], [b.ndim - 1]), (list(range(num_batch)), far_batch))
            u = lax.dot_general((h * w.scale).astype(x.dtype), b, numbers, **options)
            num_free = len(far_dims) - num_batch
            if place == 0:  # the weight's dims come before the other factor's
                u = jnp.moveaxis(u, range(u.ndim - num_free, u.ndim), range(num_batch, num_batch + num_free))
            y = y + u.astype(y.dtype)
            if gain is not None and side == IN:
                # The dims of the outputs lie after those of the batch, or at the end.
                first = num_batch if place == 0 else y.ndim - num_free
                order = [weight.places(STACK + OUT).index(i) for i in [*batch, *weight.places(OUT)]]
                shape = [*y.shape[:num_batch], *(1,) * (y.ndim - num_batch)]
                shape[first : first + num_free] = y.shape[first : first + num_free]
                y = (y * gain.transpose(order).reshape(shape)).astype(y.dtype)
        return y

    return evaluate


def _placed(
    gain: Any,
    x: Any,
    x_batch: Sequence[int],
    x_contracting: Sequence[int],
    weight: Weight,
    batch: Sequence[int],
    contracting: Sequence[int],
) -> Any:
    """Returns gains of the outputs where another factor has these dims."""
    dims = weight.places(STACK + OUT)
    to = dict(zip((*batch, *contracting), (*x_batch, *x_contracting), strict=True))
    order = sorted(range(len(dims)), key=lambda k: to[dims[k]])
    shape = [1] * x.ndim
    for k in order:
        shape[to[dims[k]]] = gain.shape[k]
    return gain.transpose(order).reshape(shape).astype(x.dtype)


# --- lookups ---------------------------------------------------------------------------------------------------------


def _lookup(eqn: Any, weight: Weight, place: int) -> Product | None:
    """Rows of a table `[rows, ...]` by their numbers."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    num_indices = eqn.invars[1].aval.ndim - 1
    dims = tuple(numbers.collapsed_slice_dims)
    rest = [i for i in range(len(weight.shape)) if i not in dims]
    side = next((side for side in (IN, OUT) if weight.places(side) == list(dims)), None)
    whole = all(sizes[i] == weight.shape[i] for i in rest) and not getattr(numbers, "operand_batching_dims", ())
    ends = tuple(numbers.offset_dims) == tuple(range(num_indices, num_indices + len(rest)))
    starts = len(dims) == 1 and tuple(numbers.start_index_map) == dims
    if place != 0 or side is None or weight.places(STACK) or not (whole and ends and starts):
        return None
    if weight.is_dora and side == OUT:
        return None
    far = OUT if side == IN else IN
    of_factor = numbers._replace(offset_dims=(num_indices,), collapsed_slice_dims=(0,), start_index_map=(0,))

    def evaluate(w: Weight, rows: Any) -> jax.Array:
        y = bind(eqn, [w.base(), rows])[0]
        a, b = w.factor(side), w.factor(far)
        taken = eqn.replace(params={**eqn.params, "dimension_numbers": of_factor, "slice_sizes": (1, a.shape[1])})
        h = bind(taken, [a, rows])[0]
        with source_context(eqn):
            u = lax.dot_general((h * w.scale).astype(a.dtype), b, (((h.ndim - 1,), (b.ndim - 1,)), ((), ())))
            y = y + u.astype(y.dtype)
            return (y * w.gain()).astype(y.dtype) if w.is_dora else y

    return evaluate


# --- convolutions ----------------------------------------------------------------------------------------------------


def _convolution(eqn: Any, weight: Weight, place: int) -> Product | None:
    """A convolution without groups: its kernel's dims of space and input features are `in`."""
    params = eqn.params
    numbers = params["dimension_numbers"]
    out = numbers.rhs_spec[0]
    plain = params["feature_group_count"] == params["batch_group_count"] == 1
    if place != 1 or not plain or weight.places(OUT) != [out] or weight.places(STACK):
        return None
    feature = numbers.out_spec[1]

    def evaluate(w: Weight, x: Any) -> jax.Array:
        y = bind(eqn, [x, w.base()])[0]
        h = bind(eqn, [x, jnp.moveaxis(w.factor(IN), -1, out).astype(x.dtype)])[0]
        with source_context(eqn):
            b = w.factor(OUT).astype(x.dtype)
            u = lax.dot_general((h * w.scale).astype(x.dtype), b, (((feature,), (1,)), ((), ())))
            y = y + jnp.moveaxis(u, -1, feature).astype(y.dtype)
            if not w.is_dora:
                return y
            shape = [1] * y.ndim
            shape[feature] = y.shape[feature]
            return (y * w.gain().reshape(shape)).astype(y.dtype)

    return evaluate


_RULES: dict[str, Callable[[Any, Weight, int], Product | None]] = {
    "dot_general": _dot,
    "gather": _lookup,
    "conv_general_dilated": _convolution,
}
