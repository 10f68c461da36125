"""Metrics of a training run: reads them from the devices, adds speed and memory, and passes them to the writers."""

import collections
import dataclasses
import functools
import math
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from zero_jax.core.tree import leaves_by_name, shard_bytes
from zero_jax.sharding.topology import hardware_of
from zero_jax.training import MeshLoss, Metrics, NoiseScale, StepLoss, TrainState, ZeroConfig, trained_params
from zero_jax.transforms import training_flops

Log = Callable[[str], None]

# The entries of the records. An entry of a loss function's aux that has such a name is recorded as `aux/NAME`.
FIELDS = frozenset(
    "kind step loss ema_loss grad_norm param_norm learning_rate tokens examples tokens_per_second examples_per_second "
    "mfu per_device_memory_bytes step_seconds data_wait_seconds skipped num_skipped_steps nonfinite_leaf loss_scale "
    "noise_scale".split()
)
# The time between two steps alone is too noisy.
_SHORTEST_WINDOW_STEPS = 10
# The latest losses, in memory; those before are in the run's records.
_losses = functools.partial(collections.deque[tuple[int, float]], maxlen=1_000_000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatched:
    """A step that was dispatched to the devices, and not yet waited for."""

    step: int  # from 1
    metrics: Metrics
    param_norm: jax.Array | None  # of the params after it; None where it is not logged
    data_wait_seconds: float  # for its batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speedometer:
    """The work of a step over all devices, for throughput and MFU."""

    batch_size: int
    unit: str  # what throughput counts: `tokens`, or `examples` of a model that is not about tokens
    num_units: int  # of these in a step
    flops: int  # without rematerialization
    peak_flops_per_second: float | None  # None where it is not known (a CPU)

    def mfu(self, step_seconds: float) -> float | None:
        """Returns the model FLOPs utilization for a step time (Chowdhery et al. 2022, appendix B)."""
        return None if self.peak_flops_per_second is None else self.flops / step_seconds / self.peak_flops_per_second


def make_speedometer(
    loss_fn: Callable[..., Any] | MeshLoss,
    tx: optax.GradientTransformation,
    state: TrainState,
    data: Any,
    *,
    mesh: Mesh,
    config: ZeroConfig,
) -> Speedometer:
    """Counts the operations of a step on the batches of `data`, a `RunInput`."""
    step_loss = StepLoss.of(loss_fn, state.variables, mesh=mesh, config=config)
    loss = step_loss.program.trace(*step_loss.shapes(state.variables, data.batch_shapes)).closed
    trained = trained_params(tx, state, mesh=mesh, config=config)
    hardware = hardware_of(mesh.devices.flat[0])
    unit, num_units = ("examples", data.batch_size) if data.num_tokens is None else ("tokens", data.num_tokens)
    return Speedometer(
        batch_size=data.batch_size,
        unit=unit,
        num_units=num_units,
        # After the params come model state, batch and key, which have no gradients.
        flops=training_flops(loss, trained + [False] * (len(loss.in_avals) - len(trained))),
        peak_flops_per_second=None if hardware is None else mesh.size * hardware.flops_per_second,
    )


@dataclasses.dataclass(kw_only=True, eq=False)
class Progress:
    """Reads the metrics of steps from the devices, and sums up the run; its clock starts when it is made."""

    # Called with the records, dicts of metrics with a `kind` and a `step`
    sinks: Sequence[Callable[[Mapping[str, Any]], None]]
    speedometer: Speedometer  # work of a step
    schedule: Callable[[int], Any] | None  # the learning rate by the number of updates; None if it is not known
    param_names: Sequence[str]  # paths of the params, in the order of their leaves
    noise: NoiseScale  # the gradient noise scale
    log_every: int  # steps that the throughput is averaged over
    own: Callable[[Any], Mapping[str, float]]  # returns what to record of a loss function's aux, by name
    compile_seconds: float = 0.0  # time of the first step of this process, which is mostly compiling
    num_nonfinite_in_a_row: int = 0  # the latest steps whose loss or gradients were not finite
    num_skipped_steps: int = 0  # updates skipped so far
    # Path of the first param whose gradient was not finite in the latest step, or None
    nonfinite_leaf: str | None = None
    # Step and loss of the training steps of this process
    train: collections.deque[tuple[int, float]] = dataclasses.field(default_factory=_losses)
    validation: collections.deque[tuple[int, float]] = dataclasses.field(default_factory=_losses)  # of its evaluations
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the record of the latest training step
    # The figures of the latest evaluation, with its step
    figures: tuple[int, Mapping[str, float]] = (-1, types.MappingProxyType({}))

    def __post_init__(self) -> None:
        self._started = self._resumed = time.perf_counter()
        self._timed_steps, self._timed_seconds = 0, 0.0
        self._window: list[float] = []

    @property
    def seconds(self) -> float:
        """Seconds since the start, evaluations and compiling included."""
        return time.perf_counter() - self._started

    @property
    def throughput(self) -> dict[str, float]:
        """Throughput of the training steps, without the first one, which compiles: `tokens_per_second`, for example."""
        meter = self.speedometer
        speed = self._timed_steps * meter.num_units / self._timed_seconds if self._timed_steps else math.nan
        return {f"{meter.unit}_per_second": speed}

    def add_step(self, dispatched: Dispatched) -> None:
        """Waits for a step, and writes its record."""
        metrics, loss = dispatched.metrics, float(dispatched.metrics.loss)
        # After the loss is read, which waits for the step.
        seconds = time.perf_counter() - self._resumed
        self._resumed = time.perf_counter()
        is_first = not self.train
        if is_first:
            self.compile_seconds = seconds
        else:
            self._timed_steps, self._timed_seconds = self._timed_steps + 1, self._timed_seconds + seconds
            self._window = [*self._window, seconds][-max(self.log_every, _SHORTEST_WINDOW_STEPS) :]
        self.train.append((dispatched.step, loss))
        leaf = int(metrics["nonfinite_leaf"])
        is_finite = math.isfinite(loss) and leaf < 0
        # Of a skipped step the loss may be finite, and its gradient not.
        self.num_nonfinite_in_a_row = 0 if is_finite else self.num_nonfinite_in_a_row + 1
        self.nonfinite_leaf = None if leaf < 0 else self.param_names[leaf]
        self.num_skipped_steps = int(metrics["num_skipped_steps"])
        # A skipped update leaves the optimizer's count of steps where it was.
        num_updates = dispatched.step - 1 - self.num_skipped_steps + bool(metrics["skipped"])
        mean_seconds = float(np.mean(self._window)) if self._window else None
        meter = self.speedometer
        self.record = {
            "kind": "train",
            "step": dispatched.step,
            "loss": loss,
            **self.own(metrics.aux),
            "grad_norm": float(metrics["grad_norm"]),
            "param_norm": None if dispatched.param_norm is None else float(dispatched.param_norm),
            "learning_rate": self.schedule and float(self.schedule(num_updates)),
            meter.unit: dispatched.step * meter.num_units,
            f"{meter.unit}_per_second": mean_seconds and meter.num_units / mean_seconds,
            "mfu": mean_seconds and meter.mfu(mean_seconds),
            # Of a device of this process: others cannot be asked.
            "per_device_memory_bytes": device_memory_bytes(metrics.loss.addressable_shards[0].device),
            "step_seconds": None if is_first else seconds,
            "data_wait_seconds": dispatched.data_wait_seconds,
            "skipped": bool(metrics["skipped"]),
            "num_skipped_steps": self.num_skipped_steps,
            "nonfinite_leaf": self.nonfinite_leaf,
            "loss_scale": float(metrics["loss_scale"]),
            "noise_scale": self.noise.update(
                grad_norm=float(metrics["grad_norm"]),
                small_grad_norm_sq=metrics["small_grad_norm_sq"],
                num_small_grads=metrics["num_small_grads"],
                batch_size=meter.batch_size,
            ),
        }
        self._write(self.record)

    def add_validation(self, step: int, figures: Mapping[str, float]) -> None:
        """Writes the figures of a validation after `step` steps, and restarts the timing of steps."""
        self.validation.append((step, figures["loss"]))
        self.figures = step, figures
        self._write({"kind": "validation", "step": step, "loss": figures["loss"], "ema_loss": None, **figures})
        self.resume_clock()

    def metrics(self) -> dict[str, Any]:
        """Returns the record of the latest training step, with `validation/NAME` where that step was validated."""
        step, figures = self.figures
        is_validated = step == self.record["step"]
        return {**self.record, **({f"validation/{name}": x for name, x in figures.items()} if is_validated else {})}

    def resume_clock(self) -> None:
        """Restarts the timing of steps, without the time since the last one."""
        self._resumed = time.perf_counter()

    def _write(self, record: Mapping[str, Any]) -> None:
        for sink in self.sinks:
            sink(record)


def scalar_figures(aux: Any) -> dict[str, float]:
    """Returns the scalars of a loss function's aux by name, to be recorded beside the loss."""
    figures = {name: float(x) for name, x in leaves_by_name(aux).items() if _is_figure(x)}
    return {f"aux/{n}".removesuffix("/") if n in FIELDS or not n else n: x for n, x in figures.items()}


def unshown_leaves(aux: Any) -> list[str]:
    """Returns the leaves of an aux that are no scalars, and so not recorded, such as `logits float32[8, 10]`."""
    return [f"{name} {x.dtype}{list(x.shape)}" for name, x in leaves_by_name(aux).items() if not _is_figure(x)]


def _is_figure(x: Any) -> bool:
    is_real = any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))
    return is_real and x.ndim == 0


def per_device_bytes(tree: Any) -> int:
    """Returns the bytes of a tree of arrays on one device, its shards."""
    return sum(map(shard_bytes, jax.tree.leaves(tree)))


def device_memory_bytes(device: Any) -> int:
    """Returns the peak memory in use on a device, or the bytes of live arrays where the backend has no count (CPU)."""
    stats = device.memory_stats() or {}  # None on CPUs
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    return sum(shard_bytes(x) for x in jax.live_arrays(device.platform) if device in x.sharding.device_set)
