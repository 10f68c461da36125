"""Finds from a trace of an optimizer's update which gradients it does not read, and which params it does not change.

This covers `optax.set_to_zero` under `multi_transform` or `masked`, and any other optimizer whose updates are zeros
that do not depend on the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.core.tree import PyTree
from zero_jax.dims import SAME_ELEMENTS
from zero_jax.program.jaxprs import is_literal, open_jaxpr, used_inputs
from zero_jax.program.passes import Pass
from zero_jax.program.subcalls import CALLS
from zero_jax.training.optimizer.update import TracedUpdate

# Zeros stay zeros in these.
_KEEPS_ZEROS = SAME_ELEMENTS | {"neg", "slice"}


def needed_grads(traced: TracedUpdate) -> list[bool]:
    """Tells which gradients the optimizer reads: those of frozen params need not even be computed."""
    used = used_inputs(traced.jaxpr)
    clipped, unclipped = used[: traced.num_grads], used[len(used) - traced.num_grads :]
    return [a or b for a, b in zip(clipped, unclipped, strict=True)]


def flags_of_all(params: PyTree, flags: Sequence[bool]) -> list[bool]:
    """Returns a flag for each param from those of the trainable ones, False for all others."""
    of_trainable = iter(flags)
    return [jnp.issubdtype(x.dtype, jnp.inexact) and next(of_trainable) for x in jax.tree.leaves(params)]


def unchanged(traced: TracedUpdate, *, needed: Sequence[bool]) -> list[bool]:
    """Tells which params an update never changes; a param whose gradient is read (`needed`) counts as changed."""
    if all(needed):
        return [False] * len(needed)
    zeros, values = _Zeros(), {}
    zeros.run(traced.jaxpr, [False] * len(open_jaxpr(traced.jaxpr)[0].invars), values)
    updates = [zeros.constant(x) if is_literal(x) else values[x] for x in traced.updates]
    return [zero and not read for zero, read in zip(updates, needed, strict=True)]


class _Zeros(Pass[bool]):
    """Finds the values that are zeros whatever the inputs are."""

    enters = CALLS

    def constant(self, atom: Any) -> bool:
        return is_literal(atom) and jnp.ndim(atom.val) == 0 and bool(atom.val == 0)

    def operation(self, eqn: Any, operands: list[bool]) -> list[bool]:
        name = eqn.primitive.name
        if name in _KEEPS_ZEROS:
            zero = operands[0]
        elif name == "mul" and any(operands) and not all(operands):
            factor = eqn.invars[operands.index(False)]
            # Zero times a value that is not a literal may be NaN.
            zero = is_literal(factor) and bool(jnp.isfinite(factor.val).all())
        else:
            zero = name in ("add", "add_any", "sub", "mul") and all(operands)
        return [zero] * len(eqn.outvars)
