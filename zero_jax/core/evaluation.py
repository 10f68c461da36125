"""Evaluation of jaxprs: with functions in place of some equations, or with nested ones in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax import lax

from zero_jax.core.jaxprs import bind, is_literal, open_jaxpr, source_context
from zero_jax.core.subcalls import scan_of, subcall

Equation = Callable[[Any, list[Any]], Sequence[Any]]


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    values: Sequence[Any],
    equation: Equation = bind,
    env: dict[Any, Any] | None = None,
) -> list[Any]:
    """Evaluates an open jaxpr on values and returns its results.

    `equation` returns the values of the results of an equation, from it and the values of its inputs; `env` gets the
    values of all variables.
    """
    env = {} if env is None else env
    env.update(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
    read = lambda atom: atom.val if is_literal(atom) else env[atom]  # noqa: E731
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, equation(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def inlining(kinds: Collection[str] = ("call",)) -> Equation:
    """Returns an evaluation of equations that runs the jaxprs of these kinds of `Subcall` in place."""

    def equation(eqn: Any, values: list[Any]) -> list[Any]:
        sub = subcall(eqn)
        if sub is None or sub.kind not in kinds:
            return bind(eqn, values)
        with source_context(eqn):
            return evaluate(*open_jaxpr(sub.jaxpr), values, equation)

    return equation


def run_scan(
    eqn: Any, body: Callable[[list[Any], list[Any]], list[Any]], carry: Sequence[Any], xs: Sequence[Any]
) -> list[Any]:
    """Evaluates a `scan` equation with another body.

    `body` takes the carry and the slices of an iteration, and returns all results of it, the new carry first.
    """
    scan = scan_of(eqn)

    def iteration(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = body(carry, x)
        return outs[: scan.num_carry], outs[scan.num_carry :]

    options = {"length": scan.length, "reverse": scan.reverse, "unroll": scan.unroll}
    with source_context(eqn):
        carry, ys = lax.scan(iteration, list(carry), list(xs), **options)
    return [*carry, *ys]


def trace_flat(function: Callable[..., list[Any]], avals: Sequence[Any]) -> Any:
    """Traces a function of arrays, such as one that evaluates a jaxpr; returns its closed jaxpr."""
    shapes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)) for aval in avals
    ]
    return jax.make_jaxpr(function)(*shapes)


def flattened(jaxpr: Any, consts: Sequence[Any] = (), kinds: Collection[str] = ("call",)) -> Any:
    """Returns a closed jaxpr of what another one computes, with the jaxprs of these kinds of `Subcall` in place.

    `consts` are the constants of an open jaxpr.
    """
    opened, own = open_jaxpr(jaxpr)
    equation = inlining(kinds)
    return trace_flat(lambda *xs: evaluate(opened, own or consts, xs, equation), [var.aval for var in opened.invars])
