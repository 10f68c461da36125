"""The options of `zero-jax plan`, `memory` and `comms` as a request: model, optimizer, config, topology."""

import argparse
import dataclasses
import math
import re
from typing import Any

import optax

from zero_jax.analysis import LossTrace, trace_loss
from zero_jax.cli.models.planned import PlannedModel, planned_model, small_model
from zero_jax.cli.options import field_values, log_line
from zero_jax.cli.run_config import read_zero
from zero_jax.core.field_checks import check_fields
from zero_jax.core.tree import PyTree
from zero_jax.planning import CompileOptions, Job, PlanReport, compile_plan
from zero_jax.sharding.mesh import axes_of, axis_size, make_mesh
from zero_jax.sharding.topology import Hardware, parse, small_topology
from zero_jax.trainer import OptimizerConfig, TrainConfig, make_optimizer, tree_bytes
from zero_jax.training import ZeroConfig
from zero_jax.verification import Verification, verify

_STEPS = 10_000  # of the optimizer's schedule, whose length is not part of the program


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
        """Checks the fields, before a model is imported."""
        check_fields(self, lowest=dict.fromkeys(("batch_size", "replica", "model_axis", "pipe"), 1))
        parse(self.topology)
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout_seconds={self.timeout}: give a positive number of seconds, or none for no limit")
        _sizes(self.data_layout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A model, optimizer, config and hardware to plan for."""

    model: PlannedModel
    tx: optax.GradientTransformation
    zero: ZeroConfig
    config: PlanConfig

    def job(self, zero: ZeroConfig) -> Job:
        """Returns the job of a config, with a batch of the size that was asked for."""
        axes: dict[str, Any] = {
            "topology": self.config.topology,
            "replica": self.config.replica,
            "model": self.config.model_axis,
            "pipe": self.config.pipe,
            "data_layout": _sizes(self.config.data_layout),
        }
        mesh = make_mesh(**axes)
        roles = axes_of(mesh)
        shards = axis_size(mesh, roles.of_stage.batch)  # the microbatches of a pipeline are on all stages
        parts = shards * zero.num_microbatches
        batch_size = parts if self.config.batch_size is None else self.config.batch_size
        if batch_size < 1 or batch_size % parts:
            raise ValueError(
                f"batch_size={batch_size} does not divide over {shards} devices and "
                f"{zero.num_microbatches} microbatches: give a multiple of {parts}"
            )
        batch = self.model.batch_fn(batch_size)
        _check_batch_fits(batch, batch_size, parse(self.config.topology).hardware, axis_size(mesh, roles.batch))
        return Job(
            loss_fn=self.model.loss_fn,
            init_fn=self.model.init_fn,
            tx=self.tx,
            batch=batch,
            config=self.with_specs(zero),
            **axes,
        )

    def with_specs(self, zero: ZeroConfig) -> ZeroConfig:
        """Returns a config with the model's specs, if the axis `model` is larger than 1."""
        size = self.config.model_axis
        if size == 1:
            return zero
        return dataclasses.replace(zero, param_specs=self.model.specs_fn(size))

    def trace(self, job: Job) -> LossTrace:
        """Traces the loss of a job."""
        mesh = job.mesh()
        log_line(f"{self.model.name}: tracing")
        return trace_loss(job.loss_fn, job.state(mesh).variables, job.batch, mesh=mesh, config=job.config)

    def compile(self, zero: ZeroConfig, **options: Any) -> PlanReport:
        """Compiles for one config, by fields of `CompileOptions` that differ from those of the request."""
        return compile_plan(self.job(zero), dataclasses.replace(self.compiling, **options))

    def verify(self, zero: ZeroConfig) -> Verification:
        """Runs the step compiled for a few devices of the hardware, and compares its numbers with one device.

        A preset is verified as a small model of its form, a model of the user's own as it is, on the batch that its
        function returns. A pipeline has two stages.
        """
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
    def compiling(self) -> CompileOptions:
        """How to compile the plans."""
        config = self.config
        named = {"name": self.model.name, "cache": config.cache, "timeout_seconds": config.timeout}
        return CompileOptions(**named, quick=config.quick, log=log_line)


def read_request(options: argparse.Namespace) -> Request:
    """Returns the request that the options make."""
    defaults = TrainConfig()
    optimizer = dataclasses.replace(defaults.optimizer, **field_values(OptimizerConfig, options))
    return Request(
        model=planned_model(options),
        tx=make_optimizer(optimizer, num_steps=_STEPS),
        zero=TrainConfig(zero=read_zero(options, default=defaults.zero)).zero,
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
    """Parses sizes of axes such as 8x8x16."""
    if layout is None:
        return None
    sizes = layout.split("x")
    if not all(re.fullmatch(r"[0-9]{1,9}", size) and int(size) for size in sizes):
        raise ValueError(f"data_layout={layout!r}: give sizes of mesh axes, such as 8x8x16")
    return tuple(map(int, sizes))
