"""Rolls the equal layers of a Python loop into a scan over their params, stacked in the step."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zero_jax.core.tree import is_key
from zero_jax.dims import is_contraction, is_float
from zero_jax.program import jaxprs
from zero_jax.program.evaluation import evaluate, flattened, trace_flat
from zero_jax.program.jaxprs import bind, open_jaxpr, source_context
from zero_jax.program.loss import Traced
from zero_jax.program.subcalls import equations_of, scan_of
from zero_jax.transforms.blocks import EqnSequence, find_blocks, repeats_of
from zero_jax.transforms.facts import Facts, Origin, Origins
from zero_jax.transforms.pipeline.body import OTHERWISE, CannotCut
from zero_jax.transforms.pipeline.cut import ROLLED, scans_over_params

# The functions among the parameters of equations whose derivatives are the user's.
_RULES = {
    "custom_jvp_call": ("jvp_jaxpr_fun",),
    "custom_vjp_call": ("fwd_jaxpr_thunk", "bwd", "out_trees"),
}
# What draws random numbers of examples: it stays in its layer, where each microbatch draws its own.
_DRAWS = OTHERWISE | {"random_bits", "random_gamma"}

# As many repeats are looked at closely, those that cover most.
_MAX_REPEATS = 16

Place = tuple[int, int]  # the number of an equation of a layer, and of a result of it


class _Turn:
    """The equations of a layer, by which input of it, or by which result of another one, each operand is.

    Args:
      eqns: the equations.
      first: for variables that are equal to others, the first of these.

    Attributes:
      eqns: the equations.
      inputs: what it takes from before, in the order of its use; literals among them, each as often as it is there.
      operands: for each equation the number of an input, or the place of a result, of each operand.
      places: the places of its results.
      signature: equal for layers that do the same with inputs of the same shapes.
    """

    def __init__(self, eqns: Sequence[Any], first: Mapping[Any, Any]):
        self.eqns = eqns
        self.places = {var: (i, j) for i, eqn in enumerate(self.eqns) for j, var in enumerate(eqn.outvars)}
        self.inputs: list[Any] = []
        numbers: dict[Any, int] = {}

        def operand(atom: Any) -> int | Place:
            atom = atom if jaxprs.is_literal(atom) else first.get(atom, atom)
            if not jaxprs.is_literal(atom) and (atom in self.places or atom in numbers):
                return self.places[atom] if atom in self.places else numbers[atom]
            self.inputs.append(atom)
            if not jaxprs.is_literal(atom):
                numbers[atom] = len(self.inputs) - 1
            return len(self.inputs) - 1

        self.operands = [[operand(atom) for atom in _operands(eqn)] for eqn in self.eqns]
        shapes = [(x.aval.shape, str(x.aval.dtype)) for x in self.inputs]
        names = [eqn.primitive.name for eqn in self.eqns]
        self.signature = str((shapes, names, [*map(_params, self.eqns)], self.operands))

    def run(self, values: Sequence[Any]) -> dict[Place, Any]:
        """Evaluates it on inputs."""
        made: dict[Place, Any] = {}
        for i, (eqn, operands) in enumerate(zip(self.eqns, self.operands, strict=True)):
            read = [values[x] if isinstance(x, int) else made[x] for x in operands]
            if _is_slice(eqn) and any(isinstance(x, jax.Array) for x in read[1:]):
                results = [lax.dynamic_slice(read[0], read[1:], eqn.outvars[0].aval.shape)]
            else:
                results = bind(eqn, read[: len(eqn.invars)])
            made.update({(i, j): x for j, x in enumerate(results)})
        return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loop:
    """Equal layers that follow one another.

    Attributes:
      start: where it begins, in the order of the equations on activations.
      stop: where it ends.
      layers: the layers.
      carries: for each input that the layer before makes, its number among the inputs, and the place where it is made.
      slices: the numbers of the inputs that each layer has of its own.
      broadcasts: of these, and of what all layers read, those that are an array of less dims or sizes, broadcast, with
        the equations: a mask that was broadcast over the examples is a slice without any, and does not travel.
      ys: the places of what a layer makes that is used outside of the loop.
    """

    start: int
    stop: int
    layers: Sequence[_Turn]
    carries: Sequence[tuple[int, Place]]
    slices: Sequence[int]
    broadcasts: Mapping[int, Sequence[Any]]
    ys: Sequence[Place]


def rolled(traced: Traced) -> Traced:
    """Returns a program whose equal layers of Python loops are scans; itself if it has none, or scans over layers.

    Layers are equal where they have the same equations on values of the same shapes, and each takes from the one before
    what that takes from the one before it. What all of them read is a constant of the scan. Layers that are only within
    a `jax.checkpoint` around all of them are taken out of it: stages are recomputed as the config says.
    """
    for kinds in (("call",), ("call", "remat")):
        closed = flattened(traced.closed, kinds=kinds)
        jaxpr, consts = open_jaxpr(closed)
        facts = _facts(jaxpr, traced.num_params)
        if scans_over_params(facts):
            scans = _by_index(closed, traced.num_params)
            return traced if scans is closed and "remat" not in kinds else traced.rewritten(scans)
        order, loops, _ = _loops(facts)
        if loops:
            break
    else:
        return traced

    def run(*leaves: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *leaves), strict=True))
        read = lambda atom: atom.val if jaxprs.is_literal(atom) else env[atom]  # noqa: E731

        def evaluate(eqn: Any) -> None:
            env.update(zip(eqn.outvars, bind(eqn, [read(atom) for atom in eqn.invars]), strict=True))

        for eqn in filter(facts.only_params, jaxpr.eqns):
            evaluate(eqn)
        place = 0
        while place < len(order):
            loop, eqn = loops.get(place), jaxpr.eqns[order[place]]
            if loop is not None:
                _run(loop, env)
            else:
                evaluate(eqn)
            place = place + 1 if loop is None else loop.stop
        return [read(atom) for atom in jaxpr.outvars]

    scans = trace_flat(run, [var.aval for var in jaxpr.invars])
    return traced.rewritten(_by_index(scans, traced.num_params))


def _by_index(closed: Any, num_params: int) -> Any:
    """Returns a jaxpr whose scans over params read whole, by index, what they take slices of that may have examples.

    What layers read whole travels with its microbatch; slices of it would be those of a whole batch. Besides what is
    made of the batch it is what is made of numbers, as masks of `jnp.ones_like(tokens)`.
    """
    jaxpr, consts = open_jaxpr(closed)
    facts = _facts(jaxpr, num_params, _FrozenParams)
    own = {}

    def may_have_examples(atom: Any) -> bool:
        return facts.kind(atom) == "value" or (facts.kind(atom) == "const" and atom.aval.ndim > 1)

    for eqn in (jaxpr.eqns[i] for i in scans_over_params(facts)):
        *_, slices = scan_of(eqn).split(eqn.invars)
        own[id(eqn)] = [i for i, atom in enumerate(slices) if may_have_examples(atom)]

    def equation(eqn: Any, values: list[Any]) -> list[Any]:
        numbers = own.get(id(eqn))
        if not numbers:
            return bind(eqn, values)
        scan = scan_of(eqn)
        shared, carry, slices = scan.split(values)
        whole = {i: slices[i] for i in numbers}

        def body(carry: list[Any], taken: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
            index, rest = taken
            others = iter(rest)
            read = [
                lax.dynamic_index_in_dim(whole[i], index, keepdims=False) if i in whole else next(others)
                for i in range(len(slices))
            ]
            made = evaluate(*open_jaxpr(scan.jaxpr), [*shared, *carry, *read])
            return made[: scan.num_carry], made[scan.num_carry :]

        taken = jnp.arange(scan.length), [x for i, x in enumerate(slices) if i not in whole]
        with source_context(eqn):
            carry, ys = lax.scan(body, carry, taken, reverse=scan.reverse, unroll=scan.unroll)
        return [*carry, *ys]

    if not any(own.values()):
        return closed
    return trace_flat(lambda *leaves: evaluate(jaxpr, consts, leaves, equation), [var.aval for var in jaxpr.invars])


def differing_layers(traced: Traced) -> str:
    """Says how the layers of Python loops differ that are alike and not equal; empty if there are none."""
    closed = flattened(traced.closed, kinds=("call", "remat"))
    return "; ".join(_loops(_facts(open_jaxpr(closed)[0], traced.num_params))[2])


def _facts(jaxpr: Any, num_params: int, rule: type[_MadeBefore] | None = None) -> Facts:
    others = jaxpr.invars[num_params:]
    kinds = ["const" if _is_whole_key(var, jaxpr) else "value" for var in others]
    sizes = {var.aval.shape[0] for var, kind in zip(others, kinds, strict=True) if kind == "value" and var.aval.shape}
    return Facts(jaxpr, ["param"] * num_params + kinds, (rule or _MadeBefore)(sizes))


def _is_whole_key(var: Any, jaxpr: Any) -> bool:
    """Tells whether an input is a key of the whole batch, or the numbers of one, read as such alone."""
    if is_key(var.aval):
        return not var.aval.shape
    readers = [eqn for eqn in jaxpr.eqns if var in jaxprs.variables(eqn)]
    return bool(readers) and all(x.primitive.name == "random_wrap" and not x.outvars[0].aval.shape for x in readers)


class _MadeBefore(Origins):
    """What is made before a loop: of params, constants and keys whatever is no random draw, nor keys of examples."""

    def __init__(self, batch_sizes: Set[int]):
        self.batch_sizes = batch_sizes

    def operation(self, eqn: Any, operands: list[Origin | None]) -> list[Origin | None]:
        of_examples = eqn.primitive.name == "random_split" and not self.batch_sizes.isdisjoint(eqn.params["shape"])
        if of_examples or any(each.primitive.name in _DRAWS for each in (eqn, *equations_of(eqn))):
            return [None] * len(eqn.outvars)
        return super().operation(eqn, operands)


class _FrozenParams(_MadeBefore):
    """What is made of params, of which are the arrays that the function closes over, as frozen weights."""

    def constant(self, atom: Any) -> Origin:
        """Returns the origin of a literal, or of an array that the function closes over."""
        return super().constant(atom) or Origin(frozenset({-1}), atom)


def _loops(facts: Facts) -> tuple[list[int], dict[int, _Loop], list[str]]:
    """Returns the equations on activations, the loops over equal layers by where they begin, and why others are none.

    What is made of params and constants alone is made before: each layer slices a stack elsewhere, or a table is made
    in the first of them.
    """
    sequence = EqnSequence(facts)
    loops, refusals, turns = dict[int, _Loop](), list[str](), _Turns(facts, sequence)
    runs = [[*run] for _, run in itertools.groupby(find_blocks(sequence), key=lambda block: block.repeat)]
    bounds = [np.searchsorted(sequence.eqns, [*(x.start for x in run), run[-1].stop]).tolist() for run in runs]
    edges = [0, *(run[-1] for run in bounds[:-1])], [*(run[0] for run in bounds[1:]), len(sequence.eqns)]
    for run, start, stop in zip(bounds, *edges, strict=False):
        inside = (facts.jaxpr.eqns[i] for i in sequence.eqns[run[0] : run[-1]])
        if not any(is_contraction(each) for eqn in inside for each in equations_of(eqn)):
            continue  # sums of embeddings, no layers
        try:
            layers = turns.layers(run, start, stop)
            loops[layers[0]] = _loop(facts, sequence.eqns, turns, layers)
            turns.warn_of_others(run, layers)
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
    broadcast = {number: eqns for number, eqns in loop.broadcasts.items() if all(map(is_there, eqns))}
    made_within = {number: read(eqns[0].invars[0]) for number, eqns in broadcast.items()}
    own_atoms = [[layer.inputs[number] for layer in loop.layers] for number in loop.slices]
    pairs = zip((broadcast.get(number, ()) for number in loop.slices), own_atoms, strict=True)
    own_atoms = [[eqn.invars[0] for eqn in eqns] or atoms for eqns, atoms in pairs]
    stacks = [jnp.stack([*map(read, atoms)]) for atoms in own_atoms]

    def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        own = made_within | dict(zip((*carried, *loop.slices), (*carry, *slices), strict=True))
        own |= {number: bind(eqns[0], [own[number]])[0] for number, eqns in broadcast.items()}
        made = first.run([own.get(i, x) for i, x in enumerate(shared)])
        return [made[place] for _, place in loop.carries], [made[place] for place in loop.ys]

    with source_context(first.eqns[0]), jax.named_scope(ROLLED):
        carry, ys = lax.scan(body, [read(first.inputs[number]) for number in carried], stacks)
    for (_, (i, j)), value in zip(loop.carries, carry, strict=True):
        env[loop.layers[-1].eqns[i].outvars[j]] = value
    for (i, j), values in zip(loop.ys, ys, strict=True):
        for number, layer in enumerate(loop.layers):
            env[layer.eqns[i].outvars[j]] = values[number]


def _loop(facts: Facts, order: Sequence[int], turns: _Turns, bounds: Sequence[int]) -> _Loop:
    """Returns equal layers as a loop, or raises `CannotCut` if they are none; `order` are equations on activations."""
    layers = turns.between(bounds)
    carries, slices = [], []
    for number, atoms in enumerate(zip(*(layer.inputs for layer in layers), strict=True)):
        made = {_place(layer, atom) for layer, atom in zip(layers, atoms[1:], strict=False)}
        if _are_same(atoms):
            continue
        if None not in made and len(made) == 1:
            carries.append((number, made.pop()))
        elif any(_place(layer, atom) is not None for layer in layers for atom in atoms):
            eqn = next(eqn for eqn, read in zip(layers[-1].eqns, layers[-1].operands, strict=True) if number in read)
            raise CannotCut(
                f"the {len(layers)} layers of a Python loop read what layers further before them made, at {_where(eqn)}"
            )
        else:
            slices.append(number)
    if not carries:
        raise CannotCut(f"the layers of the Python loop at {_where(layers[0].eqns[0])} read nothing of one another")
    stop, final = order[bounds[-1] - 1], {place for _, place in carries}
    outside = [[x for x in layer.places if facts.last_read.get(x, -1) > stop] for layer in layers]
    ys = {layer.places[x] for layer, each in zip(layers[:-1], outside, strict=False) for x in each}
    ys |= {layers[-1].places[x] for x in outside[-1]} - final
    made_by = {eqn.outvars[0]: eqn for eqn in facts.jaxpr.eqns if eqn.primitive.name == "broadcast_in_dim"}
    inputs, carried = [*zip(*(layer.inputs for layer in layers), strict=True)], {number for number, _ in carries}
    atoms_of = {i: atoms if i in slices else atoms[:1] for i, atoms in enumerate(inputs) if i not in carried}
    broadcasts = {
        number: [None if jaxprs.is_literal(x) else made_by.get(x) for x in atoms] for number, atoms in atoms_of.items()
    }
    return _Loop(
        start=bounds[0],
        stop=bounds[-1],
        layers=layers,
        carries=carries,
        slices=slices,
        broadcasts={number: eqns for number, eqns in broadcasts.items() if _are_alike(eqns)},
        ys=sorted(ys),
    )


def _operands(eqn: Any) -> list[Any]:
    """Returns the inputs of an equation, and where a slice begins: layers may slice an array at places of their own."""
    starts = eqn.params["start_indices"] if _is_slice(eqn) else ()
    return [*eqn.invars, *(jaxprs.literal(np.int32(start)) for start in starts)]


def _is_slice(eqn: Any) -> bool:
    return eqn.primitive.name == "slice" and {*(eqn.params["strides"] or ())} <= {1}


def _own_params(eqn: Any) -> Mapping[str, Any]:
    """Returns the parameters of an equation that layers have in common."""
    return {"slice_sizes": eqn.outvars[0].aval.shape} if _is_slice(eqn) else eqn.params


def _first_of_equals(facts: Facts) -> dict[Any, Any]:
    """Returns for constants that are made anew, as a mask in each layer, the variable of the first that is equal."""
    first: dict[Any, Any] = {}
    made: dict[Any, Sequence[Any]] = {}
    for eqn in filter(facts.only_params, facts.jaxpr.eqns):
        read = (f"{x.val}:{x.aval}" if jaxprs.is_literal(x) else first.get(x, x) for x in _operands(eqn))
        same = made.setdefault((eqn.primitive.name, _params(eqn), *read), eqn.outvars)
        first.update(zip(eqn.outvars, same, strict=True))
    return first


class _Turns:
    """The equal layers of Python loops."""

    def __init__(self, facts: Facts, sequence: EqnSequence):
        self.sequence, self.eqns, self.first = sequence, facts.jaxpr.eqns, _first_of_equals(facts)
        self.turn = functools.cache(
            lambda *span: _Turn([self.eqns[i] for i in sequence.eqns[slice(*span)]], self.first)
        )

    def between(self, bounds: Sequence[int]) -> list[_Turn]:
        """Returns the turns of a loop between some places of the sequence."""
        return list(itertools.starmap(self.turn, itertools.pairwise(bounds)))

    def layers(self, blocks: Sequence[int], start: int, stop: int) -> Sequence[int]:
        """Returns the bounds of the equal layers that are most of a run of blocks.

        A layer may be several blocks or a part of one, and need not begin where a block does.

        Args:
          blocks: the bounds of the blocks.
          start: where the first layer may begin.
          stop: where the last one may end.

        Raises:
          CannotCut: they are no more than half of the run; with the blocks that differ and what differs first.
        """
        numbers, best = self.sequence.numbers[start:stop], [start]
        repeats = ((size, each) for size in range(1, len(numbers) // 2 + 1) for each in repeats_of(numbers, size))
        # Those that cover most, and of these the ones of the smallest layers.
        found = [(size * (len(each) // size), -size, start + each[0], len(each)) for size, each in repeats]
        for covered, period, begin, length in heapq.nlargest(_MAX_REPEATS, found):
            if covered <= best[-1] - best[0]:
                break
            turns = np.arange(0, covered + 1, -period)
            phase = min(range(length - covered + 1), key=lambda x: self.sequence.crossing[begin + x + turns].sum())
            bounds = (begin + phase + turns).tolist()
            kinds = [turn.signature for turn in self.between(bounds)]
            stretches = ([*each] for _, each in itertools.groupby(range(len(kinds)), key=kinds.__getitem__))
            equal = max(stretches, key=len)
            if len(equal) > 1 and -period * len(equal) > best[-1] - best[0]:
                best = bounds[equal[0] : equal[-1] + 2]
        if 2 * (best[-1] - best[0]) <= blocks[-1] - blocks[0]:
            # Between two blocks one may begin with what is the end of the one before: the first has nothing before it.
            late = max(blocks[2] - 2 * blocks[1] + blocks[0], 0)
            raise CannotCut(_difference(self.between([blocks[0], *(x + late for x in blocks[1:])])))
        return best

    def warn_of_others(self, blocks: Sequence[int], layers: Sequence[int]) -> None:
        """Warns of the blocks that are not among some layers."""
        uses = [self.sequence.uses(*pair) for pair in itertools.pairwise(blocks)]
        others = [i for i, each in enumerate(uses) if np.any((each < layers[0]) | (each >= layers[-1]))]
        if others:
            where = [_where(self.eqns[self.sequence.eqns[blocks[i]]]) for i in others[:4]]
            warnings.warn(
                f"pipe: {_numbers(others)} of {len(blocks) - 1} of a Python loop, at "
                f"{', '.join(dict.fromkeys(where))}, are not cut into stages, as they are not equal to the others: "
                "they run on the whole batch",
                stacklevel=2,
            )


def _difference(layers: Sequence[_Turn]) -> str:
    """Says which blocks of a Python loop differ, and what differs first."""
    groups: dict[str, list[int]] = {}
    for i, layer in enumerate(layers):
        groups.setdefault(layer.signature, []).append(i)
    most, other, *_ = sorted(groups.values(), key=len, reverse=True)
    pairs = itertools.zip_longest(*(_facts_of_eqns(layers[each[-1]]) for each in (other, most)), fillvalue=_NOTHING)
    a, b = next((a, b) for a, b in pairs if (a[0], *a[2:]) != (b[0], *b[2:]))
    why = f"{a[0]} at {a[1]}, and {b[0]} at {b[1]}"
    if a[0] == b[0]:
        params = [", ".join(x for x in own[2] if x not in others[2]) for own, others in ((a, b), (b, a))]
        how = "on values made elsewhere" if a[4] != b[4] else "with other derivatives"
        how = f"with {params[0]} and with {params[1]}" if any(params) else how
        why = f"{a[0]} at {' and '.join(dict.fromkeys((a[1], b[1])))}, {how}"
    return (
        f"of the {len(layers)} blocks (a layer or a few) of a Python loop, {len(groups)} kinds, {_numbers(other)} and "
        f"{_numbers(most)} differ: {why}"
    )


_NOTHING = "nothing more", "its end", (), "", ""


def _facts_of_eqns(layer: _Turn) -> Iterator[tuple[str, str, tuple[str, ...], str, str]]:
    """Yields for each equation of a layer the operation with its shapes, its line, and by what it may differ more."""
    for eqn, operands in zip(layer.eqns, layer.operands, strict=True):
        shapes = ", ".join(x.aval.str_short() for x in eqn.invars)
        params = tuple(f"{name}={_described(x)}"[:80] for name, x in _own_params(eqn).items())
        yield f"{eqn.primitive.name} of {shapes}", _where(eqn), params, _params(eqn), str(operands)


def _numbers(layers: Sequence[int]) -> str:
    """Returns the numbers of some layers as text."""
    shown = ", ".join(map(str, layers[:4]))
    return f"block{'s' * (len(layers) > 1)} {shown}{' and others' * (len(layers) > 4)}"


def _where(eqn: Any) -> str:
    return jaxprs.model_line(eqn) or "a line that is not known"


def _place(layer: _Turn, atom: Any) -> Place | None:
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
    return len({(_params(eqn), str(eqn.invars[0].aval)) for eqn in eqns}) == 1


def _params(eqn: Any) -> str:
    """Returns the parameters of an equation as text, with the derivatives that functions of the user define in it."""
    # The text of a rule does not tell it from another one with other closed-over values.
    rules = _RULES.get(eqn.primitive.name, ())
    params = [(name, _described(x)) for name, x in _own_params(eqn).items() if name not in rules]
    own = [each for each in equations_of(eqn) if each.primitive.name in _RULES]
    return str((params, [*map(_derivative, own)]))


def _derivative(eqn: Any) -> str:
    """Returns the program of an equation and its gradients as text; its identity if it cannot be differentiated."""
    inputs = [var.aval for var in eqn.invars]
    floats = [i for i, aval in enumerate(inputs) if is_float(aval)]
    outputs = [var.aval for var in eqn.outvars if is_float(var.aval)]

    def run(*values: Any) -> Any:
        given, cotangents = values[: len(inputs)], values[len(inputs) :]

        def of_floats(*own: Any) -> list[Any]:
            at = dict(zip(floats, own, strict=True))
            return [x for x in bind(eqn, [at.get(i, x) for i, x in enumerate(given)]) if is_float(x)]

        made, pullback = jax.vjp(of_floats, *(given[i] for i in floats))
        return made, pullback([*cotangents])

    try:
        closed = trace_flat(run, [*inputs, *outputs])
        consts = [(x.shape, str(x.dtype), np.asarray(x).tobytes()) for x in open_jaxpr(closed)[1]]
    except Exception:  # whatever the user's rule raises: the step says so where it is used
        return str(id(eqn))
    return str((str(closed), consts))


def _described(value: Any) -> str:
    """Returns a parameter of an equation as text; of functions, which have none of their own, their identity."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_described, value))})"
    return str(value)
