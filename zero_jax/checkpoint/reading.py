"""Reads arrays onto devices: each process reads its shards, and the devices verify fingerprints."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.checkpoint.leaf_files import check_fingerprint, leaf_error, make_context, open_leaf
from zero_jax.checkpoint.record import CheckpointError, Record, SavedLeaf
from zero_jax.checkpoint.saved_state import decode, fingerprints
from zero_jax.core.agreement import Agreement

# Bytes of this process's shards that are read ahead of what has been moved to the devices.
_PENDING_BYTES = 1 << 30


def failed_elsewhere(processes: str) -> CheckpointError:
    """Returns the error to raise where other processes cannot read a checkpoint."""
    return CheckpointError(f"process {processes} could not read it (see its log)")


def read_arrays(record: Record, shardings: Mapping[str, NamedSharding], *, mesh: Mesh) -> dict[str, Array]:
    """Reads leaves with shardings, and verifies their fingerprints.

    Args:
      record: the checkpoint.
      shardings: the sharding of each leaf, by name.
      mesh: their mesh.

    Raises:
      CheckpointError: a leaf cannot be read, or is damaged.
    """
    stored: dict[str, Array] = {}
    with Agreement(failed_elsewhere):
        for name, x in _read_ahead(record, shardings):
            stored[name] = x
    for name, number in zip(stored, fingerprints(list(stored.values()), mesh=mesh), strict=True):
        check_fingerprint(record, name, number)
    return {name: _decode(stored.pop(name), record.leaves[name], shardings[name]) for name in shardings}


def _read_ahead(record: Record, shardings: Mapping[str, NamedSharding]) -> Iterator[tuple[str, Array]]:
    """Yields the leaves in their stored form, while the next ones are read."""
    context, pending, pending_bytes = make_context(), collections.deque(), 0
    for name, sharding in shardings.items():
        reads = _ShardReads(record, name, _stored_sharding(sharding, record.leaves[name]), context)
        pending_bytes += reads.nbytes
        pending.append((name, reads))
        while pending_bytes > _PENDING_BYTES and len(pending) > 1:
            done, reads = pending.popleft()
            pending_bytes -= reads.nbytes
            yield done, reads.result()
    for name, reads in pending:
        yield name, reads.result()


class _ShardReads:
    """Asynchronous reads of this process's shards of a leaf; replicas share a read."""

    def __init__(self, record: Record, name: str, sharding: NamedSharding, context: Any) -> None:
        self.record, self.name, self.sharding = record, name, sharding
        self.leaf = record.leaves[name]
        self.indices = sharding.addressable_devices_indices_map(self.leaf.stored_shape)
        store = None if 0 in self.leaf.stored_shape else open_leaf(record, name, context)
        self.reads = {str(index): store[index].read() for index in self.indices.values()} if store else {}
        shard_size = math.prod(sharding.shard_shape(self.leaf.stored_shape))
        self.nbytes = len(self.reads) * shard_size * jnp.dtype(self.leaf.stored_dtype).itemsize

    def result(self) -> Array:
        """Waits for the shards, and returns the global array."""
        dtype = jnp.dtype(self.leaf.stored_dtype)
        try:
            parts = {key: np.asarray(read.result()) for key, read in self.reads.items()}
        except ValueError as error:
            raise leaf_error(self.record, self.name, error) from error
        shape = self.leaf.stored_shape
        empty = np.empty(self.sharding.shard_shape(shape), dtype)
        shards = [jax.device_put(parts.get(str(index), empty), device) for device, index in self.indices.items()]
        return jax.make_array_from_single_device_arrays(shape, self.sharding, shards, dtype=dtype)


def _stored_sharding(sharding: NamedSharding, leaf: SavedLeaf) -> NamedSharding:
    """Returns the sharding of a leaf's stored form: the words of PRNG keys are replicated."""
    spec = PartitionSpec() if leaf.is_key else sharding.spec
    return NamedSharding(sharding.mesh, spec)


def _decode(x: Array, leaf: SavedLeaf, sharding: NamedSharding) -> Array:
    return jax.jit(decode, static_argnums=1, out_shardings=sharding)(x, leaf) if leaf.dtype != leaf.stored_dtype else x
