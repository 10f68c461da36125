"""Shards of params, which each process writes to a file of its own, and from which the first process reads slices."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from zero_jax.core.files.safetensors import StoredTensor
from zero_jax.core.files.system_errors import with_remedy
from zero_jax.pretrained.mapping import Index

# Returns slices of a param, which are read one after the other.
Pieces = Callable[[], Iterable[tuple[Index, np.ndarray]]]


def _owners(x: Array) -> list[tuple[Any, Index]]:
    """Returns the devices whose shards make up an array, each with its slice: the same in all processes."""
    owner_of: dict[Any, tuple[Any, Index]] = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        index = index or ()
        key = tuple((at.start, at.stop) for at in index)
        if key not in owner_of or device.id < owner_of[key][0].id:
            owner_of[key] = (device, index)
    return [owner_of[key] for key in sorted(owner_of, key=str)]


def own_shards(x: Array) -> Iterator[tuple[Index, np.ndarray]]:
    """Yields the shards of an array that this process writes, one on the host at a time."""
    if not isinstance(x, jax.Array):
        yield tuple(slice(None) for _ in x.shape), np.asarray(x)
        return
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    for device, index in _owners(x):
        if device in shards:
            yield index, np.asarray(shards[device])


def make_parts(target: pathlib.Path) -> pathlib.Path:
    """Makes a folder beside `target` for the files of all processes, in the first one."""
    parts = target.parent / f".{target.name}.parts-{os.getpid()}"
    try:
        parts.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"cannot write {target}: {with_remedy(error)}") from error
    return parts


def write_parts(path: pathlib.Path, leaves: Iterable[Array]) -> None:
    """Writes this process's shards of all params to a file of its own.

    Raises:
      ValueError: it cannot be written.
    """
    try:
        with path.open("xb") as file:
            for x in leaves:
                for _, values in own_shards(x):
                    file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ValueError(f"cannot write {path}: {with_remedy(error)}; all processes need this folder") from error


def pieces_of_parts(parts: pathlib.Path, leaves: Mapping[str, Array]) -> dict[str, Pieces]:
    """Returns the slices of each param in the files of all processes.

    Raises:
      ValueError: a file is not complete, as on a disk of another host.
    """
    ends: dict[int, int] = {}
    places: dict[str, list[tuple[Index, StoredTensor]]] = {}
    for path, x in leaves.items():
        places[path] = []
        for device, index in _owners(x):
            shape = tuple(len(range(*at.indices(size))) for at, size in zip(index, x.shape, strict=True))
            start = ends.setdefault(device.process_index, 0)
            part = StoredTensor(
                path=parts / str(device.process_index),
                name=path,
                dtype=jnp.dtype(x.dtype).name,
                shape=shape,
                offset=start,
            )
            ends[device.process_index] = start + part.num_bytes
            places[path].append((index, part))
    for process, end in ends.items():
        with contextlib.suppress(OSError):
            if (parts / str(process)).stat().st_size == end:
                continue
        raise ValueError(f"{parts / str(process)} is not complete here: save to a folder that all processes share")
    return {path: lambda each=each: ((index, part.open()) for index, part in each) for path, each in places.items()}
