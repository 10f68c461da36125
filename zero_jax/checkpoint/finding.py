"""Finds checkpoints: the steps in a folder, and the newest valid one; reads records, but no arrays."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Callable, Sequence

from etils import epath

from zero_jax.checkpoint.record import (
    COMMITTED,
    RECORD_FILE,
    REPLACED,
    STEP,
    CheckpointError,
    CheckpointRemoved,
    Record,
    first_names,
    read_record,
    resolve_folder,
    step_path,
)
from zero_jax.core.agreement import from_first_process
from zero_jax.core.files.system_errors import with_remedy
from zero_jax.core.files.untrusted import is_bucket, user_path
from zero_jax.core.signatures import check_arguments


def list_step_folders(directory: str | os.PathLike[str]) -> list[int]:
    """Returns the steps that have a folder in `directory`, in order; none where that does not exist.

    The steps' records are not read; only incomplete saves in buckets are left out.

    Raises:
      CheckpointError: the folder cannot be read.

    Example:
      >>> with zero.Checkpointer(folder) as saved:
      ...     saved.save(1, state)
      >>> zero.checkpoint.list_step_folders(folder)
      [1]
    """
    directory = resolve_folder(directory)
    try:
        paths = directory.iterdir() if directory.is_dir() else ()
        steps = {int(match[1]) for path in paths if (match := STEP.fullmatch(path.name))}
        folders = {step: step_folder(directory, step) for step in sorted(steps)}  # not of names such as step_9
        return [s for s, x in folders.items() if x.is_dir() and (not is_bucket(x) or (x / COMMITTED).exists())]
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {with_remedy(error)}") from error


def step_folder(directory: epath.Path, step: int) -> epath.Path:
    """Returns the folder of a step's checkpoint: the older one at the moment at which it is replaced by a newer one."""
    path = step_path(directory, step)
    replaced = path.with_name(path.name + REPLACED)
    is_replaced = not is_bucket(path) and not path.exists() and (replaced / RECORD_FILE).exists()
    return replaced if is_replaced else path


def list_records(directory: str | os.PathLike[str]) -> list[Record]:
    """Returns the records of the complete saves in `directory`, in order, as `list_steps` does their steps."""
    directory, records = resolve_folder(directory), []
    for step in list_step_folders(directory):
        with contextlib.suppress(CheckpointError):
            records.append(read_record(step_folder(directory, step)))
    return records


def list_steps(directory: str | os.PathLike[str]) -> list[int]:
    """Returns the steps that have a complete save in `directory`, in order; none where that does not exist.

    Folders whose record cannot be read, or is of another step, are left out. Arrays are not read.

    Example:
      >>> with zero.Checkpointer(folder) as saved:
      ...     saved.save(1, state)
      >>> zero.checkpoint.list_steps(folder)
      [1]
    """
    return [record.step for record in list_records(directory)]


def best_first(records: Sequence[Record]) -> list[Record]:
    """Returns the records that have a finite validation loss, by that; of equal losses the newer first."""
    finite = [record for record in records if record.loss is not None and math.isfinite(record.loss)]
    return sorted(finite, key=lambda record: (record.loss, -record.step))


def best_step(path: str | os.PathLike[str]) -> int:
    """Returns the step of lowest validation loss in a run's folder or its folder of checkpoints.

    Raises:
      CheckpointError: there is no checkpoint, or none has a validation loss.

    Example:
      >>> with zero.Checkpointer(folder) as saved:
      ...     saved.save(1, state, loss=2.5)
      ...     saved.save(2, state, loss=3.0)
      >>> zero.checkpoint.best_step(folder)
      1
    """
    folder = steps_folder(path)
    best = best_first(list_records(folder))
    if not best:
        steps = list_step_folders(folder)
        why = f"no checkpoint in {folder} has a validation loss: give the number of a step, or none"
        raise CheckpointError(why if steps else missing_message(folder, steps, None))
    return best[0].step


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """Returns the newest step with a complete save, or None; see `list_steps`.

    Example:
      >>> with zero.Checkpointer(folder) as saved:
      ...     saved.save(1, state)
      >>> zero.checkpoint.latest_step(folder)
      1
    """
    steps = list_steps(directory)
    return steps[-1] if steps else None


def steps_folder(path: str | os.PathLike[str]) -> epath.Path:
    """Returns the folder `checkpoints` in a run's folder; any other folder as it is."""
    inner = resolve_folder(path) / "checkpoints"
    return inner if inner.is_dir() else resolve_folder(path)


def find_checkpoint(
    path: str | os.PathLike[str], step: int | None = None, *, accept: Callable[[Record], object] = lambda _: None
) -> tuple[Record, list[str]]:
    """Finds a checkpoint from a run's folder, its folder of checkpoints or the step's folder itself.

    Args:
      path: the path of one of these folders.
      step: the step; None takes the newest whose record is valid and of its folder's step.
      accept: called with the record; raises a `CheckpointError` for a checkpoint that cannot be read, which is then
        passed over, unless it is asked for.

    Returns:
      Its record, and why newer ones were passed over.

    Raises:
      CheckpointError: there is none.
      ValueError: `step` is not the number of a step.

    Example:
      >>> with zero.Checkpointer(folder) as saved:
      ...     saved.save(1, state)
      >>> record, passed_over = zero.checkpoint.find_checkpoint(folder)
      >>> record.step, passed_over
      (1, [])
    """
    check_arguments(step=step)
    folder = resolve_folder(path)

    def accepted(folder: epath.Path) -> Record:
        accept(record := read_record(folder))
        return record

    if step is None and (folder / RECORD_FILE).exists():
        return accepted(folder), []
    # A run may have the name of a step: its folder has steps in it.
    if (name := STEP.fullmatch(folder.name)) and folder.is_dir() and not list_step_folders(folder):
        if step not in (None, int(name[1])):
            raise CheckpointError(f"{folder} is not the checkpoint of step {step}: give the folder above it")
        return accepted(folder), []
    folder = steps_folder(folder)
    steps = list_step_folders(folder)
    if not steps or step not in (None, *steps):
        raise CheckpointError(missing_message(folder, steps, step))
    if step is not None:
        return accepted(step_folder(folder, step)), []
    problems: dict[int, str] = {}
    while untried := [number for number in steps if number not in problems]:
        try:
            return accepted(step_folder(folder, untried[-1])), [*problems.values()]
        except CheckpointRemoved:
            steps = list_step_folders(folder)  # a run has deleted it, or saved it again
        except CheckpointError as error:
            problems[untried[-1]] = str(error)
    raise CheckpointError(all_damaged_message(folder, [*problems.values()]))


def find_restorable(path: str | os.PathLike[str], step: int | None = None) -> tuple[str, int | None]:
    """Returns the folder and the step that `restore` takes for a path of any kind, as process 0 finds them.

    The step is None, for the newest that is undamaged, unless it is given or `path` is the folder of one.

    Raises:
      ValueError: as `find_checkpoint`; the folder of a step that was copied or renamed, which `restore` does not read.

    Example:
      >>> with zero.Checkpointer(folder) as saved:
      ...     saved.save(1, state)
      >>> zero.checkpoint.find_restorable(folder / "step_00000001")[1]
      1
    """

    def find() -> str:
        record, _ = find_checkpoint(path, step)
        is_step, expected = record.path == resolve_folder(path), step_path(record.path.parent, record.step)
        if is_step and record.path != expected:
            raise ValueError(f"{path} is the checkpoint of step {record.step}: name it {expected.name}")
        return json.dumps([str(record.path.parent), record.step if is_step else step])

    directory, number = json.loads(from_first_process(find))
    return directory, number


def check_outside(folder: str | os.PathLike[str]) -> None:
    """Raises `ValueError` for a folder to write into that is a checkpoint, or below one by any links.

    Example:
      >>> zero.checkpoint.check_outside(folder)  # raises ValueError within a checkpoint
    """
    place = pathlib.Path(os.path.realpath(user_path(folder)))  # `resolve` raises where links lead in a circle
    for parent in (place, *place.parents):
        if os.path.exists(parent / RECORD_FILE):
            raise ValueError(f"{parent} is a checkpoint, in which nothing else is written: choose a folder outside it")


def all_damaged_message(folder: epath.Path, problems: Sequence[str]) -> str:
    """Returns the error message for a folder of which all checkpoints are damaged."""
    remedy = "Restore what is damaged from a copy of it, or begin a run of another name; nothing was removed"
    return "\n".join([f"no undamaged checkpoint in {folder}:", *(f"- {line}" for line in problems), remedy])


def missing_message(folder: epath.Path, steps: Sequence[int], step: int | None) -> str:
    """Returns the error message for a missing checkpoint, with the contents of the folder."""
    if steps:
        return f"no checkpoint of step {step} in {folder}: give one of {', '.join(map(str, steps))}"
    if not folder.is_dir():
        return f"there is no folder {folder}: give a run's folder"
    if (name := STEP.fullmatch(folder.name)) and (folder / RECORD_FILE).exists():
        return f"{folder} is the checkpoint of step {int(name[1])} itself: give the folder above it, and the step"
    if (folder / "config.json").exists() and any(x.suffix == ".safetensors" for x in folder.iterdir()):
        return f"no checkpoint: {folder} is a model of the Hugging Face hub: give it to --from-hf, or to zero.load_hf"
    names = first_names(folder)
    return f"no checkpoint in {folder} ({f'it holds {names}' if names else 'it is empty'}): give a run's folder"
