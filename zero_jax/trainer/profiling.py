"""Profiles of some steps of a run."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax


class Profiler:
    """Records a profile of some steps, for xprof and TensorBoard."""

    def __init__(self, steps: range, folder: pathlib.Path, *, say: Callable[[str], None]):
        """Records nothing yet.

        Args:
          steps: the steps to record.
          folder: where the profile goes.
          say: takes a line when it is there.
        """
        self._steps, self._folder, self._say = steps, folder, say
        self._runs = False

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop()

    def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Returns what a step is dispatched in; begins to record where it is among those asked for."""
        if step in self._steps and not self._runs:
            jax.profiler.start_trace(self._folder)
            self._runs = True
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def done(self, step: int) -> None:
        """Ends the recording if a step that is now complete was the last one."""
        if self._runs and step + 1 not in self._steps:
            self._stop()

    def _stop(self) -> None:
        if self._runs:
            self._runs = False
            jax.profiler.stop_trace()
            self._say(f"profile of steps {self._steps.start} to {self._steps.stop - 1} in {self._folder}")
