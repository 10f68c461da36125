"""Traces a loss function before anything is compiled: its residuals, traffic over `model`, FLOPs, and its stages."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from zero_jax.core.device_put import is_on_host
from zero_jax.core.signatures import check_arguments
from zero_jax.core.text_tables import Report
from zero_jax.core.tree import PyTree, key_shape
from zero_jax.core.variables import Variables, as_variables, joined
from zero_jax.dims import Move, Propagation, ValueSharding, propagate_shardings, sources
from zero_jax.program.jaxprs import open_jaxpr, source_line, with_results, without_dead_code
from zero_jax.sharding.chains import SENT
from zero_jax.sharding.mesh import axis_size, on_mesh
from zero_jax.sharding.spec import dims_of, num_shards, without
from zero_jax.training.batch import shapes_of_batch
from zero_jax.training.grads.choice import judge
from zero_jax.training.loss.function import MeshLoss
from zero_jax.training.loss.param_uses import ParamUses, phase_of, reshards, uses_of_params
from zero_jax.training.loss.program import StepLoss
from zero_jax.training.state.placement import Placement
from zero_jax.training.state.train_state import merge, trainable
from zero_jax.training.zero_config import ZeroConfig
from zero_jax.transforms import (
    Kernel,
    PipelinedProgram,
    PipelineReport,
    ResidualBytes,
    count_flops,
    kernels,
    resolve_schedule,
)


def pipeline_report(
    loss_fn: Callable[..., Any] | MeshLoss, params: PyTree, batch: PyTree, *, mesh: Mesh, config: ZeroConfig
) -> PipelineReport:
    """Reports the stages that a train step cuts a loss into: their layers, what moves between them, and the bubble.

    Of a loss that cannot be cut it says why, with the line, and what to do. Nothing is compiled.

    Args:
      loss_fn: as for `make_train_step`.
      params: the params, or `Variables`; arrays or `ShapeDtypeStruct`s.
      batch: the global batch of a step, likewise.
      mesh: the mesh, with an axis `pipe`.
      config: the config of the step, with its microbatches.

    Raises:
      ValueError: the config has other microbatches than the stages of the mesh can have, or the step refuses the aux.

    Example:
      >>> def layers(params, batch):
      ...     return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params)[0].mean()
      >>> staged, config = zero.make_mesh(data=2, pipe=4), zero.ZeroConfig(stage=1, num_microbatches=4)
      >>> report = zero.pipeline_report(layers, jnp.ones((4, 64, 64)), batch, mesh=staged, config=config)
      >>> report.num_stages, report.num_microbatches
      (4, 4)
    """
    check_arguments(loss_fn=loss_fn, mesh=mesh, config=config)
    batch, loss = shapes_of_batch(batch), StepLoss.of(loss_fn, params, mesh=mesh, config=config)
    if loss.placement.num_stages == 1:
        why = f"the mesh {dict(mesh.shape)} has no axis `pipe`: make it with zero.make_mesh(pipe=...)"
        return PipelineReport(num_stages=1, num_microbatches=config.num_microbatches, why_none=why)
    return _reported_stages(loss, params, batch)


def _reported_stages(loss: StepLoss, params: PyTree, batch: PyTree) -> PipelineReport:
    """Returns the report of a loss on a mesh with stages, of all examples or, where they run these, a device's."""
    placement, program, arguments = loss.placement, loss.to_place(), loss.shapes(params, batch)
    axes, num_parts = placement.axes, 1
    with on_mesh(placement.mesh):
        if placement.grad_plan.takes_parts and (judged := judge(loss, arguments)).plan.sums_to_masters:
            axes, num_parts = axes.of_device, axis_size(placement.mesh, judged.plan.once_over)
            program, arguments = loss.to_place(judged.program), judged.shapes_of_part(arguments, num_parts)
        report = PipelinedProgram(program, loss.stages(axes)).report(*arguments, num_parts=num_parts)
        return dataclasses.replace(report, unfused=loss.why_unfused(*loss.shapes(params, batch, num_parts)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossTrace(Report):
    """Memory, traffic and operations of the loss and its gradient, by their jaxpr; prints as a line.

    Attributes:
      moves: the collectives over the axes that are neither `data` nor `replica`, what moves between the stages of a
        pipeline, and activations that go to experts (`ZeroConfig.experts`), of a step.
      residuals: bytes that one device keeps from the forward to the backward pass of a microbatch.
      peak_bytes: bytes of activations, residuals among them, alive at once on one device; elementwise work counts as
        fused, gathered params and gradients do not count.
      layer_param_bytes: bytes on one device of the params that an iteration of a loop over layers uses, gathered over
        `data`; 0 without such a loop.
      other_param_bytes: bytes on one device of the largest other param, gathered over `data`.
      model_state_bytes: the same of model state, such as a frozen base.
      flops: operations of a step's products over all devices, recomputation included.
      unknown: why `moves` are not complete; empty where they are.
      kernels: the kernels of the loss and its gradient of a microbatch, as `transforms.kernels` takes them to be.
      uses: by `escaped` path, at stage 3 where params are gathered, and what else moves of them; at stages 1 and 2
        what moves of the gradients of tables whose rows are looked up.
      sharded: the groups of the state that are sharded, which the `uses` are of.

    Example:
      >>> trace = zero.trace_loss(loss_fn, state.params, batch, mesh=mesh, config=config)
      >>> trace.flops
      655360
    """

    moves: tuple[Move, ...]
    residuals: ResidualBytes
    peak_bytes: float
    layer_param_bytes: float
    other_param_bytes: float
    model_state_bytes: float
    flops: float
    unknown: str
    kernels: tuple[Kernel, ...] = dataclasses.field(default=(), repr=False)
    uses: Mapping[str, ParamUses] = dataclasses.field(default_factory=dict, repr=False)
    sharded: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    @property
    def param_bytes(self) -> float:
        """Bytes on one device of the params that are in use at once, gathered over `data`."""
        return max(self.layer_param_bytes, self.other_param_bytes, self.model_state_bytes)

    def whole_bytes(self, *, are_sharded: bool, scatters: bool, stays: float = 0.0) -> float:
        """Returns the bytes of params and gradients that are whole on a device at once beside what it stores.

        A layer's params are gathered, and each gradient of them is reduced to a shard as soon as it is made; the
        largest other param, such as the table of the logits, is beside its gradient; model state has none. Of params
        that are stored whole it is the gradient, before it is reduced (`scatters`). A share of a layer's params may not
        move: experts.
        """
        layer = (1 - stays) * self.layer_param_bytes
        if not are_sharded:
            return scatters * max(layer, self.other_param_bytes)
        return max(layer, 2 * self.other_param_bytes, self.model_state_bytes)

    def shard_bytes(self, *, casts: float, grads: float, num_microbatches: int) -> float:
        """Returns the bytes of shards of cast params and of gradients that are alive at once, of those of each.

        Loops, over layers or microbatches, have both of all layers; without, a gradient comes when its param goes.
        """
        return casts + grads if self.layer_param_bytes or num_microbatches > 1 else max(casts, grads)

    @property
    def model_bytes(self) -> float | None:
        """Bytes that one device sends in a step by all `moves`; None where they are not known."""
        return None if self.unknown else sum(move.sent_bytes * move.times for move in self.moves)

    def __str__(self) -> str:
        host = f" and {self.residuals.host_bytes / 1e6:.1f} MB in host memory" if self.residuals.host_bytes else ""
        sent = f"unknown ({self.unknown})" if self.model_bytes is None else f"{self.model_bytes / 1e6:.1f} MB"
        return (
            f"residuals {self.residuals.device_bytes / 1e6:.1f} MB a device{host}, activations at the peak "
            f"{self.peak_bytes / 1e6:.1f} MB, sent besides params and gradients {sent} a step"
        )


def trace_loss(
    loss_fn: Callable[..., Any] | MeshLoss, params: PyTree, batch: PyTree, *, mesh: Mesh, config: ZeroConfig
) -> LossTrace:
    """Traces a loss function and its gradient as a train step takes them, and propagates the model's sharding.

    Nothing is compiled. Gathers of params and reductions of gradients are not among them: `comms.estimate` has these.

    Args:
      loss_fn: as for `make_train_step`.
      params: the params, or `Variables` (arrays or `ShapeDtypeStruct`s).
      batch: the global batch of a step.
      mesh: the mesh.
      config: the model's specs, remat policy, precision and microbatches.

    Raises:
      ValueError: on a mesh with stages the loss cannot be cut into them.

    Example:
      >>> shapes = jax.eval_shape(init_fn, jax.random.key(0))
      >>> zero.trace_loss(loss_fn, shapes, batch, mesh=mesh, config=config).param_bytes
      16384.0
    """
    batch, loss = shapes_of_batch(batch), StepLoss.of(loss_fn, params, mesh=mesh, config=config)
    return trace_step_loss(loss, params, batch, with_uses=True)


def trace_step_loss(loss: StepLoss, params: PyTree, batch: PyTree, *, with_uses: bool = False) -> LossTrace:
    """Returns the trace of the loss of a step; see `trace_loss`. Its `uses` take another trace."""
    k = loss.placement.grad_plan.num_microbatches  # those of a pipeline are on all stages: as if they were one
    variables, microbatch, _ = loss.shapes(params, batch, num_parts=k)
    traced = _TracedLoss(loss.owned(loss.recomputed(loss.fused)), variables, microbatch, loss.placement)
    jaxpr = traced.gradient()
    gradient = traced.propagate_gradient(jaxpr)
    moves = [dataclasses.replace(move, times=move.times * k) for move in gradient.moves]
    moves += to_experts(loss, variables, microbatch)
    residuals, peak_bytes = traced.residuals(), gradient.peak_bytes
    if loss.placement.num_stages > 1:
        stages = _reported_stages(loss, params, batch)
        if stages.why_none:
            raise ValueError(stages.why_none)
        fields: dict[str, Any] = {"kind": "collective-permute", "axes": loss.placement.axes.pipe, "times": 1}
        sent = ((loop.where, *of_phase) for loop in stages.loops for of_phase in loop.sent)
        moves += [Move(source=at, phase=phase, dtype=kind, sent_bytes=x, **fields) for at, phase, kind, x in sent]
        schedule = resolve_schedule(stages.schedule)
        if schedule.is_interleaved:
            all_bytes = residuals.device_bytes
            kept_bytes, num_layers = 0.0, sum(loop.num_layers for loop in stages.loops)
            for loop in stages.loops:
                # Of the microbatches that wait, or of one at a time and the inputs of a group of those that wait.
                of_one = all_bytes * loop.num_layers / num_layers / (stages.num_microbatches * schedule.num_groups)
                inputs = loop.num_kept * loop.bytes_per_tick
                kept_bytes += inputs + of_one if loop.recomputed else loop.num_kept * of_one
            other_bytes = (peak_bytes - all_bytes) * stages.num_stages / stages.num_microbatches
            peak_bytes, residuals = kept_bytes + other_bytes, dataclasses.replace(residuals, device_bytes=kept_bytes)
    return LossTrace(
        moves=tuple(moves),
        residuals=residuals,
        peak_bytes=peak_bytes,
        layer_param_bytes=gradient.sliced_param_bytes,
        other_param_bytes=traced.largest_bytes(of_state=False),
        model_state_bytes=traced.largest_bytes(of_state=True),
        flops=k * count_flops(jaxpr),
        unknown=gradient.unknown,
        kernels=kernels(jaxpr, gradient.values, sizes=traced.sizes, batch_axes=loss.placement.axes.batch),
        uses=_uses_of_params(loss, variables, microbatch) if with_uses else {},
        sharded=tuple(sorted(loss.placement.groups)),
    )


def to_experts(loss: StepLoss, variables: PyTree, batch: PyTree) -> list[Move]:
    """Returns what a device sends of activations to experts that stay sharded, and home, in all microbatches."""
    placement = loss.placement
    axes_of_experts = {leaf.of_experts for leaf in jax.tree.leaves(placement.params)} - {()}
    if not axes_of_experts or "params" not in placement.groups or placement.num_stages > 1:
        return []
    num_shards, moves = axis_size(placement.mesh, placement.axes.batch), []
    jaxpr = _gradient_of(loss, variables, batch)
    for eqn, stack, times in reshards(jaxpr, times=placement.grad_plan.num_microbatches):
        if SENT not in stack:
            continue
        (aval,) = (var.aval for var in eqn.outvars)
        there, home = (set(dims_of(x, aval.ndim)) for x in eqn.params["forward"].shardings)
        axes = next(axes for axes in axes_of_experts if axes in there ^ home)  # those that move to another dim
        sent = aval.size * aval.dtype.itemsize / num_shards * (1 - 1 / axis_size(placement.mesh, axes))
        fields = {"axes": axes, "dtype": str(aval.dtype), "phase": phase_of(stack), "source": source_line(eqn)}
        moves.append(Move(kind="all-to-all", **fields, sent_bytes=sent, times=times))
    return moves


def share_staying(placement: Placement, moves: Sequence[Move]) -> float:
    """Returns the share of params that are experts of other devices, which activations go to by some of the moves."""
    mesh, staying, total, sent = placement.mesh, 0.0, 0.0, {move.axes for move in moves}
    for leaf in jax.tree.leaves(placement.params):
        size = math.prod(leaf.shape) / num_shards(mesh, without(leaf.dims, placement.axes.data))
        staying += size * (1 - 1 / axis_size(mesh, leaf.of_experts)) if leaf.of_experts in sent else 0.0
        total += size
    return staying / total if total else 0.0


def _uses_of_params(loss: StepLoss, variables: PyTree, batch: PyTree) -> dict[str, ParamUses]:
    """Returns how params are used whose gradients are summed at each use, over all axes of the batch."""
    placement, plan = loss.placement, loss.placement.grad_plan
    is_plain = placement.num_stages == 1 and not (plan.once_over or plan.at_use)
    if "master" not in placement.groups or not is_plain or axis_size(placement.mesh, placement.axes.data) == 1:
        return {}
    return uses_of_params(_gradient_of(loss, variables, batch), placement)


def _gradient_of(loss: StepLoss, variables: PyTree, batch: PyTree) -> Any:
    """Returns the jaxpr of the loss and its gradient as a step places them."""
    with on_mesh(loss.placement.mesh):
        return _TracedLoss(loss.placed(loss.to_place()), variables, batch, loss.placement).gradient()


class _TracedLoss:
    """A loss function with the shapes and shardings of its inputs."""

    def __init__(self, loss: Callable[..., Any], variables: PyTree, batch: PyTree, placement: Placement):
        mesh, axes = placement.mesh, placement.axes
        self.sizes = dict(mesh.shape)
        # What moves over the axes of the batch is gathers of params and sums of gradients: `comms.estimate` has these.
        self.counted = tuple(name for name in mesh.axis_names if name not in axes.batch)
        self.arguments = (as_variables(variables), batch, key_shape())
        leaves = jax.tree.leaves((placement.params, placement.model_state))
        self.inputs = [ValueSharding(dims=without(leaf.dims, axes.batch)) for leaf in leaves]  # as they are gathered
        for x in jax.tree.leaves(batch):
            over = axes.batch if x.ndim and x.shape[0] % axis_size(mesh, axes.batch) == 0 else ()
            self.inputs.append(ValueSharding(dims=((over, *((),) * (x.ndim - 1)) if x.ndim else ()), varies=True))
        self.inputs.append(ValueSharding(dims=(), varies=True))  # the key
        self.loss = loss

    @functools.cached_property
    def derivative(self) -> tuple[Any, int]:
        """The jaxpr of loss, aux and gradient by the floating params, and of what is kept from one to the other.

        With it comes how many results are not what is kept.
        """

        def derivative(variables: Variables, batch: PyTree, key: jax.Array) -> Any:
            of = lambda params: joined(merge(variables.params, params), variables.model_state)  # noqa: E731
            loss_fn = lambda params: self.loss(of(params), batch, key)  # noqa: E731
            loss, vjp, aux = jax.vjp(loss_fn, trainable(variables.params), has_aux=True)
            return (loss, aux, *vjp(np.ones((), loss.dtype))), vjp

        closed, shapes = jax.make_jaxpr(derivative, return_shape=True)(*self.arguments)
        return open_jaxpr(closed)[0], len(jax.tree.leaves(shapes[0]))

    def gradient(self) -> Any:
        """Returns the jaxpr of loss and gradient."""
        jaxpr, num_results = self.derivative
        return without_dead_code(with_results(jaxpr, jaxpr.outvars[:num_results]))

    def propagate_gradient(self, jaxpr: Any) -> Propagation:
        """Returns the shardings of the jaxpr of loss and gradient."""
        num, num_grads = len(jaxpr.outvars), len(jax.tree.leaves(trainable(self.arguments[0].params)))
        return self._propagate(jaxpr, kept=range(num - num_grads, num))  # the gradients come last

    def largest_bytes(self, *, of_state: bool) -> float:
        """Returns the bytes on one device of the largest param, or leaf of model state, that is no stack of layers."""
        leaves, num_params = jax.tree.leaves(self.arguments[0]), len(jax.tree.leaves(self.arguments[0].params))
        chosen = slice(num_params, None) if of_state else slice(num_params)
        pairs = zip(leaves[chosen], self.inputs[chosen], strict=False)  # further inputs are the batch
        parts = [(x, math.prod(self.sizes[axis] for dim in sharding.dims for axis in dim)) for x, sharding in pairs]
        return max((x.size * x.dtype.itemsize / num for x, num in parts if x.ndim < 3), default=0.0)

    def residuals(self) -> ResidualBytes:
        """Returns the bytes of the residuals, without those that depend on the params alone."""
        jaxpr, num_results = self.derivative
        jaxpr = without_dead_code(with_results(jaxpr, jaxpr.outvars[num_results:]))
        sources_of = sources(jaxpr)
        variables = list(dict.fromkeys([*sources_of, *(x for each in sources_of.values() for x in each)]))
        propagated = self._propagate(jaxpr.replace(outvars=variables))
        sizes = {
            var: num_bytes if sharding.varies and var not in jaxpr.invars else 0.0
            for var, sharding, num_bytes in zip(variables, propagated.outputs, propagated.local_bytes, strict=True)
        }
        saved: set[Any] = set()
        # The result of elementwise operations is saved, or recomputed from its saved sources: the compiler takes the
        # smaller. First what is its own source, as it is saved in any case.
        for var, var_sources in sorted(sources_of.items(), key=lambda item: item[1] != (item[0],)):
            source_bytes = sum(sizes[source] for source in var_sources if source not in saved)
            saved |= {var} if sizes[var] <= source_bytes else set(var_sources)
        device, host = (
            sum(sizes[var] for var in saved if is_on_host(var.aval) == on_host) for on_host in (False, True)
        )
        return ResidualBytes(device_bytes=device, host_bytes=host)

    def _propagate(self, jaxpr: Any, kept: Any = ()) -> Propagation:
        return propagate_shardings(jaxpr, self.inputs, sizes=self.sizes, counted=self.counted, kept=kept)
