"""What a loss allows: on which parts of a batch it is called, how their losses and aux combine, and by which plan."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zero_jax.core.tree import PyTree, is_key, leaves_by_name
from zero_jax.core.variables import as_variables, model_state_names
from zero_jax.dims import SAME, Kind, Relation, unknown
from zero_jax.program.dataflow import Dependence
from zero_jax.program.jaxprs import draws_alike, source_line
from zero_jax.program.loss import LossProgram
from zero_jax.program.subcalls import CALLS, KINDS
from zero_jax.sharding.mesh import axis_size
from zero_jax.training.batch import shapes_of_part
from zero_jax.training.grads.accumulator import CombinedAux
from zero_jax.training.grads.plan import GradPlan
from zero_jax.training.loss.function import model_state_changes
from zero_jax.training.loss.program import StepLoss
from zero_jax.transforms import BatchParts, CountedProgram, Separability, separability

# By the key or by model state; by a key that all parts have; the count of such numbers; by the examples themselves.
_DRAWN, _REPEATED, _REPEATED_COUNT, _OF_EXAMPLES = -1, -2, -3, -4
# The kinds of `Subcall` whose results may be made of all operands: by the number of iterations, or another function
_OF_ALL = frozenset({"while", "custom_vjp", "custom_vmap", "shard_map"})


@dataclasses.dataclass(frozen=True)
class Reads:
    """What the results of a loss function are made of."""

    passes_state: bool  # whether model state is changed
    # Why the loss on microbatches may be another one, because it reads model state that it changes; empty if it is not
    another_loss: str
    # Why a leaf of aux, by its path, is not known, if it is the same in all parts, and if it is not; empty if it is
    aux: Mapping[str, tuple[str, str]]
    # What is drawn by a key that all parts have, if the loss is made of such numbers: the lines, and the shapes there
    repeated: frozenset[tuple[str, Any]]

    def combinations(self, known: Mapping[str, Relation]) -> dict[str, Relation]:
        """Returns how entries of aux are combined, given how they are if all parts read the same."""
        whys = {name: how.why or self.aux[name][how.kind is not Kind.SAME] for name, how in known.items()}
        return {name: how if how.why or not whys[name] else unknown(whys[name]) for name, how in known.items()}


def reads_of(
    program: LossProgram, variables: PyTree, batch: PyTree, key: jax.Array, counts: Sequence[jax.Array] = ()
) -> Reads:
    """Returns what the results of a loss function are made of, by its trace; what is not known counts as read.

    The program is `(variables, batch, key) -> (loss, (aux, model_state, ...))`; a `CountedProgram` takes counts, too.
    """
    of_counts = [frozenset[int]()] * len(counts)
    of_batch = [frozenset({_OF_EXAMPLES} if np.ndim(x) else ()) for x in jax.tree.leaves(batch)]
    if isinstance(program, CountedProgram):
        # Counts are made of the batch before the parts are: whether by numbers that all parts draw alike.
        made_of = [frozenset[int]()] * len(jax.tree.leaves(variables)) + of_batch + [frozenset({_DRAWN})]
        marks = _Reads().run(program.counting(variables, batch, key), made_of)
        of_counts = [frozenset({_REPEATED_COUNT}) if _REPEATED in x else frozenset[int]() for x in marks]
        batch = batch, counts
    traced = program.trace(variables, batch, key)
    lines = model_state_changes(program, variables, batch, key)
    # The marks of the inputs: leaves of model state that the loss function changes by their numbers, counts, the key.
    num_params = traced.num_params - len(lines)
    made_of = [frozenset[int]()] * num_params
    made_of += [frozenset() if line is None else frozenset({i}) for i, line in enumerate(lines)]
    made_of += of_batch + of_counts + [frozenset({_DRAWN})] * len(jax.tree.leaves(key))
    reads = _Reads()
    results = jax.tree.unflatten(jax.tree.structure(traced.out_shape), reads.run(traced.closed, made_of))
    names = model_state_names(as_variables(variables).model_state)

    def changed_leaves(marks: frozenset[int]) -> list[str]:
        changes = [(names[i], lines[i]) for i in sorted(x for x in marks if x >= 0)]
        return [f"it reads {name!r}, which it changes" + (f" at {line}" if line else "") for name, line in changes]

    def whys(marks: frozenset[int]) -> tuple[str, str]:
        repeats, changed = "it is drawn with a key that all microbatches have", changed_leaves(marks)[:1]
        if _REPEATED_COUNT in marks:
            return repeats, repeats
        # What is the same in all parts is that of the first microbatch, which reads what the batch does.
        drawn = "it is drawn with the key of each microbatch" if _DRAWN in marks else ""
        return drawn, repeats if _REPEATED in marks else "".join(changed)

    loss, (aux, *_) = results
    changed = changed_leaves(loss)
    more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
    return Reads(
        passes_state=any(line is not None for line in lines),
        another_loss=f"{changed[0]}{more}: a microbatch reads what the one before made" if changed else "",
        aux={name: whys(marks) for name, marks in leaves_by_name(aux).items()},
        repeated=frozenset(reads.notes if _REPEATED in loss else ()),
    )


def _repeated_draws(
    reads: Reads, program: LossProgram, arguments: tuple[PyTree, PyTree, jax.Array], num_parts: int
) -> str:
    """Says where the loss draws numbers for examples by a key that all of so many parts have; empty if it does not.

    `reads` are those of the loss on the batch. Numbers that are as many whatever the size of the batch are the same.
    """
    (variables, batch, key), of_part = arguments, frozenset[Any]()
    with contextlib.suppress(Exception):  # of a loss that cannot be traced on a part, of which nothing is known then
        of_part = reads_of(program, variables, shapes_of_part(batch, num_parts), key).repeated if reads.repeated else ()
    # Those of a part, too: a line may draw as many for something else as for the batch, and fewer for the part.
    lines = sorted(line for line, _ in reads.repeated.symmetric_difference(of_part))
    why = "by a key that all parts of a batch have (take the one that loss_fn gets)"
    return f"numbers are drawn for examples at {lines[0]} {why}" if lines else ""


class _Reads(Dependence):
    """Which marked inputs each value is made of; numbers that are drawn by model state (a count) are as random."""

    enters = CALLS | {*KINDS.values()}
    line = ""  # of the call that is entered: functions of JAX have none of the user's within

    def of_jaxprs(self, eqn: Any, sub: Any, operands: list[frozenset[int]]) -> Sequence[frozenset[int]]:
        before, self.line = self.line, source_line(eqn) or self.line
        results = super().of_jaxprs(eqn, sub, operands)
        self.line = before
        if sub.kind in _OF_ALL:
            return [frozenset[int]().union(*operands, *results)] * len(results)
        return results

    def operation(self, eqn: Any, operands: list[frozenset[int]]) -> list[frozenset[int]]:
        made_of, name = frozenset[int]().union(*operands), eqn.primitive.name
        keys = [var.aval for var in eqn.invars if is_key(var.aval)]
        of_keys = [x for x, var in zip(operands, eqn.invars, strict=True) if is_key(var.aval)]
        key = frozenset[int]().union(*(of_keys if of_keys and name != "random_fold_in" else operands)) - {_REPEATED}
        if of_keys and name != "random_fold_in" and not (draws_alike([eqn]) and any(np.ndim(x) for x in keys)):
            # Mapped over keys, other generators draw all numbers by the first. One key is that of several examples, as
            # of a sum over the batch, which is made before the parts are.
            key -= {_OF_EXAMPLES}
        if draws := name.startswith(("random_", "rng_", "threefry")):
            # By a key that is made of nothing (`jax.random.key(0)` in the loss function), all parts draw the same.
            made_of = frozenset({_DRAWN}) if key - {_OF_EXAMPLES} else key or frozenset({_REPEATED})
        if not key and (draws or (of_keys and not is_key(eqn.outvars[0].aval))):
            self.notes[source_line(eqn) or self.line, tuple(var.aval.shape for var in eqn.outvars)] = True
        return [made_of] * len(eqn.outvars)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgedLoss:
    """A loss function that is called on parts of a batch, and how what it returns is combined."""

    program: CountedProgram  # the loss on a part of the batch
    plan: GradPlan  # where its gradients are reduced
    separable: Separability  # whether the loss may be called on parts of the batch
    aux: CombinedAux  # how its aux is combined
    aux_shapes: PyTree  # the shapes of the aux of the batch

    def shapes_of_part(self, arguments: tuple[PyTree, PyTree, Any], num_parts: int) -> tuple[PyTree, PyTree, Any]:
        """Returns the arguments of `program` on one of so many parts of a batch, by those of the loss on the batch."""
        variables, batch, key = arguments
        counts = jax.eval_shape(self.program.counts, variables, batch, key) if self.separable.on_parts.counts else []
        return variables, (shapes_of_part(batch, num_parts), counts), key

    def warn(self, plan: GradPlan) -> None:
        """Warns if the loss is another one for the plan, if more is sent than asked for, or if aux is left out."""
        self.aux.warn(num_microbatches=plan.num_microbatches, remedy=plan.whole_batch)
        weight = self.separable.on_parts.weight
        by = "what each is a mean over" if isinstance(weight, int) else weight
        plan.warn(another_loss=self.separable.another_loss, weighted_by=by or "")


def judge(loss: StepLoss, arguments: tuple[PyTree, PyTree, jax.Array]) -> JudgedLoss:
    """Judges, once for arguments of some shapes, whether a loss may be called on the parts of a batch asked for.

    Raises:
      ValueError: an entry of aux holds PRNG keys; devices have no gradients of their own to send quantized.
    """
    try:
        traced = loss.program.trace(*arguments)
    except Exception:  # it may be made for microbatches alone; `separability` says so
        batch = shapes_of_part(arguments[1], loss.placement.grad_plan.num_microbatches)
        return _judged(loss, arguments, (arguments[0], batch, arguments[2]))
    if traced not in loss.judged:
        loss.judged[traced] = _judged(loss, arguments, arguments)
    return loss.judged[traced]


def _judged(
    loss: StepLoss, arguments: tuple[PyTree, PyTree, jax.Array], traceable: tuple[PyTree, PyTree, jax.Array]
) -> JudgedLoss:
    placement, program, loss_weight = loss.placement, loss.fused, loss.config.loss_weight
    plan = placement.grad_plan
    k = plan.num_microbatches
    reads = reads_of(program, *traceable)
    # A microbatch is cut over these into the smallest parts that the loss is called on.
    part_axes = plan.batch_axes if plan.at_use or not plan.once_over else plan.once_over
    num_parts = k if k > 1 else axis_size(placement.mesh, part_axes)
    drawn = _repeated_draws(reads, program, arguments, num_parts) if traceable is arguments else ""
    not_local = "its model_state passes from one microbatch to the next" if reads.passes_state else drawn
    parts = BatchParts(
        mesh=placement.mesh,
        axes=dataclasses.replace(placement.axes, replica=(), data=part_axes),
        num_microbatches=k,
        num_shards=axis_size(placement.mesh, plan.batch_axes),
        local=bool(plan.once_over or plan.at_use) and not not_local,
        exact=plan.is_exact,
    )
    separable = separability(program, arguments, parts, loss_weight=loss_weight)
    if not_local:
        whys = [separable.another_loss, *([reads.another_loss, drawn] if k > 1 else [])]
        separable = dataclasses.replace(separable, not_local=not_local, another_loss=" and ".join(filter(None, whys)))
    counted = CountedProgram(program, separable.on_parts)
    if separable.on_parts.counts:
        reads = reads_of(counted, *traceable, jax.eval_shape(counted.counts, *traceable))
    _, (shapes, _) = program.trace(*traceable).out_shape
    is_unparted = k == 1 and separable.not_local  # the loss is called on the batch after all
    same = dict.fromkeys(leaves_by_name(shapes), SAME)
    for name, leaf in () if is_unparted else leaves_by_name(shapes).items():
        if is_key(leaf):
            raise ValueError(
                f"aux leaf {name!r} holds PRNG keys, and those of several parts of a batch make none of the batch: "
                f"leave it out of aux, or set {plan.whole_batch}"
            )
    return JudgedLoss(
        program=counted,
        plan=plan.allowed(separable),
        separable=separable,
        aux=CombinedAux(same if is_unparted else reads.combinations(separable.aux)),
        aux_shapes=shapes,
    )
