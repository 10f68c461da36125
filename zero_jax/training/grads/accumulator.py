"""Loss and gradients of a step, accumulated over microbatches, and the sum of what devices have of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.core.jaxprs import inline_jit
from zero_jax.core.tree import PyTree
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.precision import wide
from zero_jax.sharding.spec import Dims, named, without
from zero_jax.sharding.torus import split_axes
from zero_jax.training.grads.combined import CombinedAux
from zero_jax.training.noise_scale import mean_of_parts, shard_squares
from zero_jax.transforms import DeviceSum, PartWeight


class GradInputs(NamedTuple):
    """The arguments of a function of loss and gradients: the list of params, model state, batch and key."""

    params: list[jax.Array]
    model_state: PyTree
    batch: PyTree
    key: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accumulator:
    """Sums loss, gradients and aux over the microbatches of a batch.

    A microbatch is a contiguous part of each device's shard of the batch, so splitting moves nothing. `mapped` are the
    batch axes that `local` maps over: all of them, or those along which devices have copies of the params.
    """

    mesh: Mesh
    axes: Axes
    mapped: tuple[str, ...]
    num_microbatches: int
    loss_weight: str | None  # the entry of aux that the losses are averaged by; None if none is named
    aux: CombinedAux
    sums: Sequence[DeviceSum]  # how the gradients that devices have of each param are summed

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

    def split_mapped(self, batch: PyTree) -> PyTree:
        """Splits leaves `[batch, ...]` into `[num_microbatches, shards of mapped, examples, ...]`; scalars stay."""
        batch_axes, unmapped = self.axes.batch, self.unmapped
        order = [batch_axes.index(axis) for axis in (*self.mapped, *unmapped)]

        def regroup(x: jax.Array) -> jax.Array:
            if not x.ndim or not unmapped:
                return x
            k, _, size, *shape = x.shape
            x = x.reshape(k, *self.sizes(batch_axes), size, *shape)
            x = lax.with_sharding_constraint(x, named(self.mesh, ((), *((axis,) for axis in batch_axes))))
            x = x.transpose(0, *(1 + i for i in order), *range(1 + len(order), x.ndim))
            x = x.reshape(k, axis_size(self.mesh, self.mapped), axis_size(self.mesh, unmapped) * size, *shape)
            return lax.with_sharding_constraint(x, named(self.mesh, ((), self.mapped, unmapped)))

        return jax.tree.map(regroup, self.split(batch))

    def joined(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns results of examples `[num_microbatches, ..., examples at dim, ...]` in the batch's order."""
        x = jnp.moveaxis(x, 1 + dim, 1)
        x = x.reshape(x.shape[0], self.num_shards, x.shape[1] // self.num_shards, *x.shape[2:])
        return jnp.moveaxis(lax.collapse(jnp.swapaxes(x, 0, 1), 0, 3), 0, dim)

    def joined_mapped(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns results `[num_microbatches, shards of mapped, ..., examples at dim, ...]` in the batch's order."""
        x, axes = jnp.moveaxis(x, 2 + dim, 2), (*self.mapped, *self.unmapped)
        order = [axes.index(axis) for axis in self.axes.batch]
        (k, n, size, *shape), last = x.shape, 1 + len(axes)
        x = x.reshape(k, *self.sizes(axes), n * size // axis_size(self.mesh, axes), *shape)
        x = x.transpose(*(1 + i for i in order), 0, last, *range(last + 1, x.ndim))
        return jnp.moveaxis(lax.collapse(x, 0, last + 1), 0, dim)

    def sizes(self, axes: Sequence[str]) -> list[int]:
        """Returns the sizes of mesh axes."""
        return [self.mesh.shape[axis] for axis in axes]

    @property
    def unmapped(self) -> tuple[str, ...]:
        """The axes of the batch that are not mapped."""
        return tuple(axis for axis in self.axes.batch if axis not in self.mapped)

    @property
    def grad_dims(self) -> list[Dims]:
        """How the gradient of each param is sharded."""
        return [grad_sum.dims for grad_sum in self.sums]

    def sharded(self, grad_fn: Callable[..., Any], inputs: GradInputs) -> Any:
        """Accumulates gradients that each microbatch has already reduced to shards, in float32.

        Args:
          grad_fn: `grad_fn(params, model_state, batch, key)` returns `((loss, (aux, model_state, weight)), grads)`, the
            aux as of `CombinedAux.entries`.
          inputs: its arguments for the whole batch. Each microbatch passes its model state on to the next.

        Returns:
          `((loss, (aux, model_state)), grads, parts)` of the whole batch; `parts` says how large the gradients of its
          parts are.
        """
        k, dims, (params, model_state, batch, key) = self.num_microbatches, self.grad_dims, inputs

        def pin(arrays: list[jax.Array]) -> list[jax.Array]:
            shardings = [named(self.mesh, d) for d in dims]
            return [lax.with_sharding_constraint(x, s) for x, s in zip(arrays, shardings, strict=True)]

        parts = self.split(batch)
        merged = jax.tree.map(lambda x: lax.collapse(x, 1, 3) if x.ndim else x, parts)

        def body(carry: Any, index_and_part: Any) -> Any:
            sums, model_state = carry
            index, part = index_and_part
            (loss, (aux, model_state, weight)), grads = grad_fn(
                params, model_state, _rejoin(part, merged), jax.random.fold_in(key, index)
            )
            # Without the barrier XLA:TPU puts off the head's gradient until all are squared, and holds the logits.
            grads = lax.optimization_barrier(grads)
            squares = shard_squares(grads, dims, mesh=self.mesh)
            sums = pin([_add_weighed(s, weight.divisor, g) for s, g in zip(sums, grads, strict=True)])
            return (sums, model_state), (loss, weight, aux, squares)

        zeros = pin([jnp.zeros(p.shape, wide(p.dtype)) for p in params])
        xs = (jnp.arange(k), [x for x in jax.tree.leaves(merged) if x.ndim])
        (sums, model_state), (losses, weights, auxes, squares) = lax.scan(body, (zeros, model_state), xs)
        total = total_of_grads(losses, weights)
        grads = [_divided(s, total) for s in sums]
        out = mean(losses, weights), (self.aux.combine(auxes, self.joined, lead=1), model_state)
        return out, grads, mean_of_parts(squares, weights.count)

    def local(
        self,
        grad_fn: Callable[..., Any],
        inputs: GradInputs,
        *,
        frozen: PyTree,
        convolves: bool = False,
        is_plain: bool = False,
    ) -> Any:
        """Accumulates each device's own gradients in float32, a stack of them for each param, to be summed once.

        The gradient is mapped over a leading dim of devices, so every device sees its own examples only; the stack of
        gradients is turned from devices to shards by all-to-alls and summed where it lands. Where `mapped` are the axes
        of copies of the params alone, the same is done for the devices of each copy together: only shards of gradients
        move between copies, and once a step. The loss function must not change the model state.

        `grad_fn` takes all arrays on the mesh as arguments, the `frozen` params last: `jax.shard_map` types the arrays
        that a function closes over as if it were outside. Other arguments and results are those of `sharded`. XLA
        partitions the convolutions of `jax.vmap` wrongly: a loss with convolutions is mapped by `shard_map`, as is one
        that `is_plain` over copies of the params.
        """
        k, n, (params, model_state, batch, key) = self.num_microbatches, axis_size(self.mesh, self.mapped), inputs
        parts = self.split_mapped(batch)
        own_dims = [(self.mapped, *without(dims, self.mapped)) for dims in self.grad_dims]  # axes of the model stay
        stacked = [named(self.mesh, d) for d in own_dims]
        in_axes = (None, None, jax.tree.map(lambda x: 0 if x.ndim else None, parts), 0, None)
        if convolves or (self.unmapped and is_plain):
            mapped = self.shard_mapped(grad_fn, in_axes)
        else:
            mapped = jax.vmap(grad_fn, in_axes=in_axes, spmd_axis_name=self.mapped)
        if k == 1:
            part = jax.tree.map(lambda x: x[0] if x.ndim else x, parts)
            (losses, (auxes, _, weights)), grads = mapped(params, model_state, part, jax.random.split(key, n), frozen)
            total = total_of_grads(losses, weights)
            grads = [_weighed_share(g, outer(weights.divisor, g), total) for g in grads]
            aux = self.aux.combine(jax.tree.map(lambda x: x[None], auxes), self.joined_mapped, lead=2)
            return (mean(losses, weights), (aux, model_state)), grads, None

        def body(sums: list[jax.Array], index_and_part: Any) -> Any:
            index, part = index_and_part
            keys = jax.random.split(jax.random.fold_in(key, index), n)
            (losses, (aux, _, weights)), grads = mapped(params, model_state, _rejoin(part, parts), keys, frozen)
            squares = shard_squares(grads, own_dims, mesh=self.mesh)
            sums = [_add_weighed(s, outer(weights.divisor, g), g) for s, g in zip(sums, grads, strict=True)]
            sums = [lax.with_sharding_constraint(s, own) for s, own in zip(sums, stacked, strict=True)]
            return sums, (losses, weights, aux, squares)

        zeros = [
            lax.with_sharding_constraint(jnp.zeros((n, *p.shape), wide(p.dtype)), own)
            for p, own in zip(params, stacked, strict=True)
        ]
        xs = (jnp.arange(k), [x for x in jax.tree.leaves(parts) if x.ndim])
        sums, (losses, weights, auxes, squares) = lax.scan(body, zeros, xs)
        total = total_of_grads(losses, weights)
        grads = [_divided(s, total) for s in sums]
        out = mean(losses, weights), (self.aux.combine(auxes, self.joined_mapped, lead=2), model_state)
        return out, grads, mean_of_parts(squares, weights.count)

    def shard_mapped(self, fn: Callable[..., Any], in_axes: Any) -> Callable[..., Any]:
        """Returns what `jax.vmap` of a function over the devices of the mapped axes returns.

        Within it, arrays do not have the mapped dim, not even of size 1: XLA:TPU has no native reduce-scatters of
        gradients with three dims. `in_axes` are those of `jax.vmap`, 0 or None.
        """
        is_none = lambda axis: axis is None  # noqa: E731
        over = PartitionSpec(self.mapped)
        specs = jax.tree.map(lambda axis: PartitionSpec() if axis is None else over, in_axes, is_leaf=is_none)

        def one_device(*args: PyTree) -> PyTree:
            args = jax.tree.map(
                lambda axis, part: part if axis is None else jax.tree.map(lambda x: x[0], part),
                in_axes,
                args,
                is_leaf=is_none,
            )
            return jax.tree.map(lambda x: x[None], fn(*args))

        # Within it, JAX takes constraints on this mesh alone: those of gathers split the axes along the torus.
        mesh, _ = split_axes(self.mesh, tuple(self.axes.data))
        return jax.shard_map(
            one_device, mesh=mesh, axis_names=set(self.mapped), in_specs=specs, out_specs=over, check_vma=False
        )

    def reduce(
        self, stacks: list[jax.Array], errors: Sequence[jax.Array | None]
    ) -> tuple[list[jax.Array], list[jax.Array | None]]:
        """Sums stacks `[devices of the mapped axes, ...]` of gradients to shards; returns them and new errors."""
        sums = []
        for grad_sum, stack, error in zip(self.sums, stacks, errors, strict=True):
            grad_sum = dataclasses.replace(grad_sum, dtype=grad_sum.dtype or stack.dtype)
            total, error = grad_sum.with_error(stack, error)
            sums.append((total.astype(stack.dtype), error))
        return [total for total, _ in sums], [error for _, error in sums]


def mean(losses: jax.Array, weights: PartWeight, *, nested: bool = False) -> jax.Array:
    """Returns the mean of losses by weight, or their plain mean if none of them weighs anything.

    With `nested` it is that of one of several parts of the batch.
    """
    weighed = _divided(_weigh(weights.divisor, losses).sum(), weights.total(nested=nested))
    return jnp.where((weights.divisor == 0).all(), losses.mean(), weighed).astype(losses.dtype)


def total_of_grads(losses: jax.Array, weights: PartWeight) -> jax.Array:
    """Returns what the weighed sum of gradients is divided by.

    Where no part weighs anything, the sum is 0, and so are the gradients if the losses are finite, as they are where
    the loss function avoids 0 / 0 itself. Otherwise the step is skipped, as without parts.
    """
    of_nothing = jnp.where(jnp.isfinite(losses).all(), 1, jnp.nan)
    return jnp.where((weights.divisor == 0).all(), of_nothing, weights.total(of_grads=True))


def _rejoin(parts: list[jax.Array], batch: PyTree) -> PyTree:
    """Puts one microbatch's arrays among the scalars of the batch."""
    remaining = iter(parts)
    return jax.tree.map(lambda x: next(remaining) if x.ndim else x, batch)


def _weigh(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `weight * x`, and 0 where the weight is 0: the mean of an empty microbatch may be 0 / 0."""
    return jnp.where(weight == 0, 0, weight * x)


# Inlined functions of a leaf: JAX traces them once for all leaves of a shape.


@inline_jit
def _divided(x: jax.Array, total: jax.Array) -> jax.Array:
    # As without parts: a sum that nothing is to be divided by is not finite, and the step is skipped.
    return (x / total).astype(x.dtype)


@inline_jit
def _weighed_share(x: jax.Array, weight: jax.Array, total: jax.Array) -> jax.Array:
    return _divided(_weigh(weight, x.astype(wide(x.dtype))), total).astype(x.dtype)


@inline_jit
def _add_weighed(total: jax.Array, weight: jax.Array, x: jax.Array) -> jax.Array:
    return total + _weigh(weight, x.astype(total.dtype)).astype(total.dtype)


def outer(weights: jax.Array, x: jax.Array) -> jax.Array:
    """Returns weights `[n]` so that they broadcast to `x`, `[n, ...]`."""
    return weights.reshape(-1, *(1,) * (x.ndim - 1))
