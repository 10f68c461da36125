"""Reads and writes whole leaves of a sharded tree by path (DeepSpeed's `safe_get_full_...` and `safe_set_full_...`)."""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from zero_jax.core.agreement import Agreement, agree_on
from zero_jax.core.close_match import did_you_mean
from zero_jax.core.device_put import is_global, put_global
from zero_jax.core.tree import PyTree, cast_values, check_arrays, is_key, key_numbers, leaves_by_name, shown
from zero_jax.training.state.train_state import TrainState

_SHOWN_PATHS = 3
# Casts from one kind to a later one lose nothing but precision.
_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def read_leaf(tree: PyTree, path: str) -> np.ndarray:
    """Reads a whole leaf of a sharded tree into host memory.

    With several processes all have to call it, for the same path, and each gets the leaf. Other devices' shards are
    gathered on the devices then, each of which holds one whole leaf for a moment.

    Args:
      tree: a `TrainState`, its params, gradients, or any pytree of arrays.
      path: path of the leaf, such as `params/embed`, `master/layers/0/kernel` or `opt_state/0/mu/embed`.

    Returns:
      The leaf in its own dtype; of a PRNG key its words.

    Raises:
      ValueError: no such leaf, one that is gone or has no values, or another path in another process.

    Example:
      >>> zero.read_leaf(state, "params/up").shape
      (64, 64)
    """
    leaves = leaves_by_name(tree)
    leaf = leaves[_existing(leaves, path)]
    _check_agreed(f"read_leaf of {path}")
    return _host_array(path, leaf)


def read_leaves(tree: PyTree, pattern: str = ".*") -> Iterator[tuple[str, np.ndarray]]:
    """Reads whole leaves one after another, each as `read_leaf` does; only one is in host memory at a time.

    Args:
      tree: a `TrainState`, its params, gradients, or any pytree of arrays.
      pattern: regular expression of whole leaf paths, such as `opt_state/.*/mu/.*`.

    Returns:
      An iterator over `(path, leaf)`.

    Raises:
      ValueError: no regular expression, or one that no leaf's path matches.

    Example:
      >>> [path for path, _ in zero.read_leaves(state, "params/.*")]
      ['params/down', 'params/up']
    """
    check_arrays("tree", tree, remedy="give a TrainState, its params, or any pytree of arrays")
    leaves = leaves_by_name(tree)
    if not isinstance(pattern, str):
        raise ValueError(f"pattern={shown(pattern)}: give a regular expression of leaf paths, such as 'params/.*'")
    try:
        matching = [path for path in leaves if re.fullmatch(pattern, path)]
    except re.error as error:
        raise ValueError(f"pattern={pattern!r} is no regular expression of leaf paths: {error}") from error
    if not matching:
        raise ValueError(f"pattern={pattern!r} matches no leaf: {_nearest(pattern, leaves)}")
    _check_agreed(f"read_leaves of {pattern}")
    return ((path, _host_array(path, leaves[path])) for path in matching)


def write_leaf(tree: PyTree, path: str, value: Any) -> PyTree:
    """Returns a tree with another value of a whole leaf, which keeps its sharding and dtype.

    Where a `TrainState` has master params beside its params, a value for one is written to both.

    Args:
      tree: a `TrainState`, its params, gradients, or any pytree of arrays; it is not changed, nor donated.
      path: path of the leaf, such as `params/embed`.
      value: an array of the leaf's shape, the same in all processes.

    Raises:
      ValueError: no such leaf, another shape, a dtype whose values the leaf cannot hold, or processes that differ.

    Example:
      >>> state = zero.write_leaf(state, "params/up", np.zeros((64, 64)))
      >>> float(jnp.abs(state.params["up"]).max())
      0.0
    """
    return write_leaves(tree, {path: value})


def write_leaves(tree: PyTree, values: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> PyTree:
    """Returns a tree with other values of whole leaves, each as `write_leaf` writes it.

    Nothing is returned if one of them cannot be written.

    Args:
      tree: a `TrainState`, its params, gradients, or any pytree of arrays.
      values: the values by path, or an iterable of `(path, value)`, of which one is in host memory at a time.

    Example:
      >>> state = zero.write_leaves(state, {"params/up": np.zeros((64, 64)), "params/down": np.ones((64, 64))})
      >>> float(state.params["down"].min())
      1.0
    """
    leaves = leaves_by_name(tree)
    for path, value in _pairs(values):
        for name in _copies(tree, _existing(leaves, path)):
            leaves[name] = _written(name, leaves[name], value)
    return jax.tree.structure(tree).unflatten(leaves.values())


def _pairs(values: Any) -> Iterator[tuple[str, Any]]:
    """Yields paths and values; raises `ValueError` for anything else."""
    # An iterator cannot be shown without consuming it.
    description = f"of type {type(values).__name__}" if isinstance(values, Iterator) else shown(values)
    message = f"values={description}: give a dict of values by path, or an iterable of (path, value)"
    if isinstance(values, jax.Array | np.ndarray | str | bytes) or not isinstance(values, Iterable):
        raise ValueError(message)
    for pair in values.items() if isinstance(values, Mapping) else values:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(message)
        yield pair[0], pair[1]


def _existing(names: Collection[str], path: str) -> str:
    """Returns a path that a tree has; raises `ValueError` if there is no such leaf; the message names the nearest."""
    if not isinstance(path, str):
        raise ValueError(f"path={shown(path)}: give the path of a leaf, such as 'params/embed'")
    if path in names:
        return path
    raise ValueError(f"there is no leaf {shown(path)}: {_nearest(path, names)}")


def _nearest(path: str, names: Iterable[str]) -> str:
    names = list(names)
    below = [name for name in names if name.startswith(f"{path}/")]
    if below:
        first = ", ".join(map(repr, below[:_SHOWN_PATHS]))
        return f"it holds {len(below)} leaves, such as {first}: give one of them, or read_leaves(tree, '{path}/.*')"
    hint = did_you_mean(path, names, cutoff=0.5)
    groups = ", ".join(dict.fromkeys(name.split("/")[0] for name in names)) or "no leaves"
    return f"{hint}the tree has {groups}; zero.summary(tree) lists all paths"


def _copies(tree: PyTree, path: str) -> list[str]:
    """Returns the path, and that of the same param among the master params, or of its low-precision copy."""
    group, _, inside = path.partition("/")
    counterpart = {"params": "master", "master": "params"}.get(group)
    if not isinstance(tree, TrainState) or tree.master is None or counterpart is None:
        return [path]
    return [path, f"{counterpart}/{inside}"]


def _host_array(path: str, leaf: Any) -> np.ndarray:
    _check_values(path, leaf)
    leaf = key_numbers(leaf)
    if is_global(leaf):
        default = next(iter(leaf.sharding.device_set)).default_memory().kind
        if leaf.sharding.memory_kind != default:  # offloaded: collectives are of the devices' own memory
            leaf = jax.device_put(leaf, leaf.sharding.with_memory_kind(default))
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    return np.array(leaf)  # a copy: a NumPy view of a CPU device's memory is invalid after donation


def _check_values(path: str, leaf: Any) -> None:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise ValueError(f"leaf {path!r} is a shape without values: give the state that zero.init_state made")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(f"leaf {path!r} was donated to a step and is gone: give the state that the step returned")


def _written(path: str, leaf: Any, value: Any) -> Any:
    """Returns a value as a leaf of the same sharding and dtype."""
    _check_values(path, leaf)
    with Agreement(lambda failed: ValueError(f"process {failed} could not write {path!r}: its error says why")):
        host = _cast(path, leaf, np.asarray(value))
    _check_agreed(f"write_leaf of {path}", zlib.crc32(host.tobytes()))
    if not isinstance(leaf, jax.Array):
        return host
    if not is_key(leaf):
        return put_global(host, leaf.sharding)  # type: ignore[arg-type]
    keys = jax.random.wrap_key_data(jnp.asarray(host), impl=jax.random.key_impl(leaf))
    return put_global(keys, leaf.sharding)  # type: ignore[arg-type]


def _cast(path: str, leaf: Any, value: np.ndarray) -> np.ndarray:
    """Returns a value in the dtype of a leaf, if that loses nothing but precision."""
    like = jax.eval_shape(key_numbers, leaf) if is_key(leaf) else leaf
    shape, dtype = np.shape(like), np.dtype(jnp.result_type(like))
    if value.shape != shape:
        raise ValueError(f"leaf {path!r} has shape {list(shape)}, and the value {list(value.shape)}: give all of it")
    ranks = [next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(x, kind)), None) for x in (value.dtype, dtype)]
    if None in ranks or ranks[0] > ranks[1]:  # type: ignore[operator]
        raise ValueError(f"leaf {path!r} is {dtype}, and the value {value.dtype}: cast it first, if that is meant")
    return cast_values(value, dtype, leaf=path, remedy="scale them down")


def _check_agreed(operation: str, value: int = 0) -> None:
    """Raises `ValueError` in all processes if their operations or values differ."""
    facts = {"the call": f"{operation}, {value:x}"}
    agree_on("what they do with whole leaves", facts, remedy="the same calls with the same values in all processes")
