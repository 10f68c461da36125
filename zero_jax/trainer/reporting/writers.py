"""Writes the records of a run to a JSON Lines file, TensorBoard and Weights & Biases; used in process 0 alone."""

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
from zero_jax.core.files.json_lines import JsonLinesWriter, Record, WrittenLater, read_records
from zero_jax.core.files.system_errors import with_remedy

_FLUSH_SECONDS = 10.0  # of the events for TensorBoard


@hinted
@dataclasses.dataclass(frozen=True, kw_only=True)
class WriterConfig:
    """The writers of a run besides its `metrics.jsonl`.

    Attributes:
      tensorboard: write the records for TensorBoard too, into the run's folder.
      wandb: project of Weights & Biases that the records are sent to; None sends nothing.
    """

    tensorboard: bool = False
    wandb: str | None = None

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
        """Starts a file of events in a folder; a resumed run adds a file.

        TensorBoard hides the events of earlier files after `resume_step`. If records are `repeated`, it hides those of
        that step too, and the records are written instead.
        """
        with extra("train"):
            from tensorboardX.event_file_writer import EventsWriter

        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        self._flushed = time.monotonic()
        # Not `SummaryWriter`: its thread dies of a full disk, and blocks the run ten records later. File names have a
        # resolution of a second, within which a resumed run must not overwrite its file.
        suffix = f".{os.getpid()}.{secrets.token_hex(3)}"
        self._protos: Any = importlib.import_module("tensorboardX.proto.event_pb2")
        self._events = EventsWriter(os.path.join(folder, "events"), filename_suffix=suffix)
        if resume_step is not None:
            log = self._protos.SessionLog
            start, step = log(status=log.START), resume_step + (repeated is None)
            self._events.write_event(self._protos.Event(wall_time=time.time(), step=step, session_log=start))
        for record in repeated or ():
            self.write(record)
        self._events.flush()

    def write(self, record: Record) -> None:
        """Writes one record."""
        event = self._protos.Event(wall_time=time.time(), step=record["step"])
        for name, value in _scalars(record).items():
            event.summary.value.add(tag=name, simple_value=value)
        self._events.write_event(event)
        if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self._events.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Writes what is left and closes the file."""
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
        wandb: Any = importlib.import_module("wandb")
        id_file = pathlib.Path(folder) / "wandb-id"
        run_id = secrets.token_hex(8)
        if is_resumed and id_file.exists():
            run_id = id_file.read_text(encoding="utf-8").strip()
        id_file.write_text(run_id + "\n", encoding="utf-8")
        settings = {"project": project, "id": run_id, "resume": "allow", "name": name, "dir": str(folder)}
        self._run = wandb.init(**settings, config=dict(config or {}))
        # W&B's own step only ever grows, and would drop the steps that a resumed run repeats.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        """Sends one record."""
        self._run.log({**_scalars(record), "step": record["step"]})

    def close(self) -> None:
        """Sends what is left, and finishes the run."""
        self._run.finish()


def _scalars(record: Record) -> dict[str, float]:
    """Returns the numbers of a record by `kind/name`."""
    kind = record.get("kind", "run")
    numbers = {name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"}
    return {f"{kind}/{name}": float(value) for name, value in numbers.items()}


def _records_at(path: pathlib.Path, step: int | None) -> list[Record] | None:
    """Returns the records of a step from a file that has no validation of that step; None if it cannot be read."""
    with contextlib.suppress(OSError):
        return [record for record in read_records(path) if record["step"] == step]
    return None


Writer = JsonLinesWriter | TensorBoardWriter | WandbWriter


class Writers:
    """Writes to several writers; one that fails is dropped or retried, with a line in the log."""

    def __init__(self, factories: Mapping[str, Callable[[], Writer]], *, log: Callable[[str], None] = print):
        """Opens the writers by functions, with names for the log."""
        self._log = log
        self._writers: dict[str, Writer] = {}
        self._late: set[str] = set()
        for name, open_writer in factories.items():
            if (writer := self._guarded(name, open_writer)) is not None:
                self._writers[name] = writer

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def names(self) -> tuple[str, ...]:
        """The writers that still write."""
        return tuple(self._writers)

    @property
    def num_damaged(self) -> int:
        """Damaged lines of an older file that a JSON Lines writer goes on with."""
        return sum(writer.num_damaged for writer in self._writers.values() if isinstance(writer, JsonLinesWriter))

    def write(self, record: Record) -> None:
        """Writes one record everywhere."""
        for name, writer in list(self._writers.items()):
            self._guarded(name, writer.write, record)

    def close(self) -> None:
        """Closes the writers."""
        while self._writers:
            name, writer = self._writers.popitem()
            self._guarded(name, writer.close)

    def _guarded(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        # Any exception: libraries have their own kinds of network errors, and none should end a run.
        try:
            done = call(*arguments)
            if name in self._late:
                self._late.remove(name)
                self._log(f"{name}: writing works again, and what waited is written")
            return done
        except WrittenLater as error:
            if name not in self._late:
                self._late.add(name)
                self._log(f"{name}: writing failed, it is tried again with each record: {with_remedy(error)}")
        except Exception as error:
            self._log(
                f"{name}: writing failed, nothing more is written there: {type(error).__name__}: {with_remedy(error)}"
            )
            with contextlib.suppress(Exception):  # the first error is in the log
                self._writers.pop(name).close()
        return None


def open_writers(
    config: WriterConfig,
    directory: str | pathlib.Path,
    *,
    name: str,
    run_config: Mapping[str, Any] | None = None,
    resume_step: int | None = None,
    is_evaluated: bool = True,
    log: Callable[[str], None] = print,
) -> Writers:
    """Opens the writers of a run: `metrics.jsonl` in its folder `directory`, and those of the config.

    Weights & Biases shows `name` and `run_config`. A resumed run continues after `resume_step`, with the validation of
    that step unless it `is_evaluated`; None is a new run.
    """
    folder, is_resumed = pathlib.Path(directory), resume_step is not None
    records, project = folder / "metrics.jsonl", config.wandb
    factories: dict[str, Callable[[], Writer]] = {
        "metrics.jsonl": lambda: JsonLinesWriter(records, resume_step=resume_step, is_evaluated=is_evaluated)
    }
    if config.tensorboard:
        factories["TensorBoard"] = lambda: TensorBoardWriter(
            folder / "tensorboard",
            resume_step=resume_step,
            repeated=None if is_evaluated else _records_at(records, resume_step),  # once that file is cut
        )
    if project is not None:
        factories["Weights & Biases"] = lambda: WandbWriter(
            project, folder=folder, name=name, config=run_config, is_resumed=is_resumed
        )
    writers = Writers(factories, log=log)
    if num_damaged := writers.num_damaged:
        log(f"metrics.jsonl: {num_damaged} damaged lines, which are no records, are in metrics.jsonl.damaged now")
    return writers
