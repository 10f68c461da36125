"""The program of a loss with its scans over layers as stages of a pipeline, and the report of them."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zero_jax.core.device_put import platform_of
from zero_jax.dims import SAME, Relation, TraceComparison
from zero_jax.program import jaxprs
from zero_jax.program.evaluation import evaluate, trace_flat
from zero_jax.program.loss import LossProgram, Traced
from zero_jax.program.subcalls import Subcall, equations_of
from zero_jax.program.walk import Walk
from zero_jax.sharding.chains import gather_scope
from zero_jax.sharding.mesh import slow_axes
from zero_jax.sharding.spec import Dims, carries
from zero_jax.transforms.pipeline.body import CannotCut
from zero_jax.transforms.pipeline.copied_tables import CopiedTable, array_of, looked_up
from zero_jax.transforms.pipeline.cut import (
    MOVED_WHOLE,
    FoundLoop,
    LayerLoop,
    Stages,
    find_loops,
    pipeline_p,
    variables_with_gradient,
)
from zero_jax.transforms.pipeline.interleaved.by_microbatch import by_microbatch, run_1f1b
from zero_jax.transforms.pipeline.interleaved.microbatch import LossTraces, MicrobatchProgram
from zero_jax.transforms.pipeline.loop import Layer, run_stages
from zero_jax.transforms.pipeline.place import Schedule, StagePlace
from zero_jax.transforms.pipeline.report import PipelineReport, staged_layers
from zero_jax.transforms.pipeline.rolled import why_no_layers
from zero_jax.transforms.pipeline.scans import layers_apart, layers_outside
from zero_jax.transforms.pipeline.waiting import in_turn
from zero_jax.transforms.separable.separability import relations_of


class PipelinedProgram(LossProgram):
    """A program whose scans over layers are stages of a pipeline.

    Args:
      before: a program of `(params, batch, *args)`, whose layers are those of scans (`rolled`).
      stages: the stages.
    """

    before: LossProgram

    def __init__(self, before: LossProgram, stages: Stages):
        super().__init__(before.fn, before)
        self.stages, self.order = stages, _order_of_axes(stages.place)

    def made(self, before: Traced, *args: Any) -> Traced:
        """Returns the program for arguments of these shapes.

        Raises:
          ValueError: no scan over layers can be cut into stages.
        """
        staged, found = self.staged(*args)
        if not any(entry.loop for entry in found):
            raise ValueError(_refusal(found, self.stages, before))
        if self.order:
            warnings.warn(self.order, stacklevel=2)
        for entry in (entry for entry in found if entry.loop is None):
            warnings.warn(
                f"pipe={self.stages.num_stages}: the layers at {entry.line} are not cut into stages, and each device "
                f"has all of them: {entry.why}",
                stacklevel=2,
            )
        return before.rewritten(staged)

    def report(self, *args: Any, num_parts: int = 1) -> PipelineReport:
        """Returns the stages for arguments of these shapes, or why there are none; a batch is of so many of theirs."""
        stages = self.stages
        report = PipelineReport(
            num_stages=stages.num_stages, num_microbatches=stages.num_microbatches, schedule=str(stages.schedule)
        )
        try:
            _, found = self.staged(*args)
        except ValueError as error:
            return dataclasses.replace(report, why_none=str(error))
        loops = tuple(staged_layers(entry, num_parts) for entry in found if entry.loop is not None)
        if not loops:
            return dataclasses.replace(report, why_none=_refusal(found, stages, self.before.trace(*args)))
        left = tuple(f"{entry.line}: {entry.why}" for entry in found if entry.loop is None)
        return dataclasses.replace(report, loops=loops, left=left, warning=self.order)

    def staged(self, *args: Any) -> tuple[Any, list[FoundLoop]]:
        """Returns the jaxpr for arguments of these shapes with stages, and the scans over layers in it."""
        params, batch, *rest = args
        k, num_params = self.stages.num_microbatches, len(jax.tree.leaves(params))
        sizes = {np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x)}
        if len(sizes) != 1:
            raise ValueError(
                f"pipe: the leaves of the batch differ in their leading dim, {sorted(sizes)}: a microbatch has some "
                "examples of each leaf; give each one entry per example"
            )
        (size,), num_shards = sizes, self.stages.place.num_shards
        if size % (k * num_shards):
            raise ValueError(
                f"pipe: {size} examples do not divide into {k} microbatches over {num_shards} devices of a stage: "
                f"give a multiple of {k * num_shards}"
            )

        def traced(num_examples: int) -> Traced:
            part = jax.tree.map(lambda x: _resized(x, num_examples), batch)
            try:
                return self.before.trace(params, part, *rest)
            except Exception as error:
                raise ValueError(
                    f"pipe: loss_fn cannot be called on the {num_examples} examples of a microbatch "
                    f"({type(error).__name__}: {error}): take the number of examples from the batch"
                ) from error

        sizes, num_blocks = [size // k], k * num_shards
        if size == k:  # of one example, operations differ that only change shapes
            sizes, num_blocks = [1, 2 * size, 2], 2 * num_blocks
        programs = [self.before.trace(*args), *map(traced, sizes)]
        relations = [*relations_of(params, batch), *(SAME for _ in jax.tree.leaves(rest))]
        traces = [layers_outside(x.closed, num_params) for x in programs]
        # 1F1B derives the losses of microbatches, of which that of the batch is any function.
        is_1f1b = self.stages.schedule.is_interleaved
        comparison = TraceComparison(k, num_blocks, is_mean=is_1f1b)
        # Batches behind one another, as chosen and rejected ones, are so in each device's part of a microbatch.
        traces, ends = comparison.in_blocks(traces, relations)
        (whole, *parts), found = self.found(traces, relations, num_params, comparison)
        if is_1f1b:
            staged, found = self.interleaved((whole, *parts), relations, found, num_params, comparison)
        else:
            staged = _with_stages(whole, found)
        staged = _with_ends(staged, ends)
        return (in_turn(staged, num_params) if platform_of(self.stages.place.mesh) == "cpu" else staged), found

    def found(
        self, traces: Sequence[Any], relations: Sequence[Relation], num_params: int, comparison: TraceComparison
    ) -> tuple[list[Any], list[FoundLoop]]:
        """Returns traces whose scans over layers have examples of their own, and these scans."""
        how = {"num_params": num_params, "stages": self.stages, "comparison": comparison}
        whole, *parts = layers_apart(traces, num_params)
        found = find_loops(whole, parts, relations, **how)
        if again := [i for i, x in enumerate(found) if x.loop is None]:
            of_own = layers_apart(traces, num_params, again)
            others = find_loops(of_own[0], of_own[1:], relations, **how)
            if any(others[i].loop for i in again):
                pairs = zip(others, found, strict=True)
                return of_own, [x if x.loop else dataclasses.replace(x, why=y.why) for x, y in pairs]
        return [whole, *parts], found

    def interleaved(
        self,
        traces: Sequence[Any],
        relations: Sequence[Relation],
        found: Sequence[FoundLoop],
        num_params: int,
        comparison: TraceComparison,
    ) -> tuple[Any, list[FoundLoop]]:
        """Returns the jaxpr with one chain of layers in the loop of 1F1B, the last one if none is most of the layers.

        Those before it are stages whose microbatches all go forward first; those behind it run in each stage.
        """
        whole, *parts = traces
        jaxpr, _ = jaxprs.open_jaxpr(whole)
        own = variables_with_gradient(jaxpr, num_params)
        found = [_forward(x) if own.isdisjoint(jaxpr.eqns[x.index].outvars) else x for x in found]
        cut = [x for x in found if _num_layers(x)]
        if not cut:
            return whole, [_left(x, "pipeline='1f1b' has no layers with a gradient") for x in found]
        num_layers = [*map(_num_layers, cut)]
        is_long = 2 * max(num_layers) > sum(num_layers)
        main = cut[num_layers.index(max(num_layers))] if is_long else cut[-1]
        others = [_forward(x) for x in found if x is not main]
        how = {"num_params": num_params, "with_gradient": own, "comparison": comparison}
        try:
            losses = LossTraces(whole, parts, relations, entry=main, before=cut, **how)
            program = _with_stages(whole, others)
            made = by_microbatch(losses, main.loop, self.stages.axes, program)  # type: ignore[arg-type]
            staged, of_each, waiting = made
            inside = [x for x in others if x.index in of_each]
            if not is_long and any(x.index == y.index for x in inside for y in cut):
                raise CannotCut("one chain of layers is in its loop, and there are several that have to be")
        except CannotCut as error:
            return whole, [_left(x, f"pipeline='1f1b': {error}") for x in found]
        # They read what stages make.
        why = "pipeline='1f1b' runs all of them in each stage, on its microbatch; 'gpipe' cuts them"
        found = [_left(x, why) if x in inside else x for x in others]
        return staged, sorted([*found, dataclasses.replace(main, waiting=waiting)], key=lambda x: x.index)


def _num_layers(entry: FoundLoop) -> int:
    """Returns the layers of stages that take one microbatch forward and one backward; 0 if a scan is none of these."""
    return entry.loop.num_layers if entry.loop is not None and entry.loop.schedule.is_interleaved else 0


def _left(entry: FoundLoop, why: str) -> FoundLoop:
    """Returns a scan over layers that is not cut, with the reason."""
    return entry if entry.loop is None else dataclasses.replace(entry, loop=None, why=why)


def _order_of_axes(place: StagePlace) -> str:
    """Returns what to change in a mesh whose order of axes makes XLA:TPU send more; empty if there is nothing."""
    mesh, slow = place.mesh, slow_axes(place.mesh)
    before = [*itertools.takewhile(lambda axis: axis not in place.pipe, mesh.axis_names)]
    before = [axis for axis in before if axis not in slow and mesh.shape[axis] > 1]
    if platform_of(mesh) != "tpu" or slow.isdisjoint(place.pipe) or not before:
        return ""
    return (
        f"pipe={place.num_stages}: stages are in slices of their own, and the mesh has {', '.join(before)} before "
        f"{', '.join(place.pipe)}: devices of a slice are not next to each other then, and XLA:TPU all-reduces "
        "gradients that it would reduce-scatter; put the axes between slices first, as zero.make_mesh(pipe=...) does"
    )


def _forward(entry: FoundLoop) -> FoundLoop:
    """Returns a scan over layers all of whose microbatches go forward before the loss of one."""
    if entry.loop is None:
        return entry
    if entry.loop.num_microbatches % entry.loop.num_stages:
        number = f"{entry.loop.num_microbatches} microbatches are no multiple of pipe"
        return _left(entry, f"it is run before the chain of '1f1b', and {number}")
    schedule = dataclasses.replace(entry.loop.schedule, is_interleaved=False)
    return dataclasses.replace(entry, loop=dataclasses.replace(entry.loop, schedule=schedule))


def _resized(x: Any, num_examples: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of part of a leaf of the batch, typed with its mesh: `jnp.ones_like` asks for that."""
    shape, weak_type = (num_examples, *np.shape(x)[1:]) if np.ndim(x) else (), getattr(x, "weak_type", False)
    typed = getattr(x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x), "sharding", None)
    sharding = NamedSharding(typed.mesh, PartitionSpec()) if isinstance(typed, NamedSharding) else None
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=weak_type, sharding=sharding)


def _with_stages(closed: Any, found: Sequence[FoundLoop]) -> Any:
    """Returns a jaxpr with its loops over layers as stages."""
    jaxpr, _ = jaxprs.open_jaxpr(closed)
    eqns = list(jaxpr.eqns)
    for entry in found:
        if entry.loop is not None:
            eqn = eqns[entry.index]
            params = {"loop": entry.loop, "jaxpr": entry.loop.layer, "avals": tuple(var.aval for var in eqn.outvars)}
            eqns[entry.index] = eqn.replace(primitive=pipeline_p, params=params)
    return jaxprs.with_results(closed, jaxpr.outvars, eqns=eqns)


def _with_ends(closed: Any, ends: Sequence[Callable[[Any], Any] | None]) -> Any:
    """Returns a jaxpr with functions of some of its results."""
    if not any(ends):
        return closed
    opened, consts = jaxprs.open_jaxpr(closed)
    run = lambda *xs: [x if end is None else end(x) for x, end in zip(evaluate(opened, consts, xs), ends, strict=True)]  # noqa: E731
    return trace_flat(run, [var.aval for var in opened.invars])


def _refusal(found: Sequence[FoundLoop], stages: Stages, traced: Traced) -> str:
    """Says why a loss has no stages, and what to do; `traced` is the program on the batch, without stages."""
    if found:
        reasons = "; ".join(f"the layers at {entry.line}: {entry.why}" for entry in found)
        of_schedule = ("pipeline=", "groups", *("derivatives",) * stages.schedule.is_interleaved)
        is_of_schedule = any(each in entry.why for entry in found for each in of_schedule)
        other = "; give pipeline='gpipe'" if is_of_schedule and stages.schedule != Schedule() else ""
        if not is_of_schedule and "may be mixed" in reasons:
            other = "; mix examples behind the layers: these may return sums and means over the batch"
        elif not is_of_schedule and "places of examples" in reasons:
            other = "; make these a leaf of the batch, as jnp.arange(n) is"
        elif not is_of_schedule and "are sorted together" in reasons:
            other = "; sort what each example has by itself, by jax.lax.map over the examples, as tokens by experts"
        return (
            f"pipe={stages.num_stages}: no layers can be the stages of a pipeline: {reasons}{other}; or leave pipe out"
        )
    if why := why_no_layers(traced):
        return f"pipe={stages.num_stages}: no layers can be the stages of a pipeline: {why}; or leave pipe out"
    return (
        f"pipe={stages.num_stages}: loss_fn has no jax.lax.scan over stacked params, and no Python loop over equal "
        "layers, which could be the stages of a pipeline: stack the params of equal layers and scan over them "
        "(flax.linen.scan, flax.nnx.scan, or jax.lax.scan), or leave pipe out"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MovedGrads:
    """Gradients of groups of layers that stay in the stages which run these, until devices have summed theirs."""

    # For each leaf of params, by its number, its path and the mesh axes of the dims of that sum. A device sends this
    # part of the params to the stages, too.
    parts: Mapping[int, tuple[str, Dims]]
    copies: tuple[str, ...]  # the mesh axes over which devices have the same params
    # What moves the sum of a leaf to where it is stored, of those that are to be moved
    moves: dict[int, Callable[[jax.Array], jax.Array]] = dataclasses.field(default_factory=dict)


def with_stages(program: LossProgram, stages: Stages, moved: MovedGrads | None = None) -> LossProgram:
    """Returns a program whose scans over layers are stages, to be evaluated as any other; see `PipelinedProgram`.

    If `moved` is given, gradients of the groups of layers stay in the stages that run them, where layers divide: those
    of a device are to be summed with others' before they move. What moves them is noted there.
    """

    def evaluated(traced: Traced) -> Traced:
        jaxpr, _ = jaxprs.open_jaxpr(traced.closed)
        uses = collections.Counter(x for eqn in jaxpr.eqns for x in jaxprs.variables(eqn))
        params, data = jaxpr.invars[: traced.num_params], jaxpr.invars[traced.num_params :]
        size = max((x.aval.shape[0] for x in data if x.aval.shape), default=0)
        tables = looked_up(jaxpr, params, stages)
        # The gradient of a stack that is used elsewhere, too, is a sum in both places: it cannot stay in the stages.
        stacks = {x: i for i, x in enumerate(params) if uses[x] == 1}
        walk = _StageWalk({} if moved is None else stacks, moved, stages.place)

        def run(leaves: Sequence[Any], _: Any) -> list[Any]:
            pairs = zip(jaxpr.invars, leaves, strict=True)
            leaves = [CopiedTable.of(x, stages.place, size) if var in tables else x for var, x in pairs]
            return [*map(array_of, walk.run(traced.closed, leaves, None))]

        return traced.evaluated(run)

    return PipelinedProgram(program, stages).then(evaluated)


class _StageWalk(Walk[None]):
    """Evaluates a program on arrays, with its stages."""

    def __init__(self, params: Mapping[Any, int], moved: MovedGrads | None, place: StagePlace):
        super().__init__()
        self.params, self.moved, self.place = params, moved, place

    def enters(self, eqn: Any, sub: Subcall, values: list[Any], frame: None) -> bool:
        has_table = any(isinstance(x, CopiedTable) for x in values)
        return sub.kind == "call" and (has_table or any(each.primitive is pipeline_p for each in equations_of(eqn)))

    def operation(self, eqn: Any, values: list[Any], frame: None) -> Sequence[Any]:
        tables = [x for x in values if isinstance(x, CopiedTable)]
        if len(tables) == len(values) == 1 and eqn.primitive.name in MOVED_WHOLE:
            return [tables[0].moved(eqn)]
        if len(tables) == 1 and eqn.primitive.name in ("gather", "dot_general"):
            if (made := tables[0].used(eqn, values)) is not None:
                return [made]
        values = [*map(array_of, values)]
        if eqn.primitive is not pipeline_p:
            return jaxprs.bind(eqn, values)
        loop, layers, others, stacks = split_stages(eqn, values)
        opened, own = jaxprs.open_jaxpr(layers.layer)

        def layer(number: Any, consts: list[Any], carry: list[Any], slices: list[Any]) -> list[Any]:
            return evaluate(opened, own, [number, *consts, *carry, *slices])

        with jaxprs.source_context(eqn):
            atoms = eqn.invars[len(values) - len(stacks) :]
            stacks = [self.stages(*each, layers) for each in zip(atoms, stacks, strict=True)]
            return run_schedule(loop, others, stacks, layer)

    def stages(self, atom: Any, stack: Any, loop: LayerLoop) -> jax.Array:
        """Returns a stack as stages have it; notes how its gradient moves, if it does not by itself."""
        number, moved = -1 if jaxprs.is_literal(atom) else self.params.get(atom, -1), self.moved
        place, groups = loop.place, loop.num_groups
        if moved is None or number not in moved.parts or groups == 1 or loop.num_places > loop.num_layers:
            return place.stages(stack, groups)
        path, dims = moved.parts[number]
        if carries(dims[1:], place.pipe):  # taken for no stack, or a model's own spec
            return place.stages(stack, groups)
        moved.moves[number] = lambda grad: place.moved_back(grad, groups)
        with gather_scope(path):
            return place.stages_apart(stack, groups, dims[1:], moved.copies)


def split_stages(
    eqn: Any, values: Sequence[Any]
) -> tuple[LayerLoop | MicrobatchProgram, LayerLoop, list[Any], list[Any]]:
    """Returns what an equation of stages runs, its layers, the operands that these do not slice, and those they do."""
    loop = eqn.params["loop"]
    layers = loop.loop if isinstance(loop, MicrobatchProgram) else loop
    first = len(values) - layers.num_slices
    return loop, layers, list(values[:first]), list(values[first:])


def run_schedule(
    loop: LayerLoop | MicrobatchProgram,
    others: Sequence[Any],
    stacks: Sequence[Any],
    layer: Layer,
    shardings: Sequence[NamedSharding | None] = (),
) -> list[Any]:
    """Runs stages by their schedule, as `run_stages` and `run_1f1b`; stacks are `[stages, layers / stages, ...]`."""
    if isinstance(loop, MicrobatchProgram):
        return run_1f1b(loop, [*others, *stacks], layer, shardings)
    first = len(loop.consts)
    return run_stages(loop, (others[:first], others[first:], stacks), layer, shardings)
