"""Runs the processes of a launch between two restarts: starts, watches and ends them together.

The processes and their children share a process group with a guard process, which reads from a pipe of the launcher:
when the launcher ends in any way, `kill -9` included, the pipe closes, and the guard kills the group.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, BinaryIO, cast

from zero_jax.cluster.detection import SLURM
from zero_jax.cluster.joining import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from zero_jax.cluster.log_merging import Merger
from zero_jax.cluster.preemption import EXIT_CODE as SAVED

_GUARD = """
import os, signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
while os.read(0, 1):
    pass
os.killpg(0, signal.SIGKILL)
"""
_NUM_LAST_LINES = 12
# XLA ends a process whose simulated devices reach a collective more than 40 s apart, as they do when a few cores take
# turns at large steps. An hour still ends one that hangs.
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How a process ended.

    Attributes:
      process_index: number of the process.
      returncode: its exit status, or the negative number of the signal that ended it.
      seconds: time from the start of the processes to its end.
      was_asked: whether it had been signalled to end.
      last_lines: the last lines of its stderr.
    """

    process_index: int
    returncode: int
    seconds: float
    was_asked: bool
    last_lines: tuple[str, ...]

    @property
    def status(self) -> int:
        """The status as a shell gives it: 128 and the signal's number where a signal ended the process."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    def __str__(self) -> str:
        if self.returncode == SAVED:
            return "saved and stopped (status 75)"
        if self.returncode >= 0:
            return f"ended with status {self.returncode}"
        hint = ": out of memory?" if self.returncode == -signal.SIGKILL and not self.was_asked else ""
        return f"was ended by {signal.Signals(-self.returncode).name}{hint}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """How the processes of a launch ended that were started together.

    Attributes:
      num_processes: number of processes.
      endings: how they ended, in that order.
      seconds: time from their start to the end of the last.
      is_stopped: whether they were ended by a signal to the launcher.
      is_interrupted: whether the launcher asked them to save and end, to start others.
    """

    num_processes: int
    endings: tuple[Ending, ...]
    seconds: float = 0.0
    is_stopped: bool = False
    is_interrupted: bool = False

    @property
    def first_failure(self) -> Ending | None:
        """The process that failed first."""
        return next((ending for ending in self.endings if ending.returncode != 0), None)

    @property
    def num_lost(self) -> int:
        """The number of processes that were killed by another than the launcher; at least 1, the one that failed."""
        return max(1, sum(x.returncode == -signal.SIGKILL and not x.was_asked for x in self.endings))


def run_round(
    command: Sequence[str],
    *,
    num_processes: int,
    devices_per_process: int,
    environment: Mapping[str, str],
    grace_seconds: float,
    seconds: float | None,
    save_seconds: float,
    has_started: Callable[[], bool],
    is_restart: bool,
    events: queue.SimpleQueue,
    merger: Merger,
) -> Round:
    """Runs a command as several processes until all have ended; one that fails ends the others.

    Args:
      command: the program and its arguments.
      num_processes: processes to start.
      devices_per_process: simulated CPU devices of each.
      environment: their environment, to which the variables of `join` are added.
      grace_seconds: time to save and end, once one has failed, before all are killed.
      seconds: time after which they are asked to save and end, if `has_started` is true; None lets them run.
      save_seconds: time to save and end, once they are asked to, before all are killed.
      has_started: whether they are beyond their start.
      is_restart: whether the program was started before: a process that cannot be started has failed then.
      events: signals to the launcher; ends of processes are added.
      merger: takes their output.

    Raises:
      ValueError: the program cannot be started.
    """
    started_at = time.monotonic()
    with _reserved_port() as port, _guarded_group() as group:
        processes = _Processes(grace_seconds=grace_seconds, save_seconds=save_seconds, events=events, merger=merger)
        for index in range(num_processes):
            variables = _environment(
                environment, index=index, count=num_processes, num_devices=devices_per_process, port=port
            )
            try:
                processes.start(command, index, variables, group)
            except ValueError as error:
                if not is_restart:
                    raise
                processes.add_not_started(index, str(error))
                break
        endings = processes.watch(None if seconds is None else started_at + seconds, has_started)
    processes.finish_reading()
    return Round(
        num_processes=num_processes,
        endings=endings,
        seconds=time.monotonic() - started_at,
        is_stopped=processes.is_stopped,
        is_interrupted=processes.is_interrupted,
    )


class _Processes:
    """Processes from the start of the first to the end of the last."""

    def __init__(self, *, grace_seconds: float, save_seconds: float, events: queue.SimpleQueue, merger: Merger):
        self._grace_seconds, self._save_seconds = grace_seconds, save_seconds
        self._events: queue.SimpleQueue[Ending | signal.Signals] = events
        self._merger = merger
        self._started_at = time.monotonic()
        self._processes: dict[int, subprocess.Popen] = {}
        self._num_expected = 0
        self._readers: list[threading.Thread] = []
        self._signalled_at: float | None = None
        self._killed_at: float | None = None
        self.is_stopped = self.is_interrupted = False

    def start(self, command: Sequence[str], index: int, environment: Mapping[str, str], group: int) -> None:
        try:
            process = subprocess.Popen(
                command, env=dict(environment), process_group=group, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            raise ValueError(f"cannot start {command[0]!r} ({error.strerror}): give the path of a program") from error
        self._processes[index] = process
        self._num_expected += 1
        last: collections.deque[str] = collections.deque(maxlen=_NUM_LAST_LINES)
        readers = [self._reader(process.stdout, index, False, None), self._reader(process.stderr, index, True, last)]
        self._readers += readers
        threading.Thread(target=self._wait, args=(index, process, readers[1], last), daemon=True).start()

    def add_not_started(self, index: int, why: str) -> None:
        """Counts a process that could not be started as failed."""
        self._num_expected += 1
        self._events.put(Ending(process_index=index, returncode=1, seconds=0.0, was_asked=False, last_lines=(why,)))

    def _reader(self, stream: IO[bytes] | None, *about: object) -> threading.Thread:
        assert stream is not None
        # Only "\n" ends a line: a progress bar is one line, drawn over and over.
        text = io.TextIOWrapper(cast(BinaryIO, stream), encoding="utf-8", errors="replace", newline="\n")
        reader = threading.Thread(target=self._merger.read, args=(text, *about), daemon=True)
        reader.start()
        return reader

    def _wait(self, index: int, process: subprocess.Popen, reader: threading.Thread, last: Sequence[str]) -> None:
        """Waits for the end of a process and queues it with its time, so that the first failure is known."""
        returncode = process.wait()
        now = time.monotonic()
        signalled_at = self._killed_at if returncode == -signal.SIGKILL else self._signalled_at
        was_asked = signalled_at is not None and now > signalled_at
        reader.join(timeout=1)  # its last lines; a child of it may keep the pipe open
        self._events.put(
            Ending(
                process_index=index,
                returncode=returncode,
                seconds=now - self._started_at,
                was_asked=was_asked,
                last_lines=tuple(last),
            )
        )

    def watch(self, interrupt_at: float | None, has_started: Callable[[], bool]) -> tuple[Ending, ...]:
        """Waits until all have ended, and ends them once one has failed; at `interrupt_at` they are asked to end."""
        endings: list[Ending] = []
        kill_at: float | None = None
        has_failed = False
        while len(endings) < self._num_expected:
            due = kill_at if interrupt_at is None else min(interrupt_at, kill_at or interrupt_at)
            try:
                event = self._events.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
            except queue.Empty:
                if kill_at is not None and due == kill_at:
                    seconds = time.monotonic() - (self._signalled_at or kill_at)
                    self._merger.say(f"still running {seconds:.1f} s after SIGTERM: killed")
                    self._signal(signal.SIGKILL)
                    kill_at, interrupt_at, has_failed = None, None, True
                elif has_started():
                    self.is_interrupted = True
                    self._signal(signal.SIGTERM)
                    kill_at, interrupt_at = time.monotonic() + self._save_seconds, None
                else:
                    interrupt_at = time.monotonic() + 1
                continue
            if isinstance(event, Ending):
                endings.append(event)
                if event.returncode != 0 and self._signalled_at is None and len(endings) < self._num_expected:
                    self._merger.say(f"process {event.process_index} {event}: the others get SIGTERM")
                    self._signal(signal.SIGTERM)
                if event.returncode != 0 and not has_failed:
                    has_failed, interrupt_at = True, None
                    kill_at = min(kill_at or math.inf, time.monotonic() + self._grace_seconds)
            else:
                again, self.is_stopped = self.is_stopped, True
                self._merger.say("killed" if again else f"{event.name} is passed on; once more kills")
                self._signal(signal.SIGKILL if again else event)
                interrupt_at = None
        return tuple(sorted(endings, key=lambda ending: ending.seconds))

    def _signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        self._signalled_at = self._signalled_at or now
        if number == signal.SIGKILL:
            self._killed_at = self._killed_at or now
        for process in self._processes.values():
            process.send_signal(number)

    def finish_reading(self) -> None:
        """Waits for the last lines."""
        for reader in self._readers:
            reader.join(timeout=5)


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """Reserves a free port, at which process 0 can still listen, as gRPC reuses ports."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextlib.contextmanager
def _guarded_group() -> Iterator[int]:
    """Yields a process group that is killed on leaving the context, and when this process dies."""
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD], process_group=0, stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield guard.pid
    finally:
        with contextlib.suppress(OSError):
            os.killpg(guard.pid, signal.SIGKILL)
        if guard.stdin:
            guard.stdin.close()
        guard.wait()


def patient_flags(flags: str) -> str:
    """Returns `XLA_FLAGS` with a timeout of an hour for collectives of simulated devices, unless they have one."""
    is_file = flags.strip() and not flags.strip().startswith("-")
    return flags if is_file or _PATIENCE in flags else f"{flags} {_PATIENCE}=3600".strip()


def _environment(base: Mapping[str, str], *, index: int, count: int, num_devices: int, port: int) -> dict[str, str]:
    """Returns the environment of a process.

    JAX reads the number of processes and their own from SLURM's variables only. With these set,
    `jax.distributed.initialize()` without arguments works like `join()`.
    """
    inherited = {name: value for name, value in base.items() if not name.startswith(("OMPI_", "SLURM_"))}
    for name in ("JAX_LOCAL_DEVICE_IDS", "JAX_PARTITION_INDEX", "JAX_COORDINATOR_PORT"):
        inherited.pop(name, None)
    flags = [flag for flag in inherited.get("XLA_FLAGS", "").split() if "force_host_platform_device_count" not in flag]
    address = f"127.0.0.1:{port}"
    slurm = dict(zip(SLURM, ("0", "127.0.0.1", str(count), str(index), str(index)), strict=True))
    return {
        **inherited,
        **slurm,
        COORDINATOR: address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # not to be reached from other machines
        NUM_PROCESSES: str(count),
        PROCESS_ID: str(index),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "XLA_FLAGS": patient_flags(" ".join(flags)),
        "PYTHONUNBUFFERED": "1",
    }
