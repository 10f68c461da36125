"""The validation loss of a run: always of the same batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zero_jax.data import Batch, BatchBuffers
from zero_jax.training import MeshLoss, ZeroConfig, make_eval_step


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
        self._batches, self._buffers = batches, buffers
        self._evaluate, self._total = make_eval_step(loss_fn, mesh=mesh, config=config), jax.jit(jnp.sum)

    def loss(self, params: Any, *, goes_on: Callable[[], bool]) -> float | None:
        """Returns the mean over all targets, by their weights; None where `goes_on`, asked after each batch, denies."""
        total = weight = 0.0
        for batch in map(self._buffers.fill, self._batches):
            # Each loss is read before the next is asked for: simulated devices that run far ahead of others can
            # deadlock.
            batch_weight = float(self._total(batch["weights"]))
            total += float(self._evaluate(params, batch).loss) * batch_weight
            weight += batch_weight
            if not goes_on():
                return None
        return total / weight
