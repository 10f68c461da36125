"""The first state of a run: initialized, from another run's params, or restored from its own checkpoint."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from zero_jax.checkpoint import CheckpointError, Restored, find_checkpoint, list_step_folders, restore, step_path
from zero_jax.core.agreement import from_first_process
from zero_jax.core.files.untrusted import flag, mapping, number, whole_number
from zero_jax.trainer.run import Run
from zero_jax.trainer.run_folder import as_json, differences
from zero_jax.training import NoiseScale, TrainState, init_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins.

    Attributes:
      state: its first state.
      step: steps that were done before.
      position: examples that were taken before.
      noise: the record of the gradient noise scale, if any.
      is_evaluated: whether the validation loss of that state is known.
      lines: what the log says of it.
    """

    state: TrainState
    step: int = 0
    position: int = 0
    noise: dict[str, Any] | None = None
    is_evaluated: bool = False
    lines: tuple[str, ...] = ()


class ResumeError(ValueError):
    """A run that cannot go on from what there is: another model, optimizer or text, or damaged checkpoints alone."""


def begin(run: Run) -> Start:
    """Makes the state of a run, or restores what it or another run has saved.

    Raises:
      ResumeError: checkpoints of another model or text, or damaged ones alone.
    """
    config, key = run.config, jax.random.key(run.config.seed)
    lines: list[str] = []
    options = {"init_fn": run.model.init_fn, "tx": run.tx, "mesh": run.mesh, "config": run.zero, "log": lines.append}
    has_own = config.resume == "auto" and from_first_process(lambda: str(list_step_folders(run.checkpoints) or ""))
    try:
        if has_own:
            return _checked(run, restore(run.checkpoints, accept=_accept, **options), lines)
        if config.init_from is not None:
            folder, step = _source(config.init_from)
            restored = restore(folder, step=step, params_only=True, key=key, **options)
            return Start(state=restored.state, lines=(f"params of step {restored.step} of {config.init_from}", *lines))
    except ValueError as error:
        raise ResumeError(str(error)) from error
    return Start(state=init_state(run.model.init_fn, run.tx, key, mesh=run.mesh, config=run.zero))


def _accept(extra: Mapping[str, Any]) -> None:
    """Refuses a checkpoint whose record lacks what a run goes on from: saved by a loop of the user's own, or forged."""
    try:
        missing = {"data", "noise_scale", "config", "is_evaluated"} - extra.keys()
        if missing:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        whole_number(mapping(extra["data"]).get("position"))
        mapping(extra["config"])
        flag(extra["is_evaluated"])
        for value in mapping(extra["noise_scale"]).values():
            number(value)
        NoiseScale.from_json(extra["noise_scale"])
    except ValueError as error:
        raise CheckpointError(
            f"its record is not that of a training run ({error}): begin another run from its params with init_from"
        ) from error


def _checked(run: Run, restored: Restored, lines: list[str]) -> Start:
    """Returns where a checkpoint of the run's own left it, if it was trained on the same data."""
    saved = restored.extra["data"]
    changed = differences({**saved, "position": 0}, {**identity(run), "position": 0})
    if changed:
        raise ValueError(
            f"{run.folder} was trained on other data ({'; '.join(changed)}): give it the data, seed and seq_len of "
            "before, or begin another run (another name) from its params with init_from"
        )
    changed = differences({**restored.extra["config"], "model": None}, {**as_json(run.config), "model": None})
    config_changes = [line for line in changed if not line.startswith(("resume:", "out:", "name:", "init_from:"))]
    return Start(
        state=restored.state,
        step=restored.step,
        position=saved["position"],
        noise=restored.extra["noise_scale"],
        is_evaluated=restored.extra["is_evaluated"],
        lines=(
            f"resuming after step {restored.step} of {run.folder}",
            *lines,
            *(f"changed since: {line}" for line in config_changes),
        ),
    )


def _source(path: str) -> tuple[str, int | None]:
    """Returns the folder of checkpoints that a path leads to, and the step if it names one."""
    record, _ = find_checkpoint(path)
    is_step = record.path.name == pathlib.PurePath(path).name
    if is_step and record.path != step_path(record.path.parent, record.step):
        raise ValueError(
            f"{path} is the checkpoint of step {record.step}: name it {step_path(record.path, record.step).name}"
        )
    return str(record.path.parent), record.step if is_step else None


def identity(run: Run) -> dict[str, Any]:
    """Returns what decides which example comes at which position."""
    return {"fingerprint": run.dataset.fingerprint, "seed": run.config.seed, "seq_len": run.model.seq_len}
