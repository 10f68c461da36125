"""A watchdog for hangs: prints the stack of each thread and the state of each process, and ends the process."""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import pathlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from zero_jax.core.field_checks import check_value
from zero_jax.core.files.json_lines import write_text
from zero_jax.core.files.system_errors import with_remedy
from zero_jax.core.files.untrusted import number, parse_json, read_file, text

EXIT_CODE = 76
_MAX_HEARTBEAT_BYTES = 2**16

# Phases that may take longer than others: how many times the usual allowance.
ALLOWANCES: Mapping[str, float] = {"start": 10, "compile": 10, "save": 3, "restore": 10}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """The last known state of a process, by its heartbeat file."""

    process_index: int  # number of the process
    phase: str | None  # phase of its last beat, or None where it has no heartbeat file
    step: int | None = None  # step of that beat, or None
    age_seconds: float = 0  # time since that beat
    silent_seconds: float = 0  # time since its watchdog wrote the file
    is_silent: bool = False  # whether that is too long: the process has ended, or is stopped

    def __str__(self) -> str:
        if self.phase is None:
            return f"process {self.process_index}: no heartbeat file"
        silent = f", no sign of life for {self.silent_seconds:.0f} s" if self.is_silent else ""
        return f"process {self.process_index}: {self.phase}{_at(self.step)}, for {self.age_seconds:.0f} s{silent}"


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"


@dataclasses.dataclass(eq=False)
class _Beat:
    phase: str
    step: int | None
    clock_seconds: float
    pardoned_seconds: float = 0.0  # that do not count


class Watchdog:
    """Detects that a training loop makes no progress, from a thread of its own.

    The loop calls `beat` at each phase. If no beat comes for as long as the phase may take, the watchdog writes the
    stacks of all threads and the last known state of each process to stderr and to `hang-<k>.txt`. If none comes for
    `seconds` more, it ends the process with exit code 76, so that a supervisor can restart it. A second thread writes
    the last beat to `process-<k>.json`, the heartbeat file that the other processes read: while another compiles, as
    long as that may take, the time of a process that waits for it does not count.

    Time in which the process did not run at all (stopped by a signal, a machine asleep) does not count: the watchdog's
    thread did not run either. A thread that holds Python's global lock in foreign code stops the watchdog too.
    """

    def __init__(self, seconds: float, folder: str | pathlib.Path, *, process_index: int = 0, num_processes: int = 1):
        """Makes a watchdog, which starts to watch when it is entered as a context.

        Args:
          seconds: time that a phase may take without a beat; 0 switches the watchdog off.
          folder: folder of the heartbeat files, which is made if it does not exist.
          process_index: this process.
          num_processes: processes of the run.
        """
        check_value("watchdog: seconds", seconds, float)
        if not seconds >= 0:
            raise ValueError(f"watchdog: seconds={seconds}: give a positive time, or 0 to switch it off")
        self._seconds, self._folder = seconds, pathlib.Path(folder)
        self._process_index, self._num_processes = process_index, num_processes
        self._interval = min(max(seconds / 10, 0.02), 10.0)
        self._stop = threading.Event()
        # Two threads: a file system that hangs must not block the thread that watches.
        calls = {"watchdog": self.check, "watchdog-heartbeat": self._write_heartbeat}
        self._threads = [
            threading.Thread(target=self._repeat, args=(call,), name=name, daemon=True) for name, call in calls.items()
        ]
        self._reported: _Beat | None = None
        self._has_failed_to_write = False
        self._error: BaseException | None = None
        self.beat("start")
        self._checked = time.monotonic()

    def __enter__(self) -> Watchdog:
        if self._seconds:
            self.beat("start")
            self._checked = time.monotonic()
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        if self._seconds:
            for thread in self._threads:
                thread.join(timeout=5)
            if self._error is not None:
                _within(5, _to_stderr, f"watchdog: one of its threads failed: {self._error!r}")
                self._error = None
            self.beat("ended")
            _within(5, self._write_heartbeat)

    def beat(self, phase: str, step: int | None = None) -> None:
        """Reports progress of the loop; costs next to nothing.

        Args:
          phase: the phase that begins, such as `step`, `data`, `save`, `evaluation` or `compile`.
          step: the step that the loop is at.

        Raises:
          RuntimeError: one of the watchdog's threads has ended, for the reason that is the error's cause.
        """
        if self._error is not None:
            raise RuntimeError("the watchdog does not watch any more: one of its threads failed") from self._error
        at = None if step is None else operator.index(step)  # an int, which JSON has a form for
        self._beat = _Beat(str(phase), at, time.monotonic())

    def check(self) -> None:
        """Checks once how long ago the last beat was; the thread does so regularly."""
        beat, now = self._beat, time.monotonic()
        late = now - self._checked - self._interval
        if late > self._interval:  # this thread did not run, so the others did not either
            beat.pardoned_seconds += min(late, now - beat.clock_seconds)
        self._judge(beat, now - beat.clock_seconds - beat.pardoned_seconds)
        self._checked = time.monotonic()  # a file system that hangs makes this take long, but others run meanwhile

    def _judge(self, beat: _Beat, age: float) -> None:
        """Reports a hang and ends the process, if the last beat is too old."""
        allowed = self._seconds * ALLOWANCES.get(beat.phase, 1)
        if self._reported not in (None, beat):
            self._reported = None
            _within(5, _to_stderr, f"watchdog: process {self._process_index} goes on, with {beat.phase!r}")
        if age > allowed and self._waits_for_another(beat.phase):
            beat.pardoned_seconds += age - allowed
            return
        if age > allowed and self._reported is None:
            self._reported = beat
            self._report(beat, age, allowed)
        if age > allowed + self._seconds:
            message = f"watchdog: process {self._process_index} hung for {age:.0f} s, ended with exit code {EXIT_CODE}"
            _within(5, _to_stderr, message)
            _within(2, sys.stdout.flush)
            os._exit(EXIT_CODE)

    def _waits_for_another(self, phase: str) -> bool:
        """Returns whether another process is in a phase that may take longer than this one's, and still may."""
        alive = [(ALLOWANCES.get(place.phase or "", 1), place) for place in self._places() if not place.is_silent]
        return any(x > ALLOWANCES.get(phase, 1) and place.age_seconds <= self._seconds * x for x, place in alive)

    def _places(self) -> list[ProcessPlace]:
        """Returns the last known states of the processes, or none where the file system hangs."""
        states: list[ProcessPlace] = []
        _within(5, lambda: states.extend(process_place(self._folder, k) for k in range(self._num_processes)))
        return states

    def _repeat(self, call: Callable[[], None]) -> None:
        """Makes a call again and again, in a thread of its own; the next beat raises its error."""
        try:
            call()
            while not self._stop.wait(self._interval):
                call()
        except Exception as error:
            self._error = error

    def _report(self, beat: _Beat, age: float, allowed: float) -> None:
        stacks, states = _stacks(), self._places()
        text = (
            f"watchdog: process {self._process_index} hangs: no progress for {age:.0f} s in phase {beat.phase!r}"
            f"{_at(beat.step)}, which may take {allowed:.0f} s; it is ended with exit code {EXIT_CODE} if nothing "
            f"happens for {self._seconds:.0f} s more\n" + "".join(f"  {state}\n" for state in states) + stacks
        )

        def write() -> None:
            with open(self._folder / f"hang-{self._process_index}.txt", "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

        _within(5, write)
        _within(5, _to_stderr, text)

    def _write_heartbeat(self) -> None:
        beat = self._beat
        now = time.time()  # one reading for both: a clock that is set in between would make a beat of any age
        beat_time = now - (time.monotonic() - beat.clock_seconds)
        heartbeat = {"phase": beat.phase, "step": beat.step, "beat_time": beat_time, "alive_time": now}
        heartbeat |= {"every_seconds": self._interval, "pid": os.getpid()}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Not to the disk, which may be busy with a checkpoint for longer than the others wait for the next beat.
            path = self._folder / f"process-{self._process_index}.json"
            write_text(path, json.dumps(heartbeat), outlasts=False)
        except OSError as error:
            if not self._has_failed_to_write:
                self._has_failed_to_write = True
                why = with_remedy(error)
                message = f"watchdog: cannot write heartbeats to {self._folder}: {why}. It watches all the same"
                _within(5, _to_stderr, message)


def process_place(folder: pathlib.Path, process_index: int) -> ProcessPlace:
    """Returns the last known state of a process, by its heartbeat file."""
    try:
        file = epath.Path(folder / f"process-{process_index}.json")
        heartbeat = parse_json(read_file(file, limit_bytes=_MAX_HEARTBEAT_BYTES))
        now = time.time()
        silent = max(0.0, now - number(heartbeat["alive_time"]))
        return ProcessPlace(
            process_index=process_index,
            phase=text(heartbeat["phase"]),
            step=heartbeat["step"],
            age_seconds=max(0.0, now - number(heartbeat["beat_time"])),
            silent_seconds=silent,
            is_silent=heartbeat["phase"] != "ended" and silent > 1 + 3 * number(heartbeat["every_seconds"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return ProcessPlace(process_index=process_index, phase=None)


def _stacks() -> str:
    """Returns the stack of each thread but the watchdog's, the main thread's first, innermost calls last."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    frames, main = sys._current_frames(), threading.main_thread().ident
    lines = []
    for ident in sorted(frames, key=lambda ident: ident != main):
        name = threads[ident].name if ident in threads else str(ident)
        if not name.startswith("watchdog") and ident != threading.get_ident():
            lines += [f"thread {name}, innermost call last:\n", *traceback.format_stack(frames[ident])]
    return "".join(lines).rstrip("\n")


def _within(seconds: float, call: Callable[..., Any], *arguments: Any) -> None:
    """Makes a call that may block (a pipe without a reader) or fail, and waits at most `seconds`."""

    def run() -> None:
        try:
            call(*arguments)
        except Exception:
            traceback.print_exc()

    thread = threading.Thread(target=run, name="watchdog-call", daemon=True)
    thread.start()
    thread.join(seconds)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
