"""Evaluation of jaxprs: with functions in place of some equations, or with nested ones in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zero_jax.program.jaxprs import (
    Literal,
    bind,
    is_literal,
    new_variable,
    open_jaxpr,
    operation_key,
    source_context,
    source_within,
    variables,
    with_results,
)
from zero_jax.program.subcalls import subcall

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
    evaluate_equations(jaxpr.eqns, env, equation)
    return values_of(jaxpr.outvars, env)


def evaluate_equations(eqns: Iterable[Any], env: dict[Any, Any], equation: Equation = bind) -> None:
    """Evaluates equations, and adds their results to the values of variables."""
    for eqn in eqns:
        env.update(zip(eqn.outvars, equation(eqn, values_of(eqn.invars, env)), strict=True))


def values_of(atoms: Sequence[Any], env: Mapping[Any, Any]) -> list[Any]:
    """Returns the values of variables and literals."""
    return [atom.val if type(atom) is Literal else env[atom] for atom in atoms]


def inlining(kinds: Collection[str] = ("call",)) -> Equation:
    """Returns an evaluation of equations that runs the jaxprs of these kinds of `Subcall` in place."""

    def equation(eqn: Any, values: list[Any]) -> list[Any]:
        sub = subcall(eqn)
        if sub is None or sub.kind not in kinds:
            return bind(eqn, values)
        with source_context(eqn):
            return evaluate(*open_jaxpr(sub.jaxpr), values, equation)

    return equation


def trace_flat(function: Callable[..., list[Any]], avals: Sequence[Any]) -> Any:
    """Traces a function of arrays, such as one that evaluates a jaxpr; returns its closed jaxpr."""
    shapes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)) for aval in avals
    ]
    return jax.make_jaxpr(function)(*shapes)


def with_equations(jaxpr: Any, equation: Equation) -> Any:
    """Returns a closed jaxpr of what another one computes, with a function in place of some equations."""
    opened, consts = open_jaxpr(jaxpr)
    return trace_flat(lambda *xs: evaluate(opened, consts, xs, equation), [var.aval for var in opened.invars])


def with_some(jaxpr: Any, which: Collection[int], equation: Equation) -> Any:
    """Returns a closed jaxpr of what another one computes, with a function in place of equations, by their `id`s.

    The others stay what they are, and are not traced again. What the function does at one equation does not depend on
    arrays that it made at another.
    """
    opened, _ = open_jaxpr(jaxpr)

    def traced(eqn: Any) -> Any:
        return trace_flat(lambda *values: [*equation(eqn, [*values])], [atom.aval for atom in eqn.invars])

    made = {id(eqn): traced(eqn) for eqn in opened.eqns if id(eqn) in which}
    if any(consts for _, consts in map(open_jaxpr, made.values())):  # they would be inputs of their own
        return with_equations(jaxpr, lambda eqn, values: (equation if id(eqn) in which else bind)(eqn, values))
    eqns, outvars = _written_out(opened, lambda eqn: made.get(id(eqn)), sourced=False)
    return with_results(jaxpr, outvars, eqns=eqns)


def flattened(jaxpr: Any, kinds: Collection[str] = ("call",), leaves: Callable[[Any], bool] = lambda eqn: False) -> Any:
    """Returns a jaxpr of what another one computes, with the jaxprs of these kinds of `Subcall` in place.

    The equations stay what they are, so those of equal layers are equal; what cannot be written so is traced again.
    Where a jaxpr can be written out, the equations that `leaves` says stay calls.
    """
    opened, _ = open_jaxpr(jaxpr)
    # An effect may say by its number which input it is on. That of a collective, in a `jax.shard_map`, names an axis,
    # which nothing that is traced outside of it knows.
    written = all(type(effect).__name__ == "NamedAxisEffect" for effect in opened.effects)
    if written and _can_be_written_out(opened, kinds):

        def within(eqn: Any) -> Any:
            sub = subcall(eqn)
            return None if sub is None or sub.kind not in kinds or leaves(eqn) else sub.jaxpr

        eqns, outvars = _written_out(opened, within)
        return with_results(jaxpr, outvars, eqns=eqns)
    return with_equations(jaxpr, inlining(kinds))


def first_of_equals(jaxpr: Any, merges: Callable[[Any], bool] = lambda eqn: True) -> dict[Any, Any]:
    """Returns for the results of equations that are equal to earlier ones of an open jaxpr the variables of the first.

    These are equations without effects that may be merged.
    """
    first_of, same = dict[Any, Any](), dict[Any, Any]()
    # A literal is equal to itself alone, and has no hash: its type and bytes are compared.
    value = lambda x: (str(x.aval), np.asarray(x.val).tobytes()) if is_literal(x) else same.get(x, x)  # noqa: E731
    for eqn in jaxpr.eqns:
        if not eqn.effects and merges(eqn):
            first = first_of.setdefault((*operation_key(eqn), *map(value, eqn.invars)), eqn)
            same.update(zip(eqn.outvars, first.outvars, strict=True) if first is not eqn else ())
    return same


def once_each(jaxpr: Any, merges: Callable[[Any], bool]) -> Any:
    """Returns a jaxpr, open or closed, in which equal equations are one, of those that may be and have no effects."""
    opened, _ = open_jaxpr(jaxpr)
    used = {*(x for eqn in opened.eqns for x in variables(eqn)), *(x for x in opened.outvars if not is_literal(x))}
    # What nothing reads may be a `DropVar`, which cannot take the place of another result.
    same = first_of_equals(opened, lambda eqn: used.issuperset(eqn.outvars) and merges(eqn))
    read = lambda atom: atom if is_literal(atom) else same.get(atom, atom)  # noqa: E731
    rest = (eqn for eqn in opened.eqns if not eqn.outvars or eqn.outvars[0] not in same)
    eqns = [eqn.replace(invars=[*map(read, eqn.invars)]) for eqn in rest]
    return with_results(jaxpr, [*map(read, opened.outvars)], eqns=eqns) if same else jaxpr


def _can_be_written_out(jaxpr: Any, kinds: Collection[str]) -> bool:
    """Tells whether the jaxprs to put in place have no constants."""
    subs = (sub.jaxpr for eqn in jaxpr.eqns if (sub := subcall(eqn)) is not None and sub.kind in kinds)
    opened = map(open_jaxpr, subs)
    return all(not consts and not x.constvars and _can_be_written_out(x, kinds) for x, consts in opened)


def _written_out(jaxpr: Any, within: Callable[[Any], Any], *, sourced: bool = True) -> tuple[list[Any], list[Any]]:
    """Returns the equations and the results of a jaxpr, with those of other jaxprs in place of some equations.

    `within` returns such a jaxpr, or None. Its equations get source and names of the equation that it is in place of
    beside their own, if `sourced`.
    """
    eqns: list[Any] = []

    def add(eqns_within: Sequence[Any], atoms: dict[Any, Any], around: Sequence[Any]) -> None:
        read = lambda atom: atom if is_literal(atom) else atoms.get(atom, atom)  # noqa: E731
        for eqn in eqns_within:
            invars = [read(atom) for atom in eqn.invars]
            if (jaxpr := within(eqn)) is not None:
                inner, _ = open_jaxpr(jaxpr)
                made = dict(zip(inner.invars, invars, strict=True))
                add(inner.eqns, made, (*around, eqn))
                results = [atom if is_literal(atom) else made.get(atom, atom) for atom in inner.outvars]
                atoms.update(zip(eqn.outvars, results, strict=True))
            elif not around:
                eqns.append(eqn if invars == eqn.invars else eqn.replace(invars=invars))
            else:  # calls of equal layers share one jaxpr, and a variable is made once: each has variables of its own
                outvars = [*map(new_variable, eqn.outvars)]
                atoms.update(zip(eqn.outvars, outvars, strict=True))
                source = source_within(eqn, around) if sourced else eqn.source_info
                eqns.append(eqn.replace(invars=invars, outvars=outvars, source_info=source))

    results: dict[Any, Any] = {}
    add(jaxpr.eqns, results, ())
    return eqns, [atom if is_literal(atom) else results.get(atom, atom) for atom in jaxpr.outvars]
