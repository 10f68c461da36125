"""Functions of the user's own that a run calls after its steps, with metrics and state; they may stop it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zero_jax.core.agreement import by_value, from_all_processes
from zero_jax.core.signatures import check_takes
from zero_jax.core.tree import shown
from zero_jax.training import TrainState, check_not_donated

_ARGUMENTS = ("step", "metrics", "state")
_REMEDY = (
    "give a function of (step, metrics, state), or an object with such a method on_step and maybe a number of steps, "
    "every"
)


@dataclasses.dataclass(frozen=True)
class Callback:
    """A function that a run calls after each `every` steps, in all processes.

    `on_step(step, metrics, state)` gets the number of steps done, their last one's record as in `metrics.jsonl` (with
    `validation/loss` and its like where that step was validated), and the train state, global arrays that it may read
    and compute with. The run waits for the step before the call, which every=1 pays at each step: what needs no state
    is better a tracker. It returns True to stop the run after this step, with a validation, a checkpoint and the status
    `stopped`; where one of several processes does, all stop. An error ends the run, once the state is saved.

    Attributes:
      on_step: the function.
      every: the number of steps between two calls, those of a resumed run counted on.

    Example:
      >>> each = zero.trainer.Callback(lambda step, metrics, state: print(step), every=2)
      >>> config = zero.TrainConfig(steps=2, out=folder, name="told")
      >>> trainer = zero.Trainer(loss_fn, init_fn, lambda step: batch, config=config, tx=tx, callbacks=[each])
      >>> _ = trainer.train(log=str)
      2
    """

    on_step: Callable[[int, Mapping[str, Any], TrainState], bool | None]
    every: int = 1


def as_callbacks(callbacks: Sequence[Any]) -> tuple[Callback, ...]:
    """Returns callbacks of functions, and of objects with a method `on_step` and maybe a number `every`."""
    made = []
    for i, given in enumerate(callbacks):
        what, function, every = f"callbacks[{i}]", getattr(given, "on_step", given), getattr(given, "every", 1)
        if isinstance(given, type):
            raise ValueError(f"{what}={shown(given)} is a class: give an object of it")
        check_takes(what, function, _ARGUMENTS, remedy=_REMEDY)
        # A bool is an int of Python.
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"{what}: every={shown(every)}: give a number of steps, 1 at least")
        made.append(Callback(function, every))
    return tuple(made)


def name_of(callback: Callback) -> str:
    """Returns the name of a callback's function, for people: `EarlyStop.on_step`, without a local scope."""
    name = getattr(callback.on_step, "__qualname__", type(callback.on_step).__qualname__)
    return name.rpartition("<locals>.")[2]


def call_all(callbacks: Sequence[Callback], step: int, metrics: Mapping[str, Any], state: TrainState) -> str:
    """Calls callbacks in all processes; returns which of them stop the run, the same in all processes, '' for none."""
    stopping = [name_of(callback) for callback in callbacks if _calls_for_stop(callback, step, metrics, state)]
    # All take this turn, also where no callback stops: a process that stops alone would leave the others in a
    # collective.
    answers = from_all_processes(", ".join(stopping))
    if len(set(answers)) == 1:
        return answers[0]
    return by_value({process: answer for process, answer in enumerate(answers) if answer})


def _calls_for_stop(callback: Callback, step: int, metrics: Mapping[str, Any], state: TrainState) -> bool:
    what = f"the callback {name_of(callback)}, after step {step},"
    given = jax.tree.map(lambda x: x, state)  # dicts of its own, or it could change those of the run
    try:
        answer = callback.on_step(step, dict(metrics), given)
    except SystemExit as error:  # it would end this process at once, with nothing saved
        raise RuntimeError(f"{what} has ended Python ({error!r}): return True to stop the run") from error
    except Exception as error:
        error.add_note(f"{what} has raised this")
        raise
    try:
        check_not_donated(state)  # now: the next step would fail without the callback's name
    except ValueError as error:
        why = f"has donated or deleted arrays of the state: let it copy them first ({error})"
        raise ValueError(f"{what} {why}") from error
    leaves, before = jax.tree.leaves(given), jax.tree.leaves(state)
    if len(leaves) != len(before) or any(x is not y for x, y in zip(leaves, before, strict=True)):
        raise ValueError(
            f"{what} has changed the state, which a run does not take over: change the loss function or the optimizer "
            "instead, or write a loop of your own"
        )
    if answer is None or isinstance(answer, bool | np.bool_):
        return bool(answer)
    raise ValueError(f"{what} has returned {shown(answer)}: return True to stop the run, and False or nothing to go on")
