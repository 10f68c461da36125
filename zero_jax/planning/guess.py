"""What a setting needs by formula and by the trace of the loss: bytes on a device, seconds a step."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from zero_jax.analysis import LossTrace, memory, trace_loss
from zero_jax.core.tree import PyTree
from zero_jax.planning.job import batch_shapes
from zero_jax.planning.ranking import Estimated, Setting
from zero_jax.sharding import topology
from zero_jax.sharding.mesh import make_mesh
from zero_jax.sharding.precision import resolve_precision
from zero_jax.sharding.stages import sharded_groups
from zero_jax.training import MeshLoss, ZeroConfig, abstract_state
from zero_jax.transforms import Remat

# Of the peak, what matrix products reach in practice, and how much of the collectives over `data` something hides:
# figures to rank by, not to believe. Of a TPU's torus, a group of `model` spans one dim and uses its two directions,
# `data` two dims. A device's share of its host's PCIe carries residuals that are offloaded.
_EFFICIENCY = 0.5
_HIDDEN = 0.5
_MODEL_LINKS, _DATA_LINKS = 2, 4
_HOST_BYTES_PER_SECOND = 1.2e10
_MAX_MODEL = 16
_SECONDS_BETWEEN_LINES = 2
_SAME = 0.02  # policies whose figures differ by less are the same program to a search


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A remat policy of the search: what the loss function is called with."""

    loss_fn: Callable[..., Any] | MeshLoss
    remat: str | Remat


def model_sizes(name: str) -> tuple[int, ...]:
    """Returns the sizes of the axis `model` that keep it on fast links: within a host of GPUs, or dims of a torus.

    Args:
      name: a topology's name.
    """
    read = topology.parse(name)
    if read.hardware.platform != "tpu":
        return _divisors(read.shape[0])
    shape = [size for size in read.shape if size > 1]
    sizes = {size for extent in shape for size in _divisors(extent)}
    sizes |= {one * other for i, one in enumerate(shape) for other in shape[i + 1 :]}
    return tuple(sorted(size for size in sizes | {1} if size <= _MAX_MODEL))


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, number + 1) if number % size == 0)


class Guess:
    """Estimates settings from what the model, its optimizer and the hardware are."""

    def __init__(
        self,
        policies: Mapping[str, Policy],
        init_fn: Callable[[jax.Array], PyTree],
        tx: optax.GradientTransformation,
        *,
        batch: PyTree,
        name: str,
        config: ZeroConfig,
        temporaries: Callable[[Setting], float] | None = None,
        log: Callable[[str], None] = lambda line: None,
    ):
        self.policies, self.init_fn, self.tx, self.batch = policies, init_fn, tx, batch_shapes(batch)
        self.devices = topology.devices(name)
        self.num_devices, self.hardware = len(self.devices), topology.parse(name).hardware
        self.num_slices = topology.parse(name).num_slices
        self.batch_size = max((x.shape[0] for x in jax.tree.leaves(self.batch) if x.ndim), default=1)
        self.temporaries = temporaries
        self.log, self.told_at = log, -math.inf
        self.config = dataclasses.replace(config, stage=0, num_microbatches=1)
        self.has_master = resolve_precision(config.precision).has_master
        # K and psi are the same in every setting: read once for a size of `model`, from the state of one share of it.
        self.sizes = functools.cache(self._sizes)
        self.trace = functools.cache(self._trace)

    def mesh(self, model: int) -> Any:
        """Returns a mesh of one device for each share of the model."""
        return make_mesh(devices=self.devices[:model], model=model)

    def _sizes(self, model: int) -> tuple[memory.MemoryEstimate, float]:
        """Returns the estimate of a state, and the params that one share of the model holds."""
        mesh = self.mesh(model)
        state = abstract_state(self.init_fn, self.tx, mesh=mesh, config=self.config)
        sizes = memory.estimate(state, mesh=mesh, config=self.config, tx=self.tx)
        return sizes, sizes.by_group["params"] / sizes.param_bytes

    def _trace(self, remat: str, model: int) -> LossTrace:
        """Traces a step of the whole batch on one device for each share of the model."""
        if time.monotonic() > self.told_at + _SECONDS_BETWEEN_LINES:
            self.log(f"tracing the loss with remat={remat}, model={model}")
            self.told_at = time.monotonic()
        policy, mesh = self.policies[remat], self.mesh(model)
        config = dataclasses.replace(self.config, remat=policy.remat)
        params = jax.eval_shape(self.init_fn, jax.eval_shape(lambda: jax.random.key(0)))
        return trace_loss(policy.loss_fn, params, self.batch, mesh=mesh, config=config)

    def splits(self) -> bool:
        """Tells whether the params have specs for the axis `model`."""
        return self.num_devices > 1 and self._split(2)

    def _split(self, model: int) -> bool:
        try:
            (_, shared), (_, whole) = self.sizes(model), self.sizes(1)
        except ValueError:  # specs that do not fit this size are specs
            return True
        return shared < whole

    def refusal(self, model: int) -> str:
        """Says why the params do not split into so many shares; empty where they do."""
        try:
            self.sizes(model)
        except ValueError as error:
            return str(error)
        return ""

    def same_policies(self, model: int) -> dict[str, str]:
        """Returns the policies that need and send what an earlier one does, each with that one."""
        seen: dict[str, tuple[float, ...]] = {}
        same: dict[str, str] = {}
        for name in self.policies:
            try:
                traced = self.trace(name, model)
            except ValueError:
                continue
            sent = sum(move.sent_bytes * move.times for move in traced.moves)
            held = traced.residuals.device_bytes, traced.residuals.host_bytes, traced.peak_bytes
            figures = (sent, traced.flops, *held)
            alike = (one for one, others in seen.items() if np.allclose(figures, others, rtol=_SAME, atol=0))
            first = next(alike, None)
            if first is None:
                seen[name] = figures
            else:
                same[name] = first
        return same

    def estimate(self, setting: Setting) -> Estimated:
        """Estimates bytes per device and seconds a step.

        Raises:
          ValueError: a setting that the model does not admit.
        """
        state, grads, others = self.state_bytes(setting), self.grad_bytes(setting), self.other_bytes(setting)
        note = f"state {state / 1e9:.1f}, gradients {grads / 1e9:.1f}, others {others / 1e9:.1f}"
        return Estimated(bytes=state + grads + others, seconds=self.seconds(setting), note=note)

    def state_bytes(self, setting: Setting) -> float:
        """Bytes of the train state."""
        groups, (sizes, num_params) = sharded_groups(setting.stage), self.sizes(setting.model)
        optimizer = sizes.optimizer_bytes / (setting.data if "opt_state" in groups else 1)
        # Master params that are sharded as the params would be need no low-precision copy beside them.
        whole = 0.0 if self.has_master and "params" in groups else sizes.param_bytes
        model_state = sizes.by_group.get("model_state", 0.0) / (setting.data if "model_state" in groups else 1)
        return num_params * (optimizer + whole / (setting.data if "params" in groups else 1)) + model_state

    def grad_bytes(self, setting: Setting) -> float:
        """Bytes of gradients, and of their float32 sums over microbatches."""
        (sizes, num_params), share = self.sizes(setting.model), 1 / setting.data
        accumulates = setting.num_microbatches > 1
        is_sharded = "grads" in sharded_groups(setting.stage) or (
            "opt_state" in sharded_groups(setting.stage) and not accumulates
        )
        return num_params * (sizes.grad_bytes + 4 * accumulates) * (share if is_sharded else 1)

    def other_bytes(self, setting: Setting) -> float:
        """Bytes of activations, and of params gathered for their use."""
        if self.temporaries is not None:
            return self.temporaries(setting)
        traced = self.trace(setting.remat, setting.model)
        parts = setting.replica * setting.data * setting.num_microbatches
        gathered = traced.param_bytes if "params" in sharded_groups(setting.stage) else 0.0
        return traced.peak_bytes / parts + gathered

    def seconds(self, setting: Setting) -> float:
        """Seconds of a step, roughly."""
        hardware, (sizes, num_params), k = self.hardware, self.sizes(setting.model), setting.num_microbatches
        traced = self.trace(setting.remat, setting.model)
        compute = traced.flops / setting.num_devices / (hardware.flops_per_second * _EFFICIENCY)
        groups = sharded_groups(setting.stage)
        reduces = k if "grads" in groups else 1
        gathers = k * (1 if setting.keep_gathered else 2) if "params" in groups else 1
        moved = num_params * sizes.param_bytes * (reduces + gathers) * (setting.data - 1) / setting.data
        copies = num_params * sizes.grad_bytes * 2 * (setting.replica - 1) / setting.replica / setting.data
        links = lambda number: number if hardware.platform == "tpu" else 1  # noqa: E731
        inside = links(_DATA_LINKS) * hardware.link_bytes_per_second
        spans_slices = setting.data * setting.model > self.num_devices // self.num_slices
        # Hierarchical collectives: the network moves 1 / (devices of a slice) of the bytes, at its own speed.
        network = moved * self.num_slices / self.num_devices * setting.model if spans_slices else 0.0
        outside = (copies if self.num_slices > 1 else 0.0) + network
        comms = (moved + (0 if self.num_slices > 1 else copies)) / inside + outside / hardware.network_bytes_per_second
        # A block waits for its sums over `model`: nothing else is there to be done.
        parts = setting.replica * setting.data
        sent = sum(move.sent_bytes * move.times for move in traced.moves) / parts
        waits = sent / (links(_MODEL_LINKS) * hardware.link_bytes_per_second)
        host = 2 * traced.residuals.host_bytes / parts / _HOST_BYTES_PER_SECOND
        return max(max(compute, comms) + (1 - _HIDDEN) * min(compute, comms) + waits, host)
