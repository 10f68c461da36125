"""Rolls the equal layers of a Python loop into a scan over their params, stacked in the step."""

from __future__ import annotations

import dataclasses
import itertools
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
from zero_jax.program.loss import Traced
from zero_jax.program.subcalls import equations_of, scan_of
from zero_jax.transforms.blocks import find_blocks
from zero_jax.transforms.eqn_sequence import EqnSequence
from zero_jax.transforms.facts import Facts, Origin, Origins
from zero_jax.transforms.pipeline.body import OTHERWISE, CannotCut
from zero_jax.transforms.pipeline.cut import ROLLED, layer_scans, scans_over_params
from zero_jax.transforms.pipeline.in_order import OtherScan, layers_in_order, other_loops, with_scans
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


def rolled(traced: Traced) -> Traced:
    """Returns a program whose equal layers of Python loops are scans; itself if it has none, or scans over layers.

    Layers are equal where they have the same equations on values of the same shapes, and each takes from the one before
    what that takes from the one before it. What all of them read is a constant of the scan; all of their params may be,
    if no layers have their own. Layers that are only within a `jax.checkpoint` around all of them are taken out of it:
    stages are recomputed as the config says.
    """
    # Layers with params of their own come first, and those outside of a `jax.checkpoint` before what is within one.
    for tied, kinds in itertools.product((False, True), (("call",), ("call", "remat"))):
        flat = flattened(traced.closed, kinds=kinds)
        closed = layers_in_order(flat, traced.num_params)
        jaxpr, consts = open_jaxpr(closed)
        facts = _facts(jaxpr, traced.num_params)
        if (layer_scans if tied else scans_over_params)(facts):
            scans = _by_index(closed, traced.num_params)
            return traced if scans is flat and "remat" not in kinds else traced.rewritten(scans)
        order, loops, _ = _loops(facts, tied=tied)
        if loops:
            break
    else:
        return traced

    def run(*leaves: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *leaves), strict=True))
        evaluate_equations(filter(facts.only_params, jaxpr.eqns), env)
        place = 0
        while place < len(order):
            loop = loops.get(place)
            if loop is not None:
                _run(loop, env)
            else:
                evaluate_equations([jaxpr.eqns[order[place]]], env)
            place = place + 1 if loop is None else loop.stop
        return values_of(jaxpr.outvars, env)

    scans = trace_flat(run, [var.aval for var in jaxpr.invars])
    return traced.rewritten(_by_index(scans, traced.num_params))


def _by_index(closed: Any, num_params: int) -> Any:
    """Returns a jaxpr whose scans over params read whole, by index, what they take slices of that may have examples.

    What layers read whole travels with its microbatch; slices of it would be those of a whole batch. Besides what is
    made of the batch it is what is made of numbers, as masks of `jnp.ones_like(tokens)`.
    """
    jaxpr, _ = open_jaxpr(closed)
    facts = _facts(jaxpr, num_params, _FrozenParams)
    others = {}

    def may_have_examples(atom: Any) -> bool:
        return facts.kind(atom) == "value" or (facts.kind(atom) == "const" and atom.aval.ndim > 1)

    for eqn in (jaxpr.eqns[i] for i in scans_over_params(facts)):
        scan = scan_of(eqn)
        *_, slices = scan.split(eqn.invars)
        if whole := [i for i, atom in enumerate(slices) if may_have_examples(atom)]:
            others[id(eqn)] = OtherScan(sub=scan, whole=whole)
    return with_scans(closed, others)


def why_no_layers(traced: Traced) -> str:
    """Says why loops that apply params are no layers that could be stages, and what to do; empty if there are none."""
    closed = flattened(traced.closed, kinds=("call", "remat"))
    facts = _facts(open_jaxpr(closed)[0], traced.num_params)
    if others := other_loops(facts):
        return "; ".join(others)
    if differing := _loops(facts)[2] or _loops(facts, tied=True)[2]:
        return (
            f"{'; '.join(differing)}: let all layers do the same, with numbers or masks of their own where they "
            "differ, or scan over groups of layers that are equal"
        )
    mapped = (eqn for eqn in facts.jaxpr.eqns if eqn.primitive.name == "shard_map")
    return "; ".join(f"what is in the jax.shard_map at {line_of(eqn)} is not looked into" for eqn in mapped)


def _facts(jaxpr: Any, num_params: int, rule: type[_MadeBefore] | None = None) -> Facts:
    others = jaxpr.invars[num_params:]
    kinds = ["const" if _is_whole_key(var, jaxpr) else "value" for var in others]
    return Facts(jaxpr, ["param"] * num_params + kinds, (rule or _MadeBefore)())


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


class _FrozenParams(_MadeBefore):
    """What is made of params, of which are the arrays that the function closes over, as frozen weights."""

    def constant(self, atom: Any) -> Origin:
        """Returns the origin of a literal, or of an array that the function closes over."""
        return super().constant(atom) or Origin(frozenset({-1}), atom)


def _loops(facts: Facts, *, tied: bool = False) -> tuple[list[int], dict[int, _Loop], list[str]]:
    """Returns the equations on activations, the loops over equal layers by where they begin, and why others are none.

    What is made of params and constants alone is made before: each layer slices a stack elsewhere, or a table is made
    in the first of them.
    """
    sequence = EqnSequence(facts, tied=tied)
    loops, refusals, turns = dict[int, _Loop](), list[str](), EqualLayers(facts, sequence)
    runs = [[*run] for _, run in itertools.groupby(find_blocks(sequence), key=lambda block: block.repeat)]
    bounds = [np.searchsorted(sequence.eqns, [*(x.start for x in run), run[-1].stop]).tolist() for run in runs]
    edges = [0, *(run[-1] for run in bounds[:-1])], [*(run[0] for run in bounds[1:]), len(sequence.eqns)]
    for run, start, stop in zip(bounds, *edges, strict=False):
        inside = (facts.jaxpr.eqns[i] for i in sequence.eqns[run[0] : run[-1]])
        if not any(is_contraction(each) for eqn in inside for each in equations_of(eqn)):
            continue  # sums of embeddings, no layers
        try:
            found = turns.layers(run, start, stop)
            loops |= {bounds[0]: _loop(facts, sequence.eqns, turns, bounds) for bounds in found}
            turns.warn_of_others(run, found)
        except CannotCut as error:
            refusals.append(str(error))
    return sequence.eqns, loops, refusals


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
