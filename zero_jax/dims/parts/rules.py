"""What single primitives make of the relations of their inputs: exact, or refused.

Most primitives have the rule that follows from their record (`by_record`): its map of dims says where the examples are,
and what it is linear in says what becomes of sums and means. A primitive without a record or a rule may mix examples.
That it keeps shapes says nothing about it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zero_jax.dims.parts.relations import (
    SAME,
    Kind,
    Pair,
    Relation,
    Rule,
    all_joined,
    applied,
    check,
    divided,
    joined,
    multiplied,
    rows,
)
from zero_jax.dims.primitives import PLACES, SAME_ELEMENTS, SCATTERS, Primitive, dim_map, is_float, known_primitives

# From the relations of operands, all with their examples along one dim, to that of the results.
Combine = Callable[[Sequence[Relation]], Relation]


def is_wider(before: Any, after: Any) -> bool:
    """Tells whether a dtype of integers has as many bits as another one, or more."""
    return before.kind in "biu" and after.kind in "iu" and after.itemsize >= before.itemsize


def _cast(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    (x,) = inputs
    before, after = pair.whole.invars[0].aval.dtype, pair.whole.outvars[0].aval.dtype
    grows = is_wider(before, after)
    if x.kind is Kind.POSITIONS and x.dim is not None and before.kind in "iu" and after.kind in "iu":
        grows |= pair.shapes(0)[0][x.dim] <= np.iinfo(after).max  # as float64 programs look up by their int64 places
    return [x if is_float(pair.whole.outvars[0].aval) or grows else applied(inputs)]


def _multiplied(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    return carried(applied if pair.whole.outvars[0].aval.dtype == bool else _product, pair, inputs)


def _divided(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    return [divided(*inputs) if is_float(pair.whole.outvars[0].aval) else applied(inputs)]


def _less(_: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    x, limit = inputs
    if x.kind is Kind.POSITIONS and limit.number == 0:  # as indices are compared that may count from the end
        return [Relation(kind=Kind.ROWS, dim=x.dim, is_false=True)]
    numbers = x.number, limit.number  # as the places of a slice, of which only the first one is not 0
    is_false = None not in numbers and not numbers[0] < numbers[1]  # type: ignore[operator]
    return [dataclasses.replace(applied(inputs), is_false=is_false)]


def _select(_: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    which, *cases = inputs
    if which.is_false:
        return [cases[0]]
    check(which.is_plain)
    chosen = all_joined(cases)
    if which.kind is Kind.SAME:
        return [chosen]
    check(chosen.kind is Kind.SAME or (chosen.kind is Kind.ROWS and chosen.dim == which.dim))
    return [dataclasses.replace(chosen, kind=Kind.ROWS, dim=which.dim)]


# Dims.


def carried(combine: Combine, pair: Pair, inputs: Sequence[Relation], *, over: Kind | None = None) -> list[Relation]:
    """Returns the relations of the results of an operation that have the examples of all operands along one dim.

    Leaving aside where the examples are, it `combine`s operands; of dims that are reduced it is the relation `over`.
    """
    made = combine([x if x.dim is None else x.at(0) for x in inputs])
    dims = {(i, x.dim) for i, x in enumerate(inputs) if x.dim is not None}
    return [placed(made, pair, i, dims, over=over) if dims else made for i in range(len(pair.whole.outvars))]


def placed(
    made: Relation, pair: Pair, result: int, dims: set[tuple[int, int]], *, over: Kind | None = None
) -> Relation:
    """Returns the relation of a result whose examples are along one dim, or what is reduced; or raises `Refused`."""
    known = dim_map(pair.whole, result)
    # Zeros of each example, added to a sum over them, are that sum: of no dim.
    check(made.kind in (Kind.ROWS, Kind.POSITIONS) and known == dim_map(pair.part, result))
    if over is not None and any(dims == {*group} for group in known.reduced):
        return dataclasses.replace(made, kind=over, dim=None)
    found = [i for i, group in enumerate(known.kept) if dims == {*group}]
    check(len(found) == 1)
    return made.at(*found)


def _of_booleans(over: Kind, pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    """A reduction that is an extremum of booleans, and of integers is that of their bits."""
    return carried(applied, pair, inputs, over=over if pair.whole.outvars[0].aval.dtype == bool else None)


def _elements(inputs: Sequence[Relation]) -> Relation:
    return dataclasses.replace(inputs[0].of_elements(), number=inputs[0].number)


def _linear(inputs: Sequence[Relation]) -> Relation:
    check(inputs[0].kind in (Kind.SAME, Kind.ROWS, Kind.SUM))
    return inputs[0].of_elements()


def _at_index(combine: Combine, num_arrays: int, pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    """An operation on the first operands, where scalars say, which are the same for all examples."""
    check(all(start.kind is Kind.SAME and start.is_plain for start in inputs[num_arrays:]))
    return carried(combine, pair, inputs[:num_arrays])


def _product(inputs: Sequence[Relation]) -> Relation:
    return multiplied(*inputs)


def _convolution(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    x, kernel = inputs
    whole, part = (eqn.params["feature_group_count"] for eqn in (pair.whole, pair.part))
    if whole == part:
        check(kernel.kind is Kind.SAME)
        return carried(_product, pair, inputs)
    # A kernel for each example, as `vmap` makes it: examples are groups of features, each as large as in a part.
    numbers = pair.params["dimension_numbers"]
    features, kernels = numbers.lhs_spec[1], numbers.rhs_spec[0]
    for i, operand, dim in ((0, x, features), (1, kernel, kernels)):
        sizes = [shape[dim] for shape in pair.shapes(i)]
        check(operand.kind is Kind.ROWS and operand.dim == dim and sizes[0] * part == sizes[1] * whole)
    return [multiplied(x.at(0), kernel.at(0)).at(numbers.out_spec[1])]


def _broadcast(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    x, grows = inputs[0], pair.growing()
    to = pair.params["broadcast_dimensions"]
    if grows is None:
        return [x.at(to[x.dim]) if x.dim is not None else x]
    if x.kind in (Kind.ROWS, Kind.POSITIONS):
        check(x.dim is not None and to[x.dim] == grows)
        return [x.at(grows)]
    check(x.kind is Kind.SAME)
    return [dataclasses.replace(x, kind=Kind.ROWS, dim=grows, batches=0)]


def _tiled(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    (x,), grows, reps = inputs, pair.growing(), pair.params["reps"]
    if grows is None or x.dim is not None:
        check(x.dim is None or (grows == x.dim and reps[x.dim] == 1))
        return [x]
    check(x.kind is Kind.SAME)  # one for each example, as `jnp.tile` of a token
    return [dataclasses.replace(x, kind=Kind.ROWS, dim=grows)]


def _reshape(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    x, grows = inputs[0], pair.growing()
    if x.dim is None or grows is None:
        check(grows is None and x.dim is None)
        return [x]
    known = dim_map(pair.whole)  # on a part a dim of one example has no place
    check(grows == known.block((0, x.dim)))
    if x.kind is Kind.ROWS:
        return [x.at(grows)]
    # Of places of which each is there several times these are behind one another then.
    before, after = pair.shapes(0)[0][x.dim], pair.results()[0][grows]
    check(after % before == 0)
    return [dataclasses.replace(x.at(grows), repeats=x.repeats * (after // before))]


def _concatenate(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    along = pair.params["dimension"]
    present = [x for i, x in enumerate(inputs) if any(shape[along] for shape in pair.shapes(i))]
    if len(present) == 1:  # the others have no elements
        return present
    check(all(x.dim != along for x in inputs))
    if any(x.kind is Kind.POSITIONS for x in inputs):
        ones = all(pair.shapes(i)[0][along] == 1 for i in range(len(inputs)))
        check(ones and along == len(pair.results()[0]) - 1, "placed")
        return [Relation(kind=Kind.COLUMNS, columns=tuple(inputs))]
    return carried(all_joined, pair, inputs)


def _slice(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    (x,), strides = inputs, pair.params["strides"]
    if x.kind is Kind.ROWS and strides and strides[x.dim] > 1:  # one of the rows of each example, of as many
        sizes = [(before[x.dim], after[x.dim]) for before, after in zip(pair.shapes(0), pair.results(), strict=True)]
        check(all(before == after * strides[x.dim] for before, after in sizes))
        return [x.of_elements()]
    return carried(_elements, pair, inputs)


def _iota(pair: Pair, _: Sequence[Relation]) -> list[Relation]:
    grows = pair.growing()
    if grows is None:
        return [SAME]
    is_count = grows == pair.params["dimension"]  # else all rows count alike
    return [Relation(kind=Kind.POSITIONS, dim=grows) if is_count else dataclasses.replace(rows(grows), batches=0)]


def _random(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    """Draws: what is drawn for examples is each one's own, however many there are.

    The numbers themselves differ from one part to the next; they are as random. By a key that all have they are so in
    any order, of any number of batches behind one another.
    """
    keys = [rows(x.dim) if x.kind is Kind.POSITIONS and x.dim is not None else x for x in inputs]
    x, results = applied(keys), []
    for i in range(len(pair.whole.outvars)):
        grows = [d for d, (a, b) in enumerate(zip(*pair.results(i), strict=True)) if a != b]
        check(len(grows) <= 1 and (x.kind is Kind.SAME or grows == [x.dim]))
        num_batches = 0 if x.kind is Kind.SAME else 1
        results.append(dataclasses.replace(rows(grows[0]), batches=num_batches) if grows else SAME)
    return results


# Lookups and writes: of rows for examples, or of examples at their own places.


def _own_place(pair: Pair, table: Relation, index: Relation, *, to: Sequence[int], alone: Sequence[int]) -> int | None:
    """Returns the dim of indices that counts the examples of a table, each looked up at its own place; None if none."""
    # As of `logits[jnp.arange(n), labels]`: of an index the column of the table's examples counts from 0, one for each.
    columns = index.columns or (index,)
    if table.dim not in to or table.dim not in alone or len(columns) < len(to):
        return None
    column = columns[list(to).index(table.dim)]
    sizes = zip(pair.shapes(0), pair.shapes(1), strict=True)
    if column.kind is not Kind.POSITIONS:
        return None
    if any(rows[table.dim] * column.repeats != places[column.dim] for rows, places in sizes):
        return None
    others = [x for x, dim in zip(columns, to, strict=True) if dim != table.dim]
    check(not others or applied(others).dim in (None, column.dim))  # the other columns are an example's own
    return column.dim


def _looked_up(inputs: Sequence[Relation]) -> Relation:
    table, index = inputs
    check(index.kind is Kind.SAME or table.kind is not Kind.SUM)
    return table.of_elements() if index.kind is Kind.SAME else rows(0, table.power)


def _gather(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    (table, index), numbers = inputs, pair.params["dimension_numbers"]
    check(table.kind in (Kind.SAME, Kind.ROWS, Kind.SUM))
    own = _own_place(pair, table, index, to=numbers.start_index_map, alone=numbers.collapsed_slice_dims)
    if own is None:
        return carried(_looked_up, pair, [table, applied(index.columns or (index,))])
    lead = [i for i in range(len(pair.results()[0])) if i not in numbers.offset_dims]
    return [table.of_elements().at(lead[own])]


def _scatter(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    table, index, updates = inputs
    name, numbers = pair.whole.primitive.name, pair.params["dimension_numbers"]
    is_sum = name in ("scatter-add", "scatter-sub")
    check(is_sum or name == "scatter" or (table.is_plain and updates.is_plain))
    lead = [i for i in range(len(pair.shapes(2)[0])) if i not in numbers.update_window_dims]
    to = numbers.scatter_dims_to_operand_dims
    own = _own_place(pair, table, index, to=to, alone=numbers.inserted_window_dims)
    if own is not None:  # each example writes to its own row
        check(updates.dim == lead[own])
        return [joined(table.at(0), updates.at(0)).at(table.dim)]
    index = applied(index.columns or (index,))
    if table.kind is Kind.ROWS:  # each row is written to at places within it
        check(table.dim not in to)
        return carried(lambda xs: joined(xs[0], xs[2]), pair, [table, index, updates])
    if index.dim is None and updates.kind in (Kind.SAME, Kind.SUM):  # nothing of single examples
        return [joined(table, updates)]
    # Examples that are added to a table of zeros.
    check(is_sum and table.number == 0 and updates.kind is Kind.ROWS and updates.dim in lead)
    check(index.dim is None or lead[index.dim] == updates.dim)
    return [dataclasses.replace(updates.of_elements(), kind=Kind.SUM, dim=None)]


# Parameters that may differ between the whole and a part, because a rule compares them or results are compared.
SIZED = {
    "broadcast_in_dim": {"shape"},
    "tile": {"reps"},
    "iota": {"shape"},
    "empty": {"shape"},
    "reshape": {"new_sizes"},
    "random_bits": {"shape"},
    "random_split": {"shape"},
    "rng_bit_generator": {"shape"},
    "slice": {"limit_indices"},
    "conv_general_dilated": {"feature_group_count"},
    "dynamic_slice": {"slice_sizes"},
    "bcoo_dot_general": {"lhs_spinfo"},
    "gather": {"slice_sizes"},
    **{name: {"update_jaxpr"} for name in SCATTERS},
}
# What may be said of the result as of the operand, whatever it is.
KEEPS = PLACES | SAME_ELEMENTS

_OVER = {"sum": Kind.SUM, "max": Kind.MAX, "min": Kind.MIN}
_COMBINE = {"": applied, "first": _linear, "all": all_joined, "product": _product}
# Rules that are more than the record of a primitive says.
_OWN: dict[str, Rule] = {
    "convert_element_type": _cast,
    "mul": _multiplied,
    "div": _divided,
    "integer_pow": lambda pair, xs: [divided(SAME, *xs) if pair.params["y"] == -1 else applied(xs)],
    "lt": _less,
    "select_n": _select,
    "select_if_vmap": _select,
    "broadcast_in_dim": _broadcast,
    "tile": _tiled,
    "reshape": _reshape,
    "concatenate": _concatenate,
    "iota": _iota,
    "slice": _slice,
    # Of `lax.platform_dependent`, as in `jnp.diagonal`; and the place in the grid of a kernel, along an axis that does
    # not count examples.
    **dict.fromkeys(("platform_index", "program_id", "num_programs"), lambda pair, inputs: [SAME]),
    **dict.fromkeys(
        "random_bits random_split random_fold_in random_wrap random_unwrap random_seed random_clone random_gamma "
        "rng_bit_generator".split(),
        _random,
    ),
    "dynamic_slice": functools.partial(_at_index, _elements, 1),
    "dynamic_update_slice": functools.partial(_at_index, all_joined, 2),
    "reduce_or": functools.partial(_of_booleans, Kind.MAX),
    "reduce_and": functools.partial(_of_booleans, Kind.MIN),
    "conv_general_dilated": _convolution,
    "gather": _gather,
    **dict.fromkeys(SCATTERS, _scatter),
}


def by_record(known: Primitive) -> Rule:
    """Returns the rule that follows from what is known of a primitive."""
    if known.kind in ("copy", "cast", "place"):
        return lambda pair, inputs: list(inputs[: len(pair.whole.outvars)])
    combine = {"shape": lambda inputs: inputs[0], "part": _elements, "order": _elements}.get(
        known.kind, _COMBINE[known.linear]
    )
    return functools.partial(carried, combine, over=_OVER.get(known.reduces))


@functools.cache
def rule_of(name: str) -> Rule | None:
    """Returns the rule of a primitive; None if it is not known."""
    known = known_primitives().get(name)
    return _OWN.get(name) or (by_record(known) if known else None)
