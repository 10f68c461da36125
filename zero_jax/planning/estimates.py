"""Estimates bytes and seconds of a step with a setting by formula: what a device stores, computes and sends."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.analysis import LossTrace, comms
from zero_jax.core.tree import shard_bytes
from zero_jax.planning.errors import SettingRefused, refusing
from zero_jax.planning.links import Links
from zero_jax.planning.ranking import Candidate, Figures, policy_name
from zero_jax.planning.report import FULL
from zero_jax.planning.traces import ON_DEVICES, ModelTraces, setting_config
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.stages import sharded_groups
from zero_jax.training import MEMORY_ROOM, abstract_state
from zero_jax.transforms import PipelineReport, Remat, Roofline, choose_values, resolve_remat, resolve_schedule

_SUM_BYTES = 4  # gradients are summed over microbatches in float32


class Estimator(ModelTraces):
    """Estimates memory and time of settings for a job."""

    @functools.cached_property
    def step(self) -> Callable[[Candidate], StepEstimate]:
        """Returns the step with a setting, which is made once."""
        return functools.cache(functools.partial(StepEstimate, self))

    def estimate(self, setting: Candidate) -> Figures:
        """Estimates bytes per device and seconds of a step; raises `SettingRefused` if it cannot be trained so."""
        with refusing():
            return self.step(setting).estimated()


class StepEstimate:
    """A step with a setting: what a device stores, computes and sends. Bytes are per device unless they are a param's.

    `model` has what is estimated once for all settings.
    """

    def __init__(self, model: Estimator, setting: Candidate):
        self.model, self.setting = model, setting
        self.k, self.groups = setting.num_microbatches, sharded_groups(setting.stage)
        self.sizes, num_params = model.sizes(setting.model)
        # The params of one share of the axis `model`, in a pipeline those of a stage. Params that are not of the layers
        # are on all stages, and ZeRO shards them over these, too.
        self.num_params = model.sizes(setting.model, setting.pipe)[1] if setting.pipe > 1 else num_params
        # The devices that each param is sharded over at most; in a pipeline, of the params of a stage.
        self.num_shards = setting.data * setting.pipe * self.num_params / num_params
        self.schedule = resolve_schedule(setting.pipeline)
        # How often a device runs its layers, forward and backward: for each microbatch, in a pipeline for those that
        # other stages wait for.
        self.num_runs = float(self.k) if setting.pipe == 1 else self.staged.num_runs(self.k)
        self.num_ticks = self.schedule.num_ticks(setting.pipe, self.k)
        # The ratio of the traced batch to the examples of a device.
        self.num_parts = setting.replica * setting.data * model.batch_size / setting.batch_size
        slices = model.topology.num_slices
        copies = slices // math.gcd(slices, setting.replica) if setting.secondary else 1
        # The devices that params are sharded over.
        self.num_param_shards = self.num_shards / copies if "params" in self.groups else 1
        # Before they are summed over copies of the params; one by one, or only when all microbatches are summed.
        num_grad_shards = self.num_param_shards if setting.secondary else self.num_shards
        scatters = "grads" in self.groups or ("opt_state" in self.groups and self.k == 1)
        # The part of the gradients that a device keeps when they are reduced.
        self.grad_share = 1 / num_grad_shards if scatters else 1
        narrow = 0.0 if self.k > 1 and self.adds_in_place else self.sizes.grad_bytes
        # With their float32 sums over microbatches.
        self.grad_bytes = self.num_params * (narrow + _SUM_BYTES * (self.k > 1)) * self.grad_share
        # Of a param's gradient as it is summed over devices.
        self.reduced_bytes = _SUM_BYTES if self.k > 1 else self.sizes.grad_bytes
        if model.precision.reduce is not None:
            self.reduced_bytes = jnp.dtype(model.precision.reduce).itemsize
        gathers = self.num_runs * (1 if setting.keep_gathered else 2) if "params" in self.groups else 1
        reductions = self.num_runs if "grads" in self.groups else 1
        # The share of params that do not move, as experts that stay sharded, and the seconds of the activations that go
        # to them and home; none is hidden, as experts wait for tokens.
        self.staying_share, self.expert_seconds = self._experts() if setting.experts else (0.0, 0.0)
        num_moved = self.num_params * (1 - self.staying_share)
        reduced = num_moved * self.reduced_bytes
        # Of params that are gathered, and of gradients that are reduced, unquantized.
        self.moved_bytes = num_moved * gathers * self.sizes.param_bytes, reductions * reduced

    @functools.cached_property
    def traced(self) -> LossTrace:
        """The trace of the loss, of `auto` with the values that this setting has memory for."""
        model, key = self.model, (self.setting.policy, self.setting.model, self.setting.attention)
        remat = resolve_remat(model.policies[self.setting.policy].remat)
        if remat.policy != "auto":
            return model.trace(*key)
        if self.setting.pipe > 1:
            raise SettingRefused(f"remat={self.setting.remat}: what stages of a pipeline keep is not chosen")
        costs, num_parts = model.value_costs(*key), self.num_parts * self.k
        budget_gb = remat.budget_gb
        if budget_gb is None:
            taken = self.state_bytes + self.grad_bytes + self.other_bytes(model.trace(*key, Remat(policy="full")))
            inputs = sum(block.input_bytes for block in costs) / num_parts
            budget_gb = max((1 - MEMORY_ROOM) * model.hardware.usable_bytes - taken + inputs, 0) / 1e9
        of_all = dataclasses.replace(remat, budget_gb=budget_gb * num_parts)
        return model.trace(*key, choose_values(costs, of_all, mesh=model.mesh(self.setting.model)).remat)

    @property
    def links(self) -> Links:
        """The links of the mesh."""
        return self.model.links(replica=self.setting.replica, model=self.setting.model, pipe=self.setting.pipe)

    @property
    def axes(self) -> Axes:
        """The roles of the axes of the mesh, of a stage where there are several."""
        return setting_config(self.model.job.config, self.setting).axes_of(self.links.mesh).of_stage

    def estimated(self) -> Figures:
        """Returns bytes per device and seconds of a step."""
        state, grads, other = self.state_bytes, self.grad_bytes, self.other_bytes()
        remat = resolve_remat(self.model.policies[self.setting.policy].remat)
        return Figures(
            bytes=state + grads + other,
            seconds=self.seconds,
            note=f"state {state / 1e9:.1f}, gradients {grads / 1e9:.1f}, others {other / 1e9:.1f}",
            host_bytes=self.host_bytes + self.traced.residuals.host_bytes / (self.num_parts * self.k),
            fills=remat.policy == "auto" and remat.budget_gb is None,
        )

    @property
    def state_bytes(self) -> float:
        """Bytes of the train state."""
        optimizer = self.sizes.optimizer_bytes / (self.num_shards if "opt_state" in self.groups else 1)
        param_bytes = 0.0 if self.are_masters else self.sizes.param_bytes
        model_state = self.sizes.by_group.get("model_state", 0.0) / self.num_param_shards
        window_bytes = 2 * self.model.offload.window_bytes if self.setting.offload else 0
        errors = self._canonical().sent_bytes[3] if self.setting.quantize else 0.0
        total = self.num_params * (optimizer + param_bytes / self.num_param_shards) + model_state + errors
        return total - self.host_bytes + window_bytes

    @property
    def are_masters(self) -> bool:
        """Whether params are the master params, as both are sharded alike: no low-precision copy is stored."""
        return self.model.precision.has_master and "params" in self.groups and not self.setting.secondary

    @property
    def cast_bytes(self) -> float:
        """Bytes of the shards of params that a step casts before its first layer and keeps to its last gradient."""
        per_param = 0.0 if self.setting.offload == "all" else self.model.cast_bytes(from_masters=self.are_masters)
        return self.num_params * per_param / self.num_param_shards

    @property
    def host_bytes(self) -> float:
        """Bytes of the train state in host memory."""
        setting = self.setting
        stage = 2 if setting.secondary else setting.stage  # the secondary shard is a copy, and stays on the device
        num_devices = setting.pipe * (setting.data if "opt_state" in self.groups else 1)
        return self.model.offloaded(setting.model, stage, setting.offload) / num_devices

    def other_bytes(self, traced: LossTrace | None = None) -> float:
        """Returns the bytes of activations and gathered params, by another trace of the loss if one is given."""
        if self.model.temporaries is not None and traced is None:
            return self.model.temporaries(self.setting)
        traced = traced or self.traced
        how = {"are_sharded": "params" in self.groups, "scatters": self.grad_share < 1, "stays": self.staying_share}
        shards = traced.shard_bytes(casts=self.cast_bytes, grads=self.grad_bytes, num_microbatches=self.k)
        return self.activation_bytes(traced) + traced.whole_bytes(**how) + shards - self.grad_bytes

    def activation_bytes(self, traced: LossTrace) -> float:
        """Returns the bytes of activations: of a microbatch, and in a pipeline what stages keep of the others."""
        setting, num_parts = self.setting, self.num_parts * self.k
        if setting.pipe == 1:
            return traced.peak_bytes / num_parts
        residuals = traced.residuals.device_bytes / (num_parts * setting.pipe)
        num_kept = self.schedule.num_kept(setting.pipe, self.k)
        if self.recomputes:
            kept = num_kept * self.sent_per_run + residuals
        else:
            is_interleaved, num_groups = self.schedule.is_interleaved, self.schedule.num_groups
            kept = (num_kept / num_groups if is_interleaved else self.num_runs + 1) * residuals
        # Before and behind the layers is a microbatch in each stage, or the batch over all of them.
        others = (traced.peak_bytes - traced.residuals.device_bytes) / num_parts
        return kept + others * (1 if self.schedule.is_interleaved else self.k / setting.pipe)

    @property
    def seconds(self) -> float:
        """Seconds of the step, about."""
        setting, hardware, roofline = self.setting, self.model.hardware, self.model.rooflines[self.setting.overlap]
        compute = self.loss_seconds(roofline) + roofline.moved_seconds(self.update_bytes)
        # Gradients are set to 0 before a loop over layers writes them.
        cleared = self.num_whole_grads * self.num_params * self.grad_share * self.sizes.grad_bytes
        compute += roofline.moved_seconds(cleared, roofline.efficiency.unfused)
        compute += roofline.moved_seconds(self.coded_bytes, roofline.efficiency.compiled[1])  # no product is beside it
        # Where memory is full, the compiler's scheduler has no room to start a collective early.
        is_full = self.state_bytes + self.grad_bytes + self.other_bytes() > FULL * hardware.usable_bytes
        waits = self.data_seconds if is_full else roofline.exposed_seconds(self.data_seconds, compute)
        waits += self.pipe_seconds + self.expert_seconds
        # Of collectives over `model` none is hidden, as each block waits for its sums.
        for move in self.traced.moves:
            sent_bytes = move.sent_bytes / (self.num_parts * self.k)
            waits += self.num_runs / setting.pipe * move.times * self.links.send_seconds(sent_bytes, move.axes)
        step = roofline.with_host_seconds(compute + waits, self.traced.residuals.host_bytes / self.num_parts)
        # The update fetches and writes back at once, on GPUs one after the other (docs/offload.md). Params are fetched
        # for each use, which waits for them.
        on_host, updated = self.host_bytes, 0.0
        if setting.offload != "model_state":
            updated = on_host * (2 if hardware.platform == "cuda" else 1)
        if setting.offload == "all":
            on_host -= self.model.step(dataclasses.replace(setting, offload="optimizer")).host_bytes
        fetched = on_host if setting.offload in ("all", "model_state") else 0.0
        copied = updated + self.k * (1 if setting.keep_gathered else 2) * fetched
        return step + copied / hardware.host_bytes_per_second

    def loss_seconds(self, roofline: Roofline) -> float:
        """Returns the seconds of the loss and its gradient; in a pipeline, while it fills and runs empty, too."""
        kernels, num_parts, setting = self.traced.kernels, self.num_parts * self.k, self.setting
        if setting.pipe == 1:
            return self.k * roofline.compute_seconds(kernels, num_parts)
        (loop, *_) = self.staged.loops  # kernels do not tell where they are, but how often they run
        of_layers = [x for x in kernels if loop.stacked or x.times % loop.num_layers == 0]
        layers = roofline.compute_seconds(of_layers, num_parts) / setting.pipe
        others = roofline.compute_seconds(kernels, num_parts) - layers * setting.pipe
        again = 1 / 3 if self.recomputes else 0.0  # of a pass forward and one backward, which takes twice as long
        # Before and behind the layers is each microbatch in each stage, or the batch over all of them.
        others *= self.k if self.schedule.is_interleaved else self.k / setting.pipe
        return self.num_runs * layers * (1 + again) + others

    @property
    def staged(self) -> PipelineReport:
        """The stages of the pipeline, of as many microbatches as stages."""
        report = self.model.stages(self.setting.pipe, self.setting.pipeline)
        if report.why_none:
            raise SettingRefused(report.why_none)
        return report

    @property
    def recomputes(self) -> bool:
        """Whether a stage runs again in the backward pass, beside what the layers' own remat says."""
        policy = resolve_remat(self.model.policies[self.setting.policy].remat)
        return policy.is_own and any(x.recomputed for x in self.staged.loops)

    @property
    def sent_per_run(self) -> float:
        """Bytes of a microbatch that go from stage to stage."""
        whole = self.setting.pipe * sum(loop.bytes_per_tick for loop in self.staged.loops)
        return whole / (self.num_parts * self.k)

    @property
    def pipe_seconds(self) -> float:
        """Seconds of what goes from stage to stage, forward and backward; none is hidden, as the next stage waits."""
        if self.setting.pipe == 1:
            return 0.0
        pipe = setting_config(self.model.job.config, self.setting).axes_of(self.links.mesh).pipe
        return 2 * self.num_ticks * self.links.send_seconds(self.sent_per_run, pipe)

    @property
    def adds_in_place(self) -> bool:
        """Whether gradients are a device's own, which are added to those of other microbatches where they are made."""
        return "grads" not in self.groups and not self.model.config.noise_scale

    @property
    def num_whole_grads(self) -> float:
        """How often gradients are there for all layers."""
        return 1.0 if self.adds_in_place else self.num_runs

    @property
    def update_bytes(self) -> float:
        """Bytes that the update and the accumulation of gradients move."""
        sizes = self.sizes
        share = {group: 1 / self.num_shards if group in self.groups else 1 for group in ("grads", "opt_state")}
        update = share["opt_state"] * (2 * sizes.optimizer_bytes + sizes.grad_bytes)
        casts = 1 / self.num_param_shards * 2 * sizes.param_bytes
        sums = self.num_whole_grads * share["grads"] * (2 * _SUM_BYTES + sizes.grad_bytes) if self.k > 1 else 0.0
        return self.num_params * (update + casts + sums)

    @property
    def sent_shares(self) -> tuple[float, float, float]:
        """The ratios of quantized to unquantized bytes: of gathers, of reductions, and between copies."""
        if not self.setting.quantize:
            return 1.0, 1.0, 1.0
        quantized, plain = self._canonical().sent_bytes, self._canonical(quantize=False).sent_bytes
        gathers, reduced, copies = (a / b if b else 1.0 for a, b in zip(quantized[:3], plain[:3], strict=True))
        return gathers, reduced, copies

    def _canonical(self, **changes: Any) -> StepEstimate:
        """Returns the step of a canonical setting with the same shardings and traffic of state and gradients."""
        alike = dataclasses.replace(self.setting, remat="", loss="", attention="own", overlap=True, offload=None)
        return self.model.step(dataclasses.replace(alike, **changes))

    def _experts(self) -> tuple[float, float]:
        """Returns `staying_share` and `expert_seconds`, by a trace that recomputes all blocks; losses send the same."""
        setting, policies = self.setting, self.model.policies
        loss_fn = policies[policy_name(setting.remat, loss="")].loss_fn
        policy = next(name for name, policy in policies.items() if policy.loss_fn is loss_fn)
        fixed = {"batch_size": self.model.batch_size, "num_microbatches": 1, "keep_gathered": False, "overlap": True}
        alike = dataclasses.replace(setting, **fixed, remat="", loss="", attention="own", offload=None, quantize=False)
        share, seconds = self.model.experts(policy, alike)
        return share, seconds * setting.batch_size / self.model.batch_size

    @functools.cached_property
    def sent_bytes(self) -> tuple[float, float, float, float]:
        """What a device sends by formula: in gathers, in reductions, and between copies. The fourth: `grad_errors`."""
        job, mesh = self.model.job, self.links.mesh
        config = dataclasses.replace(setting_config(job.config, self.setting), **ON_DEVICES)
        state = abstract_state(job.init_fn, job.tx, mesh=mesh, config=config)
        copies, sent = set(config.axes_of(mesh).copies), dict.fromkeys(("all-gather", "reduction", "copies"), 0.0)
        for row in comms.estimate(state, mesh=mesh, config=config, tx=job.tx).rows:
            kind = "all-gather" if row.kind == "all-gather" else "reduction"
            sent["copies" if set(row.axes) <= copies else kind] += row.total_sent_bytes
        errors = map(shard_bytes, jax.tree.leaves(state.grad_errors))
        return sent["all-gather"], sent["reduction"], sent["copies"], float(sum(errors))

    @property
    def coded_bytes(self) -> float:
        """Bytes that encoding and decoding read and write.

        The params of a shard are encoded, those of a gather decoded. Gradients are read twice, for scales and codes;
        their float32 sums are written and read; all that again for each axis, of what the axes before it have left.
        """
        (params, grads), (gathers, reduced, _) = self.moved_bytes, self.sent_shares
        decoded = params * (gathers + 1) if gathers < 1 else 0.0
        sizes = [size for axis in self.axes.of_params().data if (size := self.links.mesh.shape[axis]) > 1]
        hops = sum(1 / math.prod(sizes[:i]) for i in range(len(sizes)))
        return decoded + (hops * grads * (2 * reduced + 6) if reduced < 1 else 0.0)

    @property
    def data_seconds(self) -> float:
        """Seconds of the collectives over `data` and `replica`, hidden or not."""
        links, sizes, axes = self.links, self.sizes, self.axes
        inside = axes.of_params().data
        across = [axis for axis in axes.data if axis not in inside]
        reduced, num_shards = self.num_params * self.reduced_bytes, axis_size(links.mesh, inside)
        (params, grads), shares = self.moved_bytes, self.sent_shares
        seconds = links.gather_seconds(shares[0] * params, inside)
        seconds += links.gather_seconds(shares[1] * grads, inside, exchanges=shares[1] < 1)
        # Between copies of the params: gradients once a step, and new params unless `replica` makes the copies.
        between = (reduced + self.num_params * sizes.param_bytes) / num_shards
        seconds += shares[2] * links.gather_seconds(between, across)
        return seconds + 2 * shares[2] * links.gather_seconds(reduced / self.num_shards, axes.replica)
