"""Equations of equal layers, evaluated so that JAX traces and differentiates one of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zero_jax.core.jaxprs import (
    bind,
    bind_primitive,
    inner_jaxprs,
    is_traced,
    name_stack,
    source_context,
    source_line,
)


def equation_key(eqn: Any) -> tuple[Any, ...]:
    """Returns what is equal for equations that do the same and come from the same line and names."""
    avals = tuple(var.aval for var in eqn.invars)
    source = name_stack(eqn), source_line(eqn)
    try:
        hash(key := (eqn.primitive, tuple(eqn.params.items()), avals, eqn.ctx, source))
    except TypeError:  # a parameter that has no hash
        return (_ById(eqn),)
    return key


@dataclasses.dataclass(frozen=True, eq=False)
class _ById:
    """A key that is equal to itself alone."""

    value: Any


class CachedBind:
    """Evaluates equations as `bind` does, one kind of equation as one nested `jit`, which is inlined.

    JAX keeps the derivative of a nested `jit`: of 48 equal layers it then differentiates one, as it does for the
    functions of `jax.numpy`.
    """

    def __init__(self):
        self.jitted: dict[Any, Callable[..., Any]] = {}

    def __call__(self, eqn: Any, values: Sequence[Any]) -> list[Any]:
        """Evaluates an equation on values and returns its results, always as a list."""
        if eqn.effects or inner_jaxprs(eqn) or all(not is_traced(value) for value in values):
            return bind(eqn, values)
        try:
            key = eqn.primitive, tuple(eqn.params.items()), eqn.ctx
            function = self.jitted.get(key)
        except TypeError:  # a parameter that has no hash
            return bind(eqn, values)
        if function is None:
            function = self.jitted[key] = jax.jit(
                functools.partial(bind_primitive, eqn.primitive, eqn.params), inline=True
            )
        with source_context(eqn):
            result = function(*values)
        return list(result) if eqn.primitive.multiple_results else [result]
