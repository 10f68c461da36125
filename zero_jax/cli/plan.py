"""The commands `zero-jax plan`, `memory` and `comms`: memory, traffic and time of a train step without its hardware."""

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import optax

from zero_jax import planning
from zero_jax.analysis import comms, figures, memory, paper
from zero_jax.cli.models.adapters import LoraConfig
from zero_jax.cli.models.planned import PlannedModel, other_activations, planned_model, small_model
from zero_jax.cli.models.presets import loss_function
from zero_jax.cli.options import explicit, field_values, from_file, log_line, option_of, print_result, refuse
from zero_jax.cli.run_config import check_plan_file, read_config, write_plan
from zero_jax.core.field_checks import check_fields
from zero_jax.core.signatures import check_arguments
from zero_jax.core.tree import PyTree
from zero_jax.sharding.mesh import axis_size, make_mesh
from zero_jax.sharding.topology import Hardware, parse, small_topology
from zero_jax.trainer import make_optimizer, tree_bytes
from zero_jax.training import StepLoss, ZeroConfig, check_batch, trace_step_loss, with_values
from zero_jax.transforms import resolve_remat
from zero_jax.verification import Verification, verify

_STEPS = 10_000  # of the optimizer's schedule, whose length is not part of the program
_STAGES = (0, 1, 2, 3)
# Examples of a device that --auto tries where no batch size is given: more than one hides collectives better.
_EXAMPLES_PER_DEVICE = (1, 2, 4, 8)
_CHOSEN_BY_AUTO = "--auto chooses that by itself: leave it out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Hardware and mesh to compile for, and how to compile.

    Attributes:
      topology: hardware to compile for: a TPU slice in chips (`v5p:8x8x16`), several (`2xv5e:16x16`), or hosts x GPUs
        (`h100:2x8`).
      batch_size: examples in a step, over all devices and microbatches; none takes 1 a device and microbatch.
      replica: size of the mesh axis `replica`, full copies of the sharded state; the axis `data` takes the rest.
      model_axis: size of the mesh axis `model`, tensor parallelism, for models whose params have specs for it.
      pipe: stages of the pipeline that microbatches go through, each with layers of its own; 1 for none.
      data_layout: sizes of the mesh axes that carry `data`, such as 8x8x16; none takes what fits the hardware.
      cache: folder of compiled programs; `default` is zero_jax in the user's cache folder, none disables the cache.
      timeout: seconds after which a compile is stopped.
      quick: stop the compiler of TPUs before it generates code: seconds instead of minutes, and a rougher time of a
        step.
    """

    topology: str = "v5p:2x2x4"
    batch_size: int | None = None
    replica: int = 1
    model_axis: int = 1
    pipe: int = 1
    data_layout: str | None = None
    cache: str | None = "default"
    timeout: float | None = None
    quick: bool = False

    def __post_init__(self) -> None:
        check_fields(self, lowest=dict.fromkeys(("batch_size", "replica", "model_axis", "pipe"), 1))
        parse(self.topology)
        check_arguments(timeout_seconds=self.timeout)
        _sizes(self.data_layout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A model, optimizer, config and hardware to plan for."""

    model: PlannedModel
    tx: optax.GradientTransformation
    zero: ZeroConfig
    config: PlanConfig

    def job(self, zero: ZeroConfig) -> planning.Job:
        """Returns the job of a config, with a batch of the size that was asked for."""
        axes: dict[str, Any] = {
            "topology": self.config.topology,
            "replica": self.config.replica,
            "model": self.config.model_axis,
            "pipe": self.config.pipe,
            "data_layout": _sizes(self.config.data_layout),
        }
        mesh = make_mesh(**axes)
        roles = zero.axes_of(mesh)
        # The microbatches of a pipeline are on all stages.
        batch_size = self.config.batch_size or axis_size(mesh, roles.of_stage.batch) * zero.num_microbatches
        batch, size = self.model.batch_fn(batch_size), self.config.model_axis
        check_batch(batch, mesh=mesh, axes=roles, num_microbatches=zero.num_microbatches)
        _check_batch_fits(batch, batch_size, parse(self.config.topology).hardware, axis_size(mesh, roles.batch))
        return planning.Job(
            loss_fn=self.model.loss_fn,
            init_fn=self.model.init_fn,
            tx=self.tx,
            batch=batch,
            config=zero if size == 1 else dataclasses.replace(zero, param_specs=self.model.specs_fn(size)),
            **axes,
        )

    def estimate(self, formula: Callable[..., Any], zero: ZeroConfig, **more: Any) -> Any:
        """Returns what `memory.estimate` or `comms.estimate` says of one config."""
        job = self.job(zero)
        mesh = job.mesh()
        state = job.state(mesh)
        log_line(f"{self.model.name}: tracing")
        loss = StepLoss.of(job.loss_fn, state.variables, mesh=mesh, config=job.config)
        loss = with_values(loss, state, job.batch)
        traced = trace_step_loss(loss, state.variables, job.batch, with_uses=True)
        return formula(state, mesh=mesh, config=loss.config, traced=traced, tx=self.tx, **more)

    def compile(self, zero: ZeroConfig, **options: Any) -> planning.PlanReport:
        """Compiles for one config, by fields of `CompileOptions` that differ from those of the request."""
        return planning.compile_plan(self.job(zero), dataclasses.replace(self.compiling, **options))

    def verify(self, zero: ZeroConfig) -> Verification:
        """Verifies a step for a few devices: of a preset a small model of its form, else the user's with its batch."""
        model, config = small_model(self.model), self.config
        num_copies, num_model, pipe = (min(x, 2) for x in (config.replica, config.model_axis, config.pipe))
        topology = small_topology(config.topology, num_copies * num_model * pipe)
        sizes = {"replica": num_copies, "model_axis": num_model, "pipe": pipe}
        small = dataclasses.replace(config, topology=topology, data_layout=None, **sizes)
        zero = dataclasses.replace(zero, num_microbatches=math.lcm(zero.num_microbatches, pipe))
        job = dataclasses.replace(self, model=model, config=small).job(zero)
        return verify(
            job.loss_fn, job.init_fn, job.tx, model.values_fn(job.batch), topology=topology, config=job.config,
            replica=num_copies, model=num_model, pipe=pipe, name=f"{model.name}, verified", log=log_line,
            timeout_seconds=self.config.timeout,
        )  # fmt: skip

    @property
    def compiling(self) -> planning.CompileOptions:
        """How to compile the plans."""
        config = self.config
        named = {"name": self.model.name, "cache": config.cache, "timeout_seconds": config.timeout}
        return planning.CompileOptions(**named, quick=config.quick, log=log_line)


def read_request(options: argparse.Namespace) -> Request:
    """Returns the request that the options make."""
    if LoraConfig(**field_values(LoraConfig, options)) != LoraConfig():
        raise ValueError(
            f"[lora] of {options.config}: a plan trains all params: leave it out of the file, or plan functions of "
            "your own with zero.Lora, by --loss and its like"
        )
    config = read_config(options)
    return Request(
        model=planned_model(options),
        # A config file's warm-up may be longer than `_STEPS`, and is no part of the program.
        tx=make_optimizer(dataclasses.replace(config.optimizer, warmup_steps=None), num_steps=_STEPS),
        zero=config.zero,
        config=PlanConfig(**field_values(PlanConfig, options)),
    )


def _check_batch_fits(batch: PyTree, batch_size: int, hardware: Hardware, num_parts: int) -> None:
    """Raises `ValueError` for a batch that alone exceeds the memory; a compiler may run for hours before it fails."""
    per_device_bytes, usable_bytes = tree_bytes(batch) / num_parts, hardware.usable_bytes
    if per_device_bytes > usable_bytes:
        raise ValueError(
            f"batch_size={batch_size}: the batch alone takes {per_device_bytes / 1e9:,.0f} GB of a device, and a "
            f"{hardware.name} has {usable_bytes / 1e9:,.0f} GB: give at most "
            f"{int(batch_size * usable_bytes / per_device_bytes):,}"
        )


def _sizes(layout: str | None) -> tuple[int, ...] | None:
    """Reads sizes of axes such as 8x8x16."""
    if layout is None:
        return None
    sizes = layout.split("x")
    if not all(re.fullmatch(r"[0-9]{1,9}", size) and int(size) for size in sizes):
        raise ValueError(f"data_layout={layout!r}: give sizes of mesh axes, such as 8x8x16")
    return tuple(map(int, sizes))


def _guarded(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Wraps a command of planning: no devices are used, and an error that its user can mend is one line."""

    @functools.wraps(run)
    def guarded(options: argparse.Namespace) -> int:
        for name, value in planning.COMPILE_ONLY.items():
            os.environ.setdefault(name, value)
        jax.config.update("jax_platforms", "cpu")  # JAX is imported already, and nothing is run
        try:
            return run(options)
        except KeyboardInterrupt:
            log_line("stopped; compiled programs are cached, and the same command continues from there")
            return 130
        except OSError:  # which `main` shows, with a remedy
            raise
        except MemoryError as error:
            raise ValueError(
                f"the memory of this machine is too small ({error}): give a smaller model, seq_len or batch"
            ) from error
        except Exception as error:
            explained = planning.explain(error)
            if isinstance(explained, ValueError | planning.CompilerCrash | planning.ModelError):
                raise ValueError(str(explained)) from error
            raise

    return guarded


@_guarded
def run_plan(options: argparse.Namespace) -> int:
    """Runs `zero-jax plan`."""
    if options.write_config:
        # Before the minutes that compiling takes.
        check_plan_file(pathlib.Path(options.write_config))
    request = read_request(options)
    if options.verify and (options.auto or options.layouts):
        refuse(options, ("--verify",), reason="it runs one step: leave out --auto and --layouts, or plan their choice")
    if options.auto:
        refuse(options, ("--layouts", "--data-layout", "--num-microbatches"), reason=_CHOSEN_BY_AUTO)
        if not options.max_compiles:
            refuse(options, ("--write-config",), reason="it takes a plan that was compiled: leave out --max-compiles 0")
    else:
        refuse(options, ("--max-compiles", "--host-memory-bytes"), reason="it is for --auto: add that, or leave it out")
    if options.layouts:
        refuse(options, ("--data-layout",), reason="--layouts compiles all of them: leave it out")
        refuse(options, ("--tokens",), reason="it is for one plan: leave out --layouts")
        refuse(options, ("--write-config",), reason="`zero-jax train` takes the default layout: leave out --layouts")
    if options.write_config and request.model.config is None:
        raise ValueError(
            "--write-config is for the models that `zero-jax train` knows, not for --loss: leave out one of the two"
        )
    if options.auto:
        return _auto(options, request)
    if options.layouts:
        plans = planning.compile_layouts(request.job(request.zero), request.compiling)
        print_result(options, plans)
        return 0 if plans.plans[plans.best].fits else 1
    report = dataclasses.replace(request.compile(request.zero), tokens=options.tokens)
    verified = request.verify(request.zero) if options.verify else None
    text, record = (report, None) if verified is None else (f"{report}\n\n{verified}", report.to_json())
    print_result(options, text, record and {**record, "verification": verified})
    if options.write_config:  # with the budget of what its blocks keep
        budget = {"remat": report.values.policy_name} if report.values else {}
        write_plan(options, report, request.model.config, zero=dataclasses.replace(request.zero, **budget))
    return 0 if report.fits and (verified is None or verified.ok) else 1


def _auto(options: argparse.Namespace, request: Request) -> int:
    # The search tries stages itself, from a setting without.
    pipe, config = request.config.pipe, dataclasses.replace(request.config, pipe=1)
    request = dataclasses.replace(request, config=config)
    model, zero = request.model, dataclasses.replace(request.zero, num_microbatches=1)
    experts = zero.experts or getattr(model.config, "expert_params", None)
    sizes, specs = _model_sizes(request)
    # What the command line or the file sets is not searched over.
    fixed = explicit(options) | from_file(options)
    # Sizes of axes that do not divide the devices are refused here, where the message has them.
    replica, size = request.config.replica, request.config.model_axis
    num_devices = make_mesh(topology=request.config.topology, replica=replica, model=size).size
    batch_size, sizes_to_try = request.config.batch_size, None
    if batch_size is None:
        batch_size, sizes_to_try = num_devices, [num_devices * examples for examples in _EXAMPLES_PER_DEVICE]
    batch = model.batch_fn(batch_size)  # which a size of the axis `model` may divide that 1 does not
    _check_batch_fits(batch, batch_size, parse(request.config.topology).hardware, num_devices)
    others = other_activations(model, fixed)
    result = planning.plan_auto(
        model.loss_fn,
        model.init_fn,
        request.tx,
        batch=batch,
        batch_sizes=sizes_to_try,
        topology=request.config.topology,
        config=dataclasses.replace(zero, param_specs=specs, experts=experts),
        stages=(zero.stage,) if "ZeroConfig.stage" in fixed or options.paper_config else _STAGES,
        replicas=(request.config.replica,) if "PlanConfig.replica" in fixed else None,
        models=(request.config.model_axis,) if "PlanConfig.model_axis" in fixed else sizes,
        remats=(resolve_remat(zero.remat).name,) if "ZeroConfig.remat" in fixed else None,
        attentions=(zero.attention,) if "ZeroConfig.attention" in fixed else None,
        overlaps=(zero.overlap,) if "ZeroConfig.overlap" in fixed else None,
        other_losses={x: loss_function(model.config, others[x]) for x in others} if model.config else None,
        pipes=(pipe,) if "PlanConfig.pipe" in fixed else None,
        pipelines=(zero.pipeline,) if "ZeroConfig.pipeline" in fixed else None,
        max_compiles=options.max_compiles,
        host_memory_bytes=options.host_memory_bytes,
        **vars(request.compiling),
    )
    if result.best:
        result = dataclasses.replace(result, best=dataclasses.replace(result.best, tokens=options.tokens))
    print_result(options, result)
    if options.write_config and result.best and result.config and result.ranking.best:
        chosen = others.get(result.ranking.best.loss)
        write_plan(options, result.best, model.config, zero=result.config, activations=chosen)
    elif options.write_config:
        log_line(f"nothing fits: {options.write_config} was not written")
    return 130 if result.ranking.was_stopped else 0 if result.ranking.best else 1


def _model_sizes(request: Request) -> tuple[tuple[int, ...] | None, Any]:
    """Returns the sizes of the axis `model` that the model's specs divide over (None: all), and the specs."""
    admitted: dict[int, Any] = {1: None}
    for size in planning.model_sizes(request.config.topology)[1:]:
        try:
            admitted[size] = request.model.specs_fn(size)
        except ValueError as error:
            log_line(f"model={size} is left out: {error}")
    specs = list(admitted.values())[-1]
    if specs is None:
        return None, None
    # The specs of the largest size serve all sizes: they say whether the vocabulary is sharded.
    return tuple(admitted), specs


@_guarded
def run_memory(options: argparse.Namespace) -> int:
    """Runs `zero-jax memory`."""
    if options.paper:
        options_set = explicit(options) - {"paper", "json"}
        if options_set:
            names = sorted("--model" if name == "preset" else option_of(name.split(".")[-1]) for name in options_set)
            raise ValueError(f"{' and '.join(names)}: --paper prints the paper's own tables: leave it out")
        print_result(options, paper.tables())
        return 0
    request = read_request(options)
    if options.plot:
        refuse(options, ("--stage", "--paper-config"), reason="--plot draws all stages: leave it out")
        figures.check_name(options.plot)  # before the minutes that compiling takes
        return _plot_memory(options, request)
    estimated = _memory_estimate(request, request.zero)
    # Quick: memory is laid out before code is generated.
    report = None if options.estimate else request.compile(request.zero, quick=True)
    compare = lambda estimated, measured: memory.compare(estimated.by_group, measured)  # noqa: E731
    return _show_both(options, report, estimated, report and report.memory, compare)


def _show_both(
    options: argparse.Namespace,
    report: planning.PlanReport | None,
    estimated: Any,
    measured: Any,
    compare: Callable[..., Any],
) -> int:
    """Shows an estimate, beside what was measured and how they compare where a program was compiled."""
    if report is None:
        print_result(options, estimated)
        return 0
    if measured is None:
        print_result(options, f"{report.summary()}\n\nby formula\n{estimated}", report)
        return 1
    both = compare(estimated, measured)
    text = f"{report.summary()}\n\nmeasured\n{measured}\n\nestimated\n{estimated}\n\nside by side\n{both}"
    print_result(options, text, {"measured": measured, "estimated": estimated, "compared": both})
    return 0 if report.fits else 1


def _memory_estimate(request: Request, zero: ZeroConfig) -> Any:
    job, config, residuals = request.job(zero), request.model.config, None
    if config is not None:
        sizes = {"batch_size": job.batch_size, "mesh": job.mesh(), "config": job.config}
        residuals = memory.transformer_residuals(config, **sizes)
    return request.estimate(memory.estimate, zero, residuals=residuals)


def _plot_memory(options: argparse.Namespace, request: Request) -> int:
    """Draws the paper's Figure 1 for this model and topology."""
    records, bars, num_devices = [], {}, request.job(request.zero).mesh().size
    for stage in _STAGES:
        zero = dataclasses.replace(request.zero, stage=stage)
        estimated = _memory_estimate(request, zero)
        report = None if options.estimate else request.compile(zero, quick=True)
        measured = report.memory.by_group if report and report.memory else None
        fits = report and report.fits
        records.append({"stage": stage, "fits": fits, "estimated": estimated.by_group, "measured": measured})
        bars[f"stage {stage}"] = {group.name: group.formula_bytes for group in estimated.groups}, measured
    title = f"{request.model.name} on {request.config.topology}, N = {num_devices:,}"
    usable_bytes = parse(request.config.topology).hardware.usable_bytes
    figures.plot_memory(options.plot, bars, title=title, capacity_bytes=usable_bytes)
    log_line(f"drew {options.plot}")
    if options.json:
        print(json.dumps(records))
    return 0


@_guarded
def run_comms(options: argparse.Namespace) -> int:
    """Runs `zero-jax comms`."""
    request = read_request(options)
    report = None if options.estimate else request.compile(request.zero)
    estimated = report.comms_estimate if report else request.estimate(comms.estimate, request.zero)
    return _show_both(options, report, estimated, report and report.comms, comms.compare)
