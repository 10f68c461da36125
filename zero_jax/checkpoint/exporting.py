"""Exports params and model state of a checkpoint as safetensors files, in bounded memory."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import pathlib
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from zero_jax.checkpoint.finding import check_outside, find_checkpoint
from zero_jax.checkpoint.leaf_files import check_files, read_slices
from zero_jax.checkpoint.record import Record, SavedLeaf
from zero_jax.core.files.partial_folder import partial_folder, publish
from zero_jax.core.files.safetensors import DTYPES, INDEX, Tensor, create_files, find_files
from zero_jax.core.files.untrusted import user_path
from zero_jax.core.signatures import check_arguments
from zero_jax.core.text_tables import Report, quoted
from zero_jax.core.tree import cast_values
from zero_jax.core.variables import MODEL_STATE

_UNITS: Mapping[str, int] = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported(Report):
    """The files of an export, the index last, with their number and bytes of tensors."""

    files: tuple[str, ...]
    step: int
    num_tensors: int
    num_bytes: int

    def __str__(self) -> str:
        folder = pathlib.Path(self.files[0]).parent
        names = ", ".join(pathlib.Path(file).name for file in self.files[:4]) + (", ..." if self.files[4:] else "")
        return f"step {self.step}: {self.num_tensors} tensors, {self.num_bytes:,} bytes, in {folder} ({names})"


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    ema: bool = False,
    force: bool = False,
) -> Exported:
    """Writes the params and the model state of a checkpoint as safetensors files.

    The leaf `params/a/b` becomes the tensor `a.b`, and `model_state/a/b` becomes `model_state.a.b`. Leaves are read and
    written in slices of at most 64 MiB and compared with their fingerprints on the way. What was written appears in
    `out` when all of it is there.

    Args:
      path: a run's folder, its folder of checkpoints, or the folder of one step.
      out: the folder to write into.
      step: the step; None takes the newest.
      dtype: floating dtype of the params in the files; None leaves them as they were saved, as model state always is.
      max_shard_bytes: bytes of tensors in a file; a larger tensor has a file of its own.
      ema: take the params' moving average, which the optimizer's state holds, instead of the params.
      force: write over an older export.

    Raises:
      CheckpointError: no checkpoint, or a damaged one.
      ValueError: an export is there already, a dtype that the format does not have, no moving average, no space.

    Example:
      >>> with zero.Checkpointer(folder) as saved:
      ...     saved.save(1, state)
      >>> zero.checkpoint.export(folder, folder / "exported", dtype="bfloat16").num_tensors
      2
    """
    check_arguments(out=out, max_shard_bytes=max_shard_bytes)
    record, folder = _found(path, step), user_path(out).absolute()
    check_files(record)
    tensors = _tensors(record, dtype=dtype, ema=ema)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose another folder")
    check_outside(folder)
    # Of the names that an export has: other files in the folder are not the export's to replace.
    old = find_files(folder)
    if old and not force:
        raise ValueError(f"{folder} holds {old[0].name} already: choose another folder, or write over it (--force)")
    with partial_folder(folder) as partial:
        metadata = {"step": str(record.step)}
        with create_files(partial, [*tensors.values()], max_bytes=max_shard_bytes, metadata=metadata) as stored:
            for leaf, tensor in tensors.items():
                for index, part in read_slices(record, leaf):
                    values = cast_values(part, tensor.dtype, leaf=leaf, remedy="export as bfloat16")
                    # A map for each slice: written pages are memory of this process as long as their map is open.
                    stored[tensor.name].open("r+")[index] = values
        written = sorted(path.name for path in partial.iterdir())  # the index is the last one
        # Files that are not replaced would be read beside the new ones. An index would be of files of both, if this is
        # cut off while they are replaced one by one.
        publish(partial, folder, removed=[x for x in old if x.name not in written or x.name == INDEX])
    files, num_bytes = tuple(str(folder / name) for name in written), sum(x.num_bytes for x in tensors.values())
    return Exported(files=files, step=record.step, num_tensors=len(tensors), num_bytes=num_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedParams:
    """The params of a checkpoint, to be read in slices on the host.

    Attributes:
      model: what the run recorded of its model, or None.
      leaves: the params by path, without `params/`.

    Example:
      >>> with zero.Checkpointer(folder) as saved:
      ...     saved.save(1, state)
      >>> saved = zero.checkpoint.open_params(folder)
      >>> [x.shape for _, x in saved.pieces("up")][:1]
      [(64, 64)]
    """

    model: Any
    leaves: Mapping[str, SavedLeaf]
    record: Record = dataclasses.field(repr=False)
    names: Mapping[str, str] = dataclasses.field(repr=False)

    def pieces(self, path: str) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """Reads slices of a param, and compares it with its fingerprint at the end."""
        return read_slices(self.record, self.names[path])


def open_params(path: str | os.PathLike[str], *, step: int | None = None, ema: bool = False) -> SavedParams:
    """Opens the params of a checkpoint, or their moving average (`ema`); arguments as for `export`.

    Raises:
      CheckpointError: no checkpoint, or a damaged one.
      ValueError: no moving average.

    Example:
      >>> with zero.Checkpointer(folder) as saved:
      ...     saved.save(1, state)
      >>> sorted(zero.checkpoint.open_params(folder).leaves)
      ['down', 'up']
    """
    record = _found(path, step)
    check_files(record)
    names = {path: _ema_leaf(record, name) if ema else name for name, path in _in_group(record, "params").items()}
    config = record.extra.get("config")
    return SavedParams(
        model=config.get("model") if isinstance(config, Mapping) else None,
        leaves={path: record.leaves[name] for path, name in names.items()},
        record=record,
        names=names,
    )


def parse_size(text: str) -> int:
    """Reads a number of bytes such as `5GB` or `512MiB`.

    Raises:
      ValueError: the text is not a size.

    Example:
      >>> zero.checkpoint.parse_size("5GB"), zero.checkpoint.parse_size("512MiB")
      (5000000000, 536870912)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", text, re.IGNORECASE)
    size = float(match[1]) * _UNITS[(match[2] or "").lower()] if match else 0
    if not 1 <= size < math.inf:
        raise ValueError(f"size {text!r}: give a number of bytes such as 5GB or 512MiB")
    return int(size)


def _found(path: str | os.PathLike[str], step: int | None) -> Record:
    record, passed_over = find_checkpoint(path, step)
    for reason in passed_over:
        warnings.warn(f"checkpoint passed over: {reason}", stacklevel=3)
    return record


def _tensors(record: Record, *, dtype: str | None, ema: bool) -> dict[str, Tensor]:
    """Returns the tensors to write by the leaf with their values: the params in their order, then the model state."""
    if dtype is not None and not (dtype in DTYPES and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)):
        floats = [name for name in DTYPES if "float" in name]
        raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(floats)}, or none to leave dtypes as they are")
    tensors = {}
    for group, cast_to in (("params", dtype), (MODEL_STATE, None)):
        for name in _in_group(record, group):
            leaf = _ema_leaf(record, name) if ema and group == "params" else name
            tensors[leaf] = _tensor(leaf, record.leaves[leaf], name, cast_to)
    twice = [name for name, count in collections.Counter(x.name for x in tensors.values()).items() if count > 1]
    if twice:
        raise ValueError(f"several params would be called {quoted(min(twice))}: rename one of them in the model")
    return tensors


def _tensor(leaf: str, saved: SavedLeaf, param: str, dtype: str | None) -> Tensor:
    own_dtype = saved.host_dtype
    target = dtype if dtype is not None and jnp.issubdtype(jnp.dtype(own_dtype), jnp.floating) else own_dtype
    if target not in DTYPES:
        raise ValueError(
            f"leaf {quoted(leaf)} has dtype {target}, which safetensors files do not have: "
            "give --dtype for floats, or export without that leaf"
        )
    name = param.removeprefix("params").removeprefix("/").replace("/", ".") or "params"
    return Tensor(name=name, shape=saved.stored_shape, dtype=target)


def _in_group(record: Record, group: str) -> dict[str, str]:
    """Returns the names of a group's leaves with their paths in it, which for a single array is ''."""
    names = (name for name in record.leaves if name == group or name.startswith(f"{group}/"))
    return {name: name.removeprefix(group).removeprefix("/") for name in names}


def _ema_leaf(record: Record, param: str) -> str:
    ending = "/ema" + param.removeprefix("params")
    names = [name for name in record.leaves if name.startswith("opt_state/") and name.endswith(ending)]
    names = [name for name in names if record.leaves[name].shape == record.leaves[param].shape]
    if len(names) != 1:
        averages = f"{len(names)} of {param!r} ({', '.join(names)})" if names else f"none of {param!r}"
        raise ValueError(
            f"--ema: the optimizer's state at {record.path} holds {averages}: export the params without --ema"
        )
    return names[0]
