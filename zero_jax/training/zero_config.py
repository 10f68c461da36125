"""The config of a ZeRO train step."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jax.sharding import Mesh, PartitionSpec

from zero_jax.core.field_checks import check_fields, hinted
from zero_jax.core.tree import PathPatterns, PyTree, shown
from zero_jax.sharding.mesh import Axes, are_names, axes_of, axis_size, secondary_axes
from zero_jax.sharding.precision import Precision, resolve_precision
from zero_jax.sharding.quantized import GatherFormat, GradFormat, Quantize, check_quantize
from zero_jax.sharding.stages import sharded_groups
from zero_jax.training.optimizer.offload import Offload, resolve_offload
from zero_jax.transforms import Remat, resolve_remat, resolve_schedule


@hinted
@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """The config of a ZeRO train step: stage, precision, microbatches, remat, sharding rules.

    Attributes:
      stage: 0 replicates, 1 shards master params and optimizer state, 2 also gradients, 3 also params.
      precision: `fp32` (every leaf as `init_fn` made it), `bf16`, `fp16` (with loss scaling), `bf16-stochastic` (params
        are bfloat16 alone), or a `Precision`. `auto` is `fp32` in a loop of your own; the trainer takes `bf16`, or what
        the run began with that it resumes.
      keep_batch_dtype: regular expressions of full leaf paths of the batch. Floating leaves that the model reads, and
        that match none, are cast to the compute dtype before the loss function, if the precision has one. Leaves that
        only the loss reads (targets, masks, weights) are not cast, nor are integers and booleans. List times and
        positions that need more than the 8 bits of bfloat16; `.*` casts nothing (docs/stages.md).
      num_microbatches: forward passes that a step's batch is split into.
      noise_scale: report the sizes of the gradients of microbatches, which `NoiseScale` makes the noise scale of
        (docs/noise_scale.md). They are not added in place then.
      clip_norm: largest global norm of the gradients, or None. Finite gradients are clipped, whatever their size.
        `auto` is None in a loop of your own, and 1.0 in the trainer, or what the run began with that it resumes.
      loss_weight: the weight of a microbatch, such as the number of its tokens, that its loss is a mean over. `auto`
        takes the value of the batch that the loss finally divides by, or equal weights if there is none; a name takes
        that entry of the loss function's aux dict; None takes equal weights.
      skip_nonfinite: skip the update when a gradient is non-finite; None does so too, False does not.
      remat: the rematerialization policy, for an unmodified model: `own` leaves it to the model's own
        `jax.checkpoint`s, `full` saves only a block's input, `full_sharded` saves it in shards over the mesh axis
        `model` (the paper's P_a), `full_offloaded` in host memory (P_a+cpu); `dots`, `attention` and `none` recompute
        less; `auto:8` chooses within 8 GB of a device, value by value (docs/remat.md has all). Or a `Remat`.
      attention: `own` computes attention as the model does; `fused` by a fused kernel, for an unmodified model,
        wherever that is provably the same function (`zero.attention_report` says where, and why not elsewhere).
      combine_bytes: size up to which collectives are combined into one (the paper's C_B); None leaves it to XLA.
      quantize: a `Quantize`: params are gathered in int8 or fp8, and gradients sent in int8 or int4, block by block
        (docs/quantized.md); None sends both in the dtypes of the precision.
      quantize_gathers: the format that params are gathered in, `int8` or `fp8`; None takes what `quantize` says, as do
        the next four.
      quantize_grads: the format that gradients are sent in, `int8` or `int4`.
      quantize_block_size: elements of a shard that share a scale.
      quantize_grads_over: the mesh axis over which gradients are sent quantized, such as `replica`.
      quantize_error_feedback: add what quantization dropped of a gradient to that of the next step.
      overlap: compile with the options that let collectives run beside computation on the hardware (docs/overlap.md).
      compiler_options: further compiler options by name, without dashes, such as
        `{"xla_gpu_enable_while_loop_double_buffering": True}`. They replace those of `overlap`; None removes one.
      keep_gathered: at stage 3, save gathered params for the backward pass: a third less traffic, more memory.
      secondary: at stage 3, keep a secondary shard of the params (ZeRO++ hpZ): they are sharded over the axes of `data`
        inside a TPU slice or GPU host alone, so that no gather for their use crosses the slow network; all else is
        sharded over all of `data`. True takes the axes from the devices, names (`("data_0",)`) say which they are
        (docs/axes.md has the price in memory).
      offload: what is kept in host memory between steps: `optimizer` (the optimizer's state), `state` (the master
        params too), `all` (at stage 3 the params too), `model_state` (at stage 3 the model state alone, such as the
        frozen base of adapters), or an `Offload`; None keeps all on the devices (docs/offload.md).
      offload_fraction: the share of those bytes that is kept in host memory; None takes all, or what an `Offload` says,
        as do the following two.
      offload_paths: a regular expression of full paths of params, or of `model_state/...`: what belongs to them is kept
        in host memory.
      offload_window_bytes: bytes of a chunk of the update on a device.
      min_shard_size: leaves of fewer elements are replicated.
      layer_shards: whether master params and optimizer state of stacked matrices that the optimizer multiplies (muon)
        are sharded along the layers, if these divide over `data` (docs/matrix_optimizers.md). By default they are at
        stages 1 and 2, and not at stage 3, where the master params are `state.params`.
      param_specs: the model's own sharding, to which `data` is added: a tree (or prefix) of `PartitionSpec`s like the
        params, or a dict from regular expressions of full leaf paths (`layers/.*/kernel`) to `PartitionSpec`s. None
        takes those in Flax metadata (`nn.with_partitioning`, NNX sharding metadata).
      axis_rules: from the names of dims in such metadata to mesh axes (None: replicated), where they are not mesh axes.
      overrides: from regular expressions of full leaf paths to the exact spec of such leaves where their group is
        sharded (`PartitionSpec()` replicates them). They apply to params, master params and optimizer state.
      experts: a regular expression of full paths of params that are stacks of experts, `[..., experts, d, k]`. They are
        sharded over `data` along the experts, and at stage 3 activations go to them where that is fewer bytes than a
        gather (docs/gather_on_use.md). On the command line `auto` takes those of a reference model.
      data_axes: the mesh axes that ZeRO shards over, if not named `data` or `data_*`.
      replica_axes: the mesh axes of full copies, if not named `replica`.
      model_axes: the mesh axes of tensor parallelism, if not named `model` or `model_*`.
      pipe_axes: the mesh axes of the stages of a pipeline, if not named `pipe` or `pipe_*`: `num_microbatches` go
        through stages that have layers of their own (docs/pipeline.md).
      pipeline: the schedule of these stages: `gpipe` takes all microbatches forward and then all backward, `1f1b` takes
        one forward and one backward in turn, so that memory does not grow with `num_microbatches`; `circular:N` is
        `gpipe`, and `1f1b:N` is `1f1b`, with N groups of layers on each stage, which waits a part `1 / N` as long and
        sends N times as much.

    Example:
      >>> config = zero.ZeroConfig(stage=3, precision="bf16", num_microbatches=2, clip_norm=1.0)
      >>> config.stage
      3
    """

    stage: int = 3
    precision: Literal["auto", "fp32", "bf16", "fp16", "bf16-stochastic"] | Precision = "auto"
    keep_batch_dtype: Sequence[str] = ()
    num_microbatches: int = 1
    noise_scale: bool = False
    clip_norm: float | Literal["auto"] | None = "auto"
    loss_weight: str | None = "auto"
    skip_nonfinite: bool | None = None
    remat: str | Remat = "own"
    attention: Literal["own", "fused"] = "own"
    combine_bytes: int | None = None
    quantize: Quantize | None = None
    quantize_gathers: GatherFormat | None = None
    quantize_grads: GradFormat | None = None
    quantize_block_size: int | None = None
    quantize_grads_over: str | None = None
    quantize_error_feedback: bool | None = None
    overlap: bool = True
    compiler_options: Mapping[str, str | float | bool | None] | None = None
    keep_gathered: bool = False
    secondary: bool | Sequence[str] = False
    offload: Literal["optimizer", "state", "all", "model_state"] | Offload | None = None
    offload_fraction: float | None = None
    offload_paths: str | None = None
    offload_window_bytes: int | None = None
    min_shard_size: int = 1024
    layer_shards: bool | None = None
    param_specs: PyTree = None
    axis_rules: Mapping[str, str | None] | None = None
    overrides: Mapping[str, PartitionSpec] | None = None
    experts: str | None = None
    data_axes: Sequence[str] | None = None
    replica_axes: Sequence[str] | None = None
    model_axes: Sequence[str] | None = None
    pipe_axes: Sequence[str] | None = None
    pipeline: str = "gpipe"

    def __post_init__(self) -> None:
        groups = sharded_groups(self.stage)
        if self.loss_weight is not None and not isinstance(self.loss_weight, str):
            raise ValueError(f"loss_weight={self.loss_weight!r}: give 'auto', the name of an entry of aux, or None")
        check_fields(self, lowest={"num_microbatches": 1, "min_shard_size": 0, "combine_bytes": 0})
        precision = resolve_precision(self.precision)
        resolve_remat(self.remat)
        resolve_schedule(self.pipeline)
        self.resolved_offload()
        PathPatterns.of_list("keep_batch_dtype", self.keep_batch_dtype)
        PathPatterns("experts", {} if self.experts is None else {self.experts: True})
        if isinstance(self.overrides, Mapping) and None in self.overrides.values():
            raise ValueError(f"overrides={self.overrides!r}: None is no spec: give PartitionSpec() to replicate leaves")
        _check_secondary(self.secondary, self.stage)
        _check_compiler_options(self.compiler_options)
        quantize = self.resolved_quantize()
        _check_quantize(quantize, groups, f"stage={self.stage}", has_master=precision.has_master)
        if self.norm_limit is not None and self.norm_limit <= 0:
            raise ValueError(f"clip_norm={self.clip_norm!r}: give a positive norm, or None for no clipping")

    @property
    def norm_limit(self) -> float | None:
        """The norm that gradients are clipped to, or None."""
        return None if isinstance(self.clip_norm, str) else self.clip_norm

    def resolved_quantize(self) -> Quantize | None:
        """Returns what is sent quantized.

        Raises:
          ValueError: a value that is no such setting, or a block size without anything to quantize.
        """
        fields = self._fields_of("quantize_")
        if self.quantize is None and fields in ({}, {"error_feedback": False}):
            return None
        quantize = check_quantize(self.quantize)
        if quantize is None and fields and not fields.keys() & {"gathers", "grads"}:
            name = f"quantize_{next(iter(fields))}"
            raise ValueError(
                f"{name}={getattr(self, name)!r} without anything to quantize: give quantize_gathers or quantize_grads "
                "too"
            )
        return dataclasses.replace(quantize or Quantize(), **fields) if fields else quantize

    def resolved_offload(self) -> Offload | None:
        """Returns what is kept in host memory.

        Raises:
          ValueError: a field that is no such setting, or one of the settings without `offload`.
        """
        fields = self._fields_of("offload_")
        if self.offload is None and not fields:
            return None
        offload = resolve_offload(self.offload)
        if offload is None:
            name = f"offload_{next(iter(fields))}"
            raise ValueError(
                f"{name}={getattr(self, name)!r} without offload: say what is kept in host memory, as offload='state'"
            )
        if "paths" in fields:
            fields["paths"] = [fields["paths"]]
        return dataclasses.replace(offload, **fields)

    def _fields_of(self, prefix: str) -> dict[str, Any]:
        """Returns the fields of a prefix that are not None, by the rest of their names."""
        names = [field.name for field in dataclasses.fields(self) if field.name.startswith(prefix)]
        return {name.removeprefix(prefix): value for name in names if (value := getattr(self, name)) is not None}

    def axes_of(self, mesh: Mesh) -> Axes:
        """Returns the roles of a mesh's axes."""
        roles = {"data": self.data_axes, "replica": self.replica_axes, "model": self.model_axes, "pipe": self.pipe_axes}
        axes = axes_of(mesh, **roles)
        if (num_stages := axes.num_stages(mesh)) > 1:
            self._check_pipe(num_stages)
            self._check_grads_of_pipe(axes, mesh)
        if not self.secondary:
            return axes
        return dataclasses.replace(axes, secondary=secondary_axes(mesh, axes, self.secondary))

    def _check_pipe(self, num_stages: int) -> None:
        """Raises `ValueError` for what a pipeline of so many stages cannot have."""
        if self.num_microbatches < num_stages or (self.num_microbatches % num_stages and self.pipeline != "1f1b"):
            least = max(-(-self.num_microbatches // num_stages), 1) * num_stages
            raise ValueError(
                f"num_microbatches={self.num_microbatches} with {num_stages} stages (pipe): each stage works on "
                f"another microbatch, and has as many of the batch: give a multiple of {num_stages}, as "
                f"num_microbatches={least} or {4 * least} (the more, the less stages wait), with pipeline='1f1b' "
                "(one group of layers a stage) any number that is no smaller, or leave pipe out"
            )
        if resolve_schedule(self.pipeline).is_interleaved and resolve_precision(self.precision).loss_scale is not None:
            raise ValueError(
                f"precision={self.precision!r}: a loss scale with pipeline='1f1b' is not supported, as gradients of "
                "microbatches are made before the loss is scaled: give precision='bf16', or pipeline='gpipe'"
            )
        remat = resolve_remat(self.remat)
        if resolve_schedule(self.pipeline).is_interleaved and (remat.residuals == "offloaded" or remat.offload):
            raise ValueError(
                f"remat={remat.name!r} with pipeline={self.pipeline!r} is not supported, which keeps what stages need "
                "backward on the devices: give pipeline='gpipe', or a remat that offloads nothing, as remat='full'"
            )
        if self.secondary:
            raise ValueError(
                f"secondary with {num_stages} stages (pipe) is not supported: leave secondary or pipe out; at stage 1 "
                "a pipeline gathers params once a step"
            )

    def _check_grads_of_pipe(self, axes: Axes, mesh: Mesh) -> None:
        """Raises `ValueError` for what needs gradients of devices' own that a pipeline does not have."""
        is_once, quantize = "grads" not in sharded_groups(self.stage), self.resolved_quantize()
        if quantize is not None and not is_once and not set(quantize.grad_axes(axes)) <= set(axes.copies):
            raise ValueError(
                f"quantize: grads={quantize.grads!r} with pipe: at stage={self.stage} gradients are sent in every "
                "tick, as sums of all devices: give stage=1, which sends them once a step, grads_over='replica' with "
                "an axis replica, or leave grads out"
            )
        if quantize is not None and quantize.error_feedback and resolve_schedule(self.pipeline).num_groups > 1:
            raise ValueError(
                f"quantize: error_feedback with pipeline={self.pipeline!r} is not supported, as gradients of groups of "
                "layers are not where params are: give pipeline='gpipe' or '1f1b', or leave error_feedback out"
            )
        own = axes.of_stage.batch if is_once else axes.copies
        if self.noise_scale and axis_size(mesh, own) == 1:
            remedy = "data=2 or more" if is_once else "stage=1 and data=2 or more, or replica=2"
            raise ValueError(
                "noise_scale with pipe: stages add the gradients of microbatches where they are made, and there is one "
                f"sum of them: give {remedy}, or leave noise_scale out"
            )


def _check_quantize(quantize: Quantize | None, groups: frozenset[str], stage: str, *, has_master: bool) -> None:
    """Raises `ValueError` for anything to quantize that a stage does not send."""
    if quantize is None:
        return
    if quantize.grads is not None and "master" not in groups:
        raise ValueError(f"quantize: grads={quantize.grads!r}: {stage} scatters no gradients; give stage 1, 2 or 3")
    if quantize.gathers is None or "params" in groups:
        return
    if "master" not in groups:
        raise ValueError(f"quantize: gathers={quantize.gathers!r}: {stage} gathers no params; give stage=3, or 1 or 2")
    if not has_master:
        raise ValueError(
            f"quantize: gathers={quantize.gathers!r}: at {stage} without master params the gathered params are the "
            "only ones there are, and would lose precision in every step; give precision='bf16', which keeps float32 "
            "master params, or stage=3, whose params stay as they are"
        )


def _check_secondary(secondary: Any, stage: int) -> None:
    """Raises `ValueError` for no flag and no names of axes, and for a stage that has no sharded params."""
    if not isinstance(secondary, bool) and not are_names(secondary):
        raise ValueError(f"secondary={shown(secondary)}: give True, False, or names of axes of `data`, as ('data_0',)")
    if secondary and "params" not in sharded_groups(stage):
        raise ValueError(
            f"secondary={secondary!r}: stage {stage} does not shard params, so that there is no shard of them to keep: "
            "give stage=3, or leave secondary out"
        )


def _check_compiler_options(options: Any) -> None:
    """Raises `ValueError` for anything but a mapping from names of compiler options to their values."""
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise ValueError(f"compiler_options={options!r}: give a dict of compiler options, or None")
    for name, value in options.items():
        if not isinstance(name, str) or not re.fullmatch(r"\w+", name):
            raise ValueError(f"compiler_options: {name!r} is no name of an option: give one without dashes and value")
        if not isinstance(value, str | int | float | None) or value in ("", math.inf, -math.inf) or value != value:
            raise ValueError(
                f"compiler_options: {name}={value!r}: give a boolean, number or text, or None to remove it"
            )


def check_config(config: Any) -> ZeroConfig:
    """Returns the config; raises `ValueError` for anything else."""
    if not isinstance(config, ZeroConfig):
        raise ValueError(f"config={config!r} is no config: give a zero.ZeroConfig, as zero.ZeroConfig(stage=3)")
    return config
