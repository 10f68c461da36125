"""Gradients of layers, added in place, layer by layer, and tick by tick or microbatch by microbatch.

The gradient of what a loop takes slices of is made for all of its layers before it is added to another one. So a sum
goes with what the loops carry, of no value (zeros) and with the gradient of all layers as its own, to which that of a
layer is added where it is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax import lax

from zero_jax.program.evaluation import evaluate
from zero_jax.program.jaxprs import bind, open_jaxpr, source_context
from zero_jax.program.subcalls import Subcall, subcall
from zero_jax.sharding.precision import wide


@jax.custom_vjp
def sum_of(stack: jax.Array) -> jax.Array:
    """Returns the sum of a stack before the loop, whose gradient is that of the stack."""
    return jnp.zeros(stack.shape, wide(stack.dtype))


sum_of.defvjp(
    # What is kept for the backward pass has to be an array: a scalar brings the dtype.
    lambda stack: (jnp.zeros(stack.shape, wide(stack.dtype)), jnp.zeros((), stack.dtype)),
    lambda like, cotangent: (cotangent.astype(like.dtype),),
)


# Evaluates a function of each part of mapped arrays; the result has the shape and dtype of the first of them.
OfEach = Callable[..., jax.Array]


@functools.lru_cache(maxsize=64)
def updated_at(dim: int, *, adds: bool, of_each: OfEach | None = None) -> Callable[..., jax.Array]:
    """Returns a function that puts an array into another one at an index of a dim, or adds it to what is there.

    XLA adds in place, where the array is made. Of an update by index `jax.vmap` makes a scatter: XLA:TPU copies the
    old slice for it, and reads it twice. An index of each part of a mapped array is left to `of_each`.
    """

    @jax.custom_batching.custom_vmap
    def update(array: jax.Array, x: jax.Array, number: jax.Array) -> jax.Array:
        starts = [number if i == dim else jnp.zeros_like(number) for i in range(array.ndim)]
        x = jnp.expand_dims(x, dim)
        return lax.dynamic_update_slice(array, lax.dynamic_slice(array, starts, x.shape) + x if adds else x, starts)

    @update.def_vmap
    def mapped(size: int, is_mapped: list[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
        each = zip(operands[:2], is_mapped, strict=False)
        array, x = (x if flag else jnp.broadcast_to(x, (size, *x.shape)) for x, flag in each)
        if not is_mapped[2]:  # one index for all: the mapped dim is in front of the others
            return updated_at(dim + 1, adds=adds, of_each=of_each)(array, x, operands[2]), True
        if of_each is None:
            raise NotImplementedError("an index that is another for each part of a mapped array")
        # A part keeps the mapped dim, of size 1: `[1, ...]`, with an index `[1]`.
        at_own_index = lambda array, x, numbers: updated_at(dim + 1, adds=adds)(array, x, numbers[0])  # noqa: E731
        return of_each(at_own_index, array, x, operands[2]), True

    return update


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _put_at(array: jax.Array, x: jax.Array, number: jax.Array, dim: int) -> jax.Array:
    return updated_at(dim, adds=False)(array, x, number)


def put_at(array: jax.Array, x: jax.Array, number: jax.Array, dim: int) -> jax.Array:
    """Returns an array with another slice at an index of a dim: in place, mapped or not."""
    put: Any = _put_at  # to type checkers, what a `custom_vjp` returns is no array
    return put(array, x, number, dim)


def _put_backward(dim: int, number: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    of_slice = lax.dynamic_index_in_dim(cotangent, number, dim, keepdims=False)
    return put_at(cotangent, jnp.zeros_like(of_slice), number, dim), of_slice, None


_put_at.defvjp(lambda array, x, number, dim: (put_at(array, x, number, dim), number), _put_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def added_to(
    sums: jax.Array, x: jax.Array, number: jax.Array, is_own: Any, share: Any = None, of_each: OfEach | None = None
) -> tuple[Any, Any, Any]:
    """Returns a sum `[layers, ...]` and the param `x` of a layer, whose gradient is added to that of the sum.

    Args:
      sums: the sum.
      x: the param; a gradient of its own it has not.
      number: the number of the layer in the sum.
      is_own: whether there is a microbatch. Of none there is no gradient: derivatives may be infinite then.
      share: a scalar, which is returned, too. Its cotangent is what gradients are multiplied by; where that is 0 there
        is none. So the backward pass may know what the forward pass did not: the weight of a microbatch.
      of_each: evaluates a function of each part of arrays that are mapped, if `number` is.
    """
    return sums, x, share


def _add_backward(
    of_each: OfEach | None, residuals: tuple[Any, Any], cotangents: tuple[Any, Any, Any]
) -> tuple[Any, ...]:
    # The cotangent of the sum is what other layers, microbatches and ticks have added so far.
    (number, is_own), (sums, of_layer, share) = residuals, cotangents
    added = jnp.where(is_own, of_layer, jnp.zeros_like(of_layer)).astype(sums.dtype)
    if share is not None:
        added = jnp.where(share == 0, 0, share * added).astype(sums.dtype)  # 0 times infinity is not 0
    # The share goes on to the layer before, as it came.
    return updated_at(0, adds=True, of_each=of_each)(sums, added, number), None, None, None, share


added_to.defvjp(lambda sums, x, number, is_own, share, _: ((sums, x, share), (number, is_own)), _add_backward)


def without_derivatives(values: Any, inputs: Any, why: str) -> Any:
    """Returns values as they are; raises `ValueError` where these, or inputs beside them, are differentiated.

    It stands before gradients are added in place. Their derivatives would be wrong: stacks are constants to the loops
    that add the gradients of their slices. Where they are not, JAX refuses them in words of its own.
    """
    identity = jax.custom_jvp(lambda values, inputs: values)

    @identity.defjvp
    def _(*_: Any) -> Any:
        raise ValueError(why)

    return identity(values, inputs)


class SummedStacks:
    """Evaluates a program so that scans add the gradients of the params that they take slices of to sums.

    A scan within another region (a loop, a branch, `jax.checkpoint`) makes its gradients as before, and so does one of
    something made of a param.

    Args:
      leaves: the arguments of the program.
      params: those of them that have gradients.
      sums: the sum of each, of the same shape.
      share: see `added_to`.

    Attributes:
      adds: whether a scan has added to the sums.
    """

    def __init__(self, leaves: Sequence[Any], params: Sequence[Any], sums: Sequence[jax.Array], share: jax.Array):
        self.leaves, self.sums, self.share, self.adds = leaves, [*sums], share, False
        self.number_of = {id(x): i for i, x in enumerate(params)}
        arguments = set(map(id, leaves))
        # Which params have a gradient besides that of slices, as those that something else is made of beforehand.
        self.used_otherwise = [id(x) not in arguments for x in params]

    def run(self, closed: Any) -> list[Any]:
        """Returns the results of the program; `sums` and `share` are then those behind it."""
        results = evaluate(*open_jaxpr(closed), self.leaves, self.equation)
        self.note(results)
        return results

    def numbers(self, values: Sequence[Any]) -> dict[int, int]:
        """Returns the numbers of the params among some values, each with a place where it is."""
        return {self.number_of[id(x)]: i for i, x in enumerate(values) if id(x) in self.number_of}

    def note(self, values: Sequence[Any]) -> None:
        """Notes the params among values as used otherwise."""
        for number in self.numbers(values):
            self.used_otherwise[number] = True

    def equation(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        """Returns the results of an equation."""
        sub = subcall(eqn)
        if sub is not None and sub.kind == "call":
            with source_context(eqn):
                return evaluate(*open_jaxpr(sub.jaxpr), values, self.equation)
        if sub is None or sub.kind != "scan":
            self.note(values)
            return bind(eqn, values)
        consts, carry, stacks = sub.split(values)
        numbers = self.numbers(stacks)
        others = [x for i, x in enumerate(stacks) if i not in numbers.values()]
        self.note([*consts, *carry, *others])
        return self.scan(eqn, sub, (consts, carry, stacks), numbers) if numbers else bind(eqn, values)

    def scan(self, eqn: Any, sub: Subcall, operands: tuple[list[Any], ...], numbers: dict[int, int]) -> list[Any]:
        """Returns the results of a scan that takes slices of some arguments, by the place of each."""
        (consts, carry, stacks), self.adds = operands, True
        # Without it, the backward scan would stack zeros for the gradients of all layers.
        stacks = [lax.stop_gradient(x) if i in numbers.values() else x for i, x in enumerate(stacks)]
        sums = {number: self.sums[number] for number in numbers}

        def body(before: Any, sliced: Any) -> Any:
            (carry, sums, share), (index, slices) = before, sliced
            add: Any = added_to
            for number, place in numbers.items():
                sums[number], slices[place], share = add(sums[number], slices[place], index, True, share)
            results = evaluate(*open_jaxpr(sub.jaxpr), [*consts, *carry, *slices])
            return (results[: sub.num_carry], sums, share), results[sub.num_carry :]

        layers, options = jnp.arange(sub.length, dtype=jnp.int32), {"reverse": sub.reverse, "unroll": sub.unroll}
        with source_context(eqn):
            (carry, sums, self.share), ys = lax.scan(body, (carry, sums, self.share), (layers, stacks), **options)
        for number, x in sums.items():
            self.sums[number] = x
        return [*carry, *ys]
