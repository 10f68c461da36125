"""The validation of a run: the loss of its params, always of the same batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax.sharding import Mesh

from zero_jax.core.tree import PyTree
from zero_jax.core.variables import Variables
from zero_jax.trainer.inputs.run_input import RunInput
from zero_jax.training import MeshLoss, TrainState, ZeroConfig, ema_params, make_eval_step, merge


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationFigures:
    """The outcome of a validation.

    Attributes:
      loss: the loss of the params.
      own: other figures of the params by name, of the loss function's aux.
      ema_loss: the loss of the moving average of the params, where the optimizer has one.
    """

    loss: float
    own: Mapping[str, float]
    ema_loss: float | None = None


class Validation:
    """Measures the loss of params on the same batches each time."""

    def __init__(
        self,
        loss_fn: Callable[..., Any] | MeshLoss,
        batches: Iterable[PyTree],
        *,
        mesh: Mesh,
        config: ZeroConfig,
        data: RunInput,
    ):
        """Makes the eval step; `data` places the batches on the devices, and weighs them."""
        self.batches, self._data = batches, data
        self._evaluate = make_eval_step(loss_fn, mesh=mesh, config=config)

    def measure(self, state: TrainState, *, goes_on: Callable[[], bool]) -> ValidationFigures | None:
        """Measures params and, where the optimizer has one, their moving average; see `means`."""
        ema = ema_params(state.opt_state)
        # Params that are not trained (integers) have no average.
        trees = [state.params] if ema is None else [state.params, merge(state.params, ema)]
        found: list[ValidationFigures] = []
        for params in trees:
            means = self.means(Variables(params=params, model_state=state.model_state), goes_on=goes_on)
            if means is None:
                return None
            found.append(means)
        return found[0] if ema is None else dataclasses.replace(found[0], ema_loss=found[1].loss)

    def means(self, params: Any, *, goes_on: Callable[[], bool]) -> ValidationFigures | None:
        """Returns the means over all batches by weight, or None where `goes_on`, called after each, is False."""
        loss = weight = 0.0
        own: dict[str, float] = {}
        for batch in map(self._data.place, self.batches):
            # Each loss is read before the next is dispatched: simulated devices that run ahead of others can deadlock.
            metrics = self._evaluate(params, batch)
            batch_weight = self._data.weight(batch, metrics)
            loss += float(metrics.loss) * batch_weight
            for name, value in self._data.figures(metrics.aux).items():
                own[name] = own.get(name, 0.0) + value * batch_weight
            weight += batch_weight
            if not goes_on():
                return None
        return ValidationFigures(loss=loss / weight, own={name: total / weight for name, total in own.items()})
