"""A frozen weight and its low-rank update, both still to be made: `W + scale A B`, or DoRA's with a norm per output."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zero_jax.dims import reshape_groups
from zero_jax.program.walk import Deferred

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
    """A frozen weight, `[*stack, *in, *out]` or `[*stack, *out, *in]` when it is built, and what is added to it.

    Attributes:
      path: the path of the leaf.
      roots: the arrays that it is built from; each begins with the dims of the stack.
      build: makes the weight of the roots, of any part of the stack.
      labels: for each dim, now, `s` (a stack of weights), `i` (in) or `o` (out). A weight without an update has `s`.
      shape: the shape, now.
      dtype: the dtype that the function sees.
      factors: none; or `a`, `[*stack, *in, rank]`, `b`, `[*stack, rank, *out]` and, for DoRA, `[*stack, *out]`.
      scale: the factor of `a @ b`.
      moves: transposes and reshapes since it was built.
    """

    path: str
    roots: tuple[Any, ...]
    build: Callable[..., Any]
    labels: str
    shape: tuple[int, ...]
    dtype: Any
    factors: tuple[Any, ...] = ()
    scale: float = 1.0
    moves: tuple[WeightMove, ...] = ()

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All arrays that it is made of."""
        return (*self.roots, *self.factors)

    @property
    def is_plain(self) -> bool:
        """Whether the frozen weight is an array that is used as it is."""
        return len(self.roots) == 1 and self.roots[0].dtype == self.dtype and self.build is as_stored and not self.moves

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

    # --- what does not make it yet -----------------------------------------------------------------------------------

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

    # --- what makes it -----------------------------------------------------------------------------------------------

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
        of = {side: "".join(letters[i] for i in self.places(STACK + side)) for side in (IN, OUT)}
        a, b = (self.factor(side).astype(dtype) for side in (IN, OUT))
        return self.scale * jnp.einsum(f"{of[IN]}Z,{of[OUT]}Z->{letters}", a, b, preferred_element_type=dtype)

    def gain(self) -> jax.Array:
        """Returns DoRA's factor of each output, `[*stack, *out]`; no gradient goes through the norm (section 4.3)."""
        norm = lax.stop_gradient(jnp.linalg.norm(self._sum(), axis=tuple(self.places(IN)), keepdims=False))
        magnitude = self._moved(self.factors[2], STACK + OUT)
        return magnitude.astype(jnp.float32) / norm

    def merged(self) -> jax.Array:
        """Returns the weight with its update, in float32 before the cast."""
        if not self.factors:
            return self.base()
        total = self._sum()
        if self.is_dora:
            total *= jnp.expand_dims(self.gain(), self.places(IN))
        return total.astype(self.dtype)

    def _sum(self) -> jax.Array:
        base = self._moved(self.build(*self.roots), "sio").astype(jnp.float32)
        return base + self.update(jnp.float32)

    def _moved(self, array: jax.Array, keep: str) -> jax.Array:
        for move in self.moves:
            array = move(array, keep)
        return array


def as_stored(array: Any) -> Any:
    """Builds a weight that is stored as it is."""
    return array
