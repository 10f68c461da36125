"""Trains: a model of text, or by `zero.Trainer` one of a loss function, an init function and batches of any kind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import jax
import optax
from jax import Array

from zero_jax.core.agreement import Agreement
from zero_jax.core.device_put import platform_of
from zero_jax.core.signatures import place_of
from zero_jax.core.text_tables import Report
from zero_jax.sharding.precision import explain_float16
from zero_jax.trainer.inputs.own import OwnModel
from zero_jax.trainer.loop import Training
from zero_jax.trainer.reporting.metrics import Log
from zero_jax.trainer.reporting.trackers import OpenTracker, Tracker
from zero_jax.trainer.result import TrainResult
from zero_jax.trainer.run import Model, Run, prepare
from zero_jax.trainer.train_config import TrainConfig
from zero_jax.training import MeshLoss, TrainState


def train(
    config: TrainConfig,
    *,
    model: Model | OwnModel,
    tx: optax.GradientTransformation | None = None,
    log: Log = print,
    callbacks: Sequence[Any] = (),
    trackers: Sequence[Tracker | OpenTracker] = (),
) -> TrainResult:
    """Trains a model: a `Model` of text, or an `OwnModel` with its batches.

    The other arguments are those of `zero.Trainer`; `log` is called with progress lines, in process 0 alone. Raises as
    `prepare` does. Loss curve, metrics, checkpoints and config are in the run's folder.
    """
    run = prepare(config, model=model, tx=tx, callbacks=callbacks, trackers=trackers)
    return execute(run, log=log)


def execute(run: Run, *, log: Log = print, terminal: TextIO | None = None) -> TrainResult:
    """Executes a run that `prepare` has checked.

    Args:
      run: the run.
      log: called with progress lines, in process 0 alone.
      terminal: stream for a live progress bar, if it is a terminal.

    Raises:
      ResumeError: the checkpoint to resume from is of another model, optimizer or text, or damaged.
      OtherProcessFailed: in the other processes, where one alone fails.
    """
    return execute_to_state(run, log=log, terminal=terminal)[0]


def execute_to_state(run: Run, *, log: Log = print, terminal: TextIO | None = None) -> tuple[TrainResult, TrainState]:
    """Executes a run as `execute` does; returns its last state too."""
    try:
        with Agreement(), contextlib.ExitStack() as stack:
            with Agreement():  # one that cannot begin must not leave the others in their first step
                training = Training(run, log=log, terminal=terminal, stack=stack)
            return training.execute(), training.state
    except Exception as error:
        explain_float16(error, platform=platform_of(run.mesh))
        raise


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
        loss_fn: Any = getattr(self.model.loss_fn, "make", self.model.loss_fn)
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
