"""Launches several processes on one machine, each with simulated CPU devices, ends them together, and restarts them.

After it has lost processes `Elastic` decides whether a launch restarts, and with how many. A lost process is left out
for a while: real machines take a while to come back, and on one machine fewer processes need less memory. Then it is
started again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence

from zero_jax.cluster.log_merging import Merger
from zero_jax.cluster.preemption import EXIT_CODE as SAVED
from zero_jax.cluster.preemption import put_back
from zero_jax.cluster.processes import Ending, Launch, LaunchConfig, Round, run_round
from zero_jax.cluster.watchdog import EXIT_CODE as HUNG
from zero_jax.core.output import unstalled

STARTED_AFTER = "ZERO_JAX_STARTED_AFTER_FILE"
ENDED_WITH = "ZERO_JAX_ENDED_WITH_FILE"
_REFUSED, _DIVERGED = 2, 3
_LONGEST_WAIT_SECONDS = 86_400.0


def report_start(step: int) -> None:
    """Reports to `zero-jax launch --min-processes` that a program has started; otherwise does nothing.

    The launcher gives up after some restarts in a row from the same step, and asks for a save to try a lost process
    again only where the program can save. `zero.Trainer` and `zero-jax train` call this; in a script of your own
    process 0 calls it once, after the first step.

    Args:
      step: the step of the checkpoint that it went on from; 0 at the beginning.

    Raises:
      ValueError: a step that is no integer from 0 on.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"report_start: step={step!r}: give the number of steps done, an integer from 0 on")
    if path := os.environ.get(STARTED_AFTER):
        pathlib.Path(path).write_text(str(step), encoding="utf-8")


def report_end(status: int) -> None:
    """Reports to `zero-jax launch` the status that a program should exit with; otherwise does nothing.

    A program that exits with 0 although its last run was stopped (75: saved) is not done: the launcher takes what was
    reported. `zero.Trainer` and `zero-jax train` call this in process 0; a loop of your own exits with 75 itself.
    """
    if path := os.environ.get(ENDED_WITH):
        pathlib.Path(path).write_text(str(status), encoding="utf-8")


class Elastic:
    """The numbers of processes that a launch starts, one after another, and the reason of each restart or of none."""

    def __init__(self, config: LaunchConfig):
        self._config = config
        self._refused: set[int] = set()  # numbers that are not to be tried again
        self._size, self._has_grown = config.num_processes, False
        self._back_at: list[float] = []  # when each lost process is tried again, in this order
        self._wait_seconds = config.rejoin_seconds
        self._step = self._num_in_a_row = 0
        self.num_restarts, self.has_step, self.reason = 0, False, ""

    @property
    def seconds_to_larger(self) -> float | None:
        """Seconds that the next processes run until more are started, or None; enough for them to get somewhere."""
        for k, back_at in enumerate(self._back_at, 1):
            if (self._largest(len(self._back_at) - k) or 0) > self._size:
                return max(self._wait_seconds, back_at - time.monotonic())
        return None

    def next_size(self, ended: Round, *, step: int | None) -> int | None:
        """Returns how many processes to start after others have ended that had begun after `step`; None for none."""
        first = ended.first_failure
        self.has_step = self.has_step or step is not None
        self.reason = ""
        if first is None or ended.is_stopped or first.status == _DIVERGED:
            return None
        if step is not None and step > self._step:
            self._step, self._num_in_a_row = step, 0
        if ended.is_interrupted:
            self.reason = "a lost process is tried again"
        elif first.status == _REFUSED:
            if not self.num_restarts:
                return None
            self._refused.add(self._size)
            self.reason = f"{self._size} processes were refused (status {_REFUSED}, see above)"
        else:
            self.reason = f"process {first.process_index} of {ended.num_processes} {first}"
            self._num_in_a_row += 1
            if self._num_in_a_row > self._config.max_restarts:
                self.reason = f"{self._config.max_restarts} restarts in a row did not get beyond step {self._step}"
                return None
            # After a hang the status does not show which process failed: all are started again. Others are left out for
            # a while, and for twice as long if they are lost again soon after a restart.
            if first.status not in (SAVED, HUNG):
                is_early = self._has_grown and ended.seconds < self._wait_seconds
                longer = min(2 * self._wait_seconds, _LONGEST_WAIT_SECONDS)
                self._wait_seconds = longer if is_early else self._config.rejoin_seconds
                self._back_at = sorted(self._back_at + [time.monotonic() + self._wait_seconds] * ended.num_lost)
        return self._restarted()

    def _restarted(self) -> int | None:
        """Counts a restart, with as many processes as there are; returns their number, or None if none is accepted."""
        now, most = time.monotonic(), self._config.num_processes
        self._back_at = [back_at for back_at in self._back_at if back_at > now]
        while (size := self._largest(len(self._back_at))) is None and self._back_at:
            del self._back_at[0]  # too few are left: the one that was lost first is tried again at once
        if size is None:
            self.reason = f"no number of processes from {self._least} to {most} is accepted"
            return None
        skipped = ", ".join(map(str, range(most - len(self._back_at), size, -1)))
        self.reason += f"; not with {skipped}, which the run refuses" if skipped else ""
        self._has_grown, self._size = size > self._size, size
        self.num_restarts += 1
        return size

    def _largest(self, num_lost: int) -> int | None:
        """Returns the largest number of processes that is accepted, without some that are lost."""
        sizes = range(self._least, self._config.num_processes - num_lost + 1)
        return max((size for size in sizes if size not in self._refused), default=None)

    @property
    def _least(self) -> int:
        return self._config.min_processes or self._config.num_processes


_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchResult(Round):
    """How the processes that were started last ended; prints the first failure first."""

    num_restarts: int = 0  # how often the command was started again
    reason: str = ""  # why it was not started again, where it could have been

    @property
    def status(self) -> int:
        """The exit status of the launch: that of the process that failed first, or 0."""
        return self.first_failure.status if self.first_failure else 0

    def __str__(self) -> str:
        first = self.first_failure
        if first is None:
            again = f", after {self.num_restarts} restarts" if self.num_restarts else ""
            return f"all {self.num_processes} processes are done{again}"
        lines = [f"process {first.process_index} of {self.num_processes} {first} after {first.seconds:.1f} s"]
        if first.returncode == SAVED:
            lines[0] += "; the same command with `--resume auto` goes on from there"
        elif first.last_lines:
            lines.append("the last lines of its stderr:")
            lines += [f"  {line}" for line in first.last_lines]
        later = [f"process {ending.process_index} {ending}" for ending in self.endings if ending is not first]
        lines += ["then " + ", ".join(later)] if later else []
        lines += [f"not started again: {self.reason}"] if self.reason else []
        return "\n".join(lines)


def launch(command: Sequence[str], *, config: LaunchConfig) -> LaunchResult:
    """Runs a command as several processes that find each other by `jax.distributed` on this machine.

    Stdout of process 0 goes to stdout unchanged. All other output goes to stderr, line by line, prefixed with the
    number of the process. No process waits for a reader of the output that does not read. If a process fails, the
    others get SIGTERM, and SIGKILL after the grace; with `config.min_processes` the command is then started again, as
    `Elastic` decides. SIGINT, SIGTERM and SIGHUP are passed on, and end the launch; the second one kills. No process is
    left behind.

    Args:
      command: the program and its arguments.
      config: how many processes, and with how many devices.

    Raises:
      ValueError: the program cannot be started.

    Example:
      >>> config = zero.cluster.LaunchConfig(num_processes=2, devices_per_process=1)
      >>> zero.cluster.launch(["true"], config=config).status
      0
    """
    # A reader that stops reading would stop the processes, each at its next line, and a signal would not be noticed.
    merger = Merger(unstalled(sys.stdout), unstalled(sys.stderr))
    events: queue.SimpleQueue[Ending | signal.Signals] = queue.SimpleQueue()
    elastic = Elastic(config)
    size: int | None = config.num_processes
    with _handled_signals(events), tempfile.TemporaryDirectory() as folder:
        reported, status = pathlib.Path(folder) / "step", pathlib.Path(folder) / "status"
        environment = {**os.environ, ENDED_WITH: str(status)}
        # Empty, and not left out: this process may have inherited one.
        environment[STARTED_AFTER] = "" if config.min_processes is None else str(reported)
        run = Launch(command=command, config=config, environment=environment, events=events, merger=merger)
        while size is not None:
            if elastic.num_restarts:
                merger.say(f"{elastic.reason}: restart {elastic.num_restarts}, with {size} of {config.num_processes}")
            ended = run_round(
                run,
                size,
                number=elastic.num_restarts,
                seconds=elastic.seconds_to_larger,
                has_started=lambda: not elastic.has_step or reported.exists(),
            )
            # Processes that ended with 0, as a script does that ignores its run's status, have what was reported.
            code = _take_number(status) or 0
            endings = [dataclasses.replace(x, returncode=x.returncode or code) for x in ended.endings]
            ended, size = dataclasses.replace(ended, endings=tuple(endings)), None
            if config.min_processes is not None and events.empty():  # no signal came between
                size = elastic.next_size(ended, step=_take_number(reported))
    return LaunchResult(**vars(ended), num_restarts=elastic.num_restarts, reason=elastic.reason)


def _take_number(path: pathlib.Path) -> int | None:
    """Returns the step or status that process 0 reported, and removes the report; None without one."""
    try:
        text = path.read_text(encoding="utf-8")
        path.unlink()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


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
            put_back(number, handler)
