"""Relations of sums and products, and of what works along some dims: each example by itself, or refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from zero_jax.transforms.separable.pair import Pair, Rule, check, without_dims
from zero_jax.transforms.separable.relations import Kind, Relation, applied, multiplied


def _reduce_sum(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    (x,), axes = inputs, pair.params["axes"]
    check(x.kind in (Kind.SAME, Kind.ROWS, Kind.SUM))
    if x.kind is Kind.ROWS and x.dim in axes:
        return [dataclasses.replace(x.of_elements(), kind=Kind.SUM, dim=None)]
    return [without_dims(x.of_elements(), axes)]


def _reduce(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    axes = pair.params["axes"] if "axes" in pair.params else pair.params["dimensions"]
    return [without_dims(applied(inputs), axes)] * len(pair.whole.outvars)


def _along(name: str) -> Rule:
    """What works along one dim, by its parameter; along the last without that."""

    def rule(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
        x, num_dims = applied(inputs), len(pair.shapes(0)[0])
        check(x.dim is None or x.dim != pair.params.get(name, num_dims - 1) % num_dims)
        return [x] * len(pair.whole.outvars)

    return rule


def _cumsum(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    check(inputs[0].dim != pair.params["axis"])
    check(inputs[0].kind in (Kind.SAME, Kind.ROWS, Kind.SUM))
    return [inputs[0].of_elements()]


def _by_batch(*num_dims: int) -> Rule:
    """Linear algebra on the last dims of each input, for each entry of those before."""

    def rule(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
        x = applied(inputs)
        if x.dim is not None:
            check(all(one.dim == x.dim for one in inputs))
            own = [num_dims[min(i, len(num_dims) - 1)] for i in range(len(inputs))]
            check(all(x.dim < len(pair.shapes(i)[0]) - own[i] for i in range(len(inputs))))
        return [x] * len(pair.whole.outvars)

    return rule


def _attention(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    x = applied(inputs)
    check(all(one.dim == x.dim for one in inputs) and x.dim in (None, 0))
    return [x] * len(pair.whole.outvars)


def _fft(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    return _by_batch(len(pair.params["fft_lengths"]))(pair, inputs)


def _window(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    x, names = applied(inputs), ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    if x.dim is not None:
        check(all(pair.params[name][x.dim] == 1 for name in names if name in pair.params))
        check(tuple(pair.params["padding"][x.dim]) == (0, 0))
    return [x] * len(pair.whole.outvars)


def _dot(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    (contract, batch) = pair.params["dimension_numbers"]
    product = multiplied(inputs[0].at(None), inputs[1].at(None))
    if product.kind is not Kind.ROWS:
        return [product]
    dims = inputs[0].dim, inputs[1].dim
    if dims in zip(*contract, strict=True):
        return [dataclasses.replace(product, kind=Kind.SUM)]
    if dims in zip(*batch, strict=True):
        return [product.at(list(batch[0]).index(dims[0]))]
    sides = [i for i, dim in enumerate(dims) if dim is not None]
    check(len(sides) == 1)
    free = [[i for i in range(len(pair.shapes(s)[0])) if i not in (*contract[s], *batch[s])] for s in (0, 1)]
    before = len(batch[0]) + (len(free[0]) if sides[0] else 0)
    check(dims[sides[0]] in free[sides[0]])
    return [product.at(before + free[sides[0]].index(dims[sides[0]]))]


def _convolution(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    x, kernel = inputs
    numbers = pair.params["dimension_numbers"]
    check(kernel.kind is Kind.SAME and pair.params["batch_group_count"] == 1)
    product = multiplied(x.at(None), kernel)
    if x.kind is not Kind.ROWS:
        return [product]
    check(x.dim == numbers.lhs_spec[0])
    return [product.at(numbers.out_spec[0])]


def _triangular_solve(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    matrix, x = inputs
    columns = len(pair.shapes(1)[0]) - (1 if pair.params["left_side"] else 2)
    if matrix.kind is Kind.SAME and x.dim == columns:
        return [applied(inputs)]
    return _by_batch(2)(pair, inputs)


RULES: dict[str, Rule] = {
    "reduce_sum": _reduce_sum,
    **dict.fromkeys(
        "reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin reduce".split(), _reduce
    ),
    **dict.fromkeys(("cumprod", "cummax", "cummin", "cumlogsumexp", "top_k"), _along("axis")),
    "cumsum": _cumsum,
    "sort": _along("dimension"),
    "approx_top_k": _along("reduction_dimension"),
    **dict.fromkeys(
        "cholesky eigh eig svd qr geqrf lu schur hessenberg tridiagonal symmetric_product".split(), _by_batch(2)
    ),
    "householder_product": _by_batch(2, 1),
    "tridiagonal_solve": _by_batch(1, 1, 1, 2),
    "lu_pivots_to_permutation": _by_batch(1),
    "triangular_solve": _triangular_solve,
    "fft": _fft,
    "zero_attention": _attention,
    **dict.fromkeys(
        "reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add "
        "select_and_gather_add".split(),
        _window,
    ),
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
}
