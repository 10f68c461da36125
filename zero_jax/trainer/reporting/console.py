"""Shows a run on a terminal, with a live progress bar, or in a log, with plain lines."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zero_jax.core.extras import extra
from zero_jax.core.output import UnstalledStream
from zero_jax.core.text_tables import aligned, format_bytes, format_figure, printable_lines
from zero_jax.core.tree import PyTree
from zero_jax.sharding.mesh import axes_of
from zero_jax.sharding.precision import resolve_precision
from zero_jax.sharding.spec import carries
from zero_jax.sharding.stages import sharded_groups
from zero_jax.trainer.reporting.metrics import FIELDS, per_device_bytes
from zero_jax.training import TrainState, ZeroConfig, sharding_report

with extra("train"):
    from rich import progress
    from rich.console import Console as RichConsole
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

Log = Callable[[str], None]

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_MAX_OWN_FIGURES = 6  # of a loss function's aux in a line; the files have all
_SIGNAL_SECONDS = 0.2  # until the signal comes that a closed terminal sends


class Console:
    """Shows the records of a run of `num_steps`; `first_step` of them were done before, in a resumed run.

    Each `log_every` steps, at the first and at the last one a line goes to `log`. If `terminal` can move its cursor, a
    bar with the metrics of the last step stays at its bottom, and the lines go above it.
    """

    def __init__(
        self, num_steps: int, log_every: int, *, log: Log = print, terminal: TextIO | None = None, first_step: int = 0
    ):
        self._num_steps, self._log_every, self._log = num_steps, log_every, log
        self._start = first_step, time.monotonic()
        self._shown_any, self._figures = False, Text()
        self._live = None if terminal is None else self._open(terminal, first_step)

    def _open(self, terminal: TextIO, first_step: int) -> Live | None:
        # A sample may have brackets and `:names:`, which rich would take for markup and emoji.
        rich = RichConsole(file=terminal, highlight=False, markup=False, emoji=False)
        if not terminal.isatty() or rich.is_dumb_terminal or not rich.is_terminal:
            return None
        self._bar = progress.Progress(
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TaskProgressColumn(),
            console=rich,
            expand=True,
        )
        self._task = self._bar.add_task("", total=self._num_steps, completed=first_step)
        # Other output to the terminal goes above the bar too; files and pipes are left alone.
        live = Live(
            get_renderable=lambda: Group(self._figures, self._bar),
            console=rich,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        live.start()
        return live

    def line(self, text: str) -> None:
        """Shows some text, above the bar if there is one: what a model writes, too, as it can be shown."""
        text = printable_lines(text)
        if self._live is not None:
            try:
                return self._live.console.print(Text(text), soft_wrap=True)
            except OSError:  # the terminal is gone
                self.close()
        self._log(text)

    def step(self, record: Mapping[str, Any]) -> None:
        """Shows a record of kind `train`, or, always as a line, of any other kind."""
        step, is_train = record["step"], record.get("kind", "train") == "train"
        shown = f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}  {figures(record)}"
        if not is_train:
            self.line(shown)
            return
        eta = self._eta(step)
        if self._live is not None:
            self._figures = Text(shown + eta, no_wrap=True, overflow="ellipsis")
            self._bar.update(self._task, completed=step)
        is_first, self._shown_any = not self._shown_any, True
        if is_first or step == self._num_steps or step % self._log_every == 0 or record.get("skipped"):
            self.line(shown + eta)

    def close(self) -> None:
        """Removes the bar."""
        if self._live is not None:
            live, self._live = self._live, None
            with contextlib.suppress(OSError):
                live.stop()

    def _eta(self, step: int) -> str:
        """Returns the time left, at the speed since the first step that was shown, which compiles."""
        if not self._shown_any:
            self._start = step, time.monotonic()
        first, started = self._start
        if step <= first or step >= self._num_steps:
            return ""
        seconds = (time.monotonic() - started) / (step - first) * (self._num_steps - step)
        return f"  {format_duration(seconds)} left"


def lasting(log: Log, *, is_stopping: Callable[[], bool] = lambda: False) -> Log:
    """Wraps a log function so that a full disk or a closed terminal loses lines, but does not end the run.

    Characters that the terminal's encoding does not have, as in a sample, are written as escapes. A pipe whose reader
    has ended (`head`) does end the run, unless it is stopping anyway: then the state still has to be saved. One that
    does not read (Ctrl-S) is not waited for, where `log` is `print`.
    """
    if log is print:
        log = functools.partial(print, file=UnstalledStream(lambda: sys.stdout), flush=True)

    def log_line(line: str) -> None:
        try:
            try:
                log(line)
            except UnicodeEncodeError:
                log(line.encode("ascii", "backslashreplace").decode())
        except BrokenPipeError:
            time.sleep(_SIGNAL_SECONDS)
            if not is_stopping():
                raise
        except OSError:
            pass

    return log_line


def figures(record: Mapping[str, Any]) -> str:
    """Formats the main metrics of a record as a line; None and missing ones are left out."""
    present = {name: value for name, value in record.items() if value is not None}
    label = "" if present.get("kind", "train") == "train" else f"{present['kind']} "
    standard = {name: form(present[name]) for name, form in _FIGURES.items() if name in present}
    # The loss first, then what the user's function returns, which is what one looks for.
    losses = [standard.pop(name) for name in ("loss", "ema_loss") if name in standard]
    custom = [f"{name} {present[name]:.4g}" for name in present if name not in FIELDS][:_MAX_OWN_FIGURES]
    shown = [label + figure for figure in [*losses, *custom, *standard.values()] if figure]
    if present.get("skipped"):
        leaf = present.get("nonfinite_leaf")
        shown.append(f"skipped: {f'the gradient of {leaf}' if leaf else 'a gradient'} was not finite")
    return "  ".join(shown)


_FIGURES: Mapping[str, Callable[[Any], str]] = {
    "loss": lambda x: f"loss {format_figure(x, decimals=3)}",
    "ema_loss": lambda x: f"loss of the average {format_figure(x, decimals=3)}",
    "grad_norm": lambda x: f"grad norm {format_figure(x, decimals=2)}",
    "learning_rate": lambda x: f"lr {x:.2e}",
    "tokens_per_second": lambda x: f"{x:,.0f} tokens/s",
    "examples_per_second": lambda x: f"{x:,.0f} examples/s",
    "mfu": lambda x: f"MFU {x:.1%}",
    "data_wait_seconds": lambda x: f"data wait {x:.2f} s" if x >= 0.01 else "",
    "per_device_memory_bytes": lambda x: f"{format_bytes(x)}/device",
}


def format_duration(seconds: float) -> str:
    """Formats a time, such as `3 min` or `2 days 4 h`."""
    if seconds < _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    if seconds < _DAY:
        hours, minutes = divmod(round(seconds / _MINUTE), 60)
        return f"{hours} h {minutes} min"
    days, hours = divmod(round(seconds / _HOUR), 24)
    return f"{days} day{'s' if days > 1 else ''} {hours} h"


def groups(state: TrainState) -> dict[str, Any]:
    """Returns the groups of a train state by name."""
    return {name: getattr(state, name) for name in ("params", "master", "opt_state", "model_state", "grad_errors")}


def num_params(state: TrainState) -> int:
    """Returns the number of params."""
    return sum(x.size for x in jax.tree.leaves(state.params))


def describe_run(state: TrainState, *, mesh: Mesh, zero: ZeroConfig, rows: dict[str, str]) -> str:
    """Describes a run in a table: devices, mesh, stage, `rows`, dtypes, bytes per device, and unsharded leaves."""
    precision = resolve_precision(zero.precision)
    dtypes = {"param": _floating(state.params)}
    dtypes |= {name: getattr(precision, name) or "as initialized" for name in ("compute", "reduce")}
    dtypes |= {} if state.master is None else {"master": _floating(state.master)}
    dtypes["optimizer"] = _floating(state.opt_state)
    group_bytes = [
        f"{name} {format_bytes(per_device_bytes(tree))} of {format_bytes(sum(x.nbytes for x in jax.tree.leaves(tree)))}"
        for name, tree in groups(state).items()
        if jax.tree.leaves(tree)
    ]
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    table = {
        "devices": f"{mesh.size} x {mesh.devices.flat[0].device_kind} ({jax.__name__} {jax.__version__}{processes})",
        "mesh": " x ".join(f"{name}={size}" for name, size in mesh.shape.items()),
        "stage": str(zero.stage),
        **rows,
        "dtypes": ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items()),
        "a device holds": ", ".join(group_bytes),
        "unsharded": _unsharded_leaves(state, mesh=mesh, zero=zero),
    }
    return aligned(table.items())


def _floating(tree: PyTree) -> str:
    dtypes = (x.dtype for x in jax.tree.leaves(tree))
    return "+".join(sorted({x.name for x in dtypes if jnp.issubdtype(x, jnp.inexact)})) or "none"


def _unsharded_leaves(state: TrainState, *, mesh: Mesh, zero: ZeroConfig) -> str:
    report = sharding_report(state, mesh=mesh, config=zero)
    paths = [p.path for p in report.placements if not carries(p.dims, axes_of(mesh).data)]
    if not paths or not sharded_groups(zero.stage):
        return "none"
    shown = ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "")
    return f"{len(paths)} of {len(report.placements)} leaves, {format_bytes(report.whole_bytes)}: {shown}"
