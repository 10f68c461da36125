"""What a loss allows: on which parts of a batch it is called, how their losses and aux combine, and by which plan."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from zero_jax.core.tree import PyTree, leaves_by_name
from zero_jax.dims import Kind
from zero_jax.program.loss import LossProgram
from zero_jax.sharding.mesh import axis_size
from zero_jax.training.batch import shapes_of_part
from zero_jax.training.grads.combined import CombinedAux, of_trace
from zero_jax.training.grads.plan import GradPlan
from zero_jax.training.grads.reads import reads_of
from zero_jax.training.loss.program import StepLoss
from zero_jax.transforms import (
    BatchParts,
    Combination,
    PartWeight,
    Separability,
    divided_by_nonzero,
    separability,
    with_weight,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgedLoss:
    """A loss function that is called on parts of a batch, and how what it returns is combined.

    Attributes:
      weighted: the loss function with its weights, as of `with_weight`.
      plan: where its gradients are reduced.
      separable: whether the loss may be called on parts of the batch.
      aux: how its aux is combined.
      aux_shapes: the shapes of the aux of the batch.
      own_weight: the weight of the batch: its shapes.
    """

    weighted: LossProgram
    plan: GradPlan
    separable: Separability
    aux: CombinedAux
    aux_shapes: PyTree
    own_weight: PartWeight

    def weight(self, own: PartWeight) -> PartWeight:
        """Returns what a part counts, from what its loss is divided by."""
        if self.separable.weigh == "count":
            return PartWeight(own.count, own.count)
        return of_trace(own, self.own_weight, self.separable.count_power) or own

    def warn(self, plan: GradPlan, loss_weight: str | None) -> None:
        """Warns if the loss is another one for the plan, if more is sent than asked for, or if aux is left out."""
        self.aux.warn(num_microbatches=plan.num_microbatches)
        divisor = loss_weight if loss_weight not in ("auto", None) else None
        by = {"divisor": divisor, "count": "what each is a mean over"}.get(self.separable.weigh)
        plan.warn(another_loss=self.separable.another_loss, weighted_by=by or "")


def judge(loss: StepLoss, arguments: tuple[PyTree, PyTree, jax.Array]) -> JudgedLoss:
    """Judges whether the loss of a step may be called on the parts of a batch that its config asks for.

    Raises:
      ValueError: an entry of aux holds PRNG keys; devices have no gradients of their own to send quantized.
    """
    placement, program, loss_weight = loss.placement, loss.fused, loss.config.loss_weight
    plan, traceable = placement.grad_plan, arguments
    k = plan.num_microbatches
    try:
        program.trace(*arguments)
    except Exception:  # it may be made for microbatches alone; `separability` says so
        traceable = arguments[0], shapes_of_part(arguments[1], k), arguments[2]
    reads = reads_of(program, *traceable)
    parts = BatchParts(
        mesh=placement.mesh,
        axes=dataclasses.replace(placement.axes, replica=(), data=plan.part_axes),
        num_microbatches=k,
        num_shards=axis_size(placement.mesh, plan.batch_axes),
        local=bool(plan.once_over or plan.at_use) and not reads.passes_state,
        exact=plan.is_exact,
    )
    weighted = with_weight(program, loss_weight)
    separable = separability(weighted, arguments, parts, loss_weight=loss_weight)
    if separable.weigh == "equal" and loss_weight == "auto":  # it ends in a division, by what is no weight of parts
        weighted = with_weight(program, None)
        aux = separability(weighted, arguments, parts, loss_weight=None).aux
        separable = dataclasses.replace(separable, aux=aux)
    if reads.passes_state:
        not_local = "its model_state passes from one microbatch to the next"
        another = " and ".join(filter(None, [separable.another_loss, reads.another_loss if k > 1 else ""]))
        separable = dataclasses.replace(separable, not_local=not_local, another_loss=another)
    _, (shapes, _, weight, aux_weights) = weighted.trace(*traceable).out_shape
    is_whole = k == 1 and separable.not_local
    same = dict.fromkeys(leaves_by_name(shapes), Combination(kind=Kind.SAME))
    for name, leaf in () if is_whole else leaves_by_name(shapes).items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ValueError(
                f"aux leaf {name!r} holds PRNG keys, and those of several microbatches make none of the batch: "
                "leave it out of aux, or set num_microbatches=1"
            )
    return JudgedLoss(
        weighted=weighted if separable.weigh == "count" else divided_by_nonzero(weighted),
        plan=plan.allowed(not_local=separable.not_local, convolves=separable.convolves, is_plain=separable.is_plain),
        separable=separable,
        aux=CombinedAux(same if is_whole else reads.combinations(separable.aux), aux_weights),
        aux_shapes=shapes,
        own_weight=weight,
    )
