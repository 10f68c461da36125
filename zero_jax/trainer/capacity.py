"""Checks that batches and params fit into memory, before anything is allocated."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from zero_jax.core.text_tables import format_bytes
from zero_jax.core.tracebacks import SHORT_TRACEBACK
from zero_jax.core.tree import PyTree, key_shape
from zero_jax.training import checked_variables

_BYTES_A_TOKEN = 16  # input, target, weight and segment


def check_text_fits(*, batch_size: int, seq_len: int, prefetch_batches: int) -> None:
    """Raises `ValueError` if the batches of a text are larger than this machine's memory."""
    host_bytes = _host_bytes()
    batches = batch_size * seq_len * _BYTES_A_TOKEN // jax.process_count() * (1 + prefetch_batches)
    if batches > host_bytes:
        raise ValueError(
            f"batch_size={batch_size}: this and prefetch_batches={prefetch_batches} more of {seq_len:,} tokens a "
            f"sequence take {format_bytes(batches)}, and this machine has {format_bytes(host_bytes)}: give smaller ones"
        )


def check_params_fit(init_fn: Callable[[jax.Array], PyTree], *, mesh: Mesh) -> None:
    """Raises `ValueError` if the params are larger than all devices; `init_fn` is traced, not run."""
    with SHORT_TRACEBACK:
        params = jax.eval_shape(lambda key: checked_variables(init_fn(key)), key_shape())
    # The params alone: how much gradients and optimizer state add depends on the stage and the optimizer.
    size = tree_bytes(params)
    device_bytes = _device_bytes(mesh)
    # As if all params were sharded over all devices: no stage needs less.
    if size * len(mesh.local_devices) / mesh.size > device_bytes:
        raise ValueError(
            f"the params take {format_bytes(size)} in all, and the {len(mesh.local_devices)} devices of this machine "
            f"have {format_bytes(device_bytes)}: give a smaller model, or more machines"
        )


def tree_bytes(tree: PyTree) -> int:
    """Returns the bytes of a tree of arrays or shapes, PRNG keys by their data.

    Example:
      >>> zero.trainer.tree_bytes(state.params)
      32768
    """
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _host_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _device_bytes(mesh: Mesh) -> int:
    """Returns the memory of this process's devices; simulated ones share the machine's."""
    devices: list[Any] = list(mesh.local_devices)
    if devices[0].platform == "cpu":
        return _host_bytes()
    # Where the backend reports no limit, nothing is refused.
    return sum((device.memory_stats() or {}).get("bytes_limit", 2**62) for device in devices)
