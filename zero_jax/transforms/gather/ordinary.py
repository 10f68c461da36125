"""Runs of equations that use no param, evaluated together."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from zero_jax.core.jaxprs import is_literal, is_traced, name_stack, source_line, variables
from zero_jax.transforms.facts import Facts
from zero_jax.transforms.gather.cached_bind import CachedBind, can_be_nested
from zero_jax.transforms.gather.deferred import Lazy, Value
from zero_jax.transforms.gather.ordering import Ordering

_COLUMN = re.compile(r"(:\d+):\d+")


class OrdinaryRuns:
    """The runs of a jaxpr's equations on ordinary values, each of one line and one name stack.

    JAX gives all of a nested `jit` that is inlined the line and names where it is called.
    """

    def __init__(self, facts: Facts, is_apart: Callable[[Any], bool]):
        self.eqns, self.last_read = facts.jaxpr.eqns, facts.last_read
        self.is_apart = is_apart  # whether an equation is evaluated otherwise

    def at(self, start: int, env: dict[Any, Lazy | Value], ordering: Ordering) -> list[int]:
        """Returns the indices of the equations that can be evaluated together from one on; none if it cannot."""
        made: set[Any] = set()
        run: list[int] = []
        place = None
        for i in range(start, len(self.eqns)):
            eqn = self.eqns[i]
            if i in ordering.evaluated:
                continue
            if (run and i in ordering.places) or self.is_apart(eqn) or not _is_ordinary(eqn, env, made):
                break
            here = eqn.ctx, name_stack(eqn), _COLUMN.sub(r"\1", source_line(eqn))
            if run and here != place:
                break
            place = here
            made.update(eqn.outvars)
            run.append(i)
        return run

    def evaluate(self, run: list[int], env: dict[Any, Lazy | Value], bind: CachedBind) -> dict[Any, Value]:
        """Returns the values that the equations of a run make, those that are read after it."""
        eqns = [self.eqns[i] for i in run]
        params_only: dict[Any, bool] = {}
        for eqn in eqns:
            read = variables(eqn)
            is_params_only = all(params_only[var] if var in params_only else env[var].params_only for var in read)  # type: ignore[union-attr]
            params_only.update(dict.fromkeys(eqn.outvars, is_params_only))
        wanted = [var for var in params_only if self.last_read.get(var, -1) > run[-1]]
        read = lambda atom: atom.val if is_literal(atom) else env[atom].array  # type: ignore[union-attr]  # noqa: E731
        made = zip(wanted, bind.evaluate(eqns, read, wanted), strict=True)
        return {var: Value(array, params_only[var]) for var, array in made}


def _is_ordinary(eqn: Any, env: dict[Any, Lazy | Value], made: Collection[Any]) -> bool:
    """Tells whether all inputs are ordinary values, some of them traced."""
    is_any_traced = False
    for var in variables(eqn):
        if var in made:
            is_any_traced = True
        elif type(value := env.get(var)) is Value:
            is_any_traced = is_any_traced or is_traced(value.array)
        else:
            return False
    return is_any_traced and can_be_nested(eqn)
