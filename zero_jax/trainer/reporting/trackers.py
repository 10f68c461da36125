"""Trackers: where the records of a run go, each with the records that it has not taken yet."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from zero_jax.core.files.json_lines import Record
from zero_jax.core.files.system_errors import with_remedy
from zero_jax.core.signatures import check_methods, check_takes

_MOST_WAITING = 1_000_000  # records kept for a tracker that fails; some hundred bytes each
# A failed try is repeated with the next record if it was quick (a disk that is full), and otherwise, as a server that
# does not answer may take a minute each time, after so many times its duration.
_QUICK_SECONDS, _PATIENCE = 0.1, 10
_REMEDY = "give an object with write(record) and close(), or a function of a TrackedRun that returns one"


class Tracker(Protocol):
    """Takes the records of a run, in process 0 alone; an error of it ends no run.

    A record is a dict with a `kind` (`train` or `validation`), a `step`, and numbers, words or None by name, as in
    `metrics.jsonl`. A record that `write` raised for is given again, with those after it.

    Example:
      >>> class Print:
      ...     def write(self, record):
      ...         if record["kind"] == "train":
      ...             print(record["step"])
      ...     def close(self):
      ...         pass
      >>> config = zero.TrainConfig(steps=1, out=folder, name="tracked")
      >>> _ = zero.Trainer(loss_fn, init_fn, lambda step: batch, config=config, trackers=[Print()]).train(log=str)
      1
    """

    def write(self, record: Record) -> None:
        """Takes one record."""
        ...

    def close(self) -> None:
        """Sends what is left, at the end of the run."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is opened for.

    Attributes:
      name: the name of the run.
      folder: its folder, which a tracker may write to.
      config: its config, as it is in `config.json`.
      resume_step: the step that a resumed run goes on after: records of later steps are given again. None: a new run.
    """

    name: str
    folder: pathlib.Path
    config: Mapping[str, Any]
    resume_step: int | None = None


OpenTracker = Callable[[TrackedRun], Tracker]


def tracker_functions(trackers: Sequence[Tracker | OpenTracker]) -> dict[str, OpenTracker]:
    """Returns the functions that open trackers, by names for the log."""
    functions: dict[str, OpenTracker] = {}
    tracker: Any
    for i, tracker in enumerate(trackers):
        what, name = f"trackers[{i}]", getattr(tracker, "__name__", type(tracker).__name__)
        name = name if name not in functions else f"{name} {i}"
        # A class has a `write` too, and is called as a function that opens a tracker.
        if not isinstance(tracker, type) and (hasattr(tracker, "write") or not callable(tracker)):
            check_methods(what, tracker, ("write", "close"), remedy=_REMEDY)
            functions[name] = lambda _, tracker=tracker: tracker
        else:
            functions[name] = check_takes(what, tracker, ["run"], remedy=_REMEDY)
    return functions


class _Entry:
    """A tracker, once it is open, and the records that wait for it."""

    def __init__(self, open_tracker: Callable[[], Tracker]):
        self._open = open_tracker
        self.tracker: Tracker | None = None
        self.waiting: collections.deque[Record] = collections.deque(maxlen=_MOST_WAITING)
        self.is_failing, self._retry_seconds = False, 0.0

    def send(self, *, is_last: bool = False) -> None:
        """Opens the tracker, and gives it what waits; not soon after a failed try, unless it is the last one."""
        started = time.monotonic()
        if started < self._retry_seconds and not is_last:
            return
        try:
            self.tracker = self.tracker or self._open()
            while self.waiting:
                self.tracker.write(self.waiting[0])
                # After the write: a record that raised stays the first.
                self.waiting.popleft()
        except Exception:
            ended = time.monotonic()
            if ended - started > _QUICK_SECONDS:
                self._retry_seconds = ended + _PATIENCE * (ended - started)
            raise


class Trackers:
    """Writes to several trackers; one that fails gets what it has missed when it works again, with lines in the log."""

    def __init__(self, functions: Mapping[str, Callable[[], Tracker]], *, log: Callable[[str], None] = print):
        """Opens the trackers by functions, with names for the log."""
        self._log = log
        self._entries = {name: _Entry(function) for name, function in functions.items()}
        self._send()

    def write(self, record: Record) -> None:
        """Writes one record everywhere."""
        for entry in self._entries.values():
            entry.waiting.append(record)
        self._send()

    def close(self) -> None:
        """Writes what waits, and closes the trackers; logs what they have not taken."""
        entries, self._entries = self._entries, {}
        for name, entry in entries.items():
            try:
                entry.send(is_last=True)
                assert entry.tracker is not None
                entry.tracker.close()
            except Exception as error:  # others are closed all the same
                missing = f"{len(entry.waiting):,} records are not written there"
                self._log(f"{name}: {missing if entry.waiting else 'it could not be closed'}: {_shown(error)}")
                with contextlib.suppress(Exception):  # the first error is in the log
                    if entry.tracker is not None and entry.waiting:
                        entry.tracker.close()

    def _send(self) -> None:
        for name, entry in self._entries.items():
            # Any exception: libraries have their own kinds of network errors, and none should end a run.
            try:
                entry.send()
            except Exception as error:
                if not entry.is_failing:
                    entry.is_failing = True
                    self._log(f"{name}: writing failed, it is tried again with each record: {_shown(error)}")
            else:
                if entry.is_failing and not entry.waiting:
                    entry.is_failing = False
                    self._log(f"{name}: writing works again, and what waited is written")


def _shown(error: Exception) -> str:
    kind = "" if isinstance(error, OSError) and error.filename else f"{type(error).__name__}: "
    return f"{kind}{with_remedy(error)}"
