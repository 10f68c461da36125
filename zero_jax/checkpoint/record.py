"""The record of a checkpoint: what lies beside its arrays, read as something that anything may have written."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath

from zero_jax.core.untrusted import (
    is_bucket,
    json_checksum,
    mapping,
    number,
    parse_json,
    read_file,
    shape,
    text,
    whole_number,
)

FORMAT = "zero_jax 1"
STATE, RECORD = "state", "record"  # the two items of a step's folder
RECORD_FILE = f"{RECORD}/metadata"
STEP = re.compile(r"step_(\d+)")
_MAX_RECORD_BYTES = 1 << 26
_PLAIN_BYTES = frozenset({"bool", "int8", "uint8"})


class CheckpointError(ValueError):
    """A checkpoint that is absent, cut off, damaged, or none of zero_jax's."""


def resolve_folder(directory: str | os.PathLike[str]) -> epath.Path:
    """Returns a folder as an absolute path, or as the URL that it is."""
    if not isinstance(directory, str | os.PathLike):
        raise ValueError(f"directory={directory!r} is no path: give the folder of the checkpoints")
    path = epath.Path(directory).expanduser()
    return path if is_bucket(directory) else epath.Path(pathlib.Path(path).absolute())


def step_path(directory: epath.Path, step: int) -> epath.Path:
    """Returns the folder of a step's checkpoint."""
    return directory / f"step_{step:08d}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedLeaf:
    """What is known of a saved leaf besides its values.

    Attributes:
      shape: global shape, as the train state has it.
      dtype: dtype as the train state has it; `key<threefry2x32>` for PRNG keys of that kind.
      stored_shape: shape in the files.
      stored_dtype: dtype in the files.
      fingerprint: see `zero_jax.checkpoint.fingerprint`.
    """

    shape: tuple[int, ...]
    dtype: str
    stored_shape: tuple[int, ...]
    stored_dtype: str
    fingerprint: int

    @property
    def nbytes(self) -> int:
        """Bytes in memory, in the stored form."""
        return int(np.prod(self.stored_shape, dtype=np.int64)) * jnp.dtype(self.stored_dtype).itemsize

    @property
    def is_key(self) -> bool:
        """Whether the leaf holds PRNG keys."""
        return self.dtype.startswith("key<")


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
) -> bytes:
    """Returns the record as it is saved, with a checksum of its own.

    Raises:
      ValueError: it would be larger than what is read.
      TypeError: there is no JSON for it.
    """
    record = {
        "format": FORMAT,
        "step": step,
        "loss": loss,
        "leaves": {name: dataclasses.asdict(leaf) for name, leaf in leaves.items()},
        "extra": dict(extra),
    }
    record = json.loads(json.dumps(record))  # as it will be read: tuples are lists, keys are strings
    encoded = json.dumps({**record, "checksum": json_checksum(record)}).encode()
    if len(encoded) > _MAX_RECORD_BYTES:
        raise ValueError(
            f"the record has {len(encoded):,} bytes, more than {_MAX_RECORD_BYTES:,}: save less in `extra`"
        )
    return encoded


def read_record(path: epath.Path) -> Record:
    """Reads the record of a step's folder.

    Raises:
      CheckpointError: no record, one that is damaged, of another step than the folder, or of another program.
    """
    file = path / RECORD_FILE
    try:
        found = parse_json(read_file(file, limit_bytes=_MAX_RECORD_BYTES))
    except (FileNotFoundError, NotADirectoryError) as error:
        held = first_names(path)
        held = f"; the folder holds {held}" if held else ""
        raise CheckpointError(f"{file} is missing{held}: this is no checkpoint of zero_jax, or part of one") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read ({error}): the file is damaged or cut off") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        named = str(found.get("format"))[:60] if isinstance(found, dict) else None
        raise CheckpointError(f"{file} is of format {named!r}, and this release of zero_jax reads {FORMAT!r}")
    checksum = found.pop("checksum", None)
    if checksum != json_checksum(found):
        raise CheckpointError(f"{file} does not have the checksum that it says: the file is damaged")
    try:
        record = _believed(path, found)
    except ValueError as error:
        raise CheckpointError(
            f"{file} is not a record that zero_jax writes ({error}): it was edited or forged"
        ) from error
    name = STEP.fullmatch(path.name)
    if name and int(name[1]) != record.step:
        raise CheckpointError(
            f"{path} is the checkpoint of step {record.step}, copied or renamed: it belongs at "
            f"{step_path(path.parent, record.step)}"
        )
    return record


def _believed(path: epath.Path, found: Mapping[str, Any]) -> Record:
    """Returns what a record says, each field of it checked."""
    mapping(found, keys={"format", "step", "loss", "leaves", "extra"})
    return Record(
        path=path,
        step=whole_number(found["step"]),
        loss=None if found["loss"] is None else number(found["loss"]),
        leaves=_leaves_from_json(found["leaves"]),
        extra=mapping(found["extra"]),
    )


def is_bits(dtype: str) -> bool:
    """Tells whether a dtype is stored as bits."""
    return not dtype.startswith("key<") and jnp.dtype(dtype).itemsize == 1 and dtype not in _PLAIN_BYTES


def _leaves_from_json(record: Any) -> dict[str, SavedLeaf]:
    """Reads the leaves of a record.

    Raises:
      ValueError: no record is written like this; names the leaf.
    """
    leaves = {}
    for name, leaf in mapping(record).items():
        try:
            leaves[name] = _leaf_from_json(leaf)
        except ValueError as error:
            raise ValueError(f"leaf {name!r}: {error}") from error
    return leaves


def _leaf_from_json(record: Any) -> SavedLeaf:
    found = mapping(record, keys={field.name for field in dataclasses.fields(SavedLeaf)})
    leaf = SavedLeaf(
        shape=shape(found["shape"]),
        dtype=text(found["dtype"]),
        stored_shape=shape(found["stored_shape"]),
        stored_dtype=text(found["stored_dtype"]),
        fingerprint=whole_number(found["fingerprint"], below=2**32),
    )
    if leaf.is_key:
        rest = leaf.stored_shape[len(leaf.shape) :]
        fits = leaf.stored_dtype == "uint32" and leaf.stored_shape == (*leaf.shape, *rest) and len(rest) == 1
    else:
        stored = "uint8" if _is_number(leaf.dtype) and is_bits(leaf.dtype) else leaf.dtype
        fits = _is_number(leaf.dtype) and (leaf.stored_shape, leaf.stored_dtype) == (leaf.shape, stored)
    if not fits:
        given = f"{leaf.stored_dtype}{list(leaf.stored_shape)}"
        raise ValueError(f"{leaf.dtype}{list(leaf.shape)} is never stored as {given}"[:300])
    return leaf


def _is_number(name: str) -> bool:
    """Tells whether a text is the name of a dtype that arrays of JAX have."""
    try:
        dtype = jnp.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        return False
    return dtype.name == name and (dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number))


def first_names(folder: epath.Path) -> str:
    """Returns the first names in a folder."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError:
        return ""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
