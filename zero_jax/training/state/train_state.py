"""The train state: what it holds, and which of its params are trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero_jax.core.tree import PyTree, shapes_of
from zero_jax.core.variables import joined, shown_sizes
from zero_jax.dims import is_float
from zero_jax.sharding.precision import LossScale, resolve_precision
from zero_jax.training.optimizer.update import trace_update
from zero_jax.training.zero_config import ZeroConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class TrainState:
    """Everything that a step reads and writes. Shows the sizes of its parts; nothing is read from a device for it.

    Attributes:
      step: calls of the train step so far, `int32[]`.
      params: the params; in low precision and whole at stages 1 and 2, the master params themselves at stage 3, there
        with `ZeroConfig.secondary` the secondary shard.
      master: the full-precision params that the optimizer updates, or None where `params` are those. Other values for
        `params` alone are lost in the next update, which starts from these, with a warning: `zero.write_leaf` writes
        both.
      opt_state: the optimizer's state.
      key: the key that each step's key is derived from.
      loss_scale: the loss scale, or None.
      num_skipped_steps: steps skipped because a gradient was not finite, `int32[]`.
      model_state: what the loss function reads and returns anew (`Variables.model_state`), or None.
      grad_errors: with `Quantize.error_feedback` what quantization dropped of the gradient of a param, on each device
        that sent one, `float32[devices, ...]`, without the loss scale; None for other params, and without any.

    Example:
      >>> state.params["up"].sharding.spec, state.opt_state[0].mu["up"].sharding.spec
      (P(None, 'data'), P(None, 'data'))
    """

    step: jax.Array
    params: PyTree
    master: PyTree
    opt_state: PyTree
    key: jax.Array
    loss_scale: LossScale | None
    num_skipped_steps: jax.Array
    model_state: PyTree = None
    grad_errors: PyTree = None

    def __repr__(self) -> str:
        return shown_sizes(self)

    @property
    def variables(self) -> PyTree:
        """What the loss function sees: the params, as `Variables` where there is model state."""
        return joined(self.params, self.model_state)

    @property
    def masters(self) -> PyTree:
        """The params that the optimizer updates: `master`, or `params` where there is none."""
        return self.params if self.master is None else self.master


def trainable(params: PyTree) -> PyTree:
    """Returns the params that have gradients; integers and PRNG keys are replaced by None, which optax skips."""
    return jax.tree.map(lambda x: x if is_float(x) else None, params)


def merge(params: PyTree, updated: PyTree) -> PyTree:
    """Puts the leaves of `trainable` back among the others."""
    return jax.tree.map(lambda old, new: old if new is None else new, params, updated, is_leaf=lambda x: x is None)


def flags_of_all(params: PyTree, flags: Sequence[bool]) -> list[bool]:
    """Returns a flag for each param from those of the trainable ones, False for all others."""
    of_trainable = iter(flags)
    return [is_float(x) and next(of_trainable) for x in jax.tree.leaves(params)]


def used_by_optimizer(
    tx: optax.GradientTransformation | None, state: TrainState, *, mesh: Any, config: ZeroConfig
) -> tuple[list[bool], list[bool]]:
    """Returns flags of the trainable params: whether the optimizer reads their gradients, and leaves them unchanged.

    Without an optimizer (None) all gradients count as read, and no param as unchanged.
    """
    params, precision = trainable(state.masters), resolve_precision(config.precision)
    if precision.rounds_stochastically:
        params = precision.for_optimizer(shapes_of(params))  # shapes: a cast of arrays would be computed
    if tx is None:
        num_params = len(jax.tree.leaves(params))
        return [True] * num_params, [False] * num_params
    traced = trace_update(tx, params, state.opt_state, mesh=mesh, clip=config.norm_limit)
    needed = traced.needed_grads
    return needed, traced.unchanged(needed)


def trained_params(tx: optax.GradientTransformation, state: TrainState, *, mesh: Any, config: ZeroConfig) -> list[bool]:
    """Returns a flag for each leaf of a state's params: whether a step computes its gradient."""
    return flags_of_all(state.params, used_by_optimizer(tx, state, mesh=mesh, config=config)[0])


def keep_frozen(old: PyTree, new: PyTree, unchanged: list[bool]) -> PyTree:
    """Returns the new params, or the old ones where `unchanged` (a flag for each trainable param) is true."""
    tree = jax.tree.structure(old)
    of_each = zip(jax.tree.leaves(old), tree.flatten_up_to(new), flags_of_all(old, unchanged), strict=True)
    return tree.unflatten([x if flag else y for x, y, flag in of_each])


def fill_zeros(grads: PyTree, masters: PyTree) -> PyTree:
    """Returns a gradient for each trainable param, with zeros in place of None."""
    fill = lambda p, g: None if p is None else jnp.zeros_like(p) if g is None else g  # noqa: E731
    return jax.tree.map(fill, trainable(masters), grads, is_leaf=lambda x: x is None)


def leaf_index(index: jax.Array, grads: PyTree, masters: PyTree) -> jax.Array:
    """Converts an index among gradients or trainable params (None excluded) to an index among all params."""
    present = [i for i, x in enumerate(jax.tree.structure(masters).flatten_up_to(grads)) if x is not None]
    if not present:
        return index
    return jnp.where(index < 0, -1, jnp.asarray(present, jnp.int32)[index])
