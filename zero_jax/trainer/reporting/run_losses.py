"""The losses of a run, what came before a resume included, and their picture."""

from __future__ import annotations

import math
import os
import pathlib
import threading
import time
from collections.abc import Callable, Sequence

from zero_jax.trainer.reporting.curves import plot_losses, read_run

Losses = list[tuple[int, float]]

_PATIENT_SECONDS, _HURRIED_SECONDS = 60.0, 5.0


def run_losses(folder: pathlib.Path, own: tuple[Losses, Losses]) -> tuple[Losses, Losses]:
    """Returns step and loss of all training steps, and of all evaluations.

    Args:
      folder: folder of the run.
      own: both of this process: the file may lack its last steps, where its disk was full.
    """
    try:
        records = read_run(folder)
    except (OSError, ValueError):  # another process's file, or one that could not be written
        return own
    train, validation = (
        {one["step"]: math.nan if one["loss"] is None else one["loss"] for one in kind} | dict(of_this_process)
        for kind, of_this_process in zip((records.train, records.validation), own, strict=True)
    )
    return sorted(train.items()), sorted(validation.items())


def draw_losses(
    path: pathlib.Path,
    *,
    train: Sequence[tuple[int, float]],
    validation: Sequence[tuple[int, float]],
    title: str,
    is_hurried: Callable[[], bool],
) -> str | None:
    """Draws the losses of a run that is over, in a thread that is not waited for long.

    Args:
      path: where the picture goes; it appears when it is whole.
      train: step and loss of every training step.
      validation: step and loss of every evaluation.
      title: what the run is.
      is_hurried: whether the process was told to stop: seconds later it may be killed, whatever it had to report.

    Returns:
      Why there is no picture, or None.
    """
    failures: list[str] = []

    def draw() -> None:
        partial = path.with_name(f".partial-{path.name}")
        try:
            plot_losses(partial, train=train, validation=validation, title=title)
            os.replace(partial, path)
        except Exception as error:  # the run is done, and saved; a picture is not worth its end
            failures.append(str(error) or type(error).__name__)
            partial.unlink(missing_ok=True)

    started = time.monotonic()
    thread = threading.Thread(target=draw, name="picture", daemon=True)
    thread.start()
    while thread.is_alive():
        limit = _HURRIED_SECONDS if is_hurried() else _PATIENT_SECONDS
        if time.monotonic() - started > limit:
            return f"drawing it took longer than {limit:.0f} s"
        thread.join(0.05)
    return failures[0] if failures else None
