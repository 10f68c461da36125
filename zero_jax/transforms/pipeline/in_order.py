"""Scans that read the params of layers by a number, or take them in reverse, as scans that take them in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zero_jax.program import jaxprs
from zero_jax.program.evaluation import evaluate, flattened, trace_flat, with_equations
from zero_jax.program.jaxprs import bind, open_jaxpr, source_context
from zero_jax.program.subcalls import Subcall, scan_of
from zero_jax.program.walk import Deferred, Walk
from zero_jax.transforms.facts import Facts
from zero_jax.transforms.pipeline.cut import ROLLED, layer_scans, reads_one, scans, scans_of_shared_params
from zero_jax.transforms.pipeline.turns import line_of


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


def examples_by_index(traces: Sequence[Any], num_params: int) -> list[Any]:
    """Returns traces on batches of several sizes whose scans over layers read whole what has examples, by index.

    Slices of it would be those of a whole batch, as of what each layer makes for all examples of its params alone.
    """
    opened = [open_jaxpr(closed)[0] for closed in traces]
    others: list[dict[int, OtherScan]] = [{} for _ in traces]
    facts = Facts(opened[0], ["param"] * num_params + ["value"] * (len(opened[0].invars) - num_params))
    for index in layer_scans(facts):
        eqns = [jaxpr.eqns[index] for jaxpr in opened if index < len(jaxpr.eqns)]
        if len(eqns) < len(opened) or any(eqn.primitive is not eqns[0].primitive for eqn in eqns):
            continue  # other operations on a part, which is refused later
        subs = [*map(scan_of, eqns)]
        slices = zip(*(sub.split(eqn.invars)[2] for sub, eqn in zip(subs, eqns, strict=True)), strict=False)
        if whole := [i for i, atoms in enumerate(slices) if len({x.aval.shape for x in atoms}) > 1]:
            for scans_of_trace, eqn, sub in zip(others, eqns, subs, strict=True):
                scans_of_trace[id(eqn)] = OtherScan(sub=sub, whole=whole)
    return [*map(with_scans, traces, others)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherScan:
    """A scan that is to take its slices otherwise than it does, in order."""

    sub: Subcall  # its body
    # For each constant that it reads a slice of in an iteration, the numbers of these, by iteration: it is to take
    # these slices
    numbers: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    whole: Collection[int] = ()  # the numbers of the slices that it is to read whole, by index

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Evaluates it on its operands."""
        sub = self.sub
        consts, carry, slices = sub.split(values)
        by_number = [_ordered(consts[i], numbers) for i, numbers in self.numbers.items()]
        is_moved = sub.reverse or any(map(np.any, (np.diff(x) != 1 for x in self.numbers.values())))
        slices = [x[::-1] for x in slices] if sub.reverse else slices

        def body(carry: list[Any], xs: tuple[Any, list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            index, taken, others = xs[0], dict(zip(self.numbers, map(_Slice, xs[1]), strict=True)), iter(xs[2])
            shared = [taken.get(i, x) for i, x in enumerate(consts)]
            at_index = lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False)  # noqa: E731
            read = [at_index(x) if i in self.whole else next(others) for i, x in enumerate(slices)]
            made = _Reading().run(sub.jaxpr, [*shared, *carry, *read], None)
            return made[: sub.num_carry], made[sub.num_carry :]

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
    readers = {i: [x for x in opened.eqns if shared[i] in jaxprs.variables(x)] for i in inside}
    are_slices = lambda i, eqns: all(x.invars[0] is shared[i] and reads_one(x) for x in eqns)  # noqa: E731
    readers = {i: eqns for i, eqns in readers.items() if eqns and are_slices(i, eqns)}
    if not readers:
        return {}
    places = list(dict.fromkeys(x.invars[1] for eqns in readers.values() for x in eqns))
    inputs, operands = [var.aval for var in open_jaxpr(closed)[0].invars], jaxprs.alone(closed, eqn.invars)

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
    known = {x: table for x, table in tables if _is_constant(jaxprs.alone(counting, [table]))}
    with jax.ensure_compile_time_eval():  # these read no input
        made = evaluate(*open_jaxpr(jaxprs.alone(counting, [*known.values()])), [None] * len(inputs))
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
    return found


def _is_constant(closed: Any) -> bool:
    """Tells whether a jaxpr without dead code reads neither its inputs nor an array that is traced."""
    opened, consts = open_jaxpr(closed)
    traced = [var for var, x in zip(opened.constvars, consts, strict=True) if jaxprs.is_traced(x)]
    read = {x for eqn in opened.eqns for x in jaxprs.variables(eqn)} | {*opened.outvars}
    return read.isdisjoint((*opened.invars, *traced)) and not opened.effects
