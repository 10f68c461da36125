"""What a run shows and leaves behind: progress lines, a JSON Lines file, and a picture of the loss."""

import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zero_jax.evaluation import Metrics

Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step, as read back from the devices.

    Attributes:
      step: number of steps done.
      loss: mean training loss of the step's batch, in nats.
      grad_norm: global norm of the gradients before clipping.
      skipped: whether the update was skipped because a gradient was not finite.
      tokens_per_second: tokens trained on, over all devices, since the last record that was shown.
      per_device_memory_bytes: memory in use on the first device.
    """

    step: int
    loss: float
    grad_norm: float
    skipped: bool
    tokens_per_second: float | None
    per_device_memory_bytes: int

    def line(self, num_steps: int) -> str:
        """Returns the progress line of the step, of `num_steps` in all."""
        speed = "" if self.tokens_per_second is None else f"  {self.tokens_per_second:>9,.0f} tokens/s"
        note = "  skipped: a gradient was not finite" if self.skipped else ""
        return (
            f"step {self.step:>{len(str(num_steps))}}/{num_steps}  loss {self.loss:.3f}  grad norm {self.grad_norm:.2f}"
            f"{speed}  {format_bytes(self.per_device_memory_bytes)}/device{note}"
        )


class JsonLinesWriter:
    """Appends records to a file, one JSON object a line, each on disk as soon as it is written."""

    def __init__(self, path: pathlib.Path):
        """Opens the file, which must not exist yet."""
        self._file = path.open("x", encoding="utf-8")

    def __enter__(self) -> "JsonLinesWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes one record."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


class Progress:
    """Reads the metrics of steps back, keeps the losses and tells how the run goes.

    Attributes:
      train: step and loss of every training step.
      validation: step and loss of every evaluation.
      compile_seconds: what the first step took, which is mostly compiling.
    """

    def __init__(self, *, num_steps: int, tokens_per_step: int, log_every: int, writer: JsonLinesWriter, log: Log):
        """Starts the clock."""
        self.train: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []
        self.compile_seconds = 0.0
        self._num_steps, self._tokens_per_step, self._log_every = num_steps, tokens_per_step, log_every
        self._writer, self._log = writer, log
        self._started = self._resumed = time.perf_counter()
        self._timed_steps, self._timed_seconds = 0, 0.0
        self._shown_steps, self._shown_seconds = 0, 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the start, evaluations and compiling included."""
        return time.perf_counter() - self._started

    @property
    def tokens_per_second(self) -> float:
        """Speed of the training steps alone, the first one (which compiles) left out."""
        return self._speed(self._timed_steps, self._timed_seconds) or math.nan

    def add_step(self, step: int, metrics: Metrics) -> None:
        """Waits until step `step` (counted from 1) is done and takes down what it reported."""
        loss = float(metrics.loss)
        seconds, self._resumed = time.perf_counter() - self._resumed, time.perf_counter()
        if step == 1:
            self.compile_seconds = seconds
        else:
            self._timed_steps, self._timed_seconds = self._timed_steps + 1, self._timed_seconds + seconds
        record = StepRecord(
            step=step,
            loss=loss,
            grad_norm=float(metrics["grad_norm"]),
            skipped=bool(metrics["skipped"]),
            tokens_per_second=self._speed(
                self._timed_steps - self._shown_steps, self._timed_seconds - self._shown_seconds
            ),
            per_device_memory_bytes=device_memory_bytes(next(iter(metrics.loss.devices()))),
        )
        self.train.append((step, loss))
        self._writer.write({"kind": "train", **dataclasses.asdict(record)})
        if step in (1, self._num_steps) or step % self._log_every == 0:
            self._log(record.line(self._num_steps))
            self._shown_steps, self._shown_seconds = self._timed_steps, self._timed_seconds

    def add_validation(self, step: int, loss: float) -> None:
        """Takes down the validation loss after `step` steps, and goes on timing steps from here."""
        self.validation.append((step, loss))
        self._writer.write({"kind": "validation", "step": step, "loss": loss})
        self._log(f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}  validation loss {loss:.3f}")
        self._resumed = time.perf_counter()

    def _speed(self, steps: int, seconds: float) -> float | None:
        return steps * self._tokens_per_step / seconds if seconds else None


def format_bytes(num_bytes: float) -> str:
    """Returns a size for people, such as `1.5 MiB`."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while abs(num_bytes) >= 1024 and power + 1 < len(units):
        num_bytes, power = num_bytes / 1024, power + 1
    return f"{num_bytes:,.0f} {units[power]}" if power == 0 else f"{num_bytes:,.1f} {units[power]}"


def per_device_bytes(tree: Any) -> int:
    """Returns the bytes that a tree of arrays takes on each device that holds a part of every array."""
    return sum(_shard_bytes(x) for x in jax.tree.leaves(tree))


def device_memory_bytes(device: Any) -> int:
    """Returns the peak of the memory in use on a device, or the live arrays' where the backend keeps no count (CPU)."""
    stats = device.memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    return sum(_shard_bytes(x) for x in jax.live_arrays(device.platform) if device in x.sharding.device_set)


def _shard_bytes(x: jax.Array) -> int:
    # Not by `addressable_shards`: looking at a shard's data makes an array of it, which then counts as live itself.
    return x.nbytes * math.prod(x.sharding.shard_shape(x.shape)) // max(x.size, 1)


def plot_losses(
    path: pathlib.Path,
    *,
    train: Sequence[tuple[int, float]],
    validation: Sequence[tuple[int, float]],
    title: str,
) -> None:
    """Draws training and validation loss against the step, as a PNG.

    Args:
      path: where the picture goes.
      train: step and loss of every training step.
      validation: step and loss of every evaluation.
      title: what the run is.
    """
    # Figure and canvas by hand: pyplot would keep state between runs and look for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, losses = zip(*train, strict=True)
    window = max(1, len(train) // 40)
    axes.plot(steps, losses, color="#c9d8e8", linewidth=0.8, label="training, each batch")
    means = np.convolve(losses, np.full(window, 1 / window), mode="valid")
    axes.plot(steps[window - 1 :], means, color="#4c72b0", linewidth=1.5, label=f"training, mean of {window} batches")
    label = f"validation ({validation[-1][1]:.3f} at the end)"
    axes.plot(*zip(*validation, strict=True), color="#c44e52", linewidth=1.5, marker="o", markersize=4, label=label)
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
