"""Metrics of a training run: reads them from the devices, adds speed and memory, and passes them to the writers."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from zero_jax.sharding.topology import hardware_of
from zero_jax.training import MeshLoss, Metrics, NoiseScale, normalize_loss
from zero_jax.transforms import forward_flops

Log = Callable[[str], None]

# The time between two steps that are read back is too noisy alone.
_SHORTEST_WINDOW_STEPS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatched:
    """A step that was dispatched to the devices, and not yet waited for.

    Attributes:
      step: its number, from 1.
      metrics: its metrics.
      param_norm: global norm of the params after it, or None where it is not logged.
      data_wait_seconds: time spent waiting for its batch.
    """

    step: int
    metrics: Metrics
    param_norm: jax.Array | None
    data_wait_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speedometer:
    """The work of a step, for throughput and MFU.

    Attributes:
      batch_size: sequences of a step, over all devices.
      num_tokens: tokens of a step, over all devices.
      flops: operations of a step, over all devices, without rematerialization.
      peak_flops_per_second: peak of all devices; None where it is not known (a CPU).
    """

    batch_size: int
    num_tokens: int
    flops: int
    peak_flops_per_second: float | None

    def tokens_per_second(self, step_seconds: float) -> float:
        """Returns the throughput for a step time."""
        return self.num_tokens / step_seconds

    def mfu(self, step_seconds: float) -> float | None:
        """Returns the model FLOPs utilization for a step time (Chowdhery et al. 2022, appendix B)."""
        return None if self.peak_flops_per_second is None else self.flops / step_seconds / self.peak_flops_per_second


def make_speedometer(loss_fn: Callable[..., Any] | MeshLoss, params: Any, batch: Any, *, mesh: Mesh) -> Speedometer:
    """Counts the operations of a step on batches of `[batch_size, seq_len]`."""
    batch_size, seq_len = next(iter(batch.values())).shape
    params, batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch))
    hardware = hardware_of(mesh.devices.flat[0])
    return Speedometer(
        batch_size=batch_size,
        num_tokens=batch_size * seq_len,
        flops=3 * forward_flops(normalize_loss(loss_fn, mesh), params, batch, jax.random.key(0)),
        peak_flops_per_second=None if hardware is None else mesh.size * hardware.flops_per_second,
    )


class Progress:
    """Reads the metrics of steps from the devices, and accumulates those of the run.

    Attributes:
      compile_seconds: time of the first step of this process, which is mostly compiling.
      num_nonfinite_in_a_row: the latest steps whose loss or gradients were not finite.
      num_skipped_steps: updates skipped so far.
      nonfinite_leaf: path of the first param whose gradient was not finite in the latest step, or None.
      train: step and loss of every training step of this process.
      validation: step and loss of every evaluation.
    """

    def __init__(
        self,
        *,
        sinks: Sequence[Callable[[Mapping[str, Any]], None]],
        speedometer: Speedometer,
        schedule: Callable[[int], Any] | None,
        param_names: Sequence[str],
        noise: NoiseScale,
        log_every: int,
    ):
        """Starts the clock.

        Args:
          sinks: called with the records, dicts of metrics with a `kind` and a `step`.
          speedometer: work of a step.
          schedule: the learning rate by the number of updates; None if it is not known.
          param_names: paths of the params, in the order of their leaves.
          noise: estimates the gradient noise scale.
          log_every: steps that the throughput is averaged over.
        """
        self.compile_seconds = 0.0
        self.num_nonfinite_in_a_row = 0
        self.nonfinite_leaf: str | None = None
        self.num_skipped_steps = 0
        self.train: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []
        self._sinks, self._speedometer, self._schedule = list(sinks), speedometer, schedule
        self._param_names, self._noise, self._log_every = list(param_names), noise, log_every
        self._started = self._resumed = time.perf_counter()
        self._timed_steps, self._timed_seconds = 0, 0.0
        self._window: list[float] = []

    @property
    def seconds(self) -> float:
        """Seconds since the start, evaluations and compiling included."""
        return time.perf_counter() - self._started

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the training steps, without the first one, which compiles."""
        if not self._timed_steps:
            return math.nan
        return self._speedometer.tokens_per_second(self._timed_seconds / self._timed_steps)

    def add_step(self, dispatched: Dispatched) -> None:
        """Waits for a step, and writes its record."""
        metrics, loss = dispatched.metrics, float(dispatched.metrics.loss)
        seconds = time.perf_counter() - self._resumed
        self._resumed = time.perf_counter()
        is_first = not self.train
        if is_first:
            self.compile_seconds = seconds
        else:
            self._timed_steps, self._timed_seconds = self._timed_steps + 1, self._timed_seconds + seconds
            self._window = [*self._window, seconds][-max(self._log_every, _SHORTEST_WINDOW_STEPS) :]
        self.train.append((dispatched.step, loss))
        leaf = int(metrics["nonfinite_leaf"])
        is_finite = math.isfinite(loss) and leaf < 0
        self.num_nonfinite_in_a_row = 0 if is_finite else self.num_nonfinite_in_a_row + 1
        self.nonfinite_leaf = None if leaf < 0 else self._param_names[leaf]
        self.num_skipped_steps = int(metrics["num_skipped_steps"])
        # A skipped update leaves the optimizer's count of steps where it was.
        num_updates = dispatched.step - 1 - self.num_skipped_steps + bool(metrics["skipped"])
        mean_seconds = float(np.mean(self._window)) if self._window else None
        self._write(
            {
                "kind": "train",
                "step": dispatched.step,
                "loss": loss,
                "grad_norm": float(metrics["grad_norm"]),
                "param_norm": None if dispatched.param_norm is None else float(dispatched.param_norm),
                "learning_rate": self._schedule and float(self._schedule(num_updates)),
                "tokens": dispatched.step * self._speedometer.num_tokens,
                "tokens_per_second": mean_seconds and self._speedometer.tokens_per_second(mean_seconds),
                "mfu": mean_seconds and self._speedometer.mfu(mean_seconds),
                "per_device_memory_bytes": device_memory_bytes(metrics.loss.addressable_shards[0].device),
                "step_seconds": None if is_first else seconds,
                "data_wait_seconds": dispatched.data_wait_seconds,
                "skipped": bool(metrics["skipped"]),
                "num_skipped_steps": self.num_skipped_steps,
                "nonfinite_leaf": self.nonfinite_leaf,
                "loss_scale": float(metrics["loss_scale"]),
                "noise_scale": self._noise.update(
                    grad_norm=float(metrics["grad_norm"]),
                    small_grad_norm_sq=metrics["small_grad_norm_sq"],
                    num_small_grads=metrics["num_small_grads"],
                    batch_size=self._speedometer.batch_size,
                ),
            }
        )

    def add_validation(self, step: int, loss: float, ema_loss: float | None = None) -> None:
        """Writes the validation loss after `step` steps, and restarts the timing of steps."""
        self.validation.append((step, loss))
        self._write({"kind": "validation", "step": step, "loss": loss, "ema_loss": ema_loss})
        self.resume_clock()

    def resume_clock(self) -> None:
        """Restarts the timing of steps, without the time since the last one."""
        self._resumed = time.perf_counter()

    def _write(self, record: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink(record)


def per_device_bytes(tree: Any) -> int:
    """Returns the bytes of a tree of arrays on one device, its shards."""
    return sum(_shard_bytes(x) for x in jax.tree.leaves(tree))


def device_memory_bytes(device: Any) -> int:
    """Returns the peak memory in use on a device, or the bytes of live arrays where the backend has no count (CPU)."""
    stats = device.memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    return sum(_shard_bytes(x) for x in jax.live_arrays(device.platform) if device in x.sharding.device_set)


def _shard_bytes(x: jax.Array) -> int:
    # Not by `addressable_shards`: looking at a shard's data makes an array of it, which then counts as live itself.
    return x.nbytes * math.prod(x.sharding.shard_shape(x.shape)) // max(x.size, 1)
