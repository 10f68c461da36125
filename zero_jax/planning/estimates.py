"""Estimates settings for a job: what depends on the model alone is traced once, `StepEstimate` has the formulas."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zero_jax.analysis import LossTrace, memory, trace_loss
from zero_jax.core.tree import key_shape
from zero_jax.planning.errors import SettingRefused, refusing
from zero_jax.planning.job import Job
from zero_jax.planning.links import MeshLinks
from zero_jax.planning.ranking import Candidate, Estimated
from zero_jax.planning.report import attentions_of
from zero_jax.planning.roofline import Roofline
from zero_jax.planning.step_estimate import ON_DEVICES, UNQUANTIZED, StepEstimate
from zero_jax.sharding import topology
from zero_jax.sharding.mesh import make_mesh
from zero_jax.sharding.precision import resolve_precision
from zero_jax.training import MeshLoss, Offload, abstract_state, step_options
from zero_jax.transforms import Remat, resolve_remat

_SECONDS_BETWEEN_LINES = 2
_SAME_TOLERANCE = 0.02  # policies whose figures differ by less count as the same program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A remat policy to try, with the loss function that it applies to."""

    loss_fn: Callable[..., Any] | MeshLoss
    remat: str | Remat


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
        # Host memory is counted by `host_bytes`, quantized traffic by `sent_shares` of a step.
        plain = {"stage": 0, "num_microbatches": 1, "secondary": False, **UNQUANTIZED, **ON_DEVICES}
        self.config = dataclasses.replace(job.config, **plain)
        self.precision = resolve_precision(self.config.precision)
        # Bytes per param and the number of params depend on the size of `model` alone, the trace on the policy too.
        self.sizes = functools.cache(self._sizes)
        self.offloaded = functools.cache(self._offloaded)
        self.trace = functools.cache(self._trace)
        self.links = functools.cache(lambda **axes: MeshLinks(make_mesh(devices=self.devices, **axes), parsed))
        self.step = functools.cache(functools.partial(StepEstimate, self))

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

    def estimate(self, setting: Candidate) -> Estimated:
        """Estimates bytes per device and seconds of a step.

        Raises:
          SettingRefused: the model cannot be trained with this setting.
        """
        with refusing():
            return self.step(setting).estimated()

    def _offloaded(self, model: int, stage: int, offloaded: Any) -> float:
        """Returns the bytes in host memory for each of `model` devices."""
        if offloaded is None:
            return 0.0
        offload = dataclasses.replace(self.offload, what=offloaded)
        mesh, config = self.mesh(model), dataclasses.replace(self.config, stage=stage, offload=offload)
        state = abstract_state(self.job.init_fn, self.job.tx, mesh=mesh, config=config)
        return memory.estimate(state, mesh=mesh, config=config, tx=self.job.tx).host_bytes


def _figures(traced: LossTrace) -> tuple[float, ...]:
    """Returns the figures by which remat policies are compared."""
    sent_bytes = sum(move.sent_bytes * move.times for move in traced.moves)
    residuals = traced.residuals
    return sent_bytes, traced.flops, residuals.device_bytes, residuals.host_bytes, traced.peak_bytes
