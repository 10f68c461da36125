"""The validation loss of a run: always of the same batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zero_jax.core.variables import Variables
from zero_jax.data import Batch, BatchBuffers
from zero_jax.training import MeshLoss, TrainState, ZeroConfig, ema_params, make_eval_step, merge


class Validation:
    """Measures the loss of params on batches that stay the same."""

    def __init__(
        self,
        loss_fn: Callable[..., Any] | MeshLoss,
        batches: Sequence[Batch],
        *,
        mesh: Mesh,
        config: ZeroConfig,
        buffers: BatchBuffers,
    ):
        """Takes what `make_eval_step` takes, the batches, and the memory on the devices that they go through."""
        self.batches, self._buffers = batches, buffers
        self._evaluate, self._total = make_eval_step(loss_fn, mesh=mesh, config=config), jax.jit(jnp.sum)

    def losses(self, state: TrainState, *, goes_on: Callable[[], bool]) -> tuple[float, float | None] | None:
        """Returns the loss of the params and, where the optimizer keeps one, of their moving average; see `loss`."""
        ema = ema_params(state.opt_state)
        # What is not trained (integers) has no average.
        trees = [state.params] if ema is None else [state.params, merge(state.params, ema)]
        losses: list[float] = []
        for params in trees:
            loss = self.loss(Variables(params=params, model_state=state.model_state), goes_on=goes_on)
            if loss is None:
                return None
            losses.append(loss)
        return losses[0], None if ema is None else losses[1]

    def loss(self, params: Any, *, goes_on: Callable[[], bool]) -> float | None:
        """Returns the mean over all targets, by their weights; None where `goes_on`, asked after each batch, denies."""
        total = weight = 0.0
        for batch in map(self._buffers.fill, self.batches):
            # Each loss is read before the next is asked for: simulated devices that run far ahead of others can
            # deadlock.
            batch_weight = float(self._total(batch["weights"]))
            total += float(self._evaluate(params, batch).loss) * batch_weight
            weight += batch_weight
            if not goes_on():
                return None
        return total / weight
