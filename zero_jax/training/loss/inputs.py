"""Casts the leaves of a batch that the model reads to the compute dtype; leaves that only the loss reads are not cast.

An input of the model is an operand, direct or indirect, of an operation with a param. Targets, masks and weights are
used after the last param: casting them would cost the loss precision (`mask.sum()` in bfloat16 has 8 bits) and save
nothing.
"""

from __future__ import annotations

from typing import Any

import jax

from zero_jax.core.tree import PyTree, leaf_names
from zero_jax.dims import is_contraction
from zero_jax.program.jaxprs import inner_jaxprs
from zero_jax.program.loss import LossProgram
from zero_jax.program.passes import Dependence
from zero_jax.program.subcalls import CALLS
from zero_jax.sharding.precision import cast_floating, resolve_precision
from zero_jax.training.zero_config import ZeroConfig, batch_patterns


def cast_batch(program: LossProgram, params: PyTree, batch: PyTree, key: jax.Array, *, config: ZeroConfig) -> PyTree:
    """Casts the model's floating inputs in a batch to the compute dtype.

    `params` are in the compute dtype. The loss function is traced for it, if any leaf would be cast.

    Raises:
      ValueError: a pattern of `keep_batch_dtype` matches the path of no leaf.
    """
    compute, names = resolve_precision(config.precision).compute, leaf_names(batch)
    patterns = batch_patterns(config.keep_batch_dtype)
    patterns.check_matched(names)
    leaves, tree = jax.tree.flatten(batch)
    cast = [x if patterns.matches(name) else cast_floating(x, compute) for name, x in zip(names, leaves, strict=True)]
    changed = {i for i, (old, new) in enumerate(zip(leaves, cast, strict=True)) if old.dtype != new.dtype}
    if changed:  # convolutions refuse mixed dtypes: the trace is of the batch with all of them cast
        changed &= _model_leaves(program, params, tree.unflatten(cast), key)
    return tree.unflatten([new if i in changed else old for i, (old, new) in enumerate(zip(leaves, cast, strict=True))])


_PARAMS = frozenset({-1})


def _model_leaves(program: LossProgram, params: PyTree, batch: PyTree, key: jax.Array) -> set[int]:
    """Returns the indices of the leaves of the batch that the model reads."""
    made_of = [_PARAMS for _ in jax.tree.leaves(params)]
    made_of += [frozenset({i}) for i in range(len(jax.tree.leaves(batch)))]
    made_of += [frozenset() for _ in jax.tree.leaves(key)]
    inputs = _ModelInputs()
    inputs.run(program.trace(params, batch, key).closed, made_of)
    return set(inputs.notes)


class _ModelInputs(Dependence):
    """Finds the leaves of the batch, and `_PARAMS`, that each value depends on; notes leaves combined with params."""

    enters = CALLS | {"cond", "scan"}

    def operation(self, eqn: Any, operands: list[frozenset[int]]) -> list[frozenset[int]]:
        results = super().operation(eqn, operands)
        made_of = frozenset().union(*operands)
        # The sum of a loss and a regularizer takes nothing into the model.
        is_total = all(var.aval.shape == () for var in eqn.outvars) and not is_contraction(eqn)
        if (_PARAMS in operands and not is_total) or (inner_jaxprs(eqn) and made_of >= _PARAMS):
            self.notes.update(dict.fromkeys(made_of - _PARAMS))
        return results
