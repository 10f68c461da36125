"""What single primitives make of the relations of their inputs: exact, or refused.

Most primitives have the rule that follows from their record (`by_record`): its map of dims says where the examples are,
and what it is linear in says what becomes of sums and means. A primitive without a record or a rule may mix examples.
That it keeps shapes says nothing about it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from zero_jax.dims.parts import lookups
from zero_jax.dims.parts.pair import Pair, Rule, check
from zero_jax.dims.parts.relations import (
    SAME,
    Kind,
    Relation,
    all_joined,
    applied,
    divided,
    multiplied,
    rows,
)
from zero_jax.dims.primitives import PLACES, SAME_ELEMENTS, SCATTERS, Primitive, dim_map, is_float, known_primitives

# From the relations of operands, all with their examples along one dim, to that of the results.
Combine = Callable[[Sequence[Relation]], Relation]


def _cast(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    (x,) = inputs
    before, after = pair.whole.invars[0].aval.dtype, pair.whole.outvars[0].aval.dtype
    grows = before.kind in "biu" and after.kind in "iu" and after.itemsize >= before.itemsize
    return [x if is_float(pair.whole.outvars[0].aval) or grows else applied(inputs)]


def _multiplied(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    is_number = pair.whole.outvars[0].aval.dtype != bool
    return carried(_product if is_number else applied)(pair, inputs)


def _divided(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    return [divided(*inputs) if is_float(pair.whole.outvars[0].aval) else applied(inputs)]


def _less(_: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    x, limit = inputs
    if x.kind is Kind.POSITIONS and limit.number == 0:  # as indices are compared that may count from the end
        return [Relation(kind=Kind.ROWS, dim=x.dim, is_false=True)]
    return [applied(inputs)]


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


def carried(combine: Combine, *, over: Kind | None = None) -> Rule:
    """Returns the rule of operations whose results have the examples of all operands along one dim.

    Args:
      combine: what they make of their operands, leaving aside where the examples are.
      over: what they make of dims that they reduce: a SUM, linearly, the MAX or the MIN.
    """

    def rule(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
        made = combine([x if x.dim is None else x.at(0) for x in inputs])
        dims = {(i, x.dim) for i, x in enumerate(inputs) if x.dim is not None}
        return [placed(made, pair, i, dims, over=over) if dims else made for i in range(len(pair.whole.outvars))]

    return rule


def placed(
    made: Relation, pair: Pair, result: int, dims: set[tuple[int, int]], *, over: Kind | None = None
) -> Relation:
    """Returns the relation of a result with examples along the dim that those of the operands are, or what is reduced.

    Raises:
      Refused: they are along no dim of the result, or along several.
    """
    known = dim_map(pair.whole, result)
    # Zeros of each example, added to a sum over them, are that sum: of no dim.
    check(made.kind in (Kind.ROWS, Kind.POSITIONS) and known == dim_map(pair.part, result))
    if over is not None and any(dims == {*group} for group in known.reduced):
        return dataclasses.replace(made, kind=over, dim=None)
    found = [i for i, group in enumerate(known.kept) if dims == {*group}]
    check(len(found) == 1)
    return made.at(*found)


def _of_booleans(over: Kind) -> Rule:
    """Returns the rule of a reduction that is an extremum of booleans, and of integers is that of their bits."""

    def rule(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
        is_bool = pair.whole.outvars[0].aval.dtype == bool
        return carried(applied, over=over if is_bool else None)(pair, inputs)

    return rule


def _elements(inputs: Sequence[Relation]) -> Relation:
    return inputs[0].of_elements()


def _linear(inputs: Sequence[Relation]) -> Relation:
    check(inputs[0].kind in (Kind.SAME, Kind.ROWS, Kind.SUM))
    return inputs[0].of_elements()


def _at_index(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    """A part from where scalars say, which are the same for all examples."""
    x, *starts = inputs
    check(all(start.kind is Kind.SAME and start.is_plain for start in starts))
    return carried(_elements)(pair, [x])


def _updated(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    x, update, *starts = inputs
    check(all(start.kind is Kind.SAME and start.is_plain for start in starts))
    return carried(all_joined)(pair, [x, update])


def _product(inputs: Sequence[Relation]) -> Relation:
    return multiplied(*inputs)


def _convolution(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    x, kernel = inputs
    whole, part = (eqn.params["feature_group_count"] for eqn in (pair.whole, pair.part))
    if whole == part:
        check(kernel.kind is Kind.SAME)
        return carried(_product)(pair, inputs)
    # A kernel for each example, as `vmap` makes it: examples are groups of features, each as large as in a part.
    numbers = pair.params["dimension_numbers"]
    features, kernels = numbers.lhs_spec[1], numbers.rhs_spec[0]
    for i, x_or_kernel, dim in ((0, x, features), (1, kernel, kernels)):
        sizes = [shape[dim] for shape in pair.shapes(i)]
        check(x_or_kernel.kind is Kind.ROWS and x_or_kernel.dim == dim and sizes[0] * part == sizes[1] * whole)
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
    return [dataclasses.replace(x, kind=Kind.ROWS, dim=grows)]


def _reshape(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    x, grows = inputs[0], pair.growing()
    if x.dim is None or grows is None:
        check(grows is None and x.dim is None)
        return [x]
    known = dim_map(pair.whole)  # on a part a dim of one example has no place
    check(grows == (known.block((0, x.dim)) if x.kind is Kind.ROWS else known.to((0, x.dim))))
    return [x.at(grows)]


def _concatenate(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    along = pair.params["dimension"]
    check(all(x.dim != along for x in inputs))
    if any(x.kind is Kind.POSITIONS for x in inputs):
        ones = all(pair.shapes(i)[0][along] == 1 for i in range(len(inputs)))
        check(ones and along == len(pair.results()[0]) - 1, "placed")
        return [Relation(kind=Kind.COLUMNS, columns=tuple(inputs))]
    return carried(all_joined)(pair, inputs)


def _iota(pair: Pair, _: Sequence[Relation]) -> list[Relation]:
    grows = pair.growing()
    if grows is None:
        return [SAME]
    is_count = grows == pair.params["dimension"]
    return [Relation(kind=Kind.POSITIONS if is_count else Kind.ROWS, dim=grows)]


def _random(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    """Draws: what is drawn for examples is each one's own, however many there are.

    The numbers themselves differ from one part to the next; they are as random.
    """
    keys = [rows(x.dim) if x.kind is Kind.POSITIONS and x.dim is not None else x for x in inputs]
    x, results = applied(keys), []
    for i in range(len(pair.whole.outvars)):
        grows = [d for d, (a, b) in enumerate(zip(*pair.results(i), strict=True)) if a != b]
        check(len(grows) <= 1 and (x.kind is Kind.SAME or grows == [x.dim]))
        results.append(rows(grows[0]) if grows else SAME)
    return results


# Parameters that may differ between the whole and a part, because a rule compares them or results are compared.
SIZED = {
    "broadcast_in_dim": {"shape"},
    "iota": {"shape"},
    "empty": {"shape"},
    "reshape": {"new_sizes"},
    "random_bits": {"shape"},
    "random_split": {"shape"},
    "rng_bit_generator": {"shape"},
    "slice": {"limit_indices"},
    "conv_general_dilated": {"feature_group_count"},
    "dynamic_slice": {"slice_sizes"},
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
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "concatenate": _concatenate,
    "iota": _iota,
    "platform_index": lambda pair, inputs: [SAME],  # of `lax.platform_dependent`, as in `jnp.diagonal`
    **dict.fromkeys(
        "random_bits random_split random_fold_in random_wrap random_unwrap random_seed random_clone random_gamma "
        "rng_bit_generator".split(),
        _random,
    ),
    "dynamic_slice": _at_index,
    "dynamic_update_slice": _updated,
    "reduce_or": _of_booleans(Kind.MAX),
    "reduce_and": _of_booleans(Kind.MIN),
    "conv_general_dilated": _convolution,
    **lookups.RULES,
}


def by_record(known: Primitive) -> Rule:
    """Returns the rule that follows from what is known of a primitive."""
    if known.kind in ("copy", "cast", "place"):
        return lambda pair, inputs: list(inputs[: len(pair.whole.outvars)])
    combine = {"shape": lambda inputs: inputs[0], "part": _elements, "order": _elements}.get(
        known.kind, _COMBINE[known.linear]
    )
    return carried(combine, over=_OVER.get(known.reduces))


@functools.cache
def rule_of(name: str) -> Rule | None:
    """Returns the rule of a primitive; None if it is not known."""
    known = known_primitives().get(name)
    return _OWN.get(name) or (by_record(known) if known else None)
