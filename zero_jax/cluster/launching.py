"""Launches several processes on one machine, each with simulated CPU devices, and ends them together.

The processes and their children share a process group with a guard process, which reads from a pipe of the launcher:
when the launcher ends in any way, `kill -9` included, the pipe closes, and the guard kills the group.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, BinaryIO, TextIO, cast

from zero_jax.cluster.detection import SLURM
from zero_jax.cluster.joining import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from zero_jax.cluster.log_merging import Merger
from zero_jax.cluster.preemption import EXIT_CODE as SAVED
from zero_jax.core.field_checks import check_fields

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
_MAX_PROCESSES, _MAX_DEVICES = 256, 4096
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How many processes to start, and with how many devices.

    Attributes:
      num_processes: processes to start on this machine.
      devices_per_process: simulated CPU devices of each process.
      grace_seconds: time that the other processes have to save and end, once one has failed, before they are killed.
    """

    num_processes: int = 2
    devices_per_process: int = 4
    grace_seconds: float = 10.0

    def __post_init__(self) -> None:
        lowest = {"num_processes": 1, "devices_per_process": 1, "grace_seconds": 0}
        check_fields(self, lowest=lowest, highest=dict.fromkeys(lowest, 9_999))
        if self.num_processes * self.devices_per_process > _MAX_DEVICES or self.num_processes > _MAX_PROCESSES:
            raise ValueError(
                f"num_processes={self.num_processes}, devices_per_process={self.devices_per_process}: one machine "
                f"stands in for at most {_MAX_PROCESSES} processes and {_MAX_DEVICES:,} devices"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How a process ended.

    Attributes:
      process_index: number of the process.
      returncode: its exit status, or the negative number of the signal that ended it.
      seconds: time from the launch to its end.
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
class LaunchResult:
    """How the processes ended, in that order; prints the first failure first."""

    num_processes: int
    endings: tuple[Ending, ...]

    @property
    def first_failure(self) -> Ending | None:
        """The process that failed first."""
        return next((ending for ending in self.endings if ending.returncode != 0), None)

    @property
    def status(self) -> int:
        """The exit status of the launch: that of the process that failed first, or 0."""
        return self.first_failure.status if self.first_failure else 0

    def __str__(self) -> str:
        first = self.first_failure
        if first is None:
            return f"all {self.num_processes} processes are done"
        lines = [f"process {first.process_index} of {self.num_processes} {first} after {first.seconds:.1f} s"]
        if first.returncode == SAVED:
            lines[0] += "; the same command with `--resume auto` goes on from there"
        elif first.last_lines:
            lines.append("the last lines of its stderr:")
            lines += [f"  {line}" for line in first.last_lines]
        others = [f"process {ending.process_index} {ending}" for ending in self.endings if ending is not first]
        return "\n".join([*lines, *(["then " + ", ".join(others)] if others else [])])


def launch(
    command: Sequence[str],
    *,
    config: LaunchConfig,
    environment: Mapping[str, str] | None = None,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> LaunchResult:
    """Runs a command as several processes that find each other by `jax.distributed` on this machine.

    Stdout of process 0 goes to `out` unchanged. All other output goes to `err`, line by line, prefixed with the number
    of the process. If a process fails, the others get SIGTERM, and SIGKILL after the grace. SIGINT, SIGTERM and SIGHUP
    are passed on; the second one kills. No process is left behind.

    Args:
      command: the program and its arguments.
      config: how many processes, and with how many devices.
      environment: the environment of the processes, to which the launcher adds; None takes `os.environ`.
      out: stream for the stdout of process 0; None takes stdout.
      err: stream for all other output; None takes stderr.

    Raises:
      ValueError: the program cannot be started.
    """
    environment = os.environ if environment is None else environment
    merger = Merger(out or sys.stdout, err or sys.stderr)
    events: queue.SimpleQueue[Ending | signal.Signals] = queue.SimpleQueue()
    with _reserved_port() as port, _guarded_group() as group, _handled_signals(events):
        processes = _Processes(config=config, events=events, merger=merger)
        for index in range(config.num_processes):
            processes.start(command, index, _environment(environment, config, index, port), group)
        endings = processes.watch()
    processes.finish_reading()
    return LaunchResult(num_processes=config.num_processes, endings=endings)


class _Processes:
    """The processes of a launch, from the start of the first to the end of the last."""

    def __init__(self, *, config: LaunchConfig, events: queue.SimpleQueue, merger: Merger):
        self._config = config
        self._events = events
        self._merger = merger
        self._started_at = time.monotonic()
        self._processes: dict[int, subprocess.Popen] = {}
        self._readers: list[threading.Thread] = []
        self._signalled_at: float | None = None

    def start(self, command: Sequence[str], index: int, environment: Mapping[str, str], group: int) -> None:
        try:
            process = subprocess.Popen(
                command, env=dict(environment), process_group=group, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            raise ValueError(f"cannot start {command[0]!r} ({error.strerror}): give the path of a program") from error
        self._processes[index] = process
        last: collections.deque[str] = collections.deque(maxlen=_NUM_LAST_LINES)
        readers = [self._reader(process.stdout, index, False, None), self._reader(process.stderr, index, True, last)]
        self._readers += readers
        threading.Thread(target=self._wait, args=(index, process, readers[1], last), daemon=True).start()

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
        was_asked = self._signalled_at is not None and now > self._signalled_at
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

    def watch(self) -> tuple[Ending, ...]:
        """Waits until all have ended, and ends them once one has failed."""
        endings: list[Ending] = []
        kill_at: float | None = None
        num_asked = 0
        while len(endings) < len(self._processes):
            try:
                event = self._events.get(timeout=None if kill_at is None else max(0.0, kill_at - time.monotonic()))
            except queue.Empty:
                self._merger.say(f"still running {self._config.grace_seconds:g} s after SIGTERM: killed")
                self._signal(signal.SIGKILL)
                kill_at = None
                continue
            if isinstance(event, Ending):
                endings.append(event)
                if event.returncode != 0 and self._signalled_at is None and len(endings) < len(self._processes):
                    self._merger.say(f"process {event.process_index} {event}: the others get SIGTERM")
                    self._signal(signal.SIGTERM)
                if event.returncode != 0 and kill_at is None:
                    kill_at = time.monotonic() + self._config.grace_seconds
            else:
                num_asked += 1
                self._merger.say(f"{event.name} is passed on; once more kills" if num_asked == 1 else "killed")
                self._signal(event if num_asked == 1 else signal.SIGKILL)
        return tuple(sorted(endings, key=lambda ending: ending.seconds))

    def _signal(self, number: signal.Signals) -> None:
        self._signalled_at = self._signalled_at or time.monotonic()
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


@contextlib.contextmanager
def _handled_signals(events: queue.SimpleQueue) -> Iterator[None]:
    """Queues SIGINT, SIGTERM and SIGHUP as events, in the main thread; other threads get no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as `nohup` has it
            signal.signal(number, lambda received, frame: events.put(signal.Signals(received)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def patient_flags(flags: str) -> str:
    """Returns `XLA_FLAGS` under which simulated devices wait for one another for an hour, unless they say how long."""
    is_file = flags.strip() and not flags.strip().startswith("-")
    return flags if is_file or _PATIENCE in flags else f"{flags} {_PATIENCE}=3600".strip()


def _environment(base: Mapping[str, str], config: LaunchConfig, index: int, port: int) -> dict[str, str]:
    """Returns the environment of a process.

    JAX reads the number of processes and their own from SLURM's variables only. With these set,
    `jax.distributed.initialize()` without arguments works like `join()`.
    """
    inherited = {name: value for name, value in base.items() if not name.startswith(("OMPI_", "SLURM_"))}
    for name in ("JAX_LOCAL_DEVICE_IDS", "JAX_PARTITION_INDEX", "JAX_COORDINATOR_PORT"):
        inherited.pop(name, None)
    flags = [flag for flag in inherited.get("XLA_FLAGS", "").split() if "force_host_platform_device_count" not in flag]
    address = f"127.0.0.1:{port}"
    slurm = dict(zip(SLURM, ("0", "127.0.0.1", str(config.num_processes), str(index), str(index)), strict=True))
    return {
        **inherited,
        **slurm,
        COORDINATOR: address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # not to be reached from other machines
        NUM_PROCESSES: str(config.num_processes),
        PROCESS_ID: str(index),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(config.devices_per_process),
        "XLA_FLAGS": patient_flags(" ".join(flags)),
        "PYTHONUNBUFFERED": "1",
    }
