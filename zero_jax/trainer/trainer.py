"""`zero.Trainer`: the training loop for a loss function, an init function and batches of any kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax import Array

from zero_jax.core.signatures import place_of
from zero_jax.core.text_tables import Report
from zero_jax.trainer.inputs.own import OwnModel
from zero_jax.trainer.loop import execute_to_state
from zero_jax.trainer.reporting.metrics import Log
from zero_jax.trainer.reporting.trackers import OpenTracker, Tracker
from zero_jax.trainer.result import TrainResult
from zero_jax.trainer.run import TrainConfig, prepare
from zero_jax.training import MeshLoss, TrainState


class Trainer(Report):
    """Trains any model: with checkpoints, resume, metrics, validation, and stops on signals that lose nothing.

    Attributes:
      model: what is trained.
      config: how, and for how long.
      state: the last state of the run, once `train` has returned; None before.

    Example:
      >>> run = zero.TrainConfig(steps=2, out=folder, name="first")
      >>> trainer = zero.Trainer(loss_fn, init_fn, lambda step: batch, config=run, tx=tx)
      >>> trainer.train(log=lambda _: None).num_steps
      2
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any] | MeshLoss,
        init_fn: Callable[[Array], Any],
        batches: Any,
        *,
        config: TrainConfig = TrainConfig(),
        tx: optax.GradientTransformation | None = None,
        validation: Any = None,
        eval_fn: Callable[..., Any] | MeshLoss | None = None,
        param_specs: Any = None,
        name: str = "model",
        callbacks: Sequence[Any] = (),
        trackers: Sequence[Tracker | OpenTracker] = (),
    ):
        """Takes the model and its batches, and starts nothing.

        Args:
          loss_fn: `loss_fn(params, batch)` or `loss_fn(params, batch, key)`, with a keyword `model_state` if there is
            any; returns the loss and, if it likes, aux, whose scalars are recorded beside the loss.
          init_fn: `init_fn(key)` returns the params, or `zero.Variables` of params and model state.
          batches: a function of the step, an iterable of batches (a list, a grain dataset, a loader), or a function of
            nothing that returns one; see `zero.trainer.OwnModel`.
          config: steps, stage, mesh, checkpoints and the rest.
          tx: any optax optimizer, instead of the one that `config.optimizer` names.
          validation: batches to validate on, as `batches` are.
          eval_fn: the loss function of the validation; None takes `loss_fn`.
          param_specs: how the params are sharded over the mesh axis `model`, as for `ZeroConfig.param_specs`.
          name: what the run is called where `config.name` is None.
          callbacks: functions `on_step(step, metrics, state)` that are called after each step, and stop the run where
            they return True; `zero.trainer.Callback(on_step, every=n)` for each n steps, or any object with these two.
          trackers: objects with `write(record)` and `close()` that get the records of `metrics.jsonl` too, in process
            0; or functions of a `zero.trainer.TrackedRun` that return one.
        """
        self.model = OwnModel(
            init_fn=init_fn,
            loss_fn=loss_fn,
            batches=batches,
            validation=validation,
            eval_fn=eval_fn,
            param_specs=param_specs,
            name=name,
        )
        self.config, self._tx = config, tx
        self._hooks: dict[str, Any] = {"callbacks": callbacks, "trackers": trackers}
        self.state: TrainState | None = None

    def __str__(self) -> str:
        at = "" if self.state is None else f", after step {int(self.state.step)}"
        loss_fn = getattr(self.model.loss_fn, "make", self.model.loss_fn)
        return f"Trainer of {self.model.name!r}, {place_of(loss_fn)}{at}\n{self.config!r}"

    def train(self, *, log: Log = print) -> TrainResult:
        """Trains, or goes on where the run of that name stopped, if `config.resume` is `auto`.

        Args:
          log: called with progress lines, in process 0 alone.

        Raises:
          ValueError: a batch that does not divide over the devices, a loss that is no scalar, a config that contradicts
            itself or the devices, processes that differ, or a checkpoint of another model.
          OtherProcessFailed: in the other processes, where one fails alone.
        """
        is_first = jax.process_index() == 0
        run = prepare(
            self.config, model=self.model, tx=self._tx, log=log if is_first else lambda _: None, **self._hooks
        )
        self.state = None  # which would take memory beside the new one
        result, self.state = execute_to_state(run, log=log)
        return result
