"""Writes the arrays of a checkpoint by orbax: all in one transaction, in chunks that another mesh can read."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax import Array
from orbax.checkpoint import future as orbax_future

from zero_jax.core.files.untrusted import is_bucket

# Chunks are read completely, so they are small: another mesh should not read much more than its shards.
_CHUNK_BYTES = 1 << 24
_LEAST_CHUNK_BYTES = 1 << 13


class ArrayWrites:
    """Writes arrays to a folder in the background, in all processes; errors come from `wait`, before its barrier."""

    def __init__(self, arrays: Mapping[str, Array], folder: epath.Path) -> None:
        """Copies this process's shards of arrays with elements, which may then be donated, and starts to write."""
        # A handler with one transaction for all arrays, which orbax has without a limit on bytes in flight.
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, _Arrays()))
        unlimited = ocp.BasePyTreeCheckpointHandler(save_concurrent_bytes=None, type_handler_registry=registry)
        self._handler = ocp.PyTreeCheckpointHandler(handler_impl=unlimited, type_handler_registry=registry)
        self._folder = folder
        save_args = {name: ocp.SaveArgs(chunk_byte_size=_chunk_bytes(x)) for name, x in arrays.items()}
        args = ocp.args.PyTreeSave(dict(arrays), save_args=save_args)

        async def save() -> list[orbax_future.Future]:
            return await self._handler.async_save(folder, args=args) or []

        with ThreadPoolExecutor(1) as thread:  # the caller's may have an event loop, as in a notebook
            self._started = thread.submit(lambda: asyncio.run(save()))

    def wait(self) -> None:
        """Waits until this process has written its part, or has stopped after an error of orbax, which is raised."""
        with contextlib.ExitStack() as stack:  # waits for all, and raises what one of them raises
            for write in self._started.result():
                stack.callback(write.result)

    def finalize(self) -> None:
        """Merges the indices of all processes; called by the first process when all have written."""
        self._handler.finalize(self._folder if is_bucket(self._folder) else _PlainPath(self._folder))


class _PlainPath(type(epath.Path())):
    """A local folder in which Orbax finds indices whatever its name is; where it finds none it raises no error."""

    def glob(self, pattern: str) -> Iterator[Any]:
        # That of etils takes brackets and stars in the name of the folder for parts of the pattern.
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))


class _Arrays(ocp.type_handlers.ArrayHandler):
    """Writes arrays without their shardings, so that orbax restores them as numpy arrays on any devices."""

    def __init__(self) -> None:
        super().__init__(enable_write_sharding_file=False, array_metadata_store=None)

    def typestr(self) -> str:
        return "np.ndarray"


def _chunk_bytes(x: Array) -> int:
    """Returns the largest size of an array's chunks.

    Orbax divides a shard by prime factors of its sizes until a chunk is below the limit. A large prime factor would
    make chunks far smaller than that: of one element, if the size is a prime number.
    """
    largest = 1
    for number in x.sharding.shard_shape(x.shape):
        factor = 2
        while factor * factor <= number:
            if number % factor:
                factor += 1
            else:
                number //= factor
        largest = max(largest, number)
    return max(_CHUNK_BYTES, _LEAST_CHUNK_BYTES * largest)
