"""The result of a run: final metrics, and a figure of its losses."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zero_jax.cluster import EXIT_CODE as SAVED
from zero_jax.core.files.json_lines import whole_file
from zero_jax.core.text_tables import Report, format_figure
from zero_jax.trainer.reporting.curves import RunRecords, plot_runs, read_run, values_of

# What a process exits with, and what is said of the end, by status.
_ENDS: Mapping[str, tuple[int, str]] = {
    "done": (0, ""),
    "stopped": (0, "; stopped by a callback"),
    "ended": (1, "; stopped: the batches ended"),
    "unsaved": (1, "; THE LAST STATE IS NOT SAVED"),
    "preempted_unsaved": (1, "; stopped by a signal; THE LAST STATE IS NOT SAVED"),
    "diverged": (3, "; stopped: loss or params were not finite"),
    "skipped": (3, "; NOTHING IS TRAINED: every step was skipped"),
    "preempted": (SAVED, "; stopped by a signal"),
}
EXIT_STATUS = {status: exit_status for status, (exit_status, _) in _ENDS.items()}

Losses = Sequence[tuple[int, float]]

_PATIENT_SECONDS, _HURRIED_SECONDS = 60.0, 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult(Report):
    """The final metrics of a run; losses are those of the first and the last step of the run, however often resumed.

    Losses of text are in nats per token. Validation losses are None where nothing is validated, `tokens_per_second` is
    None where the model is not about tokens, and `examples_per_second` where it is. `loss_curve` is the path of a
    picture of the losses, or None where it could not be drawn.

    `status` is `done`, `stopped` (saved; a callback has ended the run), `ended` (saved; the batches ended before the
    steps), `unsaved` (done, but the last state could not be saved), `preempted` (saved and stopped; resume with
    `--resume auto`), `preempted_unsaved` (stopped, but the last state could not be saved), `diverged` (stopped because
    loss or params stayed not finite) or `skipped` (saved, but every step was skipped because a gradient was not finite:
    the params are those of the start).

    A script of your own ends with `sys.exit(result.exit_status)`: what starts it again knows by it that a run is not
    done, but was saved and stopped.

    Example:
      >>> run = zero.TrainConfig(steps=2, out=folder, name="first")
      >>> result = zero.Trainer(loss_fn, init_fn, lambda step: batch, config=run, tx=tx).train(log=lambda _: None)
      >>> result.status, result.num_steps
      ('done', 2)
    """

    status: str
    directory: str
    model: str
    stage: int
    num_devices: int
    num_params: int
    num_steps: int
    num_skipped_steps: int
    num_failed_saves: int
    first_train_loss: float
    final_train_loss: float
    first_validation_loss: float | None
    final_validation_loss: float | None
    tokens_per_second: float | None
    compile_seconds: float
    train_seconds: float
    noise_scale: float | None
    per_device_params_bytes: int
    per_device_master_bytes: int
    per_device_opt_state_bytes: int
    per_device_model_state_bytes: int = 0
    per_device_grad_errors_bytes: int = 0
    prompt: str
    sample: str
    examples_per_second: float | None = None
    loss_curve: str | None = None

    @property
    def exit_status(self) -> int:
        """The status for a process to exit with, as `zero-jax train` does: 0 done, 75 saved and stopped."""
        return EXIT_STATUS[self.status]

    def __str__(self) -> str:
        skipped = f", {self.num_skipped_steps} skipped" if self.num_skipped_steps else ""
        devices = f"{self.num_devices} device{'s' if self.num_devices > 1 else ''}"
        steps = f"{self.num_steps} step{'s' if self.num_steps != 1 else ''}"
        # NaN after a single step, which compiles
        unit, rate = "tokens", self.tokens_per_second
        if rate is None:
            unit, rate = "examples", math.nan if self.examples_per_second is None else self.examples_per_second
        speed = "" if math.isnan(rate) else f", {rate:,.0f} {unit}/s"
        losses = [("training loss", self.first_train_loss, self.final_train_loss)]
        if self.first_validation_loss is not None and self.final_validation_loss is not None:
            losses.insert(0, ("validation loss", self.first_validation_loss, self.final_validation_loss))
        # Of a run that was stopped before its first step there are none.
        known = [loss for loss in losses if self.num_steps or not math.isnan(loss[1])]
        shown = [(name, *(format_figure(x, decimals=3) for x in ends)) for name, *ends in known]
        lines = [
            f"{self.model}: {steps} at stage {self.stage} on {devices} in "
            f"{self.train_seconds:.0f} s{skipped}{speed}{_ENDS[self.status][1]}",
            *(f"{name:<15}  {first} -> {last}" for name, first, last in shown),
            f"loss curve       {self.loss_curve} (figures in metrics.jsonl and config.json beside it)"
            if self.loss_curve
            else f"no loss curve    (figures in {self.directory}/metrics.jsonl)",
        ]
        return "\n".join(lines)


def run_losses(folder: pathlib.Path, *, train: Losses, validation: Losses) -> RunRecords:
    """Returns the (step, loss) pairs of a run, from its folder and from this process, in case its disk was full."""
    try:
        run = read_run(folder)
    except (OSError, ValueError):  # another process's file, or one that could not be written
        run = RunRecords(name=folder.name, train=(), validation=())

    def merged(records: Sequence[dict[str, Any]], measured: Losses) -> tuple[dict[str, Any], ...]:
        losses = dict(zip((record["step"] for record in records), values_of(records, "loss").tolist(), strict=True))
        # Of a step in both, what this process measured: the file may have that of an attempt before.
        return tuple({"step": step, "loss": loss} for step, loss in sorted((losses | dict(measured)).items()))

    return dataclasses.replace(run, train=merged(run.train, train), validation=merged(run.validation, validation))


def draw_losses(path: pathlib.Path, run: RunRecords, *, title: str, is_hurried: Callable[[], bool]) -> str | None:
    """Plots the losses of a finished run atomically, within a minute, or 5 s once `is_hurried`; returns any error."""
    failures: list[str] = []

    def draw() -> None:
        try:
            with whole_file(path) as partial:
                plot_runs(partial, [run], title=title)
        except Exception as error:  # the run is done and saved, and must not fail because of a figure
            failures.append(str(error) or type(error).__name__)

    started = time.monotonic()
    # A daemon, which does not keep the process from its end if it takes too long.
    thread = threading.Thread(target=draw, name="picture", daemon=True)
    thread.start()
    while thread.is_alive():
        limit = _HURRIED_SECONDS if is_hurried() else _PATIENT_SECONDS
        if time.monotonic() - started > limit:
            return f"drawing it took longer than {limit:.0f} s"
        thread.join(0.05)
    return failures[0] if failures else None
