"""The program of a train step: loss, gradients, update, and how each of them is sharded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.core.device_put import platform_of, warn_of_few_threads
from zero_jax.core.tree import PyTree
from zero_jax.core.variables import joined
from zero_jax.program.loss import LossProgram
from zero_jax.sharding.precision import LossScale, cast_floating, update_loss_scale
from zero_jax.training.batch import check_batch
from zero_jax.training.compiled_step import Metrics, TrainStep, replicated
from zero_jax.training.grads.norm import GlobalNorm, global_norm
from zero_jax.training.grads.step_grads import StepGrads, loss_and_grads
from zero_jax.training.loss.function import MeshLoss, user_loss
from zero_jax.training.loss.program import StepLoss
from zero_jax.training.loss.residuals import with_values
from zero_jax.training.offloaded import OffloadedState, UpdatedState
from zero_jax.training.optimizer.rounding import round_tree, rounding_key
from zero_jax.training.optimizer.update import (
    Offers,
    TracedUpdate,
    apply_update,
    evaluate_update,
    trace_update,
    update_if,
    value_dtype,
)
from zero_jax.training.state.checks import check_optimizer
from zero_jax.training.state.gathering import gathered_params
from zero_jax.training.state.matrix_updates import matrix_program, step_placement
from zero_jax.training.state.placement import Placement, pinned
from zero_jax.training.state.train_state import (
    TrainState,
    fill_zeros,
    keep_frozen,
    leaf_index,
    merge,
    trainable,
    used_by_optimizer,
)
from zero_jax.training.zero_config import ZeroConfig, check_config


def make_train_step(
    loss_fn: Callable[..., Any] | MeshLoss, tx: optax.GradientTransformation, *, mesh: Mesh, config: ZeroConfig
) -> TrainStep:
    """Makes the jitted step `state, metrics = step(state, batch)`, which donates the state.

    Args:
      loss_fn: `loss_fn(params, batch)` or `loss_fn(params, batch, key)`, returning a scalar loss (a mean over the
        batch) or `(loss, aux)`; with a parameter `model_state` it gets the state's and returns
        `(loss, aux, model_state)`. With `num_microbatches > 1` it is called on parts of the batch; at stages 0 and 1 on
        the part of one device where it can be (docs/microbatches.md), so that gradients are summed across devices
        once. A loss that mixes examples is another loss then: a warning names the line.
      tx: any optax transformation; the one that `init_state` was given.
      mesh: the mesh.
      config: stage, precision, microbatches, clipping.

    Example:
      >>> step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
      >>> state, metrics = step(state, batch)
      >>> int(state.step)
      1
    """
    axes, tx = check_config(config).axes_of(mesh), check_optimizer(tx)
    if axes.num_stages(mesh) > 1:
        warn_of_few_threads(mesh)
    program = _Program(loss_fn=user_loss(loss_fn, mesh, axes).named(), tx=tx, mesh=mesh, config=config)
    return TrainStep(program, axes)


class Given(NamedTuple):
    """What an update gets besides arrays of the params; `norm` is that of the gradients, `finite` whether they are."""

    norm: GlobalNorm
    finite: jax.Array
    loss: jax.Array
    loss_scale: LossScale | None
    rounding_key: jax.Array | None
    functions: dict[str, Callable[[PyTree], Any]]  # those of `Offers`, if the optimizer calls any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Program:
    """The arguments of `make_train_step`; its methods are traced once per compile."""

    loss_fn: Callable[..., Any]
    tx: Any
    mesh: Mesh
    config: ZeroConfig
    is_nested: bool = False  # as of `StepLoss`

    def step(self, state: TrainState, batch: PyTree, placement: Placement | None = None) -> tuple[TrainState, Metrics]:
        placement = placement or step_placement(state, self.tx, mesh=self.mesh, config=self.config)
        loss, arguments = self.prepared(state, batch, placement)
        offloaded = None if placement.offload is None else OffloadedState.of(state, placement)
        stored = state.masters if offloaded is None else offloaded.masters()
        masters = placement.precision.for_optimizer(stored)
        trained = trainable(masters)
        # Before the gradients, because those of params that the optimizer freezes are not computed.
        traced = trace_update(self.tx, trained, state.opt_state, mesh=self.mesh, clip=self.config.norm_limit)
        needed = traced.needed_grads
        computed = loss_and_grads(loss, arguments, needed=needed, loss_scale=state.loss_scale, errors=state.grad_errors)
        grads = self.unscale(computed.grads, masters, placement, state.loss_scale)
        norm = global_norm(jax.tree.leaves(grads))
        # By the gradients, not by their norm, which may overflow where all of them are finite.
        finite, unchanged = norm.first_nonfinite < 0, traced.unchanged(needed)
        given = Given(
            norm=norm,
            finite=finite,
            loss=computed.loss.astype(value_dtype(trained)),
            loss_scale=state.loss_scale,
            rounding_key=rounding_key(arguments[-1]) if placement.precision.rounds_stochastically else None,
            functions=self.objective(state, loss, arguments, needed) if traced.calls_functions else {},
        )
        update = functools.partial(self.update, placement=placement)
        if offloaded is not None:
            # Gradients are cast, unscaled and clipped in the same chunks: all of them in the master params' dtype at
            # once would take as much memory as the offload saves.
            def streamed(stored: PyTree, opt_state: PyTree, scaled: PyTree, given: Given) -> UpdatedState:
                masters = placement.precision.for_optimizer(stored)
                updated = update(stored, opt_state, self.unscale(scaled, masters, placement, given.loss_scale), given)
                low = cast_floating(updated.low, placement.precision.param) if placement.keeps_copy else None
                return updated._replace(low=low)

            updated = offloaded.update(traced, streamed, computed.grads, given, unchanged=unchanged)
        else:
            matrices = matrix_program(traced, state, placement)
            if matrices is not None and matrices.is_changed:
                traced = dataclasses.replace(traced, jaxpr=matrices.rewritten(), is_rewritten=True)
            updated = update(stored, state.opt_state, grads, given, traced=traced)
            new_masters = keep_frozen(stored, updated.masters, unchanged)
            updated = updated._replace(masters=new_masters, low=new_masters)
        new_state = self.new_state(state, placement, updated, computed, finite=finite, unchanged=unchanged)
        scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
        parts = computed.parts
        metrics = Metrics(
            loss=computed.loss,
            aux=computed.aux,
            grad_norm=norm.value,
            skipped=new_state.num_skipped_steps > state.num_skipped_steps,
            nonfinite_leaf=leaf_index(norm.first_nonfinite, grads, masters),
            loss_scale=scale,
            num_skipped_steps=new_state.num_skipped_steps,
            # Divided twice: the square of a scale from 2^64 on is infinite.
            small_grad_norm_sq=None if parts is None else parts.grad_norm_sq / scale / scale,
            num_small_grads=None if parts is None else parts.num_parts,
        )
        return new_state, replicated(metrics, self.mesh)

    def prepared(
        self, state: TrainState, batch: PyTree, placement: Placement
    ) -> tuple[StepLoss, tuple[PyTree, PyTree, jax.Array]]:
        """Returns the loss of a step, and the arguments of its program: variables, batch and key."""
        check_batch(batch, mesh=self.mesh, axes=placement.axes, num_microbatches=self.config.num_microbatches)
        loss = StepLoss(LossProgram(self.loss_fn), placement, self.config, self.is_nested)
        if self.config.remat != "own":
            loss = with_values(loss, state, batch)
        # Made of the state alone, so that a run that resumes draws the numbers of an unbroken one.
        key = jax.random.fold_in(state.key, state.step)
        return loss, (*loss.cast(state.variables, batch, key), key)

    def loss_and_grads(self, state: TrainState, batch: PyTree) -> tuple[jax.Array, PyTree]:
        """Returns the loss and the gradients of a step, as `TrainStep.grads` does."""
        placement = step_placement(state, self.tx, mesh=self.mesh, config=self.config)
        loss, arguments = self.prepared(state, batch, placement)
        needed, _ = used_by_optimizer(self.tx, state, mesh=self.mesh, config=self.config)
        computed = loss_and_grads(loss, arguments, needed=needed, loss_scale=state.loss_scale, errors=state.grad_errors)
        masters = placement.precision.for_optimizer(state.masters)
        grads = fill_zeros(self.unscale(computed.grads, masters, placement, state.loss_scale), masters)
        tree = jax.tree.structure(state.masters)
        leaves = tree.flatten_up_to(grads)  # None for params that are not trainable
        # Once more: the zeros of frozen params have no sharding yet.
        grads = tree.unflatten(pinned(leaves, placement.param_shardings("master")))
        return lax.with_sharding_constraint(computed.loss, NamedSharding(self.mesh, PartitionSpec())), grads

    def objective(
        self, state: TrainState, step_loss: StepLoss, arguments: tuple[Any, ...], needed: list[bool]
    ) -> dict[str, Callable[[PyTree], Any]]:
        """Returns the loss of the batch and its gradients as functions of the params that the optimizer updates.

        Both are the step's own, microbatches and loss scale included, at params sharded as the master params are.

        Raises:
          ValueError: quantization feeds back the errors of gradients.
        """
        if state.grad_errors is not None:
            raise ValueError(
                "quantize: error_feedback: the optimizer takes gradients at other params (a line search, or SAM), "
                "to which the error of the last one does not belong: leave error_feedback out"
            )
        placement, (_, *rest) = step_loss.placement, arguments

        def evaluate(trained: PyTree, given: Any, needed: list[bool], **options: bool) -> tuple[jax.Array, PyTree]:
            state, batch, key = given
            masters = merge(state.masters, trained)
            masters = lax.with_sharding_constraint(masters, placement.param_shardings("master"))
            params = self.params_of(masters, state, placement)
            variables = placement.cast(joined(params, state.model_state))
            inputs, scale = (variables, batch, key), state.loss_scale
            computed = loss_and_grads(step_loss, inputs, needed=needed, loss_scale=scale, **options)
            grads = fill_zeros(self.unscale(computed.grads, masters, placement, state.loss_scale), masters)
            return computed.loss.astype(value_dtype(trained)), grads

        # Those of the step have no derivatives where they are added in place. What is given besides is an argument, of
        # which a derivative through the step may be, too: JAX takes no derivatives of what a `custom_jvp` closes over.
        @jax.custom_jvp
        def with_grads(trained: PyTree, given: Any) -> tuple[jax.Array, PyTree]:
            return evaluate(trained, given, needed)

        @with_grads.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            differentiable = lambda *inputs: evaluate(*inputs, needed=needed, differentiable=True)  # noqa: E731
            return jax.jvp(differentiable, primals, tangents)

        given = (state, *rest)

        @jax.custom_jvp
        def loss_fn(trained: PyTree) -> jax.Array:
            return evaluate(trained, given, [False] * len(needed))[0]

        # The step's gradients, not those of its loss: they are accumulated over microbatches and scaled.
        @loss_fn.defjvp
        def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
            loss, grads = with_grads(primals[0], given)
            # JAX's gradient of a real loss by a complex param is such that the loss changes by Re(sum(g * t)).
            slopes = jax.tree.map(lambda g, t: (g * t).sum().real.astype(loss.dtype), grads, tangents[0])
            return loss, jnp.asarray(sum(jax.tree.leaves(slopes)), loss.dtype)

        return {"loss_fn": loss_fn, "grad_fn": lambda trained: with_grads(trained, given)[1]}

    def params_of(self, masters: PyTree, state: TrainState, placement: Placement) -> PyTree:
        """Returns params from new master params: themselves, or gathered copies written over those of the state."""
        return masters if placement.params_are_masters else gathered_params(placement, masters, into=state.params)

    def unscale(self, grads: PyTree, masters: PyTree, placement: Placement, loss_scale: Any) -> PyTree:
        """Casts gradients to the master params' dtype, divides by the loss scale, and constrains their shardings."""

        def unscaled(grad: jax.Array, dtype: Any) -> jax.Array:
            grad = grad if grad.dtype == dtype else grad.astype(dtype)
            return grad if loss_scale is None else grad / loss_scale.scale.astype(dtype)

        leaves, tree = jax.tree.flatten(masters)
        of_each = zip(leaves, tree.flatten_up_to(grads), strict=True)
        finished = [None if grad is None else unscaled(grad, master.dtype) for master, grad in of_each]
        return tree.unflatten(pinned(finished, placement.param_shardings("master")))

    def update(
        self,
        stored: PyTree,
        opt_state: PyTree,
        grads: PyTree,
        given: Given,
        *,
        placement: Placement,
        traced: TracedUpdate | None = None,
    ) -> UpdatedState:
        """Returns new master params and optimizer state; the old ones if a gradient is not finite.

        `traced` is the trace of the update for these arguments, if there is one.
        """
        masters, trace = placement.precision.for_optimizer(stored), None
        params, limit = trainable(masters), self.config.norm_limit
        # optax needs a gradient for each param; the zeros of frozen ones are read by nothing.
        offers = Offers(given.loss, None if limit is None else fill_zeros(grads, masters), **given.functions)
        clipped = fill_zeros(grads if limit is None else given.norm.clip(grads, limit), masters)
        apply = lambda params, opt_state: apply_update(self.tx, clipped, opt_state, params, offers)  # noqa: E731
        if traced is not None and not traced.calls_functions:
            trace = traced.jaxpr, jax.tree.leaves((clipped, opt_state, params, offers.value, offers.full_grads))
            if traced.is_rewritten:
                apply = functools.partial(evaluate_update, *trace)
        if self.config.skip_nonfinite is False:
            new_params, opt_state = apply(params, opt_state)
        else:
            # An update that is streamed has to be elementwise (`chunks.Loop`), which no conditional is.
            in_place = platform_of(self.mesh) == "cpu" and self.config.offload is None
            new_params, opt_state = update_if(given.finite, apply, (params, opt_state), in_place=in_place, traced=trace)
        new = merge(masters, new_params)
        new = new if given.rounding_key is None else round_tree(new, stored, given.rounding_key)
        return UpdatedState(new, new, opt_state)

    def new_state(
        self,
        state: TrainState,
        placement: Placement,
        updated: UpdatedState,
        computed: StepGrads,
        *,
        finite: jax.Array,
        unchanged: list[bool],
    ) -> TrainState:
        """Returns the next train state, of the update and of what the loss function returned.

        `unchanged` tells of each trainable param whether an update never changes it.
        """

        def next_leaf(old: Any, new: Any) -> Any:
            if new is None:  # model state on the host, which no loss function changes
                return old
            return new if self.config.skip_nonfinite is False else jnp.where(finite, new, old)

        skipped = jnp.int32(0) if self.config.skip_nonfinite is False else (~finite).astype(jnp.int32)
        scale = state.loss_scale
        if scale is not None:
            assert placement.precision.loss_scale is not None
            scale = update_loss_scale(scale, finite, placement.precision.loss_scale)
        return TrainState(
            step=state.step + 1,
            # The low-precision copy of a frozen param is there already: stages 1 and 2 need not gather it.
            params=keep_frozen(state.params, self.params_of(updated.low, state, placement), unchanged),
            master=updated.masters if placement.keeps_copy else None,
            opt_state=updated.opt_state,
            key=state.key,
            loss_scale=scale,
            num_skipped_steps=state.num_skipped_steps + skipped,
            model_state=jax.tree.map(next_leaf, state.model_state, computed.model_state, is_leaf=lambda x: x is None),
            # The gradients of a skipped step are not applied, nor are the errors that were added to them.
            grad_errors=jax.tree.map(lambda new, old: jnp.where(finite, new, old), computed.errors, state.grad_errors),
        )
