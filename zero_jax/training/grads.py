"""Loss and gradients of a step: the user's loss function, microbatches, and where gradients are summed."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.attention import mesh_context
from zero_jax.core.evaluation import TracedFunction
from zero_jax.core.signatures import check_takes
from zero_jax.core.tree import PyTree, leaf_names, map_named
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.quantized import Blocks
from zero_jax.sharding.spec import Dims, named, without
from zero_jax.training.loss_function import LossFunction, key_parameter, model_state_parameter
from zero_jax.training.noise_scale import mean_of_parts, shard_squares
from zero_jax.transforms import DeviceSum, weight_alone


@dataclasses.dataclass(frozen=True)
class MeshLoss:
    """A loss function that has to know the mesh; it stands wherever zero_jax asks for a loss function.

    `make(mesh)` returns the function. A plan's mesh, for one, is made where it compiles:
    `zero.plan(zero.MeshLoss(lambda mesh: make_loss(place=zero.sequence_parallel(mesh))), ...)`.
    """

    make: Callable[[Mesh], Callable[..., Any]]


def user_loss(loss_fn: Callable[..., Any] | MeshLoss, mesh: Mesh, axes: Axes | None = None) -> LossFunction:
    """Returns a user's loss function, made for a mesh (and the roles of its axes), with what it takes.

    Raises:
      ValueError: it cannot be called as a loss function.
    """
    if isinstance(loss_fn, MeshLoss):
        remedy = "give a function of a mesh that returns the loss function"
        function = check_takes("MeshLoss.make", loss_fn.make, ["mesh"], remedy=remedy)(mesh)
    else:
        function = loss_fn
    parameters = key_parameter(function), model_state_parameter(function)
    found = LossFunction(function, *parameters, context=functools.partial(mesh_context, mesh, axes))
    found.check()
    return found


def normalize_loss(loss_fn: Callable[..., Any] | MeshLoss, mesh: Mesh, axes: Axes | None = None) -> Callable[..., Any]:
    """Returns a user's loss function in the form that the library calls, made for a mesh.

    The result raises `ValueError` when the loss is not a floating scalar.
    """
    return user_loss(loss_fn, mesh, axes).named()


def check_batch(batch: PyTree, *, mesh: Mesh, axes: Axes, num_microbatches: int = 1) -> int | None:
    """Checks that every leaf of a batch divides over the batch axes and the microbatches; returns the batch size.

    Raises:
      ValueError: a leaf does not divide, or leaves differ in size.
    """
    shards = axis_size(mesh, axes.batch)
    sizes = {
        name: leaf.shape[0] for name, leaf in zip(leaf_names(batch), jax.tree.leaves(batch), strict=True) if leaf.ndim
    }
    for name, size in sizes.items():
        if size == 0 or size % (shards * num_microbatches):
            what = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes.batch)
            micro = f" and {num_microbatches} microbatches" if num_microbatches > 1 else ""
            need = shards * num_microbatches
            raise ValueError(
                f"batch leaf {name!r} has {size} examples, which do not divide over {shards} devices ({what}){micro}: "
                f"make the batch size a multiple of {need}, for example {max(need, math.ceil(size / need) * need)}"
            )
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"the leaves of the batch differ in their leading dim: {sizes}; give each one entry per example"
        )
    return next(iter(sizes.values()), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accumulator:
    """Sums loss, gradients and aux over the microbatches of a batch.

    A microbatch takes a contiguous part of what each device already holds, so splitting moves nothing.
    """

    mesh: Mesh
    axes: Axes
    num_microbatches: int
    loss_weight: str | None
    whole_aux: Callable[[], PyTree]  # the shapes of the aux of the whole batch
    reduce_dtype: Any
    codings: Sequence[Blocks | None]  # the blocks that the gradient of each param is sent in

    @property
    def num_shards(self) -> int:
        """The number of devices that a batch is spread over."""
        return axis_size(self.mesh, self.axes.batch)

    def split(self, batch: PyTree) -> PyTree:
        """Splits leaves `[batch, ...]` into `[num_microbatches, num_shards, examples, ...]`; scalars stay."""
        k, n = self.num_microbatches, self.num_shards

        def split_leaf(x: jax.Array) -> jax.Array:
            if not x.ndim:
                return x
            x = x.reshape(n, k, x.shape[0] // (n * k), *x.shape[1:])
            x = lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(self.axes.batch)))
            x = jnp.moveaxis(x, 1, 0)
            return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(None, self.axes.batch)))

        return jax.tree.map(split_leaf, batch)

    def sharded(
        self,
        grad_fn: Callable[..., Any],
        params: PyTree,
        model_state: PyTree,
        batch: PyTree,
        key: jax.Array,
        dims: list[Dims],
    ) -> Any:
        """Accumulates gradients that each microbatch has already reduced to shards, in float32.

        Args:
          grad_fn: `grad_fn(params, model_state, batch, key)` returns `((loss, (aux, model_state, weight)), grads)`.
          params: the list of params.
          model_state: what the first microbatch is given; each passes it on to the next.
          batch: the whole batch.
          key: the step's key.
          dims: for each param, how its gradient is sharded.

        Returns:
          `((loss, (aux, model_state)), grads, parts)` of the whole batch; `parts` says how large the gradients of its
          parts are.
        """
        k = self.num_microbatches

        def pin(arrays: list[jax.Array]) -> list[jax.Array]:
            shardings = [named(self.mesh, d) for d in dims]
            return [lax.with_sharding_constraint(x, s) for x, s in zip(arrays, shardings, strict=True)]

        parts = self.split(batch)
        merged = jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[3:]) if x.ndim else x, parts)

        def body(carry: Any, index_and_part: Any) -> Any:
            sums, total, model_state = carry
            index, part = index_and_part
            (loss, (aux, model_state, weight)), grads = grad_fn(
                params, model_state, _rejoin(part, merged), jax.random.fold_in(key, index)
            )
            # Without the barrier XLA:TPU puts off the head's gradient until all are squared, and holds the logits.
            grads = lax.optimization_barrier(grads)
            squares = shard_squares(grads, dims, mesh=self.mesh)
            sums = pin([_add_weighed(s, weight, g) for s, g in zip(sums, grads, strict=True)])
            return (sums, total + weight, model_state), (loss.astype(jnp.float32), weight, aux, squares)

        zeros = pin([jnp.zeros(p.shape, _wide(p.dtype)) for p in params])
        xs = (jnp.arange(k), [x for x in jax.tree.leaves(merged) if x.ndim])
        begun = zeros, jnp.float32(0), model_state
        (sums, total, model_state), (losses, weights, auxes, squares) = lax.scan(body, begun, xs)
        grads = [_divided(s, total) for s in sums]
        size = next((x.shape[1] for x in jax.tree.leaves(merged) if x.ndim), 0)
        out = self.mean(losses, weights), (self.combine(auxes, weights, size), model_state)
        return out, grads, mean_of_parts(squares, weights)

    def local(
        self,
        grad_fn: Callable[..., Any],
        params: PyTree,
        model_state: PyTree,
        batch: PyTree,
        key: jax.Array,
        dims: list[Dims],
        *,
        convolves: bool = False,
    ) -> Any:
        """Accumulates each device's own gradients in float32 and reduces them across devices once, at the end.

        The gradient is mapped over a leading dim of devices, so every device sees its own examples only; the stack of
        gradients is turned from devices to shards by all-to-alls and summed where it lands. Arguments and results are
        those of `sharded`; model state without leaves is none that would have to pass from one microbatch to the next.
        XLA partitions the convolutions of `jax.vmap` wrongly: a loss that has some is mapped by `shard_map`.
        """
        k, n = self.num_microbatches, self.num_shards
        parts = self.split(batch)
        own_dims = [(self.axes.batch, *without(d, self.axes.batch)) for d in dims]  # axes of the model stay
        stacked = [named(self.mesh, d) for d in own_dims]
        in_axes = (None, None, jax.tree.map(lambda x: 0 if x.ndim else None, parts), 0)
        if convolves:
            mapped = self.shard_mapped(grad_fn, in_axes)
        else:
            mapped = jax.vmap(grad_fn, in_axes=in_axes, spmd_axis_name=self.axes.batch)

        def body(carry: Any, index_and_part: Any) -> Any:
            sums, total = carry
            index, part = index_and_part
            keys = jax.random.split(jax.random.fold_in(key, index), n)
            (losses, (aux, _, weights)), grads = mapped(params, model_state, _rejoin(part, parts), keys)
            squares = shard_squares(grads, own_dims, mesh=self.mesh)
            sums = [_add_weighed(s, _outer(weights, g), g) for s, g in zip(sums, grads, strict=True)]
            sums = [lax.with_sharding_constraint(s, own) for s, own in zip(sums, stacked, strict=True)]
            return (sums, total + weights.sum()), (losses.astype(jnp.float32), weights, aux, squares)

        zeros = [
            lax.with_sharding_constraint(jnp.zeros((n, *p.shape), _wide(p.dtype)), own)
            for p, own in zip(params, stacked, strict=True)
        ]
        xs = (jnp.arange(k), [x for x in jax.tree.leaves(parts) if x.ndim])
        (sums, total), (losses, weights, auxes, squares) = lax.scan(body, (zeros, jnp.float32(0)), xs)
        grads = [self.reduce(d, c, _divided(s, total)) for d, c, s in zip(dims, self.codings, sums, strict=True)]
        size = next((x.shape[2] for x in jax.tree.leaves(parts) if x.ndim), 0)
        out = self.mean(losses, weights), (self.combine(auxes, weights, size), model_state)
        return out, grads, mean_of_parts(squares, weights)

    def shard_mapped(self, fn: Callable[..., Any], in_axes: Any) -> Callable[..., Any]:
        """Returns what `jax.vmap` of a function over the devices returns; the mesh has no other axes than the batch's.

        `in_axes` are those of `jax.vmap`, 0 or None.
        """
        over_devices = PartitionSpec(self.axes.batch)
        specs = jax.tree.map(
            lambda axis: PartitionSpec() if axis is None else over_devices, in_axes, is_leaf=lambda axis: axis is None
        )
        one_device = jax.vmap(fn, in_axes=in_axes, axis_size=1)
        return jax.shard_map(one_device, mesh=self.mesh, in_specs=specs, out_specs=over_devices, check_vma=False)

    def mapped(
        self,
        loss_fn: Callable[..., Any],
        weigh: Callable[..., Any] | None,
        params: PyTree,
        model_state: PyTree,
        batch: PyTree,
        key: jax.Array,
    ) -> Any:
        """Returns loss and gradients of one microbatch by `jax.vmap` over devices, which see their own examples only.

        Args:
          loss_fn: `loss_fn(params, model_state, batch, key)` returns `(loss, (aux, model_state, weight))`; devices'
            gradients of it are summed at each use of a param (`transforms.summed_on_use`).
          weigh: the weight of a part of the batch, `weigh(batch, key)`; None if all weigh the same.
          params: the list of params.
          model_state: what each device is given; it does not change.
          batch: the microbatch.
          key: its key.

        Returns:
          `((loss, (aux, model_state, weight)), grads)`.
        """

        @functools.partial(jax.value_and_grad, has_aux=True)
        def share_of_loss(params: PyTree, batch: PyTree, key: jax.Array, share: jax.Array) -> Any:
            loss, (aux, *_) = loss_fn(params, model_state, batch, key)
            return loss * share, (loss, aux)

        n = self.num_shards
        parts = jax.tree.map(lambda x: x[0] if x.ndim else x, self.split(batch))
        each = jax.tree.map(lambda x: 0 if x.ndim else None, parts)
        keys = jax.random.split(key, n)
        over_devices = functools.partial(jax.vmap, spmd_axis_name=self.axes.batch, axis_size=n)
        weights = jnp.ones(n, jnp.float32)
        if weigh is not None:
            weights = over_devices(weigh, in_axes=(each, 0))(parts, keys)
            # A part that weighs nothing may have a loss of 0 / 0: its device takes the heaviest part, for no share.
            other = jnp.argmax(weights)
            parts = jax.tree.map(lambda x: jnp.where(_outer(weights == 0, x), x[other], x) if x.ndim else x, parts)
        total = weights.sum()
        shares = lax.with_sharding_constraint(
            weights * n / _nonzero(total), NamedSharding(self.mesh, PartitionSpec(self.axes.batch))
        )
        in_axes, out_axes = (None, each, 0, 0), ((0, (0, 0)), None)
        (_, (losses, auxes)), sums = over_devices(share_of_loss, in_axes=in_axes, out_axes=out_axes)(
            params, parts, keys, shares
        )
        size = next((x.shape[1] for x in jax.tree.leaves(parts) if x.ndim), 0)
        aux = self.combine(jax.tree.map(lambda x: x[None], auxes), weights[None], size)
        grads = [(x.astype(_wide(x.dtype)) / n).astype(x.dtype) for x in sums]
        return (self.mean(losses, weights), (aux, model_state, total)), grads

    def mapped_grads(
        self, loss_fn: Callable[..., Any], traced: TracedFunction, *weighted: Any, convolves: bool
    ) -> Callable[..., Any]:
        """Returns `mapped` as a function of params, model state, a microbatch and a key.

        Args:
          loss_fn: as of `mapped`.
          traced: the loss function with its weight.
          *weighted: its arguments, for a whole batch.
          convolves: whether it has convolutions.
        """
        if convolves:
            refuse_own("XLA partitions each device's own convolutions wrongly")
        try:
            weigh = weight_alone(traced, *weighted)
        except NotImplementedError as error:
            refuse_own(str(error))

        def grads(params: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array) -> Any:
            shapes = lambda: jax.eval_shape(traced, weighted[0], batch, key)[1][0]  # noqa: E731
            own = dataclasses.replace(self, num_microbatches=1, whole_aux=shapes)
            try:
                return own.mapped(loss_fn, weigh, params, model_state, batch, key)
            except NotImplementedError as error:
                refuse_own(str(error))

        return grads

    def reduce(self, dims: Dims, coding: Blocks | None, stack: jax.Array) -> jax.Array:
        """Sums a stack `[num_shards, ...]` of per-device gradients to the shards `dims`."""
        how = DeviceSum(mesh=self.mesh, axes=self.axes, dims=dims, dtype=self.reduce_dtype, coding=coding)
        return how(stack)

    def mean(self, losses: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns the weighted mean of losses."""
        return _weigh(weights, losses).sum() / _nonzero(weights.sum())

    def combine(self, auxes: PyTree, weights: jax.Array, num_examples: int) -> PyTree:
        """Combines the aux of the microbatches, stacked on the dims of `weights`, into that of the batch.

        Entries with one element per example are put back in the batch's order; integers and the weight itself are
        summed; other floating entries are averaged by weight.
        """
        lead = weights.ndim
        may_be_examples = [x.ndim > lead and x.shape[lead] == num_examples for x in jax.tree.leaves(auxes)]
        # A leading dim may equal the microbatch by chance: only one of examples grows with the batch.
        wholes = self.whole_aux() if any(may_be_examples) else auxes

        def combine_leaf(name: str, x: jax.Array, whole: Any) -> jax.Array:
            if x.ndim > lead and x.shape[lead] == num_examples and whole.shape[0] == num_examples * weights.size:
                if lead == 1:
                    x = x.reshape(x.shape[0], self.num_shards, -1, *x.shape[2:])
                return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[3:])
            over = tuple(range(lead))
            if jnp.issubdtype(x.dtype, jax.dtypes.extended):
                raise ValueError(
                    f"aux leaf {name!r} holds PRNG keys, and those of several microbatches make none of the batch: "
                    "leave it out of aux, or set num_microbatches=1"
                )
            if name == self.loss_weight or not jnp.issubdtype(x.dtype, jnp.inexact):
                return x.any(over) if x.dtype == bool else x.sum(over)
            scale = weights.reshape(weights.shape + (1,) * (x.ndim - lead)) / _nonzero(weights.sum())
            return _weigh(scale, x).sum(over).astype(x.dtype)

        return map_named(combine_leaf, auxes, wholes)


def refuse_own(why: str) -> NoReturn:
    """Raises `ValueError` where gradients cannot be sent quantized."""
    raise ValueError(
        f"quantize: devices have no gradients of their own to send quantized, because {why}: leave grads out of "
        "zero.Quantize (gathers may stay)"
    )


def _rejoin(parts: list[jax.Array], whole: PyTree) -> PyTree:
    """Puts one microbatch's arrays among the scalars of the batch."""
    remaining = iter(parts)
    return jax.tree.map(lambda x: next(remaining) if x.ndim else x, whole)


def _weigh(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `weight * x`, nothing where the weight is nothing: the mean of an empty microbatch may be 0 / 0."""
    return jnp.where(weight == 0, 0, weight * x)


# Inlined functions of a leaf: JAX traces them once for all leaves of a shape.


@functools.partial(jax.jit, inline=True)
def _divided(x: jax.Array, total: jax.Array) -> jax.Array:
    return x / _nonzero(total)


@functools.partial(jax.jit, inline=True)
def _add_weighed(total: jax.Array, weight: jax.Array, x: jax.Array) -> jax.Array:
    return total + _weigh(weight, x.astype(total.dtype))


def _nonzero(total: jax.Array) -> jax.Array:
    return jnp.where(total == 0, 1, total)


def _outer(weights: jax.Array, x: jax.Array) -> jax.Array:
    return weights.reshape(-1, *(1,) * (x.ndim - 1))


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)
