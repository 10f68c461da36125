"""The relations of all values of a loss function, by its traces on a batch and on a part of it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.dims.parts.batches import in_blocks, of_batches
from zero_jax.dims.parts.nested import SPECIAL, is_same
from zero_jax.dims.parts.relations import (
    EXTREMA,
    SAME,
    Kind,
    Pair,
    Refused,
    Relation,
    Rule,
    check,
    constant_rows,
    floating,
    rows,
    shared,
    unknown,
)
from zero_jax.dims.parts.rules import KEEPS, SIZED, is_wider, rule_of
from zero_jax.dims.primitives import BY_INDEX, JOINS, MOVES, PLACES, is_float, known_primitives
from zero_jax.program import jaxprs
from zero_jax.program.subcalls import equations_of, subcall

_CALLS = frozenset({"call", "sharded_call", "remat", "custom_vmap"})
# What adds its operands up, or takes each element of one of them.
_ADDS = frozenset({name for name, known in known_primitives().items() if known.linear == "all"} | {"select_n"})
# What is not proven counts against a loss, so that none of these is certain.
_WHY = {
    "mixed": "examples of a batch may be mixed at {}",
    "sorted": "examples of a batch are sorted together at {}",
    "derived": "the derivatives that are defined at {} may be others on a part of a batch",
    "sized": "what is computed at {} may depend on the number of examples",
    "batches": "examples are put behind others at {} (stack them along another dim, or call the model on each)",
    "placed": "what is computed at {} may depend on the places of examples in a batch",
}


class TraceComparison:
    """Compares two traces of one function, on a batch and on one of `num_parts` equal parts of it.

    A part need not be one run of examples: it is of several of `num_blocks` equal runs. None takes `num_parts`.

    With `is_mean` what is derived is the mean of the losses of parts, and else the loss on the batch.

    With `shares_terms` a part has a share of what is the same in all parts and is added to a sum over examples. Where
    that is so is noted in `terms`: for a variable of the trace on a part, which operands of the equation that makes it
    are to be multiplied by `n ** power`. Of those in nested jaxprs (`has_terms_within`) nothing is known.
    """

    def __init__(
        self, num_parts: int, num_blocks: int | None = None, *, shares_terms: bool = False, is_mean: bool = True
    ):
        self.num_parts, self.num_blocks, self.shares_terms = num_parts, num_blocks or num_parts, shares_terms
        self.power = int(is_mean)  # of cotangents
        self.made_whole = set[Any]()
        self.terms: dict[Any, list[tuple[int, Fraction]]] = {}
        self.has_terms_within, self.depth, self.source = False, 0, ""
        self.calls: dict[Any, tuple[Any, Any, list[Relation]]] = {}
        self.in_derivative, self.regrouped = False, set[int]()
        # Of the mesh, in a shard_map, and the devices of these axes: a dim of examples is that of one of them
        self.batch_axes, self.num_devices = frozenset[str](), 1

    def run(
        self,
        whole: Any,
        part: Any,
        inputs: Sequence[Relation],
        found: list[Any] | None = None,
        *,
        keeps_whole: bool = False,
    ) -> list[Relation]:
        """Returns the relations of the results of a jaxpr, open or closed, from those of its inputs.

        Those of the operands and results of its equations are added to `found`.

        With `keeps_whole` a part has its examples, or all, of what is not known, as if that were made of the whole
        batch before: examples that are mixed, or sorted. It is noted in `made_whole`. Within an equation, such as
        layers, nothing is: there a part has its own alone.
        """
        (whole, whole_consts), (part, part_consts) = jaxprs.open_jaxpr(whole), jaxprs.open_jaxpr(part)
        source = self.source
        names = [[eqn.primitive.name for eqn in jaxpr.eqns] for jaxpr in (whole, part)]
        consts = [self.constant(a, b) for a, b in zip(whole_consts, part_consts, strict=False)]
        known = zip(whole.constvars, part.constvars, consts, strict=False) if len(consts) else ()
        env = {var: (other, relation) for var, other, relation in known}
        env |= {a: (b, x) for a, b, x in zip(whole.invars, part.invars, inputs, strict=True)}
        if names[0] != names[1] or len(whole.constvars) != len(part.constvars):
            longer = max(whole.eqns, part.eqns, key=len)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*names, strict=False)))
            self.source = jaxprs.source_line(longer[same]) or source if same < len(longer) else source
            refused, self.source = self.refused("sized"), source
            return [refused] * len(whole.outvars)
        self.depth += 1
        sizes = sizes_of(inputs, whole, part)
        for pair in (Pair(whole=a, part=b) for a, b in zip(whole.eqns, part.eqns, strict=True)):
            self.source = jaxprs.source_line(pair.whole) or source
            values = [self.read(env, a, b) for a, b in zip(pair.whole.invars, pair.part.invars, strict=True)]
            results = self.equation(pair, values) if pair.whole.outvars else []
            if keeps_whole:
                results = [self.of_whole(pair, i, x, sizes) for i, x in enumerate(results)]
            if found is not None:
                found.append((values, results))
            env |= {a: (b, x) for a, b, x in zip(pair.whole.outvars, pair.part.outvars, results, strict=True)}
        self.source, self.depth = source, self.depth - 1
        results = [self.read(env, a, b) for a, b in zip(whole.outvars, part.outvars, strict=True)]
        return results if self.depth else [unknown(x.why) if x.batches > 1 else x for x in results]

    def in_blocks(self, traces: Sequence[Any], inputs: Sequence[Relation]) -> tuple[list[Any], list[Any]]:
        """Returns traces whose batches behind one another are so block by block, and what puts the results in order.

        These are of the first trace. Traces are on a batch and on a part of it; if there are four, the last two are on
        twice as many examples, and compared in their place.
        """
        found, opened = list[Any](), [jaxprs.open_jaxpr(closed)[0] for closed in traces]
        names = [[eqn.primitive.name for eqn in jaxpr.eqns] for jaxpr in opened]
        if all(other == names[0] for other in names[1:]):
            self.run(traces[-2], traces[-1], inputs, found, keeps_whole=True)
        if all(x.batches < 2 for operands, results in found for x in (*operands, *results)):
            return [*traces], []
        eqns = opened[-2].eqns

        def own(i: int) -> bool | None:
            is_own = id(eqns[i]) in self.regrouped
            if not self.made_whole.isdisjoint(eqns[i].outvars):  # it may depend on the order
                return None
            return is_own or (None if any(id(each) in self.regrouped for each in equations_of(eqns[i])) else False)

        # Those of the batch and of a part; the first two of four traces have half as many examples.
        numbers = [self.num_blocks, self.num_blocks // self.num_parts]
        numbers = [*(n // 2 for n in numbers), *numbers][-len(traces) :]
        made = [in_blocks(closed, found, n, own) for closed, n in zip(traces, numbers, strict=True)]
        return [closed for closed, _ in made], made[0][1]

    def read(self, env: dict[Any, tuple[Any, Relation]], whole: Any, part: Any) -> Relation:
        """Returns the relation of an input of an equation: the same one in both traces."""
        if jaxprs.is_literal(whole) and jaxprs.is_literal(part):
            return self.constant(whole.val, part.val)
        if jaxprs.is_literal(whole) or whole not in env or env[whole][0] is not part:
            return self.refused("sized")
        return env[whole][1]

    def refused(self, why: str) -> Relation:
        """Returns the relation of what is not known, with the line that it comes from."""
        why = "derived" if why == "mixed" and self.in_derivative else why
        why = _WHY.get(why, why + " at {}")
        return unknown(why.format(self.source) if self.source else why)

    def constant(self, whole: Any, part: Any) -> Relation:
        """Returns the relation of constants: the same, or one divided by a power of the number of examples."""
        if whole is part and np.shape(whole):
            return SAME
        try:
            with jax.transfer_guard("allow"):
                a, b = map(_of_numpy, (whole, part))
            if a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"):
                return dataclasses.replace(SAME, number=float(a) if not a.shape and a.dtype.kind in "biuf" else None)
            if a.shape and (found := constant_rows(a, b, self.num_parts)):
                return found
            ratio = complex(b) / complex(a) if not (a.shape or b.shape) and a else 0j
        except (TypeError, ValueError, RuntimeError):  # keys, and values of an outer trace
            return SAME if whole is part else self.refused("sized")
        if ratio.imag or not ratio.real > 0:
            return self.refused("sized")
        # Of `1 / len(x)` the ratio is the number of parts, of `len(x) ** -0.5` its root: powers are multiples of 1 / 2.
        power = Fraction(round(2 * math.log(ratio.real) / math.log(self.num_parts)), 2)
        is_power = power and math.isclose(ratio.real, self.num_parts ** float(power), rel_tol=1e-6)
        return Relation(kind=Kind.SAME, power=power) if is_power else self.refused("sized")

    def of_whole(self, pair: Pair, i: int, x: Relation, sizes: Sequence[int]) -> Relation:
        """Returns the relation of a result: of the whole's where it is not known."""
        if x.kind is not Kind.UNKNOWN:
            return x
        whole, part = (eqn.outvars[i].aval.shape for eqn in (pair.whole, pair.part))
        dim = dim_of_examples(whole, part, sizes)
        if whole != part and dim != 0:
            return x
        self.made_whole.add(pair.whole.outvars[i])
        return dataclasses.replace(SAME if whole == part else rows(0), of_params=x.of_params)

    # Equations.

    def equation(self, pair: Pair, inputs: list[Relation]) -> list[Relation]:
        """Returns the relations of the results of an equation."""
        try:
            results = self.by_rule(pair, inputs)
        except Refused as refused:
            why = _why(pair, inputs, str(refused))
            results = self.with_shares(pair, inputs) or [self.refused(why)] * len(pair.whole.outvars)
        of_params = any(x.of_params for x in inputs)
        return [self.checked(pair, i, x, of_params) for i, x in enumerate(results)]

    def by_rule(self, pair: Pair, inputs: list[Relation]) -> list[Relation]:
        """Returns the relations of the results, by the rule of the primitive."""
        name, sub = pair.whole.primitive.name, subcall(pair.whole)
        if sub is not None and sub.kind in _CALLS:
            return self.called(pair, inputs)
        if special := SPECIAL.get(name if sub is None else sub.kind):
            return special(self, pair, inputs)
        if not (name == "select_n" and inputs[0].is_false):
            for x in inputs:
                if x.kind is Kind.UNKNOWN:
                    return [unknown(x.why.replace("{}", self.source))] * len(pair.whole.outvars)
        if any(x.kind in EXTREMA for x in inputs) and self.same_params(pair):
            return of_extrema(pair, inputs)
        if any(x.kind is Kind.COLUMNS for x in inputs) and not name.startswith(("gather", "scatter")):
            raise Refused("mixed")
        if results := of_batches(pair, inputs):
            if results[0].batches != inputs[0].batches:
                self.regrouped.add(id(pair.whole))
            why = max((x.why for x in inputs if x.batches > 1), default="") or self.refused("batches").why
            return [dataclasses.replace(x, why=why if x.batches > 1 else "") for x in results]
        rule = rule_of(name)
        if not self.same_params(pair) or pair.whole.effects:
            raise Refused("sized" if rule else f"the primitive {name!r} may mix examples of a batch")
        if rule:
            return self.of_several(rule, pair, inputs)
        if inputs and all(is_same(x) for x in inputs):
            return [SAME] * len(pair.whole.outvars)
        raise Refused(f"the primitive {name!r} may mix examples of a batch")

    def of_several(self, rule: Rule, pair: Pair, inputs: list[Relation]) -> list[Relation]:
        """Returns the relations of the results by a rule, for operands of as many batches behind one another.

        To a rule the rows of a part are some of those of the whole, in runs; those of several batches are, too.
        """
        along = [x for each in inputs for x in (each, *each.columns) if x.dim is not None]
        numbers = {x.batches for x in along if x.batches}
        if numbers <= {1}:
            results, sizes = rule(pair, [dataclasses.replace(x, batches=1) for x in inputs]), set[int]()
            if along and not numbers:  # of rows that are all the same, rows that are
                sizes = {pair.shapes(i)[0][x.dim] for i, x in enumerate(inputs) if x.kind is Kind.ROWS}
            is_same = lambda i, x: x.kind is Kind.ROWS and {pair.results(i)[0][x.dim]} == sizes  # noqa: E731
            return [dataclasses.replace(x, batches=0) if is_same(i, x) else x for i, x in enumerate(results)]
        check(len(numbers) == 1, "batches")
        check(all(x.kind is Kind.ROWS for x in along))
        (number,), why = numbers, next(x.why for x in inputs if x.batches > 1)
        results = rule(pair, [dataclasses.replace(x, batches=1, why="") for x in inputs])
        check(all(x.kind in (Kind.ROWS, Kind.SAME, Kind.SUM) for x in results))
        return [dataclasses.replace(x, batches=number, why=why) if x.kind is Kind.ROWS else x for x in results]

    def with_shares(self, pair: Pair, inputs: list[Relation]) -> list[Relation]:
        """Returns the relations of what adds sums, and terms that are the same in all parts; empty if it does not.

        Each part has a share of such a term then, and of a mean what makes it a sum like the others (`terms`).
        """
        floats = floating(pair.part.invars)
        powers = {x.power for i, x in enumerate(inputs) if x.kind is Kind.SUM and i in floats}
        is_sum = pair.whole.primitive.name in _ADDS and bool(floating(pair.whole.outvars))
        if not (self.shares_terms and is_sum and powers):
            return []
        power = max(powers)  # all sums are brought to the largest
        shares = {i: share for i in floats if (share := shared(inputs[i], power)) is not None}
        try:
            results = self.by_rule(pair, [shares.get(i, x) for i, x in enumerate(inputs)])
        except Refused:
            return []
        if self.depth > 1 or self.in_derivative:
            self.has_terms_within = True
            return []
        before = {i: inputs[i].power if inputs[i].kind is Kind.SUM else Fraction(1) for i in shares}
        self.terms[pair.part.outvars[0]] = [(i, power - before[i]) for i in shares]
        return results

    def called(self, pair: Pair, inputs: list[Relation]) -> list[Relation]:
        """Returns the relations of the results of a call; of the calls of equal layers one is walked."""
        whole, part = (sub.jaxpr for sub in pair.subcalls())
        key = id(whole), id(part), tuple(inputs), self.source, self.in_derivative, self.batch_axes, self.num_devices
        if key not in self.calls:
            results = self.run(whole, part, inputs)
            self.calls[key] = whole, part, results  # the jaxprs, so that their ids stay their own
        return self.calls[key][-1]

    def same_params(self, pair: Pair) -> bool:
        """Tells whether an equation does the same on the whole as on a part."""
        name, whole, part = pair.whole.primitive.name, pair.whole.params, pair.part.params
        compared = whole.keys() - SIZED.get(name, set()) - {"sharding", "out_sharding"}
        return name in PLACES or (whole.keys() == part.keys() and all(_equal(whole[x], part[x]) for x in compared))

    def checked(self, pair: Pair, i: int, x: Relation, of_params: bool) -> Relation:
        """Returns the relation of a result, if it fits the shapes."""
        whole, part = (getattr(eqn.outvars[i].aval, "shape", ()) for eqn in (pair.whole, pair.part))
        if x.kind in (Kind.UNKNOWN, Kind.COLUMNS):
            return dataclasses.replace(x, of_params=of_params)
        pairs = enumerate(zip(whole, part, strict=True))
        if not all(a == b * (self.num_parts if i == x.dim else 1) for i, (a, b) in pairs):
            return self.refused("sized")
        if x.kind is Kind.ROWS:
            # Of what is repeated for each example it is the repetitions that belong to examples.
            is_tiled = pair.whole.primitive.name == "tile" and len(set(pair.shapes(0))) == 1
            sizes: Any = pair.params["reps"] if is_tiled else whole
            if sizes[x.dim] * self.num_devices % (self.num_blocks * max(x.batches, 1)):
                return self.refused("mixed")  # an element, or what is repeated, is of examples of several blocks
        if x.kind in EXTREMA and not x.why:
            x = dataclasses.replace(x, why=self.refused("mixed").why)
        return dataclasses.replace(x, of_params=of_params or x.of_params)


def _why(pair: Pair, inputs: Sequence[Relation], why: str) -> str:
    """Returns why an operation is refused, more exactly where the operation says it."""
    placed = any(x.kind in (Kind.POSITIONS, Kind.COLUMNS) for x in inputs)
    if pair.whole.primitive.name == "sort" and (placed or why == "mixed"):
        return "sorted" if any(x.dim == pair.params["dimension"] for x in inputs) else why
    return "placed" if placed else why


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    try:
        return one is other or bool(one == other) or (hasattr(one, "eqns") and str(one) == str(other))
    except (TypeError, ValueError):  # arrays
        return False


def sizes_of(inputs: Sequence[Relation], *traces: Any) -> list[int]:
    """Returns how many examples there are in each of several traces, by the relations of their inputs."""
    i = next((i for i, x in enumerate(inputs) if x.kind is Kind.ROWS), None)
    return [] if i is None else [jaxprs.open_jaxpr(x)[0].invars[i].aval.shape[0] for x in traces]


def dim_of_examples(whole: Sequence[int], part: Sequence[int], sizes: Sequence[int]) -> int | None:
    """Returns the one dim in which the shape of a value differs on a part, if it has as many rows of each example."""
    pairs = enumerate(zip(whole, part, strict=False)) if len(whole) == len(part) and sizes else ()
    differing = [(dim, *pair) for dim, pair in pairs if pair[0] != pair[1]]
    found = [dim for dim, a, b in differing if a % sizes[0] == 0 and a // sizes[0] * sizes[1] == b]
    return found[0] if len(found) == len(differing) == 1 else None


def _of_numpy(x: Any) -> np.ndarray:
    """Returns an array on the host; bfloat16, whose NaN NumPy does not know, as float32."""
    array = np.asarray(x)
    is_own = array.dtype.kind == "V" and jnp.issubdtype(array.dtype, jnp.floating)
    return array.astype(np.float32) if is_own else array


# The largest or the smallest of the values of examples, which monotone operations keep.

# Of one operand; of several that are the same extremum, or are the same in all parts; of one that is an extremum.
_INCREASING = frozenset(name for name, known in known_primitives().items() if known.increases)
_OF_ALL = {Kind.MAX: frozenset({"max", "or"}), Kind.MIN: frozenset({"min", "and"})}
_OF_ONE = frozenset({"max", "min", "or", "and", "add", "add_any", "clamp"})
_REDUCTIONS = {Kind.MAX: frozenset({"reduce_max", "reduce_or"}), Kind.MIN: frozenset({"reduce_min", "reduce_and"})}
_FLIPPED = {Kind.MAX: Kind.MIN, Kind.MIN: Kind.MAX}


def of_extrema(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    """Returns the relations of the results of an operation on extrema; raises `Refused` if it is not monotone."""
    name, found = pair.whole.primitive.name, [x for x in inputs if x.kind in EXTREMA]
    check(all(x.kind is found[0].kind for x in found))
    check(all(x.kind in EXTREMA or (x.kind is Kind.SAME and x.is_plain) for x in inputs))
    made = Relation(kind=found[0].kind, why=found[0].why)
    if not _keeps(name, pair, inputs, found):
        check(_flips(name, pair, inputs))
        made = dataclasses.replace(made, kind=_FLIPPED[made.kind])
    return [made] * len(pair.whole.outvars)


def _keeps(name: str, pair: Pair, inputs: Sequence[Relation], found: Sequence[Relation]) -> bool:
    kind, is_one, first = found[0].kind, len(found) == 1, inputs[0].kind in EXTREMA
    before, after = pair.whole.invars[0].aval, pair.whole.outvars[0].aval
    if name in KEEPS:
        grows = is_wider(before.dtype, after.dtype) and before.dtype.kind in ("b", after.dtype.kind)
        is_ordered = before.dtype == after.dtype or is_float(after) or grows
        return is_ordered and (name == "zero_join" or pair.growing() is None)
    if name in ("or", "and", "reduce_or", "reduce_and") and before.dtype != bool:
        return False
    if name in ("mul", "div"):
        positive = [x.number is not None and x.number > 0 for x in inputs]
        return is_one and (positive[1] or (name == "mul" and positive[0]))
    of_one = name in _OF_ONE or (first and name in ("sub", "gt", "ge")) or (not first and name in ("lt", "le"))
    return name in _INCREASING | _OF_ALL[kind] | _REDUCTIONS[kind] | (MOVES | JOINS) - BY_INDEX or (is_one and of_one)


def _flips(name: str, pair: Pair, inputs: Sequence[Relation]) -> bool:
    first, is_one = inputs[0].kind in EXTREMA, sum(x.kind in EXTREMA for x in inputs) == 1
    if name == "not":
        return pair.whole.outvars[0].aval.dtype == bool
    decreases = (first and name in ("lt", "le")) or (not first and name in ("sub", "gt", "ge"))
    return name == "neg" or (is_one and decreases)
