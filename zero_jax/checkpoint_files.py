"""The files of a checkpoint: which steps a folder holds, a step's record, and slices of its leaves."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore
from etils import epath
from orbax.checkpoint import path as orbax_path

from zero_jax.fingerprint import host_fingerprint
from zero_jax.saved_state import SavedLeaf, leaves_from_json, leaves_to_json

FORMAT = "zero_jax 1"
STATE, RECORD = "state", "record"  # the two items of a step's folder
_RECORD_FILE = f"{RECORD}/metadata"
_STEP = re.compile(r"step_(\d+)")
_CACHE_BYTES = 1 << 27
_SLICE_BYTES = 1 << 26
_HASHED_BYTES = 1 << 22  # hashing takes several times the memory of what is hashed


class CheckpointError(ValueError):
    """A checkpoint that is absent, cut off, damaged, or none of zero_jax's."""


def resolve(directory: str | os.PathLike[str]) -> epath.Path:
    """Returns a folder as an absolute path, or as the URL that it is."""
    if not isinstance(directory, str | os.PathLike):
        raise ValueError(f"directory={directory!r} is no path: give the folder of the checkpoints")
    path = epath.Path(directory).expanduser()
    return path if "://" in os.fspath(directory) else epath.Path(pathlib.Path(path).absolute())


def step_path(directory: epath.Path, step: int) -> epath.Path:
    """Returns the folder of a step's checkpoint."""
    return directory / f"step_{step:08d}"


def list_steps(directory: str | os.PathLike[str]) -> list[int]:
    """Returns the steps that a folder holds complete saves of, in order; none if there is no such folder."""
    directory = resolve(directory)
    if not directory.is_dir():
        return []
    found = {path: _STEP.fullmatch(path.name) for path in directory.iterdir()}
    return sorted(int(match[1]) for path, match in found.items() if match and _is_whole(path))


def _is_whole(path: epath.Path) -> bool:
    return path.is_dir() and orbax_path.step.is_checkpoint_finalized(path)


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """Returns the newest step that a folder holds a complete save of, or None."""
    return max(list_steps(directory), default=None)


def steps_folder(path: str | os.PathLike[str]) -> epath.Path:
    """Returns the folder of checkpoints that a run's folder has in it; any other folder as it is."""
    inner = resolve(path) / "checkpoints"
    return inner if inner.is_dir() else resolve(path)


def find(path: str | os.PathLike[str], step: int | None = None) -> epath.Path:
    """Finds a step's folder from a run's folder, its folder of checkpoints or the step's folder itself.

    Args:
      path: one of these.
      step: the step; None takes the newest.

    Raises:
      CheckpointError: there is none.
    """
    folder = resolve(path)
    if step is None and (folder / _RECORD_FILE).exists():
        return folder
    if _STEP.fullmatch(folder.name) and folder.is_dir() and not list_steps(folder):
        if step not in (None, int(folder.name.removeprefix("step_"))):
            raise CheckpointError(f"{folder} is not the checkpoint of step {step}: give the folder above it")
        return folder
    folder = steps_folder(folder)
    steps = list_steps(folder)
    if not steps or step not in (None, *steps):
        raise CheckpointError(f"{missing(folder, steps, step)}: give a run's folder, or another step")
    return step_path(folder, steps[-1] if step is None else step)


def missing(folder: epath.Path, steps: Sequence[int], step: int | None) -> str:
    """Says what a folder holds instead of a checkpoint."""
    if steps:
        return f"no checkpoint of step {step} in {folder}, which has steps {', '.join(map(str, steps))}"
    if not folder.is_dir():
        return f"there is no folder {folder}"
    names = sorted(path.name for path in folder.iterdir())
    held = f"it holds {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else "it is empty"
    return f"no checkpoint in {folder} ({held})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What lies beside the arrays of a checkpoint.

    Attributes:
      path: the step's folder.
      step: steps done.
      loss: validation loss at that step, or None.
      leaves: the leaves by name.
      extra: what the run itself recorded: config, data position, and so on.
    """

    path: epath.Path
    step: int
    loss: float | None
    leaves: Mapping[str, SavedLeaf]
    extra: Mapping[str, Any]


def record_to_json(
    *, step: int, loss: float | None, leaves: Mapping[str, SavedLeaf], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the record as it is saved, with a checksum of its own."""
    record = {"format": FORMAT, "step": step, "loss": loss, "leaves": leaves_to_json(leaves), "extra": dict(extra)}
    record = json.loads(json.dumps(record))  # as it will be read: tuples are lists, keys are strings
    return {**record, "checksum": _checksum(record)}


def _checksum(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def read_record(path: epath.Path) -> Record:
    """Reads the record of a step's folder.

    Raises:
      CheckpointError: no record, one that is damaged, or one of another program.
    """
    file = path / _RECORD_FILE
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError as error:
        names = sorted(x.name for x in path.iterdir()) if path.is_dir() else []
        held = f"; the folder holds {', '.join(names[:5])}" if names else ""
        raise CheckpointError(f"{file} is missing{held}: this is no checkpoint of zero_jax, or part of one") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): the file is damaged or cut off") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        named = found.get("format") if isinstance(found, dict) else None
        raise CheckpointError(f"{file} is of format {named!r}, and this release of zero_jax reads {FORMAT!r}")
    checksum = found.pop("checksum", None)
    if checksum != _checksum(found):
        raise CheckpointError(f"{file} does not have the checksum that it says: the file is damaged")
    leaves = leaves_from_json(found["leaves"])
    return Record(path=path, step=found["step"], loss=found["loss"], leaves=leaves, extra=found["extra"])


def make_context(cache_bytes: int = _CACHE_BYTES) -> tensorstore.Context:
    """Returns the cache that the reads of one task share, so that a chunk is not read once for each device."""
    return tensorstore.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})


def open_leaf(record: Record, name: str, context: tensorstore.Context) -> tensorstore.TensorStore:
    """Opens a leaf for reading.

    Raises:
      CheckpointError: the leaf is not there, or not as the record says.
    """
    leaf = record.leaves[name]
    kvstore = {"driver": "ocdbt", "base": _base(record.path), "path": f"{name}/"}
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


def _base(path: epath.Path) -> str | dict[str, str]:
    folder = os.fspath(path / STATE) + "/"
    return folder if "://" in folder else {"driver": "file", "path": folder}


def damaged(record: Record, name: str, why: object) -> CheckpointError:
    """Returns the error for a leaf that cannot be read: the leaf, its files, and what went wrong."""
    files = ", ".join(data_files(record, name)) or "not to be found out"
    reason = re.sub(r" \[(tensorstore_spec|source locations|domain)=.*", "", str(why), flags=re.DOTALL)
    return CheckpointError(f"leaf {name!r} of {record.path} is damaged or cut off: {reason} (its data files: {files})")


def data_files(record: Record, name: str) -> list[str]:
    """Returns the files, inside the checkpoint's folder, that hold a leaf; none if the index itself is damaged."""
    try:
        base = tensorstore.KvStore.open(_base(record.path)).result()
        version = tensorstore.ocdbt.dump(base).result()["versions"][-1]
        return sorted(f"{STATE}/{file}" for file in _files_of(base, version["root"]["location"], f"{name}/".encode()))
    except (ValueError, KeyError, IndexError):
        return []


def _files_of(base: tensorstore.KvStore, location: str, prefix: bytes, before: bytes = b"") -> set[str]:
    """Walks a B-tree of OCDBT; returns the files of the values below a prefix, the node itself for those inside it."""
    found: set[str] = set()
    node = tensorstore.ocdbt.dump(base, location).result()
    for entry in node["entries"]:
        key = before + entry["key"]
        if node["height"]:
            below = before + entry.get("subtree_common_prefix", b"")
            if key[: len(prefix)] <= prefix:
                found |= _files_of(base, entry["location"], prefix, below)
        elif key.startswith(prefix):
            found.add(_file(entry.get("indirect_value", location)))
    return found


def _file(location: str) -> str:
    """Takes the file out of `kind:folder:file:offset:length`."""
    return location.split(":", 1)[1].rsplit(":", 2)[0].replace(":", "")


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
    problems, context = [], make_context(0)
    for name in record.leaves:
        try:
            for _ in read_slices(record, name, context):
                pass
        except CheckpointError as error:
            problems.append(str(error))
    return problems
