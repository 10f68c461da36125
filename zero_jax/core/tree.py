"""Small helpers over pytrees: leaf paths, patterns of them, and partial trees."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zero_jax.core.text_tables import quoted

PyTree = Any


def path_name(path: tuple[Any, ...]) -> str:
    """Returns a leaf's path as `a/b/c`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaf_names(tree: PyTree) -> list[str]:
    """Returns the paths of a tree's leaves, in the order of `jax.tree.leaves`."""
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def leaves_by_name(tree: PyTree) -> dict[str, Any]:
    """Returns a tree's leaves by path, in order; where several have the same, numbers follow (`a/b` and `a/b~2`).

    A Haiku module name holds slashes of its own, so that `{"a/b": x}` and `{"a": {"b": y}}` have the same path.
    """
    leaves: dict[str, Any] = {}
    for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True):
        unique, number = name, 1
        while unique in leaves:
            number += 1
            unique = f"{name}~{number}"
        leaves[unique] = leaf
    return leaves


def leading_dims(tree: PyTree) -> dict[str, int]:
    """Returns the size of the first dim of each leaf that has one, by path."""
    leaves = zip(leaf_names(tree), map(np.shape, jax.tree.leaves(tree)), strict=True)
    return {name: shape[0] for name, shape in leaves if shape}


def shown(value: Any) -> str:
    """Returns a value's `repr`, cut where it is long; of arrays, which may be large or gone, what they are."""
    if isinstance(value, jax.Array):
        return f"{value.dtype}{list(value.shape)}"
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
        return f"a {type(value).__name__} of arrays"
    return quoted(value, limit=60)


def is_key(x: Any) -> bool:
    """Tells whether an array, a shape or a traced value is of PRNG keys."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def key_numbers(x: Any) -> Any:
    """Returns an array as it is, and of PRNG keys the numbers in them."""
    return jax.random.key_data(x) if is_key(x) else x


def key_shape() -> jax.ShapeDtypeStruct:
    """Returns the shape of a PRNG key, for `jax.eval_shape` of a function that takes one."""
    return jax.eval_shape(lambda: jax.random.key(0))


def cast_values(values: np.ndarray, dtype: Any, *, leaf: str, remedy: str) -> np.ndarray:
    """Casts the values of a leaf on the host; raises `ValueError` for what the dtype cannot hold, rounded."""
    with np.errstate(over="ignore"):
        cast = values.astype(jnp.dtype(dtype), copy=False)
    if cast is values:
        return cast
    # Floats may be rounded, not become infinite; an integer that differs has wrapped or lost its fraction.
    is_lost = cast != values if jnp.issubdtype(cast.dtype, jnp.integer) else np.isfinite(values) & ~np.isfinite(cast)
    if is_lost.any():
        raise ValueError(f"leaf {quoted(leaf)} has values that {dtype} cannot hold: {remedy}")
    return cast


def shapes_of(tree: PyTree) -> PyTree:
    """Returns the shapes and dtypes of arrays and Python's numbers, without their shardings."""
    dtype = lambda x: x.dtype if hasattr(x, "dtype") else jnp.result_type(x)  # noqa: E731
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), dtype(x)), tree)


def shard_bytes(x: Any, sharding: Any = None) -> int:
    """Returns the bytes that a device has of an array or `ShapeDtypeStruct`, by its own sharding if none is given."""
    sharding = getattr(x, "sharding", None) if sharding is None else sharding
    # Not by `addressable_shards`: `shard.data` creates an array, which would count as live itself.
    return math.prod(x.shape if sharding is None else sharding.shard_shape(x.shape)) * getattr(x.dtype, "itemsize", 0)


def eval_shapes(fn: Callable[..., Any], *args: Any) -> Any:
    """Returns the shapes of `fn(*args)` as `jax.eval_shape` does; leaves that are no arrays stay what they are."""
    leaves, tree = jax.tree.flatten(args)
    is_array = lambda x: hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type)  # noqa: E731
    places = [i for i, x in enumerate(leaves) if is_array(x)]

    def call(arrays: list[Any]) -> Any:
        full = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
        return fn(*tree.unflatten(full.values()))

    return jax.eval_shape(call, [leaves[i] for i in places])


def strongly_typed(tree: PyTree) -> PyTree:
    """Returns arrays of fixed dtypes: with Python's numbers, which have none, a step is traced anew."""

    def fix(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        return lax.convert_element_type(x, x.dtype) if jax.typeof(x).weak_type else x

    return jax.tree.map(fix, tree)


def check_arrays(what: str, tree: PyTree, *, remedy: str) -> None:
    """Raises `ValueError` for leaves that JAX takes neither as arrays (in its dtypes and byte order) nor as numbers."""
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        refusal = _refusal(leaf)
        if refusal is not None:
            name = leaf_names(tree)[i]
            where, kind = f"{what} leaf {name!r}" if name else what, type(leaf).__name__
            if isinstance(leaf, Mapping):  # the batch of a Hugging Face tokenizer, say
                remedy = "make a dict of it, dict(...)"
            elif hasattr(leaf, "init") and hasattr(leaf, "apply"):
                remedy = "give the params that its init returns, or what zero.from_linen(module, loss, *inputs) makes"
            elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
                remedy = f"register its class, jax.tree_util.register_dataclass({kind}), so that JAX sees its fields"
            raise ValueError(f"{where} is {shown(leaf)} of type {kind}, no array{refusal}: {remedy}")


def check_structure(what: str, tree: PyTree, structure: Any, *, maker: str) -> None:
    """Raises `ValueError` for a tree of another structure than an earlier one; it names the first node that differs.

    Values of static fields are of the structure: two functions are different ones, even if the same line makes both.
    `maker` is what returned both trees.
    """
    path, node, here = (), tree, jax.tree.structure(tree)
    if here == structure:
        return
    while here.node_data() == structure.node_data() and len(here.children()) == len(structure.children()):
        # One level: all below this node counts as a leaf.
        children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x, node=node: x is not node)[0]
        pairs = zip(children, structure.children(), strict=True)
        (step, node), structure = next((child, old) for child, old in pairs if jax.tree.structure(child[1]) != old)
        path, here = (*path, *step), jax.tree.structure(node)
    leaves = jax.tree_util.tree_leaves_with_path(node)
    name, kind = path_name((*path, *leaves[0][0]) if leaves else path), type(node).__name__
    where = f"{what} leaf {name!r}" if name else what
    old = structure.node_data()
    static = [x[1] if isinstance(x[1], tuple) else (x[1],) for x in (here.node_data(), old) if x and x[0] is type(node)]
    odd = next((x for x, y in zip(*static, strict=False) if x != y), None) if len(static) == 2 else None
    # The data of a mapping's node are its keys, and no static field.
    if odd is None or isinstance(node, Mapping):
        raise ValueError(f"{where}: {maker} returned another tree when it was called again: let it return the same one")
    fields = vars(node).items() if hasattr(node, "__dict__") else ()
    field = next((f"{field!r} of its" for field, value in fields if value is odd), "its")
    raise ValueError(
        f"{where}: {field} {kind} is {shown(odd)}, and another one when {maker} is called again: make it once, outside "
        f"of {maker}, or make an Equinox model with zero.from_equinox"
    )


def with_shapes(what: str, tree: PyTree, *, remedy: str) -> PyTree:
    """Returns a tree whose leaves all have a shape and a dtype of JAX: those on the host as `ShapeDtypeStruct`s.

    Among these are numbers, such as a counter, and NumPy's float64, which is float32 where JAX has 32 bits.
    """
    check_arrays(what, tree, remedy=remedy)
    # As it is: its leaves keep their shardings.
    if not has_host_leaves(jax.tree.leaves(tree)):
        return tree
    shape_of = lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)) if has_host_leaves([x]) else x  # noqa: E731
    return jax.tree.map(shape_of, tree)


def has_host_leaves(leaves: Sequence[Any]) -> bool:
    """Tells whether leaves are numbers or arrays on the host."""
    # By type: a tree may have thousands of leaves, which are of few types.
    return any(not hasattr(kind, "shape") or issubclass(kind, np.ndarray | np.generic) for kind in {*map(type, leaves)})


def _refusal(leaf: Any) -> str | None:
    """Returns why a leaf is no array for JAX, as an addition to "no array"; None for those that are."""
    if not _is_numeric(leaf):
        return ""
    if hasattr(leaf, "dtype") and not hasattr(leaf, "__array__"):  # a shape
        return None
    try:
        jax.typeof(leaf)
    except (TypeError, ValueError, OverflowError) as error:
        return f" that JAX takes ({' '.join(str(error).split())[:200]})"
    return None


def _is_numeric(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)  # None of a module of Flax Linen, which NumPy takes for float64
    dtype = np.asarray(leaf).dtype if dtype is None else dtype
    try:
        return any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_, jax.dtypes.extended))
    except TypeError:  # a dtype of some other library
        return False


class PathPatterns:
    """Patterns of leaf paths, of the setting that errors name."""

    def __init__(self, setting: str, patterns: Mapping[str, Any]):
        """Compiles the patterns.

        Raises:
          ValueError: one is not a regular expression, or they are no dict.
        """
        if not isinstance(patterns, Mapping):
            raise ValueError(f"{setting}={patterns!r}: give a dict from regular expressions of leaf paths to values")
        self._setting = setting
        self._values: dict[re.Pattern[str], Any] = {}
        for pattern, value in patterns.items():
            try:
                self._values[re.compile(pattern)] = value
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"{setting}: {pattern!r} is not a regular expression of leaf paths, such as 'layers/.*/kernel': "
                    f"{error}"
                ) from error

    @classmethod
    def of_list(cls, setting: str, patterns: Any) -> PathPatterns:
        """Returns patterns without values; raises `ValueError` for anything but a list of them."""
        is_list = isinstance(patterns, Sequence) and not isinstance(patterns, str)
        if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(f"{setting}={patterns!r}: give a list of regular expressions of whole leaf paths")
        return cls(setting, dict.fromkeys(patterns, True))

    def of(self, path: str, default: Any = None) -> Any:
        """Returns the value of the first pattern that matches a path."""
        return next((value for pattern, value in self._values.items() if pattern.fullmatch(path)), default)

    def matches(self, path: str) -> bool:
        """Returns whether any pattern matches a path."""
        return any(pattern.fullmatch(path) for pattern in self._values)

    def check_matched(self, paths: Sequence[str]) -> None:
        """Raises `ValueError` if a pattern matches none of the paths, and so would be ignored."""
        for pattern in self._values:
            if not any(map(pattern.fullmatch, paths)):
                # A cutoff of 0, as a pattern is rarely similar to the path that it should match.
                near = difflib.get_close_matches(pattern.pattern, paths, n=3, cutoff=0)
                raise ValueError(
                    f"{self._setting}: {pattern.pattern!r} matches the path of no leaf; some are {', '.join(near)}"
                )
