"""The trackers of a run: a JSON Lines file, TensorBoard, Weights & Biases and the user's own; in process 0 alone."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import os
import pathlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zero_jax.core.extras import extra, pip_install
from zero_jax.core.field_checks import check_fields, hinted
from zero_jax.core.files.json_lines import JsonLinesWriter, Record, read_records, write_text
from zero_jax.core.files.untrusted import read_text
from zero_jax.trainer.reporting.curves import RECORDS
from zero_jax.trainer.reporting.trackers import OpenTracker, TrackedRun, Tracker, Trackers

_MAX_ID_BYTES = 1000


@hinted
@dataclasses.dataclass(frozen=True, kw_only=True)
class WriterConfig:
    """The writers of a run besides its `metrics.jsonl`.

    Attributes:
      tensorboard: write the records for TensorBoard too, into the run's folder.
      wandb: project of Weights & Biases that the records are sent to; None sends nothing.
      tracker: a tracker of your own, as module:function or path/to/file.py:function; a function (or class) of a
        `TrackedRun` that returns an object with `write(record)` and `close()`.
    """

    tensorboard: bool = False
    wandb: str | None = None
    tracker: str | None = None

    def __post_init__(self):
        """Raises `ValueError` for an empty project, and for writers that are not installed."""
        check_fields(self)
        if self.wandb is not None and not self.wandb.strip():
            raise ValueError(f"wandb={self.wandb!r}: give the name of a project, or leave it out")
        if self.tensorboard and importlib.util.find_spec("tensorboardX") is None:
            raise ValueError(f"tensorboard=True needs tensorboardX: {pip_install('zero-jax[train]')}, or leave it out")
        if self.wandb is not None and importlib.util.find_spec("wandb") is None:
            raise ValueError(f"wandb={self.wandb!r} needs wandb: {pip_install('zero-jax[wandb]')}, or leave it out")


class TensorBoardWriter:
    """Writes each metric as a scalar `kind/name`, such as `train/loss`."""

    def __init__(
        self, folder: str | pathlib.Path, *, resume_step: int | None = None, repeated: Sequence[Record] | None = None
    ):
        """Starts a file of events, which hides those after `resume_step`, and of it if records are `repeated`."""
        with extra("train"):
            from tensorboardX.event_file_writer import EventsWriter

        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        self._protos: Any = importlib.import_module("tensorboardX.proto.event_pb2")
        # Not `SummaryWriter`: its thread dies of a full disk, and blocks the run ten records later. File names have a
        # resolution of a second, within which a resumed run must not overwrite its file.
        self._open = lambda: EventsWriter(
            os.path.join(folder, "events"), filename_suffix=f".{os.getpid()}.{secrets.token_hex(3)}"
        )
        self._events: Any = self._open()
        if resume_step is not None:
            log = self._protos.SessionLog
            # TensorBoard hides what files before have of this step and of later ones.
            start, step = log(status=log.START), resume_step + (repeated is None)
            self._events.write_event(self._protos.Event(wall_time=time.time(), step=step, session_log=start))
        self._events.flush()  # a file without the start of the session would not hide what came before
        for record in repeated or ():
            self.write(record)

    def write(self, record: Record) -> None:
        """Writes one record; after an error to a new file of events."""
        self._events = self._events or self._open()
        event = self._protos.Event(wall_time=time.time(), step=record["step"])
        for name, value in _scalars(record).items():
            event.summary.value.add(tag=name, simple_value=value)
        try:
            self._events.write_event(event)
            self._events.flush()
        except Exception:
            broken, self._events = self._events, None  # it may end with half an event, after which none is read
            with contextlib.suppress(Exception):
                broken.close()
            raise

    def close(self) -> None:
        """Writes what is left and closes the file."""
        if self._events is not None:
            self._events.close()


class WandbWriter:
    """Sends each metric to Weights & Biases as `kind/name`, against the step."""

    def __init__(
        self,
        project: str,
        *,
        folder: str | pathlib.Path,
        name: str,
        config: Mapping[str, Any] | None = None,
        is_resumed: bool = False,
    ):
        """Starts a run with an id that is kept in `folder/wandb-id`, or resumes the run of that id."""
        id_file = pathlib.Path(folder) / "wandb-id"
        run_id = secrets.token_hex(8)
        if is_resumed and id_file.exists():
            remedy = "remove it, and the run is sent as another one"
            run_id = read_text(id_file, "the run's id", remedy=remedy, limit_bytes=_MAX_ID_BYTES).strip()
        write_text(id_file, run_id + "\n")
        self._settings: dict[str, Any] = {"project": project, "id": run_id, "resume": "allow", "name": name}
        self._settings |= {"dir": str(folder), "config": dict(config or {})}
        self._run = self._start()

    def _start(self) -> Any:
        wandb: Any = importlib.import_module("wandb")
        run = wandb.init(**self._settings)
        # W&B's own step only ever grows, and would drop the steps that a resumed run repeats.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def write(self, record: Record) -> None:
        """Sends one record; after an error it goes on with the run of the same id first."""
        if self._run is None:
            self._run = self._start()
        try:
            self._run.log({**_scalars(record), "step": record["step"]})
        except Exception:
            broken, self._run = self._run, None
            with contextlib.suppress(Exception):  # or `wandb.init` would return it again
                broken.finish()
            raise

    def close(self) -> None:
        """Sends what is left, and finishes the run."""
        if self._run is not None:
            self._run.finish()


def _scalars(record: Record) -> dict[str, float]:
    kind = record.get("kind", "run")
    numbers = {name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"}
    return {f"{kind}/{name}": float(value) for name, value in numbers.items()}


def _records_at(path: pathlib.Path, step: int | None) -> list[Record] | None:
    """Returns the records of a step from a file that has no validation of that step; None if it cannot be read."""
    with contextlib.suppress(OSError):
        return [record for record in read_records(path) if record["step"] == step]
    return None


def open_writers(
    config: WriterConfig,
    run: TrackedRun,
    *,
    own: Mapping[str, OpenTracker] | None = None,
    is_evaluated: bool = True,
    log: Callable[[str], None] = print,
) -> Trackers:
    """Opens `metrics.jsonl`, the config's trackers and the user's `own`; a resumed run goes on after `resume_step`."""
    folder, step, project = run.folder, run.resume_step, config.wandb
    records = folder / RECORDS
    functions: dict[str, Callable[[], Tracker]] = {
        RECORDS: lambda: JsonLinesWriter(records, resume_step=step, is_evaluated=is_evaluated, log=log)
    }
    if config.tensorboard:
        functions["TensorBoard"] = lambda: TensorBoardWriter(
            folder / "tensorboard",
            resume_step=step,
            repeated=None if is_evaluated else _records_at(records, step),  # once that file is cut
        )
    if project is not None:
        functions["Weights & Biases"] = lambda: WandbWriter(
            project, folder=folder, name=run.name, config=run.config, is_resumed=step is not None
        )
    for name, open_tracker in (own or {}).items():
        name = f"your {name}" if name in functions else name
        functions[name] = lambda open_tracker=open_tracker: open_tracker(run)
    return Trackers(functions, log=log)
