"""Estimates bytes per device and seconds of a step for settings, by formula and from a trace of the loss."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.analysis import LossTrace, comms, memory, trace_loss
from zero_jax.core.tree import key_shape
from zero_jax.planning.errors import SettingRefused, refusing
from zero_jax.planning.job import Job
from zero_jax.planning.links import MeshLinks
from zero_jax.planning.ranking import Candidate, Estimated
from zero_jax.planning.report import attentions_of
from zero_jax.planning.roofline import Roofline
from zero_jax.sharding import topology
from zero_jax.sharding.mesh import axis_size, make_mesh
from zero_jax.sharding.precision import resolve_precision
from zero_jax.sharding.stages import sharded_groups
from zero_jax.training import MeshLoss, Offload, ZeroConfig, abstract_state, step_options
from zero_jax.transforms import Remat, resolve_remat

_SUM_BYTES = 4  # gradients are summed over microbatches in float32
_SECONDS_BETWEEN_LINES = 2
_SAME_TOLERANCE = 0.02  # policies whose figures differ by less count as the same program
_UNQUANTIZED, _ON_DEVICES = (
    {field.name: None for field in dataclasses.fields(ZeroConfig) if field.name.startswith(prefix)}
    for prefix in ("quantize", "offload")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A remat policy to try, with the loss function that it applies to."""

    loss_fn: Callable[..., Any] | MeshLoss
    remat: str | Remat


def setting_config(config: ZeroConfig, setting: Candidate) -> ZeroConfig:
    """Returns a config with the settings of a candidate, but for its remat policy.

    Raises:
      ValueError: settings that do not go together.
    """
    return dataclasses.replace(
        config,
        stage=setting.stage,
        num_microbatches=setting.num_microbatches,
        keep_gathered=setting.keep_gathered,
        secondary=setting.secondary,
        attention=setting.attention,
        overlap=setting.overlap,
        offload=config.offload or setting.offload,
        **({} if setting.quantize else _UNQUANTIZED),
    )


class Estimator:
    """Estimates memory and time of settings for a job.

    Args:
      job: the model, its optimizer, batch and topology; its stage, mesh axes, microbatches and remat are not used.
      policies: the remat policies by name.
      temporaries: bytes per device of activations and gathered params; None estimates them.
      log: called with each line of progress.
    """

    def __init__(
        self,
        job: Job,
        policies: Mapping[str, Policy],
        *,
        temporaries: Callable[[Candidate], float] | None = None,
        log: Callable[[str], None] = lambda line: None,
    ):
        self.job, self.policies, self.temporaries, self.log = job, policies, temporaries, log
        self.logged_at = -math.inf
        parsed = topology.parse(job.topology)
        self.topology, self.hardware = parsed, parsed.hardware
        self.devices = topology.devices(job.topology)
        self.num_devices = len(self.devices)
        with_options, without = (
            step_options(self.mesh(1), dataclasses.replace(job.config, overlap=overlap, secondary=False)).options
            for overlap in (True, False)
        )
        self.has_overlap = with_options != without and self.num_devices > 1
        self.rooflines = {overlap: Roofline(parsed, overlaps=overlap and self.has_overlap) for overlap in (True, False)}
        self.batch_size = job.batch_size
        self.offload = job.config.resolved_offload() or Offload()
        # Host memory is counted by `host_bytes`, quantized traffic by `sent_shares`.
        plain = {"stage": 0, "num_microbatches": 1, "secondary": False, **_UNQUANTIZED, **_ON_DEVICES}
        self.config = dataclasses.replace(job.config, **plain)
        self.precision = resolve_precision(self.config.precision)
        # Bytes per param and the number of params depend on the size of `model` alone, the trace on the policy too.
        self.sizes = functools.cache(self._sizes)
        self.offloaded = functools.cache(self._offloaded)
        self.trace = functools.cache(self._trace)
        self.links = functools.cache(lambda **axes: MeshLinks(make_mesh(devices=self.devices, **axes), parsed))
        self.sent_bytes = functools.cache(self._sent_bytes)

    def mesh(self, model: int) -> Any:
        """Returns a mesh of `model` devices, all of them on the axis `model`."""
        return make_mesh(devices=self.devices[:model], model=model)

    def _sizes(self, model: int) -> tuple[memory.MemoryEstimate, float]:
        """Returns the memory estimate on `model` devices, and the number of params per device."""
        mesh = self.mesh(model)
        state = abstract_state(self.job.init_fn, self.job.tx, mesh=mesh, config=self.config)
        sizes = memory.estimate(state, mesh=mesh, config=self.config, tx=self.job.tx)
        return sizes, sizes.by_group["params"] / sizes.param_bytes

    def _trace(self, remat: str, model: int, attention: str) -> LossTrace:
        """Traces the loss of the global batch on `model` devices."""
        if time.monotonic() > self.logged_at + _SECONDS_BETWEEN_LINES:
            self.log(f"tracing the loss with remat={remat}, model={model}, attention={attention}")
            self.logged_at = time.monotonic()
        policy, mesh = self.policies[remat], self.mesh(model)
        config = dataclasses.replace(self.config, remat=policy.remat, attention=attention)
        params = jax.eval_shape(self.job.init_fn, key_shape())
        return trace_loss(policy.loss_fn, params, self.job.batch, mesh=mesh, config=config)

    def check(self, model: int) -> None:
        """Traces the loss functions as they are, without remat, on `model` devices; raises what they raise."""
        plain = {policy.loss_fn: "" for policy in self.policies.values()}
        plain |= {policy.loss_fn: name for name, policy in self.policies.items() if resolve_remat(policy.remat).is_own}
        params, mesh = jax.eval_shape(self.job.init_fn, key_shape()), self.mesh(model)
        for loss_fn, name in plain.items():
            if name:
                self.trace(name, model, "own")
            else:
                config = dataclasses.replace(self.config, remat="own", attention="own")
                trace_loss(loss_fn, params, self.job.batch, mesh=mesh, config=config)

    def has_model_specs(self) -> bool:
        """Returns whether the params have specs for the axis `model`."""
        if self.num_devices == 1:
            return False
        try:
            (_, num_sharded), (_, num_params) = self.sizes(2), self.sizes(1)
        except ValueError:  # there are specs, but they do not divide by 2
            return True
        return num_sharded < num_params

    def has_attention_to_fuse(self) -> bool:
        """Returns whether the model has unfused attention for which the hardware has a fused kernel."""
        mesh, config = self.mesh(1), dataclasses.replace(self.config, attention="own")
        for policy in self.policies.values():
            job = dataclasses.replace(self.job, loss_fn=policy.loss_fn, config=config)
            try:
                with refusing():
                    if attentions_of(job, job.state(mesh), mesh).num_fused:
                        return True
            except SettingRefused:  # the settings of this loss function are rejected with that reason
                continue
        return False

    def refusal(self, model: int) -> str:
        """Returns why the model cannot be sharded over an axis `model` of this size; empty if it can."""
        try:
            self.sizes(model)
            self.check(model)
        except ValueError as error:
            return str(error)
        return ""

    def same_policies(self, model: int, attentions: Sequence[str]) -> dict[str, str]:
        """Returns the policies that equal an earlier one in memory and traffic, with the name of that one."""
        figures: dict[str, tuple[float, ...]] = {}
        same: dict[str, str] = {}
        for name in self.policies:
            try:
                with refusing():
                    traces = [self.trace(name, model, attention) for attention in attentions]
            except SettingRefused:
                continue
            current = tuple(float(x) for traced in traces for x in _figures(traced))  # integers are too large for numpy
            equal = [x for x in figures if np.allclose(current, figures[x], rtol=_SAME_TOLERANCE, atol=0)]
            if equal:
                same[name] = equal[0]
            else:
                figures[name] = current
        return same

    def trace_of(self, setting: Candidate) -> LossTrace:
        """Returns the trace of the loss for a setting."""
        return self.trace(setting.remat, setting.model, setting.attention)

    def estimate(self, setting: Candidate) -> Estimated:
        """Estimates bytes per device and seconds of a step.

        Raises:
          SettingRefused: the model cannot be trained with this setting.
        """
        with refusing():
            return self._estimate(setting)

    def _estimate(self, setting: Candidate) -> Estimated:
        state, grads, other = self.state_bytes(setting), self.grad_bytes(setting), self.other_bytes(setting)
        note = f"state {state / 1e9:.1f}, gradients {grads / 1e9:.1f}, others {other / 1e9:.1f}"
        parts = self.num_parts(setting) * setting.num_microbatches
        host_bytes = self.host_bytes(setting) + self.trace_of(setting).residuals.host_bytes / parts
        return Estimated(bytes=state + grads + other, seconds=self.seconds(setting), note=note, host_bytes=host_bytes)

    def num_parts(self, setting: Candidate) -> float:
        """Returns the ratio of the traced batch to the examples of a device."""
        return setting.replica * setting.data * self.batch_size / setting.batch_size

    def state_bytes(self, setting: Candidate) -> float:
        """Returns bytes per device of the train state."""
        groups, (sizes, num_params) = sharded_groups(setting.stage), self.sizes(setting.model)
        optimizer = sizes.optimizer_bytes / (setting.data if "opt_state" in groups else 1)
        # If params and master params are sharded alike, there is no low-precision copy.
        are_masters = self.precision.has_master and "params" in groups and not setting.secondary
        param_bytes = 0.0 if are_masters else sizes.param_bytes
        num_shards = self.num_param_shards(setting)
        model_state = sizes.by_group.get("model_state", 0.0) / num_shards
        window_bytes = 2 * self.offload.window_bytes if setting.offload else 0
        errors = self.sent_bytes(_alike(setting))[3] if setting.quantize else 0.0
        total = num_params * (optimizer + param_bytes / num_shards) + model_state + errors
        return total - self.host_bytes(setting) + window_bytes

    def num_param_shards(self, setting: Candidate) -> int:
        """Returns the devices that params are sharded over."""
        if "params" not in sharded_groups(setting.stage):
            return 1
        slices = self.topology.num_slices
        return setting.data // (slices // math.gcd(slices, setting.replica) if setting.secondary else 1)

    def host_bytes(self, setting: Candidate) -> float:
        """Returns bytes of the train state in host memory for each device."""
        is_sharded = "opt_state" in sharded_groups(setting.stage)
        stage = 2 if setting.secondary else setting.stage  # the secondary shard is a copy, and stays on the device
        return self.offloaded(setting.model, stage, setting.offload) / (setting.data if is_sharded else 1)

    def _offloaded(self, model: int, stage: int, offloaded: Any) -> float:
        """Returns the bytes in host memory for each of `model` devices."""
        if offloaded is None:
            return 0.0
        offload = dataclasses.replace(self.offload, what=offloaded)
        mesh, config = self.mesh(model), dataclasses.replace(self.config, stage=stage, offload=offload)
        state = abstract_state(self.job.init_fn, self.job.tx, mesh=mesh, config=config)
        return memory.estimate(state, mesh=mesh, config=config, tx=self.job.tx).host_bytes

    def grad_bytes(self, setting: Candidate) -> float:
        """Returns bytes per device of gradients, and of their float32 sums over microbatches."""
        (sizes, num_params), share = self.sizes(setting.model), 1 / self.num_grad_shards(setting)
        accumulates = setting.num_microbatches > 1
        return num_params * (sizes.grad_bytes + 4 * accumulates) * (share if self.scatters_grads(setting) else 1)

    def num_grad_shards(self, setting: Candidate) -> int:
        """Returns the devices that gradients are scattered over, before they are summed over copies of the params."""
        return self.num_param_shards(setting) if setting.secondary else setting.data

    def other_bytes(self, setting: Candidate) -> float:
        """Returns bytes per device of activations and gathered params."""
        if self.temporaries is not None:
            return self.temporaries(setting)
        traced = self.trace_of(setting)
        parts = self.num_parts(setting) * setting.num_microbatches
        gathered = traced.param_bytes if "params" in sharded_groups(setting.stage) else 0.0
        gathered *= 2 if setting.overlap and self.has_overlap else 1  # those of the next layer arrive beside them
        return traced.peak_bytes / parts + gathered

    def seconds(self, setting: Candidate) -> float:
        """Returns the approximate seconds of a step."""
        traced, roofline = self.trace_of(setting), self.rooflines[setting.overlap]
        parts = self.num_parts(setting)
        compute = setting.num_microbatches * roofline.compute_seconds(traced.kernels, parts * setting.num_microbatches)
        compute += roofline.moved_seconds(self.update_bytes(setting))
        compute += roofline.moved_seconds(self.cleared_bytes(setting), roofline.efficiency.unfused)
        compute += roofline.moved_seconds(self.coded_bytes(setting))
        waits = roofline.exposed_seconds(self.data_seconds(setting), compute) + self.model_seconds(setting)
        step = max(compute + waits, roofline.host_seconds(traced, parts))
        # The update fetches and writes back at once, on GPUs three of four times (docs/offload.md). Params are fetched
        # for each use, which waits for them.
        on_host, updated = self.host_bytes(setting), 0.0
        if setting.offload != "model_state":
            updated = on_host * (4 / 3 if self.hardware.platform == "cuda" else 1)
        if setting.offload == "all":
            on_host -= self.host_bytes(dataclasses.replace(setting, offload="optimizer"))
        fetched = on_host if setting.offload in ("all", "model_state") else 0.0
        copied = updated + setting.num_microbatches * (1 if setting.keep_gathered else 2) * fetched
        return step + copied / self.hardware.host_bytes_per_second

    def update_bytes(self, setting: Candidate) -> float:
        """Returns the bytes per device that the update and the accumulation of gradients move in a step."""
        (sizes, num_params), groups = self.sizes(setting.model), sharded_groups(setting.stage)
        share = {group: 1 / setting.data if group in groups else 1 for group in ("grads", "opt_state")}
        share["params"] = 1 / self.num_param_shards(setting)
        update = share["opt_state"] * (2 * sizes.optimizer_bytes + sizes.grad_bytes)
        casts = share["params"] * 2 * sizes.param_bytes
        k = setting.num_microbatches
        sums = k * share["grads"] * (2 * _SUM_BYTES + sizes.grad_bytes) if k > 1 else 0.0
        return num_params * (update + casts + sums)

    def cleared_bytes(self, setting: Candidate) -> float:
        """Returns the bytes per device of gradients that are set to 0 before a loop over layers writes them."""
        (sizes, num_params), k = self.sizes(setting.model), setting.num_microbatches
        share = 1 / self.num_grad_shards(setting) if self.scatters_grads(setting) else 1
        return k * num_params * share * sizes.grad_bytes

    def scatters_grads(self, setting: Candidate) -> bool:
        """Returns whether gradients are reduce-scattered one by one, not only when all are summed."""
        groups = sharded_groups(setting.stage)
        return "grads" in groups or ("opt_state" in groups and setting.num_microbatches == 1)

    def moved_bytes(self, setting: Candidate) -> tuple[float, float]:
        """Returns the bytes of params that are gathered in a step, and of gradients that are reduced, unquantized."""
        (sizes, num_params), groups = self.sizes(setting.model), sharded_groups(setting.stage)
        k = setting.num_microbatches
        gathers = k * (1 if setting.keep_gathered else 2) if "params" in groups else 1
        reduced = num_params * self.reduced_bytes(setting)
        return num_params * gathers * sizes.param_bytes, (k if "grads" in groups else 1) * reduced

    def sent_shares(self, setting: Candidate) -> tuple[float, float, float]:
        """Returns the ratios of quantized to unquantized bytes: of gathers, of reductions, and between copies."""
        if not setting.quantize:
            return 1.0, 1.0, 1.0
        alike = _alike(setting)
        quantized, plain = self.sent_bytes(alike), self.sent_bytes(dataclasses.replace(alike, quantize=False))
        gathers, reduced, copies = (a / b if b else 1.0 for a, b in zip(quantized[:3], plain[:3], strict=True))
        return gathers, reduced, copies

    def _sent_bytes(self, setting: Candidate) -> tuple[float, float, float, float]:
        """Returns the bytes that a device sends by formula: in gathers, in reductions, and between copies.

        The fourth value are the bytes of `grad_errors` on a device.
        """
        mesh = self.links(replica=setting.replica, model=setting.model).mesh
        config = dataclasses.replace(setting_config(self.job.config, setting), **_ON_DEVICES)
        state = abstract_state(self.job.init_fn, self.job.tx, mesh=mesh, config=config)
        rows = comms.estimate(state, mesh=mesh, config=config, tx=self.job.tx).rows
        copies, sent = set(config.axes_of(mesh).copies), dict.fromkeys(("all-gather", "reduction", "copies"), 0.0)
        for row in rows:
            kind = "all-gather" if row.kind == "all-gather" else "reduction"
            sent["copies" if set(row.axes) <= copies else kind] += row.total_sent_bytes
        errors = (
            x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(state.grad_errors)
        )
        return sent["all-gather"], sent["reduction"], sent["copies"], float(sum(errors))

    def coded_bytes(self, setting: Candidate) -> float:
        """Returns the bytes per device that encoding and decoding read and write.

        The params of a shard are encoded, those of a gather decoded. Gradients are read twice, for scales and codes;
        their float32 sums are written and read.
        """
        (params, grads), (gathers, reduced, _) = self.moved_bytes(setting), self.sent_shares(setting)
        decoded = params * (gathers + 1) if gathers < 1 else 0.0
        return decoded + (grads * (2 * reduced + 6) if reduced < 1 else 0.0)

    def data_seconds(self, setting: Candidate) -> float:
        """Returns the seconds of the collectives over `data` and `replica`, hidden or not."""
        sizes, num_params = self.sizes(setting.model)
        links = self.links(replica=setting.replica, model=setting.model)
        config = setting_config(self.job.config, setting)
        axes = config.axes_of(links.mesh)
        inside = axes.of_params().data
        across = [axis for axis in axes.data if axis not in inside]
        reduced, num_shards = num_params * self.reduced_bytes(setting), axis_size(links.mesh, inside)
        (params, grads), shares = self.moved_bytes(setting), self.sent_shares(setting)
        seconds = links.gather_seconds(shares[0] * params, inside)
        seconds += links.gather_seconds(shares[1] * grads, inside, exchanges=shares[1] < 1)
        # Between copies of the params: gradients once a step, and new params unless `replica` makes the copies.
        seconds += shares[2] * links.gather_seconds((reduced + num_params * sizes.param_bytes) / num_shards, across)
        return seconds + 2 * shares[2] * links.gather_seconds(reduced / setting.data, axes.replica)

    def reduced_bytes(self, setting: Candidate) -> float:
        """Returns the bytes of a param's gradient as it is summed over devices."""
        if self.precision.reduce is not None:
            return jnp.dtype(self.precision.reduce).itemsize
        return _SUM_BYTES if setting.num_microbatches > 1 else self.sizes(setting.model)[0].grad_bytes

    def model_seconds(self, setting: Candidate) -> float:
        """Returns the seconds of the collectives over `model`; none is hidden, as each block waits for its sums."""
        traced = self.trace_of(setting)
        parts = self.num_parts(setting)
        links, seconds = self.links(replica=setting.replica, model=setting.model), 0.0
        for move in traced.moves:
            move_seconds = links.send_seconds(move.sent_bytes / (parts * setting.num_microbatches), move.axes)
            seconds += setting.num_microbatches * move.times * move_seconds
        return seconds


def _alike(setting: Candidate) -> Candidate:
    """Returns a canonical setting with the same shardings and traffic of state and gradients."""
    return dataclasses.replace(setting, remat="", attention="own", overlap=True, offload=None)


def _figures(traced: LossTrace) -> tuple[float, ...]:
    """Returns the figures by which remat policies are compared."""
    sent_bytes = sum(move.sent_bytes * move.times for move in traced.moves)
    residuals = traced.residuals
    return sent_bytes, traced.flops, residuals.device_bytes, residuals.host_bytes, traced.peak_bytes
