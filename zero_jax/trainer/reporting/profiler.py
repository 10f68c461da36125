"""A profile of some steps of a run."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax


class Profiler(contextlib.ExitStack):
    """Records a profile of some steps, for xprof and TensorBoard, by `jax.profiler`; says where it is."""

    def __init__(self, steps: range, folder: pathlib.Path, *, say: Callable[[str], None]):
        super().__init__()
        self._steps, self._folder, self._say, self._has_begun = steps, folder, say, False

    def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Returns the context to dispatch a step in; starts the recording at the first of the steps."""
        if step in self._steps and not self._has_begun:
            self._has_begun = True
            # Callbacks run in reverse order: this one once the trace is written.
            self.callback(
                self._say, f"profile of steps {self._steps.start} to {self._steps.stop - 1} in {self._folder}"
            )
            self.enter_context(jax.profiler.trace(self._folder))
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def done(self, step: int) -> None:
        """Ends the recording after the last of the steps is complete."""
        if step + 1 not in self._steps:
            self.close()
