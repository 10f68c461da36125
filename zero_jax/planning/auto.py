"""Searches the best settings of a train step for a topology: estimates all, ranks them, compiles the best few."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax

from zero_jax.core.signatures import check_arguments
from zero_jax.core.text_tables import Report
from zero_jax.core.tree import PyTree
from zero_jax.planning.errors import SettingRefused
from zero_jax.planning.estimates import Estimator
from zero_jax.planning.job import Job, batch_of
from zero_jax.planning.links import model_sizes
from zero_jax.planning.plans import make_job
from zero_jax.planning.process import CompileOptions, compile_plan
from zero_jax.planning.ranking import Candidate, Figures, Ranking, policy_name
from zero_jax.planning.report import PlanReport, by_time
from zero_jax.planning.search import Search, candidates, divisors
from zero_jax.planning.traces import Policy, setting_config
from zero_jax.sharding.stages import sharded_groups
from zero_jax.training import MeshLoss, ZeroConfig
from zero_jax.transforms import resolve_remat

_MAX_PIPE = 16
_OFFLOADS = ("optimizer", "state", "all")
# The policies to try by default, from most memory to least; less memory costs time or traffic. The model's own comes
# last: it is left out where it equals one of the others.
_REMATS = ("none", "auto", "dots", "full", "dots_offloaded", "full_sharded", "full_offloaded", "own")
# Other loss functions are tried with the sizes of the axis `model` whose best setting is at most this much slower.
_NEARLY_BEST = 1.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoPlan(Report):
    """The result of `plan_auto`: prints the best setting and its plan, then the others.

    Attributes:
      ranking: the settings in order, and why each of the others was rejected.
      best: the plan of the best setting, or None.
      config: the `ZeroConfig` of the best setting, or None.
      reports: the plans of all compiled settings, those that the compiler refused included.

    Example:
      >>> quiet = {"stages": (3,), "max_compiles": 0, "log": lambda _: None}
      >>> found = zero.plan_auto(loss_fn, init_fn, tx, batch=batch, topology="v5e:2x2", config=config, **quiet)
      >>> found.best is None, found.ranking.num_compiled
      (True, 0)
    """

    ranking: Ranking
    best: PlanReport | None
    config: ZeroConfig | None
    reports: Mapping[Candidate, PlanReport]

    def __str__(self) -> str:
        best = [self.best.summary()] if self.best else []
        return "\n\n".join([self.ranking.headline(), *best, self.ranking.tables().strip()])

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
    attentions: Sequence[str] | None = None,
    overlaps: Sequence[bool] | None = None,
    offloads: Sequence[str] | None = None,
    quantizes: Sequence[bool] | None = None,
    other_losses: Mapping[str, Callable[..., Any] | MeshLoss] | None = None,
    pipes: Sequence[int] | None = None,
    pipelines: Sequence[str] | None = None,
    temporaries: Callable[[Candidate], float] | None = None,
    batch_sizes: Sequence[int] | None = None,
    max_num_microbatches: int = 64,
    max_compiles: int = 6,
    host_memory_bytes: float | None = None,
    **compiling: Any,
) -> AutoPlan:
    """Searches stage, mesh axes, microbatches, remat and more for a model, a topology and a batch.

    All settings are estimated and ranked; those with the least estimated time are compiled, and only compiled settings
    can be the best. One of the compiled settings is plain: the fastest stage over `data` alone, with the model's own
    remat and attention and the fewest microbatches that fit.

    Args:
      loss_fn: the loss function, or several by name, such as the same with remat policies of its own.
      init_fn: as for `init_state`.
      tx: the optimizer.
      batch: the global batch of a step: arrays or `ShapeDtypeStruct`s.
      topology: as for `plan`.
      config: all that is not searched: precision, clipping, specs. A `remat` other than `own`, `attention="fused"`,
        `secondary=True`, `overlap=False` and `offload` are kept; `experts` are tried, and without.
      stages: the stages to try.
      replicas: sizes of the axis `replica` to try; None tries all that divide.
      models: sizes of the axis `model` to try; None tries those within a host or along the dims of a torus, if the
        params have specs for that axis.
      remats: names of remat policies to try, as for `ZeroConfig.remat`; None tries `none`, `auto`, `dots`, `full`,
        `dots_offloaded`, `full_sharded` where `model` is more than 1, `full_offloaded`, and the model's own where it is
        none of them.
      attentions: of `own` and `fused`, those to try, the plain one first; None tries `fused`, too, where the model
        computes attention by itself that the hardware has a kernel for.
      overlaps: whether to compile with the options of `overlap`: those to try, the plain one first; None tries both
        where the hardware has such options.
      offloads: what to keep in host memory, of `optimizer`, `state` and `all`, where nothing fits without; None tries
        all of them, an empty sequence none.
      quantizes: whether to send params and gradients in the formats of `config`: those to try; None tries both where
        it has any.
      other_losses: loss functions of the same value that keep less, by name, such as one with the logits in chunks.
        They are tried where the plain one is among the fastest by estimate.
      pipes: sizes of the axis `pipe` to try; None tries those, up to 16, that the loss has layers for, where
        there are several slices or hosts.
      pipelines: the schedules of these stages to try; None tries that of `config`, `1f1b`, `1f1b:2` and `circular:2`.
      temporaries: bytes per device of activations and gathered params, by setting; None estimates them from a trace of
        the loss function.
      batch_sizes: examples of a step to try; the setting of the most examples a second is the best. None tries that of
        `batch` alone.
      max_num_microbatches: the most microbatches to try.
      max_compiles: the most settings to compile, the plain one included; 1 compiles that alone.
      host_memory_bytes: memory of a host for each of its devices; None takes what is known of such hosts.
      **compiling: `name`, `cache`, `own_process`, `timeout_seconds` (of each compile) and `log`, as for `plan`.

    Raises:
      ValueError: an unknown topology, or a batch that no setting divides.
      Exception: what a loss function, or `init_fn`, raises when it is traced as it is, before the search.

    Example:
      >>> quiet = {"stages": (3,), "max_compiles": 0, "log": lambda _: None}
      >>> found = zero.plan_auto(loss_fn, init_fn, tx, batch=batch, topology="v5e:2x2", config=config, **quiet)
      >>> found.ranking.best.stage
      3
    """
    tried = {
        "stages": stages, "replicas": replicas, "models": models, "remats": remats, "attentions": attentions,
        "overlaps": overlaps, "offloads": offloads, "quantizes": quantizes, "pipes": pipes, "pipelines": pipelines,
        "batch_sizes": batch_sizes, "max_num_microbatches": max_num_microbatches,
    }  # fmt: skip
    bounds = {"max_compiles": max_compiles, "host_memory_bytes": host_memory_bytes}
    check_arguments(**tried, **bounds, temporaries=temporaries, other_losses=other_losses)
    options = CompileOptions(**compiling)
    job = make_job(loss_fn=loss_fn, init_fn=init_fn, tx=tx, batch=batch, topology=topology, config=config)
    policies = remat_policies(loss_fn, config, remats, other_losses or {})
    estimator = Estimator(job, policies, temporaries=temporaries, log=options.log)
    choices, own_remat = _choices(estimator, tried)
    settings = _settings(estimator, choices)
    settings += _with_losses(estimator, settings, list(other_losses or ()))
    can_stop = options.own_process and estimator.hardware.platform == "tpu"
    programs = _Programs(job=job, policies=policies, options=options, can_stop=can_stop)
    search = Search(
        estimate=estimator.estimate,
        compile=programs.compile,
        needs_end=programs.needs_end,
        capacity_bytes=estimator.hardware.usable_bytes,
        host_capacity_bytes=host_memory_bytes or estimator.hardware.host_memory_bytes or math.inf,
        max_compiles=max_compiles,
        is_plain=_plain(settings, own_remat),
        log=options.log,
    )
    return programs.found(search.run(settings, fallback=[*_offloaded(estimator, settings, offloads)]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Programs:
    """Compiles settings; a compiler that `can_stop` before it generates code does so the first time."""

    job: Job
    policies: Mapping[str, Policy]
    options: CompileOptions
    can_stop: bool
    reports: dict[Candidate, PlanReport] = dataclasses.field(default_factory=dict)

    def found(self, ranking: Ranking) -> AutoPlan:
        best = ranking.best
        report, config = (self.reports.get(best), self.config(best)) if best else (None, None)
        return AutoPlan(ranking=ranking, best=report, config=config, reports=self.reports)

    def compile(self, setting: Candidate) -> Figures:
        before, job = self.reports.get(setting), apply_setting(setting, self.job, self.policies)
        if before and self.can_stop:
            job = dataclasses.replace(job, config=self.config(setting))
        stops = self.options.quick or (self.can_stop and not before)
        options = dataclasses.replace(self.options, name=f"{self.options.name}, {setting}", quick=stops)
        report = self.reports[setting] = compile_plan(job, options, fills=self.can_stop or bool(before))
        return Figures(
            bytes=math.inf if report.needed_bytes is None else report.needed_bytes,
            seconds=by_time(report)[1],
            note=report.refusal,
            host_bytes=report.host_bytes,
            fits=report.fits,
        )

    def needs_end(self, setting: Candidate) -> bool:
        """Returns whether its program has no code yet, or its blocks may keep more than they do."""
        report = self.reports[setting]
        return not self.options.quick and (not report.has_code or (bool(report.values) and not self.can_stop))

    def config(self, setting: Candidate) -> ZeroConfig:
        """Returns the config of a setting, with the budget of what its blocks keep."""
        config, report = apply_setting(setting, self.job, self.policies).config, self.reports.get(setting)
        return dataclasses.replace(config, remat=report.values.policy_name) if report and report.values else config


def _choices(estimator: Estimator, tried: Mapping[str, Any]) -> tuple[dict[str, Sequence[Any]], str]:
    """Returns what to try of each attribute of a setting, of arguments of `plan_auto`, and the model's own policy."""
    config, policies = estimator.job.config, estimator.policies
    sizes = _model_sizes(estimator, tried["models"])  # first: it raises what the model raises
    attentions = tried["attentions"]
    if not attentions:
        can_fuse = config.attention == "own" and estimator.has_attention_to_fuse()
        attentions = ("own", "fused") if can_fuse else (config.attention,)
    overlaps = (True, False) if config.overlap and estimator.has_overlap else (config.overlap,)
    plain = [name for name, policy in policies.items() if policy.is_plain]
    if max(sizes) == 1 and len(plain) > 1:
        plain = [name for name in plain if not _needs_model(policies[name])]  # the others would be traced for nothing
    same = estimator.same_policies(plain, max(sizes), attentions)
    for name, earlier in same.items():
        estimator.log(f"remat={name} is left out: it is {earlier} for this model")
    offload = config.resolved_offload()
    pipelines = tuple(tried["pipelines"] or dict.fromkeys((config.pipeline, "1f1b", "1f1b:2", "circular:2")))
    choices = {
        "batch_size": tried["batch_sizes"] or (estimator.batch_size,),
        "stage": tried["stages"],
        "remat": [name for name in plain if name not in same],
        "model": sizes,
        "replica": tried["replicas"] or (),
        "keep_gathered": (config.keep_gathered,),
        "secondary": (True,) if config.secondary else (False, True),
        "attention": attentions,
        "overlap": tuple(tried["overlaps"] or overlaps),
        "offload": (offload and offload.what,),
        "experts": (False, True) if config.experts else (False,),
        "quantize": tried["quantizes"] or ((False, True) if config.resolved_quantize() else (False,)),
        "pipe": _pipe_sizes(estimator, tried["pipes"], pipelines),
        "pipeline": pipelines,
        "num_microbatches": range(1, tried["max_num_microbatches"] + 1),
    }
    return choices, same.get("own", "own") if "own" in policies else next(iter(policies))


def _settings(estimator: Estimator, choices: Mapping[str, Sequence[Any]]) -> list[Candidate]:
    """Returns the settings to estimate, without remat policies that equal another one there, or that cannot be."""
    settings = candidates(choices, num_devices=estimator.num_devices, num_slices=estimator.topology.num_slices)
    if sum(policy.is_plain for policy in estimator.policies.values()) == 1:
        return list(settings)  # where nothing else is tried, they are refused with that reason
    policies = {name: estimator.policies[name] for name in choices["remat"]}
    needs_model = {name for name, policy in policies.items() if _needs_model(policy)}
    remats = {name: resolve_remat(policy.remat) for name, policy in policies.items()}
    settings = [x for x in settings if x.model > 1 or x.remat not in needs_model]

    def has_stages(setting: Candidate) -> bool:
        remat = remats[setting.remat]
        return remat.policy != "auto" and not (remat.offloads and setting.pipeline.startswith("1f1b"))

    return [x for x in settings if x.pipe == 1 or has_stages(x)]


def _needs_model(policy: Policy) -> bool:
    """Tells whether a remat policy shards residuals over the axis `model`."""
    return resolve_remat(policy.remat).residuals == "sharded"


def remat_policies(
    loss_fn: Callable[..., Any] | MeshLoss | Mapping[str, Callable[..., Any]],
    config: ZeroConfig,
    remats: Sequence[str] | None,
    other_losses: Mapping[str, Callable[..., Any] | MeshLoss],
) -> dict[str, Policy]:
    """Returns the remat policies to try, by the names that settings refer to."""
    if isinstance(loss_fn, Mapping):
        if remats is not None or other_losses:
            others = f"remats={tuple(remats)}" if remats is not None else f"other_losses={tuple(other_losses)}"
            raise ValueError(f"plan_auto takes loss functions by name or {others}, not both: leave one out")
        return {name: Policy(loss_fn=function, remat=config.remat) for name, function in loss_fn.items()}
    if remats is None:
        configured = resolve_remat(config.remat)
        remats = _REMATS if configured.is_own else (configured.name,)
    names = [resolve_remat(remat).name for remat in remats]
    plain = {name: Policy(loss_fn=loss_fn, remat=name) for name in names}
    return plain | {
        policy_name(name, loss): Policy(loss_fn=function, remat=name, is_plain=False)
        for loss, function in other_losses.items()
        for name in names
    }


def _with_losses(estimator: Estimator, settings: Sequence[Candidate], losses: Sequence[str]) -> list[Candidate]:
    """Returns the settings with other loss functions that are worth a trace.

    These are the settings without a model axis, if the loss is another there, and those with the sizes of it that do
    nearly as well as the best by estimate, whether they fit or not: another loss may fit where the plain one does not.
    """
    if not losses:
        return []
    seconds: dict[int, float] = {}
    for setting in settings:
        with contextlib.suppress(SettingRefused):
            estimated = estimator.estimate(setting).seconds / setting.batch_size
            seconds[setting.model] = min(estimated, seconds.get(setting.model, math.inf))
    models = [x for x, least in seconds.items() if x == 1 or least <= _NEARLY_BEST * min(seconds.values())]
    same: set[str] = set()
    if 1 in models:
        names = {policy_name(settings[0].remat, loss): loss for loss in ("", *losses)}
        attentions = list(dict.fromkeys(setting.attention for setting in settings))
        same = {names[name] for name in estimator.same_policies(names, 1, attentions, remat="own")}
    worth = [
        (x, loss) for x in settings for loss in losses if x.model in models and not (x.model == 1 and loss in same)
    ]
    return [dataclasses.replace(setting, loss=loss) for setting, loss in worth]


def _plain(settings: Sequence[Candidate], remat: str) -> Callable[[Candidate], bool]:
    """Returns the predicate of plain settings: the fewest axes, this remat, the first of all other choices."""
    axes = lambda setting: (setting.pipe, setting.model, setting.replica, setting.secondary)  # noqa: E731
    choices = lambda x: (x.remat, x.loss, x.attention, x.overlap, x.experts, x.quantize, x.pipeline)  # noqa: E731
    least, plain = min(map(axes, settings)), (remat, *choices(settings[0])[1:])
    return lambda setting: axes(setting) == least and choices(setting) == plain


def _offloaded(
    estimator: Estimator, settings: Sequence[Candidate], offloads: Sequence[str] | None
) -> Iterator[Candidate]:
    """Yields the settings that support `offload`, and keep more in host memory than with a smaller one."""
    is_configured = estimator.job.config.resolved_offload() is not None
    offloads = () if is_configured else _OFFLOADS if offloads is None else offloads
    for setting, what in itertools.product(settings, offloads):
        gathers = "params" in sharded_groups(setting.stage)
        has_copy = estimator.precision.has_master and (not gathers or setting.secondary)
        if {"state": has_copy, "all": gathers and not setting.secondary}.get(what, True):
            yield dataclasses.replace(setting, offload=what)


def _model_sizes(estimator: Estimator, models: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the sizes of `model` that the model's specs divide over; what it raises at the least is raised."""
    estimator.check(min(models or (1,)))
    if models is None:
        models = model_sizes(estimator.job.topology) if estimator.has_model_specs() else (1,)
    refusals = {model: estimator.refusal(model) for model in models}
    for model, refusal in refusals.items():
        if refusal:
            estimator.log(f"model={model} is left out: {refusal}")
    return tuple(model for model, refusal in refusals.items() if not refusal) or tuple(models)


def _pipe_sizes(estimator: Estimator, pipes: Sequence[int] | None, pipelines: Sequence[str]) -> tuple[int, ...]:
    """Returns the sizes of `pipe` into which the loss can be cut; raises `ValueError` if it can into none."""
    if pipes is None:
        num_slices = estimator.topology.num_slices
        sizes = (size for size in divisors(estimator.num_devices) if size <= _MAX_PIPE)
        pipes = [size for size in sizes if size == 1 or num_slices > 1]
    refusals = {pipe: why for pipe in pipes if pipe > 1 and (why := estimator.stages(pipe, pipelines[0]).why_none)}
    for pipe, why in refusals.items():
        estimator.log(f"pipe={pipe} is left out: {why}")
    if len(refusals) == len(pipes):
        raise ValueError(next(iter(refusals.values()), "pipes: no size of the axis `pipe` to try: give some"))
    return tuple(pipe for pipe in pipes if pipe not in refusals)


def apply_setting(setting: Candidate, job: Job, policies: Mapping[str, Policy]) -> Job:
    """Returns a job with the settings of a candidate."""
    policy = policies[setting.policy]
    config = dataclasses.replace(setting_config(job.config, setting), remat=policy.remat)
    batch = job.batch if setting.batch_size == job.batch_size else batch_of(job.batch, setting.batch_size)
    axes = {"replica": setting.replica, "model": setting.model, "pipe": setting.pipe}
    return dataclasses.replace(job, loss_fn=policy.loss_fn, config=config, batch=batch, **axes)
