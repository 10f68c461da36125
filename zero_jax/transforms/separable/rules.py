"""What single primitives make of the relations of their inputs: exact, or refused.

A primitive without a rule may mix examples. That a primitive keeps shapes says nothing about it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from zero_jax.transforms.passthrough import ELEMENTWISE, is_float
from zero_jax.transforms.separable import lookups as relation_lookups
from zero_jax.transforms.separable import reductions as relation_reductions
from zero_jax.transforms.separable.pair import Pair, Rule, check, without_dims
from zero_jax.transforms.separable.relations import (
    SAME,
    Kind,
    Relation,
    all_joined,
    applied,
    bounded,
    divided,
    joined,
    multiplied,
    rows,
)


def _elementwise(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    del pair
    return [applied(inputs)]


def _same_value(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    del pair
    return list(inputs)


def _cast(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    (x,) = inputs
    before, after = pair.whole.invars[0].aval.dtype, pair.whole.outvars[0].aval.dtype
    grows = before.kind in "biu" and after.kind in "iu" and after.itemsize >= before.itemsize
    return [x if is_float(pair.whole.outvars[0].aval) or grows else applied(inputs)]


def _negated(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    del pair
    check(inputs[0].kind in (Kind.SAME, Kind.ROWS, Kind.SUM))
    return [inputs[0].of_elements()]


def _added(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    del pair
    return [joined(*inputs)]


def _multiplied(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    is_number = pair.whole.outvars[0].aval.dtype != bool
    return [multiplied(*inputs) if is_number else applied(inputs)]


def _divided(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    return [divided(*inputs) if is_float(pair.whole.outvars[0].aval) else applied(inputs)]


def _largest(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    del pair
    return [bounded(inputs)]


def _less(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    del pair
    x, limit = inputs
    if x.kind is Kind.POSITIONS and limit.number == 0:  # as indices are compared that may count from the end
        return [Relation(kind=Kind.ROWS, dim=x.dim, is_false=True)]
    return [applied(inputs)]


def _select(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    del pair
    which, *cases = inputs
    if which.is_false:
        return [cases[0]]
    check(which.is_plain)
    chosen = all_joined(cases)
    if which.kind is Kind.SAME:
        return [chosen]
    check(chosen.kind is Kind.SAME or (chosen.kind is Kind.ROWS and chosen.dim == which.dim))
    return [dataclasses.replace(chosen, kind=Kind.ROWS, dim=which.dim)]


# Shapes.


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
    check(pair.params.get("dimensions") is None)
    if x.dim is None or grows is None:
        check(grows is None and x.dim is None)
        return [x]
    # A block of examples is one of the result where as much is before their dim.
    outer = np.prod(pair.shapes(0)[0][: x.dim], dtype=int), np.prod(pair.results()[0][:grows], dtype=int)
    check(outer[0] == outer[1])
    inner = np.prod(pair.shapes(0)[0][x.dim + 1 :], dtype=int), np.prod(pair.results()[0][grows + 1 :], dtype=int)
    check(x.kind is Kind.ROWS or inner[0] == inner[1] == 1)
    return [x.at(grows)]


def _transpose(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    x = inputs[0]
    return [x if x.dim is None else x.at(list(pair.params["permutation"]).index(x.dim))]


def _squeeze(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    x = inputs[0]
    return [without_dims(x, [i % len(pair.shapes(0)[0]) for i in pair.params["dimensions"]])]


def _reversed(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    check(inputs[0].dim not in pair.params["dimensions"])
    return [inputs[0].of_elements()]


def _slice(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    x = inputs[0]
    if x.dim is not None:
        sizes, (whole, part) = pair.params["limit_indices"], pair.shapes(0)
        strides = pair.params["strides"] or [1] * len(sizes)
        full = sizes[x.dim] == whole[x.dim] and pair.part.params["limit_indices"][x.dim] == part[x.dim]
        check(full and pair.params["start_indices"][x.dim] == 0 and strides[x.dim] == 1)
    return [x.of_elements()]


def _pad(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    x, value = inputs
    check(x.dim is None or pair.params["padding_config"][x.dim] == (0, 0, 0))
    return [joined(x, value)]


def _concatenate(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    along = pair.params["dimension"]
    check(all(x.dim != along for x in inputs))
    if any(x.kind is Kind.POSITIONS for x in inputs):
        ones = all(pair.shapes(i)[0][along] == 1 for i in range(len(inputs)))
        check(ones and along == len(pair.results()[0]) - 1, "placed")
        return [Relation(kind=Kind.COLUMNS, columns=tuple(inputs))]
    return [all_joined(inputs)]


def _split(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    check(inputs[0].dim != pair.params["axis"])
    return [inputs[0].of_elements()] * len(pair.whole.outvars)


def _stack(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    x, axis = all_joined(inputs), pair.params["axis"]
    return [x if x.dim is None else x.at(x.dim + (x.dim >= axis))]


def _unstack(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    return [without_dims(inputs[0].of_elements(), [pair.params["axis"]])] * len(pair.whole.outvars)


def _tile(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    (x,) = inputs
    check(x.dim is None or pair.params["reps"][x.dim] == 1)
    return [x.of_elements()]


def _dynamic_slice(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    x, *starts = inputs
    check(all(start.kind is Kind.SAME and start.is_plain for start in starts))
    if x.dim is not None:
        taken = pair.params["slice_sizes"][x.dim], pair.part.params["slice_sizes"][x.dim]
        check(taken == tuple(shape[x.dim] for shape in pair.shapes(0)))
    return [x.of_elements()]


def _dynamic_update_slice(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    x, update, *starts = inputs
    check(all(start.kind is Kind.SAME and start.is_plain for start in starts))
    result = joined(x, update)
    if result.dim is not None:
        check(all(a[result.dim] == b[result.dim] for a, b in zip(pair.shapes(0), pair.shapes(1), strict=True)))
    return [result]


def _iota(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    del inputs
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
    "dynamic_slice": {"slice_sizes"},
    "gather": {"slice_sizes"},
    **{name: {"update_jaxpr"} for name in relation_lookups.SCATTERS},
}
# Values in another place, whatever the parameters say.
PLACES = frozenset(
    "device_put pvary sharding_constraint reshard zero_reshard zero_order zero_join optimization_barrier".split()
)
# Values, whatever their relation, under another dtype, shape or placement.
KEEPS = PLACES | frozenset(
    "copy name reduce_precision stop_gradient convert_element_type reshape squeeze broadcast_in_dim transpose".split()
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(KEEPS, _same_value),
    "zero_join": lambda pair, inputs: [inputs[0]],
    "convert_element_type": _cast,
    "bitcast_convert_type": _elementwise,
    "neg": _negated,
    "real": _negated,
    "imag": _negated,
    **dict.fromkeys(("add", "sub", "add_any"), _added),
    "mul": _multiplied,
    "div": _divided,
    "max": _largest,
    "lt": _less,
    "select_n": _select,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "rev": _reversed,
    "slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "iota": _iota,
    **dict.fromkeys(
        "random_bits random_split random_fold_in random_wrap random_unwrap random_seed random_clone random_gamma "
        "rng_bit_generator".split(),
        _random,
    ),
    **relation_reductions.RULES,
    **relation_lookups.RULES,
}
