"""Where a run begins: anew, from another run's params, or where a checkpoint of its own left it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from zero_jax.checkpoint import latest_step, restore
from zero_jax.run_folder import as_json, differences, from_first_process
from zero_jax.state import TrainState, init_state
from zero_jax.training_run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins.

    Attributes:
      state: its first state.
      step: steps that were done before.
      position: examples that were taken before.
      noise: the record of the gradient noise scale, if any.
      lines: what to tell of it.
    """

    state: TrainState
    step: int = 0
    position: int = 0
    noise: dict[str, Any] | None = None
    lines: tuple[str, ...] = ()


def begin(run: Run) -> Start:
    """Makes the state of a run, or restores what it or another run has saved.

    Raises:
      ValueError: checkpoints of another model or text, or damaged ones alone.
    """
    config, checkpoints = run.config, run.checkpoints
    lines: list[str] = []
    given = {"init_fn": run.model.init_fn, "tx": run.tx, "mesh": run.mesh, "config": run.zero, "log": lines.append}
    key = jax.random.key(config.seed)
    found_step = from_first_process(str(latest_step(checkpoints) or ""))
    if config.resume == "auto" and found_step:
        found = restore(checkpoints, **given)
        saved = found.extra["data"]
        changed = differences({**saved, "position": 0}, {**identity(run), "position": 0})
        if changed:
            raise ValueError(
                f"{run.folder} was trained on other data ({'; '.join(changed)}): give it the data, seed and seq_len of "
                "before, or begin another run (another name) from its params with init_from"
            )
        before = {**found.extra["config"], "model": None}
        changed = differences(before, {**as_json(config), "model": None})
        told = [line for line in changed if not line.startswith(("resume:", "out:", "name:", "init_from:"))]
        lines += [f"changed since: {line}" for line in told]
        return Start(
            state=found.state,
            step=found.step,
            position=saved["position"],
            noise=found.extra["noise_scale"],
            lines=(f"resuming after step {found.step} of {run.folder}", *lines),
        )
    if config.init_from is not None:
        found = restore(config.init_from, params_only=True, key=key, **given)
        return Start(state=found.state, lines=(f"params of step {found.step} of {config.init_from}", *lines))
    return Start(state=init_state(run.model.init_fn, run.tx, key, mesh=run.mesh, config=run.zero))


def identity(run: Run) -> dict[str, Any]:
    """Returns what decides which example comes at which position."""
    return {"fingerprint": run.dataset.fingerprint, "seed": run.config.seed, "seq_len": run.model.seq_len}
