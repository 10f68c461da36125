"""Small helpers over pytrees: leaf paths and partial trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

PyTree = Any


def path_name(path: tuple[Any, ...]) -> str:
    """Returns a leaf's path as `a/b/c`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaf_names(tree: PyTree) -> list[str]:
    """Returns the paths of a tree's leaves, in the order of `jax.tree.leaves`."""
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def map_named(
    fn: Callable[..., Any], tree: PyTree, *rest: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> PyTree:
    """Maps `fn(name, leaf, ...)` over a tree's leaves."""
    return jax.tree_util.tree_map_with_path(lambda path, *xs: fn(path_name(path), *xs), tree, *rest, is_leaf=is_leaf)
