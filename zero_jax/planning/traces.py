"""Traces a model for the estimates of a search: what depends on the model, and on few choices, is made once."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from zero_jax.analysis import LossTrace, memory, trace_loss
from zero_jax.core.tree import PyTree, key_shape
from zero_jax.core.variables import as_variables
from zero_jax.planning.errors import SettingRefused, refusing
from zero_jax.planning.job import Job
from zero_jax.planning.links import Links
from zero_jax.planning.ranking import Candidate
from zero_jax.sharding import topology
from zero_jax.sharding.mesh import axis_size, make_mesh
from zero_jax.sharding.precision import as_multiplied, cast_floating, resolve_precision
from zero_jax.training import (
    MeshLoss,
    Offload,
    StepLoss,
    ZeroConfig,
    abstract_state,
    pipeline_report,
    share_staying,
    step_options,
    to_experts,
    value_costs,
)
from zero_jax.transforms import BlockCosts, PipelineReport, Remat, Roofline, resolve_remat

_SECONDS_BETWEEN_LINES = 10
_SAME_TOLERANCE = 0.02  # policies whose figures differ by less count as the same program
_UNQUANTIZED, ON_DEVICES = (
    {field.name: None for field in dataclasses.fields(ZeroConfig) if field.name.startswith(prefix)}
    for prefix in ("quantize", "offload")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A remat policy to try, with the loss function that it applies to, and whether that is the plain one."""

    loss_fn: Callable[..., Any] | MeshLoss
    remat: str | Remat
    is_plain: bool = True


def setting_config(config: ZeroConfig, setting: Candidate) -> ZeroConfig:
    """Returns a config with the settings of a candidate, but for its remat policy."""
    return dataclasses.replace(
        config,
        stage=setting.stage,
        num_microbatches=setting.num_microbatches,
        keep_gathered=setting.keep_gathered,
        secondary=setting.secondary,
        attention=setting.attention,
        overlap=setting.overlap,
        pipeline=setting.pipeline,
        experts=config.experts if setting.experts else None,
        offload=config.offload or setting.offload,
        **({} if setting.quantize else _UNQUANTIZED),
    )


class ModelTraces:
    """What estimates of settings have in common: sizes, traces and links that many settings share are made once.

    Args:
      job: the model, its optimizer, batch and topology; its stage, mesh axes, microbatches and remat are not used.
      policies: the remat policies, by the names that settings have (`Candidate.policy`).
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
        self.policy_by_loss = {policy.loss_fn: name for name, policy in policies.items()}
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
        self.rooflines = {
            overlap: Roofline(self.hardware, overlaps=overlap and self.has_overlap) for overlap in (True, False)
        }
        self.batch_size = job.batch_size
        self.offload = job.config.resolved_offload() or Offload()
        # Host memory is counted by `host_bytes`, quantized traffic by `sent_shares` of a step.
        plain = {"stage": 0, "num_microbatches": 1, "secondary": False, "experts": None, **_UNQUANTIZED, **ON_DEVICES}
        self.config = dataclasses.replace(job.config, **plain)
        self.precision = resolve_precision(self.config.precision)
        # Bytes per param and the number of params depend on `model` and `pipe` alone, the trace on the policy too.
        self.sizes = functools.cache(self._sizes)
        self.stages = functools.cache(self._stages)
        self.offloaded = functools.cache(self._offloaded)
        self._trace = functools.cache(self._traced)
        self.value_costs = functools.cache(self._value_costs)
        self.experts = functools.cache(self._experts)
        self.links = functools.cache(lambda **axes: Links(make_mesh(devices=self.devices, **axes), parsed))

    @functools.cached_property
    def params(self) -> PyTree:
        """The shapes of the params."""
        return jax.eval_shape(self.job.init_fn, key_shape())

    def loss_of(self, policy: str, mesh: Mesh, config: ZeroConfig) -> StepLoss:
        """Returns the loss of a step with the loss function of a policy."""
        return StepLoss.of(self.policies[policy].loss_fn, self.params, mesh=mesh, config=config)

    def mesh(self, model: int, pipe: int = 1) -> Any:
        """Returns a mesh of `model` x `pipe` devices, all of them on these axes."""
        return make_mesh(devices=self.devices[: model * pipe], model=model, pipe=pipe)

    def _sizes(self, model: int, pipe: int = 1) -> tuple[memory.MemoryEstimate, float]:
        """Returns the memory estimate on `model` x `pipe` devices, and the number of params per device."""
        sizes = self._memory(self.mesh(model, pipe), num_microbatches=pipe)
        return sizes, sizes.by_group["params"] / sizes.param_bytes

    def cast_bytes(self, *, from_masters: bool) -> float:
        """Returns the bytes a param, on average, of those that products read in another dtype than is stored."""
        params, dtypes = jax.tree.leaves(as_variables(self.params).params), self.precision
        stored = cast_floating(params, dtypes.master if from_masters else dtypes.param)
        cast = as_multiplied(stored, dtypes.compute, on_tpu=self.hardware.platform == "tpu")
        pairs = zip(stored, cast, strict=True)
        return sum(y.size * y.dtype.itemsize for x, y in pairs if x.dtype != y.dtype) / sum(x.size for x in params)

    def _memory(self, mesh: Mesh, **changes: Any) -> memory.MemoryEstimate:
        config = dataclasses.replace(self.config, **changes)
        state = abstract_state(self.job.init_fn, self.job.tx, mesh=mesh, config=config)
        return memory.estimate(state, mesh=mesh, config=config, tx=self.job.tx)

    def _stages(self, pipe: int, pipeline: str) -> PipelineReport:
        """Returns the stages of the global batch in `pipe` microbatches on as many devices, or why there are none."""
        fields = {"num_microbatches": pipe, "pipeline": pipeline, "remat": "own"}
        mesh, config = self.mesh(1, pipe), dataclasses.replace(self.config, **fields)
        policy = next(iter(self.policies.values()))
        return pipeline_report(policy.loss_fn, self.params, self.job.batch, mesh=mesh, config=config)

    def trace(self, name: str, model: int, attention: str, remat: str | Remat = "") -> LossTrace:
        """Traces the loss of the global batch on `model` devices, with the remat policy of a name or another one."""
        return self._trace(name, model, attention, remat or self.policies[name].remat)

    def _traced(self, name: str, model: int, attention: str, remat: str | Remat) -> LossTrace:
        if time.monotonic() > self.logged_at + _SECONDS_BETWEEN_LINES:
            self.log(f"tracing the loss with remat={name}, model={model}, attention={attention}")
            self.logged_at = time.monotonic()
        policy, mesh = self.policies[name], self.mesh(model)
        config = dataclasses.replace(self.config, remat=remat, attention=attention)
        return trace_loss(policy.loss_fn, self.params, self.job.batch, mesh=mesh, config=config)

    def _value_costs(self, name: str, model: int, attention: str) -> tuple[BlockCosts, ...]:
        """Returns what the values of the blocks cost, of the global batch on `model` devices."""
        config = dataclasses.replace(self.config, remat="full", attention=attention)
        return value_costs(self.loss_of(name, self.mesh(model), config), self.params, self.job.batch)

    def _experts(self, policy: str, setting: Candidate) -> tuple[float, float]:
        """Returns the share of params that stay sharded, and the seconds of what is sent to them."""
        links = self.links(replica=setting.replica, model=setting.model, pipe=setting.pipe)
        config = dataclasses.replace(setting_config(self.job.config, setting), remat="full", **ON_DEVICES)
        loss = self.loss_of(policy, links.mesh, config)
        moves = to_experts(loss, *loss.shapes(self.params, self.job.batch)[:2])
        if not moves:
            raise SettingRefused("experts: activations are more than their params, which are gathered")
        seconds = 0.0
        for move in moves:
            whole = move.sent_bytes / (1 - 1 / axis_size(links.mesh, move.axes))
            seconds += move.times * links.gather_seconds(whole, move.axes, exchanges=True)
        return share_staying(loss.placement, moves), seconds

    def check(self, model: int) -> None:
        """Traces the loss functions as they are, without remat, on `model` devices; raises what they raise."""
        for name in self.policy_by_loss.values():
            self.trace(name, model, "own", "own")

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
        for name in self.policy_by_loss.values():
            # The settings of a loss function that is refused are rejected with that reason.
            with contextlib.suppress(SettingRefused), refusing():
                if self.loss_of(name, mesh, config).attentions(self.params, self.job.batch).num_fused:
                    return True
        return False

    def refusal(self, model: int) -> str:
        """Returns why the model cannot be sharded over an axis `model` of this size; empty if it can."""
        try:
            self.sizes(model)
            self.check(model)
        except ValueError as error:
            return str(error)
        return ""

    def same_policies(
        self, names: Iterable[str], model: int, attentions: Sequence[str], *, remat: str = ""
    ) -> dict[str, str]:
        """Returns policies that equal an earlier one in memory and traffic, with its name; `remat` replaces theirs."""
        figures, same = dict[str, list[float]](), dict[str, str]()
        for name in names:
            if not remat and resolve_remat(self.policies[name].remat).policy == "auto":
                continue  # what it keeps is another with each setting
            with contextlib.suppress(SettingRefused), refusing():
                traces = [self.trace(name, model, attention, remat) for attention in attentions]
                current = [float(x) for traced in traces for x in _figures(traced)]  # integers are too large for numpy
                close = (x for x in figures if np.allclose(current, figures[x], rtol=_SAME_TOLERANCE, atol=0))
                if equal := next(close, None):
                    same[name] = equal
                else:
                    figures[name] = current
        return same

    def _offloaded(self, model: int, stage: int, offloaded: Any) -> float:
        """Returns the bytes in host memory for each of `model` devices."""
        if offloaded is None:
            return 0.0
        offload = dataclasses.replace(self.offload, what=offloaded)
        return self._memory(self.mesh(model), stage=stage, offload=offload).host_bytes


def _figures(traced: LossTrace) -> tuple[float, ...]:
    """Returns the figures by which remat policies are compared."""
    sent_bytes = sum(move.sent_bytes * move.times for move in traced.moves)
    residuals = traced.residuals
    return sent_bytes, traced.flops, residuals.device_bytes, residuals.host_bytes, traced.peak_bytes
