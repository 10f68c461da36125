"""Checks of arguments: functions by their signatures, and values by the kinds that public functions take."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.core.tree import shown


def check_takes(
    what: str, function: Any, arguments: Sequence[str], *, keywords: Sequence[str] = (), remedy: str
) -> Callable[..., Any]:
    """Returns a function; raises `ValueError`, which names it `what`, if it cannot be called with such arguments."""
    called = f"({', '.join([*arguments, *(f'{name}=...' for name in keywords)])})"
    check_callable(what, function, remedy=remedy)
    try:  # a wrapper may take less than what it wraps
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some built-in functions have none
        return function
    try:
        # Binds, without a call: the names of the arguments stand for their values.
        signature.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        takes = f"{name}({', '.join(signature.parameters)})"
        raise ValueError(f"{what}: {takes} cannot be called with {called} ({error}): {remedy}") from None
    return function


def check_callable(what: str, function: Any, *, remedy: str) -> None:
    """Raises `ValueError` for a value that is not callable."""
    if not callable(function):
        raise ValueError(f"{what}={shown(function)} is no function: {remedy}")


def check_is(what: str, value: Any, kinds: Any, *, remedy: str) -> None:
    """Raises `ValueError` for a value that is of none of some classes, or their union."""
    if not isinstance(value, kinds):
        raise ValueError(f"{what}={shown(value)}: {remedy}")


def place_of(function: Callable[..., Any]) -> str:
    """Returns `file:line (name)` of a function, or its name alone if it is not written in Python."""
    inner: Any = function
    while inner is not None:
        function = inner
        inner = function.func if isinstance(function, functools.partial) else getattr(function, "__wrapped__", None)
    named: Any = function if hasattr(function, "__qualname__") else type(function).__call__
    code = getattr(named, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} ({named.__qualname__})" if code else named.__qualname__


def check_methods(what: str, value: Any, names: Sequence[str], *, remedy: str) -> None:
    """Raises `ValueError` for a value without methods of these names."""
    missing = [name for name in names if not callable(getattr(value, name, None))]
    if missing:
        raise ValueError(f"{what}={shown(value)} has no {'() and no '.join(missing)}(): {remedy}")


def check_arguments(**arguments: Any) -> None:
    """Checks arguments by the names of their parameters, which have the same meaning in all public functions."""
    for name, value in arguments.items():
        is_right, remedy = _KINDS[name]
        if not is_right(value):
            raise ValueError(f"{name}={shown(value)}: {remedy}")


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda value: not isinstance(value, type) and all(hasattr(value, name) for name in names)


def _optional(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _is_count(lowest: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= lowest


def _are(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(map(is_right, value))
    )


def _is_seconds(value: Any) -> bool:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return is_number and bool(0 < value < math.inf)


def _is_dtype(value: Any) -> bool:
    # `jnp.dtype` of an array is the array's dtype.
    if (isinstance(value, type) and value in (dict, list, tuple, object)) or isinstance(value, jax.Array):
        return False
    try:
        return jnp.issubdtype(jnp.dtype(value), jnp.inexact)
    except (TypeError, ValueError):
        return False


def _are_specs(value: Any) -> bool:
    is_spec = lambda x: x is None or isinstance(x, PartitionSpec)  # noqa: E731
    leaves = jax.tree.leaves(value, is_leaf=is_spec)
    return all(is_spec(leaf) or isinstance(leaf, NamedSharding) for leaf in leaves)


def _are_losses(value: Any) -> bool:
    losses = list(value.values()) if isinstance(value, Mapping) else [value]
    return bool(losses) and all(callable(loss) or hasattr(loss, "make") for loss in losses)


def _some(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: _are(is_right)(value) and len(value) > 0


def _is_path(value: Any) -> bool:
    # An empty text, as of a variable that is not set, would be the current folder.
    return isinstance(value, str | os.PathLike) and os.fspath(value) != "" and "\0" not in os.fsdecode(value)


_AXES = "give names of the mesh's axes, such as ('model',)"
# Classes of the packages above are told by their attributes: `core` imports none of them.
_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "attentions": (_optional(_some(lambda name: name in ("own", "fused"))), "give some of 'own' and 'fused'"),
    "axes": (
        _optional(_has("data", "replica", "model", "batch")),
        "leave it out, or give what `axes_of(mesh)` returns",
    ),
    "cache": (
        _optional(_is(str, os.PathLike)),
        "give a folder, 'default' for the user's cache folder, or None for none",
    ),
    **dict.fromkeys(("callbacks", "trackers"), (_are(lambda _: True), "give a list")),
    "compiler_options": (_optional(_is(Mapping)), "give a dict of compiler options, or None"),
    "config": (_has("stage", "num_microbatches", "axes_of"), "give a zero.ZeroConfig, as zero.ZeroConfig(stage=3)"),
    "data_layout": (_optional(_are(_is_count(1))), "give sizes of mesh axes, such as (2, 4)"),
    "dim": (_is_count(0), "give the number of the dim, counted from 0"),
    "dtype": (_optional(_is_dtype), "give a floating dtype, such as 'bfloat16', or None"),
    "field": (_is(str), "give the name of a field of the optimizer's state, such as 'nu'"),
    **dict.fromkeys(("folder", "out"), (_is_path, "give the path of a folder")),
    "host_memory_bytes": (
        _optional(_is_count(1)),
        "give the bytes of a host's memory for each of its devices, or None",
    ),
    "init_fn": (callable, "it is no function: give a function of a key that returns the params"),
    **dict.fromkeys(("keep_gathered", "own_process", "quick", "weighted"), (_is(bool), "give True or False")),
    "num_steps": (_is_count(1), "give the number of steps, 1 or more"),
    "step": (_optional(_is_count(0)), "give the number of a step, as 100, or None for the newest"),
    **dict.fromkeys(
        ("num_batches", "position", "prefetch_batches", "seed"), (_is_count(0), "give a whole number, 0 or more")
    ),
    "batch_size": (_is_count(1), "give a number of examples, at least 1"),
    "sharding": (_has("addressable_devices_indices_map"), "give the NamedSharding of a batch"),
    "tolerance": (_optional(_is_seconds), "give a relative difference, such as 1e-4, or None"),
    "layout": (_optional(_has("allocated_bytes", "live_bytes")), "give what `zero.memory.read_layout` returns"),
    "layouts": (_optional(_are(_are(_is_count(1)))), "give sizes of mesh axes, such as [(4,), (2, 2)]"),
    "like": (
        lambda value: any(_has(name)(value) for name in ("source", "hf_config", "d_hidden")),
        "give what zero.load_hf returned, or a DecoderConfig",
    ),
    "lora": (_has("rules", "rank", "trained"), "give a zero.Lora, as zero.Lora(rules={'.*/query': 'sio'})"),
    "log": (callable, "give a function of a line, such as print"),
    "max_compiles": (_is_count(0), "give how many settings to compile, 0 for none"),
    **dict.fromkeys(("max_file_bytes", "max_shard_bytes"), (_is_count(1), "give a number of bytes")),
    "max_hoisted_bytes": (_is_count(0), "give a number of bytes"),
    "max_num_microbatches": (_is_count(1), "give at least 1"),
    "loss_fn": (_are_losses, "it is no function: give a loss function, or several by name"),
    "mesh": (_optional(_is(Mesh)), "give a jax.sharding.Mesh, as zero.make_mesh() returns"),
    **dict.fromkeys(("model", "replica"), (_is_count(1), "give the size of the mesh axis, at least 1")),
    "model_axes": (_optional(_are(_is(str))), _AXES),
    "pipe": (_is_count(1), "give the number of stages, at least 1"),
    "pipelines": (_optional(_some(_is(str))), "give some of 'gpipe', '1f1b', '1f1b:2' and 'circular:2'"),
    "pipes": (_optional(_some(_is_count(1))), "give sizes of the axis `pipe`, such as (1, 2, 4)"),
    "models": (_optional(_some(_is_count(1))), "give sizes of the axis `model`, such as (1, 2, 4)"),
    "name": (_is(str), "give a text"),
    **dict.fromkeys(("overlaps", "quantizes"), (_optional(_some(_is(bool))), "give some of True and False")),
    "offloads": (
        _optional(_are(lambda name: name in ("optimizer", "state", "all"))),
        "give some of 'optimizer', 'state' and 'all'",
    ),
    "param_shapes": (
        lambda value: all(map(_has("shape", "dtype"), jax.tree.leaves(value))),
        "give arrays or jax.ShapeDtypeStructs",
    ),
    "reduce_dtype": (_optional(_is_dtype), "give a floating dtype, such as jnp.float32"),
    "remats": (_optional(_some(_is(str))), "give names of policies, such as ('none', 'full')"),
    "other_losses": (_optional(_is(Mapping)), "give a dict of loss functions by name, or None"),
    "replicas": (_optional(_some(_is_count(1))), "give sizes of the axis `replica`, such as (1, 2)"),
    "batch_sizes": (_optional(_some(_is_count(1))), "give numbers of examples, such as (32, 64)"),
    "residuals": (_optional(_has("device_bytes", "host_bytes")), "give what `transformer_residuals` returns"),
    "seq_len": (_optional(_is_count(1)), "give a number of tokens, at least 1, or None"),
    **dict.fromkeys(
        ("param_specs", "specs"),
        (_are_specs, "give PartitionSpecs or NamedShardings, a tree (or prefix) of them like the params"),
    ),
    "stages": (_some(_is_count(0)), "give stages to try, such as (2, 3)"),
    "targets": (_some(_is(str)), "give names of modules, such as 'q_proj,v_proj', or 'all-linear'"),
    "temporaries": (_optional(callable), "give a function of a setting that returns bytes, or None"),
    "timeout_seconds": (_optional(_is_seconds), "give a positive number of seconds, or None for no limit"),
    "traced": (_optional(_has("moves", "residuals")), "give what `zero.trace_loss` returns"),
    "tx": (_has("init", "update"), "it is no optimizer: give an optax transformation, as optax.adamw(3e-4)"),
    "unknown_trip_count": (_optional(_is_count(0)), "give a number of iterations"),
}
