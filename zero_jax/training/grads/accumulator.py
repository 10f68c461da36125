"""Loss, gradients and aux of a batch, made of those of its parts: of microbatches, and of what devices have alone."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.core.tree import PyTree
from zero_jax.dims import Kind, Relation
from zero_jax.program.jaxprs import inline_jit
from zero_jax.sharding.chains import split_axes
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.precision import wide
from zero_jax.sharding.spec import Dims, named, without
from zero_jax.training.grads.plan import GradPlan
from zero_jax.training.noise_scale import mean_of_parts, shard_squares
from zero_jax.transforms import DeviceSum

_MISSING = object()
_MAX_NAMED = 20  # entries in a warning


class GradInputs(NamedTuple):
    """The arguments of a function of loss and gradients."""

    params: list[jax.Array]  # the params that have gradients
    model_state: PyTree  # the model state; None for leaves in host memory
    batch: PyTree  # the batch, or a part of it
    key: jax.Array  # a key
    # The other params, on the mesh: `jax.shard_map` types the arrays that a function closes over as if it were outside.
    # None where a param is not among them.
    frozen: PyTree


# `grad_fn(*inputs)` returns `((loss, (aux, model_state, weight)), grads)`, the aux as of `CombinedAux.entries`; the
# weight is None where all parts weigh the same. Given the sums of gradients before as one more argument, it returns
# those behind in the place of the gradients (`Accumulator.adds_in_place`).
GradFn = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class CombinedAux:
    """How each entry of aux is combined; those of which that is not known are left out, and not computed."""

    combinations: Mapping[str, Relation]  # how, by the path of the entry, in the order of the leaves

    def warn(self, *, num_microbatches: int, remedy: str) -> None:
        """Warns of the entries that are not returned, and says what to set so that all of them are."""
        parts = f"{num_microbatches} microbatches" if num_microbatches > 1 else "the examples of each device"
        if unknown := [f"{name!r}, because {how.why}" for name, how in self.combinations.items() if how.why]:
            more = [f"and {len(unknown) - _MAX_NAMED} more"] if len(unknown) > _MAX_NAMED else []
            named = "; ".join([*unknown[:_MAX_NAMED], *more])
            warnings.warn(
                f"aux is returned without {named}: it cannot be made of that of {parts}. {remedy} returns all of it",
                stacklevel=2,
            )

    def entries(self, aux: PyTree) -> list[jax.Array]:
        """Returns the entries of the aux of a part that are combined."""
        pairs = zip(self.combinations.values(), jax.tree.leaves(aux), strict=True)
        return [x for how, x in pairs if not how.why]

    def combine(
        self, entries: Sequence[jax.Array], join: Callable[[jax.Array, int], jax.Array], *, lead: int
    ) -> list[jax.Array]:
        """Combines entries of parts that are stacked on `lead` leading dims.

        `join` puts blocks `[..., examples, ...]` of parts in the order of the batch, from them and their dim.
        """
        known = [how for how in self.combinations.values() if not how.why]
        return [_combined(how, x, join, lead) for how, x in zip(known, entries, strict=True)]

    def unflatten(self, aux: PyTree, entries: Sequence[jax.Array]) -> PyTree:
        """Returns the aux of the batch, of the structure of `aux`: a dict lacks what is not known, others have None."""
        values = iter(entries)
        leaves = [_MISSING if how.why else next(values) for how in self.combinations.values()]
        return _without_missing(jax.tree.unflatten(jax.tree.structure(aux), leaves))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accumulator:
    """Sums loss, gradients and aux over the parts of a batch: its microbatches, and the devices of `plan.once_over`.

    A microbatch is a contiguous part of each device's shard of the batch, so splitting moves nothing.
    """

    mesh: Mesh
    axes: Axes
    plan: GradPlan
    aux: CombinedAux
    device_sums: Sequence[DeviceSum]  # how the gradients that devices have of each param are summed
    by_weight: bool = False  # whether losses and gradients are multiplied by the weights of their parts
    adds_in_place: bool = False  # whether a function of gradients adds those of microbatches itself
    has_noise: bool = False  # whether the sizes of the parts' gradients are wanted

    @property
    def num_shards(self) -> int:
        """The number of devices that a batch is spread over."""
        return axis_size(self.mesh, self.axes.batch)

    def split(self, batch: PyTree) -> PyTree:
        """Splits leaves `[batch, ...]` into `[num_microbatches, num_shards, examples, ...]`; scalars stay."""
        k, n = self.plan.num_microbatches, self.num_shards

        def split_leaf(x: jax.Array) -> jax.Array:
            if not x.ndim:
                return x
            # The shards are cut, not the batch: its first k-th is on some of the devices alone.
            x = x.reshape(n, k, x.shape[0] // (n * k), *x.shape[1:])
            x = lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(self.axes.batch)))
            x = jnp.moveaxis(x, 1, 0)
            return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(None, self.axes.batch)))

        return jax.tree.map(split_leaf, batch)

    def parts(self, batch: PyTree) -> PyTree:
        """Splits leaves `[batch, ...]` into microbatches `[num_microbatches, examples, ...]`; scalars stay.

        With gradients of devices' own they are `[num_microbatches, devices of once_over, examples, ...]`.
        """
        once, each_pass = self.plan.once_over, self.each_pass_over
        order = [self.axes.batch.index(axis) for axis in (*once, *each_pass)]

        def regroup(x: jax.Array) -> jax.Array:  # [k, shards, examples of a shard, ...]
            if not x.ndim or not each_pass:
                return x
            if not once:
                return lax.collapse(x, 1, 3)
            k, _, size, *shape = x.shape
            # A dim for each mesh axis, so that the axes of `once` come first and no device's examples move.
            x = x.reshape(k, *(self.mesh.shape[axis] for axis in self.axes.batch), size, *shape)
            x = lax.with_sharding_constraint(x, named(self.mesh, ((), *((axis,) for axis in self.axes.batch))))
            x = x.transpose(0, *(1 + i for i in order), *range(1 + len(order), x.ndim))
            x = x.reshape(k, axis_size(self.mesh, once), axis_size(self.mesh, each_pass) * size, *shape)
            return lax.with_sharding_constraint(x, named(self.mesh, ((), once, each_pass)))

        return jax.tree.map(regroup, self.split(batch))

    def joined(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns results of `parts`, `[num_microbatches, ..., examples at dim, ...]`, in the batch's order."""
        # The batch is of shards, each of which is of microbatches: [shards, k, examples].
        if not self.plan.once_over:
            x = jnp.moveaxis(x, 1 + dim, 1)
            x = x.reshape(x.shape[0], self.num_shards, x.shape[1] // self.num_shards, *x.shape[2:])
            return jnp.moveaxis(lax.collapse(jnp.swapaxes(x, 0, 1), 0, 3), 0, dim)
        x, axes = jnp.moveaxis(x, 2 + dim, 2), (*self.plan.once_over, *self.each_pass_over)
        order = [axes.index(axis) for axis in self.axes.batch]  # back from that of `parts`
        (k, n, size, *shape), last = x.shape, 1 + len(axes)
        x = x.reshape(k, *(self.mesh.shape[axis] for axis in axes), n * size // axis_size(self.mesh, axes), *shape)
        x = x.transpose(*(1 + i for i in order), 0, last, *range(last + 1, x.ndim))
        return jnp.moveaxis(lax.collapse(x, 0, last + 1), 0, dim)

    @property
    def each_pass_over(self) -> tuple[str, ...]:
        """The axes of the batch over which gradients are summed in every backward pass."""
        return tuple(axis for axis in self.axes.batch if axis not in self.plan.once_over)

    @property
    def grad_dims(self) -> list[Dims]:
        """How the accumulated gradient of each param is sharded, a dim of the devices of `once_over` first."""
        once = self.plan.once_over
        dims = [grad_sum.dims for grad_sum in self.device_sums]
        # A device of `once` has all of its own gradient, but for what is sharded over other axes (the model's).
        return [(once, *without(each, once)) for each in dims] if once else dims

    def accumulate(self, grad_fn: GradFn, inputs: GradInputs) -> Any:
        """Accumulates the gradients of the parts of a batch in float32.

        With `once_over` the loss is mapped over a leading dim of devices, so that each sees its own examples only. The
        stack of gradients is turned from devices to shards by all-to-alls, and summed where it lands (`reduce`). The
        loss function must not change the model state then. Else each microbatch passes its model state on to the next,
        and its gradients are in shards already.

        Returns:
          `((loss, (aux, model_state)), grads, parts)` of the whole batch, the gradients stacked with `once_over`;
          `parts` says how large the gradients of its parts are, None if that is not wanted.
        """
        k, once = self.plan.num_microbatches, self.plan.once_over
        if k == 1 and not once:
            (loss, (aux, model_state, *_)), grads = grad_fn(*inputs)
            return (loss, (aux, model_state)), grads, None
        parts, num_devices = self.parts(inputs.batch), axis_size(self.mesh, once)
        mapped = self.mapped(grad_fn, parts) if once else grad_fn

        def grads_of(part: PyTree, key: jax.Array, model_state: PyTree, *sums: list[jax.Array]) -> Any:
            keys = jax.random.split(key, num_devices) if once else key
            return mapped(inputs.params, model_state, part, keys, inputs.frozen, *sums)

        of_parts = self.of_microbatches if k > 1 else self.of_devices
        (losses, weights, auxes, squares), grads, model_state = of_parts(grads_of, inputs, parts)
        loss = mean(losses, weights if self.by_weight else None)
        aux = self.aux.combine(auxes, self.joined, lead=2 if once else 1)
        if squares is None:
            return (loss, (aux, model_state)), grads, None
        weights = jnp.ones(losses.shape) if weights is None else weights
        return (loss, (aux, model_state)), grads, mean_of_parts(squares, weights, has_weight=not self.by_weight)

    def of_microbatches(self, grads_of: Callable[..., Any], inputs: GradInputs, parts: PyTree) -> Any:
        """Returns losses, weights, aux and squares of gradients of microbatches, the mean gradients, and model state.

        `grads_of` takes a part, its key and its model state, and with `adds_in_place` the sums before.
        """
        dims, once = self.grad_dims, self.plan.once_over
        shardings, k = [named(self.mesh, d) for d in dims], self.plan.num_microbatches

        def pin(arrays: list[jax.Array]) -> list[jax.Array]:
            return [lax.with_sharding_constraint(x, s) for x, s in zip(arrays, shardings, strict=True)]

        def body(carry: Any, index_and_part: Any) -> Any:
            (sums, model_state), (index, part) = carry, index_and_part
            key = jax.random.fold_in(inputs.key, index)
            part = _with_scalars(part, parts)
            if self.adds_in_place:
                (loss, (aux, _, weight)), sums = grads_of(part, key, model_state, sums)
                return (pin(sums), model_state), (loss, weight, aux, None)
            (loss, (aux, new_state, weight)), grads = grads_of(part, key, model_state)
            if not once:
                model_state = new_state
            squares = None
            if self.has_noise:
                # Without the barrier XLA:TPU puts off the head's gradient until all are squared, and holds the logits.
                grads = grads if once else lax.optimization_barrier(grads)
                squares = shard_squares(grads, dims, mesh=self.mesh)
            factor = weight if self.by_weight else None
            sums = [added(s, g, factor) for s, g in zip(sums, grads, strict=True)]
            # Without the pin XLA would choose how the sums are sharded that the loop carries.
            return (pin(sums), model_state), (loss, weight, aux, squares)

        lead = (axis_size(self.mesh, once),) if once else ()
        zeros = pin([jnp.zeros((*lead, *p.shape), wide(p.dtype)) for p in inputs.params])
        # Scalars have no dim of microbatches. A list: a batch's class may check its leaves, which None is not.
        xs = (jnp.arange(k), [x for x in jax.tree.leaves(parts) if x.ndim])
        (sums, model_state), made = lax.scan(body, (zeros, inputs.model_state), xs)
        losses, weights, *_ = made
        total = self.total_of_grads(losses, weights)
        return made, [_divided(s, total) for s in sums], model_state

    def of_devices(self, grads_of: Callable[..., Any], inputs: GradInputs, parts: PyTree) -> Any:
        """Returns what `of_microbatches` does, of the one microbatch that each device of `once_over` has."""
        part, model_state = jax.tree.map(lambda x: x[0] if x.ndim else x, parts), inputs.model_state
        (losses, (auxes, _, weights)), grads = grads_of(part, inputs.key, model_state)
        squares = shard_squares(grads, self.grad_dims, mesh=self.mesh) if self.has_noise else None
        total, factor = self.total_of_grads(losses, weights), weights if self.by_weight else None
        auxes = jax.tree.map(lambda x: x[None], auxes)  # as of a scan over one microbatch
        return (losses, weights, auxes, squares), [_weighed_share(g, factor, total) for g in grads], model_state

    def total_of_grads(self, losses: jax.Array, weights: jax.Array | None) -> Any:
        """Returns what the sum of gradients is divided by.

        Where no part weighs anything, the sum is 0, and so are the gradients if the losses are finite, as they are
        where the loss function avoids 0 / 0 itself. Otherwise the step is skipped, as without parts.
        """
        if not self.by_weight or weights is None:
            return losses.size
        of_nothing = jnp.where(jnp.isfinite(losses).all(), 1, jnp.nan)
        return jnp.where((weights == 0).all(), of_nothing, weights.sum())

    def mapped(self, grad_fn: GradFn, parts: PyTree) -> GradFn:
        """Returns `grad_fn` mapped over the devices of `once_over`.

        Within a `jax.shard_map`, arrays do not have the mapped dim, not even of size 1: XLA:TPU has no native
        reduce-scatters of gradients with three dims.
        """
        once = self.plan.once_over
        in_axes = (None, None, jax.tree.map(lambda x: 0 if x.ndim else None, parts), 0, None)  # of `GradInputs`
        in_axes += (0,) if self.adds_in_place else ()
        if self.plan.map_by == "vmap":
            return jax.vmap(grad_fn, in_axes=in_axes, spmd_axis_name=once)
        is_none, of_once = lambda axis: axis is None, PartitionSpec(once)
        specs = jax.tree.map(lambda axis: PartitionSpec() if axis is None else of_once, in_axes, is_leaf=is_none)

        def one_device(*args: PyTree) -> PyTree:
            own = lambda axis, part: part if axis is None else jax.tree.map(lambda x: x[0], part)  # noqa: E731
            return jax.tree.map(lambda x: x[None], grad_fn(*jax.tree.map(own, in_axes, args, is_leaf=is_none)))

        # Within it, JAX takes constraints on this mesh alone: those of gathers split the axes along the torus.
        mesh, _ = split_axes(self.mesh, tuple(axis for axis in self.axes.data if axis not in once))
        # With those of size 1 no axis is left to XLA where there are no others, as kernels for TPUs have to have it.
        manual = {*once, *(axis for axis, size in mesh.shape.items() if size == 1)}
        where = {"mesh": mesh, "axis_names": manual, "in_specs": specs, "out_specs": of_once}
        return jax.shard_map(one_device, **where, check_vma=False)

    def reduce(
        self, stacks: list[jax.Array], errors: Sequence[jax.Array | None]
    ) -> tuple[list[jax.Array], list[jax.Array | None]]:
        """Sums stacks `[devices of the mapped axes, ...]` of gradients to shards; returns them and new errors."""
        sums, left = [], []
        for grad_sum, stack, error in zip(self.device_sums, stacks, errors, strict=True):
            total, error = dataclasses.replace(grad_sum, dtype=grad_sum.dtype or stack.dtype).with_error(stack, error)
            sums.append(total.astype(stack.dtype))
            left.append(error)
        return sums, left


def mean(losses: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Returns the mean of losses by weight, or their plain mean if none of them weighs anything."""
    if weights is None:
        return losses.mean()
    weighed = _divided(_weigh(weights, losses).sum(), weights.sum())
    return jnp.where((weights == 0).all(), losses.mean(), weighed).astype(losses.dtype)


def _with_scalars(arrays: list[jax.Array], batch: PyTree) -> PyTree:
    """Puts one microbatch's arrays among the scalars of the batch."""
    remaining = iter(arrays)
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
def _weighed_share(x: jax.Array, weights: jax.Array | None, total: jax.Array) -> jax.Array:
    wider = x.astype(wide(x.dtype))
    return _divided(wider if weights is None else _weigh(over(weights, x), wider), total).astype(x.dtype)


@inline_jit
def added(total: jax.Array, x: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Returns a sum and another gradient, multiplied by what parts weigh; one of no weight is left out."""
    wider = x.astype(total.dtype)
    return total + (wider if weights is None else _weigh(over(weights, x), wider).astype(total.dtype))


def over(weights: jax.Array, x: jax.Array) -> jax.Array:
    """Returns weights `[n]` so that they broadcast to `x`, `[n, ...]`; a scalar as it is."""
    return weights.reshape(-1, *(1,) * (x.ndim - 1)) if weights.ndim else weights


def _without_missing(tree: PyTree) -> PyTree:
    if type(tree) is dict:
        return {name: _without_missing(x) for name, x in tree.items() if x is not _MISSING}
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(tree)):
        return None if tree is _MISSING else tree
    return jax.tree.map(_without_missing, tree, is_leaf=lambda x: x is not tree)


def _combined(how: Relation, x: jax.Array, join: Callable[[jax.Array, int], jax.Array], lead: int) -> jax.Array:
    """Returns an entry of the batch, of those of parts; see `CombinedAux.combine`."""
    dtype, over, num_parts = x.dtype, tuple(range(lead)), math.prod(x.shape[:lead])
    if how.kind in (Kind.MAX, Kind.MIN) and jnp.issubdtype(dtype, jnp.bool_):
        return x.any(over) if how.kind is Kind.MAX else x.all(over)
    if how.kind in (Kind.MAX, Kind.MIN):
        return x.max(over) if how.kind is Kind.MAX else x.min(over)
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    x = x.astype(wide(dtype)) if is_float else x
    if how.kind is Kind.SAME:
        x = x[(0,) * lead]
    else:
        x = join(x, how.dim) if how.kind is Kind.ROWS else x.sum(over, dtype=x.dtype)
    if how.power:  # a mean is a sum with power 1
        scale = num_parts ** -float(how.power)
        x = x * (scale if is_float else round(scale))
    return x.astype(dtype)
