"""The commands `zero-jax plan`, `memory` and `comms`: what a train step needs, before there is hardware for it."""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Collection
from typing import Any

import jax
import optax

from zero_jax import comms, figures, memory, paper
from zero_jax.cli_model import PlannedModel, add_model_options, add_own_model_options, gpt_model, planned_model
from zero_jax.compile_job import Job
from zero_jax.compile_process import COMPILE_ONLY, CompilerCrash
from zero_jax.mesh import axes_of, axis_size, make_mesh
from zero_jax.optimizers import OptimizerConfig, make_optimizer
from zero_jax.options import add_fields, given, write_file
from zero_jax.plan import plan
from zero_jax.plan_auto import AutoPlan, plan_auto
from zero_jax.plan_layouts import plan_layouts
from zero_jax.plan_report import PlanReport
from zero_jax.ranking import Setting
from zero_jax.sharding import sharded_groups
from zero_jax.state import ZeroConfig
from zero_jax.training_run import TrainConfig
from zero_jax.user_cache import cache_folder

_STEPS = 10_000  # of the schedule that the optimizer is made with: its length is not in the program
_STAGES = (0, 1, 2, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Says for what hardware to plan, and how.

    Attributes:
      topology: hardware to compile for: a TPU slice in chips (`v5p:8x8x16`), several (`2xv5e:16x16`), or hosts x GPUs
        (`h100:2x8`).
      batch_size: examples in a step, over all devices and microbatches; none takes one a device and microbatch.
      replica: size of the mesh axis `replica`, full copies of the sharded state; the axis `data` takes the rest.
      data_layout: sizes of the mesh axes that carry `data`, such as 8x8x16; none takes what fits the hardware.
      cache: folder of programs that were compiled before; `default` is zero_jax in the user's cache folder, none
        compiles anew and keeps nothing.
      timeout: seconds that one compile may take.
    """

    topology: str = "v5p:2x2x4"
    batch_size: int | None = None
    replica: int = 1
    data_layout: str | None = None
    cache: str | None = "default"
    timeout: float | None = None


def add_commands(commands: Any) -> None:
    """Adds the commands to a parser's subparsers."""
    compiles = "Compiles the real train step with the hardware's own compiler, which needs no such hardware, and "
    one = _command(
        commands, "plan", _plan, help="does a model fit on hardware that is not here, and how fast may it be?",
        description=compiles + "tells whether it fits, what a device holds and sends, and how long a step may take.",
    )  # fmt: skip
    auto = one.add_argument_group("search")
    auto.add_argument("--auto", action="store_true", help="choose stage, replica, microbatches and remat policy")
    auto.add_argument("--max-compiles", type=int, default=4, metavar="N", help="settings to compile (default: 4)")
    auto.add_argument("--layouts", action="store_true", help="compile several layouts of `data` over the hardware")
    auto.add_argument(
        "--write-config", metavar="FILE", help="write the result as a config for `zero-jax train --config`"
    )
    sizes = _command(
        commands, "memory", _memory, help="memory of a train step: by formula and measured",
        description=compiles + "shows the memory of a device by group, beside what the paper's formulas give.",
    )  # fmt: skip
    sizes.add_argument("--paper", action="store_true", help="reprint the paper's tables from its formulas, and end")
    sizes.add_argument("--estimate", action="store_true", help="by formula only: compile nothing")
    sizes.add_argument("--plot", metavar="FILE", help="draw stages 0 to 3, by formula and measured (.png, .svg, .pdf)")
    traffic = _command(
        commands, "comms", _comms, help="communication of a train step: by formula and measured",
        description=compiles + "lists what a device sends, by mesh axis, phase and param, beside the ideal.",
    )  # fmt: skip
    traffic.add_argument("--estimate", action="store_true", help="by formula only: compile nothing")


def _command(commands: Any, name: str, run: Callable[..., int], *, help: str, description: str) -> Any:
    parser = commands.add_parser(name, usage=f"zero-jax {name} [OPTION ...]", help=help, description=description)
    add_fields(parser.add_argument_group("hardware"), PlanConfig, default_of=PlanConfig())
    model = parser.add_argument_group("model")
    add_model_options(model)
    add_own_model_options(model)
    defaults = TrainConfig()
    add_fields(parser.add_argument_group("ZeRO"), ZeroConfig, default_of=defaults.zero)
    add_fields(
        parser.add_argument_group("optimizer"),
        OptimizerConfig,
        default_of=defaults.optimizer,
        without=("warmup_steps",),
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, the log to stderr")
    parser.set_defaults(run=functools.partial(_guarded, run), parser=parser)
    return parser


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
    """What the options ask for."""

    model: PlannedModel
    tx: optax.GradientTransformation
    zero: ZeroConfig
    config: PlanConfig

    def job(self, zero: ZeroConfig) -> Job:
        """Returns the job, which knows mesh and state, with a batch of the size asked for."""
        sizes = _sizes(self.config.data_layout)
        mesh = make_mesh(topology=self.config.topology, replica=self.config.replica, data_layout=sizes)
        parts = axis_size(mesh, axes_of(mesh).batch) * zero.num_microbatches
        batch_size = parts if self.config.batch_size is None else self.config.batch_size
        if batch_size < 1 or batch_size % parts:
            raise ValueError(
                f"batch_size={batch_size} does not divide over {parts // zero.num_microbatches} devices and "
                f"{zero.num_microbatches} microbatches: give a multiple of {parts}"
            )
        return Job(
            loss_fn=self.model.loss_fn,
            init_fn=self.model.init_fn,
            tx=self.tx,
            batch=self.model.batch_fn(batch_size),
            config=zero,
            topology=self.config.topology,
            replica=self.config.replica,
            data_layout=sizes,
        )

    def compile(self, zero: ZeroConfig) -> PlanReport:
        """Compiles for one config."""
        return plan(**self.plan_options(zero))

    def plan_options(self, zero: ZeroConfig, *, without: Collection[str] = ()) -> dict[str, Any]:
        """Returns the arguments of `plan`."""
        job = self.job(zero)
        fields = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
        fields |= {"name": self.model.name, "cache": self.cache, "timeout_seconds": self.config.timeout, "log": _log}
        return {name: value for name, value in fields.items() if name not in without}

    @property
    def cache(self) -> pathlib.Path | None:
        """The folder of compiled programs."""
        given = self.config.cache
        return cache_folder("programs") if given == "default" else None if given is None else pathlib.Path(given)


def _sizes(layout: str | None) -> tuple[int, ...] | None:
    """Reads the sizes of axes written as 8x8x16."""
    if layout is None:
        return None
    if not all(size.isdigit() for size in layout.split("x")):
        raise ValueError(f"data_layout={layout!r}: give sizes of mesh axes, such as 8x8x16")
    return tuple(map(int, layout.split("x")))


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _guarded(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    for name, value in COMPILE_ONLY.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")  # nothing is run, and JAX has been imported
    try:
        return run(options)
    except (ValueError, CompilerCrash) as error:
        return options.parser.error(str(error))
    except KeyboardInterrupt:
        _log("stopped; what was compiled is kept, and the same command goes on from there")
        return 130


def _request(options: argparse.Namespace) -> _Request:
    defaults = TrainConfig()
    optimizer = dataclasses.replace(defaults.optimizer, **given(OptimizerConfig, options))
    return _Request(
        model=planned_model(options),
        tx=make_optimizer(optimizer, num_steps=_STEPS),
        zero=dataclasses.replace(defaults.zero, **given(ZeroConfig, options)),
        config=PlanConfig(**given(PlanConfig, options)),
    )


def _show(options: argparse.Namespace, text: str, record: Any) -> None:
    print(json.dumps(record, default=str) if options.json else text)


def _plan(options: argparse.Namespace) -> int:
    request = _request(options)
    if options.auto:
        return _auto(options, request)
    if options.layouts:
        plans = plan_layouts(**request.plan_options(request.zero, without=("data_layout",)))
        _show(options, str(plans), plans.to_json())
        return 0 if plans.plans[plans.best].fits else 1
    report = request.compile(request.zero)
    _show(options, str(report), report.to_json())
    if options.write_config:
        _write_config(options, request, report, remat=None)
    return 0 if report.fits else 1


def _auto(options: argparse.Namespace, request: _Request) -> int:
    model, job = request.model, request.job(dataclasses.replace(request.zero, num_microbatches=1))
    found = plan_auto(
        _losses(model),
        model.init_fn,
        request.tx,
        batch=job.batch,
        topology=request.config.topology,
        config=dataclasses.replace(request.zero, num_microbatches=1),
        temporaries=_temporaries(model, request.zero),
        max_compiles=options.max_compiles,
        name=model.name,
        cache=request.cache,
        timeout_seconds=request.config.timeout,
        log=_log,
    )
    _show(options, str(found), found.to_json())
    if found.best and options.write_config:
        assert found.ranking.best is not None
        _write_config(options, request, found.best, remat=found.ranking.best.remat, found=found)
    return 0 if found.best else 1


def _losses(model: PlannedModel) -> Any:
    """Returns the loss functions to choose from: the reference model can be told whether to rematerialize."""
    if model.config is None:
        return model.loss_fn
    changed = {"full": True, "none": False}
    return {
        name: gpt_model(model.name, dataclasses.replace(model.config, remat=remat)).loss_fn
        for name, remat in changed.items()
    }


def _temporaries(model: PlannedModel, zero: ZeroConfig) -> Callable[[Setting], float] | None:
    """Returns an estimate of what a step of the reference GPT holds besides state and gradients."""
    config = model.config
    if config is None:
        return None
    wide = 4 if zero.precision == "fp32" else 2

    def temporaries(setting: Setting) -> float:
        tokens = setting.per_device_microbatch_size * config.seq_len
        residuals = memory.Residuals(
            num_layers=config.num_layers,
            batch_size=setting.per_device_microbatch_size,
            seq_len=config.seq_len,
            d_model=config.d_model,
            bytes_per_element=wide,
            remat=setting.remat != "none",
        )
        logits = tokens * config.vocab_size * (4 + 2 * wide)
        scores = tokens * config.num_heads * config.seq_len * (4 + wide)
        kept_scores = scores * (config.num_layers if setting.remat == "none" else 1)
        block = (4 + 2 * config.mlp_ratio) * config.d_model**2 * wide
        # A block's gathered weights, and the gradient of one of its two largest.
        weights = block * 4 / 3 if "params" in sharded_groups(setting.stage) else block / 3
        return residuals.device_bytes + max(logits, kept_scores + weights)

    return temporaries


def _write_config(
    options: argparse.Namespace,
    request: _Request,
    report: PlanReport,
    *,
    remat: str | None,
    found: AutoPlan | None = None,
) -> None:
    """Writes the sections of a config that make `zero-jax train` run what was planned."""
    if request.model.config is None:
        raise ValueError("--write-config is for the models that `zero-jax train` knows, not for --loss")
    chosen = (found.config if found else None) or request.zero
    model = {"preset": options.preset, **dataclasses.asdict(request.model.config)}
    model |= {} if remat is None else {"remat": remat != "none"}
    fields = (
        "stage",
        "precision",
        "num_microbatches",
        "clip_norm",
        "skip_nonfinite",
        "keep_gathered",
        "min_shard_size",
    )
    sections = {
        "model": model,
        "zero": {name: getattr(chosen, name) for name in fields},
        "optimizer": given(OptimizerConfig, options),
        "run": {"batch_size": report.batch_size, "replica": report.mesh.get("replica", 1)},
    }
    write_file(options.write_config, sections, title=f"planned for {report.topology} by zero-jax plan")
    _log(f"wrote {options.write_config}: zero-jax train --config {options.write_config}")


def _memory(options: argparse.Namespace) -> int:
    if options.paper:
        tables = paper.tables()
        _show(options, str(tables), tables.to_json())
        return 0
    request = _request(options)
    if options.plot:
        return _plot_memory(options, request)
    estimated = _memory_estimate(request, request.zero)
    if options.estimate:
        _show(options, str(estimated), estimated.to_json())
        return 0
    report = request.compile(request.zero)
    if report.memory is None:
        _show(options, f"{report.summary()}\n\nby formula\n{estimated}", report.to_json())
        return 1
    compared = memory.compare(estimated.by_group, report.memory)
    text = f"{report.summary()}\n\nmeasured\n{report.memory}\n\nestimated\n{estimated}\n\nside by side\n{compared}"
    _show(options, text, {"measured": report.memory.to_json(), "estimated": estimated.to_json()})
    return 0 if report.fits else 1


def _memory_estimate(request: _Request, zero: ZeroConfig) -> Any:
    job, config = request.job(zero), request.model.config
    mesh = job.mesh()
    residuals = None
    if config is not None:
        batch_size = job.batch["inputs"].shape[0]
        residuals = memory.transformer_residuals(config, batch_size=batch_size, mesh=mesh, config=zero)
    return memory.estimate(job.state(mesh), mesh=mesh, config=zero, residuals=residuals, tx=request.tx)


def _plot_memory(options: argparse.Namespace, request: _Request) -> int:
    """Draws the paper's Figure 1 for this model and topology."""
    bars, records = [], []
    for stage in _STAGES:
        zero = dataclasses.replace(request.zero, stage=stage)
        estimated, report = _memory_estimate(request, zero), request.compile(zero)
        measured = None if report.memory is None else report.memory.by_group
        bars.append(
            figures.MemoryBar(
                label=f"stage {stage}",
                num_devices=report.num_devices,
                formula_bytes={group.name: group.formula_bytes for group in estimated.groups},
                measured_bytes=measured,
            )
        )
        records.append({"stage": stage, "fits": report.fits, "estimated": estimated.by_group, "measured": measured})
    title = f"{request.model.name} on {request.config.topology}"
    figures.plot_memory(options.plot, bars, title=title, capacity_bytes=report.usable_bytes)
    _log(f"drew {options.plot}")
    if options.json:
        print(json.dumps(records))
    return 0


def _comms(options: argparse.Namespace) -> int:
    request = _request(options)
    job = request.job(request.zero)
    mesh = job.mesh()
    estimated = comms.estimate(job.state(mesh), mesh=mesh, config=request.zero)
    if options.estimate:
        _show(options, str(estimated), estimated.to_json())
        return 0
    report = request.compile(request.zero)
    if report.comms is None:
        _show(options, f"{report.summary()}\n\nby formula\n{estimated}", report.to_json())
        return 1
    compared = comms.compare(estimated, report.comms)
    text = f"{report.summary()}\n\n{report.comms}\n\nside by side\n{compared}"
    record = {"measured": report.comms.to_json(), "estimated": estimated.to_json(), "compared": compared.to_json()}
    _show(options, text, record)
    return 0 if report.fits else 1
