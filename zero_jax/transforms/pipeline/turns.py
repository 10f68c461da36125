"""The equal layers of a Python loop: equations that do the same, each on what the layer before made."""

from __future__ import annotations

import functools
import heapq
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from zero_jax.dims import is_float
from zero_jax.program import jaxprs
from zero_jax.program.evaluation import trace_flat
from zero_jax.program.jaxprs import bind, of_some, open_jaxpr
from zero_jax.program.subcalls import equations_of
from zero_jax.transforms.blocks import repeats_of
from zero_jax.transforms.eqn_sequence import EqnSequence
from zero_jax.transforms.facts import Facts
from zero_jax.transforms.pipeline.body import CannotCut

# The functions among the parameters of equations whose derivatives are the user's.
_RULES = {
    "custom_jvp_call": ("jvp_jaxpr_fun",),
    "custom_vjp_call": ("fwd_jaxpr_thunk", "bwd", "out_trees"),
}

# As many repeats are looked at closely, those that cover most.
_MAX_REPEATS = 16

Place = tuple[int, int]  # the number of an equation of a layer, and of a result of it


class LayerTurn:
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
        self.signature = str((shapes, names, [*map(params_of, self.eqns)], self.operands))

    @property
    def variables(self) -> list[Any]:
        """The inputs that are no literals."""
        return [x for x in self.inputs if not jaxprs.is_literal(x)]

    def run(self, values: Sequence[Any]) -> dict[Place, Any]:
        """Evaluates it on inputs."""
        made: dict[Place, Any] = {}
        for i, (eqn, operands) in enumerate(zip(self.eqns, self.operands, strict=True)):
            read = [values[x] if isinstance(x, int) else made[x] for x in operands]
            if _is_slice(eqn) and any(isinstance(x, jax.Array) for x in read[1:]):  # begins elsewhere in each layer
                results = [lax.dynamic_slice(read[0], read[1:], eqn.outvars[0].aval.shape)]
            else:
                results = bind(eqn, read[: len(eqn.invars)])
            made.update({(i, j): x for j, x in enumerate(results)})
        return made


class EqualLayers:
    """The equal layers of Python loops."""

    def __init__(self, facts: Facts, sequence: EqnSequence):
        self.sequence, self.eqns, self.first = sequence, facts.jaxpr.eqns, _first_of_equals(facts)
        self.turn = functools.cache(
            lambda *span: LayerTurn([self.eqns[i] for i in sequence.eqns[slice(*span)]], self.first)
        )

    def between(self, bounds: Sequence[int]) -> list[LayerTurn]:
        """Returns the turns of a loop between some places of the sequence."""
        return list(itertools.starmap(self.turn, itertools.pairwise(bounds)))

    def layers(self, blocks: Sequence[int], start: int, stop: int) -> list[Sequence[int]]:
        """Returns the bounds of the equal layers that are most of a run of blocks, of one loop or several.

        A layer may be several blocks or a part of one, and need not begin where a block does.

        Args:
          blocks: the bounds of the blocks.
          start: where the first layer may begin.
          stop: where the last one may end.

        Raises:
          CannotCut: they are no more than half of the run; with the blocks that differ and what differs first.
        """
        loops = self._loops(start, stop)
        if 2 * sum(bounds[-1] - bounds[0] for bounds in loops) <= blocks[-1] - blocks[0]:
            # Between two blocks one may begin with what is the end of the one before: the first has nothing before it.
            late = max(blocks[2] - 2 * blocks[1] + blocks[0], 0)
            raise CannotCut(_difference(self.between([blocks[0], *(x + late for x in blocks[1:])])))
        return loops

    def _loops(self, start: int, stop: int, like: Sequence[int] = ()) -> list[Sequence[int]]:
        """Returns the bounds of the equal layers between two places, of those that cover most and of others beside.

        Others than those `like` are at least half as many, and have params: they are the way back of a model in the
        form of a U, say. Where they do the same as these and are not as many, what is between is the one that differs.
        """
        bounds = self._equal(start, stop)
        if len(bounds) <= max(len(like) // 2, 1):
            return []
        if like:
            first, other = (self.sequence.weights(*each[:2]) for each in (bounds, like))
            if (first == other and len(bounds) != len(like)) or not self.sequence.are_blocks(bounds):
                return []
        like = like or bounds
        return [*self._loops(start, bounds[0], like), *self._chains(bounds), *self._loops(bounds[-1], stop, like)]

    def _equal(self, start: int, stop: int) -> Sequence[int]:
        """Returns the bounds of the equal layers between two places that cover most."""
        numbers, best = self.sequence.numbers[start:stop], [start]
        repeats = ((size, each) for size in range(1, len(numbers) // 2 + 1) for each in repeats_of(numbers, size))
        # Those that cover most, and of these the ones of the smallest layers.
        candidates = [(size * (len(each) // size), -size, start + each[0], len(each)) for size, each in repeats]
        # Layers have params.
        candidates = [x for x in candidates if len(self.sequence.uses(x[2], x[2] - x[1]))]
        for covered, negative_size, begin, length in heapq.nlargest(_MAX_REPEATS, candidates):
            if covered <= best[-1] - best[0]:
                break
            size = -negative_size
            turns = np.arange(0, covered + 1, size)
            # A stretch longer than its turns can begin at several places: layers are cut where the fewest bytes pass.
            phase = min(range(length - covered + 1), key=lambda x: self.sequence.crossing[begin + x + turns].sum())
            bounds = (begin + phase + turns).tolist()
            # The numbers of equations leave out parameters, dtypes and derivatives, in which layers may differ still.
            kinds = [turn.signature for turn in self.between(bounds)]
            stretches = ([*each] for _, each in itertools.groupby(range(len(kinds)), key=kinds.__getitem__))
            equal = max(stretches, key=len)
            if len(equal) > 1 and size * len(equal) > best[-1] - best[0]:
                best = bounds[equal[0] : equal[-1] + 2]
        return best

    def _chains(self, bounds: Sequence[int]) -> list[Sequence[int]]:
        """Returns the bounds of those of some equal layers that each take something of the one before."""
        layers = self.between(bounds)
        pairs = enumerate(itertools.pairwise(layers), 1)
        begins = [0, *(i for i, (before, layer) in pairs if before.places.keys().isdisjoint(layer.variables))]
        parts = [bounds[i : j + 1] for i, j in itertools.pairwise([*begins, len(layers)]) if j - i > 1]
        return parts or [bounds]

    def warn_of_others(self, blocks: Sequence[int], loops: Sequence[Sequence[int]]) -> None:
        """Warns of the blocks that are not among the layers of some loops."""
        uses = [self.sequence.uses(*pair) for pair in itertools.pairwise(blocks)]
        within = np.concatenate([self.sequence.uses(bounds[0], bounds[-1]) for bounds in loops])
        others = [i for i, each in enumerate(uses) if not np.isin(each, within).all()]
        if others:
            where = [line_of(self.eqns[self.sequence.eqns[blocks[i]]]) for i in others[:4]]
            warnings.warn(
                f"pipe: {_numbers(others)} of {len(blocks) - 1} of a Python loop, at "
                f"{', '.join(dict.fromkeys(where))}, are not cut into stages, as they are not equal to the others: "
                "they run on the whole batch",
                stacklevel=2,
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
        same = made.setdefault((eqn.primitive.name, params_of(eqn), *read), eqn.outvars)
        first.update(zip(eqn.outvars, same, strict=True))
    return first


def _difference(layers: Sequence[LayerTurn]) -> str:
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


def _facts_of_eqns(layer: LayerTurn) -> Iterator[tuple[str, str, tuple[str, ...], str, str]]:
    """Yields for each equation of a layer the operation with its shapes, its line, and by what it may differ more."""
    for eqn, operands in zip(layer.eqns, layer.operands, strict=True):
        shapes = ", ".join(x.aval.str_short() for x in eqn.invars)
        params = tuple(f"{name}={_described(x)}"[:80] for name, x in _own_params(eqn).items())
        yield f"{eqn.primitive.name} of {shapes}", line_of(eqn), params, params_of(eqn), str(operands)


def _numbers(layers: Sequence[int]) -> str:
    """Returns the numbers of some layers as text."""
    shown = ", ".join(map(str, layers[:4]))
    return f"block{'s' * (len(layers) > 1)} {shown}{' and others' * (len(layers) > 4)}"


def line_of(eqn: Any) -> str:
    """Returns the line of the model that an equation is of, as text."""
    return jaxprs.model_line(eqn) or "a line that is not known"


def params_of(eqn: Any) -> str:
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
        primals, cotangents = values[: len(inputs)], values[len(inputs) :]
        to_floats = lambda *xs: [x for x in bind(eqn, xs) if is_float(x)]  # noqa: E731
        results, pullback = jax.vjp(of_some(to_floats, primals, floats), *(primals[i] for i in floats))
        return results, pullback([*cotangents])

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
