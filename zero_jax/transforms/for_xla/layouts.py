"""Layouts that XLA:TPU chooses badly: of the heads of a fused attention, and of features.

Attention's kernel on TPUs takes queries, keys and values head by head, `[B, N, T, H]`. A product makes features
`[B, T, N * H]`. Of a reshape between the two XLA:TPU makes a transposition of all elements: the product writes the
sequence along its lanes. In terms of tiles, 8 places by 128 features, heads are another order of the same tiles. So
each such reshape is written as one to tiles, a transposition of these, and one back.

Features `[B, T, F]` that a product with a weight makes are laid out in rows, along their last dim, and so are their
cotangents. XLA:TPU would choose columns for the backward pass, where the gradients of weights are sums over the
sequence, and copy what blocks have kept from one to the other; a product takes as long with either.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import ad, batching
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.attention import PRIMITIVES
from zero_jax.dims import FREE, Examples, State
from zero_jax.program.jaxprs import bind, new_primitive, open_jaxpr, source_context
from zero_jax.program.loss import Traced, pass_of
from zero_jax.program.subcalls import MANUAL, equations
from zero_jax.program.walk import Rewriting
from zero_jax.sharding.mesh import Axes
from zero_jax.sharding.spec import named_along
from zero_jax.sharding.topology import hardware_of

_PLACES, LANES = 8, 128  # of a tile


@pass_of({primitive.name for primitive in PRIMITIVES})
def heads_by_tiles(traced: Traced) -> Traced:
    """Transforms `loss_fn(params, batch, ...)` so that TPUs make heads for a fused attention tile by tile.

    The result computes the same values and has the same derivatives. Only reshapes between `[..., T, N * H]` and
    `[..., T, N, H]` change, with sizes of an attention's operands, T of whole tiles and H a multiple of 128.
    """
    return traced.rewritten(_HeadTiles(_heads(traced.closed)).rewritten(traced.closed))


def _heads(closed: Any) -> set[tuple[int, ...]]:
    """Returns the sizes `(T, N, H)` of what the attentions of a program read and make."""
    eqns = (eqn for eqn in equations(closed, skip=MANUAL) if eqn.primitive in PRIMITIVES)
    arrays = [atom.aval.shape[1:] for eqn in eqns for atom in (*eqn.invars, *eqn.outvars) if atom.aval.ndim == 4]
    return {sizes for sizes in arrays if sizes[0] % _PLACES == 0 and sizes[-1] % LANES == 0}


class _HeadTiles(Rewriting):
    """Evaluates equations, those that make or merge heads by tiles."""

    def __init__(self, heads: set[tuple[int, ...]]):
        super().__init__()
        self.heads = heads

    def changes(self, eqn: Any) -> bool:
        if eqn.primitive.name != "reshape":
            return False
        few, many = sorted((eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape), key=len)
        return len(few) > 1 and many[-3:] in self.heads and few == (*many[:-2], many[-2] * many[-1])

    def changed(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        is_split = eqn.outvars[0].aval.ndim > eqn.invars[0].aval.ndim
        many = (eqn.outvars if is_split else eqn.invars)[0].aval.shape
        with source_context(eqn):
            return [(_split if is_split else _merged)(*values, *many)]


def _split(x: jax.Array, *shape: int) -> jax.Array:
    """Returns heads `[..., T, N, H]` of features."""
    *before, places, num_heads, size = shape
    tiles = x.reshape(*before, places // _PLACES, _PLACES, num_heads, size)
    by_head = jnp.moveaxis(tiles, -2, -4).reshape(*before, num_heads, places, size)
    # Where a norm in float32 begins with them, XLA:TPU else writes all heads in float32, and each reader reads that.
    return jnp.swapaxes(lax.optimization_barrier(by_head), -2, -3)


def _merged(x: jax.Array, *shape: int) -> jax.Array:
    """Returns features `[..., T, N * H]` of heads."""
    *before, places, num_heads, size = shape
    tiles = jnp.swapaxes(x, -2, -3).reshape(*before, num_heads, places // _PLACES, _PLACES, size)
    return jnp.moveaxis(tiles, -4, -2).reshape(*before, places, num_heads * size)


# The hardware where rows pay: 1% of a step on v5p and TPU7x, 3% to 8% on v6e. On v5e they cost up to 1%.
_IN_ROWS = frozenset({"v5p", "v6e", "tpu7x"})


def wants_rows(mesh: Mesh) -> bool:
    """Returns whether the hardware of a mesh is faster with `features_in_rows`."""
    hardware = hardware_of(mesh.devices.flat[0])
    return hardware is not None and hardware.name in _IN_ROWS


@pass_of({"dot_general"})
def features_in_rows(traced: Traced, *, mesh: Mesh, axes: Axes) -> Traced:
    """Transforms `loss_fn(params, batch, ...)` so that what products with weights make is laid out in rows.

    The result computes the same values and has the same derivatives. Only products of `[B, ..., F]` by `[F, G]`, and of
    `[B, E, ..., F]` by `[E, F, G]`, change, of examples along B and with a multiple of 128 features, on a mesh without
    axes beside those of the batch.
    """
    closed, states = traced.closed, [FREE] * traced.num_params
    is_manual = bool(jax.sharding.get_abstract_mesh().manual_axes)  # each device has its own values already
    is_alone = axes.size_beside_batch(mesh) == 1 and not is_manual
    if not is_alone or all(_product_of(eqn) is None for eqn in equations(closed, skip=MANUAL)):
        return traced.rewritten(closed)
    states += [0 if var.aval.ndim else FREE for var in open_jaxpr(closed)[0].invars[traced.num_params :]]
    features = _Features(mesh, axes)
    features.run(closed, states)
    return traced.rewritten(_Rows(mesh, axes, features.of_examples).rewritten(closed))


def _product_of(eqn: Any) -> tuple[int, int] | None:
    """Returns the operand and the dim of the result that have features, of a product by weights; else None.

    It is one of `[B, ..., F]` by `[F, G]`, or of `[B, E, ..., F]` by `[E, F, G]`, in this order or the other.
    """
    if eqn.primitive.name != "dot_general":
        return None
    contracted, (batched, _) = eqn.params["dimension_numbers"]
    result = eqn.outvars[0].aval
    for operand, features in ((0, result.ndim - 1), (1, 1))[: 1 + len(batched)]:
        values, weights = eqn.invars[operand].aval, eqn.invars[1 - operand].aval
        is_last = tuple(contracted[operand]) == (values.ndim - 1,) and len(batched) < 2
        if is_last and weights.ndim == 2 + len(batched) < values.ndim:
            return (operand, features) if result.shape[features] % LANES == 0 else None
    return None


class _Features(Examples):
    """Finds in `of_examples`, by `id`, the products that have examples along their first dim, wherever they are run.

    Each has the dim of the result that they are along.
    """

    def __init__(self, mesh: Mesh, axes: Axes):
        super().__init__(mesh, axes)
        self.states: dict[int, list[State]] = {}  # of the features, of the result and of the weights

    def constant(self, atom: Any) -> State:
        """Returns the state of a constant: rarely a batch, whose layout would only cost time."""
        return FREE

    def operation(self, eqn: Any, operands: list[State]) -> list[State]:
        made = super().operation(eqn, operands)
        product = _product_of(eqn)
        if product is not None:
            new = [operands[product[0]], made[0], operands[1 - product[0]]]
            self.states[id(eqn)] = list(map(self.join, new, self.states.get(id(eqn), new)))
        return made

    @property
    def of_examples(self) -> dict[int, int]:
        found = ((key, dim) for key, (first, dim, weights) in self.states.items() if first == 0 and weights == FREE)
        return {key: dim for key, dim in found if isinstance(dim, int)}


class _Rows(Rewriting):
    """Evaluates equations, some products with a layout."""

    def __init__(self, mesh: Mesh, axes: Axes, products: dict[int, int]):
        super().__init__()
        self.mesh, self.axes, self.products = mesh, axes.batch, products

    def changes(self, eqn: Any) -> bool:
        return id(eqn) in self.products

    def changed(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        (made,), (_, features), examples = bind(eqn, values), _product_of(eqn) or (0, 0), self.products[id(eqn)]
        others = [dim for dim in range(made.ndim) if dim not in (examples, features)]
        sharding = named_along(self.mesh, made.ndim, {examples: self.axes})
        return [rows_p.bind(made, sharding=sharding, order=(examples, *others, features))]


def laid_out(x: jax.Array, *, sharding: NamedSharding, order: tuple[int, ...]) -> jax.Array:
    """Returns a value laid out in an order of dims, each device its own part: XLA would gather what is constrained.

    Dims that the sharding leaves open are whole. What TPUs have no numbers for stays as it is.
    """
    # XLA:TPU, which makes pairs of what is wider than 32 bits, takes no layout of it.
    if x.dtype.itemsize > 4:
        return x
    mesh, open_dim = sharding.mesh, PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(*(None if axes is open_dim else axes for axes in sharding.spec))
    rows = functools.partial(with_layout_constraint, layouts=Layout(order))
    if mesh.size == 1:
        return rows(x)
    return jax.shard_map(rows, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


# A primitive, so that the passes that follow know it as the value itself.
rows_p = new_primitive("zero_rows", laid_out)
ad.deflinear2(rows_p, lambda cotangent, _, **where: [rows_p.bind(cotangent, **where)])
batching.primitive_batchers[rows_p] = lambda args, dims, **_: (args[0], dims[0])  # of what is mapped it is not known
