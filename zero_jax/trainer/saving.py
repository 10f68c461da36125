"""Checkpoints of a run: which states are saved, whether the last one is, and which one is left after a divergence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from zero_jax.checkpoint import Checkpointer
from zero_jax.core.agreement import from_first_process
from zero_jax.trainer.resume import Start
from zero_jax.trainer.run import Run
from zero_jax.training import TrainState, nonfinite_leaves


class Saver:
    """Saves the states of a run that are finite, and knows whether the last one is saved."""

    def __init__(self, checkpointer: Checkpointer, *, run: Run, start: Start, say: Callable[[str], None]):
        """Saves nothing yet.

        Args:
          checkpointer: writes the checkpoints.
          run: the run.
          start: where it begins; leaves that are not finite there may stay so.
          say: takes lines about what is not saved.
        """
        self._checkpointer, self._run, self._say = checkpointer, run, say
        self._first_step, self._num_failed_before = start.step, 0
        self._nonfinite_at_start = frozenset(nonfinite_leaves(start.state, mesh=run.mesh))

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        loss: float | None,
        extra: Mapping[str, Any],
        num_nonfinite_steps: int,
        is_last: bool,
    ) -> bool:
        """Begins to save a state, unless it came of a step that was not finite.

        Args:
          step: steps that were done.
          state: the state after them.
          loss: its validation loss, if that was measured.
          extra: what the record of the checkpoint has besides.
          num_nonfinite_steps: the latest steps in a row that were not finite.
          is_last: whether the run ends here. If the update of a step that was not finite was skipped, the state is that
            of the step before, and the end of a run keeps it.

        Returns:
          Whether the run can go on: not with a state that is not finite itself.
        """
        is_skipped = is_last and self._run.zero.skip_nonfinite
        if num_nonfinite_steps and not is_skipped:
            self._say(f"step {step}: not saved, because its loss or gradients are not finite")
            return True
        leaves = [x for x in nonfinite_leaves(state, mesh=self._run.mesh) if x not in self._nonfinite_at_start]
        if leaves:
            others = f" and {len(leaves) - 1} other leaves" if len(leaves) > 1 else ""
            self.tell_diverged(step, f"NaN or infinities in {leaves[0]}{others} of its state")
            return False
        if not math.isfinite(loss or 0):
            self._say(f"step {step}: not saved, because its validation loss is not finite")
            return True
        self._checkpointer.wait()  # for the save before, which counts as well
        self._num_failed_before = self._checkpointer.num_failed
        allow_nonfinite = bool(self._nonfinite_at_start)
        self._checkpointer.save(step, state, extra=extra, loss=loss, allow_nonfinite=allow_nonfinite)
        return True

    def wait_until_saved(self, step: int) -> bool:
        """Waits for the save in flight; returns whether the state of the last step is saved, and says so if not."""
        self._checkpointer.wait()
        steps = self._checkpointer.steps()
        is_complete = step in steps and self._checkpointer.num_failed == self._num_failed_before
        if step == self._first_step or from_first_process(lambda: str(is_complete)) == "True":
            return True
        newest = f"the newest checkpoint is that of step {max(steps)}" if steps else "there is no checkpoint"
        self._say(f"the state of step {step} is NOT SAVED: {newest}")
        return False

    def tell_diverged(self, step: int, why: str) -> None:
        """Says why the run stops, and which checkpoint is left."""
        self._checkpointer.wait()
        steps = self._checkpointer.steps()
        newest = f"that of step {max(steps)}" if steps else "none: there was no save before"
        self._say(
            f"stopping at step {step}: {why}. The last good checkpoint is {newest}. A smaller learning rate, a longer "
            "warm-up or another seed may help"
        )
