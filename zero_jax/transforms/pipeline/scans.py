"""Scans over layers: which they are. Those that read params by a number, or in reverse, take them in order then."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zero_jax.dims import is_contraction, is_float
from zero_jax.program.dataflow import made_of
from zero_jax.program.evaluation import evaluate, flattened, trace_flat, with_equations
from zero_jax.program.jaxprs import (
    alone,
    bind,
    inner_jaxprs,
    is_literal,
    is_traced,
    open_jaxpr,
    source_context,
    variables,
    with_results,
)
from zero_jax.program.subcalls import Subcall, equations, equations_of, kind_of, scan_of
from zero_jax.program.walk import Deferred, Walk
from zero_jax.transforms.facts import Facts
from zero_jax.transforms.pipeline.turns import line_of

# The name that the equation of a scan has which was a Python loop.
ROLLED = "rolled_layers"


def scans(facts: Facts) -> Iterator[tuple[int, Any, Subcall]]:
    """Yields the scans of a jaxpr that are on more than params: the index, the equation, and the body."""
    for index, eqn in enumerate(facts.jaxpr.eqns):
        if kind_of(eqn) == "scan" and (sub := scan_of(eqn)).num_carry and not facts.only_params(eqn):
            yield index, eqn, sub


def scans_over_params(facts: Facts) -> list[int]:
    """Returns the indices of the scans that take slices of what is made of params alone."""
    return [i for i, eqn, sub in scans(facts) if "param" in map(facts.kind, sub.split(eqn.invars)[2])]


def scans_of_shared_params(facts: Facts) -> dict[int, list[Any]]:
    """Returns the indices of scans whose layers all apply the same params, with what reads a slice of these by number.

    Layers multiply what they carry: a loop that adds up a loss in parts is none. Where something reads a slice, the
    params are those of several layers, of which a stage should not have all.
    """
    found = {}
    for index, eqn, sub in scans(facts):
        body = open_jaxpr(flattened(sub.jaxpr, kinds=("call", "remat")))[0]
        of_carry = made_of((x for x in sub.split(body.invars)[1] if x.aval.ndim and is_float(x.aval)), body.eqns)
        products = [x for x in body.eqns if any(map(is_contraction, equations_of(x)))]
        is_layer = any(not of_carry.isdisjoint(variables(x)) for x in products)
        params = {x.aval.shape for x in sub.split(eqn.invars)[0] if facts.kind(x) == "param" and x.aval.ndim}
        if params and is_layer:
            found[index] = [x for x in equations(body) if reads_one(x) and x.invars[0].aval.shape in params]
    return found


def layer_scans(facts: Facts) -> list[int]:
    """Returns the indices of scans over layers: those that take slices of params, else those that share all params."""
    return scans_over_params(facts) or [i for i, read in scans_of_shared_params(facts).items() if not read]


def reads_one(eqn: Any) -> bool:
    """Tells whether an equation reads one slice of a stack, whole, at a place that is no literal."""
    name = eqn.primitive.name
    if name not in ("dynamic_slice", "gather"):
        return False
    (stack, *places), sizes = eqn.invars, tuple(eqn.params["slice_sizes"])
    if sizes != (1, *stack.aval.shape[1:]) or stack in places or is_literal(places[0]):
        return False
    return name == "dynamic_slice" or (
        places[0].aval.size == 1 and eqn.params["dimension_numbers"].start_index_map == (0,)
    )


def layers_outside(closed: Any, num_params: int) -> Any:
    """Returns a jaxpr without calls, and without a `jax.checkpoint` around scans over layers: stages are recomputed."""
    around, closed = {0}, flattened(closed)
    kinds = ["param" if i < num_params else "value" for i in range(len(open_jaxpr(closed)[0].invars))]
    opened = open_jaxpr(flattened(closed, kinds=("call", "remat")))[0]
    # Loops that share params are layers where no others are: else they are what the user recomputes.
    layers = scans_over_params if scans_over_params(Facts(opened, kinds)) else layer_scans
    while around:
        jaxpr, _ = open_jaxpr(closed)
        facts = Facts(jaxpr, kinds)
        around = {id(eqn) for eqn in jaxpr.eqns if kind_of(eqn) == "remat" and _holds_layers(eqn, facts, layers)}
        leaves = lambda eqn, around=around: kind_of(eqn) == "remat" and id(eqn) not in around  # noqa: E731
        closed = flattened(closed, kinds=("call", "remat"), leaves=leaves) if around else closed
    return closed


def _holds_layers(eqn: Any, facts: Facts, layers: Callable[[Facts], list[int]]) -> bool:
    """Tells whether a `jax.checkpoint`, or a loop, is around a scan over layers."""
    (inner,) = inner_jaxprs(eqn)
    inner = flattened(inner, kinds=("call", "remat"))
    return bool(layers(Facts(open_jaxpr(inner)[0], [*map(facts.kind, eqn.invars)])))


def same_scans(traces: Sequence[Any], index: int) -> list[Any]:
    """Returns those of the scans of traces on several sizes that correspond to one of the first; it is among them.

    They are told by their order: before them, traces may differ in operations that only change shapes.
    """
    like, number = traces[0].eqns[index], sum(kind_of(eqn) == "scan" for eqn in traces[0].eqns[:index])
    each = ((eqn for eqn in jaxpr.eqns if kind_of(eqn) == "scan") for jaxpr in traces)
    found = (next(itertools.islice(eqns, number, None), None) for eqns in each)
    return [eqn for eqn in found if eqn is not None and len(eqn.invars) == len(like.invars)]


def layers_in_order(closed: Any, num_params: int) -> Any:
    """Returns a jaxpr whose scans over layers take slices of params, the first one first; itself if all do.

    A `lax.fori_loop` over layers, or a scan over their numbers, reads slices of params by numbers that are known before
    the step runs. A scan in reverse takes what is reversed before it.
    """
    jaxpr, _ = open_jaxpr(closed)
    facts = Facts(jaxpr, ["param"] * num_params + ["value"] * (len(jaxpr.invars) - num_params))
    others: dict[int, OtherScan] = {}
    for _, eqn, sub in scans(facts):
        shared, _, slices = ([*map(facts.kind, atoms)] for atoms in sub.split(eqn.invars))
        numbers = _numbers(closed, eqn, sub, [i for i, kind in enumerate(shared) if kind == "param"])
        if numbers or (sub.reverse and "param" in (*shared, *slices)):
            others[id(eqn)] = OtherScan(sub=sub, numbers=numbers)
    return with_scans(closed, others)


def layers_apart(traces: Sequence[Any], num_params: int, again: Collection[int] = ()) -> list[Any]:
    """Returns traces on batches of several sizes whose scans over layers read what they need of examples of their own.

    They read whole, by index, what has examples: slices of it would be those of a whole batch, as of what each layer
    makes for all examples of its params alone. Those whose numbers are `again` make the places of examples themselves,
    for as many as they have, and read the numbers of the first trace, such as that of its examples.
    """
    opened = [open_jaxpr(closed)[0] for closed in traces]
    others: list[dict[int, OtherScan]] = [{} for _ in traces]
    facts = Facts(opened[0], ["param"] * num_params + ["value"] * (len(opened[0].invars) - num_params))
    for number, index in enumerate(layer_scans(facts)):
        if len(eqns := same_scans(opened, index)) < len(opened):
            continue  # other operations on a part, which is refused later
        subs = [*map(scan_of, eqns)]
        consts, _, slices = (
            [i for i, atoms in enumerate(zip(*each, strict=False)) if len({x.aval.shape for x in atoms}) > 1]
            for each in zip(*(sub.split(eqn.invars) for sub, eqn in zip(subs, eqns, strict=True)), strict=True)
        )
        for scans_of_trace, closed, eqn, sub in zip(others, traces, eqns, subs, strict=True):
            other = OtherScan(sub=sub, whole=slices)
            if number in again:
                made = {i: alone(closed, [eqn.invars[i]]) for i in consts}
                own = {i: each for i, each in made.items() if _is_constant(each)}
                sub = dataclasses.replace(sub, jaxpr=_with_numbers(sub.jaxpr, subs[0].jaxpr))
                other = dataclasses.replace(other, sub=sub, own=own)
            if slices or number in again:
                scans_of_trace[id(eqn)] = other
    return [*map(with_scans, traces, others)]


def _with_numbers(jaxpr: Any, like: Any) -> Any:
    """Returns a jaxpr that reads the numbers which another one of the same operations does."""
    (opened, _), (other, _) = open_jaxpr(jaxpr), open_jaxpr(like)
    if [x.primitive for x in opened.eqns] != [x.primitive for x in other.eqns]:
        return jaxpr
    read = lambda x, y: y if is_literal(x) and is_literal(y) and x.aval == y.aval else x  # noqa: E731
    eqns = []
    for eqn, each in zip(opened.eqns, other.eqns, strict=True):
        inner = {"jaxpr": each.params["jaxpr"]} if kind_of(eqn) in ("call", "remat", "scan") else {}
        params = {name: _with_numbers(eqn.params[name], x) for name, x in inner.items()}
        eqns.append(eqn.replace(invars=[*map(read, eqn.invars, each.invars)], params={**eqn.params, **params}))
    return with_results(jaxpr, opened.outvars, eqns=eqns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherScan:
    """A scan that is to take its slices otherwise than it does, in order."""

    sub: Subcall  # its body
    # For each constant that it reads a slice of in an iteration, the numbers of these, by iteration: it is to take
    # these slices
    numbers: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    whole: Collection[int] = ()  # the numbers of the slices that it is to read whole, by index
    # The constants that each iteration makes, by jaxprs that read no inputs
    own: Mapping[int, Any] = dataclasses.field(default_factory=dict)

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Evaluates it on its operands."""
        sub = self.sub
        consts, carry, slices = sub.split(values)
        by_number = [_ordered(consts[i], numbers) for i, numbers in self.numbers.items()]
        is_moved = sub.reverse or any(map(np.any, (np.diff(x) != 1 for x in self.numbers.values())))
        slices = [x[::-1] for x in slices] if sub.reverse else slices

        def body(carry: list[Any], xs: tuple[Any, list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            index, taken, others = xs[0], dict(zip(self.numbers, map(_Slice, xs[1]), strict=True)), iter(xs[2])
            made = {i: evaluate(*open_jaxpr(x), [None] * len(open_jaxpr(x)[0].invars))[0] for i, x in self.own.items()}
            shared = [made[i] if i in made else taken.get(i, x) for i, x in enumerate(consts)]
            at_index = lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False)  # noqa: E731
            read = [at_index(x) if i in self.whole else next(others) for i, x in enumerate(slices)]
            results = _Reading().run(sub.jaxpr, [*shared, *carry, *read], None)
            return results[: sub.num_carry], results[sub.num_carry :]

        index = jnp.arange(sub.length) if self.whole else None
        others = [x for i, x in enumerate(slices) if i not in self.whole]
        with jax.named_scope(
            ROLLED if is_moved else ""
        ):  # params move to their stages in each step: the report says so
            carry, ys = lax.scan(body, carry, (index, by_number, others), length=sub.length, unroll=sub.unroll)
        return [*carry, *(y[::-1] if sub.reverse else y for y in ys)]


def with_scans(closed: Any, others: Mapping[int, OtherScan]) -> Any:
    """Returns a jaxpr some of whose scans, by the `id` of the equation, take their slices otherwise; itself if none."""

    def equation(eqn: Any, values: list[Any]) -> list[Any]:
        if id(eqn) not in others:
            return bind(eqn, values)
        with source_context(eqn):
            return others[id(eqn)].run(values)

    return with_equations(closed, equation) if others else closed


def _ordered(stack: Any, numbers: np.ndarray) -> Any:
    """Returns some slices of a stack."""
    first, last = int(numbers[0]), int(numbers[-1])
    steps = {*np.diff(numbers).tolist()}
    if steps == {1}:
        return lax.slice_in_dim(stack, first, last + 1)
    return stack[last : first + 1][::-1] if steps == {-1} else jnp.stack([stack[int(i)] for i in numbers])


@dataclasses.dataclass(frozen=True)
class _Slice(Deferred):
    """A stack of which one slice is read, by that slice."""

    array: Any


class _Reading(Walk[None]):
    """Evaluates the body of a scan, which reads slices of stacks."""

    def enters(self, eqn: Any, sub: Subcall, values: list[Any], frame: None) -> bool:
        return sub.kind in ("call", "remat") and any(isinstance(x, _Slice) for x in values)

    def operation(self, eqn: Any, values: list[Any], frame: None) -> Sequence[Any]:
        stack = values[0] if values else None
        return [stack.array.reshape(eqn.outvars[0].aval.shape)] if isinstance(stack, _Slice) else bind(eqn, values)


def _numbers(closed: Any, eqn: Any, sub: Subcall, stacks: Sequence[int]) -> dict[int, np.ndarray]:
    """Returns for those of some constants of which an iteration of a scan reads one slice the numbers of these slices.

    They are known where no input has a part in them: they are made of what the scan counts, and of constants.
    """
    opened, own = open_jaxpr(flattened(sub.jaxpr, kinds=("call", "remat")))
    shared, *_ = sub.split(opened.invars)
    inside = [i for i in stacks if shared[i] not in opened.outvars]
    readers = {i: [x for x in opened.eqns if shared[i] in variables(x)] for i in inside}
    are_slices = lambda i, eqns: all(x.invars[0] is shared[i] and reads_one(x) for x in eqns)  # noqa: E731
    readers = {i: eqns for i, eqns in readers.items() if eqns and are_slices(i, eqns)}
    if not readers:
        return {}
    places = list(dict.fromkeys(x.invars[1] for eqns in readers.values() for x in eqns))
    inputs, operands = [var.aval for var in open_jaxpr(closed)[0].invars], alone(closed, eqn.invars)

    def count(*leaves: Any) -> list[Any]:
        """Runs the scan for the numbers that it reads by alone."""
        consts, carry, slices = sub.split(evaluate(*open_jaxpr(operands), leaves))

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            env: dict[Any, Any] = {}
            made = evaluate(opened, own, [*consts, *carry, *xs], env=env)
            return made[: sub.num_carry], [env[x].reshape(()) for x in places]

        return lax.scan(body, carry, slices, length=sub.length, reverse=sub.reverse)[1]

    counting = trace_flat(count, inputs)
    tables = zip(places, open_jaxpr(counting)[0].outvars, strict=True)
    known = {x: table for x, table in tables if _is_constant(alone(counting, [table]))}
    with jax.ensure_compile_time_eval():  # these read no input
        made = evaluate(*open_jaxpr(alone(counting, [*known.values()])), [None] * len(inputs))
    known = dict(zip(known, map(np.asarray, made), strict=True))
    read_by = {i: [x.invars[1] for x in eqns] for i, eqns in readers.items()}
    # For each constant `[readers, iterations]`.
    found = {i: np.stack([known[x] for x in each]) for i, each in read_by.items() if known.keys() >= {*each}}
    numbers = {i: table[0, ::-1] if sub.reverse else table[0] for i, table in found.items()}

    def are_layers(i: int) -> bool:
        is_within = 0 <= found[i].min() and found[i].max() < shared[i].aval.shape[0]
        return bool(is_within and (found[i] == found[i][0]).all() and found[i].min() < found[i].max())

    return {i: each for i, each in numbers.items() if are_layers(i)}


def other_loops(facts: Facts) -> list[str]:
    """Says why loops that apply params of several layers are no scans over these."""
    found = []
    for index, by_number in scans_of_shared_params(facts).items():
        if by_number:
            where = ", ".join([*dict.fromkeys(map(line_of, by_number))][:4])
            found.append(
                f"the loop at {line_of(facts.jaxpr.eqns[index])} reads params at {where} otherwise than those of one "
                "layer by a number that it counts, from 0 to less than there are layers: scan over the params of equal "
                "layers, stacked in their order"
            )
    for eqn in facts.jaxpr.eqns:
        if kind_of(eqn) == "scan" and _holds_layers(eqn, facts, scans_over_params):
            found.append(
                f"the layers are within the loop at {line_of(eqn)}, each iteration of which runs all of them: take "
                "together what it goes through, as by jax.vmap; microbatches of examples are made by num_microbatches"
            )
    return found


def _is_constant(closed: Any) -> bool:
    """Tells whether a jaxpr without dead code reads neither its inputs nor an array that is traced."""
    opened, consts = open_jaxpr(closed)
    traced = [var for var, x in zip(opened.constvars, consts, strict=True) if is_traced(x)]
    read = {x for eqn in opened.eqns for x in variables(eqn)} | {*opened.outvars}
    return read.isdisjoint((*opened.invars, *traced)) and not opened.effects
