"""Preemption: signals that ask a run to stop, and the step at which all of its processes stop."""

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

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


class Preemption:
    """Turns signals into a request to save and stop, which all processes follow at the same step.

    SIGTERM is sent before a machine is taken back (by Kubernetes, at SLURM's time limit, and on Google Cloud at a
    preemption or maintenance), SIGHUP when a terminal or connection is closed, SIGUSR1 and SIGUSR2 by `sbatch
    --signal`, and SIGINT by Ctrl-C, the second of which ends the process at once.

    With `jax.distributed` any process may get the signal. JAX's notifier, which `initialize` installs, handles SIGTERM:
    it notifies the other processes and agrees with them on the step after the furthest one. The other signals are
    passed on to it as a SIGTERM. It polls once a second. A run that ends before the agreed step ends normally. A notice
    that comes before `should_stop` is first asked, as while a checkpoint is restored, stops the run there.

    Entering the context replaces the handlers, and leaving it restores them. Ignored signals (`nohup`) stay ignored.
    Python has signal handlers in the main thread only: in other threads signals are left to JAX's notifier.

    Example:
      >>> with zero.cluster.Preemption(log=lambda _: None) as preemption:
      ...     preempted = preemption.should_stop(step=1)
      >>> preempted
      False
    """

    _count = 0  # steps of all runs of this process so far; JAX has one notifier for them

    def __init__(self, *, log: Callable[[str], None] = print):
        """Installs nothing yet; `log` is called with a line when the run stops, or signals cannot be handled."""
        self._log = log
        self._signal: str | None = None
        self._is_stopping = self._is_shared = False
        self._ahead: int | None = None  # how far the count is ahead of the steps
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Preemption:
        self._is_shared = jax.distributed.is_initialized()
        if self._is_shared and not jax.config.values.get("jax_enable_preemption_service", True):
            raise ValueError(
                "jax_enable_preemption_service=False: the processes of a run could not agree on when to stop: "
                "leave it on"
            )
        if threading.current_thread() is not threading.main_thread():
            hint = "; those to the other processes are handled" if self._is_shared else ""
            self._log(f"signals cannot be handled outside the main thread: SIGTERM will not save the run{hint}")
            return self
        for number in _SIGNALS:
            previous = signal.getsignal(number)
            if previous is not signal.SIG_IGN and not (self._is_shared and number == signal.SIGTERM):
                signal.signal(number, self._on_signal)
                self._previous[number] = previous
        return self

    def __exit__(self, *_: Any) -> None:
        for number in list(self._previous):
            self._restore(number)

    @property
    def reason(self) -> str | None:
        """The reason for the stop: a signal to this process or a request, or a notice to another; None without one."""
        return self._signal or ("a preemption notice" if self._is_stopping else None)

    @property
    def stops_alone(self) -> bool:
        """Whether this process got a signal and is the only one, so that it may stop at any point."""
        return self._signal is not None and not self._is_shared

    def request(self, reason: str) -> bool:
        """Asks to save and stop as a signal does, such as where the reader of the log has ended; returns True."""
        if self.reason is None:
            self._signal = reason
            if self._is_shared:
                signal.raise_signal(signal.SIGTERM)
        return True

    def should_stop(self, step: int) -> bool:
        """Returns whether to save and stop after a step.

        It is the same in all processes, which all ask first about the same step, and then after each step.
        """
        if not self._is_stopping:
            if self._is_shared:
                # JAX takes 0 for a process that has not asked yet. With the step itself, a notice before the first one
                # of a run resumed at step 40 would stop it after step 1, which never comes.
                if self._ahead is None:
                    self._ahead = Preemption._count + 1 - step
                Preemption._count = step + self._ahead
                self._is_stopping = multihost_utils.reached_preemption_sync_point(Preemption._count)
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
        put_back(number, self._previous.pop(number))


def put_back(number: int, handler: Any) -> None:
    """Installs the handler of a signal that was there before, as `signal.getsignal` returned it."""
    # None stands for a handler that was not installed from Python, which cannot be put back from here.
    signal.signal(number, signal.SIG_DFL if handler is None else handler)
