"""Launches several processes on one machine, each with simulated CPU devices, ends them together, and restarts them."""

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
from collections.abc import Collection, Iterator, Sequence

from zero_jax.cluster.elastic import ENDED_WITH, STARTED_AFTER, Elastic
from zero_jax.cluster.log_merging import Merger
from zero_jax.cluster.preemption import EXIT_CODE as SAVED
from zero_jax.cluster.processes import Ending, Launch, LaunchConfig, Round, run_round

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchResult(Round):
    """How the processes that were started last ended; prints the first failure first.

    Attributes:
      num_restarts: how often the command was started again.
      reason: why it was not started again, where it could have been.
    """

    num_restarts: int = 0
    reason: str = ""

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


def launch(command: Sequence[str], *, config: LaunchConfig, refused: Collection[int] = ()) -> LaunchResult:
    """Runs a command as several processes that find each other by `jax.distributed` on this machine.

    Stdout of process 0 goes to stdout unchanged. All other output goes to stderr, line by line, prefixed with the
    number of the process. If a process fails, the others get SIGTERM, and SIGKILL after the grace; with
    `config.min_processes` the command is then started again, as `Elastic` decides. SIGINT, SIGTERM and SIGHUP are
    passed on, and end the launch; the second one kills. No process is left behind.

    Args:
      command: the program and its arguments.
      config: how many processes, and with how many devices.
      refused: numbers of processes that the command would refuse, and that it is not started again with.

    Raises:
      ValueError: the program cannot be started.

    Example:
      >>> config = zero.cluster.LaunchConfig(num_processes=2, devices_per_process=1)
      >>> zero.cluster.launch(["true"], config=config).status
      0
    """
    merger = Merger(sys.stdout, sys.stderr)
    events: queue.SimpleQueue[Ending | signal.Signals] = queue.SimpleQueue()
    elastic = Elastic(config, refused=refused)
    size: int | None = config.num_processes
    with _handled_signals(events), tempfile.TemporaryDirectory() as folder:
        reported, status = pathlib.Path(folder) / "step", pathlib.Path(folder) / "status"
        environment = {**os.environ, ENDED_WITH: str(status)}
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
            ended = _with_status(ended, _take_number(status) or 0)
            size = None
            if config.min_processes is not None and events.empty():  # no signal came between
                size = elastic.next_size(ended, step=_take_number(reported))
    return LaunchResult(**vars(ended), num_restarts=elastic.num_restarts, reason=elastic.reason)


def _with_status(ended: Round, status: int) -> Round:
    """Returns an end in which processes that ended with 0, as a script does that ignores its run's status, have it."""
    endings = [dataclasses.replace(x, returncode=status) if x.returncode == 0 else x for x in ended.endings]
    return dataclasses.replace(ended, endings=tuple(endings))


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
            signal.signal(number, handler)
