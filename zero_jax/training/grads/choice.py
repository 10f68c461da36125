"""Whether gradients are summed across devices once a step or in every microbatch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zero_jax.core.tree import PyTree
from zero_jax.training.grads.accumulator import Accumulator, GradInputs
from zero_jax.training.grads.quantized import refuse_own
from zero_jax.transforms import Separability


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
    sent = f"gradients are summed across devices in each of the {k} microbatches, not once a step"
    if separable.another_loss:
        warnings.warn(
            f"{separable.another_loss}: it is the mean of the losses of {k} microbatches, each by itself. "
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
        (loss, (aux, model_state, _)), grads = placed_grads(*inputs)
        results = (loss, (aux, model_state)), grads, None
    return *(results or accumulator.sharded(placed_grads, inputs)), errors
