"""Writes the arrays of a checkpoint by orbax, in its threads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax import Array
from orbax.checkpoint.future import Future

# Chunks are read completely, so they are small: another mesh should not read much more than its shards.
_CHUNK_BYTES = 1 << 24
_LEAST_CHUNK_BYTES = 1 << 13


class ArrayWrites:
    """Asynchronous writes of arrays to a folder; every process makes one for the same arrays and folder.

    Errors are raised by `wait`, not here: every process has to reach the barrier after it.
    """

    def __init__(self, arrays: Mapping[str, Array], folder: epath.Path) -> None:
        """Copies this process's shards to the host and starts to write them; then the arrays may be donated.

        No array may be empty, and the folder must exist.
        """
        self._folder, self._handler = folder, _handler()
        save_args = {name: ocp.SaveArgs(chunk_byte_size=_chunk_bytes(x)) for name, x in arrays.items()}
        args = ocp.args.PyTreeSave(dict(arrays), save_args=save_args)

        async def save() -> list[Future]:
            return await self._handler.async_save(folder, args=args) or []

        with ThreadPoolExecutor(1) as thread:  # the caller's may have an event loop, as in a notebook
            self._started = thread.submit(lambda: asyncio.run(save()))

    def wait(self) -> None:
        """Waits until this process has written its part, or has stopped after an error.

        Raises:
          Exception: the first error of orbax.
        """
        failed = [error for write in self._started.result() if (error := _error_of(write))]
        if failed:
            raise failed[0]

    def finalize(self) -> None:
        """Merges the indices of all processes; called by the first process when all have written."""
        self._handler.finalize(self._folder)


class _Arrays(ocp.type_handlers.ArrayHandler):
    """Writes arrays without their shardings, so that orbax restores them as numpy arrays on any devices."""

    def __init__(self) -> None:
        super().__init__(enable_write_sharding_file=False, array_metadata_store=None)

    def typestr(self) -> str:
        return "np.ndarray"


def _handler() -> ocp.PyTreeCheckpointHandler:
    """Returns a handler that writes all arrays in one transaction, so that a failed write abandons no other.

    By default orbax limits the bytes in flight, and then uses no transaction.
    """
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, _Arrays()))
    unlimited = ocp.BasePyTreeCheckpointHandler(save_concurrent_bytes=None, type_handler_registry=registry)
    return ocp.PyTreeCheckpointHandler(handler_impl=unlimited, type_handler_registry=registry)


def _chunk_bytes(x: Array) -> int:
    """Returns the largest size of an array's chunks.

    Orbax divides a shard by prime factors of its sizes until a chunk is below the limit. A large prime factor would
    make chunks far smaller than that: of one element, if the size is a prime number.
    """
    factors = map(_largest_prime_factor, x.sharding.shard_shape(x.shape))
    return max(_CHUNK_BYTES, _LEAST_CHUNK_BYTES * max(factors, default=1))


def _largest_prime_factor(number: int) -> int:
    factor = 2
    while factor * factor <= number:
        if number % factor:
            factor += 1
        else:
            number //= factor
    return number


def _error_of(write: Future) -> Exception | None:
    try:
        write.result()
    except Exception as error:
        return error
    return None
