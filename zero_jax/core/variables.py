"""The variables of a loss function: params, and model state such as batch-norm statistics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from zero_jax.core.signatures import check_takes
from zero_jax.core.text_tables import aligned, format_bytes
from zero_jax.core.tree import PyTree, check_arrays, check_structure, is_key, leaf_names, shard_bytes

# The first component of the paths of model state: in errors, reports, checkpoints and the patterns of a config.
MODEL_STATE = "model_state"


def shown_sizes(record: Any) -> str:
    """Returns the sizes of the fields of a dataclass of arrays, whole and on a device; reads no array."""
    parts = {field.name: jax.tree.leaves(getattr(record, field.name)) for field in dataclasses.fields(record)}
    arrays = {name: [x for x in leaves if hasattr(x, "shape")] for name, leaves in parts.items()}
    name, rows = type(record).__name__, [(name, *_sizes(leaves)) for name, leaves in arrays.items() if leaves]
    if not rows:  # shardings, or flags
        return f"{name}({', '.join(f'{name}={getattr(record, name)!r}' for name in parts)})"
    shardings = (getattr(x, "sharding", None) for leaves in arrays.values() for x in leaves)
    mesh = next((dict(x.mesh.shape) for x in shardings if isinstance(x, NamedSharding)), None)
    return "\n".join([name if mesh is None else f"{name} on {mesh}", aligned(rows)])


def _sizes(leaves: Sequence[Any]) -> tuple[str, str, str]:
    """Returns the number of leaves, of their elements, and their bytes: all of them, and those of one device."""
    whole = sum(math.prod(x.shape) * getattr(x.dtype, "itemsize", 0) for x in leaves)
    return (
        f"{len(leaves)} {'leaf' if len(leaves) == 1 else 'leaves'}",
        f"{sum(math.prod(x.shape) for x in leaves):,} elements",
        f"{format_bytes(whole)}, {format_bytes(sum(map(shard_bytes, leaves)))} a device",
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Variables:
    """The params of a model and its model state: what `init_fn` returns for a model that has both.

    Attributes:
      params: the params: they have gradients, and the optimizer updates them.
      model_state: what the loss function reads and returns anew, such as batch-norm statistics, a target network or RNG
        counters: any pytree of arrays, integers and PRNG keys included. No gradient is taken for it, and nothing casts
        it. None where there is none.

    Example:
      >>> zero.Variables(params={"w": jnp.ones((4, 4))}, model_state={"count": jnp.int32(0)})
      Variables
      params       1 leaf  16 elements  64 bytes, 64 bytes a device
      model_state  1 leaf  1 elements   4 bytes, 4 bytes a device
    """

    params: PyTree
    model_state: PyTree = None

    def __repr__(self) -> str:
        return shown_sizes(self)


def as_variables(tree: PyTree) -> Variables:
    """Returns `Variables` as they are, and anything else as params without model state."""
    return tree if isinstance(tree, Variables) else Variables(params=tree)


def function_of_key(init_fn: Any) -> Callable[[jax.Array], PyTree] | None:
    """Returns an `init_fn` that is a function of a key; None for params, or shapes, in its place."""
    # Params may be callable too: an Equinox module is a pytree of arrays, a function is a leaf of its own.
    has_arrays = any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(init_fn))
    # A `Partial` with arrays is a function too, although its arguments are leaves.
    return init_fn if callable(init_fn) and (not has_arrays or isinstance(init_fn, jax.tree_util.Partial)) else None


def of_one_structure(init_fn: Callable[[jax.Array], PyTree]) -> Callable[[jax.Array], PyTree]:
    """Returns an `init_fn` that raises `ValueError` where a call returns another structure than the first one."""
    check_takes("init_fn", init_fn, ["key"], remedy="give a function of a key that returns the params")
    structures = dict[str, Any]()

    def make(key: jax.Array) -> PyTree:
        made = init_fn(key)
        variables = as_variables(made)
        for what, tree in (("params", variables.params), (MODEL_STATE, variables.model_state)):
            check_structure(what, tree, structures.setdefault(what, jax.tree.structure(tree)), maker="init_fn")
        return made

    return make


def traceable_init(init_fn: Any) -> Callable[[jax.Array], PyTree]:
    """Returns a function of a key that makes params, or arrays like some params or shapes; it is only traced."""

    def like(x: Any) -> Any:
        if not hasattr(x, "dtype"):
            return x
        # The shapes that `key_data` has depend on the implementation, and `ShapeDtypeStruct` has no public name of it.
        key = jax.random.key(0, impl=x.dtype._impl.name) if is_key(x) else None
        return jnp.zeros(x.shape, x.dtype) if key is None else jax.random.split(key, x.shape)

    return function_of_key(init_fn) or (lambda key: jax.tree.map(like, init_fn))


def joined(params: PyTree, model_state: PyTree) -> PyTree:
    """Returns the first argument of a `LossFunction`: the params, as `Variables` where there is model state."""
    return params if model_state is None else Variables(params=params, model_state=model_state)


def variable_names(tree: PyTree) -> list[str]:
    """Returns the paths of the leaves of `joined`: those of params without a prefix, others `model_state/...`."""
    if not isinstance(tree, Variables):
        return leaf_names(tree)
    return leaf_names(tree.params) + model_state_names(tree.model_state)


def model_state_names(model_state: PyTree) -> list[str]:
    """Returns the paths of the leaves of model state, `model_state/...`."""
    return leaf_names({MODEL_STATE: model_state})


def checked_model_state(new: PyTree, old: PyTree) -> PyTree:
    """Returns the model state that a loss function returned, in the structure and dtypes of the old one."""
    remedy = "return the model_state that loss_fn was given, with new values"
    check_arrays(MODEL_STATE, new, remedy=remedy)
    names, wanted = model_state_names(new), model_state_names(old)
    if names != wanted:
        missing = [name for name in wanted if name not in names]
        extra = [name for name in names if name not in wanted]
        problems = [f"lacks the leaf {name!r}" for name in missing[:1]]
        problems += [f"has the leaf {name!r}, which loss_fn was not given" for name in extra[:1]]
        what = " and ".join(problems) or "has its leaves in another order"
        raise ValueError(f"the model_state that loss_fn returned {what}: {remedy}")

    def checked(name: str, x: Any, like: Any) -> jax.Array:
        x = jnp.asarray(x)
        if x.shape != like.shape or x.dtype != like.dtype:
            before, after = (f"{y.dtype}{list(y.shape)}" for y in (like, x))
            raise ValueError(
                f"leaf {name!r}: loss_fn was given {before} and returned {after}: return it in the shape and dtype "
                f"that it has, as x.astype({str(like.dtype)!r}) does"
            )
        # Python's numbers make arrays of no fixed dtype, with which a step would be traced anew.
        return x if is_key(x) else lax.convert_element_type(x, like.dtype)

    leaves = zip(wanted, jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    return jax.tree.unflatten(jax.tree.structure(old), [checked(*leaf) for leaf in leaves])
