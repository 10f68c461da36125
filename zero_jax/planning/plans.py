"""Compiles a train step for a topology that need not be here, and for each layout of `data` over it."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax

from zero_jax.core.signatures import check_arguments
from zero_jax.core.text_tables import Report, aligned
from zero_jax.core.tree import PyTree
from zero_jax.planning.job import Job, batch_shapes
from zero_jax.planning.process import CompileOptions, compile_plan
from zero_jax.planning.ranking import size_unit
from zero_jax.planning.report import PlanReport, by_time
from zero_jax.sharding.mesh import axes_of
from zero_jax.sharding.topology import parse
from zero_jax.training import MeshLoss, ZeroConfig

Layout = tuple[int, ...]


def plan(
    loss_fn: Callable[..., Any] | MeshLoss,
    init_fn: Callable[[jax.Array], PyTree],
    tx: optax.GradientTransformation,
    *,
    batch: PyTree,
    topology: str,
    config: ZeroConfig,
    replica: int = 1,
    model: int = 1,
    pipe: int = 1,
    data_layout: Sequence[int] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    **compiling: Any,
) -> PlanReport:
    """Compiles the train step for a topology; reports whether it fits, its memory, its traffic and its time.

    Nothing is run and no accelerator is needed: only the compiler of the hardware, which `pip install "jax[tpu]"` or
    `pip install "zero-jax[gpu-compiler]"` brings.

    Args:
      loss_fn: as for `make_train_step`.
      init_fn: as for `init_state`.
      tx: the optimizer.
      batch: the global batch of a step: arrays or `ShapeDtypeStruct`s.
      topology: such as `v5p:8x8x16` (a TPU slice in chips), `2xv5e:16x16` (two slices) or `h100:2x8` (hosts x GPUs).
      config: stage, precision, microbatches.
      replica: size of the mesh axis `replica`.
      model: size of the mesh axis `model`.
      pipe: stages of the pipeline (docs/pipeline.md).
      data_layout: sizes of the mesh axes that carry `data`; None takes what `make_mesh` chooses for the hardware.
      compiler_options: passed to the compiler.
      **compiling: `name` of the plan, for the report and the log; `cache`, the folder of compiled programs ("default",
        the user's cache folder; None disables it); `own_process`, whether to compile in another process, so that a
        crash of the compiler does not end this one (True); `timeout_seconds`, after which that process is killed (None
        is no limit); `log`, which is called with each line of progress; `quick`, whether to stop the compiler of TPUs
        in that process before it generates code, which is most of its work: all but the time is as exact (False).

    Raises:
      ValueError: an unknown topology, a compiler that is not installed, a mesh or batch that does not divide.
      ModelError: a function of the model raised in the compiler's process; the message names its lines.
      CompilerCrash: the compiler's process ended without a result.

    Example:
      >>> report = zero.plan(loss_fn, init_fn, tx, batch=batch, topology="v5e:2x2", config=config, log=lambda _: None)
      >>> report.fits, report.num_devices
      (True, 4)
    """
    job, options = split_settings(
        loss_fn=loss_fn, init_fn=init_fn, tx=tx, batch=batch, topology=topology, config=config, replica=replica,
        model=model, pipe=pipe, data_layout=data_layout, compiler_options=compiler_options, **compiling,
    )  # fmt: skip
    return compile_plan(job, options)


def make_job(*, topology: str, batch: PyTree, **fields: Any) -> Job:
    """Checks the arguments that describe a train step (the fields of `Job`) and returns it; raises `ValueError`."""
    check_arguments(**fields)
    parse(topology)
    return Job(topology=topology, batch=batch_shapes(batch), **fields)


def split_settings(**settings: Any) -> tuple[Job, CompileOptions]:
    """Splits the arguments of `plan` into the train step, checked as by `make_job`, and how it is compiled."""
    names = {field.name for field in dataclasses.fields(Job)} & settings.keys()
    fields = {name: settings.pop(name) for name in names}
    return make_job(**fields), CompileOptions(**settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutPlans(Report):
    """The plans of several layouts, fastest first; prints as a table.

    Attributes:
      plans: the plans by the sizes of the mesh axes that carry `data`.
      chosen: the layout that `make_mesh` chooses.

    Example:
      >>> quiet = {"layouts": [(4,)], "log": lambda _: None}
      >>> found = zero.plan_layouts(loss_fn, init_fn, tx, batch=batch, topology="v5e:2x2", config=config, **quiet)
      >>> found.plans[found.best].fits
      True
    """

    plans: Mapping[Layout, PlanReport]
    chosen: Layout

    @property
    def best(self) -> Layout:
        """The layout of the least estimated time among those that fit; the first if none does."""
        return next(iter(self.plans))

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        plans = [{"layout": list(layout), **report.to_json()} for layout, report in self.plans.items()]
        return {"best": list(self.best), "chosen": list(self.chosen), "plans": plans}

    def __str__(self) -> str:
        unit, scale = size_unit(report.needed_bytes or math.inf for report in self.plans.values())
        rows = [("layout of data", "of ideal", unit, "s/step", "")]
        for layout, report in self.plans.items():
            ratio = "" if report.traffic_ratio is None else f"{report.traffic_ratio:.3f}"
            needed = "" if report.needed_bytes is None else f"{report.needed_bytes / scale:.2f}"
            seconds = f"{report.time.step_seconds:.4g}" if report.time else ""
            # A compiler may make a program that does not fit: XLA:GPU does.
            marks = ["what make_mesh chooses"] * (layout == self.chosen) + ["does not fit"] * (not report.fits)
            rows.append((" x ".join(map(str, layout)), ratio, needed, seconds, ", ".join(marks)))
        return aligned(rows, right={1, 2, 3})


def plan_layouts(
    loss_fn: Callable[..., Any] | MeshLoss,
    init_fn: Callable[[jax.Array], PyTree],
    tx: optax.GradientTransformation,
    *,
    batch: PyTree,
    topology: str,
    config: ZeroConfig,
    replica: int = 1,
    model: int = 1,
    pipe: int = 1,
    layouts: Sequence[Layout] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    **compiling: Any,
) -> LayoutPlans:
    """Compiles the train step for several layouts of `data` over the topology, and ranks them by estimated time.

    Arguments are as for `plan`. Each of `layouts` has the sizes of the mesh axes that carry `data`, major first; None
    tries what `make_mesh` chooses, a single axis, and the dims of the torus with neighbours merged.

    Raises:
      ValueError: as `plan` does.

    Example:
      >>> quiet = {"layouts": [(4,)], "log": lambda _: None}
      >>> found = zero.plan_layouts(loss_fn, init_fn, tx, batch=batch, topology="v5e:2x2", config=config, **quiet)
      >>> found.best
      (4,)
    """
    check_arguments(layouts=layouts)
    job, options = split_settings(
        loss_fn=loss_fn, init_fn=init_fn, tx=tx, batch=batch, topology=topology, config=config, replica=replica,
        model=model, pipe=pipe, data_layout=None, compiler_options=compiler_options, **compiling,
    )  # fmt: skip
    return compile_layouts(job, options, layouts=layouts)


def compile_layouts(job: Job, options: CompileOptions, *, layouts: Sequence[Layout] | None = None) -> LayoutPlans:
    """Compiles a job for several layouts of `data`; `layouts` is as for `plan_layouts`."""
    default_mesh = dataclasses.replace(job, data_layout=None).mesh()
    axes = axes_of(default_mesh, data=job.config.data_axes)
    chosen = tuple(default_mesh.shape[axis] for axis in axes.data_of_stage)
    layouts = tuple(_merged_dims(job.topology, math.prod(chosen))) if layouts is None else layouts
    plans = {}
    for layout in dict.fromkeys([chosen, *layouts]):
        # make_mesh also takes slices and hosts into account, which a layout given by its sizes does not.
        data_layout = None if layout == chosen else layout
        plans[layout] = compile_plan(dataclasses.replace(job, data_layout=data_layout), options)
    return LayoutPlans(plans=dict(sorted(plans.items(), key=lambda item: by_time(item[1]))), chosen=chosen)


def _merged_dims(topology: str, data: int) -> Iterator[Layout]:
    """Yields the layouts with neighbouring dims of the torus merged; none over several slices or hosts."""
    parsed = parse(topology)
    if parsed.num_slices > 1:
        return
    dims = [size for size in parsed.shape if size > 1]
    cores = data // math.prod(dims)
    dims += [cores] if cores > 1 else []
    if math.prod(dims) != data:  # `replica` or `model` take up the rest
        yield (data,)
        return
    for cuts in itertools.product((False, True), repeat=max(len(dims) - 1, 0)):
        edges = [0, *(number for number, cut in enumerate(cuts, start=1) if cut), len(dims)]
        yield tuple(math.prod(dims[start:end]) for start, end in itertools.pairwise(edges))
