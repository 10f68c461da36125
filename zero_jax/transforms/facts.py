"""Facts of a jaxpr's values, found without evaluating it: one rule for each, which all transforms ask."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

from zero_jax.dims import PARTS, is_contraction
from zero_jax.program import jaxprs
from zero_jax.program.dataflow import Dataflow, Flags, read_for
from zero_jax.program.subcalls import equations_of


@dataclasses.dataclass(frozen=True)
class Origin:
    """Which params a value depends on, if it depends on params and constants only."""

    params: frozenset[int]  # the numbers of these params among the inputs of the jaxpr; none for a constant
    part: Hashable  # identifies the slice of these params, whatever casts and transposes came after it


class Facts:
    """What is known of the values of an open jaxpr; each fact is found when it is first asked for.

    `kinds` has for each input `param`, `const`, or `value`; the rule derives the origins of values, None is `Origins`.
    """

    def __init__(self, jaxpr: Any, kinds: Sequence[str], rule: Origins | None = None):
        self.jaxpr, self.kinds, self.rule = jaxpr, kinds, rule

    @functools.cached_property
    def reads(self) -> list[list[Any]]:
        """The inputs of each equation that are variables."""
        return [jaxprs.variables(eqn) for eqn in self.jaxpr.eqns]

    @functools.cached_property
    def origins(self) -> dict[Any, Origin]:
        """For each variable that is made of params and constants alone, of which."""
        params = [frozenset((i,)) if kind == "param" else frozenset() for i, kind in enumerate(self.kinds)]
        inputs = [None if kind == "value" else Origin(params[i], i) for i, kind in enumerate(self.kinds)]
        env: dict[Any, Origin | None] = {}
        (self.rule or Origins()).run(self.jaxpr, inputs, env)
        return {var: origin for var, origin in env.items() if origin is not None}

    def kind(self, atom: Any) -> str:
        """Returns `param` for what is made of params and constants alone, `const` for constants, else `value`."""
        if type(atom) is jaxprs.Literal:
            return "const"
        origin = self.origins.get(atom)
        return "value" if origin is None else "param" if origin.params else "const"

    def only_params(self, eqn: Any) -> bool:
        """Tells whether an equation is on params and constants alone."""
        return bool(eqn.outvars) and eqn.outvars[0] in self.origins

    @functools.cached_property
    def uses(self) -> dict[int, frozenset[int]]:
        """For each equation that brings params together with anything else, by its index, which params."""
        found = dict[int, frozenset[int]]()
        of_params = {var: origin.params for var, origin in self.origins.items() if origin.params}
        for i, variables in enumerate(self.reads):
            params = [of_params[var] for var in variables if var in of_params]
            if params and not self.only_params(self.jaxpr.eqns[i]):
                found[i] = frozenset().union(*params)
        return found

    @functools.cached_property
    def used(self) -> set[Any]:
        """What is made of params and constants alone, and brought together with anything else."""
        return {var for i in self.uses for var in self.reads[i] if var in self.origins}

    @functools.cached_property
    def last_read(self) -> dict[Any, int]:
        """For each variable the index of its last reader, past the end for what is returned."""
        last = {var: i for i, variables in enumerate(self.reads) for var in variables}
        return last | {var: len(self.jaxpr.eqns) for var in self.jaxpr.outvars if not jaxprs.is_literal(var)}


class Origins(Dataflow[Origin | None]):
    """The origins of values; None of what is made of anything else than params and constants."""

    def constant(self, atom: Any) -> Origin | None:
        """Returns the origin of a literal, or of an array that the function closes over."""
        if jaxprs.is_literal(atom):
            return Origin(frozenset(), str(atom))
        # Arrays that a function closes over may be its batch: only scalars are sure to be mere constants.
        return None if atom.aval.shape else Origin(frozenset(), atom)

    def operation(self, eqn: Any, operands: list[Origin | None]) -> list[Origin | None]:
        """Returns the origin of each result of an equation."""
        known = [origin for origin in operands if origin is not None]
        origin = None if eqn.effects or len(known) < len(operands) else _derived(eqn, known)
        if origin is None or len(eqn.outvars) == 1:
            return [origin] * len(eqn.outvars)
        return [dataclasses.replace(origin, part=hash((origin.part, i))) for i in range(len(eqn.outvars))]


def _derived(eqn: Any, inputs: Sequence[Origin]) -> Origin:
    params = frozenset().union(*(origin.params for origin in inputs))
    of_params = [origin.part for origin in inputs if origin.params]
    inner = jaxprs.inner_jaxprs(eqn)
    if params and not inner and eqn.primitive.name not in PARTS:
        return Origin(params, of_params[0] if len(set(of_params)) == 1 else hash(tuple(of_params)))
    settings = "" if inner else str(eqn.params)
    return Origin(params, hash((eqn.primitive.name, settings, tuple(origin.part for origin in inputs))))


# The uses of one param.


class _Uses(Flags):
    """Which values are a param in another form; notes the equations that use it, and which of their operands it is."""

    def __init__(self, forms: Collection[str], enters: frozenset[str]):
        super().__init__()
        self.forms, self.enters, self.is_returned = forms, enters, False

    def slice_of(self, operand: bool) -> bool:
        return False

    def run(self, jaxpr: Any, inputs: Sequence[bool], env: dict[Any, bool] | None = None) -> list[bool]:
        results = super().run(jaxpr, inputs, env)
        self.is_returned = self.is_returned or any(results)
        return results

    def operation(self, eqn: Any, operands: list[bool]) -> list[bool]:
        is_form = any(operands) and eqn.primitive.name in self.forms
        if any(operands) and not is_form:
            self.notes[id(eqn), tuple(operands)] = eqn, [i for i, is_param in enumerate(operands) if is_param]
        return [is_form] * len(eqn.outvars)


def param_uses(
    jaxpr: Any, param: Any, *, forms: Collection[str], enters: frozenset[str]
) -> tuple[list[tuple[Any, list[int]]], bool]:
    """Returns the equations that use an input of a jaxpr, each with the numbers of the operands that it is.

    The results of the primitives `forms` count as the param; slices that a loop takes of it are no uses. Also returns
    whether the param itself is a result, of the jaxpr or of one in it.
    """
    uses = _Uses(forms, enters)
    uses.run(jaxpr, [var is param for var in jaxpr.invars])
    return list(uses.notes.values()), uses.is_returned


# The cores of attention, by their shape alone: product, exponential, product.


def find_cores(facts: Facts) -> tuple[set[Any], set[Any]]:
    """Finds what is within the cores of attention in a jaxpr with calls inlined, and their results.

    A core is two products of activations (made of more than params and constants) with an exponential between: that of
    queries with keys, and that with values.
    """
    eqns = facts.jaxpr.eqns
    inner, results = set[Any](), set[Any]()

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
    inner, results = set[Any](), set[Any]()
    within = [eqn for eqn in eqns if not reached.isdisjoint(eqn.outvars)]
    for end in ends:
        needed = read_for(reached.intersection(jaxprs.variables(end)), within)
        between = [eqn for eqn in within if not needed.isdisjoint(eqn.outvars)]
        if any(each.primitive.name in ("exp", "exp2") for eqn in between for each in equations_of(eqn)):
            inner.update(var for eqn in between for var in eqn.outvars)
            results.update(end.outvars)
    return inner, results
