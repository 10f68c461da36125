"""The loss of a step: the user's loss function, and the passes over its program.

The train step, the evaluation step and the estimates read one program, by the methods of `StepLoss` in their order:
`cast`, `unfused`, `fused`, `recomputed`, `unsharded` and `placed`, which docs/architecture.md follows. What the losses
of parts of a batch are averaged by is found of `fused` (`grads.choice`; a weighted evaluation). Estimates, which know
nothing of XLA's faults, have of `unsharded` what is `owned` alone. `placed` is the last: a gather that is within the
blocks of `recomputed` and the ticks of the stages is made again in the backward pass, not kept.

A new pass goes into `unfused` if it changes what is computed, into `to_place` if it only helps XLA.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.core.device_put import platform_of
from zero_jax.core.tree import PathPatterns, PyTree, key_shape, leaf_names, shapes_of
from zero_jax.dims import is_contraction
from zero_jax.program.dataflow import Dependence
from zero_jax.program.jaxprs import inner_jaxprs
from zero_jax.program.loss import LossProgram
from zero_jax.program.subcalls import CALLS
from zero_jax.sharding.mesh import Axes
from zero_jax.sharding.precision import cast_floating, resolve_precision
from zero_jax.training.batch import shapes_of_part
from zero_jax.training.loss.function import MeshLoss, user_loss
from zero_jax.training.state.placement import Placement, make_placement
from zero_jax.training.zero_config import ZeroConfig
from zero_jax.transforms import (
    AttentionReport,
    GatherOptions,
    MovedGrads,
    PipelinedProgram,
    Remat,
    RolledProgram,
    StagePlace,
    Stages,
    attention_report,
    complex_sums_by_part,
    convolutions_as_products,
    features_in_rows,
    fuse_attention,
    gathered,
    heads_by_tiles,
    lookups_by_place,
    own_examples,
    rematerialize,
    resolve_remat,
    resolve_schedule,
    unsharded_windows,
    used_shapes,
    wants_rows,
    with_stages,
)


@dataclasses.dataclass(frozen=True)
class StepLoss:
    """The loss of one trace of a step."""

    # The user's loss function as `LossFunction.named` returns it, traced once for a size of the batch
    program: LossProgram
    placement: Placement  # how the state is sharded
    config: ZeroConfig  # the config of the step
    is_nested: bool = False  # whether the step is within a user's function, which may have a `jax.checkpoint`
    judged: dict[Any, Any] = dataclasses.field(default_factory=dict)  # what `grads.choice.judge` judged, by its trace

    @classmethod
    def of(
        cls, loss_fn: Callable[..., Any] | MeshLoss, variables: PyTree, *, mesh: Mesh, config: ZeroConfig
    ) -> StepLoss:
        """Returns the loss of a step of params, or of `Variables` (arrays or shapes), from a user's loss function."""
        placement = make_placement(variables, mesh=mesh, config=config)
        return cls(LossProgram(user_loss(loss_fn, mesh, placement.axes).named()), placement, config)

    @property
    def is_on_tpu(self) -> bool:
        """Whether the devices are TPUs, for which some passes are."""
        return platform_of(self.placement.mesh) == "tpu"

    def with_remat(self, remat: Remat) -> StepLoss:
        """Returns the loss with another remat policy; both share the program, and what was judged of it."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, remat=remat))

    def cast(self, variables: PyTree, batch: PyTree, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Returns the variables and the batch that the program takes."""
        variables = self.placement.cast(variables)
        return variables, cast_batch(self.program, used_shapes(variables), batch, key, config=self.config)

    def shapes(self, variables: PyTree, batch: PyTree, num_parts: int = 1) -> tuple[PyTree, PyTree, Any]:
        """Returns the shapes of the program's arguments for a part of a batch.

        Params in host memory are among them as if they were on the devices, as the loss function fetches them.
        """
        batch = shapes_of_part(batch, num_parts)
        return *jax.eval_shape(self.cast, shapes_of(variables), batch, key_shape()), key_shape()

    @functools.cached_property
    def unfused(self) -> LossProgram:
        """The program in which attention is looked for, by `fused` and by reports.

        On TPUs targets' logits are not looked up in memory.
        """
        return lookups_by_place(self.program) if self.is_on_tpu else self.program

    @functools.cached_property
    def rolled(self) -> RolledProgram | None:
        """The program with fused attention and the equal layers of Python loops as scans; None without stages.

        Attention is fused first: once layers of a Python loop are a scan, masks that differ are data, of which no
        kernel is known.
        """
        num_stages = self.placement.num_stages
        num_groups = num_stages * resolve_schedule(self.config.pipeline).num_groups if num_stages > 1 else 0
        return RolledProgram(self.with_kernels, self.unfused, num_groups) if num_groups else None

    @functools.cached_property
    def with_kernels(self) -> LossProgram:
        """The program, with its attention by fused kernels if the config asks for them."""
        mesh, axes, attention = self.placement.mesh, self.placement.axes, self.config.attention
        if attention == "own":
            return self.unfused
        return LossProgram.of(fuse_attention(self.unfused, attention, mesh=mesh, axes=axes))

    @functools.cached_property
    def fused(self) -> LossProgram:
        """The program `with_kernels`; layers that will be stages are those of a scan in it."""
        return self.with_kernels if self.rolled is None else self.rolled.then(convolutions_as_products)

    def why_unfused(self, *arguments: Any) -> str:
        """Says why no attention is fused, for arguments as of `shapes`; empty if some may be."""
        return "" if self.rolled is None else self.rolled.why[self.rolled.trace(*arguments)]

    def attentions(self, variables: PyTree, batch: PyTree) -> AttentionReport:
        """Reports the attentions of the loss: which ones fused kernels compute on this mesh, and why not the others."""
        placement, arguments = self.placement, self.shapes(variables, batch)
        report = attention_report(self.unfused, *arguments, mesh=placement.mesh, axes=placement.axes)
        return report.left(why) if (why := self.why_unfused(*arguments)) else report

    def recomputed(self, program: LossProgram) -> LossProgram:
        """Returns a program with its blocks in `jax.checkpoint`, by the config's remat policy."""
        if self.config.remat == "own":
            return program
        placement = self.placement
        mesh, axes, specs = placement.mesh, placement.axes, placement.loss_shardings()
        return LossProgram.of(rematerialize(program, self.config.remat, mesh=mesh, axes=axes, specs=specs))

    def to_place(self, program: LossProgram | None = None, *, mapped: bool = False) -> LossProgram:
        """Returns the program that `placed` takes: `fused`, or what was made of it, after all passes in between.

        It may be to be `mapped` over devices by `jax.vmap`.
        """
        return self.unsharded(self.recomputed(self.fused if program is None else program), mapped=mapped)

    def owned(self, program: LossProgram) -> LossProgram:
        """Returns a program whose devices compute their own examples where XLA would compute all on each."""
        mesh, axes = self.placement.mesh, self.placement.axes
        return program if self.placement.num_stages > 1 else own_examples(program, mesh=mesh, axes=axes)

    def unsharded(self, program: LossProgram, *, mapped: bool = False) -> LossProgram:
        """Returns a program with whole values where XLA partitions operations on sharded ones wrongly.

        It is `owned`, unless it is to be `mapped` over devices. On TPUs complex numbers are summed by part, and heads
        are made in the cheapest form.
        """
        program = program if mapped else self.owned(program)
        program = unsharded_windows(program, mesh=self.placement.mesh, axes=self.placement.axes)
        return heads_by_tiles(complex_sums_by_part(program)) if self.is_on_tpu else program

    def stages(self, axes: Axes) -> Stages:
        """Returns the stages of a pipeline that layers are cut into.

        `axes` are the roles of the axes of the batch that the program is called on.
        """
        placement, config = self.placement, self.config
        return Stages(
            place=StagePlace(mesh=placement.mesh, pipe=axes.pipe, batch=axes.of_stage.batch),
            axes=placement.axes,
            num_microbatches=config.num_microbatches,
            recompute=resolve_remat(config.remat).policy != "none",
            schedule=resolve_schedule(config.pipeline),
            reduce_dtype=placement.precision.reduce,
        )

    def staged(self, program: LossProgram, axes: Axes, moved: MovedGrads | None = None) -> LossProgram:
        """Returns a program with its layers as stages, whose params are used as they are stored; see `with_stages`."""
        is_staged = self.placement.num_stages > 1
        return with_stages(program, self.stages(axes), moved) if is_staged else program

    def placed(self, program: LossProgram, *, with_copies: bool = True, mapped: bool = False) -> Callable[..., Any]:
        """Returns a program with params gathered on use, or gradients reduce-scattered, by the stage.

        It is called on the batch of all copies of the params (`with_copies`), or of one copy, or is to be `mapped` over
        devices, whose gradients are then summed at each use of a param.
        """
        placement, mesh, reduce_dtype = self.placement, self.placement.mesh, self.placement.precision.reduce
        axes, gathers = placement.axes.of_params(with_copies=with_copies), "params" in placement.groups
        # Rows are of examples that all devices have some of: of a microbatch those of a stage may be fewer.
        if self.is_on_tpu and with_copies and not mapped and placement.num_stages == 1 and wants_rows(mesh):
            program = features_in_rows(program, mesh=mesh, axes=placement.axes)
        # On a mesh with other axes XLA partitions some convolutions wrongly, at every stage.
        has_other_axes = placement.axes.size_beside_batch(mesh) > 1
        if not (mapped or "master" in placement.groups or reduce_dtype is not None or has_other_axes):
            return self.staged(program, axes)  # stage 0: XLA's all-reduces of whole gradients are what is wanted
        if placement.num_stages > 1:
            program = PipelinedProgram(program, self.stages(axes))
        # Outermost: no user's `jax.checkpoint`, and no loop over ticks, is around the layers.
        options = GatherOptions(
            mesh=mesh,
            axes=axes,
            stored_unsharded=not gathers,
            regather=gathers and not self.config.keep_gathered,
            reduce_dtype=reduce_dtype,
            quantize=placement.quantize if gathers or mapped else None,
            mapped=mapped,
            outermost=placement.num_stages == 1 and not self.is_nested,
        )
        placed = gathered(program, placement.loss_shardings(), options)
        # Params that are gathered over a part of the batch's axes: the others, of copies, become the major ones.
        if mapped or not (gathers and with_copies) or axes.batch == placement.axes.batch:
            return placed
        return _by_copies(placed, NamedSharding(mesh, PartitionSpec(axes.batch)))


def _by_copies(loss_fn: Callable[..., Any], sharding: NamedSharding) -> Callable[..., Any]:
    """Returns a loss function that reorders its batch: the examples of each copy of the params become contiguous."""

    @functools.wraps(loss_fn)
    def call(variables: PyTree, batch: PyTree, key: jax.Array) -> Any:
        batch = jax.tree.map(lambda x: lax.with_sharding_constraint(x, sharding) if jnp.ndim(x) else x, batch)
        return loss_fn(variables, batch, key)

    return call


# An input of the model is an operand, direct or indirect, of an operation with a param. Targets, masks and weights are
# used after the last param: casting them would cost the loss precision (`mask.sum()` in bfloat16 has 8 bits) and save
# nothing.
_PARAMS = frozenset({-1})


def cast_batch(program: LossProgram, params: PyTree, batch: PyTree, key: jax.Array, *, config: ZeroConfig) -> PyTree:
    """Casts the model's floating inputs in a batch to the compute dtype.

    `params` are in the compute dtype. The loss function is traced for it, if any leaf would be cast.

    Raises:
      ValueError: a pattern of `keep_batch_dtype` matches the path of no leaf.
    """
    compute, names = resolve_precision(config.precision).compute, leaf_names(batch)
    patterns = PathPatterns.of_list("keep_batch_dtype", config.keep_batch_dtype)
    patterns.check_matched(names)
    leaves, tree = jax.tree.flatten(batch)
    cast = [x if patterns.matches(name) else cast_floating(x, compute) for name, x in zip(names, leaves, strict=True)]
    changed = {i for i, (old, new) in enumerate(zip(leaves, cast, strict=True)) if old.dtype != new.dtype}
    if changed:  # convolutions refuse mixed dtypes: the trace is of the batch with all of them cast
        changed &= _model_leaves(program, params, tree.unflatten(cast), key)
    return tree.unflatten([new if i in changed else old for i, (old, new) in enumerate(zip(leaves, cast, strict=True))])


def _model_leaves(program: LossProgram, params: PyTree, batch: PyTree, key: jax.Array) -> set[int]:
    """Returns the indices of the leaves of the batch that the model reads."""
    made_of = [_PARAMS for _ in jax.tree.leaves(params)]
    made_of += [frozenset({i}) for i in range(len(jax.tree.leaves(batch)))]
    made_of += [frozenset() for _ in jax.tree.leaves(key)]
    inputs = _ModelInputs()
    inputs.run(program.trace(params, batch, key).closed, made_of)
    return set(inputs.notes)


class _ModelInputs(Dependence):
    """Finds the leaves of the batch, and `_PARAMS`, that each value depends on; notes leaves combined with params."""

    enters = CALLS | {"cond", "scan"}

    def operation(self, eqn: Any, operands: list[frozenset[int]]) -> list[frozenset[int]]:
        results = super().operation(eqn, operands)
        made_of = frozenset().union(*operands)
        # The sum of a loss and a regularizer takes nothing into the model.
        is_total = all(var.aval.shape == () for var in eqn.outvars) and not is_contraction(eqn)
        # An operand that is a param, or made of params alone; a function that is not entered may combine any of its.
        if (_PARAMS in operands and not is_total) or (inner_jaxprs(eqn) and made_of >= _PARAMS):
            self.notes.update(dict.fromkeys(made_of - _PARAMS))
        return results
