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
from typing import IO, Any, BinaryIO, cast

from zero_jax.cluster.detection import SLURM
from zero_jax.cluster.joining import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from zero_jax.cluster.log_merging import Merger
from zero_jax.cluster.preemption import EXIT_CODE as SAVED
from zero_jax.core.device_put import simulated_threads
from zero_jax.core.field_checks import check_fields, hinted

_GUARD = """
import os, signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
while os.read(0, 1):
    pass
os.killpg(0, signal.SIGKILL)
"""
RESTARTS = "ZERO_JAX_RESTARTS"  # for programs that want to know
_MAX_PROCESSES, _MAX_DEVICES = 256, 4096
_NUM_LAST_LINES = 12
_LATE_SECONDS = 0.5
_JOIN_SECONDS, _PROBE_SECONDS = 60.0, 0.1  # after which processes that have not joined are told of, and between probes
# XLA ends a process whose simulated devices reach a collective more than 40 s apart, as they do when a few cores take
# turns at large steps. An hour still ends one that hangs.
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds"


@hinted
@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How many processes to start, with how many devices, and what happens when one is lost.

    Attributes:
      num_processes: processes to start on this machine.
      devices_per_process: simulated CPU devices of each process.
      grace_seconds: time that the other processes have to save and end, once one has failed, before they are killed.
      min_processes: start the command again when a process is lost, with those that are left but at least this many;
        none starts nothing again.
      max_restarts: restarts in a row from the same step, after which the launch ends; all restarts count where the
        program reports no step. Used with min_processes.
      rejoin_seconds: time after which a lost process is tried again: the run saves, and starts again with it; it is
        killed where it has not ended after as long again, or the grace if that is longer. 0 tries a lost process in the
        next start. Used with min_processes.

    Example:
      >>> zero.cluster.LaunchConfig(num_processes=4, min_processes=3)
      LaunchConfig(num_processes=4, min_processes=3)
    """

    num_processes: int = 2
    devices_per_process: int = 4
    grace_seconds: float = 10.0
    min_processes: int | None = None
    max_restarts: int = 3
    rejoin_seconds: float = 300.0

    def __post_init__(self) -> None:
        lowest = {
            **dict.fromkeys(("num_processes", "devices_per_process", "min_processes"), 1),
            **dict.fromkeys(("grace_seconds", "max_restarts", "rejoin_seconds"), 0),
        }
        check_fields(self, lowest=lowest, highest={**dict.fromkeys(lowest, 9_999), "rejoin_seconds": 86_400})
        if self.num_processes * self.devices_per_process > _MAX_DEVICES or self.num_processes > _MAX_PROCESSES:
            raise ValueError(
                f"num_processes={self.num_processes}, devices_per_process={self.devices_per_process}: one machine "
                f"stands in for at most {_MAX_PROCESSES} processes and {_MAX_DEVICES:,} devices"
            )
        if self.min_processes is not None and self.min_processes > self.num_processes:
            raise ValueError(
                f"min_processes={self.min_processes} of num_processes={self.num_processes}: give at most as many"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How a process ended."""

    process_index: int  # number of the process
    returncode: int  # its exit status, or the negative number of the signal that ended it
    seconds: float  # time from the start of the processes to its end
    was_asked: bool  # whether it had been signalled to end
    last_lines: tuple[str, ...]  # the last lines of its stderr

    @property
    def status(self) -> int:
        """The status as a shell gives it: 128 and the signal's number where a signal ended the process."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    @property
    def was_killed(self) -> bool:
        """Whether another than the launcher killed it, such as the system where memory ends."""
        return self.returncode == -signal.SIGKILL and not self.was_asked

    def __str__(self) -> str:
        if self.returncode == SAVED:
            return "saved and stopped (status 75)"
        if self.returncode >= 0:
            return f"ended with status {self.returncode}"
        hint = " (out of memory?)" if self.was_killed else ""
        return f"was ended by {signal.Signals(-self.returncode).name}{hint}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """How the processes of a launch ended that were started together."""

    num_processes: int  # number of processes
    endings: tuple[Ending, ...]  # how they ended, in that order
    seconds: float = 0.0  # time from their start to the end of the last
    is_stopped: bool = False  # whether they were ended by a signal to the launcher
    is_interrupted: bool = False  # whether the launcher asked them to save and end, to start others

    @property
    def first_failure(self) -> Ending | None:
        """The process that failed first."""
        failed = [ending for ending in self.endings if ending.returncode != 0]
        # The error of another, whose collective fails, may be noticed before the end of the one that was killed.
        killed = [x for x in failed if x.was_killed and x.seconds < failed[0].seconds + _LATE_SECONDS]
        return next(iter(killed + failed), None)

    @property
    def num_lost(self) -> int:
        """The number of processes that were killed by another than the launcher; at least 1, the one that failed."""
        return max(1, sum(ending.was_killed for ending in self.endings))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """What all processes of a launch have in common."""

    command: Sequence[str]  # the program and its arguments
    config: LaunchConfig  # how many processes, and with how many devices
    environment: Mapping[str, str]  # their environment, to which the variables of `join` are added
    events: queue.SimpleQueue[Ending | signal.Signals]  # signals to the launcher, and the ends of processes
    merger: Merger  # takes their output


def run_round(
    launch: Launch, num_processes: int, *, number: int, seconds: float | None, has_started: Callable[[], bool]
) -> Round:
    """Runs the command as several processes until all have ended; one that fails ends the others.

    The `number` says how often the program was started before: a process that cannot be started has failed then. After
    some `seconds` (None: never) the processes are asked to save and end, once they `has_started`.
    """
    processes, index = _Processes(launch), 0
    with _reserved_port() as port, _guarded_group() as group:
        for index in range(num_processes):
            environment = _environment(launch, index=index, count=num_processes, port=port)
            try:
                processes.start(index, {**environment, RESTARTS: str(number)}, group)
            except OSError as error:
                why = f"cannot start {launch.command[0]!r} ({error.strerror}): give the path of a program"
                if not number:
                    raise ValueError(why) from error
                failed = Ending(process_index=index, returncode=1, seconds=0.0, was_asked=False, last_lines=(why,))
                launch.events.put(failed)
                break
        if num_processes > 1:
            _thread(processes.notice_joining, port)
        interrupt_at = math.inf if seconds is None else processes.started_at + seconds
        endings = processes.watch(index + 1, interrupt_at, has_started)
    processes.finish_reading()
    return Round(
        num_processes=num_processes,
        endings=endings,
        seconds=time.monotonic() - processes.started_at,
        is_stopped=processes.is_stopped,
        is_interrupted=processes.is_interrupted,
    )


class _Processes:
    def __init__(self, launch: Launch):
        self._launch, self._say, self._events = launch, launch.merger.say, launch.events
        self.started_at = time.monotonic()
        self._processes: list[subprocess.Popen] = []
        self._followers: list[threading.Thread] = []
        self._signalled_at = self._killed_at = math.inf
        self.is_stopped = self.is_interrupted = False
        self._is_noticed = threading.Event()  # that process 0 waits for the others, or that it does not
        self._have_ended = threading.Event()

    def start(self, index: int, environment: Mapping[str, str], group: int) -> None:
        """Starts a process; raises `OSError` where that cannot be done."""
        process = subprocess.Popen(
            self._launch.command, env=dict(environment), process_group=group, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._processes.append(process)
        self._followers.append(_thread(self._follow, index, process))

    def _follow(self, index: int, process: subprocess.Popen) -> None:
        """Passes on the output of a process, and queues its end with its time, so that the first failure is known."""
        last: collections.deque[str] = collections.deque(maxlen=_NUM_LAST_LINES)
        out = _thread(self._launch.merger.read, _text(process.stdout), index, False, None)
        err = _thread(self._launch.merger.read, _text(process.stderr), index, True, last)
        returncode = process.wait()
        now = time.monotonic()
        was_asked = now > (self._killed_at if returncode == -signal.SIGKILL else self._signalled_at)
        err.join(timeout=1)  # its last lines; a child of it may keep the pipe open
        how = {"returncode": returncode, "seconds": now - self.started_at, "was_asked": was_asked}
        self._events.put(Ending(process_index=index, last_lines=tuple(last), **how))
        out.join()
        err.join()

    def notice_joining(self, port: int) -> None:
        """Probes until process 0 listens at its port, as JAX does once it joins; says so where that takes too long."""
        while not self._have_ended.wait(_PROBE_SECONDS):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return self._is_noticed.set()
            if time.monotonic() > self.started_at + _JOIN_SECONDS:
                return self._say_apart()

    def _say_apart(self) -> None:
        self._is_noticed.set()
        self._say(
            "the processes have not joined each other: each runs by itself, as if it was the only one. Let the script "
            "call zero_jax.cluster.join() before it uses JAX (or jax.distributed.initialize())"
        )

    def watch(self, num_expected: int, interrupt_at: float, has_started: Callable[[], bool]) -> tuple[Ending, ...]:
        """Waits until all have ended, and ends them once one has failed; at `interrupt_at` they are asked to end."""
        config = self._launch.config
        endings: list[Ending] = []
        kill_at, has_failed = math.inf, False
        while len(endings) < num_expected:
            due = min(interrupt_at, kill_at)
            try:
                event = self._events.get(timeout=None if due == math.inf else max(0.0, due - time.monotonic()))
            except queue.Empty:
                now = time.monotonic()
                if due == kill_at:
                    self._say(f"still running {now - min(self._signalled_at, kill_at):.1f} s after SIGTERM: killed")
                    self._signal(signal.SIGKILL)
                    kill_at = interrupt_at = math.inf
                    has_failed = True
                elif has_started():
                    self.is_interrupted = True
                    self._signal(signal.SIGTERM)
                    kill_at, interrupt_at = now + max(config.grace_seconds, config.rejoin_seconds), math.inf
                else:  # a program that has not started has nothing to save, and may not handle the signal yet
                    interrupt_at = now + 1
                continue
            if isinstance(event, Ending):
                endings.append(event)
                if event.returncode != 0 and self._signalled_at == math.inf and len(endings) < num_expected:
                    self._say(f"process {event.process_index} {event}: the others get SIGTERM")
                    self._signal(signal.SIGTERM)
                if event.returncode != 0 and not has_failed:
                    has_failed, interrupt_at = True, math.inf
                    kill_at = min(kill_at, time.monotonic() + config.grace_seconds)
            else:
                again, self.is_stopped = self.is_stopped, True
                self._say("killed" if again else f"{event.name} is passed on; once more kills")
                self._signal(signal.SIGKILL if again else event)
                interrupt_at = math.inf
        self._have_ended.set()
        if num_expected > 1 and not self._is_noticed.is_set() and not any(x.returncode for x in endings):
            self._say_apart()
        return tuple(sorted(endings, key=lambda ending: ending.seconds))

    def _signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        self._signalled_at = min(self._signalled_at, now)
        if number == signal.SIGKILL:
            self._killed_at = min(self._killed_at, now)
        for process in self._processes:
            process.send_signal(number)

    def finish_reading(self) -> None:
        for follower in self._followers:
            follower.join(timeout=5)


def _thread(target: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def _text(stream: IO[bytes] | None) -> io.TextIOWrapper:
    # Only "\n" ends a line: a progress bar is one line, drawn over and over.
    return io.TextIOWrapper(cast(BinaryIO, stream), encoding="utf-8", errors="replace", newline="\n")


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
    """Returns `XLA_FLAGS` with a timeout of an hour for collectives of simulated devices, unless they have one.

    Example:
      >>> "collective_call" in zero.cluster.patient_flags("")
      True
    """
    is_file = flags.strip() and not flags.strip().startswith("-")
    return flags if is_file or _PATIENCE in flags else f"{flags} {_PATIENCE}=3600".strip()


def _environment(launch: Launch, *, index: int, count: int, port: int) -> dict[str, str]:
    """Returns the environment of a process.

    JAX reads the number of processes and their own from SLURM's variables only. With these set,
    `jax.distributed.initialize()` without arguments works like `join()`.
    """
    dropped = ("OMPI_", "SLURM_", "JAX_LOCAL_DEVICE_IDS", "JAX_PARTITION_INDEX", "JAX_COORDINATOR_PORT")
    inherited = {name: value for name, value in launch.environment.items() if not name.startswith(dropped)}
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
        "JAX_NUM_CPU_DEVICES": str(launch.config.devices_per_process),
        "NPROC": inherited.get("NPROC") or simulated_threads(launch.config.devices_per_process),
        "XLA_FLAGS": patient_flags(" ".join(flags)),
        "PYTHONUNBUFFERED": "1",
    }
