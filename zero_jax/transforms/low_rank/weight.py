"""A frozen weight and its low-rank update, both still to be made: `W + scale A B`, or DoRA's with a norm per output.

Operations that are linear in a weight are evaluated on its factors: `x @ W + scale (x @ A) @ B`. So the full gradient
of `W` is never computed, and what is summed across devices are the gradients of `A` and `B`.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zero_jax.dims import reshape_groups
from zero_jax.program.jaxprs import bind, source_context
from zero_jax.program.walk import Deferred, as_it_is
from zero_jax.sharding.precision import wide

STACK, IN, OUT = "s", "i", "o"


@dataclasses.dataclass(frozen=True)
class WeightMove:
    """A transpose (`order`) or a reshape (to `shape`) of a weight, whose dims had and have these labels."""

    before: str
    after: str
    order: tuple[int, ...] | None = None
    shape: tuple[int, ...] = ()

    def __call__(self, array: jax.Array, keep: str) -> jax.Array:
        """Moves an array that has only the dims with the labels `keep`, and perhaps the rank's dim after them."""
        if self.order is None:
            extra = array.shape[sum(label in keep for label in self.before) :]
            kept = [n for n, label in zip(self.shape, self.after, strict=True) if label in keep]
            return array.reshape(*kept, *extra)
        kept = [i for i, label in enumerate(self.before) if label in keep]
        order = [kept.index(i) for i in self.order if i in kept]
        return array.transpose(*order, *range(len(order), array.ndim))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Weight(Deferred):
    """A frozen weight, `[*stack, *in, *out]` or `[*stack, *out, *in]` when it is built, and what is added to it."""

    path: str  # the path of the leaf
    roots: tuple[Any, ...]  # the arrays that it is built from; each begins with the dims of the stack
    build: Callable[..., Any]  # makes the weight of the roots, of any part of the stack
    # For each dim, now, `s` (a stack of weights), `i` (in) or `o` (out). A weight without an update has `s`.
    labels: str
    shape: tuple[int, ...]  # the shape, now
    dtype: Any  # the dtype that the function sees
    # None; or `a`, `[*stack, *in, rank]`, `b`, `[*stack, rank, *out]` and, for DoRA, `[*stack, *out]`
    factors: tuple[Any, ...] = ()
    scale: float = 1.0  # the factor of `a @ b`
    moves: tuple[WeightMove, ...] = ()  # transposes and reshapes since it was built

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All arrays that it is made of."""
        return (*self.roots, *self.factors)

    @property
    def is_plain(self) -> bool:
        """Whether the frozen weight is an array that is used as it is."""
        return len(self.roots) == 1 and self.roots[0].dtype == self.dtype and self.build is as_it_is and not self.moves

    @property
    def is_dora(self) -> bool:
        """Whether the update has a norm for each output."""
        return len(self.factors) == 3

    def with_arrays(self, arrays: Sequence[Any]) -> Weight:
        """Returns the weight made of other arrays of the same kind."""
        split = len(self.roots)
        return dataclasses.replace(self, roots=tuple(arrays[:split]), factors=tuple(arrays[split:]))

    def places(self, labels: str) -> list[int]:
        """Returns the dims that have one of these labels."""
        return [i for i, label in enumerate(self.labels) if label in labels]

    def element(self, arrays: Sequence[Any]) -> Weight:
        """Returns an element of the stack, from that of each array."""
        return dataclasses.replace(self.with_arrays(arrays), labels=self.labels[1:], shape=self.shape[1:])

    def cast(self, dtype: Any) -> Weight:
        """Returns the weight in another dtype."""
        return dataclasses.replace(self, dtype=dtype)

    def transposed(self, order: Sequence[int]) -> Weight:
        """Returns the weight with its dims in another order."""
        labels = "".join(self.labels[i] for i in order)
        move = WeightMove(self.labels, labels, order=tuple(order))
        shape = tuple(self.shape[i] for i in order)
        return dataclasses.replace(self, labels=labels, shape=shape, moves=(*self.moves, move))

    def reshaped(self, shape: Sequence[int]) -> Weight | None:
        """Returns the weight in another shape; None if that would join dims with different labels."""
        labels: dict[int, str] = {}
        for old, new in reshape_groups(self.shape, shape):
            found = {self.labels[i] for i in old}
            if len(found) > 1 or (new and not found):
                return None
            labels.update(dict.fromkeys(new, *found))
        if len(labels) != len(shape) or set(labels.values()) != set(self.labels):
            return None
        after = "".join(labels[i] for i in range(len(shape)))
        move = WeightMove(self.labels, after, shape=tuple(shape))
        return dataclasses.replace(self, labels=after, shape=tuple(shape), moves=(*self.moves, move))

    def base(self) -> jax.Array:
        """Returns the frozen weight, in the dtype that the function sees."""
        return self._moved(self.build(*self.roots), "sio").astype(self.dtype)

    def factor(self, side: str) -> jax.Array:
        """Returns the factor of `in` or of `out`, with its dims in the weight's order and the rank last."""
        if side == IN:
            array = self.factors[0]
        else:
            num_stack = self.labels.count(STACK) if not self.moves else self.moves[0].before.count(STACK)
            array = jnp.moveaxis(self.factors[1], num_stack, -1)
        return self._moved(array, STACK + side)

    def update(self, dtype: Any) -> jax.Array:
        """Returns `scale A B` in the weight's shape."""
        letters = string.ascii_letters[: len(self.shape)]
        of_a, of_b = ("".join(letters[i] for i in self.places(STACK + side)) for side in (IN, OUT))
        a, b = (self.factor(side).astype(dtype) for side in (IN, OUT))
        return self.scale * jnp.einsum(f"{of_a}Z,{of_b}Z->{letters}", a, b, preferred_element_type=dtype)

    def gain(self) -> jax.Array:
        """Returns DoRA's factor of each output, `[*stack, *out]`; no gradient goes through the norm (section 4.3)."""
        norm = lax.stop_gradient(jnp.linalg.norm(self._sum(), axis=tuple(self.places(IN)), keepdims=False))
        magnitude = self._moved(self.factors[2], STACK + OUT)
        is_zero = norm == 0  # an output of zeros stays one, and its `B` has a gradient by which it can leave
        return jnp.where(is_zero, 1, magnitude.astype(norm.dtype) / jnp.where(is_zero, 1, norm))

    def merged(self) -> jax.Array:
        """Returns the weight with its update, in float32 or wider before the cast."""
        if not self.factors:
            return self.base()
        total = self._sum()
        if self.is_dora:
            total *= jnp.expand_dims(self.gain(), self.places(IN))
        return total.astype(self.dtype)

    def _sum(self) -> jax.Array:
        dtype = wide(self.dtype)
        return self._moved(self.build(*self.roots), "sio").astype(dtype) + self.update(dtype)

    def _moved(self, array: jax.Array, keep: str) -> jax.Array:
        for move in self.moves:
            array = move(array, keep)
        return array


# From an equation's inputs, weights among them, to its results.
Evaluate = Callable[[Sequence[Any]], list[Any]]
# From the weight and the other input to the result.
Product = Callable[[Weight, Any], jax.Array]


def product_of(eqn: Any, weight: Weight, place: int) -> Evaluate | None:
    """Returns how to evaluate an equation on the factors of its input at `place`; None if it cannot be."""
    rule = _RULES.get(eqn.primitive.name) if weight.factors else None
    product = None if rule is None else rule(eqn, weight, place)
    return None if product is None else lambda inputs: [product(inputs[place], inputs[1 - place])]


def _dot(eqn: Any, weight: Weight, place: int) -> Product | None:
    """A product that sums over all dims of one side, with the stack as batch dims."""
    contracting, batch = (pair[place] for pair in eqn.params["dimension_numbers"])
    side = next((side for side in (IN, OUT) if sorted(contracting) == weight.places(side)), None)
    if side is None or sorted(batch) != weight.places(STACK) or eqn.params.get("out_sharding") is not None:
        return None
    far, x_rank = OUT if side == IN else IN, eqn.invars[1 - place].aval.ndim
    # A letter for each dim; those of the other factor that are multiplied with the weight's have theirs.
    of_weight = string.ascii_lowercase[: len(weight.shape)]
    pairs = [
        pair for dims in eqn.params["dimension_numbers"] for pair in zip(dims[1 - place], dims[place], strict=True)
    ]
    shared = {dim: of_weight[of] for dim, of in pairs}
    of_x = "".join(shared.get(dim, string.ascii_uppercase[dim]) for dim in range(x_rank))
    of_batch, free = "".join(of_weight[i] for i in batch), "".join(filter(str.isupper, of_x))
    rest = "".join(of_weight[i] for i in weight.places(far))
    of_y = of_batch + (free + rest if place else rest + free)  # as `dot_general` orders its result
    near_letters, far_letters = ("".join(of_weight[i] for i in weight.places(STACK + each)) for each in (side, far))
    options = {"precision": eqn.params["precision"], "preferred_element_type": eqn.params["preferred_element_type"]}

    def evaluate(w: Weight, x: Any) -> jax.Array:
        gain = w.gain() if w.is_dora else None
        of_gain = near_letters if side == OUT else far_letters
        if gain is not None and side == OUT:  # the outputs are what is summed over
            x = x * _spread(gain, of_gain, of_x).astype(x.dtype)
        y = bind(eqn, [x, w.base()] if place else [w.base(), x])[0]
        with source_context(eqn):
            a, b = w.factor(side).astype(x.dtype), w.factor(far).astype(x.dtype)
            h = jnp.einsum(f"{of_x},{near_letters}Z->{of_batch}{free}Z", x, a, **options)  # Z is the rank
            h = (h * w.scale).astype(x.dtype)
            y = y + jnp.einsum(f"{of_batch}{free}Z,{far_letters}Z->{of_y}", h, b, **options).astype(y.dtype)
            return y if gain is None or side == OUT else (y * _spread(gain, of_gain, of_y)).astype(y.dtype)

    return evaluate


def _spread(array: Any, letters: str, to: str) -> Any:
    """Returns an array with its dims in the places that their letters have among others, to multiply with these."""
    sizes = dict(zip(letters, array.shape, strict=True))
    order = sorted(range(len(letters)), key=lambda i: to.index(letters[i]))
    return array.transpose(order).reshape([sizes.get(letter, 1) for letter in to])


def _lookup(eqn: Any, weight: Weight, place: int) -> Product | None:
    """Rows of a table `[rows, ...]` by their numbers."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    num_indices = eqn.invars[1].aval.ndim - 1
    dims = tuple(numbers.collapsed_slice_dims)
    rest = [i for i in range(len(weight.shape)) if i not in dims]
    side = next((side for side in (IN, OUT) if weight.places(side) == list(dims)), None)
    are_rows = all(sizes[i] == weight.shape[i] for i in rest) and not getattr(numbers, "operand_batching_dims", ())
    are_last = tuple(numbers.offset_dims) == tuple(range(num_indices, num_indices + len(rest)))
    is_by_number = len(dims) == 1 and tuple(numbers.start_index_map) == dims
    if place != 0 or side is None or weight.places(STACK) or not (are_rows and are_last and is_by_number):
        return None
    if weight.is_dora and (side == OUT or eqn.params["fill_value"] is not None):
        return None
    far = OUT if side == IN else IN
    of_factor = numbers._replace(offset_dims=(num_indices,), collapsed_slice_dims=(0,), start_index_map=(0,))

    def evaluate(w: Weight, rows: Any) -> jax.Array:
        y = bind(eqn, [w.base(), rows])[0]
        a, b = w.factor(side), w.factor(far)
        of_rows = {"dimension_numbers": of_factor, "slice_sizes": (1, a.shape[1]), "fill_value": 0}  # those of `y` stay
        lookup = eqn.replace(params={**eqn.params, **of_rows})
        h = bind(lookup, [a, rows])[0]
        with source_context(eqn):
            y = y + jnp.tensordot((h * w.scale).astype(a.dtype), b, (-1, -1)).astype(y.dtype)
            return (y * w.gain()).astype(y.dtype) if w.is_dora else y

    return evaluate


def _convolution(eqn: Any, weight: Weight, place: int) -> Product | None:
    """A convolution without groups: its kernel's dims of space and input features are `in`."""
    params = eqn.params
    numbers = params["dimension_numbers"]
    out = numbers.rhs_spec[0]
    has_groups = not params["feature_group_count"] == params["batch_group_count"] == 1
    if place != 1 or has_groups or weight.places(OUT) != [out] or weight.places(STACK):
        return None
    feature = numbers.out_spec[1]

    def evaluate(w: Weight, x: Any) -> jax.Array:
        y = bind(eqn, [x, w.base()])[0]
        h = bind(eqn, [x, jnp.moveaxis(w.factor(IN), -1, out).astype(x.dtype)])[0]
        with source_context(eqn):
            u = jnp.tensordot((h * w.scale).astype(x.dtype), w.factor(OUT).astype(x.dtype), (feature, 1))
            y = y + jnp.moveaxis(u, -1, feature).astype(y.dtype)
            if not w.is_dora:
                return y
            gain = jnp.expand_dims(w.gain(), [dim for dim in range(y.ndim) if dim != feature])
            return (y * gain).astype(y.dtype)

    return evaluate


_RULES: dict[str, Callable[[Any, Weight, int], Product | None]] = {
    "dot_general": _dot,
    "gather": _lookup,
    "conv_general_dilated": _convolution,
}
