"""A train step on one device in plain optax: what a compiled step is compared with."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zero_jax import training
from zero_jax.core.tree import PyTree
from zero_jax.core.variables import joined
from zero_jax.program.loss import LossProgram
from zero_jax.sharding.mesh import make_mesh
from zero_jax.sharding.precision import cast_floating, resolve_precision


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Updated:
    """What a step makes of a state: the groups that a train state has."""

    master: PyTree
    opt_state: PyTree
    model_state: PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """The step on one device without zero_jax: loss of the whole batch, cast params, gradients clipped by norm."""

    loss_fn: Callable[..., Any] | training.MeshLoss
    init_fn: Callable[[jax.Array], PyTree]
    tx: optax.GradientTransformation
    config: training.ZeroConfig

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh of one device."""
        return make_mesh(devices=jax.devices()[:1])

    def state(self, key: jax.Array, like: training.TrainState) -> training.TrainState:
        """Returns an initial train state, with the leaves of an abstract one."""
        plain = training.ZeroConfig(stage=0, precision=self.config.precision)  # nothing is sharded, coded or on hosts
        state = training.init_state(self.init_fn, self.tx, key, mesh=self.mesh, config=plain)
        # The compiled step takes errors of gradients where it has error feedback, which the plain config has not.
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like.grad_errors)
        return self.next_state(
            dataclasses.replace(state, grad_errors=zeros),
            Updated(master=state.masters, opt_state=state.opt_state, model_state=state.model_state),
            like=like,
        )

    def next_state(
        self, state: training.TrainState, updated: Updated, *, like: training.TrainState
    ) -> training.TrainState:
        """Returns a state with new params, optimizer state and model state, in the dtypes of an abstract one."""
        # The compiled step has params in the dtypes of its policy: both begin from the same rounded values.
        cast = lambda tree: jax.tree.map(lambda x, y: x.astype(y.dtype), updated.master, tree)  # noqa: E731
        return dataclasses.replace(
            state,
            params=cast(like.params),
            master=None if like.master is None else cast(like.master),
            opt_state=updated.opt_state,
            model_state=updated.model_state,
        )

    def loss_and_grads(self, state: training.TrainState, batch: PyTree) -> tuple[jax.Array, PyTree, PyTree]:
        """Returns the loss, the gradients of the params that the optimizer reads, and the new model state."""
        loss_fn = LossProgram(training.user_loss(self.loss_fn, self.mesh).named())
        precision = resolve_precision(self.config.precision)
        # The key that the train step makes for this step.
        key = jax.random.fold_in(state.key, state.step)
        model_state = state.model_state

        def variables_of(free: PyTree) -> PyTree:
            params = cast_floating(training.merge(state.masters, free), precision.compute)
            return joined(params, model_state)

        free = training.trainable(state.masters)
        batch = training.cast_batch(loss_fn, jax.eval_shape(variables_of, free), batch, key, config=self.config)
        function = lambda free: loss_fn(variables_of(free), batch, key)  # noqa: E731
        (loss, (_, new_model_state)), grads = jax.value_and_grad(function, has_aux=True)(free)
        needed, _ = training.used_by_optimizer(self.tx, state, mesh=self.mesh, config=self.config)
        leaves, tree = jax.tree.flatten(grads)
        # As in a step, whose norm is that of the gradients which the optimizer reads.
        grads = tree.unflatten([g if flag else jnp.zeros_like(g) for g, flag in zip(leaves, needed, strict=True)])
        return loss, precision.for_optimizer(grads), new_model_state

    def update(
        self, state: training.TrainState, grads: PyTree, loss: jax.Array, batch: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Returns the new params and optimizer state."""
        clipped = grads
        if self.config.norm_limit is not None:  # optax's own: that of the step is what is tested
            clipped, _ = optax.clip_by_global_norm(self.config.norm_limit).update(grads, optax.EmptyState())

        def at(params: PyTree) -> tuple[jax.Array, PyTree]:
            group = "params" if state.master is None else "master"
            moved = dataclasses.replace(state, **{group: training.merge(state.masters, params)})
            loss, grads, _ = self.loss_and_grads(moved, batch)
            return loss, grads

        precision, stored = resolve_precision(self.config.precision), training.trainable(state.masters)
        params = precision.for_optimizer(stored)
        offers = training.Offers(
            loss, grads, loss_fn=lambda params: at(params)[0], grad_fn=lambda params: at(params)[1]
        )
        updates, opt_state = training.call_update(self.tx, clipped, state.opt_state, params, offers)
        new = optax.apply_updates(params, updates)
        if precision.rounds_stochastically:
            new = training.round_tree(new, stored, training.rounding_key(jax.random.fold_in(state.key, state.step)))
        return training.merge(state.masters, new), opt_state
