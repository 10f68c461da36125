"""The only tables of primitives: what each does with the dims of its operands, and what kind of operation it is.

A new primitive of JAX is entered in `_TABLE`, and nowhere else. One without an entry is not known: it may mix examples,
and estimates say that they know nothing of it. Equations that run jaxprs are in `program.subcalls`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from zero_jax.dims.dim_map import Dim, DimMap, reshape_groups
from zero_jax.program.jaxprs import is_literal
from zero_jax.program.subcalls import equations, equations_of, subcall

Rule = Callable[[Any, int], DimMap]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Primitive:
    """What is known of a primitive."""

    kind: str  # the kind of operation, of which the sets below are made (`MOVES` and others)
    dims: Rule  # from an equation and the number of a result to the dims that it keeps, reduces or moves
    # "first" if it is linear in the first operand, "all" if in all of them together, "product" if in each of two;
    # operands that are indices are left aside. Empty if it is not, or nobody asked.
    linear: str = ""
    reduces: str = ""  # what it makes of the dims that it reduces, where that is a "sum", the "max" or the "min"
    increases: bool = False  # whether it is increasing in one operand


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())  # a token has none


def _num_dims(atom: Any) -> int:
    return len(_shape(atom))


def _of_all(eqn: Any, places: Sequence[int | None], **reduced: Any) -> DimMap:
    """Maps dims that all operands have, but scalars: for each dim of the result the number of theirs."""
    full = [i for i, atom in enumerate(eqn.invars) if _num_dims(atom) == _num_dims(eqn.invars[0])]
    return DimMap(tuple(() if at is None else tuple((i, at) for i in full) for at in places), **reduced)


def _of_first(places: Sequence[int | None]) -> DimMap:
    """Maps dims of the first operand: for each dim of the result the number of its own."""
    return DimMap(tuple(() if at is None else ((0, at),) for at in places))


def _elementwise(eqn: Any, _: int) -> DimMap:
    """Operands of the rank of the result; dims of size 1 among them may be broadcast."""
    shape = _shape(eqn.outvars[0])
    shapes = [(i, _shape(x)) for i, x in enumerate(eqn.invars) if _num_dims(x) == len(shape)]
    return DimMap(tuple(tuple((i, at) for i, x in shapes if x[at] == size) for at, size in enumerate(shape)))


def _as_they_are(eqn: Any, result: int) -> DimMap:
    """Values as they are."""
    return DimMap(tuple(((result, dim),) for dim in range(_num_dims(eqn.outvars[result]))))


def _bits(eqn: Any, result: int) -> DimMap:
    """Elements of another width: the dim that is split or merged is the last."""
    before, after = _num_dims(eqn.invars[0]), _num_dims(eqn.outvars[result])
    return _of_first([dim if dim < min(before, after) else None for dim in range(after)])


def _reshaped(eqn: Any, result: int) -> DimMap:
    """A dim of a run of its own maps to one; an equal block of the major dim of a run is a block of the entire run."""
    old, new = eqn.invars[0].aval.shape, eqn.outvars[result].aval.shape
    order = eqn.params.get("dimensions") or range(len(old))  # the operand is transposed first
    old = [old[i] for i in order]
    kept, blocks = (list[tuple[Dim, ...]]([()] * len(new)) for _ in range(2))
    for before, after in reshape_groups(old, new) if math.prod(old) else ():
        sources, targets = [i for i in before if old[i] > 1], [i for i in after if new[i] > 1]
        if sources and targets:
            blocks[targets[0]] = ((0, order[sources[0]]),)
            if len(sources) == len(targets) == 1:
                kept[targets[0]] = blocks[targets[0]]
    return DimMap(tuple(kept), blocks=tuple(blocks))


def _broadcast(eqn: Any, _: int) -> DimMap:
    before, after = (x.aval.shape for x in (eqn.invars[0], eqn.outvars[0]))
    places = {to: i for i, to in enumerate(eqn.params["broadcast_dimensions"]) if before[i] == after[to]}
    return _of_first([places.get(to) for to in range(len(after))])


def _resized(eqn: Any, result: int) -> DimMap:
    """A part: of a dim that keeps its size it takes everything, as it is."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[result].aval.shape
    return _of_first([i if size == after[i] else None for i, size in enumerate(before)])


def _padded(eqn: Any, _: int) -> DimMap:
    return _of_first(
        [i if tuple(padding) == (0, 0, 0) else None for i, padding in enumerate(eqn.params["padding_config"])]
    )


def _updated(eqn: Any, _: int) -> DimMap:
    """An update in place: of a dim that the update has whole, each place is updated by itself."""
    sizes = zip(eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, strict=True)
    return DimMap(tuple(((0, i), (1, i)) if old == new else () for i, (old, new) in enumerate(sizes)))


def _but(name: str, *, drops: bool = False, reduces: bool = False) -> Rule:
    """Each dim but one or some, by a parameter, which is the last dim without it: the result may lack these."""

    def rule(eqn: Any, _: int) -> DimMap:
        num_dims, along = _num_dims(eqn.invars[0]), eqn.params.get(name, -1)
        gone = [dim % num_dims for dim in (along if isinstance(along, (tuple, list)) else (along,))]
        rest = [None if dim in gone else dim for dim in range(num_dims) if dim not in gone or not (drops or reduces)]
        full = [i for i, atom in enumerate(eqn.invars) if _num_dims(atom) == num_dims]
        return _of_all(eqn, rest, reduced=tuple(tuple((i, dim) for i in full) for dim in gone if reduces))

    return rule


def _stacked(eqn: Any, _: int) -> DimMap:
    dims: list[int | None] = [*range(_num_dims(eqn.invars[0]))]
    dims.insert(eqn.params["axis"], None)
    return _of_all(eqn, dims)


def _windowed(eqn: Any, _: int) -> DimMap:
    """Windows of one element leave a dim as it is."""
    sizes = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    settings = [eqn.params[name] for name in sizes if name in eqn.params]
    places = [
        dim if tuple(padding) == (0, 0) and all(setting[dim] == 1 for setting in settings) else None
        for dim, padding in enumerate(eqn.params["padding"])
    ]
    return _of_all(eqn, places)


def _leading(*own: int) -> Rule:
    """Linear algebra on the last dims, so many `own` ones of each operand, for each place along those before."""

    def rule(eqn: Any, result: int) -> DimMap:
        operands, num_dims = range(len(eqn.invars)), _num_dims(eqn.outvars[result])
        ahead = {_num_dims(x) - own[min(i, len(own) - 1)] for i, x in enumerate(eqn.invars)}
        num = ahead.pop() if len(ahead) == 1 else 0
        return DimMap(tuple(tuple((i, dim) for i in operands) if dim < num else () for dim in range(num_dims)))

    return rule


def _triangular_solve(eqn: Any, result: int) -> DimMap:
    """Each column of the right side by itself, or each row."""
    kept, num_dims = list(_leading(2)(eqn, result).kept), _num_dims(eqn.invars[1])
    column = num_dims - (1 if eqn.params["left_side"] else 2)
    kept[column] = ((1, column),)
    return DimMap(tuple(kept))


def _attention(eqn: Any, result: int) -> DimMap:
    """Fused attention: the leading dim of all operands is that of the examples."""
    rest = ((),) * (_num_dims(eqn.outvars[result]) - 1)
    return DimMap((tuple((i, 0) for i in range(len(eqn.invars))), *rest))


def _dot(eqn: Any, _: int) -> DimMap:
    contract, batch = (list(zip(*pair, strict=True)) for pair in eqn.params["dimension_numbers"])
    pairs = lambda dims: [((0, i), (1, j)) for i, j in dims]  # noqa: E731
    paired = {dim for pair in pairs([*contract, *batch]) for dim in pair}
    free = [((i, dim),) for i in (0, 1) for dim in range(_num_dims(eqn.invars[i])) if (i, dim) not in paired]
    return DimMap((*pairs(batch), *free), tuple(pairs(contract)))  # batch dims, the left's other dims, the right's


def _sparse_dot(eqn: Any, _: int) -> DimMap:
    """A product of a sparse array by its values and their indices: of its dims, those that both have come first."""
    (gone, contracted), (mapped, along) = eqn.params["dimension_numbers"]
    shape, num_mapped = eqn.params["lhs_spinfo"].shape, _num_dims(eqn.invars[1]) - 2

    def of_sparse(dim: int) -> tuple[Dim, ...]:
        return tuple((i, dim) for i in (0, 1) if dim < num_mapped and _shape(eqn.invars[i])[dim] == shape[dim])

    free = [of_sparse(dim) for dim in range(len(shape)) if dim not in (*gone, *mapped)]
    rest = [((2, dim),) for dim in range(_num_dims(eqn.invars[2])) if dim not in (*contracted, *along)]
    pairs = [(*of_sparse(i), (2, j)) for i, j in zip(mapped, along, strict=True)]
    return DimMap((*pairs, *free, *rest))


def _convolution(eqn: Any, _: int) -> DimMap:
    numbers = eqn.params["dimension_numbers"]
    kept: list[tuple[Dim, ...]] = [()] * _num_dims(eqn.outvars[0])
    (examples, feature), (out, into) = numbers.lhs_spec[:2], numbers.rhs_spec[:2]
    groups, batch_groups = eqn.params["feature_group_count"], eqn.params["batch_group_count"]
    if batch_groups == 1:
        kept[numbers.out_spec[0]] = ((0, examples),)
    if groups == batch_groups == 1:
        kept[numbers.out_spec[1]] = ((1, out),)
    return DimMap(tuple(kept), (((0, feature), (1, into)),) if groups == 1 else ())


def _gather(eqn: Any, _: int) -> DimMap:
    """A lookup: the dims of the indices, and those of the table of which each slice has everything."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    pairs = zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    of_table = {place: ((0, dim),) for place, dim in pairs}
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    windows = iter([dim for dim in range(len(sizes)) if dim not in gone])
    # The last dim of the indices has the numbers of one place; the others are dims of the result.
    places, kept = iter(range(_num_dims(eqn.invars[1]) - 1)), list[tuple[Dim, ...]]()
    for i in range(_num_dims(eqn.outvars[0])):
        if i in numbers.offset_dims:
            dim = next(windows)
            kept.append(((0, dim),) if sizes[dim] == eqn.invars[0].aval.shape[dim] else ())
        else:
            place = next(places)
            kept.append(((1, place), *of_table.get(place, ())))
    return DimMap(tuple(kept))


def _scatter(eqn: Any, _: int) -> DimMap:
    """A write: dims of which each update has everything, and those that indices and updates have, too."""
    numbers, (shape, _, updates) = eqn.params["dimension_numbers"], (atom.aval.shape for atom in eqn.invars)
    windows, places = iter(numbers.update_window_dims), [*range(len(updates))]
    places = [dim for dim in places if dim not in numbers.update_window_dims]
    pairs = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    batched, kept = {dim: ((0, dim), (1, at), (2, places[at])) for dim, at in pairs}, list[tuple[Dim, ...]]()
    for dim, size in enumerate(shape):
        if dim in batched or dim in numbers.inserted_window_dims:
            kept.append(batched.get(dim, ()))
        else:
            window = next(windows)
            kept.append(((0, dim), (2, window)) if updates[window] == size else ())
    return DimMap(tuple(kept))


def _each(names: str, kind: str, dims: Rule, **rest: Any) -> dict[str, Primitive]:
    return dict.fromkeys(names.split(), Primitive(kind=kind, dims=dims, **rest))


# `log2` and `one_minus_square` are primitives of JAX 0.12 and not of 0.10.
_TABLE: dict[str, Primitive] = {
    # A function of the elements at one place.
    **_each(
        "abs acos acosh and asin atan2 atanh bessel_i0e bessel_i1e clamp clz complex conj cos cosh digamma div eq "
        "eq_to erf_inv erfc ge gt igamma igamma_grad_a igammac integer_pow is_finite le le_to lgamma log2 lt lt_to max "
        "min mulhi ne nextafter not one_minus_square or polygamma population_count pow regularized_incomplete_beta rem "
        "rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sin square tan threefry2x32 xor zeta",
        "elementwise",
        _elementwise,
    ),
    **_each(
        "asinh atan cbrt ceil erf exp exp2 expm1 floor log log1p logistic round sign sinh sqrt tanh",
        "elementwise",
        _elementwise,
        increases=True,
    ),
    "select_if_vmap": Primitive(kind="elementwise", dims=_elementwise),  # of Equinox's loops: the first of two values
    **_each("imag neg real", "elementwise", _elementwise, linear="first"),
    **_each("add add_any sub", "elementwise", _elementwise, linear="all"),
    "mul": Primitive(kind="elementwise", dims=_elementwise, linear="product"),
    "bitcast_convert_type": Primitive(kind="bits", dims=_bits),
    # The same values: with another name, in another place, or in another dtype.
    **_each("copy name stop_gradient", "copy", _as_they_are, linear="first"),
    **_each(
        "device_put optimization_barrier pvary reshard sharding_constraint zero_order zero_reshard zero_rows "
        "zero_scattered",
        "place",
        _as_they_are,
    ),
    "zero_join": Primitive(kind="place", dims=_elementwise),
    **_each("convert_element_type reduce_precision", "cast", _elementwise, linear="first"),
    # All elements of the first operand in another shape.
    "broadcast_in_dim": Primitive(kind="broadcast", dims=_broadcast, linear="first"),
    "reshape": Primitive(kind="shape", dims=_reshaped, linear="first"),
    "squeeze": Primitive(kind="shape", dims=_but("dimensions", drops=True), linear="first"),
    "transpose": Primitive(kind="shape", dims=lambda eqn, _: _of_first(eqn.params["permutation"]), linear="first"),
    # Some of its elements, or all of them in another order or several times, or those of several operands.
    **_each("slice split", "part", _resized, linear="first"),
    "unstack": Primitive(kind="part", dims=_but("axis", drops=True), linear="first"),
    "rev": Primitive(kind="order", dims=_but("dimensions"), linear="first"),
    "tile": Primitive(kind="order", dims=_resized, linear="first"),
    "concatenate": Primitive(kind="join", dims=_but("dimension"), linear="all"),
    "stack": Primitive(kind="join", dims=_stacked, linear="all"),
    # By indices that are operands.
    "dynamic_slice": Primitive(kind="index", dims=_resized, linear="first"),
    "gather": Primitive(kind="index", dims=_gather, linear="first"),
    "dynamic_update_slice": Primitive(kind="update", dims=_updated, linear="all"),
    **_each("scatter scatter-add scatter-sub", "scatter", _scatter, linear="all"),
    **_each("scatter-mul scatter-min scatter-max", "scatter", _scatter),
    "pad": Primitive(kind="pad", dims=_padded, linear="all"),
    # Over dims, and along one.
    "reduce_sum": Primitive(kind="reduction", dims=_but("axes", reduces=True), linear="first", reduces="sum"),
    "reduce_max": Primitive(kind="reduction", dims=_but("axes", reduces=True), reduces="max"),
    "reduce_min": Primitive(kind="reduction", dims=_but("axes", reduces=True), reduces="min"),
    **_each("argmax argmin reduce_and reduce_or reduce_prod reduce_xor", "reduction", _but("axes", reduces=True)),
    "reduce": Primitive(kind="fold", dims=_but("dimensions", reduces=True)),
    "cumsum": Primitive(kind="cumulative", dims=_but("axis"), linear="first"),
    **_each("cumlogsumexp cummax cummin cumprod", "cumulative", _but("axis")),
    "sort": Primitive(kind="sort", dims=_but("dimension")),
    "top_k": Primitive(kind="sort", dims=_but("axis")),
    **_each(
        "reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add "
        "select_and_scatter_add",
        "window",
        _windowed,
    ),
    # Products and linear algebra: XLA's own instructions, and calls of libraries that it does not look into.
    "dot_general": Primitive(kind="product", dims=_dot, linear="product", reduces="sum"),
    "conv_general_dilated": Primitive(kind="product", dims=_convolution, linear="product", reduces="sum"),
    "bcoo_dot_general": Primitive(kind="algebra", dims=_sparse_dot),  # of jax.experimental.sparse
    "zero_attention": Primitive(kind="algebra", dims=_attention),
    "cholesky": Primitive(kind="algebra", dims=_leading(2)),
    "triangular_solve": Primitive(kind="algebra", dims=_triangular_solve),
    "fft": Primitive(kind="algebra", dims=lambda eqn, i: _leading(len(eqn.params["fft_lengths"]))(eqn, i)),
    "approx_top_k": Primitive(kind="library", dims=_but("reduction_dimension")),
    **_each("eig eigh geqrf hessenberg lu qr schur svd symmetric_product tridiagonal", "factorization", _leading(2)),
    "householder_product": Primitive(kind="factorization", dims=_leading(2, 1)),
    "tridiagonal_solve": Primitive(kind="factorization", dims=_leading(1, 1, 1, 2)),
    "lu_pivots_to_permutation": Primitive(kind="library", dims=_leading(1)),
}


def _named(*kinds: str) -> frozenset[str]:
    return frozenset(name for name, primitive in _TABLE.items() if primitive.kind in kinds)


ELEMENTWISE = _named("elementwise", "copy", "cast")
REDUCTIONS, CUMULATIVE, SCATTERS = _named("reduction"), _named("cumulative"), _named("scatter")
FACTORIZATIONS = _named("factorization") | {"cholesky", "fft", "triangular_solve"}
# The operands themselves: as they are, in another place, under another dtype, or in another shape.
COPIES, PLACES, CASTS, SHAPES = _named("copy"), _named("place"), _named("cast"), _named("shape")
SAME_ELEMENTS = _named("copy", "cast", "shape", "broadcast")
ALIASES = COPIES | SHAPES | {"optimization_barrier", "zero_order"}  # the same bytes
# What only moves elements of the first operand, some of them by indices that are operands; or those of all operands.
MOVES, JOINS = _named("shape", "broadcast", "part", "order", "index"), _named("join")
PARTS, BY_INDEX = _named("part", "index"), _named("index")


def dim_map(eqn: Any, result: int = 0) -> DimMap:
    """Returns which dims of a result of an equation are dims of its operands: none, if its primitive is not known."""
    known = _TABLE.get(eqn.primitive.name)
    return known.dims(eqn, result) if known else DimMap(((),) * _num_dims(eqn.outvars[result]))


def known_primitives() -> Mapping[str, Primitive]:
    """Returns what is known of each primitive that has an entry."""
    return _TABLE


def is_contraction(eqn: Any) -> bool:
    """Tells whether an equation multiplies matrices."""
    return eqn.primitive.name in ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot")


def narrows(eqn: Any) -> bool:
    """Tells whether an equation takes a part of its first input, as indexing a stacked param by layer does."""
    taken = eqn.primitive.name in ("dynamic_slice", "gather", "slice")
    return taken and eqn.outvars[0].aval.size < eqn.invars[0].aval.size


def is_float(aval: Any) -> bool:
    """Tells whether an abstract value can have a gradient; a token has no dtype."""
    return hasattr(aval, "dtype") and _is_inexact(aval.dtype)


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, jax.numpy.inexact)


def moves_elements(eqn: Any) -> bool:
    """Tells whether an equation only casts, takes or moves the elements of its first input: next to no work."""
    return is_made_of(eqn, MOVES | CASTS)


def is_made_of(eqn: Any, names: Collection[str]) -> bool:
    """Tells whether an equation is of some primitives, or a call of equations that are."""
    inner = ((each, subcall(each)) for each in equations_of(eqn))
    return all(each.primitive.name in names or (sub is not None and sub.kind in _OF_ELEMENTS) for each, sub in inner)


def is_activation(eqn: Any) -> bool:
    """Tells whether a call computes one value, element by element, of another, as `jax.nn.silu` does."""
    sub, arrays = subcall(eqn), [atom for atom in eqn.invars if not is_literal(atom)]
    if sub is None or sub.kind not in _OF_ELEMENTS or not len(arrays) == len(eqn.outvars) == 1:
        return False
    shapes = {_shape(x) for each in (eqn, *equations(sub.jaxpr)) for x in each.outvars} - {()}
    return shapes == {_shape(arrays[0])} and all(map(_is_of_elements, equations(sub.jaxpr)))


_OF_ELEMENTS = ("call", "custom_jvp")


def _is_of_elements(eqn: Any) -> bool:
    if (sub := subcall(eqn)) is not None:
        return sub.kind in _OF_ELEMENTS
    return eqn.primitive.name in ELEMENTWISE or (eqn.primitive.name == "broadcast_in_dim" and not _shape(eqn.invars[0]))
