"""The validation of a run: the loss of its params on a fixed set of batches."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from zero_jax.core.text_tables import Report, aligned, format_figure
from zero_jax.core.tree import PyTree
from zero_jax.core.variables import joined
from zero_jax.trainer.inputs.own import OwnModel, own_input
from zero_jax.trainer.inputs.sources import BatchesEnded, Together
from zero_jax.trainer.run import Model, RunInput, check_kinds, open_text
from zero_jax.trainer.train_config import TrainConfig
from zero_jax.training import TrainState, ZeroConfig, ema_params, make_eval_step, merge
from zero_jax.transforms import PartWeight


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation(Report):
    """The loss of params on data.

    Attributes:
      data: the data.
      loss: the mean over the targets, or over the examples of batches of the user's own.
      perplexity: `exp(loss)`, of text alone.
      figures: the scalars of the loss function's aux.
    """

    data: str
    loss: float
    perplexity: float | None
    figures: Mapping[str, float]

    def __str__(self) -> str:
        rows = {"data": self.data, "loss": format_figure(self.loss, decimals=4)}
        rows |= {} if self.perplexity is None else {"perplexity": f"{self.perplexity:.4g}"}
        return aligned((rows | {name: f"{value:.4g}" for name, value in self.figures.items()}).items())


def evaluate(
    model: Model | OwnModel,
    params: PyTree,
    *,
    config: TrainConfig,
    mesh: Mesh,
    held_out: bool = False,
    log: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """Measures the loss of params, or of `Variables`, on the validation of a run's config.

    Args:
      model: the model; a model of the user's own brings its batches.
      params: the params, on the mesh.
      config: the text, the batch size and the precision.
      mesh: the mesh.
      held_out: evaluate on all of the text; otherwise on `eval_batches` batches of its part for validation.
      log: called with progress lines.

    Raises:
      ValueError: as `prepare`; or a model of the user's own without batches to validate on.
    """
    check_kinds(config, model)
    if isinstance(model, OwnModel):
        data: RunInput = own_input(model, mesh=mesh, zero=config.zero, eval_batches=config.eval_batches)
    else:
        # No sample is made here, so that its settings need no check.
        data = open_text(dataclasses.replace(config, sample_tokens=0), model, mesh, log, held_out=held_out)
    if data.validation is None:
        raise ValueError(f"{model.name} has no batches to validate on: give it some, as --validation does")
    means = Validation(model, data, mesh=mesh, config=config.zero, say=log).means(params, goes_on=lambda: True)
    assert means is not None
    loss = means.pop("loss")
    # From 710 on `exp` raises an OverflowError.
    perplexity = None if isinstance(model, OwnModel) else math.inf if loss > 709 else math.exp(loss)
    return Evaluation(data=data.rows["data"], loss=loss, perplexity=perplexity, figures=means)


class Validation:
    """Measures the loss of params on the same batches each time."""

    def __init__(
        self, model: Model | OwnModel, data: RunInput, *, mesh: Mesh, config: ZeroConfig, say: Callable[[str], None]
    ):
        """Makes the eval step; `data` has the batches, places them, and weighs those whose loss has no weight."""
        self._batches, self._data, self._say = data.validation, data, say
        self._together = Together("validation batches")
        loss_fn = (isinstance(model, OwnModel) and model.eval_fn) or model.loss_fn
        self._evaluate = make_eval_step(loss_fn, mesh=mesh, config=config, weighted=True)

    def measure(self, state: TrainState, *, goes_on: Callable[[], bool]) -> dict[str, float] | None:
        """Returns the `means` of params, and the `ema_loss` of their moving average if the optimizer has one."""
        # A signal during either of the two leaves the validation without a result: both have to be of all batches.
        means, ema = self.means(state.variables, goes_on=goes_on), ema_params(state.opt_state)
        if means is None or ema is None:
            return means
        # Params that are not trained (integers) have no average.
        averaged = self.means(joined(merge(state.params, ema), state.model_state), goes_on=goes_on)
        return None if averaged is None else {**means, "ema_loss": averaged["loss"]}

    def means(self, params: Any, *, goes_on: Callable[[], bool]) -> dict[str, float] | None:
        """Returns means of `loss` and aux over all batches, weighted as microbatches, NaN without weight.

        `goes_on` is called after each batch; None is returned if it returns False.
        """
        weights, losses, figures = list[PartWeight](), list[float](), list[dict[str, float]]()
        for batch in self._placed():
            metrics = self._evaluate(params, batch)
            # Waits: batches ahead of the devices would fill their memory.
            weights.append(jax.device_get(metrics.weight or self._data.weight(batch)))
            losses.append(float(metrics.loss))
            figures.append(self._data.figures(metrics.aux))
            if not goes_on():
                return None
        counts = [float(weight.count) for weight in weights]
        if not any(counts):
            why = "no batch of the validation has a weight above 0" if weights else "the validation has no batches"
            self._say(f"{why}: its loss is NaN")
            return dict.fromkeys(["loss", *itertools.chain(*figures)], math.nan)
        columns = zip(*map(jax.tree.leaves, weights), strict=True)
        total = jax.tree.structure(weights[0]).unflatten(map(np.stack, columns)).joined()
        # Not by the sum of the divisors: a loss may divide by something else than the sum over parts, such as
        # max(count, 1).
        loss = _weighted_sum([float(weight.divisor) for weight in weights], losses) / float(total.divisor)
        names = dict.fromkeys(itertools.chain(*figures))
        means = {name: _weighted_sum(counts, [x.get(name, 0.0) for x in figures]) / sum(counts) for name in names}
        return {"loss": loss, **means}

    def _placed(self) -> Iterator[PyTree]:
        """Yields the batches on the devices; raises `ValueError` if the processes have different numbers of them."""
        batches = iter(self._batches or ())

        def read() -> PyTree:
            # `for`, because in a generator, as `_placed` is, Python makes a RuntimeError of the StopIteration of
            # `next`.
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


def _weighted_sum(weights: Sequence[float], values: Sequence[float]) -> float:
    """Returns the sum of values by weight; those of weight 0 may be NaN."""
    return sum(weight * value for weight, value in zip(weights, values, strict=True) if weight)
