"""Which scans over layers can be the stages of a pipeline, and what each of their operands is to a microbatch.

A loss is traced on the whole batch and on one of its microbatches. The relations between the two traces (`dims/parts/`)
say of each operand of a scan whether microbatches have examples of their own of it, share it, or add up to it. What is
not known is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from zero_jax.dims import (
    CASTS,
    EXTREMA,
    SAME,
    SAME_ELEMENTS,
    Kind,
    Pair,
    Relation,
    TraceComparison,
    dim_of_examples,
    rows,
    sizes_of,
)
from zero_jax.program import jaxprs
from zero_jax.program.dataflow import made_of, read_for
from zero_jax.program.evaluation import flattened
from zero_jax.program.subcalls import Subcall, equations, equations_of, kind_of, scan_of
from zero_jax.sharding.mesh import Axes
from zero_jax.transforms.facts import Facts
from zero_jax.transforms.pipeline.body import CannotCut, layer_of_microbatch
from zero_jax.transforms.pipeline.place import Schedule, StagePlace, is_never_kept
from zero_jax.transforms.pipeline.scans import ROLLED, layer_scans, same_scans
from zero_jax.transforms.separable.separability import operations

# A scan over layers as stages: of the operands and results of the scan. What evaluates a program runs it by
# `run_stages`, or of a whole loss by `run_1f1b`; nothing differentiates, maps or lowers it.
pipeline_p = jex_core.Primitive("zero_pipeline")
pipeline_p.multiple_results = True
pipeline_p.def_abstract_eval(lambda *_, avals, **params: list(avals))

# The name of what a layer of a stage begins with, for remat policies.
LAYER_INPUT = "zero_layer_input"

# What moves all elements of a param that all stages read, such as a table, or casts them.
MOVED_WHOLE = ("transpose", "convert_element_type")

# Why layers are not cut of which remat moves values for the batch, not for a microbatch.
OF_SMALL = (
    "remat moves what its layers keep of the batch to the host, or shards it, and values of a microbatch are too small "
    "for that: give fewer microbatches, or remat='full'"
)

# Why a loss is not cut whose microbatches have one example.
OF_ONE = (
    "loss_fn does something else on a microbatch of one example than on several: give fewer microbatches, or a larger "
    "batch"
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Stages:
    """The stages that a loss is cut into."""

    place: StagePlace  # where they run
    axes: Axes  # the roles of the mesh's axes
    num_microbatches: int  # the microbatches that go through them
    # Whether layers that have no `jax.checkpoint` of their own are recomputed, stage by stage
    recompute: bool = True
    schedule: Schedule = dataclasses.field(default_factory=Schedule)  # in which order, as of `resolve_schedule`
    reduce_dtype: Any = None  # the dtype in which gradients are summed across devices; None for their own

    def __post_init__(self) -> None:
        # Microbatches enter and leave the stages in turn (`ring.py`), but for those of 1F1B with one group.
        are_even = self.num_microbatches % self.num_stages == 0
        assert are_even or str(self.schedule) == "1f1b", (self.schedule, self.num_microbatches, self.num_stages)

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.place.num_stages

    @property
    def num_groups(self) -> int:
        """The groups of layers of a stage."""
        return self.schedule.num_groups


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LayerLoop(Stages):
    """A scan over layers as the stages of a pipeline; `recompute` says whether a stage is, in the backward pass.

    Each stage has places for as many layers; the last ones may be idle. Groups of layers of all stages follow one
    another: the first of each stage, the second of each, and so on.
    """

    num_layers: int  # the iterations of the scan
    # The closed jaxpr of a layer on a microbatch: it takes the microbatch's number, the scan's constants, carries and
    # slices, and returns carries and slices
    layer: Any
    # What values of the batch are to those of microbatches (`checked`): the scan's constants, its carries, and what it
    # stacks, of which ROWS have their dim in the stack
    consts: tuple[Relation, ...]
    carry: tuple[Relation, ...]
    ys: tuple[Relation, ...]
    num_slices: int  # the operands that it takes slices of
    unroll: int  # how many layers are one iteration of the compiled loop
    policy: Any  # what is kept of a stage that is recomputed, as `jax.checkpoint` takes it; None for its inputs alone
    keeps_values: bool  # whether the backward pass reads more of a layer than its inputs

    @property
    def num_stage_groups(self) -> int:
        """The groups of layers of all stages: a microbatch goes through as many."""
        return self.num_stages * self.num_groups

    @property
    def num_ticks(self) -> int:
        """The ticks of a pass, in each of which all stages run a group: those of a stage, and of those before it."""
        return self.schedule.num_ticks(self.num_stages, self.num_microbatches)

    @property
    def group_size(self) -> int:
        """The places for layers of a group, all of which a stage runs in a tick."""
        return self.num_places // self.num_stage_groups

    @property
    def num_places(self) -> int:
        """The places for layers of all stages, of which the first `num_layers` have one."""
        return self.schedule.num_places(self.num_stages, self.num_layers)

    @property
    def dims(self) -> tuple[int | None, ...]:
        """For each result the dim of examples, None where it has none."""
        return tuple(x.dim if x.is_rows else None for x in (*self.carry, *self.ys))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundLoop:
    """A scan over stacked params."""

    index: int  # the index of its equation
    line: str  # its line
    loop: LayerLoop | None = None  # the scan as stages; None if it is not cut
    why: str = ""  # why it is not cut
    is_rolled: bool = False  # whether it was a Python loop, whose params are stacked in each step
    # With 1F1B, shapes of what has a gradient and waits outside of the loop in each stage, for all microbatches
    waiting: tuple[Any, ...] = ()


def find_loops(
    whole: Any,
    parts: Sequence[Any],
    inputs: Sequence[Relation],
    *,
    num_params: int,
    stages: Stages,
    comparison: TraceComparison,
) -> list[FoundLoop]:
    """Finds the scans over layers of a jaxpr, and how they are cut into stages.

    Args:
      whole: the flat closed jaxpr of a loss on the batch.
      parts: that of a microbatch, whose layers run; and, where that is a single example, those of a batch of twice the
        size and of its microbatches, which are compared instead.
      inputs: the relations of its inputs.
      num_params: how many of its inputs are params.
      stages: what they are cut into.
      comparison: compares the traces.
    """
    compared = (whole, parts[0]) if len(parts) == 1 else (parts[1], parts[2])
    jaxprs_of = [jaxprs.open_jaxpr(x)[0] for x in (whole, *parts)]
    kinds = ["param" if i < num_params else "value" for i in range(len(inputs))]
    facts, found = Facts(jaxprs_of[0], kinds), []
    with_gradient = variables_with_gradient(jaxprs_of[0], num_params)
    for index in layer_scans(facts):
        eqn = jaxprs_of[0].eqns[index]
        line, scan = jaxprs.model_line(eqn) or "a line that is not known", scan_of(eqn)
        entry = FoundLoop(index=index, line=line, is_rolled=ROLLED in jaxprs.name_stack(eqn))
        try:
            if len(parts) > 1 and operations(parts[0]) != operations(parts[2]):
                raise CannotCut(OF_ONE)
            others = same_scans(jaxprs_of, index)[1:]
            if len(others) < len(parts):
                raise CannotCut("loss_fn does something else on a microbatch than on the batch")
            if len({sum(x.primitive.name == "name" for x in equations_of(each)) for each in (eqn, *others)}) > 1:
                raise CannotCut(OF_SMALL)
            if len(parts) > 1:
                wirings, (one, many, two) = zip(*map(_wiring, others), strict=True)
                numbers = zip(one, two, many, strict=False)
                if wirings[0] != wirings[2] or not are_of_one(numbers, stages.num_microbatches):
                    raise CannotCut(OF_ONE)
            pair = Pair(whole=eqn if len(parts) == 1 else others[1], part=others[-1])
            # Of one example there may be another shape: the layers that run are not those that are compared.
            operands = zip(*(each.invars for each in (eqn, *others)), strict=True)
            of_one_shape = [len({x.aval.shape for x in each}) == 1 for each in operands]
            have_gradient = [x in with_gradient for x in eqn.outvars]
            relations = _relations(compared, pair, inputs, of_one_shape, have_gradient, comparison)
            _check_scan(scan, stages)
            found.append(dataclasses.replace(entry, loop=_loop(others[0], pair, relations, stages)))
        except CannotCut as error:
            found.append(dataclasses.replace(entry, why=str(error)))
    return found


def variables_with_gradient(jaxpr: Any, num_params: int) -> set[Any]:
    """Returns the variables of a loss through which params have a gradient."""
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive.name != "stop_gradient"]
    return made_of(jaxpr.invars[:num_params], eqns) & read_for(jaxpr.outvars[:1], eqns)


def _wiring(eqn: Any) -> tuple[list[Any], list[Any]]:
    """Returns what the operations of a layer are on, and what it returns; and the numbers among these.

    What only changes a shape is passed over.
    """
    jaxpr = jaxprs.open_jaxpr(flattened(scan_of(eqn).jaxpr, kinds=("call", "remat")))[0]
    found, numbers = list[Any](), list[Any]()
    made: dict[Any, Any] = {var: i for i, var in enumerate(jaxpr.invars)}

    def source(atom: Any) -> Any:
        own = np.asarray(atom.val) if jaxprs.is_literal(atom) else made.get(atom)
        if isinstance(own, np.ndarray):
            numbers.append(own)
            return None
        return own

    for each in jaxpr.eqns:
        if each.primitive.name in SAME_ELEMENTS - CASTS:
            atom = each.invars[0]
            made[each.outvars[0]] = np.asarray(atom.val) if jaxprs.is_literal(atom) else made.get(atom)
        else:
            read = [*map(source, each.invars)]
            made.update({var: (len(found), i) for i, var in enumerate(each.outvars)})
            found.append((each.primitive.name, read))
    return [*found, *map(source, jaxpr.outvars)], numbers


def are_of_one(numbers: Iterable[tuple[Any, Any, Any]], num_microbatches: int) -> bool:
    """Tells whether numbers of a trace on one example are to those on two as these to those on microbatches of two.

    Else what was compared, which is of more examples, says nothing of one: `max(len(x), 2)` is no number of examples.
    """
    for one, two, many in numbers:
        if any(x.shape or x.dtype.kind not in "biuf" for x in (one, two, many)):
            continue
        a, b, c = float(one), float(two), float(many)
        if b == c:
            wanted = b
        elif b * c > 0:
            wanted = b / 2 ** (math.log(c / b) / math.log(num_microbatches))
        else:
            continue  # which the comparison refuses
        if not math.isclose(a, wanted, rel_tol=1e-5):
            return False
    return True


def _check_scan(scan: Subcall, stages: Stages) -> None:
    """Refuses scans that have too few layers, or that go through them backwards."""
    if scan.reverse:
        raise CannotCut("it takes its layers in reverse: scan over params that are stacked in their order")
    num_groups = stages.num_groups
    if scan.length < stages.num_stages * num_groups:
        groups = f" of {num_groups} groups" if num_groups > 1 else ""
        most = scan.length // num_groups
        works = f": choose pipe={most} or less" if most > 1 else ""
        raise CannotCut(f"its {scan.length} layers are fewer than {stages.num_stages} stages{groups}{works}")


def _relations(
    compared: tuple[Any, Any],
    pair: Pair,
    inputs: Sequence[Relation],
    of_one_shape: Sequence[bool],
    have_gradient: Sequence[bool],
    comparison: TraceComparison,
) -> tuple[list[Relation], list[Relation]]:
    """Returns the relations of the constants of a scan, and of its results.

    What is made before the layers is that of the whole batch, of which a microbatch has its examples, whatever it is
    made of. `inputs` are the relations of those of the traces; flags tell which operands have the same shape in a
    microbatch, and which results have a gradient.
    """
    whole, part = (jaxprs.alone(closed, eqn.invars) for closed, eqn in zip(compared, pair.both, strict=True))
    operands, scan = comparison.run(whole, part, inputs, keeps_whole=True), scan_of(pair.whole)
    sizes, sums = sizes_of(inputs, *compared), dict[int, Relation]()
    for i in range(len(operands)):
        if operands[i].is_plain:
            continue
        if of_one_shape[i]:
            if operands[i].kind is Kind.SUM and scan.num_consts <= i < scan.num_consts + scan.num_carry:
                sums[i] = operands[i]
            operands[i] = SAME
        elif (dim := dim_of_examples(*pair.shapes(i), sizes)) is not None:
            operands[i] = rows(dim)
    if any(x.kind is Kind.SAME and not flag for x, flag in zip(operands, of_one_shape, strict=True)):
        raise CannotCut(OF_ONE)
    # Layers go on with a sum that is carried into them, or read it.
    refusals = list[CannotCut]()
    for starts in [sums, dict[int, Relation]()][not sums :]:
        try:
            begun = [starts.get(i, x) for i, x in enumerate(operands)]
            comparison.source = jaxprs.source_line(pair.whole)  # which a refusal names
            results = comparison.equation(pair, begun)
            return _checked(scan, begun, results, have_gradient)
        except CannotCut as error:
            refusals.append(error)
        finally:
            comparison.source = ""
    raise refusals[0]


def _checked(
    scan: Subcall, operands: Sequence[Relation], results: Sequence[Relation], have_gradient: Sequence[bool]
) -> tuple[list[Relation], list[Relation]]:
    """Returns the relations of the constants and of the results of a scan, if it can be cut."""
    consts, carry, slices = scan.split(operands)
    shared = [checked(x, "what its layers read") for x in consts]
    for x in slices:
        if checked(x, "what it takes slices of").kind is not Kind.SAME:
            raise CannotCut("it takes slices that have examples: let its layers read them whole, or take them by index")
    for x, flag in zip(carry, have_gradient, strict=False):
        checked(x, "what its layers begin with", has_gradient=flag)
    pairs = zip(results, have_gradient, strict=True)
    return shared, [checked(x, "what its layers make", has_gradient=flag) for x, flag in pairs]


def checked(x: Relation, what: str, *, has_gradient: bool = True) -> Relation:
    """Returns the relation of a value, if it can be made of those of microbatches."""
    if x.kind is Kind.UNKNOWN:
        raise CannotCut(x.why.replace("{}", "a line that is not known"))
    if x.kind in EXTREMA and has_gradient:  # of which that of the batch has another derivative
        which = "largest" if x.kind is Kind.MAX else "smallest"
        raise CannotCut(f"{what} is the {which} value of all examples, and the loss may depend on it")
    if x.kind is Kind.POSITIONS:
        raise CannotCut(f"{what} is the places of examples in the batch")
    if not (x.is_plain or x.kind is Kind.SUM or x.kind in EXTREMA):
        raise CannotCut(f"{what} is neither of each example, nor the same for all, nor a sum over them ({x.kind.name})")
    return x


def _loop(eqn: Any, pair: Pair, relations: tuple[list[Relation], list[Relation]], stages: Stages) -> LayerLoop:
    """Returns a scan as stages: as traced on a microbatch, and by the pair of traces that were compared."""
    (consts, results), scan = relations, scan_of(eqn)
    for x, var in zip(results, eqn.outvars, strict=True):
        if x.kind is Kind.SUM and x.power and not jnp.issubdtype(var.aval.dtype, jnp.inexact):
            raise CannotCut("its layers make a mean of whole numbers over the examples")
    whole, part = pair.subcalls()
    layer = layer_of_microbatch(scan.jaxpr, (whole.jaxpr, part.jaxpr), stages.axes)
    own = [eqn.params["policy"] for eqn in equations(scan.jaxpr) if kind_of(eqn) == "remat"]
    recompute, policy = stages.recompute and not own, None
    keeps_values = not recompute and (not own or any(each is not None for each in own))
    if stages.num_groups > 1 and not recompute:
        # Params of a group would be kept for each tick: they are taken again, and what the layers keep is kept.
        recompute, policy = True, kept_values(own or [jax.checkpoint_policies.dots_saveable])
    return LayerLoop(
        **vars(dataclasses.replace(stages, recompute=recompute)),
        num_layers=scan.length,
        layer=layer,
        consts=tuple(consts),
        carry=tuple(results[: scan.num_carry]),
        ys=tuple(results[scan.num_carry :]),
        num_slices=len(scan.split(eqn.invars)[2]),
        unroll=scan.unroll,
        policy=policy,
        keeps_values=keeps_values,
    )


def kept_values(policies: Sequence[Any]) -> Any:
    """Returns the remat policy that keeps what each layer begins with, and what some policies keep, but no params."""
    policies = [policy for policy in policies if policy is not None]

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        if is_never_kept(primitive, *avals, **params):
            return False
        if params.get("name") == LAYER_INPUT:
            return True
        each = (policy(primitive, *avals, **params) for policy in policies)
        return next((kept for kept in each if kept and type(kept).__name__ != "RecomputeType"), False)

    return policy
