"""The relations of all values of a loss function, by its traces on a batch and on a part of it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from zero_jax.dims.parts.batches import in_blocks, of_batches
from zero_jax.dims.parts.kernels import example_dims
from zero_jax.dims.parts.relations import (
    EXTREMA,
    SAME,
    Kind,
    Pair,
    Refused,
    Relation,
    Rule,
    aval,
    check,
    constant_rows,
    dual,
    floating,
    floating_results,
    joined,
    rows,
    shared,
    unknown,
)
from zero_jax.dims.parts.rules import SIZED, of_extrema, rule_of
from zero_jax.dims.primitives import PLACES, known_primitives
from zero_jax.program import jaxprs
from zero_jax.program.subcalls import Subcall, equations_of, subcall
from zero_jax.sharding.spec import dims_of

_CALLS = frozenset({"call", "sharded_call", "remat", "custom_vmap"})
_COLLECTIVES = ("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "reduce_scatter")
_REDUCTIONS = {
    "psum": jax.lax.reduce_sum_p,
    "psum_invariant": jax.lax.reduce_sum_p,
    "pmax": jax.lax.reduce_max_p,
    "pmin": jax.lax.reduce_min_p,
}
# What adds its operands up, or takes each element of one of them.
_ADDS = frozenset({name for name, known in known_primitives().items() if known.linear == "all"} | {"select_n"})
_MAX_ROUNDS = 8  # after which what a loop carries is not known
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
        self.terms: dict[Any, list[tuple[int, Fraction]]] = {}
        self.has_terms_within, self.depth, self.source = False, 0, ""
        self.calls: dict[Any, tuple[Any, Any, list[Relation]]] = {}
        self.in_derivative, self.regrouped = False, set[int]()
        # Of the mesh, in a shard_map, and the devices of these axes: a dim of examples is that of one of them
        self.batch_axes, self.num_devices = frozenset[str](), 1

    def run(self, whole: Any, part: Any, inputs: Sequence[Relation], found: list[Any] | None = None) -> list[Relation]:
        """Returns the relations of the results of a jaxpr, open or closed, from those of its inputs.

        Those of the operands and results of its equations are added to `found`.
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
        for pair in (Pair(whole=a, part=b) for a, b in zip(whole.eqns, part.eqns, strict=True)):
            self.source = jaxprs.source_line(pair.whole) or source
            values = [self.read(env, a, b) for a, b in zip(pair.whole.invars, pair.part.invars, strict=True)]
            results = self.equation(pair, values) if pair.whole.outvars else []
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
            self.run(traces[-2], traces[-1], inputs, found)
        if all(x.batches < 2 for operands, results in found for x in (*operands, *results)):
            return [*traces], []
        eqns = opened[-2].eqns

        def own(i: int) -> bool | None:
            is_own = id(eqns[i]) in self.regrouped
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
                a, b = np.asarray(whole), np.asarray(part)
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
        if special := _SPECIAL.get(name if sub is None else sub.kind):
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
        if inputs and all(_is_same(x) for x in inputs):
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
        check(len(numbers) == 1 and all(x.kind is Kind.ROWS for x in along))
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
            return x
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

    # Loops and branches.

    def loop(self, bodies: tuple[Any, Any], consts: Sequence[Relation], carry: list[Relation], slices: Any = ()) -> Any:
        """Returns what a loop carries, from its start on, and the other results of its body."""
        for _ in range(_MAX_ROUNDS):
            results = [self.left(x) for x in self.run(*bodies, [*consts, *carry, *slices])]
            after = [self.either(x, y) for x, y in zip(carry, results, strict=False)]
            if all(
                x.agrees(y) and (x.number, x.of_params, x.batches) == (y.number, y.of_params, y.batches)
                for x, y in zip(carry, after, strict=True)
            ):
                return carry, results[len(carry) :]
            carry = after
        raise Refused("mixed")

    def left(self, x: Relation) -> Relation:
        """Returns the relation of what comes out of a loop or a branch."""
        if x.kind in (Kind.COLUMNS, Kind.POSITIONS):
            return self.refused("mixed")
        return dataclasses.replace(x, is_false=False)  # another iteration or branch may make it otherwise

    def either(self, one: Relation, other: Relation) -> Relation:
        """Returns the relation of a value that is one or the other."""
        for x in (one, other):
            if x.kind is Kind.UNKNOWN:
                return x
        of_params = one.of_params or other.of_params
        if one.agrees(other) and (one.number, one.batches) == (other.number, other.batches):
            return dataclasses.replace(one, of_params=of_params)
        try:
            return dataclasses.replace(joined(one, other), of_params=of_params)
        except Refused as refused:
            return self.refused(str(refused))

    def scan(self, pair: Pair, inputs: list[Relation]) -> list[Relation]:
        """A loop over slices, or a function of each example, whose results may be added up."""
        whole, part = pair.subcalls()
        consts, carry, slices = whole.split(inputs)
        bodies = whole.jaxpr, part.jaxpr
        counts = [(sub.num_consts, sub.num_carry, sub.reverse) for sub in (whole, part)]
        check(counts[0] == counts[1], "sized")
        if whole.length != part.length:
            # An iteration is of one example, which is the same on the whole as on a part. What all of them add to a
            # carry that begins with 0 is a sum over examples, and what they stack are rows.
            check(all(x.is_plain and x.dim == 0 and x.batches < 2 for x in slices) and all(map(_is_same, consts)))
            check(all(_is_same(x) and x.number == 0 for x in carry))
            if carry:
                bodies = _terms(whole), _terms(part)
            of_one = [dataclasses.replace(x, kind=Kind.SAME, dim=None) for x in slices]
            results = self.run(*bodies, [*consts, *carry, *of_one])
            found = [x if _is_same(x) or x.kind is Kind.UNKNOWN else self.refused("mixed") for x in results]
            ends = [Relation(kind=Kind.SUM)] * len(carry) + [rows(0)] * (len(results) - len(carry))
            return [end if _is_same(x) else x for x, end in zip(found, ends, strict=True)]
        check(all(x.dim != 0 for x in slices))  # an iteration takes of all examples
        slices = [x.at(None if x.dim is None else x.dim - 1) for x in slices]
        carry, results = self.loop(bodies, consts, carry, slices)
        return [*carry, *(x if x.dim is None else x.at(x.dim + 1) for x in results)]

    def while_loop(self, pair: Pair, inputs: list[Relation]) -> list[Relation]:
        """A loop that goes on as long as something holds, which is the same for all examples, or of each by itself.

        Where a test has several results (`jax.vmap` of a loop), each place along its dims goes on by itself: what is
        carried has the same leading dims, and stays as it is where the test is false.
        """
        whole, part = pair.subcalls()
        test_consts, (consts, carry, _) = inputs[: whole.num_test_consts], whole.split(inputs)
        bodies = whole.jaxpr, part.jaxpr
        carry, _ = self.loop(bodies, consts, [dataclasses.replace(x, is_false=False) for x in carry])
        (goes_on,) = self.run(whole.test, part.test, [*test_consts, *carry])
        if goes_on.kind is Kind.UNKNOWN:
            return [goes_on] * len(carry)
        if _is_same(goes_on):
            return carry
        check(goes_on.is_plain and goes_on.batches < 2)
        check(all((x.kind, x.dim) == (goes_on.kind, goes_on.dim) and x.batches < 2 for x in carry))
        return carry

    def cond(self, pair: Pair, inputs: list[Relation]) -> list[Relation]:
        """Branches, of which all examples take the same."""
        index, *values = inputs
        if index.kind is Kind.UNKNOWN:
            return [index] * len(pair.whole.outvars)
        check(_is_same(index))
        whole, part = pair.subcalls()
        branches = zip(whole.branches, part.branches, strict=True)
        found = [[self.left(x) for x in self.run(*branch, values)] for branch in branches]
        return [functools.reduce(self.either, results) for results in zip(*found, strict=True)]

    # Devices of their own.

    def shard_map(self, pair: Pair, inputs: list[Relation]) -> list[Relation]:
        """A function of shards; those of a batch have examples of their own."""
        check(all(x.batches < 2 for x in inputs))
        specs = [dims_of(spec, len(spec)) for spec in pair.params["in_specs"]]
        axes = [{axis for dim in spec for axis in dim} for spec in specs]
        of_rows = [
            spec[x.dim] for spec, x in zip(specs, inputs, strict=True) if x.dim is not None and x.dim < len(spec)
        ]
        outer, self.batch_axes = (self.batch_axes, self.num_devices), frozenset(axis for dim in of_rows for axis in dim)
        self.num_devices *= math.prod(pair.params["mesh"].shape[axis] for axis in self.batch_axes)
        try:
            check(all(x.kind is Kind.ROWS or not a & self.batch_axes for a, x in zip(axes, inputs, strict=True)))
            results = self.called(pair, inputs)
            # Outside of it batches behind one another are those of all devices, not of each.
            kinds = (Kind.SAME, Kind.ROWS, Kind.UNKNOWN)
            check(not self.batch_axes or all(x.kind in kinds and x.batches < 2 for x in results))
        finally:
            self.batch_axes, self.num_devices = outer
        return [dataclasses.replace(x, is_false=False) for x in results]

    def collective(self, pair: Pair, inputs: list[Relation]) -> list[Relation]:
        """A sum, or the like, over devices that have the same examples."""
        if _unknown(inputs):
            return [_unknown(inputs)[0]] * len(pair.whole.outvars)
        params = pair.params
        axes = params["axes"] if "axes" in params else params["axis_name"]
        if any(isinstance(axis, int) for axis in axes):  # dims, which jax.vmap named
            return self.reduction(pair, inputs, axes)
        along = params.get("all_gather_dimension", params.get("scatter_dimension"))
        largest = pair.whole.primitive.name in ("pmax", "pmin")
        for x in inputs:
            fits = x.is_plain or (x.kind in (Kind.SAME, Kind.ROWS, Kind.SUM) and not largest)
            moves = along is not None and (x.dim == along or not params["tiled"])
            check(fits and not moves and not self.batch_axes & set(axes) and self.same_params(pair))
        return [x.of_elements() for x in inputs]

    def reduction(self, pair: Pair, inputs: list[Relation], axes: tuple[Any, ...]) -> list[Relation]:
        """A sum, or the like, over dims alone."""
        reduce = _REDUCTIONS.get(pair.whole.primitive.name)
        check(reduce is not None and all(isinstance(axis, int) for axis in axes) and self.same_params(pair))
        params, results = {"axes": axes, "out_sharding": None}, []
        for i, x in enumerate(inputs):
            eqns = (eqn.replace(invars=[eqn.invars[i]], outvars=[eqn.outvars[i]]) for eqn in (pair.whole, pair.part))
            whole, part = (eqn.replace(primitive=reduce, params=params) for eqn in eqns)
            results += self.by_rule(Pair(whole=whole, part=part), [x])
        return results

    # Kernels.

    def kernel(self, pair: Pair, inputs: list[Relation]) -> list[Relation]:
        """A kernel whose programs are of one example each, or of none."""
        if _unknown(inputs):
            return [_unknown(inputs)[0]] * len(pair.whole.outvars)
        check(all(x.batches < 2 for x in inputs))
        dims = example_dims(pair, {i: x.dim for i, x in enumerate(inputs) if x.dim is not None})
        grid = pair.params["grid_mapping"]
        # What its references hold: of one example the value is that of the whole. Nothing reads results before they
        # are written.
        refs = [x if x.dim is None else dataclasses.replace(x, kind=Kind.SAME, dim=None) for x in inputs]
        refs += [dataclasses.replace(SAME, number=0.0)] * (grid.num_outputs + len(grid.scratch_avals))
        try:
            bodies = jaxprs.kernel_program(pair.whole), jaxprs.kernel_program(pair.part)
        except Exception as error:  # the user's own code, in forms that JAX itself may not take
            raise Refused(f"a kernel that is not known may mix examples of a batch ({type(error).__name__})") from error
        refs, _ = self.loop(bodies, [], refs)
        results = refs[len(inputs) : len(inputs) + grid.num_outputs]
        check(None in dims or all(x.kind in (Kind.SAME, Kind.UNKNOWN) for x in results))
        return [
            x if dim is None or x.kind is Kind.UNKNOWN else dataclasses.replace(x, kind=Kind.ROWS, dim=dim)
            for x, dim in zip(results, dims, strict=True)
        ]

    # Functions with derivatives of their own.

    def custom_jvp(self, pair: Pair, inputs: list[Relation]) -> list[Relation]:
        """A function whose tangents are to relate as its values do."""
        results = self.called(pair, inputs)
        if self.in_derivative or _unknown(inputs) or not any(x.of_params for x in inputs):
            return results
        tangents = [dataclasses.replace(x, number=None) for x in inputs]
        moves = [floating(eqn.invars) for eqn in (pair.whole, pair.part)]

        def tangent(eqn: Any, which: Sequence[int]) -> Any:
            avals = [aval(x) for x in eqn.invars]
            free = [avals[i] for i in which]

            def function(values: list[Any], tangents: list[Any]) -> list[Any]:
                call = floating_results(eqn, values, which)
                return jax.jvp(call, [values[i] for i in which], tangents)[1]

            return _traced(eqn, function, avals, free)

        traces = tangent(pair.whole, moves[0]), tangent(pair.part, moves[1])
        found = self.derivative(*traces, [*inputs, *(tangents[i] for i in moves[0])])
        wanted = [results[i] for i in floating(pair.whole.outvars)]
        return self.if_they_agree(results, found, wanted)

    def custom_vjp(self, pair: Pair, inputs: list[Relation]) -> list[Relation]:
        """A function whose cotangents are to relate as those of the loss do."""
        results = self.called(pair, inputs)
        if self.in_derivative or _unknown(inputs) or _unknown(results) or not any(x.of_params for x in inputs):
            return results
        outs = floating(pair.whole.outvars)
        which = [i for i in floating(pair.whole.invars) if inputs[i].of_params]  # not constants that it closes over

        def cotangents(eqn: Any) -> Any:
            def function(values: list[Any], cotangents: list[Any]) -> Any:
                return jax.vjp(floating_results(eqn, values, which), *(values[i] for i in which))[1](cotangents)

            return _traced(eqn, function, [aval(x) for x in eqn.invars], [aval(eqn.outvars[i]) for i in outs])

        traces = cotangents(pair.whole), cotangents(pair.part)
        found = self.derivative(*traces, [*inputs, *(dual(results[i], self.power) for i in outs)])
        return self.if_they_agree(results, found, [dual(inputs[i], self.power) for i in which])

    def derivative(self, whole: Any, part: Any, inputs: Sequence[Relation]) -> list[Relation]:
        """Returns the relations of the results of a derivative, which is not differentiated again."""
        self.in_derivative = True
        try:
            return self.run(whole, part, inputs)
        finally:
            self.in_derivative = False

    def if_they_agree(
        self, results: list[Relation], found: Sequence[Relation], wanted: Sequence[Relation]
    ) -> list[Relation]:
        """Returns the results of a function, if its derivatives relate as they should."""
        for x, y in zip(found, wanted, strict=True):
            if y.kind is not Kind.UNKNOWN and not (x.agrees(y) or x.number == 0):
                return [x if x.kind is Kind.UNKNOWN else self.refused("derived")] * len(results)
        return results

    def linear_solve(self, pair: Pair, inputs: list[Relation]) -> list[Relation]:
        """A solution of linear equations, of each example or of none."""
        lengths, solved = pair.params["const_lengths"], inputs[sum(pair.params["const_lengths"]) :]
        if _unknown(inputs):
            return [_unknown(inputs)[0]] * len(pair.whole.outvars)
        starts = dict(zip(lengths._fields, itertools.accumulate((0, *lengths)), strict=False))
        for name in ("solve", "transpose_solve", "matvec", "vecmat"):
            whole, part = (getattr(eqn.params["jaxprs"], name) for eqn in (pair.whole, pair.part))
            if whole is None:
                continue
            consts = inputs[starts[name] : starts[name] + getattr(lengths, name)]
            found = self.run(whole, part, [*consts, *solved])
            check(all(x.agrees(y) for x, y in zip(found, solved, strict=True)))
        return [x.of_elements() for x in solved]


_SPECIAL: dict[str, Callable[[TraceComparison, Pair, list[Relation]], list[Relation]]] = {
    "scan": TraceComparison.scan,
    "while": TraceComparison.while_loop,
    "cond": TraceComparison.cond,
    "shard_map": TraceComparison.shard_map,
    **dict.fromkeys(_COLLECTIVES, TraceComparison.collective),
    "pallas_call": TraceComparison.kernel,
    "custom_jvp": TraceComparison.custom_jvp,
    "custom_vjp": TraceComparison.custom_vjp,
    "custom_linear_solve": TraceComparison.linear_solve,
}


def _traced(eqn: Any, function: Callable[..., Any], *avals: Any) -> Any:
    """Returns the jaxpr of a derivative that the user's code defines; raises `Refused` if it cannot be traced."""
    try:
        return jax.make_jaxpr(function)(*avals)
    except Exception as error:  # the user's own code
        name = eqn.primitive.name
        raise Refused(f"the derivatives of {name!r} cannot be traced on parts ({type(error).__name__})") from error


def _terms(loop: Subcall) -> Any:
    """Returns the body of a loop with what it adds to each carry for the new one; refuses all else that reads one."""
    jaxpr, _ = jaxprs.open_jaxpr(loop.jaxpr)
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    carry = slice(loop.num_consts, loop.num_consts + loop.num_carry)

    def source(atom: Any) -> tuple[Any, Any]:
        """Returns what an atom is made of by casts to its own dtype, as of weak types, and the equation of that."""
        eqn = None if jaxprs.is_literal(atom) else made_by.get(atom)
        if eqn is None or eqn.primitive.name != "convert_element_type" or eqn.invars[0].aval.dtype != atom.aval.dtype:
            return atom, eqn
        return source(eqn.invars[0])

    results = list(jaxpr.outvars)
    for i, var in enumerate(jaxpr.invars[carry]):
        eqn = source(results[i])[1]
        if eqn is None or eqn.primitive.name not in ("add", "add_any"):
            raise Refused("mixed")
        terms = [x for x in eqn.invars if source(x)[0] is not var]
        check(len(terms) == 1)
        (results[i],) = terms
    body = jaxprs.alone(loop.jaxpr, results)
    check(not any(jaxprs.used_inputs(body)[carry]))
    return body


def _why(pair: Pair, inputs: Sequence[Relation], why: str) -> str:
    """Returns why an operation is refused, more exactly where the operation says it."""
    placed = any(x.kind in (Kind.POSITIONS, Kind.COLUMNS) for x in inputs)
    if pair.whole.primitive.name == "sort" and (placed or why == "mixed"):
        return "sorted" if any(x.dim == pair.params["dimension"] for x in inputs) else why
    return "placed" if placed else why


def _is_same(x: Relation) -> bool:
    return x.kind is Kind.SAME and x.is_plain


def _unknown(relations: Sequence[Relation]) -> list[Relation]:
    return [x for x in relations if x.kind is Kind.UNKNOWN]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    try:
        return one is other or bool(one == other) or (hasattr(one, "eqns") and str(one) == str(other))
    except (TypeError, ValueError):  # arrays
        return False
