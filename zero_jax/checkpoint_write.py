"""Writing the arrays of a checkpoint: every process its shards, each shard once, and no write left behind.

The form is that of orbax (zarr arrays in OCDBT), which can read it. The writes are waited for here, all of them and
also where one fails: orbax leaves the others to report, by the process-wide logs and hooks, after the save is over.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from etils import epath
from jax import Array

from zero_jax import ocdbt

# Chunks are read whole: another mesh should not have to read much more than its shards.
_CHUNK_BYTES = 1 << 24
_LARGEST_FACTOR = 64  # by which a chunk is divided in one go


class ArrayWrites:
    """The shards that this process writes, on the host; the arrays may be donated once it is made."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        """Copies the shards to the host: of those that several devices hold, the first one."""
        self._arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
        self._shard_shapes = {name: x.sharding.shard_shape(x.shape) for name, x in arrays.items()}
        shards = {
            name: [(shard.index, shard.data) for shard in x.addressable_shards if shard.replica_id == 0]
            for name, x in arrays.items()
        }
        for parts in shards.values():
            for _, data in parts:
                data.copy_to_host_async()
        self._shards = {name: [(index, np.asarray(data)) for index, data in parts] for name, parts in shards.items()}

    def write(self, folder: epath.Path) -> None:
        """Writes them, and returns when all are written or none will be any more.

        Raises:
          ValueError: one could not be written.
        """
        context, transaction = tensorstore.Context(ocdbt.CONTEXT), tensorstore.Transaction(atomic=True)
        kvstore = ocdbt.new_store(folder / _part(jax.process_index()))
        pending = []
        try:
            for name, shards in self._shards.items():
                spec = self._spec(name, kvstore)
                options = {"open": True, "context": context, "transaction": transaction}
                if jax.process_index() == 0:
                    tensorstore.open(spec, create=True, **options).result()
                store = tensorstore.open(spec, assume_metadata=True, **options).result()
                pending += [
                    store[index].write(data, can_reference_source_data_indefinitely=True) for index, data in shards
                ]
            ocdbt.finish(pending)
            transaction.commit_async().result()
        except BaseException:
            transaction.abort()
            with contextlib.suppress(Exception):
                ocdbt.finish(pending)
            raise
        finally:
            self._shards = {}

    def merge(self, folder: epath.Path) -> None:
        """Makes one index of what all processes have written into a folder; the first one does, when they have."""
        ocdbt.merge(folder, [folder / _part(process) for process in range(jax.process_count())])
        (folder / "_METADATA").write_text(json.dumps(self._metadata()))

    def _metadata(self) -> dict[str, Any]:
        """Returns what orbax wants to find beside the arrays."""
        leaves = {
            f"({name!r},)": {
                "key_metadata": [{"key": name, "key_type": 2}],
                "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False, "write_shape": list(shape)},
            }
            for name, shape in self._shard_shapes.items()
        }
        form = {"use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
        return {"tree_metadata": leaves, **form, "custom_metadata": None}

    def _spec(self, name: str, kvstore: Mapping[str, Any]) -> Any:
        x = self._arrays[name]
        chunks = chunk_shape(self._shard_shapes[name], jnp.dtype(x.dtype).itemsize)
        spec = {
            "driver": "zarr",
            "kvstore": {**kvstore, "path": f"{name}/"},
            "dtype": jnp.dtype(x.dtype).name,
            "metadata": {"shape": x.shape, "chunks": chunks, "compressor": {"id": "zstd", "level": 1}},
            "store_data_equal_to_fill_value": True,
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
        }
        return tensorstore.Spec(spec)


def chunk_shape(shard_shape: tuple[int, ...], itemsize: int) -> list[int]:
    """Returns chunks that divide a shard, so that no two processes write to one, and are near the limit or below it.

    A shard of a large prime number of elements is one chunk: divided, it would be one chunk an element.
    """
    sizes = list(shard_shape)
    while math.prod(sizes) * itemsize > _CHUNK_BYTES:
        factor, _, dim = min((_smallest_factor(size), -size, dim) for dim, size in enumerate(sizes))
        if factor > _LARGEST_FACTOR:
            break
        sizes[dim] //= factor
    return sizes


def _smallest_factor(size: int) -> int:
    """Returns the smallest divisor above 1 of a size, or more than any that is of use."""
    return next((n for n in range(2, _LARGEST_FACTOR + 1) if size % n == 0), _LARGEST_FACTOR + 1)


def _part(process: int) -> str:
    return f"ocdbt.process_{process}"
