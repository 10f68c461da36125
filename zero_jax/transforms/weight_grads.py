"""Products with weights whose gradients are in the reduce dtype, or of a device's own examples, or of each stage alone.

XLA sums a gradient across devices where the product that makes it stands, in that product's dtype: a cast after it
comes too late. So the product itself is to give the dtype to sum in. It adds up in float32 inside all the same. Where
XLA partitions the gradient of a convolution's kernel wrongly, each device computes that of its own examples.

Mapped over the stages of a pipeline, the product that makes a gradient has one more dim, and XLA:TPU all-reduces large
ones of three dims where it reduce-scatters matrices. So each stage computes its gradients in a `jax.shard_map` over the
stages, as matrices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching
from jax.sharding import Mesh, PartitionSpec

from zero_jax.dims import ELEMENTWISE, is_contraction, is_float
from zero_jax.program.evaluation import evaluate
from zero_jax.program.jaxprs import bind, new_primitive, of_some, open_jaxpr
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.precision import promoted

# Makes a function that each stage evaluates by itself, of one that is to be mapped over stages.
ByItself = Callable[[Callable[..., jax.Array]], Callable[..., jax.Array]]

_BROADCASTS = ELEMENTWISE | {"broadcast_in_dim"}


def needs_dtype(eqn: Any, place: int, own: Any, dtype: Any) -> bool:
    """Tells whether a factor of dtype `own` has its gradient summed in another dtype than `dtype` if left alone."""
    if not is_contraction(eqn) or place > 1:
        return False
    # JAX multiplies the cotangent of the result by the other factor, and casts the product to `own`.
    dtypes = [eqn.invars[1 - place].aval.dtype, eqn.outvars[0].aval.dtype]
    is_real = all(jnp.issubdtype(each, jnp.floating) for each in (own, *dtypes))
    return is_real and {own, promoted(*dtypes)} != {jnp.dtype(dtype)}


def is_narrower(aval: Any, dtype: Any) -> bool:
    """Tells whether a value is floating, of fewer digits than `dtype`, which may be None."""
    return dtype is not None and is_float(aval) and promoted(aval.dtype, dtype) != aval.dtype


def is_summed_narrow(eqn: Any, aval: Any, dtype: Any) -> bool:
    """Tells whether an operand that is broadcast, or looked up, has its gradient summed in less than `dtype`."""
    if not is_narrower(aval, dtype):
        return False
    name, (result, *_) = eqn.primitive.name, eqn.outvars
    return name == "gather" or (name in _BROADCASTS and result.aval.size > aval.size)


@dataclasses.dataclass(frozen=True, eq=False)
class _Product:
    """A product, a broadcast or a lookup as a function of one of its inputs, the weight, which it is linear in.

    With a mesh and batch axes of its `own` it is a convolution of examples that are sharded over these, and each device
    computes the gradient of its own. `apart` has each stage compute the gradient by itself.
    """

    eqn: Any
    place: int
    aval: Any
    own: tuple[Mesh, tuple[str, ...]] | None = None
    apart: ByItself | None = None

    def __call__(self, weight: jax.Array, *others: jax.Array) -> jax.Array:
        dtype = self.eqn.invars[self.place].aval.dtype
        inputs = [*others[: self.place], weight.astype(dtype), *others[self.place :]]
        return bind(self.eqn, inputs)[0]

    def gradient(self, cotangent: jax.Array, others: Sequence[jax.Array], aval: Any) -> jax.Array:
        """Returns the gradient of the weight, with its products in the dtype of `aval`."""
        if self.apart is not None:
            return self.apart(lambda cotangent, *xs: self.gradient_here(cotangent, xs, aval))(cotangent, *others)
        if self.own is None:
            return self.gradient_here(cotangent, others, aval)
        (mesh, over), numbers = self.own, self.eqn.params["dimension_numbers"]
        dims = numbers.out_spec[0], numbers.lhs_spec[0]  # of the examples, in the cotangent and in the other operand
        if self.eqn.params["batch_group_count"] > 1 or others[0].shape[dims[1]] % axis_size(mesh, over):
            over = ()  # each device computes the gradient of all examples

        def gradient_of_own(cotangent: jax.Array, examples: jax.Array) -> jax.Array:
            return lax.psum(self.gradient_here(cotangent, [examples], aval), over)

        specs = tuple(PartitionSpec(*[None] * dim, over or None) for dim in dims)
        mapped = jax.shard_map(gradient_of_own, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
        return mapped(cotangent, *others)

    def gradient_here(self, cotangent: jax.Array, others: Sequence[jax.Array], aval: Any) -> jax.Array:
        """Returns the gradient of the weight as it is computed from these arrays."""
        if not is_contraction(self.eqn):  # it is what the cotangent is, in any dtype
            transpose = jax.linear_transpose(lambda w: bind(self.eqn, [w, *others])[0], aval)
            return transpose(cotangent.astype(aval.dtype))[0]
        # The transpose as JAX makes it for a weight in the dtype of the product, evaluated with products in another.
        weight = jax.ShapeDtypeStruct(aval.shape, self.eqn.invars[self.place].aval.dtype)
        transpose = jax.linear_transpose(lambda w: self(w, *others), weight)
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


@dataclasses.dataclass(frozen=True, eq=False)
class _Mapped:
    """A product that is mapped: its weight, and some of its other inputs, have one more dim, in front.

    `axis` is what `jax.vmap` says of that dim: its size, and the mesh axes that it is sharded over.
    """

    function: _Product | _Mapped
    axis: Any
    is_mapped: tuple[bool, ...]  # which of the other inputs are

    @property
    def aval(self) -> Any:
        """The shape and dtype of the result."""
        return self.function.aval.update(shape=(self.axis.size, *self.function.aval.shape))

    def mapped(self, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Returns a function of something mapped, and of the other inputs, that evaluates one of each part."""
        in_axes = 0, *(0 if flag else None for flag in self.is_mapped)
        return jax.vmap(function, in_axes=in_axes, spmd_axis_name=self.axis.spmd_name)

    def __call__(self, weight: jax.Array, *others: jax.Array) -> jax.Array:
        return self.mapped(self.function)(weight, *others)

    def gradient(self, cotangent: jax.Array, others: Sequence[jax.Array], aval: Any) -> jax.Array:
        """Returns the gradient of the weight, with its products in the dtype of `aval`."""
        of_part = aval.update(shape=aval.shape[1:])
        return self.mapped(lambda cotangent, *xs: self.function.gradient(cotangent, xs, of_part))(cotangent, *others)


def _no_wider(x: jax.Array, dtype: Any) -> jax.Array:
    return x.astype(dtype) if is_float(x) and x.dtype.itemsize > dtype.itemsize else x


def product(
    eqn: Any,
    inputs: Sequence[jax.Array],
    place: int,
    weight: jax.Array,
    *,
    own: tuple[Mesh, tuple[str, ...]] | None = None,
    apart: ByItself | None = None,
) -> jax.Array:
    """Evaluates a product; the gradient of the factor at `place` goes to `weight`, and is computed in its dtype.

    `own` are mesh and batch axes, for a convolution of whose kernel each device computes the gradient of its examples.
    `apart` has each stage compute the gradient by itself (`StagePlace.by_itself`).
    """
    # The product is an ordinary one, by which remat policies know it.
    (out,) = bind(eqn, [lax.stop_gradient(x) for x in inputs])
    others = [x for i, x in enumerate(inputs) if i != place]
    function = _Product(eqn, place, jax.typeof(out), own, apart)
    return attach_p.bind(out, weight, inputs[place], *others, function=function)


def summed_in(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns a weight in the dtype that its gradient is summed in; the sum is `rounded` to the dtype of the weight."""
    wide = x.astype(dtype)
    return _rounded(wide) if x.dtype == jnp.bfloat16 and wide.dtype != x.dtype else wide


def rounded(total: jax.Array, dtype: Any) -> jax.Array:
    """Returns a sum over devices in a dtype.

    XLA:TPU casts what it all-reduces to the dtype that the sum is cast to. It knows that of casts alone: so the sum is
    rounded by another operation before.
    """
    return (_rounded(total) if dtype == jnp.bfloat16 and total.dtype != dtype else total).astype(dtype)


def _rounded(x: jax.Array) -> jax.Array:
    """Returns numbers as bfloat16 has them; so is the cotangent."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def with_weights(eqn: Any, inputs: Sequence[jax.Array], weights: Mapping[int, jax.Array], **how: Any) -> list[Any]:
    """Evaluates an equation; the gradients of the operands at some places go to weights, in the dtype of these.

    They are those of an elementwise equation that broadcasts them, or the one of a product, a broadcast or a lookup, of
    which `how` are further arguments of `product`.
    """
    if eqn.primitive.name in ELEMENTWISE:
        return bind(eqn, [_spread(eqn, x, weights[i]) if i in weights else x for i, x in enumerate(inputs)])
    ((place, weight),) = weights.items()
    return [product(eqn, inputs, place, weight, **how)]


def _spread(eqn: Any, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns an operand of an elementwise equation in the shape of the result; its gradient goes to `weight`."""
    shape = eqn.outvars[0].aval.shape
    dims = tuple(range(len(shape) - x.ndim, len(shape)))
    (broadcast,) = jax.make_jaxpr(lambda x: lax.broadcast_in_dim(x, shape, dims))(x).eqns
    return product(broadcast, [x], 0, weight)


# `attach` is the identity on the result of a product, and has its derivatives: `out, weight, factor, *others -> out`,
# where the weight and the factor are the same in two dtypes. `tangent` is the linear function of the weight that the
# product is: `weight, *others -> out`.

attach_p = new_primitive("zero_weight_grad")
tangent_p = new_primitive(
    "zero_weight_tangent", lambda *xs, function: function(*xs), aval=lambda *_, function: function.aval
)


def _attach_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, function: Any) -> tuple[Any, Any]:
    _, weight_dot, _, *other_dots = tangents  # that of `out` is made anew, that of the factor is the weight's
    return attach_p.bind(*primals, function=function), _dot_of(function, primals[2:], [weight_dot, *other_dots])


def _dot_of(function: Any, inputs: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """Returns the tangent of a product, by its weight and its other inputs."""
    (weight, *others), (weight_dot, *dots) = inputs, tangents
    moving = [i for i, dot in enumerate(dots) if not isinstance(dot, ad.Zero)]
    if moving:
        call = of_some(functools.partial(function, weight), others, moving)
        out_dot = jax.jvp(call, [others[i] for i in moving], [dots[i] for i in moving])[1]
    else:
        out_dot = ad.Zero(function.aval.to_tangent_aval())
    if isinstance(weight_dot, ad.Zero):
        return out_dot
    return ad.add_tangents(out_dot, tangent_p.bind(weight_dot, *others, function=function))


def _tangent_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, function: Any) -> tuple[Any, Any]:
    return tangent_p.bind(*primals, function=function), _dot_of(function, primals, tangents)


def _tangent_transpose(cotangent: Any, weight: Any, *others: Any, function: Any) -> list[Any]:
    is_zero = isinstance(cotangent, ad.Zero)
    gradient = ad.Zero(weight.aval) if is_zero else function.gradient(cotangent, others, weight.aval)
    return [gradient, *[None] * len(others)]


def _batch(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, primitive: Any, function: Any
) -> tuple[Any, int | None]:
    """Maps a primitive: one whose weight is mapped stays, of another one the product is as it was."""
    if all(dim is None for dim in dims):
        return primitive.bind(*args, function=function), None
    # Their places among the operands: `out, weight, factor, *others`, or `weight, *others`, whose factor is the weight.
    weight, factor = (1, 2) if primitive is attach_p else (0, 0)
    if dims[weight] is None and dims[factor] is None:
        return jax.vmap(function, in_axes=tuple(dims[factor:]), spmd_axis_name=axis.spmd_name)(*args[factor:]), 0
    args = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(args, dims, strict=True)]
    for i in range(factor + 1):  # `_Mapped` has these mapped, and says of the others which are
        args[i] = jnp.broadcast_to(args[i], (axis.size, *args[i].shape)) if dims[i] is None else args[i]
    is_mapped = tuple(dim is not None for dim in dims[factor + 1 :])
    return primitive.bind(*args, function=_Mapped(function, axis, is_mapped)), 0


ad.primitive_jvps[attach_p] = _attach_jvp
batching.fancy_primitive_batchers[attach_p] = functools.partial(_batch, primitive=attach_p)
ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
batching.fancy_primitive_batchers[tangent_p] = functools.partial(_batch, primitive=tangent_p)
