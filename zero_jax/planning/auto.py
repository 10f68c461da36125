"""The settings for a model, a topology and a batch: estimated, ranked, the few best compiled."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from zero_jax.core.signatures import check_arguments
from zero_jax.core.tree import PyTree
from zero_jax.planning.guess import Guess, Policy, model_sizes
from zero_jax.planning.ranking import Outcome, Ranking, Setting
from zero_jax.planning.report import PlanReport
from zero_jax.planning.search import candidates, search
from zero_jax.planning.single import plan
from zero_jax.training import MeshLoss, ZeroConfig
from zero_jax.transforms import resolve_remat

# The policies that are tried unless told: from most memory to least, each at the price of time or traffic. What the
# model does by itself comes last: where that is one of the others, it is left out.
_REMATS = ("none", "full", "full_sharded", "full_offloaded", "own")


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
    loss_fn: Callable[..., Any] | MeshLoss | Mapping[str, Callable[..., Any]],
    init_fn: Callable[[jax.Array], PyTree],
    tx: optax.GradientTransformation,
    *,
    batch: PyTree,
    topology: str,
    config: ZeroConfig,
    stages: Sequence[int] = (0, 1, 2, 3),
    replicas: Sequence[int] | None = None,
    models: Sequence[int] | None = None,
    remats: Sequence[str] | None = None,
    temporaries: Callable[[Setting], float] | None = None,
    max_num_microbatches: int = 64,
    max_compiles: int = 4,
    name: str = "plan",
    cache: str | pathlib.Path | None = "",
    own_process: bool = True,
    timeout_seconds: float | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> AutoPlan:
    """Chooses stage, replica x data x model, microbatches and remat policy for a model, a topology and a batch.

    All settings are estimated; the few that should be fastest are compiled, and the compiler has the last word.

    Args:
      loss_fn: the loss function; or several by name, such as the same with remat policies of its own.
      init_fn: as for `init_state`.
      tx: the optimizer.
      batch: the global batch of a step: arrays or `ShapeDtypeStruct`s.
      topology: name of the hardware.
      config: everything that is not searched: precision, clipping, specs. A `remat` other than `own` is kept.
      stages: the stages to try.
      replicas: sizes of the axis `replica` to try; None tries all that divide.
      models: sizes of the axis `model` to try; None tries those within a host or along the dims of a torus, if the
        params have specs for that axis.
      remats: names of remat policies to try, as for `ZeroConfig.remat`; None tries `none`, `full`, `full_sharded` where
        `model` is more than 1, `full_offloaded`, and what the model does by itself where that is none of them.
      temporaries: bytes on a device besides the train state and the gradients, by setting: activations, gathered
        params. None estimates them from a trace of the loss function.
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
    check_arguments(init_fn=init_fn, tx=tx, config=config, stages=stages, replicas=replicas, models=models)
    check_arguments(remats=remats, temporaries=temporaries, max_num_microbatches=max_num_microbatches)
    check_arguments(max_compiles=max_compiles, name=name, cache=cache, own_process=own_process, log=log)
    check_arguments(timeout_seconds=timeout_seconds, loss_fn=loss_fn)
    policies = _policies(loss_fn, config, remats)
    guess = Guess(policies, init_fn, tx, batch=batch, name=topology, config=config, temporaries=temporaries, log=log)
    sizes = _models(guess, topology, models, log)
    same = guess.same_policies(max(sizes))
    for name, other in same.items():
        log(f"remat={name} is left out: it is {other} for this model")
    settings = candidates(
        num_devices=guess.num_devices,
        batch_size=guess.batch_size,
        stages=stages,
        remats=tuple(name for name in policies if name not in same),
        needs_model=[name for name, one in policies.items() if resolve_remat(one.remat).residuals == "sharded"],
        models=sizes,
        replicas=replicas,
        max_num_microbatches=max_num_microbatches,
    )
    reports: dict[Setting, PlanReport] = {}

    def compile(setting: Setting) -> Outcome:
        report = plan(
            policies[setting.remat].loss_fn,
            init_fn,
            tx,
            batch=batch,
            topology=topology,
            config=_config(config, setting, policies),
            replica=setting.replica,
            model=setting.model,
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
        config=_config(config, ranking.best, policies) if ranking.best else None,
        reports=reports,
    )


def _policies(
    loss_fn: Callable[..., Any] | MeshLoss | Mapping[str, Callable[..., Any]],
    config: ZeroConfig,
    remats: Sequence[str] | None,
) -> dict[str, Policy]:
    """Returns the remat policies to choose from, by the names that settings have them under."""
    if isinstance(loss_fn, Mapping):
        if remats is not None:
            raise ValueError(
                f"plan_auto takes loss functions by name or remats={tuple(remats)}, not both: leave one out"
            )
        return {name: Policy(loss_fn=one, remat=config.remat) for name, one in loss_fn.items()}
    if remats is None:
        told = resolve_remat(config.remat)
        remats = _REMATS if told.is_own else (told.name,)
    return {name: Policy(loss_fn=loss_fn, remat=name) for name in (resolve_remat(one).name for one in remats)}


def _models(guess: Guess, topology: str, models: Sequence[int] | None, log: Callable[[str], None]) -> tuple[int, ...]:
    """Returns the sizes of the axis `model` that the params have specs for."""
    if models is None:
        models = model_sizes(topology) if guess.splits() else (1,)
    found = []
    for model in models:
        refused = guess.refusal(model)
        if refused:
            log(f"model={model} is left out: {refused}")
        else:
            found.append(model)
    return tuple(found) or tuple(models)


def _config(config: ZeroConfig, setting: Setting, policies: Mapping[str, Policy]) -> ZeroConfig:
    return dataclasses.replace(
        config,
        stage=setting.stage,
        num_microbatches=setting.num_microbatches,
        keep_gathered=setting.keep_gathered,
        remat=policies[setting.remat].remat,
    )
