"""The weight of a microbatch: what its mean loss is a mean over.

The mean of means is the mean of the whole only if every part weighs the same. A loss that is a mean over something
uneven, such as the tokens that a mask leaves, ends in a division by a value of the batch; that divisor is the weight.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zero_jax.core import jaxprs
from zero_jax.core.subcalls import subcall
from zero_jax.core.tree import PyTree

# After these a quotient is still that quotient, up to a factor and a term that no example has a part in.
_KEEP_WEIGHT = frozenset(
    {"convert_element_type", "neg", "reshape", "squeeze", "copy", "mul", "name", "add", "sub", "stop_gradient"}
)


@dataclasses.dataclass(frozen=True)
class _WeightTrace:
    """A value, what it depends on, and the divisor if it is a quotient by a scalar of the batch.

    `unbounded` is what a value is but for a
    constant bound, as in `jnp.maximum(mask.sum(), 1)`: an empty microbatch weighs nothing, whatever it divides by.
    """

    array: Any
    of_params: bool = False
    of_batch: bool = False
    divisor: Any = None
    unbounded: Any = None


def with_weight(loss_fn: Callable[..., Any], loss_weight: str | None) -> Callable[..., Any]:
    """Returns `loss_fn` with the weight of its mean: `(variables, batch, key) -> (loss, (aux, model_state, weight))`.

    Args:
      loss_fn: a `LossFunction`, or what was made of one: `(variables, batch, key) -> (loss, (aux, model_state))`.
      loss_weight: name of an entry of aux; `auto` finds the divisor that the loss ends in, and gives 1 where it ends in
        none; None gives 1.
    """

    @functools.wraps(loss_fn)
    def weighted(variables: PyTree, batch: PyTree, key: jax.Array) -> tuple[jax.Array, Any]:
        if loss_weight == "auto":
            loss, (aux, model_state), weight = _find(loss_fn, variables, batch, key)
        else:
            loss, (aux, model_state) = loss_fn(variables, batch, key)
            weight = 1 if loss_weight is None else _named(aux, loss_weight)
        return loss, (aux, model_state, lax.stop_gradient(jnp.asarray(weight, jnp.float32)))

    return weighted


def _named(aux: PyTree, name: str) -> Any:
    if isinstance(aux, Mapping) and name in aux:
        return aux[name]
    has = sorted(aux) if isinstance(aux, Mapping) else type(aux).__name__
    raise ValueError(
        f"loss_weight={name!r}, but the aux that loss_fn returned has no such entry (it has {has}): "
        f"return (loss, {{..., {name!r}: weight}})"
    )


def _find(loss_fn: Callable[..., Any], variables: PyTree, batch: PyTree, key: jax.Array) -> tuple[Any, PyTree, Any]:
    closed, out_shape = jax.make_jaxpr(loss_fn, return_shape=True)(variables, batch, key)
    jaxpr, consts = jaxprs.open_jaxpr(closed)
    ins = [
        *(_WeightTrace(x, of_params=True) for x in jax.tree.leaves(variables)),
        *(_WeightTrace(x, of_batch=True) for x in jax.tree.leaves((batch, key))),
    ]
    outs = _run(jaxpr, [_WeightTrace(c) for c in consts], ins)
    loss, rest = jax.tree.unflatten(jax.tree.structure(out_shape), [out.array for out in outs])
    return loss, rest, 1 if outs[0].divisor is None else outs[0].divisor


def _run(jaxpr: Any, consts: Sequence[_WeightTrace], ins: Sequence[_WeightTrace]) -> list[_WeightTrace]:
    constvars = tuple(getattr(jaxpr, "constvars", ()))
    env = dict(zip((*constvars, *jaxpr.invars), (*consts[: len(constvars)], *ins), strict=True))

    def read(atom: Any) -> _WeightTrace:
        return _WeightTrace(atom.val) if jaxprs.is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        sub = subcall(eqn)
        if sub is not None and sub.kind == "call":
            body, body_consts = jaxprs.open_jaxpr(sub.jaxpr)
            with jaxprs.source_context(eqn):
                outs = _run(body, [_WeightTrace(c) for c in body_consts], values)
        else:
            outs = _bind(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _bind(eqn: Any, values: Sequence[_WeightTrace]) -> list[_WeightTrace]:
    of_params = any(value.of_params for value in values)
    of_batch = any(value.of_batch for value in values)
    divisor = None
    if eqn.primitive.name == "div" and eqn.outvars[0].aval.ndim == 0:
        above, below = values
        if above.of_params and below.of_batch and not below.of_params:
            divisor = below.array if below.unbounded is None else below.unbounded
    elif eqn.primitive.name in _KEEP_WEIGHT:
        quotients = [value for value in values if value.divisor is not None]
        if len(quotients) == 1 and sum(value.of_batch for value in values) == 1:
            divisor = quotients[0].divisor
    unbounded = None
    if eqn.primitive.name == "max" and sum(value.of_batch for value in values) == 1:
        unbounded = next(value.array for value in values if value.of_batch)
    elif eqn.primitive.name == "convert_element_type":
        unbounded = values[0].unbounded
    arrays = jaxprs.bind(eqn, [value.array for value in values])
    return [_WeightTrace(array, of_params, of_batch, divisor, unbounded) for array in arrays]
