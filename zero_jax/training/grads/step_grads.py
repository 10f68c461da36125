"""Loss and gradients of a step, by the plan that the config asks for and the loss allows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zero_jax.core.tree import PyTree
from zero_jax.core.variables import as_variables, joined
from zero_jax.dims import Kind, Relation
from zero_jax.program.loss import LossProgram
from zero_jax.sharding.precision import wide
from zero_jax.sharding.spec import named
from zero_jax.training.batch import shapes_of_part
from zero_jax.training.grads.accumulator import Accumulator, CombinedAux, GradFn, GradInputs, added, mean, over
from zero_jax.training.grads.choice import judge
from zero_jax.training.grads.plan import GradPlan, refuse_coded
from zero_jax.training.loss.function import check_unchanged, model_state_changes, on_devices, pinned_model_state
from zero_jax.training.loss.program import StepLoss
from zero_jax.training.noise_scale import Parts
from zero_jax.training.state.train_state import flags_of_all, merge
from zero_jax.transforms import (
    HostParam,
    MovedGrads,
    SummedStacks,
    differentiated,
    used_shapes,
    weight_alone,
    with_gradient,
    without_derivatives,
)


class StepGrads(NamedTuple):
    """Loss and gradients of a batch."""

    loss: jax.Array  # the loss, unscaled
    aux: PyTree  # what the loss function returned beside it
    model_state: PyTree  # the new model state; None for leaves in host memory
    grads: PyTree  # scaled gradients, sharded as the master params, None for params without one
    parts: Parts | None  # the squared norms for the noise scale; None where it is not wanted
    errors: PyTree  # what quantization dropped of the gradients


def loss_and_grads(
    loss: StepLoss,
    arguments: tuple[PyTree, PyTree, jax.Array],
    *,
    needed: list[bool],
    loss_scale: Any,
    errors: PyTree = None,
    differentiable: bool = False,
) -> StepGrads:
    """Returns the loss and gradients of a batch, accumulated over its microbatches.

    `arguments` are those of the loss, as `StepLoss.cast` returns them, and the step's key; `needed` tells for each
    trainable param whether its gradient is computed. `errors` are what quantization dropped of the last step's. With
    `differentiable` gradients are not added in place, so that they have derivatives.

    Raises:
      ValueError: the loss function changes model state that is on the host.
    """
    scale = 1 if loss_scale is None else loss_scale.scale
    scaled = _ScaledLoss(loss, arguments, needed, scale, differentiable)
    if loss.placement.num_stages > 1:
        why = f"{_TAKEN}, which a pipeline does not have: take a mesh without `pipe`"
        scaled.inputs = without_derivatives(scaled.inputs, None, why)
    # Kept without the loss scale, which changes between steps, and added to gradients that have it.
    own_errors = [None if x is None else x * scale for x in scaled.of_each(errors)]
    if scaled.judged is None:
        (value, (aux, new_state)), grads = scaled.grad_fn(loss.placed(scaled.program))(*scaled.inputs)
        parts, plan = None, loss.placement.grad_plan
    else:
        try:
            (value, (entries, new_state)), grads, parts, own_errors, plan = scaled.accumulated(own_errors)
        except Exception as error:
            scaled.explain(error)
            raise
        aux = scaled.judged.aux.unflatten(scaled.judged.aux_shapes, entries)
    if errors is not None:
        errors = scaled.full([None if x is None else x / scale for x in own_errors])
    grads = scaled.full(grads) if plan.sums_to_masters else loss.placement.to_update(scaled.full(grads))
    return StepGrads(value / jnp.asarray(scale, value.dtype), aux, new_state, grads, parts, errors)


_TAKEN = "the optimizer, or a derivative through the step, takes second derivatives of the loss"
_NOT_IN_PLACE = (
    f"{_TAKEN}, and gradients of scanned layers that are added up over microbatches at stages 0 and 1 have no "
    "derivatives: set num_microbatches=1 or stage=2"
)


class _ScaledLoss:
    """The scaled loss of a step, as a function of the params that have gradients, and how these are computed."""

    def __init__(
        self,
        loss: StepLoss,
        arguments: tuple[PyTree, PyTree, jax.Array],
        needed: list[bool],
        scale: Any,
        differentiable: bool,
    ):
        variables, batch, key = arguments
        self.loss, self.placement, self.scale, self.differentiable = loss, loss.placement, scale, differentiable
        self.arguments = used_shapes(variables), batch, key  # what the program is traced for
        self.leaves, self.tree = jax.tree.flatten(as_variables(variables).params)  # all params
        self.has_grad = flags_of_all(self.leaves, needed)
        self.model_state = as_variables(variables).model_state  # with `HostParam`s
        model_state = on_devices(self.model_state)
        if len(jax.tree.leaves(model_state)) < len(jax.tree.leaves(self.model_state)):
            check_unchanged(self.model_state, model_state_changes(loss.fused, *self.arguments))
        # A `JudgedLoss`, if it is called on parts of the batch
        self.judged: Any = judge(loss, self.arguments) if self.placement.grad_plan.takes_parts else None
        judged = self.judged
        self.program = loss.to_place(judged.program, mapped=judged.plan.is_vmapped) if judged else loss.to_place()
        shardings = self.pick(jax.tree.leaves(self.placement.grad_shardings()))
        free = [differentiated(x, s) for x, s in zip(self.pick(self.leaves), shardings, strict=True)]
        pairs = zip(self.leaves, self.has_grad, strict=True)
        # A `HostParam` is no argument: it is closed over, and stays in host memory (`variables`).
        frozen = [None if flag or isinstance(x, HostParam) else x for x, flag in pairs]
        self.inputs = GradInputs(free, model_state, batch, key, frozen)

    def pick(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns what belongs to the params that have gradients, of something for each param."""
        return [x for x, flag in zip(leaves, self.has_grad, strict=True) if flag]

    def of_each(self, tree: PyTree) -> list[Any]:
        """Returns the leaves of a tree like the params (or None) for the params that have gradients."""
        return self.pick([None] * len(self.leaves) if tree is None else self.tree.flatten_up_to(tree))

    def full(self, picked: Sequence[Any]) -> PyTree:
        """Returns a tree like the params of what belongs to those that have gradients; None for the others."""
        remaining = iter(picked)
        return self.tree.unflatten([next(remaining) if flag else None for flag in self.has_grad])

    def variables(self, free: Sequence[Any], model_state: PyTree, frozen: Sequence[Any]) -> PyTree:
        """Returns the first argument of the loss, made of what belongs to it in `GradInputs`."""
        remaining = iter(free)
        params = [
            with_gradient(x, next(remaining)) if flag else x if frozen_x is None else frozen_x
            for x, frozen_x, flag in zip(self.leaves, frozen, self.has_grad, strict=True)
        ]
        return joined(self.tree.unflatten(params), merge(self.model_state, model_state))

    def value(self, loss_fn: Callable[..., Any], *inputs: Any) -> tuple[jax.Array, Any]:
        """Returns the scaled value of a placed loss function, and what belongs to it."""
        free, model_state, batch, key, frozen = inputs
        variables = self.variables(free, model_state, frozen)
        loss, (aux, new_state, *weights) = loss_fn(variables, batch, key)
        pinned = pinned_model_state(new_state, self.placement.model_state_shardings(), self.model_state)
        # Widened first: a loss of float16 times the scale overflows.
        loss = loss.astype(wide(loss.dtype)) * self.scale
        if self.judged is None:
            return loss, (aux, pinned)
        # One weight, or None where all parts weigh the same.
        (weight,) = jax.tree.map(lambda x: lax.stop_gradient(jnp.asarray(x, wide(x.dtype))), weights)
        return loss, (self.judged.aux.entries(aux), pinned, weight)

    def grad_fn(self, loss_fn: Callable[..., Any]) -> GradFn:
        """Returns the function of the scaled loss and its gradients."""
        return jax.value_and_grad(functools.partial(self.value, loss_fn), has_aux=True)

    def adding_grad_fn(self, program: LossProgram, *, by_weight: bool) -> GradFn:
        """Returns the function of the scaled loss and sums of gradients, to which scans over layers add in place."""

        def add(free: list[jax.Array], *others_and_sums: Any) -> Any:
            *others, before = others_and_sums
            used_otherwise = list[bool]()  # for each param, whether anything but such a scan reads it
            adds = list[bool]()

            def value(free: list[jax.Array], sums: list[jax.Array], share: jax.Array) -> Any:
                stacks: Any = None

                def loss_fn(*args: Any) -> Any:
                    nonlocal stacks
                    traced, stacks = program.trace(*args), SummedStacks(jax.tree.leaves(args), free, sums, share)
                    results = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in stacks.run(traced.closed)]
                    return jax.tree.unflatten(jax.tree.structure(traced.out_shape), results)

                loss, aux = self.value(loss_fn, free, *others)
                used_otherwise.extend(stacks.used_otherwise)
                adds.append(stacks.adds)
                return (loss, stacks.sums, stacks.share), aux

            # Of sums and of the share only the derivative is wanted, not the value: the sums until now go into the
            # backward pass as cotangents, to which the scans add, and the weight, which the forward pass makes, as one.
            zeros = [jnp.zeros_like(x) for x in before], jnp.zeros((), float)
            (loss, _, share), pullback, aux = jax.vjp(value, free, *zeros, has_aux=True)
            weight = aux[-1] if by_weight else None
            if any(adds):
                before = without_derivatives(before, (free, others), _NOT_IN_PLACE)
            share_cotangent = jnp.ones_like(share) if weight is None else weight.astype(share.dtype)
            grads, sums, _ = pullback((jnp.ones_like(loss), before, share_cotangent))
            each = zip(sums, grads, used_otherwise, strict=True)
            return (loss, aux), [added(s, g, weight) if flag else s for s, g, flag in each]

        return add

    def accumulated(self, errors: Sequence[Any]) -> Any:
        """Returns `((loss, (aux, model_state)), grads, parts, errors, plan)`; warns of what is not as asked for."""
        plan = self.judged.plan
        accumulator, numbers = self.accumulator(plan), self.pick(range(len(self.leaves)))
        leaves = self.pick(jax.tree.leaves(self.placement.params))
        of_each = zip(numbers, leaves, accumulator.device_sums, strict=True)
        parts_of_stages = {number: (leaf.path, grad_sum.dims) for number, leaf, grad_sum in of_each}
        moved = MovedGrads(parts=parts_of_stages, copies=self.placement.axes.data)
        try:
            out, grads, parts = self.of_plan(accumulator, moved)
        except NotImplementedError as error:
            if not plan.once_over:
                raise
            # The plan that sums gradients in every pass maps nothing.
            why = f"jax.vmap has no rule for an operation of loss_fn ({error})"
            if any(grad_sum.coding for grad_sum in accumulator.device_sums):
                refuse_coded(why)
            accumulator = self.accumulator(plan.summed_each_pass(why))
            out, grads, parts = self.of_plan(accumulator)
        if accumulator.plan.once_over:
            grads, errors = accumulator.reduce(grads, errors)
            # Gradients of groups of layers move to where they are stored once they are sums: once, as shards.
            for i, number in enumerate(numbers):
                if number in moved.moves:
                    sharding = named(accumulator.mesh, accumulator.device_sums[i].dims)
                    grads[i] = lax.with_sharding_constraint(moved.moves[number](grads[i]), sharding)
        self.judged.warn(accumulator.plan)
        return out, grads, parts, errors, accumulator.plan

    def explain(self, error: Exception) -> None:
        """Adds a note to an error of a loss function that takes the whole batch, and no microbatch."""
        (variables, batch, key), k = self.arguments, self.loss.config.num_microbatches
        if k == 1 or self.placement.num_stages > 1:  # a pipeline's own error says so
            return

        def takes(batch: PyTree) -> bool:
            try:
                self.loss.fused.trace(variables, batch, key)
            except Exception:
                return False
            return True

        part = shapes_of_part(batch, k)
        if takes(part) or not takes(batch):
            return
        size, of_part = (max(x.shape[0] for x in jax.tree.leaves(tree) if x.shape) for tree in (batch, part))
        error.add_note(
            f"loss_fn takes the batch of {size} examples, and no microbatch of {of_part} (num_microbatches={k}): it, "
            "or a node of the batch such as a sparse matrix, has a size of its own. Take sizes from the arrays, as "
            "len(x), and make such nodes in loss_fn, or set num_microbatches=1"
        )

    def accumulator(self, plan: GradPlan) -> Accumulator:
        return Accumulator(
            mesh=self.placement.mesh,
            axes=self.placement.axes,
            plan=plan,
            aux=self.judged.aux,
            device_sums=self.pick(self.placement.grad_sums(plan)),
            by_weight=self.judged.separable.on_parts.by_weight,
            adds_in_place=plan.adds_in_place and not (self.loss.config.noise_scale or self.differentiable),
            has_noise=self.loss.config.noise_scale,
        )

    def of_plan(self, accumulator: Accumulator, moved: MovedGrads | None = None) -> Any:
        """Returns what `Accumulator.accumulate` does, with the counts of the batch; gradients may be to be `moved`."""
        inputs = self.inputs._replace(batch=(self.inputs.batch, self.counts(accumulator)))
        return accumulator.accumulate(self.part_grads(accumulator, moved), inputs)

    def counts(self, accumulator: Accumulator) -> list[jax.Array]:
        """Returns the counts of the batch: those of its parts are summed as its gradients are."""
        powers, plan = self.judged.separable.on_parts.counts, accumulator.plan
        if not powers:
            return []

        def count(_: Any, model_state: PyTree, batch: PyTree, key: jax.Array, variables: Any = None) -> Any:
            known = self.arguments[0]
            if variables is not None:  # a `jax.shard_map` has params of its own mesh
                free, frozen = variables
                known = used_shapes(self.variables(free, model_state, frozen))
            counts = self.judged.program.counts(known, batch, key)
            return jnp.zeros(()), (counts, model_state, None)

        # The accumulator of the gradients, of none: counts are the aux of a loss of 0, which is summed over the parts.
        sums = {str(i): Relation(kind=Kind.SUM, power=power) for i, power in powers.items()}
        counter = dataclasses.replace(
            accumulator, aux=CombinedAux(sums), device_sums=[], by_weight=False, adds_in_place=False
        )
        grad_fn = self.quantized_grads(counter, count) if plan.at_use else lambda *inputs: (count(*inputs), [])
        inputs = self.inputs._replace(params=[], frozen=(self.inputs.params, self.inputs.frozen))
        ((_, (counts, _)), _, _) = counter.accumulate(grad_fn, inputs)
        return counts

    def part_grads(self, accumulator: Accumulator, moved: MovedGrads | None) -> GradFn:
        """Returns the function of loss and gradients of a part."""
        loss, plan = self.loss, accumulator.plan
        if not plan.at_use:
            if plan.sums_to_masters:
                program = loss.staged(self.program, self.placement.axes.of_device, moved)
                if accumulator.adds_in_place:
                    return self.adding_grad_fn(program, by_weight=accumulator.by_weight)
                return self.grad_fn(program)
            return self.grad_fn(loss.placed(self.program, with_copies=not plan.once_over))
        mapped = loss.placed(self.program, with_copies=False, mapped=True)

        def value(free: Any, model_state: PyTree, batch: PyTree, key: jax.Array) -> Any:
            return self.value(mapped, free, model_state, batch, key, self.leaves)

        weigh = None
        if accumulator.by_weight:
            variables, batch, key = self.arguments
            counts = jax.eval_shape(self.judged.program.counts, variables, batch, key)
            try:
                weigh = weight_alone(self.judged.program, variables, (batch, counts), key)
            except NotImplementedError as error:
                refuse_coded(str(error))
        return self.quantized_grads(accumulator, value, weigh)

    def quantized_grads(
        self, accumulator: Accumulator, loss_fn: Callable[..., Any], weigh: Callable[..., Any] | None = None
    ) -> GradFn:
        """Returns a `GradFn` of a microbatch, or of that of a copy of the params, that sends gradients at each use.

        It is a `jax.vmap` over the devices of a copy of the params, each of which sees its own examples only.
        `loss_fn(params, model_state, batch, key)` returns `(loss, (aux, model_state, weight))`; devices' gradients of
        it are summed at each use of a param (`GatherOptions.mapped`). `weigh` returns what a part weighs; None if all
        weigh the same.

        Raises:
          ValueError: devices cannot have gradients of their own.
        """
        if self.judged.separable.convolves:
            refuse_coded("XLA partitions each device's own convolutions wrongly")
        axes = self.placement.axes.of_params(with_copies=False)
        plan = dataclasses.replace(accumulator.plan, num_microbatches=1, batch_axes=axes.batch, once_over=axes.batch)
        within = dataclasses.replace(accumulator, axes=axes, plan=plan)

        def grads(*inputs: Any) -> Any:
            try:
                return _of_microbatch(within, loss_fn, weigh, GradInputs(*inputs))
            except NotImplementedError as error:
                refuse_coded(str(error))

        return grads


def _of_microbatch(
    accumulator: Accumulator, loss_fn: Callable[..., Any], weigh: Callable[..., Any] | None, inputs: GradInputs
) -> Any:
    """Returns loss and gradients of one microbatch; `weigh` is the weight of a part, None if all weigh the same."""
    params, model_state, batch, key, _ = inputs  # the loss function closes over the frozen params

    @functools.partial(jax.value_and_grad, has_aux=True)
    def share_of_loss(params: PyTree, batch: PyTree, key: jax.Array, share: jax.Array) -> Any:
        loss, (aux, _, weight) = loss_fn(params, model_state, batch, key)
        return loss * share, (loss, aux, weight)

    n, batch_axes = accumulator.num_shards, accumulator.axes.batch
    parts = jax.tree.map(lambda x: x[0] if x.ndim else x, accumulator.split(batch))  # [devices, examples, ...]
    each = jax.tree.map(lambda x: 0 if x.ndim else None, parts)
    keys = jax.random.split(key, n)
    over_devices = functools.partial(jax.vmap, spmd_axis_name=batch_axes, axis_size=n)
    own_parts, weights, shares = parts, None, jnp.ones(n)
    if weigh is not None:
        # Before the gradients: these are summed over devices within the backward pass, where each has to be weighed.
        weights = over_devices(weigh, in_axes=(each, 0))(parts, keys)
        # A part that weighs nothing may have a loss of 0 / 0: its device takes the heaviest part, for no share.
        heaviest, is_empty = jnp.argmax(weights), weights == 0
        parts = jax.tree.map(lambda x: jnp.where(over(is_empty, x), x[heaviest], x) if x.ndim else x, parts)
        shares = jnp.where(is_empty.all(), 1, weights * n / jnp.where(is_empty.all(), 1, weights.sum()))
    shares = lax.with_sharding_constraint(shares, NamedSharding(accumulator.mesh, PartitionSpec(batch_axes)))
    # The gradients are not mapped in the result: what gathers a param has summed them.
    in_axes, out_axes = (None, each, 0, 0), ((0, (0, 0, 0)), None)
    (_, (losses, auxes, loss_weights)), sums = over_devices(share_of_loss, in_axes=in_axes, out_axes=out_axes)(
        params, parts, keys, shares
    )
    if weigh is not None:  # those of the parts as they are
        aux_of = lambda part, key: loss_fn(params, model_state, part, key)[1][0]  # noqa: E731
        auxes = over_devices(aux_of, in_axes=(each, 0))(own_parts, keys)
    auxes = jax.tree.map(lambda x: x[None], auxes)
    aux = accumulator.aux.combine(auxes, accumulator.joined, lead=2)
    grads = [(x.astype(wide(x.dtype)) / n).astype(x.dtype) for x in sums]
    weight = loss_weights if weights is None else weights
    return (mean(losses, weights), (aux, model_state, None if weight is None else weight.sum())), grads
