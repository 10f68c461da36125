"""Batches of packed rows as global arrays: shuffled, prefetched, and read by each process for its own devices.

The rows of a batch are a pure function of the seed and the number of examples before it.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from zero_jax.core.extras import extra
from zero_jax.core.signatures import check_arguments
from zero_jax.core.tree import PyTree, is_key
from zero_jax.data.parts import NO_ROW, Dataset, Part
from zero_jax.data.stream import LaneRows, Stream

Batch = dict[str, jax.Array]
_MAX_THREADS = 4


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Share:
    """The rows of a global batch that this process's devices need."""

    rows: np.ndarray  # indices of these rows in the batch, ascending
    shape: tuple[int, int]  # global shape of the batch
    sharding: NamedSharding  # sharding of the batch
    has_segments: bool  # whether the batch has `segments`

    def assemble(self, local: Mapping[str, np.ndarray]) -> Batch:
        """Makes global arrays of this process's rows, without communication."""
        indices = self.sharding.addressable_devices_indices_map(self.shape)
        shards = {
            name: [self.shard(array, index) for index in indices.values() if index]
            for name, array in local.items()
            if self.has_segments or name != "segments"
        }
        devices = list(indices)
        placed = jax.device_put(shards, dict.fromkeys(shards, devices))  # explicit, as transfer guards want it
        return {
            name: jax.make_array_from_single_device_arrays(self.shape, self.sharding, arrays)
            for name, arrays in placed.items()
        }

    def shard(self, local: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        """Returns the part of this process's rows that is at an index of the global batch."""
        # A device's rows are next to each other in the batch, and so among those of the process, which ascend.
        first, last = np.searchsorted(self.rows, index[0].indices(self.shape[0])[:2])
        return local[first:last, index[1]]


def _share(sharding: NamedSharding, *, batch_size: int, seq_len: int, separate_documents: bool) -> _Share:
    # Before JAX is asked: its cache would take 8.0 for 8, and give fractions for every batch of that size after it.
    check_arguments(batch_size=batch_size, seq_len=seq_len, sharding=sharding)
    shape = (batch_size, seq_len)
    try:
        indices = sharding.addressable_devices_indices_map(shape)
    except ValueError as error:
        raise ValueError(
            f"batch_size={batch_size} does not divide over {dict(sharding.mesh.shape)} as {sharding.spec}: choose a "
            "multiple of the devices that the batch is sharded over"
        ) from error
    rows = np.unique(np.concatenate([np.arange(batch_size)[index[0]] for index in indices.values() if index]))
    return _Share(rows=rows, shape=shape, sharding=sharding, has_segments=separate_documents)


class Batches(Iterator[Batch], contextlib.AbstractContextManager):
    """An endless iterator over shuffled batches, read ahead by threads: global arrays as of `Part.cut_rows`.

    `position` is the number of examples so far, including those before the start, to resume with in `train_batches`.
    """

    def __init__(self, host_batches: Any, share: _Share, *, position: int):
        """Wraps an iterator over this process's rows of each batch; `position` counts the examples before."""
        self._host_batches, self._share, self.position, self._is_open = host_batches, share, position, True

    def __next__(self) -> Batch:
        if not self._is_open:
            raise ValueError("these batches were closed, or could not be read on: make new ones from their position")
        try:
            batch = self._share.assemble(next(self._host_batches))
        except BaseException:
            self.close()  # or the next call would return the batch after the failed one
            raise
        self.position += self._share.shape[0]
        return batch

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the threads."""
        if self._is_open:
            self._is_open = False
            self._host_batches.close()


class StreamBatches(Batches):
    """Batches of a stream, whose lanes in this process had these `states` by position, of the last two batches."""

    def __init__(self, rows: LaneRows, share: _Share, *, position: int, num_lanes: int, prefetch_batches: int):
        """Wraps the rows of `num_lanes` lanes in all processes, as `Batches`."""
        super().__init__(self._read_ahead(rows, prefetch_batches), share, position=position)
        self.num_lanes, self.states = num_lanes, {position: rows.state()}

    def _read_ahead(self, rows: LaneRows, num_batches: int) -> Iterator[dict[str, np.ndarray]]:
        # One thread, because the rows of a lane have an order, and a state is that after them.
        thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="lanes")
        waiting: collections.deque[concurrent.futures.Future] = collections.deque()
        try:
            while True:
                while len(waiting) <= num_batches:
                    waiting.append(thread.submit(lambda: (rows.read(), rows.state())))
                batch, self._state = waiting.popleft().result()
                yield batch
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    def __next__(self) -> Batch:
        before, batch = self.position, super().__next__()
        # That before the batch too: a run that fails between the batch and its step saves the step before.
        self.states = {before: self.states[before], self.position: self._state}
        return batch


def stream_batches(
    stream: Stream,
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    sharding: NamedSharding,
    position: int = 0,
    states: Mapping[str, Any] | None = None,
    prefetch_batches: int = 2,
    separate_documents: bool = True,
) -> StreamBatches:
    """Returns training batches of a stream; arguments as for `train_batches`.

    `states` are those of all lanes at the position, which a run before has recorded; the number of lanes is that of its
    first processes. Each process reads the lanes of its own rows.

    Raises:
      ValueError: states of another form; while iterating, the stream cannot be read.
    """
    check_arguments(seed=seed, position=position, prefetch_batches=prefetch_batches)
    share = _share(sharding, batch_size=batch_size, seq_len=seq_len, separate_documents=separate_documents)
    # More lanes than rows would leave some without a row of a batch.
    num_lanes = len(states) if states else min(jax.process_count(), batch_size)
    if num_lanes > batch_size:
        raise ValueError(
            f"batch_size={batch_size}: the run reads {num_lanes} parts of the stream: give at least as many"
        )
    rows = LaneRows(stream, share.rows, share.shape, num_lanes=num_lanes, seed=seed, states=states)
    settings = {"position": position, "num_lanes": num_lanes, "prefetch_batches": prefetch_batches}
    return StreamBatches(rows, share, **settings)


def train_batches(
    dataset: Dataset,
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    sharding: NamedSharding,
    position: int = 0,
    prefetch_batches: int = 2,
    separate_documents: bool = True,
) -> Batches:
    """Returns shuffled training batches: all rows once per epoch, in another order each time.

    Args:
      dataset: the documents.
      batch_size: examples in a batch, over all devices and processes.
      seq_len: tokens in a row.
      seed: seed of the shuffle.
      sharding: sharding of the batch; a process reads the rows of its own devices.
      position: examples to skip, `Batches.position` of the run that is resumed. The batch size and the number of
        processes may differ from that run's.
      prefetch_batches: batches to prefetch; 0 reads each on demand.
      separate_documents: whether batches have `segments`, the document of each token.

    Raises:
      ValueError: the batch does not divide over the devices, a number is out of its range; while iterating, the file of
        the tokens changed.
    """
    with extra("train"):
        import grain

    check_arguments(seed=seed, position=position, prefetch_batches=prefetch_batches)
    part = dataset.train
    share = _share(sharding, batch_size=batch_size, seq_len=seq_len, separate_documents=separate_documents)
    # Grain's seeds have 32 bits, and consecutive ones share the orders of epochs.
    seed_32 = int(np.random.SeedSequence(seed).generate_state(1)[0])
    order = grain.MapDataset.range(part.num_rows(seq_len=seq_len)).shuffle(seed=seed_32).repeat()

    def read(start: int) -> dict[str, np.ndarray]:
        rows = np.array([order[start + row] for row in share.rows.tolist()])
        return part.cut_rows(rows, seq_len=seq_len)

    # An element is a batch, by the number of its first example: a run goes on at any, with any size of batch.
    starts = grain.MapDataset.range(position, sys.maxsize, batch_size).map(read)
    options = grain.ReadOptions(num_threads=min(prefetch_batches, _MAX_THREADS), prefetch_buffer_size=prefetch_batches)
    return Batches(iter(starts.to_iter_dataset(options)), share, position=position)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ValidationBatches(Sequence[Batch]):
    """A sequence of fixed batches, read on demand."""

    part: Part  # the tokens
    rows: np.ndarray  # the rows of each batch, -1 for padding: `[num_batches, batch_size]`
    seq_len: int  # tokens in a row
    share: _Share  # the rows of a batch that this process reads

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return dataclasses.replace(self, rows=self.rows[index])
        return self.share.assemble(self.part.cut_rows(self.rows[index][self.share.rows], seq_len=self.seq_len))


def validation_batches(
    dataset: Dataset,
    *,
    num_batches: int,
    batch_size: int,
    seq_len: int,
    sharding: NamedSharding,
    separate_documents: bool = True,
) -> ValidationBatches:
    """Returns validation batches: evenly spaced rows of the validation part, the same each time.

    A part with too few rows gives fewer batches, the last one padded with rows of weight 0.

    Raises:
      ValueError: the batch does not divide over the devices.
    """
    check_arguments(num_batches=num_batches)
    share = _share(sharding, batch_size=batch_size, seq_len=seq_len, separate_documents=separate_documents)
    available, requested = dataset.validation.num_rows(seq_len=seq_len), num_batches * batch_size
    rows = np.linspace(0, available - 1, min(available, requested)).astype(np.int64)
    padding = np.full(-len(rows) % batch_size, NO_ROW)
    rows = np.concatenate([rows, padding]).reshape(-1, batch_size)
    return ValidationBatches(part=dataset.validation, rows=rows, seq_len=seq_len, share=share)


class BatchBuffers:
    """Reuses the device memory of batches, so that it does not fragment.

    JAX cannot copy from the host into an existing array. So a batch is copied on the device into the donated buffers of
    its shape, and its own memory is freed at once: the runtime allocates and frees blocks of the same size. Each shape
    of batch, such as that of an evaluation, has its own buffers. This costs the memory of one more batch per shape, and
    a copy on the device.

    The next `fill` with a shape deletes the arrays that the last one returned for it.

    Example:
      >>> buffers = zero.BatchBuffers()
      >>> buffers.fill(zero.shard_batch(batch, mesh=mesh))["x"].shape
      (16, 64)
    """

    def __init__(self) -> None:
        """Allocates nothing yet."""
        self._buffers: dict[Any, list[jax.Array]] = {}
        self._write = jax.jit(_write, donate_argnums=0)

    def fill(self, batch: PyTree) -> PyTree:
        """Copies a batch into the buffers of its shape, and deletes it.

        Args:
          batch: a pytree of `jax.Array`s with the shardings of the step's batch. Other leaves, and PRNG keys, are
            returned as they are.

        Returns:
          The batch in its buffers, with the same shapes, dtypes and shardings.
        """
        leaves, tree = jax.tree.flatten(batch)
        indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array) and not is_key(leaf)]
        arrays = [leaves[i] for i in indices]
        key = tree, tuple((i, x.shape, x.dtype, x.sharding) for i, x in zip(indices, arrays, strict=True))
        # Taken out before they are donated: if the write fails, deleted buffers are not found here again.
        buffers = self._buffers.pop(key, None) or [jnp.zeros(x.shape, x.dtype, device=x.sharding) for x in arrays]
        filled = self._write(buffers, arrays)
        for x in arrays:
            x.delete()  # the runtime keeps the memory until the copy is done
        self._buffers[key] = filled
        for i, x in zip(indices, filled, strict=True):
            leaves[i] = x
        return tree.unflatten(leaves)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, over all devices."""
        return sum(x.nbytes for buffers in self._buffers.values() for x in buffers)


def _write(buffers: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
    # An update in place of all elements: `lambda old, new: new` would return the input arrays.
    return [lax.dynamic_update_slice(old, new, (0,) * new.ndim) for old, new in zip(buffers, arrays, strict=True)]
