"""Chains of stages on XLA:CPU, one after another: it would run two at once if neither reads what the other makes.

Its threads start two such loops together, and permutes of both meet in one rendezvous (docs/xla_faults.md). XLA:CPU
drops an `optimization_barrier` before it says what waits for what. So the second loop gets operands that are chosen by
a value of the first one; in the backward pass the first one gets cotangents that are chosen by one of the second, or by
a result of it where that has made its gradients already.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from zero_jax.core.tree import is_key
from zero_jax.dims import is_float
from zero_jax.program import jaxprs
from zero_jax.program.dataflow import made_of
from zero_jax.program.evaluation import evaluate, trace_flat, values_of
from zero_jax.transforms.pipeline.cut import pipeline_p
from zero_jax.transforms.pipeline.interleaved.microbatch import MicrobatchProgram


def in_turn(closed: Any, num_params: int) -> Any:
    """Returns a jaxpr in which each chain of stages waits for the one before it; itself if each derives from that."""
    jaxpr, consts = jaxprs.open_jaxpr(closed)
    chains = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive is pipeline_p]
    of_batch, waits = made_of(jaxpr.invars[num_params:], jaxpr.eqns), dict[int, tuple[Any, list[Any], list[Any]]]()
    for before, index in itertools.pairwise(chains):
        eqn, results, between = jaxpr.eqns[index], jaxpr.eqns[before].outvars, jaxpr.eqns[:index]
        # Behind a `stop_gradient` the second is after the first, but its backward pass is not before that of the first
        derived = made_of(results, [x for x in between if x.primitive.name != "stop_gradient"])
        if derived.isdisjoint(reads := jaxprs.variables(eqn)):
            own = [x for x in dict.fromkeys(reads) if x in of_batch and not is_key(x.aval)]
            later = [x for each in jaxpr.eqns[index:] for x in jaxprs.variables(each)]
            later += [x for x in jaxpr.outvars if not jaxprs.is_literal(x)]
            made = made_of(results, between).difference(own)
            result = next((x for x in results if is_float(x.aval)), results[0])
            waits[id(eqn)] = result, own, [x for x in dict.fromkeys(later) if x in made and is_float(x.aval)]
    if not waits:
        return closed

    def run(*leaves: Any) -> list[Any]:
        env: dict[Any, Any] = {}

        def equation(eqn: Any, values: Sequence[Any]) -> list[Any]:
            if id(eqn) not in waits:
                return jaxprs.bind(eqn, values)
            result, own, first = waits[id(eqn)]
            # A first chain that has no gradient gets none by this.
            tied = _ordered([env[x] for x in own], [env[x] for x in first], lax.stop_gradient(env[result]))
            env.update(zip(itertools.chain(own, first), itertools.chain(*tied), strict=True))
            results = jaxprs.bind(eqn, values_of(eqn.invars, env))
            if isinstance(eqn.params["loop"], MicrobatchProgram):  # it makes gradients with its results
                env.update(zip(first, _until([env[x] for x in first], results[0]), strict=True))
            return results

        return evaluate(jaxpr, consts, leaves, equation, env)

    return trace_flat(run, [var.aval for var in jaxpr.invars])


@jax.custom_vjp
def _ordered(second: list[Any], first: list[Any], result: Any) -> tuple[list[Any], list[Any]]:
    """Returns arrays as they are: `second` after a result, and the cotangents of `first` after those of `second`."""
    return _after(second, [result]), first


def _forward(second: list[CustomVJPPrimal], first: list[CustomVJPPrimal], result: CustomVJPPrimal) -> Any:
    return _ordered(*([x.value for x in each] for each in (second, first)), result.value), None


def _backward(_: None, cotangents: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any], None]:
    second, first = (_without_zeros(each) for each in cotangents)
    return second, _after(first, [x for x in second if x is not None]), None


_ordered.defvjp(_forward, _backward, symbolic_zeros=True)


@jax.custom_vjp
def _until(arrays: list[Any], result: Any) -> list[Any]:
    """Returns arrays as they are, whose cotangents are after a result."""
    return arrays


_until.defvjp(
    lambda arrays, result: ([x.value for x in arrays], result.value),
    lambda result, cotangents: (_after(_without_zeros(cotangents), [result]), None),
    symbolic_zeros=True,
)


def _without_zeros(cotangents: Sequence[Any]) -> list[Any]:
    return [None if isinstance(x, SymbolicZero) else x for x in cotangents]


def _after(arrays: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Returns arrays, chosen by what no number is: more than itself or less."""
    if not others:
        return [*arrays]
    value = jnp.max(others[0])
    is_never = (value != value) & (value == value)
    return [None if x is None else jnp.where(is_never, jnp.zeros_like(x), x) for x in arrays]
