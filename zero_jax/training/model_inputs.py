"""Which leaves of a batch the model takes, and their cast to the compute dtype; what only the loss takes stays.

An input of the model is brought together with a param, or is part of what is. Targets, masks and weights come after the
last param: casting them would cost the loss its precision (`mask.sum()` in bfloat16 has 8 bits) and save nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zero_jax.core import jaxprs
from zero_jax.core.tree import PyTree, leaf_names
from zero_jax.sharding.precision import cast_floating, resolve_precision
from zero_jax.training.zero_config import ZeroConfig, compiled_patterns
from zero_jax.transforms import is_contraction

_CALLS = frozenset("jit pjit closed_call core_call remat2 checkpoint custom_jvp_call custom_vjp_call".split())


def cast_batch(
    loss_fn: Callable[..., Any], params: PyTree, batch: PyTree, key: jax.Array, *, config: ZeroConfig
) -> PyTree:
    """Returns a batch as the loss function is to see it: the model's floating inputs in the compute dtype.

    Args:
      loss_fn: `loss_fn(params, batch, key)`; it is traced once if there is something to cast.
      params: the params, in the compute dtype.
      batch: the batch.
      key: a key.
      config: the precision, and what is kept.

    Raises:
      ValueError: a pattern of `keep_batch_dtype` matches the path of no leaf.
    """
    compute, names = resolve_precision(config.precision).compute, leaf_names(batch)
    patterns = compiled_patterns(config.keep_batch_dtype)
    for pattern in patterns:
        if not any(pattern.fullmatch(name) for name in names):
            raise ValueError(
                f"keep_batch_dtype: {pattern.pattern!r} matches the path of no leaf of the batch; they are "
                f"{', '.join(map(repr, names))}"
            )
    leaves, tree = jax.tree.flatten(batch)
    cast = [
        x if any(p.fullmatch(name) for p in patterns) else cast_floating(x, compute)
        for name, x in zip(names, leaves, strict=True)
    ]
    changed = {i for i, (old, new) in enumerate(zip(leaves, cast, strict=True)) if old.dtype != new.dtype}
    if changed:  # convolutions refuse mixed dtypes: the trace is of the batch with all of them cast
        changed &= _taken(loss_fn, params, tree.unflatten(cast), key)
    return tree.unflatten([new if i in changed else old for i, (old, new) in enumerate(zip(leaves, cast, strict=True))])


@dataclasses.dataclass(frozen=True)
class _Origin:
    """What a value is made of: leaves of the batch, by number, and params or not."""

    leaves: frozenset[int] = frozenset()
    params: bool = False


def _taken(loss_fn: Callable[..., Any], params: PyTree, batch: PyTree, key: jax.Array) -> set[int]:
    """Returns the numbers of the leaves that the model takes."""
    closed = jax.make_jaxpr(loss_fn)(params, batch, key)
    jaxpr, _ = jaxprs.open_jaxpr(closed)
    ins = [_Origin(params=True) for _ in jax.tree.leaves(params)]
    ins += [_Origin(leaves=frozenset({i})) for i in range(len(jax.tree.leaves(batch)))]
    ins += [_Origin()] * (len(jaxpr.invars) - len(ins))
    taken: set[int] = set()
    _follow(jaxpr, ins, taken)
    return taken


def _follow(jaxpr: Any, ins: Sequence[_Origin], taken: set[int]) -> list[_Origin]:
    """Follows the origins of values through a jaxpr; adds to `taken`, and returns those of its results."""
    env = dict(zip(jaxpr.invars, ins, strict=True))
    read = lambda atom: _Origin() if jaxprs.is_literal(atom) else env.get(atom, _Origin())  # noqa: E731
    for eqn in jaxpr.eqns:
        origins = [read(atom) for atom in eqn.invars]
        env.update(zip(eqn.outvars, _through(eqn, origins, taken), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _through(eqn: Any, ins: list[_Origin], taken: set[int]) -> list[_Origin]:
    name, inner = eqn.primitive.name, [jaxprs.open_jaxpr(one)[0] for one in jaxprs.inner_jaxprs(eqn)]
    if name in _CALLS and inner and len(inner[0].invars) == len(ins):
        return _follow(inner[0], ins, taken)
    if name == "cond":
        branches = [_follow(branch, ins[1:], taken) for branch in inner]
        return [_joined([ins[0], *outs]) for outs in zip(*branches, strict=True)]
    if name == "scan":
        parts = jaxprs.scan_parts(eqn)
        first, last = parts.num_consts, parts.num_consts + parts.num_carry
        while True:
            outs = _follow(inner[0], ins, taken)
            carry = [_joined(pair) for pair in zip(ins[first:last], outs[: parts.num_carry], strict=True)]
            if carry == ins[first:last]:
                return outs
            ins = [*ins[:first], *carry, *ins[last:]]
    joined = _joined(ins)
    only_params = any(one.params and not one.leaves for one in ins)
    # The sum of a loss and a regularizer takes nothing into the model.
    is_total = all(var.aval.shape == () for var in eqn.outvars) and not is_contraction(eqn)
    if (only_params and not is_total) or (inner and joined.params):
        taken |= joined.leaves
    return [joined] * len(eqn.outvars)


def _joined(origins: Sequence[_Origin]) -> _Origin:
    leaves = frozenset[int]().union(*(one.leaves for one in origins))
    return _Origin(leaves, any(one.params for one in origins))
