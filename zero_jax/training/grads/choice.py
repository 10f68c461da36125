"""What the parts of a batch are computed for: whether gradients are summed once a step, how losses and aux combine."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.core.loss_program import LossProgram
from zero_jax.core.tree import PyTree, leaves_by_name
from zero_jax.training.grads.accumulator import Accumulator, GradInputs
from zero_jax.training.grads.combined import CombinedAux, of_trace
from zero_jax.training.grads.quantized import refuse_own
from zero_jax.training.grads.reads import reads_of
from zero_jax.transforms import (
    Combination,
    Kind,
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
      separable: whether the loss may be called on parts of the batch.
      aux: how its aux is combined.
      aux_shapes: the shapes of the aux of the batch.
      own_weight: the weight of the batch: its shapes.
    """

    weighted: LossProgram
    separable: Separability
    aux: CombinedAux
    aux_shapes: PyTree
    own_weight: PartWeight

    def weight(self, own: PartWeight) -> PartWeight:
        """Returns what a part counts, from what its loss is divided by."""
        if self.separable.weigh == "count":
            return PartWeight(own.count, own.count)
        return of_trace(own, self.own_weight, self.separable.count_power) or own


def _microbatch(x: Any, k: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0] // k, *x.shape[1:]) if x.ndim else (), x.dtype)


def judge(
    traced: LossProgram, arguments: tuple[PyTree, PyTree, jax.Array], *, loss_weight: str | None, **parts: Any
) -> JudgedLoss:
    """Judges whether a loss function may be called on parts of a batch.

    Args:
      traced: `(variables, batch, key) -> (loss, (aux, model_state))`.
      arguments: its arguments for the batch.
      loss_weight: as in `ZeroConfig`.
      **parts: what the parts are, as for `separability`.

    Raises:
      ValueError: an entry of aux holds PRNG keys.
    """
    k, traceable = parts["num_microbatches"], arguments
    try:
        traced.trace(*arguments)
    except Exception:  # it may be made for microbatches alone; `separability` says so
        traceable = arguments[0], jax.tree.map(lambda x: _microbatch(x, k), arguments[1]), arguments[2]
    reads = reads_of(traced, *traceable)
    parts |= {"local": parts["local"] and not reads.passes_state}
    weighted = with_weight(traced, loss_weight)
    separable = separability(weighted, *arguments, loss_weight=loss_weight, **parts)
    if separable.weigh == "equal" and loss_weight == "auto":  # it ends in a division, by what is no weight of parts
        weighted = with_weight(traced, None)
        aux = separability(weighted, *arguments, loss_weight=None, **parts).aux
        separable = dataclasses.replace(separable, aux=aux)
    if reads.passes_state:
        not_local = "its model_state passes from one microbatch to the next"
        another = " and ".join(filter(None, [separable.another_loss, k > 1 and reads.another_loss]))
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
        separable=separable,
        aux=CombinedAux(same if is_whole else reads.combinations(separable.aux), aux_weights),
        aux_shapes=shapes,
        own_weight=weight,
    )


def accumulated(
    accumulator: Accumulator,
    own_grads: Callable[..., Any],
    placed_grads: Callable[..., Any],
    inputs: GradInputs,
    *,
    separable: Separability,
    is_local: bool,
    frozen: PyTree,
    errors: Sequence[jax.Array | None],
) -> Any:
    """Accumulates gradients, summed across devices once a step if the loss allows it, else in every microbatch.

    Warns if the loss is another one for it, or if more is sent.

    Args:
      accumulator: that of the step.
      own_grads: loss and gradients of each device's own examples, to be summed once.
      placed_grads: loss and gradients of a microbatch, reduced across devices.
      inputs: the arguments of both.
      separable: whether the loss may be called on parts of the batch.
      is_local: whether gradients are accumulated per device, rather than per copy of the params.
      frozen: the params without gradients, the last argument of `own_grads`.
      errors: what the last quantized sum of each gradient dropped.

    Returns:
      `((loss, (aux, model_state)), grads, parts, errors)`, with the new errors.
    """
    k, not_local = accumulator.num_microbatches, separable.not_local
    results = None
    if accumulator.mapped and not not_local:
        try:
            out, stacks, parts = accumulator.local(
                own_grads, inputs, frozen=frozen, convolves=separable.convolves, is_plain=separable.is_plain
            )
            grads, errors = accumulator.reduce(stacks, errors)
            results = out, grads, parts
        except NotImplementedError as error:
            not_local = f"jax.vmap has no rule for an operation of loss_fn ({error})"
            if any(grad_sum.coding for grad_sum in accumulator.sums):
                refuse_own(not_local)
    accumulator.aux.warn(num_microbatches=k)
    sent = f"gradients are summed across devices in each of the {k} microbatches, not once a step"
    if separable.another_loss:
        by = {"divisor": accumulator.loss_weight, "count": "what each is a mean over"}.get(separable.weigh)
        warnings.warn(
            f"the loss on microbatches may be another one than on the whole batch, because {separable.another_loss}: "
            f"it is the mean of the losses of {k} microbatches, each by itself{f', weighted by {by}' if by else ''}. "
            f"num_microbatches=1 gives the loss of the whole batch{'; ' + sent if not_local else ''}",
            stacklevel=2,
        )
    elif not_local and is_local:
        warnings.warn(
            f"{sent}, because {not_local}: the loss needs whole microbatches. Stage 2 sends no more then, and "
            "holds less; num_microbatches=1 sends the least",
            stacklevel=2,
        )
    if results is None and k == 1:
        (loss, (aux, model_state, *_)), grads = placed_grads(*inputs)
        results = (loss, (aux, model_state)), grads, None
    return *(results or accumulator.sharded(placed_grads, inputs)), errors
