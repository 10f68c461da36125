"""What an optimizer freezes, read from a trace of its update: gradients that it does not read, params it leaves alone.

Neither needs to be known by name: `optax.set_to_zero` under `multi_transform` or `masked`, and whatever else makes
zeros of updates without a look at the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero_jax.core.jaxprs import is_literal, used_inputs
from zero_jax.core.passes import Pass
from zero_jax.core.subcalls import CALLS
from zero_jax.core.tree import PyTree
from zero_jax.training.optimizer.update import abstract_update

# Zeros stay zeros in these.
_MOVES = frozenset("broadcast_in_dim convert_element_type copy neg reshape slice squeeze transpose".split())


def needed_grads(tx: optax.GradientTransformation, params: PyTree, opt_state: PyTree) -> list[bool]:
    """Tells which gradients the optimizer reads: those of frozen params need not even be computed.

    Args:
      tx: the optimizer.
      params: the params that have gradients, or their shapes.
      opt_state: the optimizer's state, or its shapes.
    """
    update, avals = _update(tx, params, opt_state)
    return used_inputs(update, avals)[: len(jax.tree.leaves(params))]


def unchanged(
    tx: optax.GradientTransformation, params: PyTree, opt_state: PyTree, *, needed: Sequence[bool]
) -> list[bool]:
    """Tells which params an update leaves as they are, whatever they and the gradients are.

    Args:
      tx: the optimizer.
      params: the params that have gradients, or their shapes.
      opt_state: the optimizer's state, or its shapes.
      needed: what `needed_grads` returned: of params whose gradients are read, none is unchanged.
    """
    if all(needed):
        return [False] * len(needed)
    update, avals = _update(tx, params, opt_state)
    jaxpr = jax.make_jaxpr(lambda flat: jax.tree.leaves(update(flat)[0]))(avals)
    zeros = _Zeros().run(jaxpr, [False] * len(avals))
    if len(zeros) != len(needed):
        return [False] * len(needed)
    return [zero and not read for zero, read in zip(zeros, needed, strict=True)]


def _update(tx: Any, params: PyTree, opt_state: PyTree) -> tuple[Callable[[list[Any]], Any], list[Any]]:
    """Returns the update as a function of gradients, state and params, all as one list, and the shapes of that."""
    leaves, tree = jax.tree.flatten(params)
    opt_leaves, opt_tree = jax.tree.flatten(opt_state)
    num = len(leaves)

    def update(flat: list[Any]) -> Any:
        grads, opt, old = flat[:num], flat[num : num + len(opt_leaves)], flat[num + len(opt_leaves) :]
        return abstract_update(tx, tree.unflatten(grads), opt_tree.unflatten(opt), tree.unflatten(old))

    return update, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*leaves, *opt_leaves, *leaves)]


class _Zeros(Pass[bool]):
    """Which values are zeros, whatever the inputs are that are not."""

    enters = CALLS

    def constant(self, atom: Any) -> bool:
        return is_literal(atom) and jnp.ndim(atom.val) == 0 and bool(atom.val == 0)

    def operation(self, eqn: Any, operands: list[bool]) -> list[bool]:
        name = eqn.primitive.name
        if name in _MOVES:
            zero = operands[0]
        elif name == "mul" and any(operands) and not all(operands):
            other = eqn.invars[operands.index(False)]
            # Of what is no literal, nobody knows that it is finite.
            zero = is_literal(other) and bool(jnp.isfinite(other.val).all())
        else:
            zero = name in ("add", "add_any", "sub", "mul") and all(operands)
        return [zero] * len(eqn.outvars)
