"""The files of a checkpoint: which steps a folder holds, a step's record, and slices of its leaves."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
import tensorstore
from etils import epath

from zero_jax.checkpoint import ocdbt
from zero_jax.checkpoint.fingerprint import host_fingerprint
from zero_jax.checkpoint.record import (
    RECORD_FILE,
    STATE,
    STEP,
    CheckpointError,
    Record,
    held_in,
    is_bucket,
    read_record,
    resolve,
    step_path,
)
from zero_jax.core.untrusted import irregular

COMMITTED = "commit_success.txt"  # in a bucket, the last object of a checkpoint
_MAX_INDEX_BYTES = 1 << 26
_CACHE_BYTES = 1 << 27
_SLICE_BYTES = 1 << 26
_HASHED_BYTES = 1 << 22  # hashing takes several times the memory of what is hashed


def candidates(directory: str | os.PathLike[str]) -> list[int]:
    """Returns the steps that a folder has checkpoints of, going by names, in order; none if there is no such folder.

    What a name promises is not looked at, but for saves to buckets that were cut off.

    Raises:
      CheckpointError: the folder cannot be read.
    """
    directory = resolve(directory)
    try:
        names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
        steps = [int(match[1]) for match in map(STEP.fullmatch, names) if match]
        paths = {step: step_path(directory, step) for step in steps}
        return sorted(step for step, path in paths.items() if path.name in names and _is_finished(path))
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read ({error.strerror or error})") from error


def _is_finished(path: epath.Path) -> bool:
    return path.is_dir() and (not is_bucket(path) or (path / COMMITTED).exists())


def newest(directory: str | os.PathLike[str]) -> tuple[Record | None, list[str]]:
    """Returns the record of the newest checkpoint that says what its folder says, and why newer ones do not."""
    directory, problems = resolve(directory), []
    for step in reversed(candidates(directory)):
        try:
            return read_record(step_path(directory, step)), problems
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems


def list_steps(directory: str | os.PathLike[str]) -> list[int]:
    """Returns the steps that a folder holds complete saves of, in order; none if there is no such folder.

    Folders whose record cannot be read, or is of another step, are left out. Arrays are not read.
    """
    directory, steps = resolve(directory), []
    for step in candidates(directory):
        with contextlib.suppress(CheckpointError):
            steps.append(read_record(step_path(directory, step)).step)
    return steps


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """Returns the newest step that a folder holds a complete save of, or None; see `list_steps`."""
    record, _ = newest(directory)
    return record.step if record else None


def steps_folder(path: str | os.PathLike[str]) -> epath.Path:
    """Returns the folder of checkpoints that a run's folder has in it; any other folder as it is."""
    inner = resolve(path) / "checkpoints"
    return inner if inner.is_dir() else resolve(path)


def find(path: str | os.PathLike[str], step: int | None = None) -> tuple[Record, list[str]]:
    """Finds a checkpoint from a run's folder, its folder of checkpoints or the step's folder itself.

    Args:
      path: one of these.
      step: the step; None takes the newest whose record is whole and says what its folder says.

    Returns:
      Its record, and why newer ones were passed over.

    Raises:
      CheckpointError: there is none.
    """
    folder = resolve(path)
    if step is None and (folder / RECORD_FILE).exists():
        return read_record(folder), []
    if STEP.fullmatch(folder.name) and folder.is_dir() and not candidates(folder):
        if step not in (None, int(folder.name.removeprefix("step_"))):
            raise CheckpointError(f"{folder} is not the checkpoint of step {step}: give the folder above it")
        return read_record(folder), []
    folder = steps_folder(folder)
    steps = candidates(folder)
    if not steps or step not in (None, *steps):
        raise CheckpointError(f"{missing(folder, steps, step)}: give a run's folder, or another step")
    if step is not None:
        return read_record(step_path(folder, step)), []
    record, problems = newest(folder)
    if record is None:
        raise CheckpointError(none_whole(folder, problems))
    return record, problems


def none_whole(folder: epath.Path, problems: Sequence[str]) -> str:
    """Says that all checkpoints of a folder are damaged."""
    return f"no whole checkpoint in {folder}:\n" + "\n".join(f"- {line}" for line in problems)


def missing(folder: epath.Path, steps: Sequence[int], step: int | None) -> str:
    """Says what a folder holds instead of a checkpoint."""
    if steps:
        return f"no checkpoint of step {step} in {folder}, which has steps {', '.join(map(str, steps))}"
    if not folder.is_dir():
        return f"there is no folder {folder}"
    held = held_in(folder)
    return f"no checkpoint in {folder} ({f'it holds {held}' if held else 'it is empty'})"


def check_files(record: Record) -> None:
    """Raises a `CheckpointError` where reading a local checkpoint could take for ever, or all memory.

    It has anything but files, or the index, which is read whole, is far too large.
    """
    if is_bucket(record.path):
        return
    problems = irregular(record.path)
    index = record.path / STATE / "manifest.ocdbt"
    if not problems and index.exists() and index.stat().length > _MAX_INDEX_BYTES:
        problems = [f"{STATE}/{index.name} has {index.stat().length:,} bytes"]
    if problems:
        raise CheckpointError(f"{record.path} is damaged: {'; '.join(problems[:5])}")


def check_index(record: Record) -> None:
    """Raises a `CheckpointError` where the files hold other leaves than the record says, or of another shape or dtype.

    Values are not read.
    """
    stored = {name for name, leaf in record.leaves.items() if 0 not in leaf.stored_shape}
    held = ocdbt.names(record.path / STATE, "/.zarray")
    if held is not None and held != stored:
        odd = sorted(held ^ stored)
        raise CheckpointError(
            f"{record.path} is damaged: of {', '.join(map(repr, odd[:5]))}{', ...' if odd[5:] else ''} there are "
            "values or a record, not both"
        )
    context = make_context(0)
    for name in stored:
        open_leaf(record, name, context)


def make_context(cache_bytes: int = _CACHE_BYTES) -> tensorstore.Context:
    """Returns the cache that the reads of one task share, so that a chunk is not read once for each device."""
    return tensorstore.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})


def open_leaf(record: Record, name: str, context: tensorstore.Context) -> tensorstore.TensorStore:
    """Opens a leaf for reading.

    Raises:
      CheckpointError: the leaf is not there, or not as the record says.
    """
    leaf = record.leaves[name]
    kvstore = {"driver": "ocdbt", "base": ocdbt.base(record.path / STATE), "path": f"{name}/"}
    spec = {"driver": "zarr", "kvstore": kvstore, "fill_missing_data_reads": False}
    try:
        store = tensorstore.open(spec, context=context, open=True, read=True).result()
    except ValueError as error:
        raise damaged(record, name, error) from error
    dtype = jnp.dtype(store.dtype.numpy_dtype).name
    if tuple(store.shape) != leaf.stored_shape or dtype != leaf.stored_dtype:
        found = f"{dtype}{list(store.shape)}, not {leaf.stored_dtype}{list(leaf.stored_shape)} as recorded"
        raise damaged(record, name, f"its files hold {found}")
    return store


def damaged(record: Record, name: str, why: object) -> CheckpointError:
    """Returns the error for a leaf that cannot be read: the leaf, its files, and what went wrong."""
    files = ", ".join(data_files(record, name)) or "not to be found out"
    reason = re.sub(r" \[(tensorstore_spec|source locations|domain)=.*", "", str(why), flags=re.DOTALL)
    return CheckpointError(f"leaf {name!r} of {record.path} is damaged or cut off: {reason} (its data files: {files})")


def data_files(record: Record, name: str) -> list[str]:
    """Returns the files, inside the checkpoint's folder, that hold a leaf; none if the index itself is damaged."""
    return [f"{STATE}/{file}" for file in ocdbt.data_files(record.path / STATE, f"{name}/".encode())]


def slices(
    shape: Sequence[int], itemsize: int, limit_bytes: int, chunk: Sequence[int] | None = None
) -> Iterator[tuple[slice, ...]]:
    """Cuts an array into slices of whole chunks, of at most so many bytes unless a chunk has more.

    They come in the order of their first elements, and take in the last dims first.
    """
    part = list(chunk or (1,) * len(shape))
    for dim in reversed(range(len(shape))):
        part_bytes = itemsize * int(np.prod(part, dtype=np.int64))
        part[dim] = max(1, min(shape[dim], part[dim] * max(1, limit_bytes // part_bytes)))
        if part[dim] < shape[dim]:
            break
    for starts in itertools.product(*(range(0, size, step) for size, step in zip(shape, part, strict=True))):
        yield tuple(
            slice(start, min(start + step, size)) for start, step, size in zip(starts, part, shape, strict=True)
        )


def read_slices(
    record: Record, name: str, context: tensorstore.Context, limit_bytes: int = _SLICE_BYTES
) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """Reads a leaf in its stored form, in slices that may come in any order, each chunk of its files once.

    Raises:
      CheckpointError: a slice cannot be read, or what was read does not have the leaf's fingerprint (told at the end).
    """
    leaf, total = record.leaves[name], 0
    if 0 not in leaf.stored_shape:
        store = open_leaf(record, name, context)
        chunk = [size or 1 for size in store.chunk_layout.read_chunk.shape or ()]
        for index in slices(leaf.stored_shape, jnp.dtype(leaf.stored_dtype).itemsize, limit_bytes, chunk):
            try:
                part = np.asarray(store[index].read().result())
            except ValueError as error:
                raise damaged(record, name, error) from error
            for inner in slices(part.shape, part.dtype.itemsize, _HASHED_BYTES):
                whole = [slice(a.start + b.start, a.start + b.stop) for a, b in zip(index, inner, strict=True)]
                total += host_fingerprint(part[inner], whole, leaf.stored_shape)
            yield index, part
    check_fingerprint(record, name, total % 2**32)


def check_fingerprint(record: Record, name: str, found: int) -> None:
    """Raises a `CheckpointError` where what was read is not what was saved."""
    if found != record.leaves[name].fingerprint:
        said = f"its fingerprint is {found:08x}, and {record.leaves[name].fingerprint:08x} was saved"
        raise damaged(record, name, said)


def verify(record: Record) -> list[str]:
    """Reads every leaf on the host, in bounded memory; returns what is wrong, leaf by leaf."""
    try:
        check_files(record)
    except CheckpointError as error:
        return [str(error)]
    problems, context = [], make_context(0)
    try:
        check_index(record)
    except CheckpointError as error:
        problems.append(str(error))
    for name in record.leaves:
        try:
            for _ in read_slices(record, name, context):
                pass
        except CheckpointError as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))
