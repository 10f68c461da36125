"""Matmuls with weights as products of matrices, and in shares of rows; convolutions that XLA partitions wrongly.

XLA:TPU lays a gradient of a weight of several input or output dims, such as `[features, heads, head_dim]`, out as it
pads least: with 64 lanes for `head_dim`, features become the lanes. These are the sharded dim, and lanes are
all-reduced rather than reduce-scattered (docs/gather_on_use.md). So the weight's shard is transposed and reshaped
before it is gathered, its gradient after it is scattered, and in between are matrices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.dims import dim_map
from zero_jax.program.jaxprs import bind, source_context, source_line
from zero_jax.program.subcalls import MANUAL, equations_of, subcall
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.spec import Dims, named
from zero_jax.transforms.for_xla.layouts import LANES
from zero_jax.transforms.gather.deferred import Lazy, Value
from zero_jax.transforms.weight_grads import product


def is_partitioned_wrongly(eqn: Any, dims: Dims | None = None) -> bool:
    """Tells whether XLA partitions the gradient of a convolution's kernel wrongly beside axes without examples.

    Those in groups and depthwise ones have the multiple of it by the size of these axes, those of kernels that are
    sharded along the window (`dims`) are wrong if the input is dilated (docs/xla_faults.md).
    """
    if eqn.primitive.name != "conv_general_dilated":
        return False
    window = eqn.params["dimension_numbers"].rhs_spec[2:]
    has_groups = eqn.params["feature_group_count"] > 1 or eqn.params["batch_group_count"] > 1
    return has_groups or (dims is not None and any(dims[i] for i in window))


def holds_convolution(eqn: Any) -> bool:
    """Tells whether an equation is such a convolution, or runs one, other than in a `shard_map`."""
    return any(map(is_partitioned_wrongly, equations_of(eqn, skip=MANUAL)))


def refuse_convolution(eqn: Any) -> None:
    """Raises `ValueError` for such a convolution in an equation that is not looked into."""
    if subcall(eqn) is not None and holds_convolution(eqn):
        found = next(filter(is_partitioned_wrongly, equations_of(eqn, skip=MANUAL)))
        kernel = list(found.invars[1].aval.shape)
        raise ValueError(
            f"a convolution in groups, of a kernel {kernel}, is within {eqn.primitive.name} at {source_line(eqn)}: XLA "
            "computes a wrong gradient of its kernel on a mesh with axes that the batch is not sharded over "
            "(docs/xla_faults.md): take a mesh without `model` axes, or call the convolution in jax.shard_map"
        )


# Of a product with fewer features the rows take longer to send than to compute.
_FEATURES_IN_SHARES = 512


def is_of_rows(eqn: Any) -> bool:
    """Tells whether an equation is a product over groups of rows (`lax.ragged_dot`) that are no less than its weight.

    Computed in shares of the rows, its gradient is a sum over devices, which moves as many bytes as the weights have.
    """
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    if numbers is None or len(eqn.invars) != 3:
        return False
    rows, weight, sizes = (var.aval for var in eqn.invars)
    (contracted, _), (batch, _) = numbers.dot_dimension_numbers
    dims = tuple(contracted), tuple(batch), tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)
    is_large = rows.size + eqn.outvars[0].aval.size >= weight.size
    return dims == ((1,), (), (0,), (0,)) and rows.ndim == 2 and sizes.ndim == 1 and is_large


def is_by_rows(eqn: Any, mesh: Mesh, axes: Axes) -> bool:
    """Tells whether each device computes a share of the rows of such a product, where all are sorted together.

    XLA has each compute all of them, and the gradient of all weights.
    """
    num_devices = axis_size(mesh, axes.batch)
    if not is_of_rows(eqn) or num_devices == 1 or axes.size_beside_batch(mesh) > 1:
        return False
    rows, weight, _ = (var.aval for var in eqn.invars)
    return rows.shape[0] % num_devices == 0 and min(weight.shape[1:]) >= _FEATURES_IN_SHARES


def by_rows(eqn: Any, inputs: Sequence[jax.Array], copies: jax.Array, *, mesh: Mesh, axes: Axes) -> jax.Array:
    """Evaluates a product over groups of rows, each device its share of them by its own copy of the weight.

    The gradient goes to the copies, `[devices, ...]`, in their dtype. The sizes of the groups are of all rows, or
    `[devices, groups]` of those of each device.
    """
    rows, sizes = inputs
    dtype = eqn.invars[1].aval.dtype

    def share(rows: jax.Array, copies: jax.Array, sizes: jax.Array) -> jax.Array:
        weight = copies[0]
        if sizes.ndim == 1:
            # Where groups end among a device's own rows; those before and behind them are empty.
            first = lax.axis_index(axes.batch) * rows.shape[0]
            ends = jnp.clip(jnp.cumsum(sizes) - first, 0, rows.shape[0]).astype(sizes.dtype)
            sizes = jnp.diff(ends, prepend=jnp.zeros((), ends.dtype))
        inputs = [rows, weight.astype(dtype), sizes.reshape(-1)]
        return bind(eqn, inputs)[0] if weight.dtype == dtype else product(eqn, inputs, 1, weight)

    spec = PartitionSpec(axes.batch)
    in_specs = spec, spec, spec if sizes.ndim == 2 else PartitionSpec()
    with source_context(eqn):
        return jax.shard_map(share, mesh=mesh, in_specs=in_specs, out_specs=spec, check_vma=False)(rows, copies, sizes)


def product_of_blocks(eqn: Any, operands: Sequence[jax.Array], *, mesh: Mesh, axes: Axes) -> jax.Array:
    """Evaluates a product over groups of each device's rows, `[devices, groups]` of them, by a weight that all have.

    It is a call that `of_blocks` knows.
    """

    def zero_product_of_blocks(rows: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
        share = lambda rows, weight, sizes: bind(eqn, [rows, weight, sizes[0]])[0]  # noqa: E731
        spec = PartitionSpec(axes.batch)
        in_specs = spec, PartitionSpec(), spec
        shared = jax.shard_map(share, mesh=mesh, in_specs=in_specs, out_specs=spec, check_vma=False)
        return shared(rows, weight, sizes)

    return jax.jit(zero_product_of_blocks)(*operands)


def of_blocks(eqn: Any) -> Any:
    """Returns the product over groups of rows that a call of `product_of_blocks` makes on each device, or None."""
    if eqn.params.get("name") != "zero_product_of_blocks":
        return None
    return next(each for each in equations_of(eqn) if each.primitive.name.startswith("ragged_dot"))


# Such a product is shared out from so many times the size of its weight.
_SHARED_TIMES = 4


def shared_rows(eqn: Any, values: Sequence[Any], *, mesh: Mesh, axes: Axes) -> NamedSharding | None:
    """Returns how a product of constants and a param is shared out, as the hidden layer of an MLP of positions is.

    Each device would have all of it, and XLA shards it as the param, which sends it. None where it is too small.
    """
    places = [i for i, value in enumerate(values) if isinstance(value, Lazy)]
    is_of_params = eqn.primitive.name == "dot_general" and all(value.params_only for value in values)
    if not is_of_params or len(places) != 1 or axes.size_beside_batch(mesh) > 1:
        return None
    shape = eqn.outvars[0].aval.shape
    rows = [i for i, dims in enumerate(dim_map(eqn).kept) if len(dims) == 1 and dims[0][0] not in places]
    rows = [i for i in rows if shape[i] % axis_size(mesh, axes.batch) == 0]
    if not rows or math.prod(shape) < _SHARED_TIMES * values[places[0]].aval.size:
        return None
    return named(mesh, tuple(axes.batch if i == rows[0] else () for i in range(len(shape))))


Bind = Callable[[Any, Sequence[Any]], list[Any]]
Evaluate = Callable[[Sequence[Any], Bind], list[Any]]


def flat_product(eqn: Any, values: Sequence[Lazy | Value]) -> tuple[list[Lazy | Value], Evaluate]:
    """Returns an equation's inputs and how it is evaluated: a product with a weight as one with a matrix, if it can be.

    That is a function from the inputs' arrays (params gathered) and from what evaluates an equation, to the results.
    """
    places = [i for i, value in enumerate(values) if isinstance(value, Lazy)]
    flat = None
    if eqn.primitive.name == "dot_general" and len(places) == 1 and eqn.params.get("out_sharding") is None:
        flat = _plan(eqn, values[places[0]], places[0])
    if flat is None:
        return list(values), lambda inputs, bind: bind(eqn, inputs)
    weight, other_order, other_shape, product = flat
    out_shape = eqn.outvars[0].aval.shape

    def evaluate(inputs: Sequence[Any], bind: Bind) -> list[Any]:
        with source_context(eqn):
            factors = [
                x if i in places else x.transpose(other_order).reshape(other_shape) for i, x in enumerate(inputs)
            ]
            return [bind(product, factors)[0].reshape(out_shape)]

    return [weight if i in places else value for i, value in enumerate(values)], evaluate


def _plan(eqn: Any, value: Any, place: int) -> tuple[Lazy, list[int], tuple[int, ...], Any] | None:
    """Returns the weight as a matrix, the other factor's order of dims and shape, and the equation of both, or None."""
    contracting, batch = eqn.params["dimension_numbers"]
    other = eqn.invars[1 - place].aval.shape
    pairs = sorted(zip(contracting[1 - place], contracting[place], strict=True))
    partners, summed = [i for i, _ in pairs], [i for _, i in pairs]  # in the order of the other factor, the larger
    free = [i for i in range(value.aval.ndim) if i not in summed]
    if value.dims is None or batch[place] or not (free and partners) or max(len(summed), len(free)) < 2:
        return None
    sizes = [[value.aval.shape[i] for i in group] for group in (summed, free) if len(group) > 1]
    is_by_first = bool(value.dims[0]) and not any(value.dims[1:])  # else what is sharded would be lanes, or between
    if is_by_first and all(group[-1] % LANES == 0 and min(group) > 1 for group in sizes):
        return None  # nothing is padded, and activations of merged dims would be copies in another layout
    groups = sorted((summed, free))  # of the weight's dims, those of the rows and of the columns of the matrix
    order = [*groups[0], *groups[1]]
    if not _is_run(order):  # it is transposed anyway: then the dim that is sharded comes first
        groups.sort(key=lambda group: not any(value.dims[i] for i in group))
        order = [*groups[0], *groups[1]]
    dims = _merged_dims(value.dims, value.aval.shape, groups)
    if dims is None:
        return None
    shape = tuple(math.prod(value.aval.shape[i] for i in group) for group in groups)
    build = value.build
    weight = dataclasses.replace(
        value,
        build=lambda *roots: build(*roots).transpose(order).reshape(shape),
        aval=value.aval.update(shape=shape),
        dims=dims,
    )
    rest = [i for i in range(len(other)) if i not in partners]
    first = partners[0] if _is_run(partners) else len(rest)  # adjacent dims are merged where they are
    other_order = [*rest[:first], *partners, *rest[first:]]
    other_shape = (*(other[i] for i in rest[:first]), shape[groups.index(summed)], *(other[i] for i in rest[first:]))
    sums = [(groups.index(summed),), (first,)]
    numbers = (tuple(sums[i] for i in ((0, 1) if place == 0 else (1, 0))), ((), ()))
    return weight, other_order, other_shape, eqn.replace(params={**eqn.params, "dimension_numbers": numbers})


def _is_run(dims: Sequence[int]) -> bool:
    """Tells whether dims follow one another, so that a reshape makes one of them."""
    return bool(dims) and list(dims) == list(range(dims[0], dims[0] + len(dims)))


def _merged_dims(dims: Dims, shape: Sequence[int], groups: Sequence[Sequence[int]]) -> Dims | None:
    """Returns how a matrix of merged dims is sharded; None where more is sharded than the major dim of a group."""
    merged = []
    for group in groups:
        major = next((i for i in group if shape[i] > 1), group[0])
        if any(dims[i] for i in group if i != major):
            return None
        merged.append(dims[major])
    return tuple(merged)
