"""The settings for a model, a topology and a batch: estimated, ranked, the few best compiled."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from zero_jax import memory, topology
from zero_jax.flops import forward_flops
from zero_jax.grads import normalize_loss
from zero_jax.mesh import make_mesh
from zero_jax.plan import plan
from zero_jax.plan_report import PlanReport
from zero_jax.precision import resolve_precision
from zero_jax.ranking import Estimated, Outcome, Ranking, Setting
from zero_jax.search import candidates, search
from zero_jax.sharding import sharded_groups
from zero_jax.state import ZeroConfig, abstract_state
from zero_jax.tree import PyTree

# Of the peak, what matrix products reach in practice, and how much of the collectives something hides: figures to rank
# by, not to believe.
_EFFICIENCY = 0.5
_HIDDEN = 0.5
# Forward passes that a step's products amount to: recomputing every block is one more.
_REMAT_FLOPS = {"none": 3, "full": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoPlan:
    """What the search has found; prints the ranking and, of the best setting, the plan.

    Attributes:
      ranking: the settings, and why each other is out.
      best: the plan of the best setting, or None.
      config: the `ZeroConfig` of the best setting, or None.
      reports: the plans of all settings that were compiled, or refused by the compiler.
    """

    ranking: Ranking
    best: PlanReport | None
    config: ZeroConfig | None
    reports: Mapping[Setting, PlanReport]

    def __str__(self) -> str:
        return "\n\n".join([str(self.ranking), *([self.best.summary()] if self.best else [])])

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return {"ranking": self.ranking.to_json(), "best": self.best.to_json() if self.best else None}


def plan_auto(
    loss_fn: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    init_fn: Callable[[jax.Array], PyTree],
    tx: optax.GradientTransformation,
    *,
    batch: PyTree,
    topology: str,
    config: ZeroConfig,
    stages: Sequence[int] = (0, 1, 2, 3),
    replicas: Sequence[int] | None = None,
    temporaries: Callable[[Setting], float] | None = None,
    max_num_microbatches: int = 64,
    max_compiles: int = 4,
    name: str = "plan",
    cache: str | pathlib.Path | None = "",
    own_process: bool = True,
    timeout_seconds: float | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> AutoPlan:
    """Chooses stage, replica x data, microbatches and remat policy for a model, a topology and a batch.

    All settings are estimated; the few that should be fastest are compiled, and the compiler has the last word.

    Args:
      loss_fn: the loss function; or, by name, the same with different remat policies (`full` and `none`).
      init_fn: as for `init_state`.
      tx: the optimizer.
      batch: the global batch of a step: arrays or `ShapeDtypeStruct`s.
      topology: name of the hardware.
      config: everything that is not searched: precision, clipping, specs.
      stages: the stages to try.
      replicas: sizes of the axis `replica` to try; None tries all that divide.
      temporaries: bytes on a device besides the train state and the gradients, by setting: residuals, logits. None
        knows of none, so that more settings are compiled in vain.
      max_num_microbatches: the most microbatches to try.
      max_compiles: the most settings to compile.
      name: what to call the plans.
      cache: as for `plan`.
      own_process: as for `plan`.
      timeout_seconds: for each compile.
      log: takes lines that tell how it goes.

    Raises:
      ValueError: an unknown topology, or a batch that no setting divides.
    """
    losses = loss_fn if isinstance(loss_fn, Mapping) else {"as it is": loss_fn}
    guess = _Guess(losses, init_fn, tx, batch=batch, name=topology, config=config, temporaries=temporaries)
    settings = candidates(
        num_devices=guess.num_devices,
        batch_size=guess.batch_size,
        stages=stages,
        remats=tuple(losses),
        replicas=replicas,
        max_num_microbatches=max_num_microbatches,
    )
    reports: dict[Setting, PlanReport] = {}

    def compile(setting: Setting) -> Outcome:
        report = plan(
            losses[setting.remat],
            init_fn,
            tx,
            batch=batch,
            topology=topology,
            config=_config(config, setting),
            replica=setting.replica,
            name=f"{name}, {setting}",
            cache=cache,
            own_process=own_process,
            timeout_seconds=timeout_seconds,
            log=log,
        )
        reports[setting] = report
        seconds = report.time.step_seconds if report.time else None
        return Outcome(fits=report.fits, bytes=report.needed_bytes, seconds=seconds, error=report.refusal)

    ranking = search(
        settings,
        estimate=guess.estimate,
        compile=compile,
        capacity_bytes=guess.hardware.usable_bytes,
        max_compiles=max_compiles,
        log=log,
    )
    best = reports.get(ranking.best) if ranking.best else None
    return AutoPlan(
        ranking=ranking,
        best=best,
        config=_config(config, ranking.best) if ranking.best else None,
        reports=reports,
    )


def _config(config: ZeroConfig, setting: Setting) -> ZeroConfig:
    return dataclasses.replace(
        config,
        stage=setting.stage,
        num_microbatches=setting.num_microbatches,
        keep_gathered=setting.keep_gathered,
    )


class _Guess:
    """Estimates settings by formula, from what the model, its optimizer and the hardware are."""

    def __init__(
        self,
        losses: Mapping[str, Callable[..., Any]],
        init_fn: Callable[[jax.Array], PyTree],
        tx: optax.GradientTransformation,
        *,
        batch: PyTree,
        name: str,
        config: ZeroConfig,
        temporaries: Callable[[Setting], float] | None,
    ):
        devices = topology.devices(name)
        self.num_devices, self.hardware = len(devices), topology.parse(name).hardware
        self.num_slices = topology.parse(name).num_slices
        self.batch_size = max(x.shape[0] for x in jax.tree.leaves(batch) if np.ndim(x))
        self.temporaries = temporaries or (lambda setting: 0.0)
        # K and psi are the same in every setting: read once, from the state as one device holds it.
        config = dataclasses.replace(config, stage=0, num_microbatches=1)
        mesh = make_mesh(devices=devices[:1])
        state = abstract_state(init_fn, tx, mesh=mesh, config=config)
        self.sizes = memory.estimate(state, mesh=mesh, config=config, tx=tx)
        self.has_master = resolve_precision(config.precision).has_master
        loss, key = normalize_loss(next(iter(losses.values()))), jax.eval_shape(lambda: jax.random.key(0))
        self.forward_flops = forward_flops(loss, state.params, batch, key)

    def estimate(self, setting: Setting) -> Estimated:
        """Estimates bytes per device and seconds a step."""
        state, grads = self.state_bytes(setting), self.grad_bytes(setting)
        others = self.temporaries(setting)
        note = f"state {state / 1e9:.1f}, gradients {grads / 1e9:.1f}, others {others / 1e9:.1f}"
        return Estimated(bytes=state + grads + others, seconds=self.seconds(setting), note=note)

    def state_bytes(self, setting: Setting) -> float:
        """Bytes of the train state."""
        groups, sizes = sharded_groups(setting.stage), self.sizes
        optimizer = sizes.optimizer_bytes / (setting.data if "opt_state" in groups else 1)
        # Master params that are sharded as the params would be need no low-precision copy beside them.
        whole = 0.0 if self.has_master and "params" in groups else sizes.param_bytes
        return sizes.num_params * (optimizer + whole / (setting.data if "params" in groups else 1))

    def grad_bytes(self, setting: Setting) -> float:
        """Bytes of gradients, and of their float32 sums over microbatches."""
        sizes, share = self.sizes, 1 / setting.data
        accumulates = setting.num_microbatches > 1
        is_sharded = "grads" in sharded_groups(setting.stage) or (
            "opt_state" in sharded_groups(setting.stage) and not accumulates
        )
        return sizes.num_params * (sizes.grad_bytes + 4 * accumulates) * (share if is_sharded else 1)

    def seconds(self, setting: Setting) -> float:
        """Seconds of a step, roughly."""
        hardware, sizes, k = self.hardware, self.sizes, setting.num_microbatches
        flops = self.forward_flops * _REMAT_FLOPS.get(setting.remat, 3) / setting.num_devices
        compute = flops / (hardware.flops_per_second * _EFFICIENCY)
        groups = sharded_groups(setting.stage)
        reduces = k if "grads" in groups else 1
        gathers = k * (1 if setting.keep_gathered else 2) if "params" in groups else 1
        moved = sizes.num_params * sizes.param_bytes * (reduces + gathers) * (setting.data - 1) / setting.data
        copies = sizes.num_params * sizes.grad_bytes * 2 * (setting.replica - 1) / setting.replica / setting.data
        inside = 4 * hardware.link_bytes_per_second if hardware.platform == "tpu" else hardware.link_bytes_per_second
        spans_slices = setting.data > self.num_devices // self.num_slices
        # Hierarchical collectives: the network moves 1 / (devices of a slice) of the bytes, at its own speed.
        network = moved * self.num_slices / self.num_devices if spans_slices else 0.0
        outside = (copies if self.num_slices > 1 else 0.0) + network
        comms = (moved + (0 if self.num_slices > 1 else copies)) / inside + outside / hardware.network_bytes_per_second
        return max(compute, comms) + (1 - _HIDDEN) * min(compute, comms)
