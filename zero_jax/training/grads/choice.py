"""Whether gradients are summed across devices once a step or in every microbatch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zero_jax.core.tree import PyTree
from zero_jax.training.grads.accumulator import Accumulator
from zero_jax.training.grads.quantized import refuse_own
from zero_jax.transforms import Separability


def accumulated(
    accumulator: Accumulator,
    own_grads: Callable[..., Any],
    placed_grads: Callable[..., Any],
    inputs: Any,
    found: Separability,
    *,
    is_local: bool,
    rest: PyTree,
    errors: Sequence[jax.Array | None],
) -> Any:
    """Accumulates gradients to be summed across devices once, if `own_grads` can be, or in every microbatch.

    Warns where the loss is another one for it, or more is sent. Unless `is_local`, it is the sum across copies of
    the params that is made once. `rest` is the last argument of `own_grads`. `errors` are those of the last quantized
    sums of each gradient; new ones are the last result.
    """
    k, not_local = accumulator.num_microbatches, found.not_local
    results = None
    if accumulator.mapped and not not_local:
        try:
            out, stacks, parts = accumulator.local(
                own_grads, *inputs, rest=rest, convolves=found.convolves, is_plain=found.is_plain
            )
            grads, errors = accumulator.reduce(stacks, errors)
            results = out, grads, parts
        except NotImplementedError as error:
            not_local = f"jax.vmap has no rule for an operation of loss_fn ({error})"
            if any(how.coding for how in accumulator.sums):
                refuse_own(not_local)
    sent = f"gradients are summed across devices in each of the {k} microbatches, not once a step"
    if found.another_loss:
        warnings.warn(
            f"{found.another_loss}: it is the mean of the losses of {k} microbatches, each by itself. "
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
        (loss, (aux, model_state, _)), grads = placed_grads(*inputs[:4])
        results = (loss, (aux, model_state)), grads, None
    return *(results or accumulator.sharded(placed_grads, *inputs)), errors
