"""Signals that ask a run to stop, and the step at which all of its processes do."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

EXIT_CODE = 75

_NAMES = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT")


class Preemption:
    """Turns signals into a request to save and stop, which all processes follow at the same step.

    SIGTERM is what clouds and clusters send ahead of taking a machine back (Kubernetes, SLURM's time limit, and on
    Google Cloud the preemption of a spot machine or its maintenance, once the machine shuts down or its agent passes
    the notice on); SIGHUP is what a terminal sends that is closed, or a connection that is cut; SIGUSR1 and SIGUSR2 are
    what `sbatch --signal` sends; SIGINT is Ctrl-C, the second of which ends the process at once.

    With `jax.distributed` the request may come to any one process. JAX's own notifier, which `initialize` installs,
    takes SIGTERM there, tells the others, and agrees with them on the step after the furthest one; so SIGTERM is left
    to it, and the other signals are passed on to it as a SIGTERM. It looks once a second. A run that is over before
    the step agreed on ends as if nothing had been asked for.

    Handlers are replaced when the context is entered and put back when it is left. Signals that the process ignores
    (as `nohup` and shells arrange it) stay ignored. Python takes handlers in the main thread only: elsewhere signals
    are left alone, apart from what JAX's notifier takes.
    """

    def __init__(self, *, log: Callable[[str], None] = print):
        """Makes one that does nothing yet.

        Args:
          log: takes a line when a request is followed, or cannot be taken.
        """
        self._log = log
        self._signal: str | None = None
        self._is_stopping = self._is_shared = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Preemption:
        self._is_shared = jax.distributed.is_initialized()
        if self._is_shared and not jax.config.values.get("jax_enable_preemption_service", True):
            raise ValueError(
                "jax_enable_preemption_service=False: the processes of a run could not agree on when to stop: "
                "leave it on"
            )
        if threading.current_thread() is not threading.main_thread():
            rest = "; those to the other processes are heard of" if self._is_shared else ""
            self._log(f"signals cannot be handled outside the main thread: SIGTERM will not save the run{rest}")
            return self
        for name in _NAMES:
            number = getattr(signal, name, None)
            if number is None or (self._is_shared and name == "SIGTERM"):
                continue
            previous = signal.getsignal(number)
            if previous is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
                self._previous[number] = previous
        return self

    def __exit__(self, *_: Any) -> None:
        for number in list(self._previous):
            self._restore(number)

    @property
    def reason(self) -> str | None:
        """What asked for the stop, or None if nothing did: a signal to this process, or a notice to another one."""
        return self._signal or ("a preemption notice" if self._is_stopping else None)

    @property
    def stops_alone(self) -> bool:
        """Whether this process was asked to stop and has no others to agree with, so that it may do so at any point."""
        return self._signal is not None and not self._is_shared

    def should_stop(self, step: int) -> bool:
        """Tells whether to save and stop after a step; the answer is the same in all processes.

        Args:
          step: the number of the step that was done. All processes ask after each step, from the same first one on,
            which may be that before the first.
        """
        if not self._is_stopping:
            if self._is_shared:
                self._is_stopping = multihost_utils.reached_preemption_sync_point(step)
            else:
                self._is_stopping = self._signal is not None
            if self._is_stopping:
                self._log(f"{self.reason}: stopping after step {step}")
        return self._is_stopping

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signal = signal.Signals(number).name
        if number == signal.SIGINT:
            self._restore(number)
            # Printing is not safe in a handler: the signal may have come in the middle of a print.
            with contextlib.suppress(OSError):  # a terminal that is gone
                os.write(2, b"\nCtrl-C: saving and stopping after this step; once more stops at once\n")
        if self._is_shared:
            signal.raise_signal(signal.SIGTERM)

    def _restore(self, number: int) -> None:
        previous = self._previous.pop(number)
        # None stands for a handler that was not installed from Python, which cannot be put back from here.
        signal.signal(number, signal.SIG_DFL if previous is None else previous)
