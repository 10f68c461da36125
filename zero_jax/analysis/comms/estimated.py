"""Estimates the traffic of a ZeRO train step by formula: section 7 of the paper, for each mesh axis of `data`.

The traffic over `model` is read from a trace of the loss function (`loss_trace.py`): section 8 counts it for Megatron's
transformer, the trace for any model.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zero_jax.analysis.comms.rows import SentBytes, axes_name
from zero_jax.core.signatures import check_arguments
from zero_jax.core.text_tables import Report, aligned
from zero_jax.core.variables import MODEL_STATE
from zero_jax.sharding.chains import escaped
from zero_jax.sharding.mesh import axis_size, networks
from zero_jax.sharding.precision import Precision, wide
from zero_jax.sharding.quantized import Blocks, blocks_of_leaf
from zero_jax.sharding.rules import LeafPlacement
from zero_jax.sharding.spec import Dims, gather_steps, scatter_steps, steps_by_dim, without
from zero_jax.training import (
    LossTrace,
    ParamUses,
    Placement,
    TrainState,
    ZeroConfig,
    check_is_state,
    matrix_dealings,
    step_placement,
    used_by_optimizer,
)
from zero_jax.transforms import DeviceSum, resolve_schedule

Move = tuple[tuple[str, ...], float]  # mesh axes, and the elements that a device sends over them
# Traces and states name dtypes as NumPy does, programs as HLO does; rows of both are compared.
_HLO_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "int8": "s8", "uint8": "u8"}
_HLO_DTYPES |= {"complex64": "c64", "complex128": "c128"}
# The collectives of each step of a sum of devices' own gradients
_SUMMED_BY = {"scatter": ("all-to-all",), "parts": ("all-to-all", "all-gather"), "all": ("all-reduce",)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EstimateRow:
    """What one device sends in a step, over some mesh axes, for one purpose.

    Attributes:
      kind: 'all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all' or 'collective-permute'.
      axes: The mesh axes.
      dtype: HLO dtype name.
      phase: 'forward', 'backward' or 'update'.
      total_sent_bytes: Bytes per device and step.

    Example:
      >>> row = zero.comms.estimate(state, mesh=mesh, config=config).rows[0]
      >>> row.total_sent_bytes > 0
      True
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    phase: str
    total_sent_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommsEstimate(SentBytes, Report):
    """The ideal traffic of a step, per device; prints as a table.

    Attributes:
      rows: The traffic by kind, axes, dtype and phase.
      num_params: The params that have gradients (the paper's psi), of one share of the `model` axis.
      data_axes: The mesh axes that carry `data` or `replica`.
      not_counted: Why the rows over the other axes are not there, or not all of them; empty where they are.
      networks: The network of each mesh axis, as `sharding.mesh.networks` names it.

    Example:
      >>> estimated = zero.comms.estimate(state, mesh=mesh, config=config)
      >>> estimated.num_params
      8192
    """

    rows: tuple[EstimateRow, ...]
    num_params: int
    data_axes: tuple[str, ...] = ()
    not_counted: str = ""
    networks: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        table = [("kind", "axes", "dtype", "phase", "MB")]
        for row in self.rows:
            table.append((row.kind, axes_name(row.axes), row.dtype, row.phase, f"{row.total_sent_bytes / 1e6:.3f}"))
        table.append(("total", "", "", "", f"{self.sent_bytes / 1e6:.3f}"))
        data = sum(row.total_sent_bytes for row in self.rows if set(row.axes) <= set(self.data_axes))
        per_param = data / self.num_params if self.num_params else 0.0
        over = "" if data == self.sent_bytes else " over data"
        lines = [f"{aligned(table, right=(4,))}, {per_param:.3f} bytes a param{over}"]
        lines += [f"not counted: {self.not_counted}"] if self.not_counted else []
        return "\n".join(lines)


def estimate(
    state: TrainState,
    *,
    mesh: Mesh,
    config: ZeroConfig,
    traced: LossTrace | None = None,
    tx: optax.GradientTransformation | None = None,
) -> CommsEstimate:
    """Estimates what one device sends in a train step at best (paper sections 7 and 8).

    - Over `data`: 2 psi elements at stages 0 to 2 and 3 psi at stage 3, times (n - 1) / n, where psi is one share of
      the axis `model`. The stages of a gather over several mesh axes add up to the same. A lookup that moves rows, or a
      last use that is gathered once, costs less.
    - Between copies of the params (`replica`, and with a secondary shard the axes of `data` outside it): shards of
      gradients, once a step, and with a secondary shard those of new params.
    - Integer params are not counted. Those that the optimizer freezes are, unless `tx` is given.
    - Model state at stage 3: one gather a microbatch. Leaves that gradients flow through are gathered again; those that
      are only averaged on their shards are not gathered.
    - Over the stages of a pipeline: what microbatches take from stage to stage, by the trace of the loss function.
    - Experts that stay sharded (`ZeroConfig.experts`): with `traced`, the activations that go to them and home, in the
      place of their params and gradients.
    - Over `model`: the traffic in the trace of the loss function. For Megatron's transformer blocks these are
      12 x seq x hidden elements a block and sample, of which 2 are dead code of the recomputation.

    Args:
      state: The train state; abstract leaves will do.
      mesh: The mesh.
      config: Stage, precision, microbatches.
      traced: From `zero.trace_loss`, for the traffic over `model`, between the stages of a pipeline and to experts;
        without it only params and gradients over `data` and `replica` are counted.
      tx: The optimizer; with it, params that it freezes are gathered at stage 3 and otherwise do not move, and matrices
        that its update needs whole are counted.

    Example:
      >>> estimated = zero.comms.estimate(state, mesh=mesh, config=config)
      >>> {(row.kind, row.axes) for row in estimated.rows} >= {("all-gather", ("data",))}
      True
    """
    check_arguments(traced=traced, **({} if tx is None else {"tx": tx}))
    placement = step_placement(check_is_state(state, who="comms.estimate"), tx, mesh=mesh, config=config)
    rows: list[EstimateRow] = []
    params = _traffic_of_params(state, placement, config, traced)
    needed, same = used_by_optimizer(tx, state, mesh=mesh, config=config)
    known = traced.uses if traced and {*traced.sharded} == placement.groups else {}  # a trace may be of another stage
    for param, is_needed, is_same in zip(params, needed, same, strict=True):
        phases = {"forward", *(["backward"] if any(needed) else ())}  # any: else there is no backward pass
        # Rows that are looked up go to their examples, and what a pass ends with is not gathered again.
        if uses := known.get(escaped(param.leaf.path)):
            rows += [_of_move(move) for move in uses.moves if is_needed or move.phase == "forward"]
            phases &= {*uses.gathered_in}
        gathered_in = {*phases, *([] if is_same else ["update"])}
        is_scattered = uses is None or uses.is_scattered
        rows += param.rows(has_grad=is_needed, gathered_in=gathered_in, is_scattered=is_scattered)
    for leaf in jax.tree.leaves(placement.model_state) if MODEL_STATE in placement.groups else ():
        uses = known.get(escaped(leaf.path)) or ParamUses(("forward",))
        rows += [_of_move(move) for move in uses.moves]
        rows += _LeafTraffic(leaf, placement, config).model_state_rows(uses.gathered_in)
    dealings = () if tx is None else matrix_dealings(tx, state, placement)
    rows += [_of_move(move) for dealing in dealings for move in dealing.moves(dealing.over)]
    rows += [_of_move(move) for move in (traced.moves if traced else ())]
    return CommsEstimate(
        rows=_summed(rows),
        # Of experts that stay where they are those of all devices.
        num_params=sum(param.num_elements * axis_size(mesh, param.stays) for param in params),
        data_axes=placement.axes.batch,
        not_counted=_not_counted(placement, traced),
        networks=networks(mesh),
    )


def _traffic_of_params(
    state: TrainState, placement: Placement, config: ZeroConfig, traced: LossTrace | None
) -> "list[_LeafTraffic]":
    """Returns the traffic of each floating param; experts that activations go to, by the trace, stay where they are."""
    stored = zip(jax.tree.leaves(placement.params), jax.tree.leaves(state.masters), strict=True)
    floats = [leaf for leaf, x in stored if jnp.issubdtype(x.dtype, jnp.inexact)]
    sent = {move.axes for move in (traced.moves if traced else ())}  # activations that go to experts take these axes
    stays = [leaf.of_experts if leaf.of_experts in sent else () for leaf in floats]
    return [_LeafTraffic(leaf, placement, config, stays=x) for leaf, x in zip(floats, stays, strict=True)]


def _of_move(move: Any) -> EstimateRow:
    """Returns what moves in a traced function as a row."""
    dtype, sent = _HLO_DTYPES.get(move.dtype) or move.dtype, move.sent_bytes * move.times
    return EstimateRow(kind=move.kind, axes=move.axes, dtype=dtype, phase=move.phase, total_sent_bytes=sent)


def _summed(rows: Sequence[EstimateRow]) -> tuple[EstimateRow, ...]:
    """Adds up rows that differ only in bytes; most bytes first."""
    totals: dict[EstimateRow, float] = {}
    for row in rows:
        key = dataclasses.replace(row, total_sent_bytes=0)
        totals[key] = totals.get(key, 0) + row.total_sent_bytes
    summed = (dataclasses.replace(row, total_sent_bytes=sent) for row, sent in totals.items() if sent)
    return tuple(sorted(summed, key=lambda row: -row.total_sent_bytes))


def _not_counted(placement: Placement, traced: LossTrace | None) -> str:
    """Returns why the traffic over the model's own axes is not complete."""
    model_axes = [axis for axis in placement.mesh.axis_names if axis not in placement.axes.batch]
    if placement.num_stages > 1:
        own = [axis for axis in model_axes if placement.mesh.shape[axis] > 1]
        if traced is None:
            over = axes_name((*own, *placement.axes.pipe))
            return f"activations over {over}: give traced=zero.trace_loss(loss_fn, params, batch, ...)"
        if own:
            return f"what stages send over {axes_name(own)} while they wait for microbatches"
    if axis_size(placement.mesh, model_axes) == 1:
        return ""
    if traced is None:
        return f"activations over {axes_name(model_axes)}: give traced=zero.trace_loss(loss_fn, params, batch, ...)"
    return f"some of what moves over {axes_name(model_axes)}: {traced.unknown}" if traced.unknown else ""


class _LeafTraffic:
    """What one device sends in a step for a leaf, which is stored in one dtype and used in another (`compute`)."""

    def __init__(self, leaf: LeafPlacement, placement: Placement, config: ZeroConfig, *, stays: tuple[str, ...] = ()):
        self.stays, leaf = stays, dataclasses.replace(leaf, dims=without(leaf.dims, stays))
        self.leaf, self.placement, self.config, self.mesh = leaf, placement, config, placement.mesh
        self.pipe, self.k = leaf.pipe, float(config.num_microbatches)
        self.schedule, self.is_of_ticks, self.is_one_layer = resolve_schedule(config.pipeline), False, False
        if placement.num_stages > 1:  # the layers of a stage are used in every tick, all else once
            sizes = placement.num_stages, config.num_microbatches
            self.k = self.schedule.num_runs(*sizes, leaf.shape[0]) if leaf.pipe else 1
            # Each stage has a gradient of it in each tick; it is gathered once.
            self.is_of_ticks = self.schedule.is_interleaved and not leaf.pipe
            self.is_one_layer = bool(leaf.pipe) and self.schedule.num_groups == 1 and leaf.shape[0] <= sizes[0]
            self.of_layers = bool(leaf.dims) and set(leaf.pipe) <= set(leaf.dims[0])
            dims, of_update = (x and without(x, leaf.pipe) for x in (leaf.dims, leaf.update_dims))
            self.leaf = leaf = dataclasses.replace(leaf, dims=dims, update_dims=of_update)
        # Of one share of the axes that are not `data`, and of those to which activations go (`stays`, of experts).
        other_axes = [axis for dim in leaf.dims for axis in dim if axis not in placement.axes.data]
        self.num_elements = math.prod(leaf.shape) // axis_size(self.mesh, (*other_axes, *self.pipe, *stays))
        # No policy casts complex params.
        self.precision = precision = Precision() if leaf.dtype.startswith("complex") else placement.precision
        self.stored = precision.master or leaf.dtype
        # Where the params are the master params, as at stage 3, there is no copy in low precision to gather.
        stored_param = self.stored if placement.params_are_masters else precision.param or leaf.dtype
        self.compute = precision.compute or stored_param

    def rows(self, *, has_grad: bool, gathered_in: set[str], is_scattered: bool) -> Iterator[EstimateRow]:
        """Yields what moves of a param and its gradient; the param is gathered in some phases."""
        yield from self.layer_rows(has_grad=has_grad)
        yield from self.stage_rows(has_grad=has_grad)
        yield from (row for row in self.param_rows() if row.phase in gathered_in)
        if has_grad and is_scattered:
            yield from self.grad_rows()

    def param_rows(self) -> Iterator[EstimateRow]:
        """Yields the gathers of a param."""
        placement = self.placement
        blocks = blocks_of_leaf(placement.quantize, "gathers", self.leaf, mesh=self.mesh)
        param_axes = placement.axes_of_group("params")
        if param_axes:
            gathers = list(self.gathers(self.only_over(self.leaf.dims, param_axes), param_axes))
            forward, backward = self.k, self.k
            if self.is_one_layer:  # XLA has no loop over the one layer: it gathers once before the ticks, or in each
                forward, backward = (self.k, placement.num_stages - 1) if self.schedule.is_interleaved else (1, self.k)
            yield from _rows("all-gather", gathers, blocks or self.compute, "forward", forward)
            # What is not kept is dropped after its use in the forward pass, and gathered again for the backward pass.
            if not (self.config.keep_gathered or self.is_of_ticks):
                yield from _rows("all-gather", gathers, blocks or self.compute, "backward", backward)
        # The update gathers over the axes that shard the master params and not the params.
        missing = [axis for axis in placement.axes_of_group("master") if axis not in param_axes]
        dtype = (not param_axes and blocks) or self.precision.param or self.stored
        gathers = self.gathers(self.leaf.update_dims or self.leaf.dims, missing)
        yield from _rows("all-gather", gathers, dtype, "update", 1)

    def stage_rows(self, *, has_grad: bool) -> Iterator[EstimateRow]:
        """Yields what moves between the stages that store layers, or features of all, and those that run them."""
        placement, kind = self.placement, "collective-permute"
        share = self.schedule.moved_share(placement.num_stages)
        if self.pipe and not self.of_layers:  # each stage has features of all layers, and needs all of its own
            share, kind = 1 - 1 / placement.num_stages, "all-to-all"
        if not self.pipe or not share:
            return
        # Groups of layers of devices' own gradients move when they are summed.
        grads = "master" if kind == "collective-permute" and placement.grad_plan.sums_to_masters else "grads"
        # Of params that devices have copies of, each sends the part that its sums of gradients have.
        params = grads if has_grad and kind == "collective-permute" else "params"
        for group, phase in ((params, "forward"), (grads, "backward")):
            if phase == "forward" or has_grad:
                over = self.on_data(self.only_over(self.leaf.dims, placement.axes_of_group(group)))
                moves = [(self.pipe, share * self.num_elements / axis_size(self.mesh, over))]
                yield from _rows(kind, moves, self.compute, phase, 1)
        copies = [axis for axis in placement.axes_of_group(params) if axis not in placement.axes_of_group("params")]
        yield from _rows("all-gather", self.gathers(self.leaf.dims, copies), self.compute, "forward", 1)

    def layer_rows(self, *, has_grad: bool) -> Iterator[EstimateRow]:
        """Yields what moves between the shards of a param and those of its master param along the layers."""
        placement, dims, to = self.placement, self.leaf.dims, self.leaf.update_dims
        # Master params of an optimizer of matrices are sharded along the layers: each matrix is whole on some device.
        steps = itertools.pairwise([dims, *steps_by_dim(dims, 0, to[0])] if to else [])
        moves = [self.share(old, self.on_data((new[0][len(old[0]) :],))) for old, new in steps]
        if placement.params_are_masters:
            yield from _rows("all-to-all", moves, self.compute, "forward", 1)
        if has_grad and not placement.grad_plan.sums_to_masters:
            yield from _rows("all-to-all", moves, wide(self.compute) if self.k > 1 else self.compute, "update", 1)

    def model_state_rows(self, gathered_in: Iterable[str]) -> Iterator[EstimateRow]:
        """Yields the gathers of a leaf of model state, once in a pass of a microbatch."""
        axes, dtype = self.placement.axes_of_group(MODEL_STATE), self.leaf.dtype
        gathers = list(self.gathers(self.only_over(self.leaf.dims, axes), axes))
        if dtype.startswith("key<"):  # moves as its words
            num_words = self.leaf.num_bytes // math.prod(self.leaf.shape) // 4
            dtype, gathers = "uint32", [(axes, elements * num_words) for axes, elements in gathers]
        for phase in gathered_in:  # integers too: the codes of a quantized base
            yield from _rows("all-gather", gathers, dtype, phase, self.k)

    def grad_rows(self) -> Iterator[EstimateRow]:
        """Yields the reductions of a gradient."""
        placement, k = self.placement, self.k
        # Stages 0 and 1 sum microbatches on each device and reduce once, after the last backward pass, by all-to-alls;
        # so do the others over the axes of copies of the params. Gradients that are quantized move at each use.
        plan, reduce = placement.grad_plan, self.precision.reduce
        often = tuple(axis for axis in plan.batch_axes if axis not in (*plan.once_over, *self.pipe, *self.stays))
        if plan.at_use:
            yield from self.sum_rows(often, reduce or wide(self.compute), phase="backward", times=k)
        else:
            yield from self.scatter_rows(often, reduce or self.compute)
        dtype = wide(self.compute) if k > 1 else self.compute
        yield from self.sum_rows(plan.once_over, reduce or dtype, phase="update", times=1)

    def scatter_rows(self, over: Sequence[str], dtype: Any) -> Iterator[EstimateRow]:
        """Yields a gradient's reduce-scatter at each use, and its all-reduce over the axes that do not shard it."""
        placement, times = self.placement, self.k
        pipe = placement.axes.pipe if self.is_of_ticks else ()
        if pipe:  # over `data` in each tick, over stages behind the last one
            times = self.schedule.num_ticks(placement.num_stages, self.config.num_microbatches)
        data = [axis for axis in placement.axes.data if axis in over and axis not in pipe]
        dims = self.only_over(self.sharded_dims, data)
        states = [without(dims, data), *scatter_steps(dims, data, self.mesh)] if data else []
        yield from _rows("reduce-scatter", self.moves(states), dtype, "backward", times)
        rest, elements = self.share(dims, [axis for axis in over if axis not in (*self.on_data(dims), *pipe)])
        yield from _rows("all-reduce", [(rest, 2 * elements)], dtype, "backward", times)  # it scatters and gathers
        if pipe:
            yield from _rows("reduce-scatter", [self.share(dims, pipe)], dtype, "backward", 1)

    def sum_rows(self, over: tuple[str, ...], dtype: Any, *, phase: str, times: float) -> Iterator[EstimateRow]:
        """Yields the steps in which the gradients that devices have are summed."""
        placement, dims = self.placement, self.sharded_dims
        if phase == "backward":  # it is not sharded over the other axes yet
            dims = self.only_over(dims, over)
        blocks, axes = blocks_of_leaf(placement.quantize, "grads", self.leaf, mesh=self.mesh), placement.axes
        how = DeviceSum(mesh=self.mesh, axes=axes, over=over, dims=dims, coding=blocks, coded=placement.grad_axes)
        for step in how.steps(self.leaf.shape):
            along, elements = self.share(step.before, step.axes)
            moves = [(along, elements * (2 if step.kind == "all" else 1))]  # an all-reduce scatters and gathers
            for kind in _SUMMED_BY[step.kind]:
                yield from _rows(kind, moves, blocks if step.is_coded else dtype, phase, times)

    @property
    def sharded_dims(self) -> Dims:
        """The dims of the leaf as its group is sharded; without `data` at stage 0."""
        dims, placement = self.leaf.dims, self.placement
        return dims if "master" in placement.groups else without(dims, placement.axes.data)

    def only_over(self, dims: Dims, axes: Sequence[str]) -> Dims:
        """Returns dims without the axes of `data` that are not among `axes`."""
        return without(dims, [axis for axis in self.placement.axes.data if axis not in axes])

    def on_data(self, dims: Dims) -> tuple[str, ...]:
        """Returns the axes of `data` that shard dims."""
        return tuple(axis for dim in dims for axis in dim if axis in self.placement.axes.data)

    def moves(self, states: Sequence[Dims]) -> Iterator[Move]:
        """Yields what a device sends from each of some dims to the next, which gathers or scatters the leaf."""
        for pair in itertools.pairwise(states):
            fewer, more = sorted(map(self.on_data, pair), key=len)  # a gather drops axes, a scatter adds them
            axes = tuple(x for x in self.mesh.axis_names if x in {*more} - {*fewer} and self.mesh.shape[x] > 1)
            if axes:
                whole = self.num_elements / axis_size(self.mesh, fewer)
                # As on a ring: of what is gathered a device sends all shares but one.
                yield axes, whole * (1 - 1 / axis_size(self.mesh, axes))

    def gathers(self, dims: Dims, over: Sequence[str]) -> Iterator[Move]:
        """Yields the elements that a device sends in each stage of a gather from `dims`; shards grow on the way."""
        return self.moves([dims, *gather_steps(dims, over, self.mesh)])

    def share(self, dims: Dims, over: Sequence[str]) -> Move:
        """Returns those of some axes that have several devices, and what one sends over them of its shard."""
        axes = tuple(axis for axis in self.placement.axes.batch if axis in over and self.mesh.shape[axis] > 1)
        return axes, self.num_elements / axis_size(self.mesh, self.on_data(dims)) * (1 - 1 / axis_size(self.mesh, axes))


def _rows(kind: str, moves: Iterable[Move], dtype: Any, phase: str, times: float) -> Iterator[EstimateRow]:
    """Yields the rows of moves in a dtype, or in `Blocks`: one for codes and one for scales."""
    parts = dtype.parts if isinstance(dtype, Blocks) else [(dtype, 1)]
    for axes, elements in moves:
        for part, per_element in parts:
            name, sent = jnp.dtype(part).name, times * elements * per_element * jnp.dtype(part).itemsize
            dtype = _HLO_DTYPES.get(name) or name
            yield EstimateRow(kind=kind, axes=axes, dtype=dtype, phase=phase, total_sent_bytes=sent)
