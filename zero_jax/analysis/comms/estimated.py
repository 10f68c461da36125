"""Estimates the traffic of a ZeRO train step by formula: section 7 of the paper, for each mesh axis of `data`.

What moves over `model` is read from a trace of the loss function (`loss_trace.py`): section 8 counts it for Megatron's
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
from zero_jax.analysis.loss_trace import LossTrace
from zero_jax.core.signatures import check_arguments
from zero_jax.core.text_tables import aligned
from zero_jax.core.variables import MODEL_STATE
from zero_jax.sharding.mesh import axis_size, networks
from zero_jax.sharding.quantized import Blocks, blocks_of_leaf, spread_over
from zero_jax.sharding.rules import LeafPlacement, placement_leaves
from zero_jax.sharding.spec import Dims, gather_steps, scatter_steps, without
from zero_jax.training import (
    Placement,
    TrainState,
    ZeroConfig,
    check_is_state,
    make_placement,
    used_by_optimizer,
)

_HLO_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "int8": "s8", "uint8": "u8"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EstimateRow:
    """What one device sends in a step, over some mesh axes, for one purpose.

    Attributes:
      kind: 'all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all' or 'collective-permute'.
      axes: The mesh axes.
      dtype: HLO dtype name.
      phase: 'forward', 'backward' or 'update'.
      total_sent_bytes: Bytes per device and step.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    phase: str
    total_sent_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommsEstimate(SentBytes):
    """The ideal traffic of a step, per device; prints as a table.

    Attributes:
      rows: The traffic by kind, axes, dtype and phase.
      num_params: The params that have gradients (the paper's psi), of one share of the `model` axis.
      data_axes: The mesh axes that carry `data` or `replica`.
      not_counted: Why the rows over the other axes are not there, or not all of them; empty where they are.
      networks: The network of each mesh axis, as `sharding.mesh.networks` names it.
    """

    rows: tuple[EstimateRow, ...]
    num_params: int
    data_axes: tuple[str, ...] = ()
    not_counted: str = ""
    networks: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns all of it as plain dicts, lists and numbers."""
        return {
            "num_params": self.num_params,
            "not_counted": self.not_counted,
            **self.totals(),
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }

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

    Over `data`, 2 psi elements at stages 0 to 2 and 3 psi at stage 3, times (n - 1) / n; psi is one share of the axis
    `model`. Between copies of the params (`replica`, and with a secondary shard the axes of `data` besides it), only
    shards of gradients move, once a step, and with a secondary shard those of new params. Over several mesh axes the
    stages of a gather add up to the same. Only what params and gradients cost: a lookup that moves rows, or a last use
    that is gathered once, costs less. Params that are no floats are not counted; what an optimizer freezes is, without
    `tx`. Model state counts with one gather a microbatch at stage 3: leaves that
    gradients flow through are gathered again, those that are only averaged on their shards never. Over `model`, what
    the trace of the loss function shows: for Megatron's transformer blocks, 12 x seq x hidden elements a block and
    sample, of which 2 are dead code of the recomputation.

    Args:
      state: The train state; abstract leaves will do.
      mesh: The mesh.
      config: Stage, precision, microbatches.
      traced: From `zero.trace_loss`, for the traffic over `model`; without it only `data` and `replica` are counted.
      tx: The optimizer; with it, params that it freezes are gathered at stage 3 and otherwise do not move.
    """
    check_arguments(traced=traced, **({} if tx is None else {"tx": tx}))
    placement = make_placement(check_is_state(state, who="comms.estimate").variables, mesh=mesh, config=config)
    made: list[EstimateRow] = []
    num_params = 0
    leaves = placement_leaves(placement.params)
    masters = jax.tree.leaves(state.masters)
    floats = [leaf for leaf, x in zip(leaves, masters, strict=True) if jnp.issubdtype(x.dtype, jnp.inexact)]
    needed, same = used_by_optimizer(tx, state)
    for leaf, is_needed, is_same in zip(floats, needed, same, strict=True):
        num_params += _num_elements(leaf, placement)
        moves = {"forward": True, "backward": any(needed), "update": not is_same}
        made += [row for row in _param_rows(leaf, placement, config) if moves[row.phase]]
        made += _grad_rows(leaf, placement, config) if is_needed else []
    made += _model_state_rows(placement, config)
    for move in traced.moves if traced else ():
        sent, dtype = move.sent_bytes * move.times, _HLO_DTYPES.get(move.dtype, move.dtype)
        row = EstimateRow(kind=move.kind, axes=move.axes, dtype=dtype, phase=move.phase, total_sent_bytes=sent)
        made.append(row)
    return CommsEstimate(
        rows=_summed(made),
        num_params=num_params,
        data_axes=placement.axes.batch,
        not_counted=_not_counted(placement, traced),
        networks=networks(mesh),
    )


def _summed(rows: Sequence[EstimateRow]) -> tuple[EstimateRow, ...]:
    """Adds up rows that differ in bytes alone; most bytes first."""
    totals: dict[EstimateRow, float] = {}
    for row in rows:
        key = dataclasses.replace(row, total_sent_bytes=0)
        totals[key] = totals.get(key, 0) + row.total_sent_bytes
    summed = (dataclasses.replace(row, total_sent_bytes=sent) for row, sent in totals.items() if sent)
    return tuple(sorted(summed, key=lambda row: -row.total_sent_bytes))


def _not_counted(placement: Placement, traced: LossTrace | None) -> str:
    """Returns why the traffic over the model's own axes is not complete."""
    others = [axis for axis in placement.mesh.axis_names if axis not in placement.axes.batch]
    if axis_size(placement.mesh, others) == 1:
        return ""
    if traced is None:
        return f"activations over {axes_name(others)}: give traced=zero.trace_loss(loss_fn, params, batch, ...)"
    return f"some of what moves over {axes_name(others)}: {traced.unknown}" if traced.unknown else ""


def sharded_residual_bytes(
    *, num_layers: int, batch: int, seq: int, hidden: int, model: int, bytes_per_element: int = 2
) -> float:
    """Returns what a device sends more in a step when residuals are sharded over `model` (P_a, paper section 8).

    One more all-gather of `[seq, hidden]` for each block and sample, before the block is recomputed.

    Args:
      num_layers: Blocks whose inputs are saved.
      batch: Samples that one model replica holds in a step.
      seq: Length of a sample.
      hidden: Features.
      model: Size of the `model` axis.
      bytes_per_element: Of a residual.
    """
    return num_layers * batch * seq * hidden * bytes_per_element * (model - 1) / model


def _num_elements(leaf: LeafPlacement, placement: Placement) -> int:
    """The elements of a leaf in one share of the axes that are not `data`."""
    others = [axis for dim in leaf.dims for axis in dim if axis not in placement.axes.data]
    return math.prod(leaf.shape) // axis_size(placement.mesh, others)


def _dtypes(leaf: LeafPlacement, placement: Placement) -> tuple[Any, Any]:
    """The dtypes that a param is stored and used in."""
    precision = placement.precision
    stored = precision.master or leaf.dtype
    return stored, precision.compute or (stored if placement.params_are_masters else precision.param or leaf.dtype)


def _param_rows(leaf: LeafPlacement, placement: Placement, config: ZeroConfig) -> Iterator[EstimateRow]:
    """The rows of a param that is gathered."""
    (stored, compute), k = _dtypes(leaf, placement), config.num_microbatches
    of_params = blocks_of_leaf(placement.quantize, "gathers", leaf, mesh=placement.mesh)
    held = placement.axes_of_group("params")
    if held:
        gathers = list(_gathers(_over(leaf.dims, held, placement), held, leaf, placement))
        yield from _rows("all-gather", gathers, of_params or compute, "forward", k)
        if not config.keep_gathered:
            yield from _rows("all-gather", gathers, of_params or compute, "backward", k)
    # What the update gathers is what params lack of the master params.
    missing = [axis for axis in placement.axes_of_group("master") if axis not in held]
    gathers = _gathers(leaf.dims, missing, leaf, placement)
    dtype = (not held and of_params) or placement.precision.param or stored
    yield from _rows("all-gather", gathers, dtype, "update", 1)


def _grad_rows(leaf: LeafPlacement, placement: Placement, config: ZeroConfig) -> Iterator[EstimateRow]:
    """The rows of a gradient that is summed."""
    (_, compute), k = _dtypes(leaf, placement), config.num_microbatches
    # Stages 0 and 1 sum microbatches on each device and reduce once, after the last backward pass, by all-to-alls; so
    # do the others over the axes of copies of the params. Gradients that are quantized move at each use.
    mapped, reduce = placement.summed_once, placement.precision.reduce
    unmapped = [axis for axis in placement.axes.batch if axis not in mapped]
    kind, reduced = ("all-to-all", "float32") if placement.sends_own_grads else ("reduce-scatter", compute)
    yield from _sum_rows(kind, leaf, placement, unmapped, reduce or reduced, "backward", k)
    yield from _sum_rows(
        "all-to-all", leaf, placement, mapped, reduce or ("float32" if k > 1 else compute), "update", 1
    )


def _sum_rows(
    kind: str, leaf: LeafPlacement, placement: Placement, over: Sequence[str], dtype: Any, phase: str, times: int
) -> Iterator[EstimateRow]:
    """The rows of a gradient that is scattered over some axes, and summed over those of them that do not shard it."""
    mesh, coded = placement.mesh, placement.grad_axes
    blocks = blocks_of_leaf(placement.quantize, "grads", leaf, mesh=mesh)
    last = phase == "update"  # it is sharded over the other axes already
    scatters, elements, rest = _scatters(leaf, placement, over, one_by_one=kind == "all-to-all", is_last=last)
    for axes, sent in scatters:
        is_coded = blocks is not None and set(axes) <= set(coded)
        yield from _rows(kind, [(axes, sent)], blocks if is_coded else dtype, phase, times)
    for axis in [axis for axis in rest if axis in coded]:
        if spread_over(blocks, leaf.shape, _sharded_dims(leaf, placement), axis, mesh=mesh) is not None:
            part = [((axis,), elements * (1 - 1 / mesh.shape[axis]))]
            yield from _rows("all-to-all", part, blocks, phase, times)
            yield from _rows("all-gather", part, blocks, phase, times)
            rest = tuple(other for other in rest if other != axis)
    if rest:
        yield from _rows("all-reduce", [(rest, 2 * elements * (1 - 1 / axis_size(mesh, rest)))], dtype, phase, times)


def _model_state_rows(placement: Placement, config: ZeroConfig) -> Iterator[EstimateRow]:
    if MODEL_STATE not in placement.groups:
        return
    held = placement.axes_of_group(MODEL_STATE)
    for leaf in placement_leaves(placement.model_state):
        gathers = list(_gathers(_over(leaf.dims, held, placement), held, leaf, placement))
        dtype = leaf.dtype
        if dtype.startswith("key<"):  # moves as its words
            num_words = leaf.num_bytes // math.prod(leaf.shape) // 4
            dtype, gathers = "uint32", [(axes, elements * num_words) for axes, elements in gathers]
        if gathers:  # integers too: the codes of a quantized base
            yield from _rows("all-gather", gathers, dtype, "forward", config.num_microbatches)


def _rows(
    kind: str, moves: Iterable[tuple[tuple[str, ...], float]], dtype: Any, phase: str, times: int
) -> Iterator[EstimateRow]:
    """The rows of moves in a dtype, or in `Blocks`: of their codes and of their scales."""
    parts = [(dtype, 1)] if not isinstance(dtype, Blocks) else dtype.parts
    for axes, elements in moves:
        for part, per_element in parts:
            one = jnp.dtype(part)
            yield EstimateRow(
                kind=kind,
                axes=axes,
                dtype=_HLO_DTYPES.get(one.name) or one.name,
                phase=phase,
                total_sent_bytes=times * elements * per_element * one.itemsize,
            )


def _sharded_dims(leaf: LeafPlacement, placement: Placement) -> Dims:
    """The dims of a leaf where its group is sharded; without `data` at stage 0."""
    if "master" in placement.groups:
        return leaf.dims
    return without(leaf.dims, placement.axes.data)


def _over(dims: Dims, over: Sequence[str], placement: Placement) -> Dims:
    """The dims of a leaf that of the axes of `data` is sharded over some alone."""
    return without(dims, [axis for axis in placement.axes.data if axis not in over])


def _gathers(
    dims: Dims, over: Sequence[str], leaf: LeafPlacement, placement: Placement
) -> Iterator[tuple[tuple[str, ...], float]]:
    """The elements that a device sends in each step of a gather from `dims`: shards grow on the way."""
    elements = _num_elements(leaf, placement) / axis_size(placement.mesh, _on_data(dims, placement))
    for after in gather_steps(dims, over, placement.mesh):
        axes = _taken(dims, after, placement)
        size = axis_size(placement.mesh, axes)
        elements *= size
        if size > 1:
            yield axes, elements * (size - 1) / size
        dims = after


def _scatters(
    leaf: LeafPlacement, placement: Placement, over: Sequence[str], *, one_by_one: bool, is_last: bool
) -> tuple[list[tuple[tuple[str, ...], float]], float, tuple[str, ...]]:
    """The elements sent to scatter a gradient over some axes; those of a shard, and the axes that do not shard it.

    If it `is_last`, the gradient is sharded over the other axes of `data` already.
    """
    mesh, axes = placement.mesh, placement.axes
    dims = _sharded_dims(leaf, placement)
    elements, scatters = float(_num_elements(leaf, placement)), []
    if is_last:
        elements /= axis_size(mesh, [axis for axis in _on_data(dims, placement) if axis not in over])
    if one_by_one:
        steps = [(axis,) for axis in axes.data if axis in over and axis in _on_data(dims, placement)]
    else:
        data = [axis for axis in axes.data if axis in over]
        dims = _over(dims, data, placement)
        states = [without(dims, axes.data), *scatter_steps(dims, data, mesh)] if data else []
        steps = [_taken(after, before, placement) for before, after in itertools.pairwise(states)]
    for step in steps:
        named = tuple(axis for axis in mesh.axis_names if axis in step and mesh.shape[axis] > 1)
        size = axis_size(mesh, named)
        if size > 1:
            scatters.append((named, elements * (size - 1) / size))
            elements /= size
    rest = tuple(axis for axis in axes.batch if axis in over and axis not in _on_data(dims, placement))
    return scatters, elements, tuple(axis for axis in rest if mesh.shape[axis] > 1)


def _on_data(dims: Dims, placement: Placement) -> tuple[str, ...]:
    return tuple(axis for dim in dims for axis in dim if axis in placement.axes.data)


def _taken(before: Dims, after: Dims, placement: Placement) -> tuple[str, ...]:
    """The `data` axes that are in one spec and no longer in another, in the mesh's order."""
    gone = set(_on_data(before, placement)) - set(_on_data(after, placement))
    return tuple(axis for axis in placement.mesh.axis_names if axis in gone)
