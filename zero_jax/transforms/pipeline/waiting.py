"""Chains of stages on XLA:CPU, one after another: it would run two at once if neither reads what the other makes.

Its threads start two such loops together, and permutes of both meet in one rendezvous (docs/xla_faults.md). XLA:CPU
drops an `optimization_barrier` before it says what waits for what. So the second loop gets operands that are chosen by
a value of the first one; in the backward pass the first one gets cotangents that are chosen by one of the second.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from zero_jax.core.tree import is_key
from zero_jax.dims import is_float
from zero_jax.program import jaxprs
from zero_jax.program.dataflow import made_of
from zero_jax.program.evaluation import evaluate, trace_flat, values_of
from zero_jax.transforms.pipeline.cut import pipeline_p


def in_turn(closed: Any, num_params: int) -> Any:
    """Returns a jaxpr in which each chain of stages waits for the one before it; itself if each reads of that."""
    jaxpr, consts = jaxprs.open_jaxpr(closed)
    chains = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive is pipeline_p]
    of_batch, waits = made_of(jaxpr.invars[num_params:], jaxpr.eqns), dict[int, tuple[list[Any], list[Any]]]()
    for before, index in itertools.pairwise(chains):
        eqn, made = jaxpr.eqns[index], made_of(jaxpr.eqns[before].outvars, jaxpr.eqns[:index])
        if made.isdisjoint(reads := jaxprs.variables(eqn)):
            later = [x for each in jaxpr.eqns[index:] for x in jaxprs.variables(each)]
            later += [x for x in jaxpr.outvars if not jaxprs.is_literal(x)]
            own = [x for x in dict.fromkeys(reads) if x in of_batch and not is_key(x.aval)]
            waits[id(eqn)] = own, [x for x in dict.fromkeys(later) if x in made and is_float(x.aval)]
    if not waits:
        return closed

    def run(*leaves: Any) -> list[Any]:
        env: dict[Any, Any] = {}

        def equation(eqn: Any, values: Sequence[Any]) -> list[Any]:
            if id(eqn) in waits:
                tied = _ordered(*([env[x] for x in each] for each in waits[id(eqn)]))
                env.update(zip(itertools.chain(*waits[id(eqn)]), itertools.chain(*tied), strict=True))
                values = values_of(eqn.invars, env)
            return jaxprs.bind(eqn, values)

        return evaluate(jaxpr, consts, leaves, equation, env)

    return trace_flat(run, [var.aval for var in jaxpr.invars])


@jax.custom_vjp
def _ordered(second: list[Any], first: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns arrays as they are: `second` after `first`, and the cotangents of `first` after those of `second`."""
    return _after(second, first), first


def _forward(second: list[CustomVJPPrimal], first: list[CustomVJPPrimal]) -> tuple[Any, None]:
    return _ordered(*([x.value for x in each] for each in (second, first))), None


def _backward(_: None, cotangents: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
    second, first = ([None if isinstance(x, SymbolicZero) else x for x in each] for each in cotangents)
    return second, _after(first, [x for x in second if x is not None])


_ordered.defvjp(_forward, _backward, symbolic_zeros=True)


def _after(arrays: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Returns arrays, chosen by what no number is: more than itself or less."""
    if not others:
        return [*arrays]
    value = jnp.max(others[0])
    is_never = (value != value) & (value == value)
    return [None if x is None else jnp.where(is_never, jnp.zeros_like(x), x) for x in arrays]
