"""Profiles some steps of a run with `jax.profiler`."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax


class Profiler:
    """Records a profile of some steps, for xprof and TensorBoard."""

    def __init__(self, steps: range, folder: pathlib.Path, *, say: Callable[[str], None]):
        """Records nothing yet; `say` is called with a line when the profile is in the folder."""
        self._steps, self._folder, self._say = steps, folder, say
        self._runs = False

    def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Returns the context to dispatch a step in; starts the recording at the first of the steps."""
        if step in self._steps and not self._runs:
            jax.profiler.start_trace(self._folder)
            self._runs = True
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def done(self, step: int) -> None:
        """Ends the recording after the last of the steps is complete."""
        if self._runs and step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Ends the recording, if there is one."""
        if self._runs:
            self._runs = False
            jax.profiler.stop_trace()
            self._say(f"profile of steps {self._steps.start} to {self._steps.stop - 1} in {self._folder}")
