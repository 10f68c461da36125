"""Calls an optimizer's `update` with what it asks for beside gradients: the loss, or functions of the params.

optax passes such values by keyword (`optax.GradientTransformationExtraArgs`). Which of them an optimizer takes shows
when it is called: wrappers such as `optax.chain` take all and hand them on.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from zero_jax.core.jaxprs import used_inputs
from zero_jax.core.tree import PyTree, leaf_names

_OFFERED = (
    "a step calls update(grads, state, params), with the gradients of the mean loss of the batch, and can add "
    "value, loss, grad, value_fn, obj_fn and grad_fn"
)


def call_update(
    tx: Any,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    *,
    value: Any = 0.0,
    full_grads: PyTree = None,
    loss_fn: Callable[[PyTree], jax.Array] | None = None,
    grad_fn: Callable[[PyTree], PyTree] | None = None,
) -> tuple[PyTree, PyTree]:
    """Returns the updates and the new state of an optimizer, called with the extra arguments that it takes.

    The functions cost nothing unless the optimizer calls them. Where one is None, a stand-in takes its place: the
    result then tells shapes, and what depends on what. The gradients of a stand-in depend on `grads`, leaf by leaf.

    Args:
      tx: the optimizer.
      grads: the gradients that it updates with, clipped.
      opt_state: its state.
      params: the params that have gradients.
      value: the loss of the batch at these params.
      full_grads: the gradients of the loss before clipping; None if `grads` are.
      loss_fn: the loss of the batch as a function of such params.
      grad_fn: its gradients, likewise.

    Raises:
      ValueError: the optimizer asks for what a step cannot make, or does not return an update for each param.
    """
    loss_of, grad_of = loss_fn or _stand_in_loss(grads), grad_fn or (lambda at: jax.tree.map(jnp.multiply, grads, at))

    def value_fn(at: PyTree, *, loss: Any = None, obj_fn: Any = None, grad_fn: Any = None) -> jax.Array:
        del loss, obj_fn, grad_fn  # optax's line searches hand on what they do not take, and refuse what this does not
        return loss_of(_unmasked(at, params))

    value = jnp.asarray(value, jnp.float32)
    extras = {
        "value": value,
        "loss": value,
        "grad": grads if full_grads is None else full_grads,
        "value_fn": value_fn,
        "obj_fn": value_fn,
        "grad_fn": lambda at, *_: grad_of(_unmasked(at, params)),
    }
    takes = inspect.signature(tx.update).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in takes):
        extras = {p.name: extras[p.name] for p in takes if p.name in extras}
    if isinstance(params, optax.LookaheadParams):  # optax.lookahead takes gradients of the fast ones
        grads = grads.fast
    while True:
        try:
            updates, new_state = tx.update(grads, opt_state, params, **extras)
            break
        except TypeError as error:
            refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if refused is None or extras.pop(refused[1], None) is None:
                raise _explained(error) from error
        except (ValueError, AttributeError, LookupError) as error:
            raise _explained(error) from error
    _check_updates(updates, params)
    return updates, new_state


def update_if(
    finite: jax.Array, update: Callable[..., tuple[PyTree, PyTree]], state: tuple[PyTree, PyTree], *, in_place: bool
) -> tuple[PyTree, PyTree]:
    """Returns `update(*state)` where `finite`, else `state` bit for bit.

    A select fuses into the one loop that XLA:TPU updates a leaf, its moments and its copies in; a conditional would
    break that loop up. XLA:CPU has no loops of several results: there, each loop reads what another has to keep for
    the select, and all of the state is copied first. A conditional updates it in place.

    Args:
      finite: `bool[]`.
      update: a function of params and optimizer state that returns both.
      state: params and optimizer state.
      in_place: use a conditional.
    """
    if not in_place:
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), update(*state), state)

    def as_wide(new: jax.Array, old: jax.Array) -> jax.Array:
        return new if new.dtype == old.dtype else new.astype(jnp.promote_types(new.dtype, old.dtype))

    return lax.cond(finite, lambda *old: jax.tree.map(as_wide, update(*old), old), lambda *old: old, *state)


def abstract_update(tx: Any, grads: PyTree, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    """Calls an optimizer's update for its shapes and dependencies alone; JAX traces it once for all such calls."""
    try:
        hash(tx)
    except TypeError:
        return call_update(tx, grads, opt_state, params)
    return _jitted_update(tx, grads, opt_state, params)


_jitted_update = jax.jit(call_update, static_argnums=0)


def init_opt_state(tx: Any, params: PyTree) -> PyTree:
    """Returns an optimizer's first state, with the leaves and dtypes that it has after an update.

    Some optimizers widen a leaf in the first update or add leaves (`optax.monitor`): a step would be compiled twice,
    and could not be skipped. Leaves that are added are zeros, which no update reads.

    Raises:
      ValueError: an update changes the state's structure in another way.
    """
    state = tx.init(params)
    before = jax.eval_shape(lambda x: x, state)
    settled = before
    for _ in range(3):  # a wider leaf may widen others
        after = jax.eval_shape(lambda old, p: abstract_update(tx, p, old, p)[1], settled, params)
        shapes, wider = _described(settled), _widened(settled, after)
        if _described(wider) == shapes:
            break
        settled = wider
    if settled is before:
        return state
    first = dict(zip(leaf_names(state), jax.tree.leaves(state), strict=True))
    names, (leaves, tree) = leaf_names(settled), jax.tree.flatten(settled)
    update = lambda flat: jax.tree.leaves(abstract_update(tx, params, tree.unflatten(flat), params))  # noqa: E731
    read = dict(zip(names, used_inputs(update, leaves), strict=True))
    odd = [name for name in names if name not in first and read[name]] + [name for name in first if name not in names]
    if odd:
        raise ValueError(
            f"the first update changes the structure of the optimizer's state: leaf {odd[0]!r} is in it before or "
            "after only, and is read: give an optimizer whose init returns what its update does"
        )
    return tree.unflatten(
        jnp.asarray(first[name], x.dtype) if name in first else jnp.zeros(x.shape, x.dtype)
        for name, x in zip(names, leaves, strict=True)
    )


def _described(tree: PyTree) -> list[tuple[str, Any, Any]]:
    return [(name, x.shape, x.dtype) for name, x in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)]


def _widened(old: PyTree, new: PyTree) -> PyTree:
    """Returns the shapes of a new state, each leaf in a dtype that holds the old one's values too."""
    shapes = {name: (shape, dtype) for name, shape, dtype in _described(old)}

    def widen(name: str, shape: Any, dtype: Any) -> jax.ShapeDtypeStruct:
        old_shape, old_dtype = shapes.get(name, (shape, dtype))
        if old_shape != shape:
            raise ValueError(
                f"an update changes leaf {name!r} of the optimizer's state from {list(old_shape)} to {list(shape)}: "
                "give an optimizer whose state keeps its shapes"
            )
        return jax.ShapeDtypeStruct(shape, dtype if dtype == old_dtype else jnp.promote_types(dtype, old_dtype))

    return jax.tree.structure(new).unflatten(widen(*leaf) for leaf in _described(new))


def _stand_in_loss(grads: PyTree) -> Callable[[PyTree], jax.Array]:
    """Returns a function of params whose value depends on params alone, and whose derivatives depend on gradients."""

    @jax.custom_jvp
    def loss_fn(at: PyTree) -> jax.Array:
        return sum((jnp.square(jnp.abs(x)).sum().astype(jnp.float32) for x in jax.tree.leaves(at)), jnp.float32(0))

    @loss_fn.defjvp
    def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        at = primals[0]
        slopes = jax.tree.map(lambda g, x, t: (g * x * t).sum().real.astype(jnp.float32), grads, at, tangents[0])
        return loss_fn(at), jnp.asarray(sum(jax.tree.leaves(slopes)), jnp.float32)

    return loss_fn


def _unmasked(at: PyTree, params: PyTree) -> PyTree:
    """Returns params with the values of `at` where `optax.masked` has left any."""
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    return jax.tree.map(lambda new, old: old if is_masked(new) else new, at, params, is_leaf=is_masked)


def _check_updates(updates: PyTree, params: PyTree) -> None:
    """Raises `ValueError` for updates that would be broadcast to the params, or are not of these params."""
    have, need = ([leaf[:2] for leaf in _described(tree)] for tree in (updates, params))
    if have == need:
        return
    odd = next(x for x in [*need, *have] if (x in need) != (x in have))
    has = next((list(shape) for name, shape in have if name == odd[0]), "none")
    raise ValueError(
        f"the optimizer's update for param {odd[0]!r} has shape {has}, not the param's {dict(need).get(odd[0])}: "
        f"{_OFFERED}; give an optimizer that needs no gradients of single examples"
    )


def _explained(error: Exception) -> ValueError:
    """Returns an error that says what an optimizer's update lacks, and the remedy."""
    text = " ".join(str(error).split())
    missing = re.search(r"missing \d+ required .*?arguments?: (.*)", text)
    if missing:
        return ValueError(
            f"the optimizer's update asks for {missing[1]}, which a step cannot make: {_OFFERED}. Wrap the optimizer "
            "in an optax.GradientTransformationExtraArgs whose update makes the rest, or give another one"
        )
    remedy = "give an optimizer that needs no more (no gradients of single examples, for one)"
    if "MaskedNode" in text:
        remedy = "let masked or partition mask `grad` too, by mask_compatible_extra_args=True"
    return ValueError(f"the optimizer's update fails on what a step gives it ({text[:300]}): {_OFFERED}; {remedy}")
