"""The validation of a run: the loss of its params on a fixed set of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jax.sharding import Mesh

from zero_jax.core.tree import PyTree
from zero_jax.core.variables import joined
from zero_jax.trainer.inputs.sources import BatchesEnded
from zero_jax.trainer.inputs.together import Together
from zero_jax.trainer.run import RunInput
from zero_jax.training import MeshLoss, TrainState, ZeroConfig, ema_params, make_eval_step, merge


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
        self._together = Together("validation batches")
        self._evaluate = make_eval_step(loss_fn, mesh=mesh, config=config)

    def measure(self, state: TrainState, *, goes_on: Callable[[], bool]) -> dict[str, float] | None:
        """Returns the `means` of params, and the `ema_loss` of their moving average if the optimizer has one."""
        means, ema = self.means(state.variables, goes_on=goes_on), ema_params(state.opt_state)
        if means is None or ema is None:
            return means
        # Params that are not trained (integers) have no average.
        averaged = self.means(joined(merge(state.params, ema), state.model_state), goes_on=goes_on)
        return None if averaged is None else {**means, "ema_loss": averaged["loss"]}

    def means(self, params: Any, *, goes_on: Callable[[], bool]) -> dict[str, float] | None:
        """Returns weighted means over all batches: `loss`, and the scalars of the loss function's aux by name.

        `goes_on` is called after each batch; if it returns False, the result is None.
        """
        weight, totals = 0.0, {"loss": 0.0}
        for batch in self._placed():
            metrics = self._evaluate(params, batch)
            batch_weight = self._data.weight(batch, metrics)
            for name, value in {"loss": float(metrics.loss), **self._data.figures(metrics.aux)}.items():
                totals[name] = totals.get(name, 0.0) + value * batch_weight
            weight += batch_weight
            if not goes_on():
                return None
        return {name: total / weight for name, total in totals.items()}

    def _placed(self) -> Iterator[PyTree]:
        """Yields the batches on the devices; raises `ValueError` if the processes have different numbers of them."""
        batches = iter(self.batches)

        def read() -> PyTree:
            for batch in batches:
                return self._data.place(batch)
            raise BatchesEnded("the validation batches have ended")

        num_batches = 0
        try:
            while True:
                yield self._together.read(read)
                num_batches += 1
        except BatchesEnded as error:
            if ended := self._together.ended:
                raise ValueError(
                    f"the validation batches of process {', '.join(map(str, ended))} end after {num_batches}, and "
                    "others have more: give all processes as many"
                ) from error
