"""What a step refuses of an optimizer and its state: the errors name leaves, which optax's own do not, and remedies."""

from __future__ import annotations

import re
from typing import Any

import jax

from zero_jax.core.tree import PyTree, leaves_by_name

# How optax's optimizers of matrices (muon, galore) refuse a leaf, which they do not name.
_ASKS_FOR_MATRICES = re.compile(r"rank >= 2|shape \(m, n\)")
_OFFERED = (
    "a step calls update(grads, state, params), with the gradients of the mean loss of the batch, and can add "
    "value, loss, grad, value_fn, obj_fn and grad_fn"
)


def described(tree: PyTree) -> list[tuple[str, Any, Any]]:
    """Returns path, shape and dtype of each leaf."""
    return [(name, x.shape, x.dtype) for name, x in leaves_by_name(tree).items()]


def check_same_leaves(field: str, source: str, tree: PyTree, expected: PyTree, *, containers: bool = False) -> None:
    """Raises `ValueError` for a part of a state whose leaves, or `containers` too, are not those its source makes."""
    of_leaves = lambda tree: (jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)])  # noqa: E731
    if of_leaves(tree) == of_leaves(expected):  # names take time
        return
    have, need = ([f"{name} {x}{list(shape)}" for name, shape, x in described(each)] for each in (tree, expected))
    odd, lacks = (next((x for x in a if x not in b), "no other leaf") for a, b in ((have, need), (need, have)))
    if have != need or containers:
        holds = "it has its leaves in other containers"
        if have != need:
            holds = f"it holds {odd}, and the step needs {lacks}"
        raise ValueError(
            f"state.{field} does not match the {source}: {holds}. Make the state with the mesh, config and optimizer "
            "that the step was made with"
        )


def check_updates(updates: PyTree, params: PyTree) -> None:
    """Raises `ValueError` for updates that would be broadcast to the params, or are not of these params."""
    have, need = ([leaf[:2] for leaf in described(tree)] for tree in (updates, params))
    if have == need:
        return
    odd = next(x for x in [*need, *have] if (x in need) != (x in have))
    has = next((list(shape) for name, shape in have if name == odd[0]), "none")
    raise ValueError(
        f"the optimizer's update for param {odd[0]!r} has shape {has}, not the param's {dict(need).get(odd[0])}: "
        f"{_OFFERED}; give an optimizer that needs no gradients of single examples"
    )


def explained(error: Exception, params: PyTree) -> ValueError:
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
    if "dtype promotion path" in text:
        remedy = "call it under jax.numpy_dtype_promotion('standard'), which optimizers of optax need"
    if _ASKS_FOR_MATRICES.search(text):
        small = [f"{name!r} {list(shape)}" for name, shape, *_ in described(params) if len(shape) < 2]
        remedy = f"give no rule of matrices for leaves without two dims: {', '.join(small) or 'none of the params'}"
    return ValueError(f"the optimizer's update fails on what a step gives it ({text[:300]}): {_OFFERED}; {remedy}")
