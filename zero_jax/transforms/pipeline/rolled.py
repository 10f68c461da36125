"""Rolls the equal layers of a Python loop into a scan over their params, stacked in the step."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zero_jax.core.tree import is_key
from zero_jax.dims import is_contraction
from zero_jax.program import jaxprs
from zero_jax.program.evaluation import evaluate_equations, flattened, trace_flat, values_of
from zero_jax.program.jaxprs import bind, open_jaxpr, source_context
from zero_jax.program.loss import LossProgram, Traced
from zero_jax.program.subcalls import equations_of
from zero_jax.transforms.blocks import find_blocks
from zero_jax.transforms.eqn_sequence import EqnSequence
from zero_jax.transforms.facts import Facts, Origin, Origins
from zero_jax.transforms.pipeline.body import OTHERWISE, CannotCut
from zero_jax.transforms.pipeline.scans import (
    ROLLED,
    layer_scans,
    layers_in_order,
    other_loops,
    scans_over_params,
)
from zero_jax.transforms.pipeline.turns import EqualLayers, LayerTurn, Place, line_of, params_of

# What draws random numbers of examples: it stays in its layer, where each microbatch draws its own.
_DRAWS = OTHERWISE | {"random_bits", "random_gamma"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loop:
    """Equal layers that follow one another.

    Attributes:
      stop: where it ends, in the order of the equations on activations.
      layers: the layers.
      carries: for each input that the layer before makes, its number among the inputs, and the place where it is made.
      slices: the numbers of the inputs that each layer has of its own.
      broadcasts: of these, and of what all layers read, those that are an array of less dims or sizes, broadcast, with
        the equations: a mask that was broadcast over the examples is a slice without any, and does not travel.
      ys: the places of what a layer makes that is used outside of the loop.
    """

    stop: int
    layers: Sequence[LayerTurn]
    carries: Sequence[tuple[int, Place]]
    slices: Sequence[int]
    broadcasts: Mapping[int, Sequence[Any]]
    ys: Sequence[Place]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loops:
    """The loops over equal layers of a jaxpr.

    Attributes:
      sequence: the equations on activations.
      loops: the loops, by the place in the sequence where they begin.
      others: the blocks that are like layers of a loop, and in none.
      refusals: why others are no loops.
    """

    sequence: EqnSequence
    loops: dict[int, _Loop] = dataclasses.field(default_factory=dict)
    others: list[str] = dataclasses.field(default_factory=list)
    refusals: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, facts: Facts, *, tied: bool = False) -> _Loops:
        """Returns the loops of a jaxpr; if `tied`, of layers that share their params.

        What is made of params and constants alone is made before: each layer slices a stack elsewhere, or a table is
        made in the first of them.
        """
        found = cls(sequence=(sequence := EqnSequence(facts, tied=tied)))
        turns = EqualLayers(facts, sequence)
        runs = [[*run] for _, run in itertools.groupby(find_blocks(sequence), key=lambda block: block.repeat)]
        bounds = [np.searchsorted(sequence.eqns, [*(x.start for x in run), run[-1].stop]).tolist() for run in runs]
        edges = [0, *(run[-1] for run in bounds[:-1])], [*(run[0] for run in bounds[1:]), len(sequence.eqns)]
        for run, start, stop in zip(bounds, *edges, strict=False):
            inside = (facts.jaxpr.eqns[i] for i in sequence.eqns[run[0] : run[-1]])
            if not any(is_contraction(each) for eqn in inside for each in equations_of(eqn)):
                continue  # sums of embeddings, no layers
            try:
                layers = turns.layers(run, start, stop)
                found.loops.update({each[0]: _loop(facts, sequence.eqns, turns, each) for each in layers})
                found.others.extend(turns.others(run, layers))
            except CannotCut as error:
                found.refusals.append(str(error))
        return found

    @property
    def num_params(self) -> int:
        """How many params are used, each slice of one counted."""
        return len(self.sequence.params_of(0, len(self.sequence.eqns)))

    def num_outside(self, num_groups: int) -> int:
        """Returns how many of these are in no loop over as many layers as there are groups."""
        loops = [(start, loop.stop) for start, loop in self.loops.items() if len(loop.layers) >= num_groups]
        return self.num_params - len(frozenset[int]().union(*itertools.starmap(self.sequence.params_of, loops)))

    def lost(self, num_groups: int) -> str:
        """Says which layers cannot be in as many groups; empty if all can."""
        few = [n for loop in self.loops.values() if (n := len(loop.layers)) < num_groups]
        lost = [f"only {number} in turn are equal, and the stages have {num_groups} groups" for number in few]
        lost += [f"not equal to the others are {blocks}" for blocks in self.others]
        return "; ".join([*lost, *self.refusals]) or ("" if self.loops else "none of them are equal")


class RolledProgram(LossProgram):
    """A program whose equal layers of Python loops are scans; one that has none, or scans over layers, as it is.

    Layers are equal where they have the same equations on values of the same shapes, and each takes from the one before
    what that takes from the one before it. What all of them read is a constant of the scan; all of their params may be,
    if no layers have their own. Layers that are only within a `jax.checkpoint` around all of them are taken out of it:
    stages are recomputed as the config says.

    Kernels of attention with windows of their own make layers unequal: several in turn are one, or one of them is none.
    If fewer are in stages then, attention is left as the model has it, and masks are data of the layers.

    Args:
      before: the program, with fused attention.
      own: the program with attention as the model has it.
      num_groups: the groups of layers of all stages: fewer layers cannot be cut.
    """

    before: LossProgram

    def __init__(self, before: LossProgram, own: LossProgram, num_groups: int):
        super().__init__(before.fn, before)
        self.own, self.num_groups = own, num_groups
        # For each program, why its attention is left as the model has it, though kernels are asked for; empty if not
        self.why: dict[Traced, str] = {}

    def made(self, before: Traced, *args: Any) -> Traced:
        """Returns the program for arguments of these shapes."""
        layers, why = self.chosen(before, self.own.trace(*args))
        traced = layers.program()
        self.why[traced] = why
        return traced

    def chosen(self, traced: Traced, own: Traced) -> tuple[_LayersOfLoops, str]:
        """Returns the layers of one of two programs, and why they are without fused attention if that is the cause."""
        fused = _LayersOfLoops(traced)
        if traced is own or fused.are_scans or not (lost := fused.found.lost(self.num_groups)):
            return fused, ""
        others = _LayersOfLoops(own)
        num_outside = [0 if x.are_scans else x.found.num_outside(self.num_groups) for x in (fused, others)]
        if num_outside[0] > num_outside[1]:
            why = "stages are of equal layers, which those of a Python loop are not if their kernels have other windows"
            return others, f"{why}: {lost}; give fewer stages, or windows that recur every few layers"
        # If none can be stages, the refusal counts the layers of the model.
        return fused if num_outside[0] < fused.found.num_params else others, ""


class _LayersOfLoops:
    """The layers of a program that may be stages: those of scans, or else the equal ones of Python loops."""

    def __init__(self, traced: Traced):
        self.traced = traced
        # Layers with params of their own come first, and those outside of a `jax.checkpoint` before what is within one.
        for tied, self.kinds in itertools.product((False, True), (("call",), ("call", "remat"))):
            self.flat = flattened(traced.closed, kinds=self.kinds)
            self.closed = layers_in_order(self.flat, traced.num_params)
            self.facts = _facts(open_jaxpr(self.closed)[0], traced.num_params)
            self.are_scans = bool((layer_scans if tied else scans_over_params)(self.facts))
            if self.are_scans:
                break
            self.found = _Loops.of(self.facts, tied=tied)
            if self.found.loops:
                break

    def program(self) -> Traced:
        """Returns the program with a scan for each loop; warns of what is like layers of a loop, and is none."""
        traced, jaxpr = self.traced, self.facts.jaxpr
        if self.are_scans:
            is_as_it_was = self.closed is self.flat and "remat" not in self.kinds
            return traced if is_as_it_was else traced.rewritten(self.closed)
        consts, order, loops = open_jaxpr(self.closed)[1], self.found.sequence.eqns, self.found.loops
        if not loops:
            return traced
        for blocks in self.found.others:
            what = "are not cut into stages, as they are not equal to the others: they run on the whole batch"
            warnings.warn(f"pipe: {blocks}, {what}", stacklevel=2)

        def run(*leaves: Any) -> list[Any]:
            env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *leaves), strict=True))
            evaluate_equations(filter(self.facts.only_params, jaxpr.eqns), env)
            place = 0
            while place < len(order):
                loop = loops.get(place)
                if loop is not None:
                    _run(loop, env)
                else:
                    evaluate_equations([jaxpr.eqns[order[place]]], env)
                place = place + 1 if loop is None else loop.stop
            return values_of(jaxpr.outvars, env)

        return traced.rewritten(trace_flat(run, [var.aval for var in jaxpr.invars]))


def why_no_layers(traced: Traced) -> str:
    """Says why loops that apply params are no layers that could be stages, and what to do; empty if there are none."""
    closed = flattened(traced.closed, kinds=("call", "remat"))
    facts = _facts(open_jaxpr(closed)[0], traced.num_params)
    if others := other_loops(facts):
        return "; ".join(others)
    if differing := _Loops.of(facts).refusals or _Loops.of(facts, tied=True).refusals:
        return (
            f"{'; '.join(differing)}: let all layers do the same, with numbers or masks of their own where they "
            "differ, or scan over groups of layers that are equal"
        )
    mapped = (eqn for eqn in facts.jaxpr.eqns if eqn.primitive.name == "shard_map")
    return "; ".join(f"what is in the jax.shard_map at {line_of(eqn)} is not looked into" for eqn in mapped)


def _facts(jaxpr: Any, num_params: int) -> Facts:
    others = jaxpr.invars[num_params:]
    kinds = ["const" if _is_whole_key(var, jaxpr) else "value" for var in others]
    return Facts(jaxpr, ["param"] * num_params + kinds, _MadeBefore())


def _is_whole_key(var: Any, jaxpr: Any) -> bool:
    """Tells whether an input is a key of the whole batch, or the numbers of one, read as such alone."""
    if is_key(var.aval):
        return not var.aval.shape
    readers = [eqn for eqn in jaxpr.eqns if var in jaxprs.variables(eqn)]
    return bool(readers) and all(x.primitive.name == "random_wrap" and not x.outvars[0].aval.shape for x in readers)


class _MadeBefore(Origins):
    """What is made before a loop: of params, constants and keys whatever is no random draw."""

    def operation(self, eqn: Any, operands: list[Origin | None]) -> list[Origin | None]:
        if any(each.primitive.name in _DRAWS for each in (eqn, *equations_of(eqn))):
            return [None] * len(eqn.outvars)
        return super().operation(eqn, operands)


def _run(loop: _Loop, env: dict[Any, Any]) -> None:
    """Evaluates a loop, and adds what it makes to the values of variables."""
    first, carried = loop.layers[0], [number for number, _ in loop.carries]

    def read(atom: Any) -> Any:
        return jnp.asarray(atom.val, atom.aval.dtype) if jaxprs.is_literal(atom) else env[atom]

    shared = [x.val if jaxprs.is_literal(x) else env.get(x) for x in first.inputs]
    # What another loop makes is there as its results alone.
    is_there = lambda eqn: jaxprs.is_literal(eqn.invars[0]) or eqn.invars[0] in env  # noqa: E731
    broadcasts = {number: eqns for number, eqns in loop.broadcasts.items() if all(map(is_there, eqns))}
    before_broadcast = {number: read(eqns[0].invars[0]) for number, eqns in broadcasts.items()}
    stacks = []
    for number in loop.slices:  # a stack is of what is broadcast, and each layer broadcasts its slice
        atoms = [eqn.invars[0] for eqn in broadcasts.get(number, ())] or [x.inputs[number] for x in loop.layers]
        stacks.append(jnp.stack([*map(read, atoms)]))

    def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        own = before_broadcast | dict(zip((*carried, *loop.slices), (*carry, *slices), strict=True))
        own |= {number: bind(eqns[0], [own[number]])[0] for number, eqns in broadcasts.items()}
        made = first.run([own.get(i, x) for i, x in enumerate(shared)])
        return [made[place] for _, place in loop.carries], [made[place] for place in loop.ys]

    with source_context(first.eqns[0]), jax.named_scope(ROLLED):
        carry, ys = lax.scan(body, [read(first.inputs[number]) for number in carried], stacks, length=len(loop.layers))
    for (_, (i, j)), value in zip(loop.carries, carry, strict=True):
        env[loop.layers[-1].eqns[i].outvars[j]] = value
    for (i, j), values in zip(loop.ys, ys, strict=True):
        for number, layer in enumerate(loop.layers):
            env[layer.eqns[i].outvars[j]] = values[number]


def _loop(facts: Facts, order: Sequence[int], turns: EqualLayers, bounds: Sequence[int]) -> _Loop:
    """Returns equal layers as a loop, or raises `CannotCut` if they are none; `order` are equations on activations."""
    layers = turns.between(bounds)
    inputs, carries, slices = [*zip(*(layer.inputs for layer in layers), strict=True)], [], []
    for number, atoms in enumerate(inputs):
        made_at = {_place(layer, atom) for layer, atom in zip(layers, atoms[1:], strict=False)}  # by the layer before
        if _are_same(atoms):
            continue
        if None not in made_at and len(made_at) == 1:
            carries.append((number, made_at.pop()))
        elif any(_place(layer, atom) is not None for layer in layers for atom in atoms):
            eqn = next(eqn for eqn, read in zip(layers[-1].eqns, layers[-1].operands, strict=True) if number in read)
            read_by = f"the {len(layers)} layers of a Python loop read what layers further before them made"
            raise CannotCut(f"{read_by}, at {line_of(eqn)}")
        else:
            slices.append(number)
    if not carries:
        raise CannotCut(f"the layers of the Python loop at {line_of(layers[0].eqns[0])} read nothing of one another")
    stop, carried_on = order[bounds[-1] - 1], {place for _, place in carries}
    outside = [[x for x in layer.places if facts.last_read.get(x, -1) > stop] for layer in layers]
    ys = {layer.places[x] for layer, each in zip(layers[:-1], outside, strict=False) for x in each}
    ys |= {layers[-1].places[x] for x in outside[-1]} - carried_on  # what the last layer carries the scan returns
    made_by = {eqn.outvars[0]: eqn for eqn in facts.jaxpr.eqns if eqn.primitive.name == "broadcast_in_dim"}
    carried = {number for number, _ in carries}
    atoms_of = {i: atoms if i in slices else atoms[:1] for i, atoms in enumerate(inputs) if i not in carried}
    broadcasts = {
        number: [None if jaxprs.is_literal(x) else made_by.get(x) for x in atoms] for number, atoms in atoms_of.items()
    }
    return _Loop(
        stop=bounds[-1],
        layers=layers,
        carries=carries,
        slices=slices,
        broadcasts={number: eqns for number, eqns in broadcasts.items() if _are_alike(eqns)},
        ys=sorted(ys),
    )


def _place(layer: LayerTurn, atom: Any) -> Place | None:
    """Returns the place where a layer makes a value, None if it does not."""
    return None if jaxprs.is_literal(atom) else layer.places.get(atom)


def _are_same(atoms: Sequence[Any]) -> bool:
    """Tells whether inputs of all layers are one variable, or equal literals."""
    if any(map(jaxprs.is_literal, atoms)):
        return all(jaxprs.is_literal(x) and x.val == atoms[0].val for x in atoms)
    return all(x is atoms[0] for x in atoms)


def _are_alike(eqns: Sequence[Any]) -> bool:
    """Tells whether there are equations of all layers that do the same with one operand, on values of one shape."""
    if any(eqn is None or len(eqn.invars) > 1 for eqn in eqns):
        return False
    return len({(params_of(eqn), str(eqn.invars[0].aval)) for eqn in eqns}) == 1
