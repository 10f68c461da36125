"""Which dims of an operation's results are which dims of its operands: exact, or nothing is said.

A dim of a result is one of an operand if the operation is the same function at each place along it, of what the operand
has at that place, as if mapped over by `jax.vmap`; operands without such a dim enter whole. Shardings of params,
estimates of shardings, where examples are, and whether they are mixed: all follow dims by this one table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from zero_jax.sharding.spec import Dims

# `log2` and `one_minus_square` are primitives of JAX 0.12 and not of 0.10.
ELEMENTWISE = frozenset(
    "abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj copy "
    "cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag "
    "integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi name ne neg nextafter "
    "not one_minus_square or polygamma population_count pow real reduce_precision regularized_incomplete_beta rem "
    "round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor zeta".split()
)
REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split())
CUMULATIVE = frozenset("cumsum cumprod cummax cummin cumlogsumexp".split())

Dim = tuple[int, int]  # the number of an operand, and of its dim


@dataclasses.dataclass(frozen=True)
class DimMap:
    """The dims of a result and those of the operands.

    Attributes:
      kept: for each dim of the result, the dims of operands that it is.
      reduced: dims of operands that the result is a sum over (or another reduction, as the primitive is), those that
        are summed over together in one tuple.
    """

    kept: tuple[tuple[Dim, ...], ...]
    reduced: tuple[tuple[Dim, ...], ...] = ()

    def to(self, dim: Dim) -> int | None:
        """Returns the dim of the result that a dim of an operand is; None if it is none."""
        return next((i for i, dims in enumerate(self.kept) if dim in dims), None)

    def carry(self, dims_in: Sequence[Dims | None]) -> Dims:
        """Returns the mesh axes of the dims of the result: those of the operand that has most."""
        return tuple(_axes(dims, dims_in) for dims in self.kept)

    def reduced_axes(self, dims_in: Sequence[Dims | None]) -> tuple[str, ...]:
        """Returns the mesh axes of the dims that are reduced."""
        return tuple(dict.fromkeys(axis for dims in self.reduced for axis in _axes(dims, dims_in)))


def dim_map(eqn: Any, result: int = 0) -> DimMap:
    """Returns which dims of a result of an equation are dims of its operands.

    Raises:
      KeyError: the primitive has no rule.
    """
    return _RULES[eqn.primitive.name](eqn, result)


def reshape_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Splits the dims of both shapes of a reshape into the shortest runs with equal products."""
    groups, i, j = [], 0, 0
    while i < len(old) and j < len(new):
        start, (left, right) = (i, j), (old[i], new[j])
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        groups.append(([*range(start[0], i)], [*range(start[1], j)]))
    rest = [*range(i, len(old))], [*range(j, len(new))]
    return [*groups, rest] if any(rest) else groups


def reshape_blocks(old: Sequence[int], new: Sequence[int]) -> dict[int, int]:
    """Returns the dims whose blocks a reshape leaves as blocks, and which dims of the result these are blocks of.

    They are the major ones of the runs of `reshape_groups`: a block of such a dim is one of the entire run.
    """
    majors = ([next((i for i in run if shape[i] > 1), None) for run, shape in zip(runs, (old, new), strict=True)]
              for runs in reshape_groups(old, new))  # fmt: skip
    return {i: j for i, j in majors if i is not None and j is not None}


def _axes(dims: Sequence[Dim], dims_in: Sequence[Dims | None]) -> tuple[str, ...]:
    known = ((dims_in[i], dim) for i, dim in dims)
    return max((axes[dim] for axes, dim in known if axes is not None), key=len, default=())


def _num_dims(atom: Any) -> int:
    return len(getattr(atom.aval, "shape", ()))


def _of_all(eqn: Any, places: Sequence[int | None], **reduced: Any) -> DimMap:
    """Maps dims that all operands have, but scalars: for each dim of the result the number of theirs."""
    full = [i for i, atom in enumerate(eqn.invars) if _num_dims(atom) == _num_dims(eqn.invars[0])]
    return DimMap(tuple(() if at is None else tuple((i, at) for i in full) for at in places), **reduced)


def _of_first(places: Sequence[int | None]) -> DimMap:
    """Maps dims of the first operand: for each dim of the result the number of its own."""
    return DimMap(tuple(() if at is None else ((0, at),) for at in places))


def _elementwise(eqn: Any, result: int) -> DimMap:
    """Operands of the rank of the result; dims of size 1 among them may be broadcast."""
    del result
    shape = getattr(eqn.outvars[0].aval, "shape", ())
    shapes = [(i, x.aval.shape) for i, x in enumerate(eqn.invars) if _num_dims(x) == len(shape)]
    return DimMap(tuple(tuple((i, at) for i, x in shapes if x[at] == size) for at, size in enumerate(shape)))


def _each_its_own(eqn: Any, result: int) -> DimMap:
    """Values as they are."""
    return DimMap(tuple(((result, dim),) for dim in range(_num_dims(eqn.outvars[result]))))


def _transpose(eqn: Any, result: int) -> DimMap:
    del result
    return _of_first(eqn.params["permutation"])


def _broadcast(eqn: Any, result: int) -> DimMap:
    del result
    before, after = (x.aval.shape for x in (eqn.invars[0], eqn.outvars[0]))
    places = {to: i for i, to in enumerate(eqn.params["broadcast_dimensions"]) if before[i] == after[to]}
    return _of_first([places.get(to) for to in range(len(after))])


def _whole(eqn: Any, result: int) -> DimMap:
    """A part: of a dim that keeps its size it takes everything, as it is."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[result].aval.shape
    return _of_first([i if size == after[i] else None for i, size in enumerate(before)])


def _pad(eqn: Any, result: int) -> DimMap:
    del result
    return _of_first(
        [i if tuple(padding) == (0, 0, 0) else None for i, padding in enumerate(eqn.params["padding_config"])]
    )


def _update(eqn: Any, result: int) -> DimMap:
    """An update in place: of a dim that the update has whole, each place is updated by itself."""
    del result
    sizes = zip(eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, strict=True)
    return DimMap(tuple(((0, i), (1, i)) if old == new else () for i, (old, new) in enumerate(sizes)))


def _but(name: str, default: int = -1) -> Callable[[Any, int], DimMap]:
    """Each dim but one, or some, by a parameter."""

    def rule(eqn: Any, result: int) -> DimMap:
        del result
        num_dims, along = _num_dims(eqn.invars[0]), eqn.params.get(name, default)
        gone = {dim % num_dims for dim in (along if isinstance(along, (tuple, list)) else (along,))}
        return _of_all(eqn, [None if dim in gone else dim for dim in range(num_dims)])

    return rule


def _without(name: str) -> Callable[[Any, int], DimMap]:
    """The result lacks the dims of a parameter; a reduction is over these."""

    def rule(eqn: Any, result: int) -> DimMap:
        del result
        num_dims, along = _num_dims(eqn.invars[0]), eqn.params[name]
        gone = [dim % num_dims for dim in (along if isinstance(along, (tuple, list)) else (along,))]
        reduces = eqn.primitive.name.startswith(("reduce", "arg"))
        full = [i for i, atom in enumerate(eqn.invars) if _num_dims(atom) == num_dims]
        groups = tuple(tuple((i, dim) for i in full) for dim in gone) if reduces else ()
        return _of_all(eqn, [dim for dim in range(num_dims) if dim not in gone], reduced=groups)

    return rule


def _stack(eqn: Any, result: int) -> DimMap:
    del result
    dims: list[int | None] = [*range(_num_dims(eqn.invars[0]))]
    dims.insert(eqn.params["axis"], None)
    return _of_all(eqn, dims)


def _window(eqn: Any, result: int) -> DimMap:
    """Windows of one element leave a dim as it is."""
    del result
    sizes = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    settings = [eqn.params[name] for name in sizes if name in eqn.params]
    places = [
        dim if tuple(padding) == (0, 0) and all(setting[dim] == 1 for setting in settings) else None
        for dim, padding in enumerate(eqn.params["padding"])
    ]
    return _of_all(eqn, places)


def _leading(*own: int) -> Callable[[Any, int], DimMap]:
    """Linear algebra on the last dims, so many `own` ones of each operand, for each place along those before."""

    def rule(eqn: Any, result: int) -> DimMap:
        operands, num_dims = range(len(eqn.invars)), _num_dims(eqn.outvars[result])
        ahead = {_num_dims(x) - own[min(i, len(own) - 1)] for i, x in enumerate(eqn.invars)}
        num = ahead.pop() if len(ahead) == 1 else 0
        return DimMap(tuple(tuple((i, dim) for i in operands) if dim < num else () for dim in range(num_dims)))

    return rule


def _fft(eqn: Any, result: int) -> DimMap:
    return _leading(len(eqn.params["fft_lengths"]))(eqn, result)


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


def _dot(eqn: Any, result: int) -> DimMap:
    del result
    contract, batch = (list(zip(*pair, strict=True)) for pair in eqn.params["dimension_numbers"])
    pairs = lambda dims: [((0, i), (1, j)) for i, j in dims]  # noqa: E731
    paired = {dim for pair in pairs([*contract, *batch]) for dim in pair}
    free = [((i, dim),) for i in (0, 1) for dim in range(_num_dims(eqn.invars[i])) if (i, dim) not in paired]
    return DimMap((*pairs(batch), *free), tuple(pairs(contract)))


def _convolution(eqn: Any, result: int) -> DimMap:
    del result
    numbers = eqn.params["dimension_numbers"]
    kept: list[tuple[Dim, ...]] = [()] * _num_dims(eqn.outvars[0])
    (examples, feature, *_), (out, into, *_) = numbers.lhs_spec, numbers.rhs_spec
    groups, batch_groups = eqn.params["feature_group_count"], eqn.params["batch_group_count"]
    if batch_groups == 1:
        kept[numbers.out_spec[0]] = ((0, examples),)
    if groups == batch_groups == 1:
        kept[numbers.out_spec[1]] = ((1, out),)
    return DimMap(tuple(kept), (((0, feature), (1, into)),) if groups == 1 else ())


def _gather(eqn: Any, result: int) -> DimMap:
    """A lookup: the dims of the indices, and those of the table of which each slice has everything."""
    del result
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    pairs = zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    of_table = {place: ((0, dim),) for place, dim in pairs}
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    windows = iter([dim for dim in range(len(sizes)) if dim not in gone])
    places, kept = iter(range(_num_dims(eqn.invars[1]) - 1)), list[tuple[Dim, ...]]()
    for i in range(_num_dims(eqn.outvars[0])):
        if i in numbers.offset_dims:
            dim = next(windows)
            kept.append(((0, dim),) if sizes[dim] == eqn.invars[0].aval.shape[dim] else ())
        else:
            place = next(places)
            kept.append(((1, place), *of_table.get(place, ())))
    return DimMap(tuple(kept))


def _scatter(eqn: Any, result: int) -> DimMap:
    """A write: dims of which each update has everything, and those that indices and updates have, too."""
    del result
    numbers, (shape, _, updates) = eqn.params["dimension_numbers"], (atom.aval.shape for atom in eqn.invars)
    windows, places = iter(numbers.update_window_dims), _rest(len(updates), numbers.update_window_dims)
    pairs = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    batched, kept = {dim: ((0, dim), (1, at), (2, places[at])) for dim, at in pairs}, list[tuple[Dim, ...]]()
    for dim, size in enumerate(shape):
        if dim in batched or dim in numbers.inserted_window_dims:
            kept.append(batched.get(dim, ()))
        else:
            window = next(windows)
            kept.append(((0, dim), (2, window)) if updates[window] == size else ())
    return DimMap(tuple(kept))


def _rest(num_dims: int, dims: Sequence[int]) -> list[int]:
    return [dim for dim in range(num_dims) if dim not in dims]


_RULES: dict[str, Callable[[Any, int], DimMap]] = {
    **dict.fromkeys(
        ELEMENTWISE | {"add_any", "bitcast_convert_type", "convert_element_type", "zero_join"}, _elementwise
    ),
    **dict.fromkeys(
        ("device_put", "optimization_barrier", "pvary", "reshard", "sharding_constraint", "zero_order", "zero_reshard"),
        _each_its_own,
    ),
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "squeeze": _without("dimensions"),
    **dict.fromkeys(("slice", "dynamic_slice", "split", "tile"), _whole),
    "pad": _pad,
    "dynamic_update_slice": _update,
    "rev": _but("dimensions"),
    "concatenate": _but("dimension"),
    "stack": _stack,
    "unstack": _without("axis"),
    **dict.fromkeys(REDUCTIONS | {"reduce_xor"}, _without("axes")),
    "reduce": _without("dimensions"),
    **dict.fromkeys(CUMULATIVE | {"top_k"}, _but("axis")),
    "sort": _but("dimension"),
    "approx_top_k": _but("reduction_dimension"),
    **dict.fromkeys(
        "reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add "
        "select_and_gather_add".split(),
        _window,
    ),
    **dict.fromkeys(
        "cholesky eigh eig svd qr geqrf lu schur hessenberg tridiagonal symmetric_product".split(), _leading(2)
    ),
    "householder_product": _leading(2, 1),
    "tridiagonal_solve": _leading(1, 1, 1, 2),
    "lu_pivots_to_permutation": _leading(1),
    "triangular_solve": _triangular_solve,
    "fft": _fft,
    "zero_attention": _attention,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), _scatter),
}
