"""The layers of a stage with the pass backward apart from the one forward, which is of another tick.

What the pass backward reads is what `jax.vjp` keeps, by the remat of the layers. Of that only what is made of values
that arrived in the stage is kept from tick to tick; the rest, such as params, is there or made again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zero_jax.dims import is_float
from zero_jax.program import jaxprs
from zero_jax.program.dataflow import Dependence
from zero_jax.program.evaluation import evaluate, trace_flat
from zero_jax.program.subcalls import CALLS


class StagePasses:
    """The layers of a stage, their backward pass apart from the forward one.

    Args:
      function: from what a stage does (`Work`), what the first layer reads, what has arrived, sums of gradients, and
        the params of the layers, to what is sent on, and the sums.
      work: what stages do.
      groups: the shapes of the other four.
      has_grad: which of what the first layer reads have a gradient; the params have that of the sums.

    Attributes:
      kept_avals: the shapes of what is kept between the two: the residuals that what has arrived is a part of.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        work: Sequence[jax.Array],
        groups: Sequence[Sequence[Any]],
        has_grad: Sequence[bool],
    ):
        sizes = [*map(len, groups)]
        floats = [is_float(x) for x in groups[1]]
        # Of all inputs, one group after another. Params have no gradients of their own: their sums have (`added_to`).
        self.is_moving = [*has_grad, *floats, *[True] * sizes[2], *[False] * sizes[3]]
        self.tree: Any = None  # of residuals

        def run(*values: Any) -> list[Any]:
            work, inputs = values[: len(avals)], values[len(avals) :]

            def sent(*moving: Any) -> tuple[Any, list[Any]]:
                rest = iter(moving)
                full = [next(rest) if flag else x for flag, x in zip(self.is_moving, inputs, strict=True)]
                made, sums = function(work, *(full[end - n : end] for n, end in zip(sizes, ends, strict=True)))
                return ([x for x in made if is_float(x)], sums), made

            ends = [*itertools.accumulate(sizes)]
            _, pullback, made = jax.vjp(sent, *self.moving(inputs), has_aux=True)
            residuals, self.tree = jax.tree.flatten(pullback)  # a pullback is a pytree of its residuals
            return [*made, *residuals]

        avals = [jax.ShapeDtypeStruct((), x.dtype) for x in work]
        closed = trace_flat(run, [*avals, *itertools.chain(*groups)])
        outvars, self.num_sent = jaxprs.open_jaxpr(closed)[0].outvars, sizes[1]
        # What depends on what arrived is of this tick alone; all else can be made again in that of the backward pass.
        marks = [*[0] * (len(avals) + sizes[0]), *[1] * sizes[1], *[0] * (sizes[2] + sizes[3])]
        arrived = _Arrived().run(closed, [frozenset({0} if mark else ()) for mark in marks])
        self.is_kept = [bool(x) for x in arrived[self.num_sent :]]
        residuals = [*zip(self.is_kept, outvars[self.num_sent :], strict=True)]
        kept = [x for is_kept, x in residuals if is_kept]
        self.kept_avals = [x.aval for x in kept]
        self.first = jaxprs.alone(closed, [*outvars[: self.num_sent], *kept])
        self.again = jaxprs.alone(closed, [x for is_kept, x in residuals if not is_kept])

    def moving(self, inputs: Sequence[Any]) -> list[Any]:
        """Returns the inputs that have a gradient."""
        return [x for flag, x in zip(self.is_moving, inputs, strict=False) if flag]

    def forward(self, work: Sequence[Any], *groups: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns what is sent on, and what is kept."""
        made = evaluate(*jaxprs.open_jaxpr(self.first), [*work, *itertools.chain(*groups)])
        return made[: self.num_sent], made[self.num_sent :]

    def linear(
        self, work: Sequence[Any], groups: Sequence[Sequence[Any]], made: list[Any], kept: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns what was `made`, to be sent on, and sums, as a linear function of what has a gradient.

        Of what has arrived `groups` have numbers of any value, those that have a gradient alone.
        """
        values, arrived, sums, stacks = groups
        floats = iter(arrived)
        full = [next(floats) if is_float(x) else jnp.zeros_like(x) for x in made]
        inputs = [*map(jnp.asarray, values), *full, *sums, *stacks]
        again = iter(evaluate(*jaxprs.open_jaxpr(self.again), [*work, *map(lax.stop_gradient, inputs)]))
        own = iter(kept)
        residuals = [next(own if is_kept else again) for is_kept in self.is_kept]

        num_sums = len(sums)  # a function that outlives the trace must not hold the sums themselves

        @jax.custom_vjp
        def sent(inputs: list[Any], sums: list[Any], made: list[Any], residuals: list[Any]) -> Any:
            return made, sums

        def backward(residuals: list[Any], cotangents: tuple[list[Any], list[Any]]) -> tuple[Any, Any, None, None]:
            floats = [x for x, like in zip(cotangents[0], made, strict=True) if is_float(like)]
            grads = [*jax.tree.unflatten(self.tree, residuals)((floats, cotangents[1]))]
            return grads[: len(grads) - num_sums], grads[len(grads) - num_sums :], None, None

        sent.defvjp(lambda _, sums, made, residuals: ((made, sums), residuals), backward)
        return sent(self.moving([*map(jnp.asarray, values), *full]), list(sums), made, residuals)


class _Arrived(Dependence):
    """Tells what values are made of, within layers and calls."""

    enters = CALLS | {"scan"}
