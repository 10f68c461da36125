"""Matmuls with weights: as products of matrices, and with gradients in the reduce dtype or of a device's own examples.

XLA:TPU lays a gradient of a weight of several input or output dims, such as `[features, heads, head_dim]`, out as it
pads least: with 64 lanes for `head_dim`, features become the lanes. These are the dim that is cut, and lanes are
all-reduced rather than reduce-scattered (docs/gather_on_use.md). So the weight's shard is transposed and reshaped
before it is gathered, its gradient after it is scattered, and in between are matrices.

XLA sums a gradient across devices where the product that makes it stands, in that product's dtype: a cast after it
comes too late. So the product itself is to give the dtype to sum in. It adds up in float32 inside all the same. Where
XLA partitions the gradient of a convolution's kernel wrongly, each device computes that of its own examples.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, PartitionSpec

from zero_jax.dims import is_contraction, is_float
from zero_jax.program.evaluation import evaluate
from zero_jax.program.jaxprs import bind, of_some, open_jaxpr, source_context, source_line
from zero_jax.program.subcalls import MANUAL, equations_of, subcall
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.precision import promoted
from zero_jax.sharding.spec import Dims
from zero_jax.transforms.gather.deferred import Lazy, Value


def needs_dtype(eqn: Any, place: int, own: Any, dtype: Any) -> bool:
    """Tells whether a factor of dtype `own` has its gradient summed in another dtype than `dtype` if left alone."""
    if not is_contraction(eqn) or place > 1:
        return False
    dtypes = [eqn.invars[1 - place].aval.dtype, eqn.outvars[0].aval.dtype]
    real = all(jnp.issubdtype(each, jnp.floating) for each in (own, *dtypes))
    return real and {own, promoted(*dtypes)} != {jnp.dtype(dtype)}


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


@dataclasses.dataclass(frozen=True, eq=False)
class _Product:
    """A product as a function of one of its inputs, the weight, which it is linear in.

    With a mesh and batch axes of its `own` it is a convolution of examples that are sharded over these, and each device
    computes the gradient of its own.
    """

    eqn: Any
    place: int
    aval: Any
    own: tuple[Mesh, tuple[str, ...]] | None = None

    def __call__(self, weight: jax.Array, *others: jax.Array) -> jax.Array:
        dtype = self.eqn.invars[self.place].aval.dtype
        inputs = [*others[: self.place], weight.astype(dtype), *others[self.place :]]
        return bind(self.eqn, inputs)[0]

    def gradient(self, cotangent: jax.Array, others: Sequence[jax.Array], aval: Any) -> jax.Array:
        """Returns the gradient of the weight, with its products in the dtype of `aval`."""
        if self.own is None:
            return self.gradient_here(cotangent, others, aval)
        (mesh, over), numbers = self.own, self.eqn.params["dimension_numbers"]
        dims = numbers.out_spec[0], numbers.lhs_spec[0]
        if self.eqn.params["batch_group_count"] > 1 or others[0].shape[dims[1]] % axis_size(mesh, over):
            over = ()

        def own(cotangent: jax.Array, examples: jax.Array) -> jax.Array:
            return lax.psum(self.gradient_here(cotangent, [examples], aval), over)

        specs = tuple(PartitionSpec(*[None] * dim, over or None) for dim in dims)
        mapped = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
        return mapped(cotangent, *others)

    def gradient_here(self, cotangent: jax.Array, others: Sequence[jax.Array], aval: Any) -> jax.Array:
        """Returns the gradient of the weight as it is computed from these arrays."""
        wide = self.eqn.invars[self.place].aval
        shape = jax.ShapeDtypeStruct(aval.shape, wide.dtype)
        transpose = jax.linear_transpose(lambda w: self(w, *others), shape)
        jaxpr, consts = open_jaxpr(jax.make_jaxpr(transpose)(cotangent))

        def equation(eqn: Any, values: list[Any]) -> list[Any]:
            if eqn.primitive is lax.convert_element_type_p:  # it is of that dtype already
                return values
            if is_contraction(eqn):
                if eqn.primitive is not lax.dot_general_p:  # others refuse to give less than they take
                    values = [_no_wider(x, aval.dtype) for x in values]
                eqn = eqn.replace(params={**eqn.params, "preferred_element_type": aval.dtype})
            return bind(eqn, values)

        (out,) = evaluate(jaxpr, consts, [cotangent], equation)
        return out


def _no_wider(x: jax.Array, dtype: Any) -> jax.Array:
    return x.astype(dtype) if is_float(x) and x.dtype.itemsize > dtype.itemsize else x


def product(
    eqn: Any,
    inputs: Sequence[jax.Array],
    place: int,
    weight: jax.Array,
    own: tuple[Mesh, tuple[str, ...]] | None = None,
) -> jax.Array:
    """Evaluates a product; the gradient of the factor at `place` goes to `weight`, and is computed in its dtype.

    `own` are mesh and batch axes, for a convolution of whose kernel each device computes the gradient of its examples.
    """
    # The product is an ordinary one, by which remat policies know it.
    (out,) = bind(eqn, [lax.stop_gradient(x) for x in inputs])
    others = [x for i, x in enumerate(inputs) if i != place]
    return attach_p.bind(out, weight, inputs[place], *others, function=_Product(eqn, place, jax.typeof(out), own))


# `attach` is the identity on the result of a product, and has its derivatives: `out, weight, factor, *others -> out`,
# where the weight and the factor are the same in two dtypes. `tangent` is the linear function of the weight that the
# product is: `weight, *others -> out`.

attach_p = jex_core.Primitive("zero_weight_grad")
tangent_p = jex_core.Primitive("zero_weight_tangent")


def _attach_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, function: _Product) -> tuple[Any, Any]:
    _, weight_dot, _, *other_dots = tangents  # the factor's are the weight's
    return attach_p.bind(*primals, function=function), _dot_of(function, primals[2:], [weight_dot, *other_dots])


def _dot_of(function: _Product, inputs: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """Returns the tangent of a product, by its weight and its other inputs."""
    (weight, *others), (weight_dot, *dots) = inputs, tangents
    moving, out_dot = [i for i, dot in enumerate(dots) if not isinstance(dot, ad.Zero)], None
    if moving:
        call = of_some(functools.partial(function, weight), others, moving)
        out_dot = jax.jvp(call, [others[i] for i in moving], [dots[i] for i in moving])[1]
    out_dot = ad.Zero(function.aval.to_tangent_aval()) if out_dot is None else out_dot
    if isinstance(weight_dot, ad.Zero):
        return out_dot
    return ad.add_tangents(out_dot, tangent_p.bind(weight_dot, *others, function=function))


def _tangent_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, function: _Product) -> tuple[Any, Any]:
    return tangent_p.bind(*primals, function=function), _dot_of(function, primals, tangents)


def _tangent_transpose(cotangent: Any, weight: Any, *others: Any, function: _Product) -> list[Any]:
    zero = isinstance(cotangent, ad.Zero)
    gradient = ad.Zero(weight.aval) if zero else function.gradient(cotangent, others, weight.aval)
    return [gradient, *[None] * len(others)]


def _batch(args: Any, dims: Any, *, function: _Product) -> tuple[Any, int]:
    return jax.vmap(function, in_axes=dims)(*args), 0


attach_p.def_abstract_eval(lambda out, *_, **__: out)
attach_p.def_impl(lambda out, *_, **__: out)
ad.primitive_jvps[attach_p] = _attach_jvp
batching.primitive_batchers[attach_p] = lambda args, dims, **how: _batch(args[2:], dims[2:], **how)  # as it was
mlir.register_lowering(attach_p, lambda ctx, out, *_, **__: [out])
tangent_p.def_abstract_eval(lambda weight, *_, function: function.aval)
tangent_p.def_impl(lambda *args, function: jax.jit(function)(*args))
ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
batching.primitive_batchers[tangent_p] = _batch
mlir.register_lowering(tangent_p, mlir.lower_fun(lambda *args, function: function(*args), multiple_results=False))


# Of a product with fewer features the rows take longer to send than to compute.
_FEATURES_IN_SHARES = 512


def is_by_rows(eqn: Any, mesh: Mesh, axes: Axes) -> bool:
    """Tells whether each device computes a share of the rows of a product over groups of rows (`lax.ragged_dot`).

    XLA has each compute all of them, and the gradient of all weights. In shares that is a sum over devices, which moves
    as many bytes as the weights have: no more than the rows do that are sent.
    """
    numbers, num_devices = eqn.params.get("ragged_dot_dimension_numbers"), axis_size(mesh, axes.batch)
    if numbers is None or num_devices == 1 or axes.size_beside_batch(mesh) > 1:
        return False
    rows, weight, _ = (var.aval for var in eqn.invars)
    (contracted, _), (batch, _) = numbers.dot_dimension_numbers
    dims = tuple(contracted), tuple(batch), tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)
    is_large = rows.size + eqn.outvars[0].aval.size >= weight.size and min(weight.shape[1:]) >= _FEATURES_IN_SHARES
    return dims == ((1,), (), (0,), (0,)) and rows.ndim == 2 and rows.shape[0] % num_devices == 0 and is_large


def by_rows(eqn: Any, inputs: Sequence[jax.Array], copies: jax.Array, *, mesh: Mesh, axes: Axes) -> jax.Array:
    """Evaluates a product over groups of rows, each device its share of them by its own copy of the weight.

    The gradient goes to the copies, `[devices, ...]`, in their dtype.
    """
    rows, sizes = inputs
    dtype = eqn.invars[1].aval.dtype

    def share(rows: jax.Array, copies: jax.Array, sizes: jax.Array) -> jax.Array:
        first, weight = lax.axis_index(axes.batch) * rows.shape[0], copies[0]
        ends = jnp.clip(jnp.cumsum(sizes) - first, 0, rows.shape[0]).astype(sizes.dtype)
        inputs = [rows, weight.astype(dtype), jnp.diff(ends, prepend=jnp.zeros((), ends.dtype))]
        return bind(eqn, inputs)[0] if weight.dtype == dtype else product(eqn, inputs, 1, weight)

    spec = PartitionSpec(axes.batch)
    in_specs = spec, spec, PartitionSpec()
    with source_context(eqn):
        return jax.shard_map(share, mesh=mesh, in_specs=in_specs, out_specs=spec, check_vma=False)(rows, copies, sizes)


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
    groups = sorted((summed, free))
    order = [*groups[0], *groups[1]]
    if not _is_run(order):  # it is transposed anyway: then the dim that is cut comes first
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
    first = partners[0] if _is_run(partners) else len(rest)
    other_order = [*rest[:first], *partners, *rest[first:]]
    other_shape = (*(other[i] for i in rest[:first]), shape[groups.index(summed)], *(other[i] for i in rest[first:]))
    sums = [(groups.index(summed),), (first,)]
    numbers = (tuple(sums[i] for i in ((0, 1) if place == 0 else (1, 0))), ((), ()))
    return weight, other_order, other_shape, eqn.replace(params={**eqn.params, "dimension_numbers": numbers})


def _is_run(dims: Sequence[int]) -> bool:
    """Tells whether dims follow one another, so that a reshape makes one of them."""
    return bool(dims) and list(dims) == list(range(dims[0], dims[0] + len(dims)))


def _merged_dims(dims: Dims, shape: Sequence[int], groups: Sequence[Sequence[int]]) -> Dims | None:
    """Returns how a matrix of merged dims is sharded; None where more is cut than the major dim of a group."""
    merged = []
    for group in groups:
        major = next((i for i in group if shape[i] > 1), group[0])
        if any(dims[i] for i in group if i != major):
            return None
        merged.append(dims[major])
    return tuple(merged)
