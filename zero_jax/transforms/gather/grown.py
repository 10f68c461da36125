"""Params of which larger values are made: biases of positions by a table or an MLP, filters by few coefficients.

XLA sums the gradient of such a value over all devices where examples use it, and then each device goes on to the same
gradients of the params. It is linear from there on: so each device has a copy of these params, goes on with what it has
of the gradient, and the params' alone are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from zero_jax.dims import ELEMENTWISE, FACTORIZATIONS, is_float, known_primitives
from zero_jax.program.jaxprs import inner_jaxprs, is_literal, open_jaxpr
from zero_jax.program.subcalls import equations, subcall
from zero_jax.transforms.facts import Facts
from zero_jax.transforms.gather.deferred import Lazy

# A value is worth it from so many times the size of the params that it is made of.
_TIMES = 2


def grown_params(facts: Facts, values: Sequence[Any], is_by_device: Callable[[Any, Collection[int]], bool]) -> set[int]:
    """Returns the inputs of a jaxpr that are params of which only larger values are made, for examples to use.

    `is_by_device(eqn, places)` tells whether an operation is one of each device's examples with its copy of the
    operands `places`.
    """
    larger, others = list[set[int]](), set[int]()
    for index in facts.uses:
        for var in facts.reads[index]:
            if (origin := facts.origins.get(var)) is None or not origin.params:
                continue
            params = {i for i in origin.params if isinstance(values[i], Lazy)}
            size = sum(values[i].aval.size for i in params)
            if params and is_float(var.aval) and var.aval.size >= _TIMES * size:
                larger.append(params)
            else:
                others |= params
    found = set[int]()
    while larger:  # those of one value are copied together, or not at all
        params = larger.pop()
        while linked := [x for x in larger if not params.isdisjoint(x)]:
            params.update(*linked)
            larger = [x for x in larger if x not in linked]
        if params.isdisjoint(others):
            copied = _Copied(is_by_device)
            made = copied.run(facts.jaxpr, [i in params for i in range(len(facts.jaxpr.invars))])
            found |= params if made is not None and not any(made) else set()
    return found


class _Copied:
    """Follows values of which each device has a copy, through what examples use them in."""

    def __init__(self, is_by_device: Callable[[Any, Collection[int]], bool]):
        self.is_by_device = is_by_device

    def run(self, jaxpr: Any, copies: Sequence[bool]) -> list[bool] | None:
        """Returns which results of a jaxpr are such copies; None if one is used in another way."""
        opened, _ = open_jaxpr(jaxpr)
        copied = {var for var, is_copy in zip(opened.invars, copies, strict=True) if is_copy}
        constants: set[Any] = set()
        for eqn in opened.eqns:
            states = [None if is_literal(x) or x in constants else x in copied for x in eqn.invars]
            if not any(states):
                constants.update(eqn.outvars if set(states) <= {None} and not eqn.effects else ())
                continue
            made = self.made(eqn, states)
            if made is None:
                return None
            copied.update(var for var, is_copy in zip(eqn.outvars, made, strict=True) if is_copy)
        return [not is_literal(x) and x in copied for x in opened.outvars]

    def made(self, eqn: Any, states: Sequence[bool | None]) -> list[bool] | None:
        """Returns which results of an equation that uses copies are such; None if it uses them in another way."""
        sub, are_copies = subcall(eqn), [bool(state) for state in states]
        if False not in states and can_be_mapped(eqn):
            return [True]
        if sub is None:
            places = [i for i, is_copy in enumerate(are_copies) if is_copy]
            return [False] * len(eqn.outvars) if self.is_by_device(eqn, places) else None
        if sub.kind == "call":
            return self.run(sub.jaxpr, are_copies)
        if sub.kind not in ("remat", "scan"):
            return None
        operands = sub.split(are_copies) if sub.kind == "scan" else (are_copies, [], [])
        made = None if any([*operands[1], *operands[2]]) else self.run(sub.jaxpr, are_copies)
        return None if made is None or any(made) else made


def can_be_mapped(eqn: Any) -> bool:
    """Tells whether an equation of one result can be evaluated for each device, by `jax.vmap`."""
    if len(eqn.outvars) != 1 or eqn.effects:
        return False
    sub = subcall(eqn)
    if sub is not None:
        return sub.kind == "custom_jvp" and all(map(_is_plain, equations(sub.jaxpr)))
    return _is_plain(eqn) and not inner_jaxprs(eqn)


def _is_plain(eqn: Any) -> bool:
    known = known_primitives().get(eqn.primitive.name)
    if known is None:
        return (sub := subcall(eqn)) is not None and sub.kind == "call"
    is_library = known.kind in ("library", "place") or eqn.primitive.name in FACTORIZATIONS - {"fft"}
    return not is_library


def dim_of_examples(eqn: Any, copies: Collection[int], states: Sequence[Any], num_blocks: int) -> int | None:
    """Returns the dim of examples of an elementwise operation with copies, which have no examples; else None."""
    if eqn.primitive.name not in ELEMENTWISE or len(eqn.outvars) != 1:
        return None
    shape, dims = eqn.outvars[0].aval.shape, {state for state in states if isinstance(state, int)}
    if len(dims) != 1 or shape[dim := dims.pop()] % num_blocks:
        return None
    of_copies = [eqn.invars[i].aval.shape for i in copies]
    return None if any(of and of[dim] != 1 for of in of_copies) else dim
