"""The relations of equations that run other jaxprs: loops, branches, devices' own functions, kernels, derivatives."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zero_jax.dims.parts.kernels import example_dims
from zero_jax.dims.parts.relations import (
    EXTREMA,
    SAME,
    Kind,
    Pair,
    Refused,
    Relation,
    aval,
    check,
    dual,
    floating,
    floating_results,
    joined,
    rows,
)
from zero_jax.program import jaxprs
from zero_jax.program.subcalls import Subcall
from zero_jax.sharding.spec import dims_of

# `comparison` is the `TraceComparison` that the equation is of; its type would be a circular import.

_COLLECTIVES = ("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "reduce_scatter")
_REDUCTIONS = {
    "psum": jax.lax.reduce_sum_p,
    "psum_invariant": jax.lax.reduce_sum_p,
    "pmax": jax.lax.reduce_max_p,
    "pmin": jax.lax.reduce_min_p,
}
_MAX_ROUNDS = 8  # after which what a loop carries is not known


def is_same(x: Relation) -> bool:
    """Tells whether a value is the same in all parts."""
    return x.kind is Kind.SAME and x.is_plain


def unknown_of(relations: Sequence[Relation]) -> list[Relation]:
    """Returns those relations of which nothing is known."""
    return [x for x in relations if x.kind is Kind.UNKNOWN]


# Loops and branches.


def loop(
    comparison: Any, bodies: tuple[Any, Any], consts: Sequence[Relation], carry: list[Relation], slices: Any = ()
) -> Any:
    """Returns what a loop carries, from its start on, and the other results of its body."""
    for _ in range(_MAX_ROUNDS):
        results = [left(comparison, x) for x in comparison.run(*bodies, [*consts, *carry, *slices])]
        after = [either(comparison, x, y) for x, y in zip(carry, results, strict=False)]
        if all(
            x.agrees(y) and (x.number, x.of_params, x.batches) == (y.number, y.of_params, y.batches)
            for x, y in zip(carry, after, strict=True)
        ):
            return carry, results[len(carry) :]
        carry = after
    raise Refused("mixed")


def left(comparison: Any, x: Relation) -> Relation:
    """Returns the relation of what comes out of a loop or a branch."""
    if x.kind in (Kind.COLUMNS, Kind.POSITIONS):
        return comparison.refused("mixed")
    return dataclasses.replace(x, is_false=False)  # another iteration or branch may make it otherwise


def either(comparison: Any, one: Relation, other: Relation) -> Relation:
    """Returns the relation of a value that is one or the other."""
    for x in (one, other):
        if x.kind is Kind.UNKNOWN:
            return x
    of_params = one.of_params or other.of_params
    if one.agrees(other) and (one.number, one.batches) == (other.number, other.batches):
        return dataclasses.replace(one, of_params=of_params)
    for x, y in ((one, other), (other, one)):
        if x.kind in EXTREMA and is_same(y):  # the largest of what all parts have is that
            return dataclasses.replace(x, of_params=of_params)
    try:
        return dataclasses.replace(joined(one, other), of_params=of_params)
    except Refused as refused:
        return comparison.refused(str(refused))


def scan(comparison: Any, pair: Pair, inputs: list[Relation]) -> list[Relation]:
    """A loop over slices, or a function of each example, whose results may be added up."""
    whole, part = pair.subcalls()
    consts, carry, slices = whole.split(inputs)
    bodies = whole.jaxpr, part.jaxpr
    counts = [(sub.num_consts, sub.num_carry, sub.reverse) for sub in (whole, part)]
    check(counts[0] == counts[1], "sized")
    if whole.length != part.length:
        # An iteration is of one example, which is the same on the whole as on a part. What all of them add to a
        # carry that begins with 0 is a sum over examples, and what they stack are rows.
        check(all(x.is_plain and x.dim == 0 and x.batches < 2 for x in slices) and all(map(is_same, consts)))
        check(all(is_same(x) and x.number == 0 for x in carry))
        if carry:
            bodies = _terms(whole), _terms(part)
        of_one = [dataclasses.replace(x, kind=Kind.SAME, dim=None) for x in slices]
        results = comparison.run(*bodies, [*consts, *carry, *of_one])
        found = [x if is_same(x) or x.kind is Kind.UNKNOWN else comparison.refused("mixed") for x in results]
        ends = [Relation(kind=Kind.SUM)] * len(carry) + [rows(0)] * (len(results) - len(carry))
        return [end if is_same(x) else x for x, end in zip(found, ends, strict=True)]
    check(all(x.dim != 0 for x in slices))  # an iteration takes of all examples
    slices = [x.at(None if x.dim is None else x.dim - 1) for x in slices]
    carry, results = loop(comparison, bodies, consts, carry, slices)
    return [*carry, *(x if x.dim is None else x.at(x.dim + 1) for x in results)]


def while_loop(comparison: Any, pair: Pair, inputs: list[Relation]) -> list[Relation]:
    """A loop that goes on as long as something holds, which is the same for all examples, or of each by itself.

    Where a test has several results (`jax.vmap` of a loop), each place along its dims goes on by itself: what is
    carried has the same leading dims, and stays as it is where the test is false.
    """
    whole, part = pair.subcalls()
    test_consts, (consts, carry, _) = inputs[: whole.num_test_consts], whole.split(inputs)
    bodies = whole.jaxpr, part.jaxpr
    carry, _ = loop(comparison, bodies, consts, [dataclasses.replace(x, is_false=False) for x in carry])
    (goes_on,) = comparison.run(whole.test, part.test, [*test_consts, *carry])
    if goes_on.kind is Kind.UNKNOWN:
        return [goes_on] * len(carry)
    if is_same(goes_on):
        return carry
    check(goes_on.is_plain and goes_on.batches < 2)
    check(all((x.kind, x.dim) == (goes_on.kind, goes_on.dim) and x.batches < 2 for x in carry))
    return carry


def cond(comparison: Any, pair: Pair, inputs: list[Relation]) -> list[Relation]:
    """Branches, of which all examples take the same."""
    index, *values = inputs
    if index.kind is Kind.UNKNOWN:
        return [index] * len(pair.whole.outvars)
    check(is_same(index))
    whole, part = pair.subcalls()
    branches = zip(whole.branches, part.branches, strict=True)
    found = [[left(comparison, x) for x in comparison.run(*branch, values)] for branch in branches]
    return [functools.reduce(functools.partial(either, comparison), results) for results in zip(*found, strict=True)]


# Devices of their own.


def shard_map(comparison: Any, pair: Pair, inputs: list[Relation]) -> list[Relation]:
    """A function of shards; those of a batch have examples of their own."""
    check(all(x.batches < 2 for x in inputs))
    specs = [dims_of(spec, len(spec)) for spec in pair.params["in_specs"]]
    axes = [{axis for dim in spec for axis in dim} for spec in specs]
    of_rows = [spec[x.dim] for spec, x in zip(specs, inputs, strict=True) if x.dim is not None and x.dim < len(spec)]
    outer = comparison.batch_axes, comparison.num_devices
    comparison.batch_axes = frozenset(axis for dim in of_rows for axis in dim)
    comparison.num_devices *= math.prod(pair.params["mesh"].shape[axis] for axis in comparison.batch_axes)
    try:
        check(all(x.kind is Kind.ROWS or not a & comparison.batch_axes for a, x in zip(axes, inputs, strict=True)))
        results = comparison.called(pair, inputs)
        # Outside of it batches behind one another are those of all devices, not of each.
        kinds = (Kind.SAME, Kind.ROWS, Kind.UNKNOWN)
        check(not comparison.batch_axes or all(x.kind in kinds and x.batches < 2 for x in results))
    finally:
        comparison.batch_axes, comparison.num_devices = outer
    return [dataclasses.replace(x, is_false=False) for x in results]


def collective(comparison: Any, pair: Pair, inputs: list[Relation]) -> list[Relation]:
    """A sum, or the like, over devices that have the same examples."""
    if unknown_of(inputs):
        return [unknown_of(inputs)[0]] * len(pair.whole.outvars)
    params = pair.params
    axes = params["axes"] if "axes" in params else params["axis_name"]
    if any(isinstance(axis, int) for axis in axes):  # dims, which jax.vmap named
        return reduction(comparison, pair, inputs, axes)
    along = params.get("all_gather_dimension", params.get("scatter_dimension"))
    largest = pair.whole.primitive.name in ("pmax", "pmin")
    for x in inputs:
        fits = x.is_plain or (x.kind in (Kind.SAME, Kind.ROWS, Kind.SUM) and not largest)
        moves = along is not None and (x.dim == along or not params["tiled"])
        check(fits and not moves and not comparison.batch_axes & set(axes) and comparison.same_params(pair))
    return [x.of_elements() for x in inputs]


def reduction(comparison: Any, pair: Pair, inputs: list[Relation], axes: tuple[Any, ...]) -> list[Relation]:
    """A sum, or the like, over dims alone."""
    reduce = _REDUCTIONS.get(pair.whole.primitive.name)
    check(reduce is not None and all(isinstance(axis, int) for axis in axes) and comparison.same_params(pair))
    params, results = {"axes": axes, "out_sharding": None}, []
    for i, x in enumerate(inputs):
        eqns = (eqn.replace(invars=[eqn.invars[i]], outvars=[eqn.outvars[i]]) for eqn in (pair.whole, pair.part))
        whole, part = (eqn.replace(primitive=reduce, params=params) for eqn in eqns)
        results += comparison.by_rule(Pair(whole=whole, part=part), [x])
    return results


# Kernels.


def kernel(comparison: Any, pair: Pair, inputs: list[Relation]) -> list[Relation]:
    """A kernel whose programs are of one example each, or of none."""
    if unknown_of(inputs):
        return [unknown_of(inputs)[0]] * len(pair.whole.outvars)
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
    refs, _ = loop(comparison, bodies, [], refs)
    results = refs[len(inputs) : len(inputs) + grid.num_outputs]
    check(None in dims or all(x.kind in (Kind.SAME, Kind.UNKNOWN) for x in results))
    return [
        x if dim is None or x.kind is Kind.UNKNOWN else dataclasses.replace(x, kind=Kind.ROWS, dim=dim)
        for x, dim in zip(results, dims, strict=True)
    ]


# Functions with derivatives of their own.


def custom_jvp(comparison: Any, pair: Pair, inputs: list[Relation]) -> list[Relation]:
    """A function whose tangents are to relate as its values do."""
    results = comparison.called(pair, inputs)
    if comparison.in_derivative or unknown_of(inputs) or not any(x.of_params for x in inputs):
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
    found = derivative(comparison, *traces, [*inputs, *(tangents[i] for i in moves[0])])
    wanted = [results[i] for i in floating(pair.whole.outvars)]
    return if_they_agree(comparison, results, found, wanted)


def custom_vjp(comparison: Any, pair: Pair, inputs: list[Relation]) -> list[Relation]:
    """A function whose cotangents are to relate as those of the loss do."""
    results = comparison.called(pair, inputs)
    if comparison.in_derivative or unknown_of(inputs) or unknown_of(results) or not any(x.of_params for x in inputs):
        return results
    outs = floating(pair.whole.outvars)
    which = [i for i in floating(pair.whole.invars) if inputs[i].of_params]  # not constants that it closes over

    def cotangents(eqn: Any) -> Any:
        def function(values: list[Any], cotangents: list[Any]) -> Any:
            return jax.vjp(floating_results(eqn, values, which), *(values[i] for i in which))[1](cotangents)

        return _traced(eqn, function, [aval(x) for x in eqn.invars], [aval(eqn.outvars[i]) for i in outs])

    traces = cotangents(pair.whole), cotangents(pair.part)
    found = derivative(comparison, *traces, [*inputs, *(dual(results[i], comparison.power) for i in outs)])
    return if_they_agree(comparison, results, found, [dual(inputs[i], comparison.power) for i in which])


def derivative(comparison: Any, whole: Any, part: Any, inputs: Sequence[Relation]) -> list[Relation]:
    """Returns the relations of the results of a derivative, which is not differentiated again."""
    comparison.in_derivative = True
    try:
        return comparison.run(whole, part, inputs)
    finally:
        comparison.in_derivative = False


def if_they_agree(
    comparison: Any, results: list[Relation], found: Sequence[Relation], wanted: Sequence[Relation]
) -> list[Relation]:
    """Returns the results of a function, if its derivatives relate as they should."""
    for x, y in zip(found, wanted, strict=True):
        if y.kind is not Kind.UNKNOWN and not (x.agrees(y) or x.number == 0):
            return [x if x.kind is Kind.UNKNOWN else comparison.refused("derived")] * len(results)
    return results


def linear_solve(comparison: Any, pair: Pair, inputs: list[Relation]) -> list[Relation]:
    """A solution of linear equations, of each example or of none."""
    lengths, solved = pair.params["const_lengths"], inputs[sum(pair.params["const_lengths"]) :]
    if unknown_of(inputs):
        return [unknown_of(inputs)[0]] * len(pair.whole.outvars)
    starts = dict(zip(lengths._fields, itertools.accumulate((0, *lengths)), strict=False))
    for name in ("solve", "transpose_solve", "matvec", "vecmat"):
        whole, part = (getattr(eqn.params["jaxprs"], name) for eqn in (pair.whole, pair.part))
        if whole is None:
            continue
        consts = inputs[starts[name] : starts[name] + getattr(lengths, name)]
        found = comparison.run(whole, part, [*consts, *solved])
        check(all(x.agrees(y) for x, y in zip(found, solved, strict=True)))
    return [x.of_elements() for x in solved]


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


SPECIAL: dict[str, Callable[[Any, Pair, list[Relation]], list[Relation]]] = {
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "shard_map": shard_map,
    **dict.fromkeys(_COLLECTIVES, collective),
    "pallas_call": kernel,
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "custom_linear_solve": linear_solve,
}
