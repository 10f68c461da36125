"""Equations of equal layers, evaluated so that JAX traces and differentiates one of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

from zero_jax.program import jaxprs
from zero_jax.program.jaxprs import Literal, is_traced
from zero_jax.transforms.facts import Facts
from zero_jax.transforms.gather.deferred import Lazy, Value
from zero_jax.transforms.gather.ordering import Ordering

# The parts of an expression differ in their columns.
_without_column = functools.cache(functools.partial(re.compile(r"(:\d+):\d+").sub, r"\1"))


def can_be_nested(eqn: Any) -> bool:
    """Tells whether an equation may be in a nested `jit` of `CachedBind`: it has no effects and holds no jaxprs."""
    return not eqn.effects and not jaxprs.inner_jaxprs(eqn)


class CachedBind:
    """Evaluates equations as `bind` does, one kind of equation as one nested `jit`, which is inlined.

    JAX keeps the derivative of a nested `jit`: of 48 equal layers it then differentiates one, as it does for the
    functions of `jax.numpy`.
    """

    def __init__(self):
        self.jitted: dict[Any, Callable[..., Any]] = {}

    def evaluate(self, eqns: Sequence[Any], read: Callable[[Any], Any], wanted: Sequence[Any]) -> list[Any]:
        """Evaluates equations of one line and names that follow one another, and returns the wanted results.

        Each of them `can_be_nested`; `read` returns the values of what none of them makes, that of the last one first.
        """
        run = _NestedCall(eqns, wanted)
        if run.key not in self.jitted:
            self.jitted[run.key] = jaxprs.inline_jit(run.call)
        with jaxprs.source_context(eqns[0]):
            return self.jitted[run.key](*map(read, run.inputs))

    def __call__(self, eqn: Any, values: Sequence[Any]) -> list[Any]:
        """Evaluates an equation on values and returns its results, always as a list."""
        if not can_be_nested(eqn) or all(not is_traced(value) for value in values):
            return jaxprs.bind(eqn, values)
        remaining = iter(values)
        return self.evaluate([eqn], lambda _: next(remaining), eqn.outvars)


class _NestedCall:
    """Equations as a function of arrays.

    It takes a value as often as they use it, the last use first: so a cotangent is the sum of the same terms in the
    same order as of equations that are evaluated one by one. Its `key` is equal for equations that do the same.
    """

    def __init__(self, eqns: Sequence[Any], wanted: Sequence[Any]):
        self.eqns = eqns
        numbers = {var: i for i, var in enumerate(var for eqn in eqns for var in eqn.outvars)}
        self.wanted = tuple(numbers[var] for var in wanted)
        self.inputs: list[Any] = []
        # For each equation, where its inputs begin among those of the run, and for each operand the number of the
        # result that it is, None for an input.
        places = []
        for eqn in reversed(eqns):
            operands = [None if type(atom) is Literal else numbers.get(atom) for atom in eqn.invars]
            first = len(self.inputs)
            self.inputs += [atom for atom, number in zip(eqn.invars, operands, strict=True) if number is None]
            places.append((first, tuple(operands)))
        self.places = tuple(reversed(places))
        self.key = *((jaxprs.operation_key(eqn), eqn.ctx) for eqn in eqns), self.places, self.wanted

    def call(self, *arrays: Any) -> list[Any]:
        results: list[Any] = []
        for eqn, (first, operands) in zip(self.eqns, self.places, strict=True):
            inputs = iter(arrays[first:])
            values = [next(inputs) if number is None else results[number] for number in operands]
            result = jaxprs.bind_primitive(eqn.primitive, eqn.params, *values)
            results += result if eqn.primitive.multiple_results else [result]
        return [results[number] for number in self.wanted]


class OrdinaryRuns:
    """The runs of a jaxpr's equations that use no param, each of one line and one name stack: evaluated together.

    JAX gives all of a nested `jit` that is inlined the line and names where it is called. No run goes on between what
    is tied by the `ordering`, or with an equation that is evaluated otherwise (`is_other`).
    """

    def __init__(self, facts: Facts, ordering: Ordering, is_other: Callable[[Any], bool]):
        self.facts, self.eqns, self.ordering, self.is_other = facts, facts.jaxpr.eqns, ordering, is_other
        self.sources: dict[int, Hashable] = {}

    def at(self, start: int, env: dict[Any, Lazy | Value]) -> list[int]:
        """Returns the indices of the equations that can be evaluated together from one on; none if it cannot."""
        made: set[Any] = set()
        run: list[int] = []
        for i in range(start, len(self.eqns)):
            if i in self.ordering.evaluated:
                continue
            if (run and i in self.ordering.places) or not self.is_ordinary(i, env, made):
                break
            if (source := self.source(i)) is None or (run and source != self.source(run[0])):
                break
            made.update(self.eqns[i].outvars)
            run.append(i)
        return run

    def is_ordinary(self, index: int, env: dict[Any, Any], made: Collection[Any]) -> bool:
        """Tells whether all inputs of an equation are ordinary values, some of them traced, or `made` before it."""
        reads = self.facts.reads[index]
        values: list[Any] = [env[var] if var in env else None for var in reads if var not in made]
        if any([type(x) is not Value for x in values]):  # a list: passes ask this of each equation
            return False
        return len(values) < len(reads) or any(is_traced(x.array) for x in values)

    def source(self, index: int) -> Hashable:
        """Returns line, names and context of an equation; None for one that is evaluated by itself."""
        if index not in self.sources:
            eqn = self.eqns[index]
            is_alone = self.is_other(eqn) or not can_be_nested(eqn)
            line = "" if is_alone else _without_column(jaxprs.source_line(eqn))
            self.sources[index] = None if is_alone else (eqn.ctx, eqn.source_info.name_stack, line)
        return self.sources[index]

    def evaluate(self, run: list[int], env: dict[Any, Any], bind: CachedBind) -> dict[Any, Value]:
        """Returns the values that the equations of a run make, those that are read after it."""
        eqns = [self.eqns[i] for i in run]
        params_only: dict[Any, bool] = {}
        for i, eqn in zip(run, eqns, strict=True):
            each = [params_only[x] if x in params_only else env[x].params_only for x in self.facts.reads[i]]
            params_only.update(dict.fromkeys(eqn.outvars, all(each)))
        wanted = [var for var in params_only if self.facts.last_read.get(var, -1) > run[-1]]
        read = lambda atom: atom.val if type(atom) is Literal else env[atom].array  # noqa: E731
        made = zip(wanted, bind.evaluate(eqns, read, wanted), strict=True)
        return {var: Value(array, params_only[var]) for var, array in made}
