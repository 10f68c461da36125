"""Checkpoints of a run: the state that it begins with, the states that it saves, and the last good one."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from zero_jax import checkpoint
from zero_jax.core.agreement import Agreement, from_first_process
from zero_jax.core.files.untrusted import flag, mapping, number, whole_number
from zero_jax.trainer.run import Run
from zero_jax.trainer.run_folder import differences
from zero_jax.training import NoiseScale, TrainState, init_state, nonfinite_leaves

# Entries of a checkpoint's record of the data that may differ in a resumed run: the position, and what `RunInput.open`
# compares. The others identify the data.
_POSITION = ("position", "states", "num_processes", "batch_size", "fingerprints")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The start of a run: its first state, and what the checkpoint has besides."""

    state: TrainState
    step: int = 0  # steps done before
    data: Mapping[str, Any] | None = None  # what the checkpoint recorded of the data, its position above all
    noise: dict[str, Any] | None = None  # the gradient noise scale
    is_evaluated: bool = False  # whether the validation loss of the state is known
    lines: tuple[str, ...] = ()  # for the log


class ResumeError(ValueError):
    """Raised where a run cannot be resumed: another model, optimizer or text, or damaged checkpoints alone.

    Example:
      >>> issubclass(zero.trainer.ResumeError, ValueError)
      True
    """


def begin(run: Run) -> Start:
    """Initializes the state of a run, or restores it from a checkpoint of this run or of another."""
    config, model, base, lines = run.config, run.model, run.zero, list[str]()
    key, adapt = jax.random.key(config.seed), model.adapt_fn
    if adapt is not None:  # the base of adapters has specs of its own
        base = dataclasses.replace(base, param_specs=model.base_param_specs)
    options = {"init_fn": model.init_fn, "tx": run.tx, "mesh": run.mesh, "config": run.zero, "log": lines.append}
    # As process 0 sees the folder: all go on, or all begin.
    is_resumed = config.resume == "auto" and from_first_process(
        lambda: str(checkpoint.list_step_folders(run.checkpoints) or "")
    )
    try:
        if is_resumed:
            return _checked(run, checkpoint.restore(run.checkpoints, accept=_accept, **options), lines)
        if config.init_from is not None:
            folder, step = checkpoint.find_restorable(config.init_from)
            # The checkpoint is of a base, and the optimizer is for its adapters.
            if model.base_init_fn is not None:
                options |= {"init_fn": model.base_init_fn, "tx": optax.identity(), "config": base}
            restored = checkpoint.restore(folder, step=step, params_only=True, key=key, **options)
            state = restored.state
            if adapt is not None:
                state = init_state(adapt(state.variables, key), run.tx, key, mesh=run.mesh, config=run.zero)
            return Start(state=state, lines=(f"params of step {restored.step} of {config.init_from}", *lines))
    except ValueError as error:
        raise ResumeError(str(error)) from error
    params = model.init_fn
    if model.load_fn is not None:
        params = model.load_fn(run.mesh, base)
        params = params if adapt is None else adapt(params, key)
    return Start(state=init_state(params, run.tx, key, mesh=run.mesh, config=run.zero))


def _accept(extra: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` for a record that `zero-jax train` did not write, such as that of another loop."""
    try:
        missing = {"data", "noise_scale", "config", "is_evaluated"} - extra.keys()
        if missing:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        # The file may be forged, or of a loop of the user's own with entries of the same names.
        whole_number(mapping(extra["data"]).get("position"))
        mapping(extra["config"])
        flag(extra["is_evaluated"])
        for value in mapping(extra["noise_scale"]).values():
            number(value)
        NoiseScale.from_json(extra["noise_scale"])
    except ValueError as error:
        raise checkpoint.CheckpointError(
            f"its record is not that of a training run ({error}): begin another run from its params with init_from"
        ) from error


def _checked(run: Run, restored: checkpoint.Restored, lines: list[str]) -> Start:
    saved = restored.extra["data"]
    changed = differences({name: saved[name] for name in saved if name not in _POSITION}, dict(run.input.identity))
    if changed:
        raise ValueError(
            f"{run.folder} was trained on other data ({'; '.join(changed)}): give it {run.input.identity_words} of "
            "before, or begin another run (another name) from its params with init_from"
        )
    changed = differences(restored.extra["config"], run.saved_config)
    config_changes = [line for line in changed if not line.startswith(("resume:", "out:", "name:", "init_from:"))]
    return Start(
        state=restored.state,
        step=restored.step,
        data=saved,
        noise=restored.extra["noise_scale"],
        is_evaluated=restored.extra["is_evaluated"],
        lines=(
            f"resuming after step {restored.step} of {run.folder}",
            *lines,
            *(f"changed since: {line}" for line in config_changes),
        ),
    )


class Saver:
    """Saves the states of a run that are finite, and knows whether the last one is saved."""

    def __init__(self, checkpointer: checkpoint.Checkpointer, *, run: Run, start: Start, say: Callable[[str], None]):
        """Saves nothing yet; leaves that are not finite in `start` do not prevent later saves."""
        self._checkpointer, self._run, self._say = checkpointer, run, say
        self._first_step, self._num_failed_before = start.step, 0
        self._last_step = start.step  # the last one that was saved, or begun with
        self._nonfinite_at_start = frozenset(nonfinite_leaves(start.state, mesh=run.mesh))

    def has(self, step: int) -> bool:
        """Returns whether the state of a step is saved, or the run began with it; the same in all processes."""
        self._wait()
        return step == self._last_step and self._checkpointer.num_failed == self._num_failed_before

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
        """Starts to save the state unless its latest steps were not finite; returns whether the run can continue.

        At the end of a run (`is_last`) a state whose last update was skipped is saved too, as it is finite.
        """
        is_skipped = is_last and self._run.zero.skip_nonfinite
        if num_nonfinite_steps and not is_skipped:
            self._say(f"step {step}: not saved, because its loss or gradients are not finite")
            return True
        # An update may overflow params although loss and gradients were finite.
        leaves = [x for x in nonfinite_leaves(state, mesh=self._run.mesh) if x not in self._nonfinite_at_start]
        if leaves:
            others = f" and {len(leaves) - 1} other leaves" if len(leaves) > 1 else ""
            self.log_divergence(step, f"NaN or infinities in {leaves[0]}{others} of its state")
            return False
        if not math.isfinite(loss or 0):
            self._say(f"step {step}: its validation loss is {loss}: the state is saved, but not as one of the best")
        self._wait()  # for the save before, whose failure counts as well
        self._num_failed_before = self._checkpointer.num_failed
        allow_nonfinite = bool(self._nonfinite_at_start)
        self._checkpointer.save(step, state, extra=extra, loss=loss, allow_nonfinite=allow_nonfinite)
        self._last_step = step
        return True

    def wait_until_saved(self, step: int) -> bool:
        """Waits for the last save; returns whether the state of `step` is saved, and logs it if not."""
        self._wait()
        if step == self._first_step:
            return True
        steps, why_none = self._steps()
        if step in steps and self._checkpointer.num_failed == self._num_failed_before:
            return True
        newest = (
            f"the newest checkpoint is that of step {max(steps)}" if steps else why_none or "there is no checkpoint"
        )
        self._say(f"the state of step {step} is NOT SAVED: {newest}")
        return False

    def log_divergence(self, step: int, why: str) -> None:
        """Logs why the run stops, and its newest checkpoint."""
        self._wait()
        steps, why_none = self._steps()
        newest = f"that of step {max(steps)}" if steps else f"none: {why_none or 'there was no save before'}"
        remedy = "A smaller learning rate, a longer warm-up or another seed may help"
        if self._nonfinite_at_start:
            remedy = f"{min(self._nonfinite_at_start)} was not finite when the run began: look there first"
        self._say(f"stopping at step {step}: {why}. The last good checkpoint is {newest}. {remedy}")

    def _wait(self) -> None:
        """Waits until the last save is complete or has failed, in all processes."""
        with Agreement():
            self._checkpointer.wait()

    def _steps(self) -> tuple[list[int], str]:
        """Returns the steps that are saved by process 0's listing (that of another may be older), or why none is."""

        def listed() -> str:
            try:
                return json.dumps([self._checkpointer.steps(), ""])
            except checkpoint.CheckpointError as error:  # the run ends all the same, and says how
                return json.dumps([[], str(error)])

        steps, why_none = json.loads(from_first_process(listed))
        return steps, why_none
