"""The cores of attention in a jaxpr, found by their shape alone: product, exponential, product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zero_jax.dims import is_contraction
from zero_jax.program import jaxprs
from zero_jax.program.subcalls import equations_of
from zero_jax.transforms.facts import Facts


def find_cores(facts: Facts) -> tuple[set[Any], set[Any]]:
    """Finds what is within the cores of attention in a jaxpr with calls inlined, and their results.

    A core is two products of activations (made of more than params and constants) with an exponential between: that of
    queries with keys, and that with values.
    """
    eqns = facts.jaxpr.eqns
    inner: set[Any] = set()
    results: set[Any] = set()

    def multiplies(eqn: Any) -> bool:
        is_product = eqn.primitive.name == "dot_general"
        return is_product and all(facts.kind(atom) == "value" for atom in eqn.invars)

    for i, eqn in enumerate(eqns):
        if multiplies(eqn):
            found, ends = _core(eqns[i:], multiplies)
            inner |= found
            results |= ends
    return inner, results


def _core(eqns: Sequence[Any], multiplies: Callable[[Any], bool]) -> tuple[set[Any], set[Any]]:
    """Returns what is computed between a product and the next one of activations, and the results of that."""
    first = eqns[0]
    shape = sorted(first.outvars[0].aval.shape)
    reached, ends = set(first.outvars), []
    for eqn in eqns[1:]:
        hits = [not jaxprs.is_literal(atom) and atom in reached for atom in eqn.invars]
        if not any(hits):
            continue
        if multiplies(eqn):
            if sum(hits[:2]) == 1:
                ends.append(eqn)
        elif not is_contraction(eqn) or sorted(eqn.outvars[0].aval.shape) == shape:
            reached.update(eqn.outvars)
    inner: set[Any] = set()
    results: set[Any] = set()
    for end in ends:
        needed = {atom for atom in end.invars if not jaxprs.is_literal(atom)} & reached
        between: list[Any] = []
        for eqn in reversed(eqns):
            if needed.intersection(eqn.outvars) and reached.intersection(eqn.outvars):
                between.append(eqn)
                needed.update(atom for atom in eqn.invars if not jaxprs.is_literal(atom))
        if any(each.primitive.name in ("exp", "exp2") for eqn in between for each in equations_of(eqn)):
            inner.update(var for eqn in between for var in eqn.outvars)
            results.update(end.outvars)
    return inner, results
