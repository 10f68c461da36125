"""The files of a checkpoint's leaves: checked, opened, read in slices on the host, or onto devices as shards.

Each leaf is a zarr array inside one OCDBT, the key-value store of tensorstore.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from etils import epath
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.checkpoint.fingerprint import host_fingerprint
from zero_jax.checkpoint.record import STATE, CheckpointError, CheckpointRemoved, Record, SavedLeaf, file_key
from zero_jax.checkpoint.saved_state import decode, fingerprints
from zero_jax.core.agreement import Agreement
from zero_jax.core.files.untrusted import irregular, is_bucket
from zero_jax.core.text_tables import printable, quoted

_MAX_INDEX_BYTES = 1 << 26
_CACHE_BYTES = 1 << 27
_SLICE_BYTES = 1 << 26
# Bytes of this process's shards that are read ahead of what has been moved to the devices.
_PENDING_BYTES = 1 << 28
_HASHED_BYTES = 1 << 22  # hashing takes several times the memory of what is hashed


def check_files(record: Record) -> None:
    """Raises a `CheckpointError` for a local checkpoint with special files (pipes) or a far too large index."""
    if is_bucket(record.path):
        return
    problems = irregular(record.path)
    index = record.path / STATE / "manifest.ocdbt"
    if not problems and index.exists() and index.stat().length > _MAX_INDEX_BYTES:
        problems = [f"{STATE}/{index.name} has {index.stat().length:,} bytes"]
    if problems:
        raise record.error(f"{record.path} is damaged: {'; '.join(problems[:5])}")


def check_index(record: Record) -> None:
    """Raises a `CheckpointError` if the leaves in the files differ from the record in names, shapes or dtypes."""
    stored = {file_key(name): name for name, leaf in record.leaves.items() if 0 not in leaf.stored_shape}
    in_files = set[str]()
    with contextlib.suppress(ValueError):  # of a damaged index, as the leaves will say
        keys = tensorstore.KvStore.open(_ocdbt_store(record.path / STATE)).result().list().result()
        in_files = {key.decode().rpartition("/")[0] for key in keys}  # the leaf and `/.zarray`, or a chunk's numbers
    if in_files and in_files != stored.keys():
        differing = sorted(in_files ^ stored.keys())
        raise record.error(
            f"{record.path} is damaged: of {', '.join(map(repr, differing[:5]))}{', ...' if differing[5:] else ''} "
            "there are values or a record, not both"
        )
    # Without a cache: no values are read.
    context = make_context(0)
    for name in stored.values():
        open_leaf(record, name, context)


def make_context(cache_bytes: int = _CACHE_BYTES) -> tensorstore.Context:
    """Returns a cache that reads share, so that a chunk is not read again for each device."""
    return tensorstore.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})


def open_leaf(record: Record, name: str, context: tensorstore.Context) -> tensorstore.TensorStore:
    """Opens a leaf for reading; raises `CheckpointError` if it is missing, or differs from the record."""
    leaf = record.leaves[name]
    kvstore = {**_ocdbt_store(record.path / STATE), "path": f"{file_key(name)}/"}
    # A chunk that is missing is an error: tensorstore would read it as zeros.
    spec = {"driver": "zarr", "kvstore": kvstore, "fill_missing_data_reads": False}
    try:
        store = tensorstore.open(spec, context=context, open=True, read=True).result()
    except ValueError as error:
        raise leaf_error(record, name, error) from error
    dtype = jnp.dtype(store.dtype.numpy_dtype).name
    if tuple(store.shape) != leaf.stored_shape or dtype != leaf.stored_dtype:
        stored = f"{dtype}{list(store.shape)}, not {leaf.stored_dtype}{list(leaf.stored_shape)} as recorded"
        raise leaf_error(record, name, f"its files contain {stored}")
    return store


def leaf_error(record: Record, name: str, why: object) -> CheckpointError:
    """Returns the error for a leaf that cannot be read, with its name and the reason."""
    reason = re.sub(r" \[(tensorstore_spec|source locations|domain)=.*", "", str(why), flags=re.DOTALL)
    reason = printable(reason, limit=1000)
    return record.error(f"leaf {quoted(name)} of {record.path} is damaged or cut off: {reason}")


def cut_slices(
    shape: Sequence[int], itemsize: int, limit_bytes: int, chunk: Sequence[int] | None = None
) -> Iterator[tuple[slice, ...]]:
    """Cuts an array into slices of complete chunks, in order, of at most `limit_bytes` unless one chunk has more."""
    sizes = list(chunk or (1,) * len(shape))
    # From the minor dim on, so that a slice is contiguous: a dim grows only where those after it are complete.
    for dim in reversed(range(len(shape))):
        part_bytes = itemsize * int(np.prod(sizes, dtype=np.int64))
        sizes[dim] = max(1, min(shape[dim], sizes[dim] * max(1, limit_bytes // part_bytes)))
        if sizes[dim] < shape[dim]:
            break
    for starts in itertools.product(*(range(0, size, step) for size, step in zip(shape, sizes, strict=True))):
        yield tuple(
            slice(start, min(start + step, size)) for start, step, size in zip(starts, sizes, shape, strict=True)
        )


def read_slices(record: Record, name: str) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """Reads a leaf on the host, slice by slice in any order, and compares its fingerprint after the last."""
    leaf, total = record.leaves[name], 0
    if 0 not in leaf.stored_shape:
        # Without a cache: slices are of complete chunks, so that each is read once.
        store = open_leaf(record, name, make_context(0))
        chunk = [size or 1 for size in store.chunk_layout.read_chunk.shape or ()]
        for index in cut_slices(leaf.stored_shape, jnp.dtype(leaf.stored_dtype).itemsize, _SLICE_BYTES, chunk):
            try:
                part = np.asarray(store[index].read().result())
            except ValueError as error:
                raise leaf_error(record, name, error) from error
            for inner in cut_slices(part.shape, part.dtype.itemsize, _HASHED_BYTES):
                place = [slice(a.start + b.start, a.start + b.stop) for a, b in zip(index, inner, strict=True)]
                total += host_fingerprint(part[inner], place, leaf.stored_shape)
            yield index, part.view(jnp.dtype(leaf.host_dtype))
    check_fingerprint(record, name, total % 2**32)


def check_fingerprint(record: Record, name: str, fingerprint: int) -> None:
    """Raises a `CheckpointError` if the fingerprint of a leaf differs from the saved one."""
    if fingerprint != record.leaves[name].fingerprint:
        reason = f"its fingerprint is {fingerprint:08x}, and {record.leaves[name].fingerprint:08x} was saved"
        raise leaf_error(record, name, reason)


def verify(record: Record) -> list[str]:
    """Verifies every leaf on the host, in bounded memory; returns a message for each damaged leaf."""
    problems: list[str] = []

    def check(read: Callable[[], object]) -> None:
        try:
            read()
        except CheckpointRemoved:  # deleted meanwhile, not damaged
            raise
        except CheckpointError as error:
            problems.append(str(error))

    check(lambda: check_files(record))
    if problems:
        return problems
    check(lambda: check_index(record))
    for name in record.leaves:
        # Read to the end, where the fingerprint is compared.
        check(lambda name=name: collections.deque(read_slices(record, name), maxlen=0))
    return list(dict.fromkeys(problems))


def agreement_to_read() -> Agreement:
    """Returns a context in which a checkpoint that one process cannot read is one that none can.

    Other errors of one process, such as memory that ends, are of all: none goes on to an older checkpoint alone.
    """

    def failure(processes: str) -> CheckpointError:
        return CheckpointError(f"process {processes} could not read it (see its log)")

    return Agreement(failure, of=(CheckpointError, CheckpointRemoved))


def read_arrays(record: Record, shardings: Mapping[str, NamedSharding], *, mesh: Mesh) -> dict[str, Array]:
    """Reads leaves onto devices, each with the sharding of its name, and verifies their fingerprints."""
    stored: dict[str, Array] = {}
    # Fingerprints are computed by all processes together: none may be left waiting for one that cannot read.
    with agreement_to_read():
        for name, x in _read_ahead(record, shardings):
            stored[name] = x
    # Before `decode`: fingerprints are of the stored form.
    for name, number in zip(stored, fingerprints(list(stored.values()), mesh=mesh), strict=True):
        check_fingerprint(record, name, number)
    # Popped, so that the stored form of a leaf is freed before the next one is decoded.
    return {name: _decode(stored.pop(name), record.leaves[name], shardings[name]) for name in shardings}


def _read_ahead(record: Record, shardings: Mapping[str, NamedSharding]) -> Iterator[tuple[str, Array]]:
    """Yields the leaves in their stored form, while the next ones are read."""
    context, pending, pending_bytes = make_context(), collections.deque(), 0
    for name, sharding in shardings.items():
        # The words of PRNG keys, the stored form, are replicated.
        spec = PartitionSpec() if record.leaves[name].is_key else sharding.spec
        num_bytes, finish = _start_reads(record, name, NamedSharding(sharding.mesh, spec), context)
        pending.append((name, num_bytes, finish))
        pending_bytes += num_bytes
        # The newest read stays under way, however large it is, while the one before is moved to the devices.
        while pending_bytes > _PENDING_BYTES and len(pending) > 1:
            done, num_bytes, finish = pending.popleft()
            pending_bytes -= num_bytes
            yield done, finish()
    for name, _, finish in pending:
        yield name, finish()


def _start_reads(
    record: Record, name: str, sharding: NamedSharding, context: tensorstore.Context
) -> tuple[int, Callable[[], Array]]:
    """Starts to read this process's shards of a leaf; returns their bytes, and what waits for the global array."""
    shape, dtype = record.leaves[name].stored_shape, jnp.dtype(record.leaves[name].stored_dtype)
    shard_shape, indices = sharding.shard_shape(shape), sharding.addressable_devices_indices_map(shape)
    store = None if 0 in shape else open_leaf(record, name, context)
    # By index: devices that have the same shard share a read of it.
    # `str`, because slices have no hash before Python 3.12.
    reads = {str(index): store[index].read() for index in indices.values()} if store else {}

    def finish() -> Array:
        try:
            parts = {key: np.asarray(read.result()) for key, read in reads.items()}
        except ValueError as error:
            raise leaf_error(record, name, error) from error
        empty = np.empty(shard_shape, dtype)
        shards = [jax.device_put(parts.get(str(index), empty), device) for device, index in indices.items()]
        return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=dtype)

    return len(reads) * math.prod(shard_shape) * dtype.itemsize, finish


def _decode(x: Array, leaf: SavedLeaf, sharding: NamedSharding) -> Array:
    return jax.jit(decode, static_argnums=1, out_shardings=sharding)(x, leaf) if leaf.dtype != leaf.stored_dtype else x


def _ocdbt_store(folder: epath.Path) -> dict[str, Any]:
    path = f"{folder}/"
    return {"driver": "ocdbt", "base": path if "://" in path else {"driver": "file", "path": path}}
