"""The program of a train step: loss, gradients, update, and how each of them is sharded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.core.loss_program import LossProgram
from zero_jax.core.tree import PyTree
from zero_jax.core.variables import as_variables, joined
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.precision import wide
from zero_jax.training.batch import check_batch
from zero_jax.training.compiled_step import TrainStep
from zero_jax.training.evaluation import Metrics, replicated
from zero_jax.training.grads.accumulator import Accumulator, GradInputs
from zero_jax.training.grads.choice import accumulated, judge
from zero_jax.training.grads.norm import global_norm
from zero_jax.training.grads.partial import fill_zeros, keep_same, leaf_index
from zero_jax.training.grads.quantized import quantized_grads, refuse_own
from zero_jax.training.loss_function import (
    MeshLoss,
    check_unchanged,
    model_state_changes,
    normalize_loss,
    on_devices,
    pinned_model_state,
)
from zero_jax.training.loss_program import StepLoss
from zero_jax.training.optimizer.frozen import flags_of_all, needed_grads, unchanged
from zero_jax.training.optimizer.update import trace_update, value_dtype
from zero_jax.training.state.making import check_optimizer
from zero_jax.training.state.placement import Placement, make_placement
from zero_jax.training.state.train_state import TrainState, merge, trainable, used_by_optimizer
from zero_jax.training.state_update import OffloadedState, UpdateProgram, pinned
from zero_jax.training.zero_config import ZeroConfig, check_config
from zero_jax.transforms import HostParam, differentiated, used_shapes, with_gradient


def make_train_step(
    loss_fn: Callable[..., Any] | MeshLoss, tx: optax.GradientTransformation, *, mesh: Mesh, config: ZeroConfig
) -> TrainStep:
    """Makes the jitted step `state, metrics = step(state, batch)`, which donates the state.

    Args:
      loss_fn: `loss_fn(params, batch)` or `loss_fn(params, batch, key)`, returning a scalar loss (a mean over the
        batch) or `(loss, aux)`; with a parameter `model_state` it gets the state's and returns
        `(loss, aux, model_state)`. With `num_microbatches > 1` it is called on parts of the batch; at stages 0 and 1 on
        the part of one device where it can be (docs/stages.md), so that gradients are summed across devices once. A
        loss that mixes examples is another loss then: a warning names the line.
      tx: any optax transformation; the one that `init_state` was given.
      mesh: the mesh.
      config: stage, precision, microbatches, clipping.
    """
    axes, tx = check_config(config).axes_of(mesh), check_optimizer(tx)
    program = _Program(loss_fn=normalize_loss(loss_fn, mesh, axes), tx=tx, mesh=mesh, config=config)
    return TrainStep(program, axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Program(UpdateProgram):
    """The arguments of `make_train_step`; its methods are traced once per compile."""

    loss_fn: Callable[..., Any]

    def step(self, state: TrainState, batch: PyTree, placement: Placement | None = None) -> tuple[TrainState, Metrics]:
        placement = placement or make_placement(state.variables, mesh=self.mesh, config=self.config)
        check_batch(batch, mesh=self.mesh, axes=placement.axes, num_microbatches=self.config.num_microbatches)
        offloaded = OffloadedState.of(state, placement)
        masters = offloaded.masters()
        key = jax.random.fold_in(state.key, state.step)
        traced = trace_update(self.tx, trainable(masters), state.opt_state)
        needed = needed_grads(traced)
        step_loss = StepLoss(LossProgram(self.loss_fn), placement, self.config)
        variables, batch = step_loss.cast(state.variables, batch, key)
        (loss, (aux, model_state)), grads, parts, errors = self.grads(
            step_loss, variables, batch, key, needed=needed, loss_scale=state.loss_scale, errors=state.grad_errors
        )
        scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
        scaled_grads, grads = grads, self.unscale(grads, masters, placement, state.loss_scale)
        norm = global_norm(jax.tree.leaves(grads))
        loss = loss / scale.astype(loss.dtype)
        offers = {"value": loss.astype(value_dtype(trainable(masters))), "full_grads": fill_zeros(grads, masters)}
        if traced.calls_functions:
            if errors is not None:
                raise ValueError(
                    "quantize: error_feedback: the optimizer takes gradients at other params (a line search, or SAM), "
                    "to which the error of the last one does not belong: leave error_feedback out"
                )
            offers |= self.objective(state, step_loss, batch, key, needed)
        finite = norm.first_nonfinite < 0
        same = unchanged(traced, needed=needed)
        if offloaded.any:
            scalars = norm, finite, offers["value"], state.loss_scale
            new_masters, low, opt_state = self.streamed_update(offloaded, scaled_grads, scalars, same=same)
        else:
            clipped = fill_zeros(self.clip(grads, norm), masters)
            new_masters, opt_state = self.update(
                masters, state.opt_state, clipped, finite=finite, offers=offers, traced=traced
            )
            new_masters = keep_same(masters, new_masters, same)
            new_masters = lax.with_sharding_constraint(new_masters, placement.param_shardings("master"))
            low = new_masters
        # The low-precision copy of a frozen param is there already: stages 1 and 2 need not gather it.
        new_state = self.new_state(
            state,
            placement,
            params=keep_same(state.params, placement.params_of(low, into=state.params), same),
            masters=new_masters,
            opt_state=opt_state,
            model_state=model_state,
            finite=finite,
        )
        # The gradients of a skipped step are not applied, nor are the errors that were added to them.
        errors = jax.tree.map(lambda new, old: jnp.where(finite, new, old), errors, state.grad_errors)
        new_state = dataclasses.replace(new_state, grad_errors=errors)
        metrics = Metrics(
            loss=loss,
            aux=aux,
            grad_norm=norm.value,
            skipped=new_state.num_skipped_steps > state.num_skipped_steps,
            nonfinite_leaf=leaf_index(norm.first_nonfinite, grads, masters),
            loss_scale=scale,
            num_skipped_steps=new_state.num_skipped_steps,
            small_grad_norm_sq=None if parts is None else parts.grad_norm_sq / scale / scale,
            num_small_grads=None if parts is None else parts.num_parts,
        )
        return new_state, replicated(metrics, self.mesh)

    def loss_and_grads(self, state: TrainState, batch: PyTree) -> tuple[jax.Array, PyTree]:
        """Returns the loss and the gradients of a step, as `TrainStep.grads` does."""
        placement = make_placement(state.variables, mesh=self.mesh, config=self.config)
        check_batch(batch, mesh=self.mesh, axes=placement.axes, num_microbatches=self.config.num_microbatches)
        key = jax.random.fold_in(state.key, state.step)
        needed, _ = used_by_optimizer(self.tx, state)
        step_loss = StepLoss(LossProgram(self.loss_fn), placement, self.config)
        variables, batch = step_loss.cast(state.variables, batch, key)
        (loss, _), grads, *_ = self.grads(
            step_loss, variables, batch, key, needed=needed, loss_scale=state.loss_scale, errors=state.grad_errors
        )
        grads = fill_zeros(self.unscale(grads, state.masters, placement, state.loss_scale), state.masters)
        scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
        replicated_sharding = NamedSharding(self.mesh, PartitionSpec())
        tree = jax.tree.structure(state.masters)
        leaves = tree.flatten_up_to(grads)
        grads = tree.unflatten(pinned(leaves, placement.param_shardings("master"), but=[x is None for x in leaves]))
        return lax.with_sharding_constraint(loss / scale.astype(loss.dtype), replicated_sharding), grads

    def objective(
        self, state: TrainState, step_loss: StepLoss, batch: PyTree, key: jax.Array, needed: list[bool]
    ) -> dict[str, Callable[[PyTree], Any]]:
        """Returns the loss of the batch and its gradients as functions of the params that the optimizer updates.

        Both are the step's own, microbatches and loss scale included, at params sharded as the master params are.
        """
        scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
        placement = step_loss.placement

        def evaluate(at: PyTree, needed: list[bool]) -> tuple[jax.Array, PyTree]:
            masters = merge(state.masters, at)
            masters = lax.with_sharding_constraint(masters, placement.param_shardings("master"))
            params = placement.params_of(masters, into=state.params)
            variables = placement.cast(joined(params, state.model_state))
            (loss, _), grads, *_ = self.grads(
                step_loss, variables, batch, key, needed=needed, loss_scale=state.loss_scale
            )
            grads = fill_zeros(self.unscale(grads, masters, placement, state.loss_scale), masters)
            return (loss / scale.astype(loss.dtype)).astype(value_dtype(at)), grads

        @jax.custom_jvp
        def loss_fn(at: PyTree) -> jax.Array:
            return evaluate(at, [False] * len(needed))[0]

        # The step's gradients, not those of its loss: they are accumulated over microbatches and scaled.
        @loss_fn.defjvp
        def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
            loss, grads = evaluate(primals[0], needed)
            slopes = jax.tree.map(lambda g, t: (g * t).sum().real.astype(loss.dtype), grads, tangents[0])
            return loss, jnp.asarray(sum(jax.tree.leaves(slopes)), loss.dtype)

        return {"loss_fn": loss_fn, "grad_fn": lambda at: evaluate(at, needed)[1]}

    def grads(
        self,
        step_loss: StepLoss,
        variables: PyTree,
        batch: PyTree,
        key: jax.Array,
        *,
        needed: list[bool],
        loss_scale: Any,
        errors: PyTree = None,
    ) -> Any:
        """Returns the loss and gradients of a batch, accumulated over its microbatches.

        Args:
          step_loss: the loss of the step.
          variables: params and model state, as `Placement.cast` returns them.
          batch: the batch.
          key: the step's key.
          needed: for each trainable param whether its gradient is computed.
          loss_scale: the loss scale, or None.
          errors: what quantization dropped of the last step's gradients.

        Returns:
          `((scaled loss, (aux, model_state)), grads, parts, errors)`. Gradients are sharded as the master params, and
          None for frozen params; `parts` has the squared norms for the noise scale. Model state on the host is None.

        Raises:
          ValueError: the loss function changes model state that is on the host.
        """
        config, k = self.config, self.config.num_microbatches
        placement, traced = step_loss.placement, step_loss.fused
        sends_own, is_local, mapped = placement.sends_own_grads, placement.is_local, placement.summed_once
        params, model_state = as_variables(variables).params, as_variables(variables).model_state
        leaves, tree = jax.tree.flatten(params)
        arguments = used_shapes(variables), batch, key
        host_state, model_state = model_state, on_devices(model_state)
        if len(jax.tree.leaves(model_state)) < len(jax.tree.leaves(host_state)):
            check_unchanged(host_state, model_state_changes(traced, *arguments))
        parts_over = placement.axes.batch if sends_own or not mapped else mapped
        judged = None
        if k > 1 or mapped or sends_own:
            judged = judge(
                traced,
                arguments,
                mesh=self.mesh,
                axes=dataclasses.replace(placement.axes, replica=(), data=parts_over),
                num_microbatches=k,
                loss_weight=config.loss_weight,
                local=bool(mapped or sends_own),
                exact=bool(mapped) and not (is_local or placement.grad_axes),
                num_shards=axis_size(self.mesh, placement.axes.batch),
            )
        weighted = traced if judged is None else judged.weighted
        loss_fn = step_loss.unsharded(step_loss.recomputed(weighted))
        has_grad = flags_of_all(leaves, needed)
        scale = 1 if loss_scale is None else loss_scale.scale
        pick = lambda tree_: [x for x, flag in zip(jax.tree.leaves(tree_), has_grad, strict=True) if flag]  # noqa: E731

        def scaled_loss(
            loss_fn: Callable[..., Any],
            free: list[jax.Array],
            model_state: PyTree,
            batch: PyTree,
            key: jax.Array,
            frozen: Sequence[Any] = leaves,
        ) -> tuple[jax.Array, Any]:
            remaining = iter(free)
            params = [
                with_gradient(x, next(remaining)) if flag else x if frozen_x is None else frozen_x
                for x, frozen_x, flag in zip(leaves, frozen, has_grad, strict=True)
            ]
            variables = joined(tree.unflatten(params), merge(host_state, model_state))
            loss, (aux, new_state, *weights) = loss_fn(variables, batch, key)
            pinned = pinned_model_state(new_state, placement.model_state_shardings(), host_state)
            loss = loss.astype(wide(loss.dtype)) * scale
            if judged is None:
                return loss, (aux, pinned)
            weights = jax.tree.map(lambda x: lax.stop_gradient(jnp.asarray(x, wide(x.dtype))), weights)
            return loss, (judged.aux.entries(aux, weights[1]), pinned, judged.weight(weights[0]))

        shardings = pick(placement.param_shardings("master"))
        free = [differentiated(x, s) for x, s in zip(pick(params), shardings, strict=True)]
        leaf_errors = [None] * len(leaves) if errors is None else tree.flatten_up_to(errors)
        scaled_errors = [
            None if x is None else x * scale for x, flag in zip(leaf_errors, has_grad, strict=True) if flag
        ]
        own_loss = loss_fn if is_local else step_loss.placed(loss_fn, with_copies=False)
        own_grads, placed_grads = (
            jax.value_and_grad(functools.partial(scaled_loss, fn), has_aux=True)
            for fn in (own_loss, step_loss.placed(loss_fn))
        )

        inputs = GradInputs(free, model_state, batch, key)
        if judged is None:
            (out, grads), parts, new_errors = placed_grads(*inputs), None, scaled_errors
        else:
            separable = judged.separable
            if separable.not_local and (sends_own or (mapped and placement.grad_axes)):
                refuse_own(separable.not_local)
            accumulator = Accumulator(
                mesh=self.mesh,
                axes=placement.axes,
                mapped=mapped,
                num_microbatches=k,
                loss_weight=config.loss_weight if config.loss_weight != "auto" else None,
                aux=judged.aux,
                sums=pick(placement.grad_sums()),
            )
            if sends_own and not is_local:
                mapped_loss = step_loss.placed(loss_fn, with_copies=False, mapped=True)
                within = dataclasses.replace(accumulator, axes=placement.axes.of_params(with_copies=False), mapped=())
                placed_grads = own_grads = quantized_grads(
                    within,
                    functools.partial(scaled_loss, mapped_loss),
                    weighted,
                    *arguments,
                    convolves=separable.convolves,
                    count_power=separable.count_power,
                    nested=k > 1 or bool(mapped),
                )
                separable = dataclasses.replace(separable, is_plain=False)  # `jax.vmap` within `jax.vmap`
            (loss, (aux, new_state)), grads, parts, new_errors = accumulated(
                accumulator,
                own_grads,
                placed_grads,
                inputs,
                separable=separable,
                is_local=is_local,
                frozen=[
                    None if flag or isinstance(x, HostParam) else x for x, flag in zip(leaves, has_grad, strict=True)
                ],
                errors=scaled_errors,
            )
            out = loss, (judged.aux.whole(judged.aux_shapes, aux), new_state)
        full = lambda some: tree.unflatten([next(some) if flag else None for flag in has_grad])  # noqa: E731
        if errors is not None:
            errors = full(iter([None if x is None else x / scale for x in new_errors]))
        return out, full(iter(grads)), parts, errors
