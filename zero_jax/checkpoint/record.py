"""The record of a checkpoint: step, loss, and the shape, dtype and fingerprint of each leaf, as JSON.

It is validated field by field: any program may have written the file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from zero_jax.core.files import untrusted
from zero_jax.core.files.system_errors import with_remedy
from zero_jax.core.text_tables import is_unicode, printable, quoted

FORMAT = "zero_jax 1"
STATE, RECORD = "state", "record"  # the two items of a step's folder
RECORD_FILE = f"{RECORD}/metadata"
COMMITTED = "commit_success.txt"  # in a bucket, the last object of a checkpoint
REPLACED = ".zero_jax-replaced"  # ends the name of an older checkpoint of a step, while the newer one gets its own
STEP = re.compile(rf"step_(\d+)(?:{re.escape(REPLACED)})?")
_CLASSES = "zero_jax.opt_state_classes"
_MAX_RECORD_BYTES = 1 << 26
_PLAIN_BYTES = frozenset({"bool", "int8", "uint8"})


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete, damaged, or of another program.

    Example:
      >>> try:
      ...     zero.restore(folder, init_fn=init_fn, tx=tx, mesh=mesh, config=config)
      ... except zero.CheckpointError:
      ...     print("no checkpoint yet")
      no checkpoint yet
    """


class CheckpointRemoved(CheckpointError):
    """A checkpoint that a run has deleted or saved again while it was read."""

    def __init__(self, path: epath.Path) -> None:
        shared = ", or give all processes a folder that they share" if jax.process_count() > 1 else ""
        super().__init__(
            f"{path} was deleted, or saved again, while it was read: read again, or let the run that saves there keep "
            f"more checkpoints (keep_last){shared}"
        )


def resolve_folder(directory: str | os.PathLike[str]) -> epath.Path:
    """Returns a folder as an absolute path, or as the URL that it is.

    Example:
      >>> zero.checkpoint.resolve_folder(".").is_absolute()
      True
    """
    # An empty text, as of a variable that is not set, would be the current folder.
    if not isinstance(directory, str | os.PathLike) or os.fspath(directory) == "" or "\0" in os.fsdecode(directory):
        raise ValueError(f"directory={directory!r} is not a path: give the folder of the checkpoints")
    path = epath.Path(directory if untrusted.is_bucket(directory) else untrusted.user_path(directory).absolute())
    if not is_unicode(os.fspath(path)):  # tensorstore takes no other names
        raise ValueError(
            f"{printable(path)} is no Unicode text, as the paths of checkpoints are: choose another folder"
        )
    return path


def step_path(directory: epath.Path, step: int) -> epath.Path:
    """Returns the folder of a step's checkpoint.

    Example:
      >>> zero.checkpoint.step_path(zero.checkpoint.resolve_folder(folder), 100).name
      'step_00000100'
    """
    return directory / f"step_{step:08d}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedLeaf:
    """The shapes, dtypes and fingerprint of a saved leaf."""

    shape: tuple[int, ...]  # global shape, as the train state has it
    dtype: str  # dtype as the train state has it; `key<threefry2x32>` for PRNG keys of that kind
    stored_shape: tuple[int, ...]  # shape in the files
    stored_dtype: str  # dtype in the files
    fingerprint: int  # see `zero_jax.checkpoint.fingerprint`

    @property
    def nbytes(self) -> int:
        """Bytes in memory, in the stored form."""
        return int(np.prod(self.stored_shape, dtype=np.int64)) * jnp.dtype(self.stored_dtype).itemsize

    @property
    def is_key(self) -> bool:
        """Whether the leaf holds PRNG keys."""
        return self.dtype.startswith("key<")

    @property
    def host_dtype(self) -> str:
        """The dtype on the host, where PRNG keys are their words."""
        return self.stored_dtype if self.is_key else self.dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """The record of a checkpoint."""

    path: epath.Path  # the step's folder
    step: int  # steps done
    loss: float | None  # validation loss at that step, or None
    leaves: Mapping[str, SavedLeaf]  # the leaves by name
    # Classes of nodes of the optimizer state by path; releases up to 0.2.0 saved none
    classes: Mapping[str, str] = dataclasses.field(repr=False)
    extra: Mapping[str, Any]  # what the run itself recorded, such as its config and the position in the data
    # Tells its folder from others that have its name later.
    folder_id: str = dataclasses.field(repr=False, compare=False)

    def error(self, message: str) -> CheckpointError:
        """Returns the error for a part that cannot be read: `CheckpointRemoved` if the folder has been deleted."""
        return CheckpointError(message) if folder_id(self.path) == self.folder_id else CheckpointRemoved(self.path)


def folder_id(path: epath.Path) -> str:
    """Returns an id that distinguishes a step's folder from later ones of that name; '' if there is no folder."""
    try:
        if untrusted.is_bucket(path):
            return str((path / COMMITTED).stat().mtime) if (path / COMMITTED).exists() else ""
        status = os.stat(path)
        # A rename keeps the inode; a folder that is made anew under the name has another.
        return f"{status.st_dev}:{status.st_ino}"
    except OSError:
        return ""


def record_to_json(
    *,
    step: int,
    loss: float | None,
    leaves: Mapping[str, SavedLeaf],
    classes: Mapping[str, str],
    extra: Mapping[str, Any],
) -> bytes:
    """Encodes a record as JSON with a checksum, arrays as lists; raises `TypeError` for what JSON has no form for."""
    described = {name: dataclasses.asdict(leaf) for name, leaf in leaves.items()}
    extra = {**extra, _CLASSES: dict(classes)}  # there, as earlier releases refuse other fields than theirs
    record = {"format": FORMAT, "step": step, "loss": loss, "leaves": described, "extra": extra}
    # As it will be read: tuples are lists, keys are strings, of which two may be equal then.
    record = json.loads(json.dumps(record, default=_plain), object_pairs_hook=untrusted.unique_keys)
    encoded = json.dumps({**record, "checksum": untrusted.json_checksum(record)}).encode()
    if len(encoded) > _MAX_RECORD_BYTES:
        raise ValueError(
            f"the record has {len(encoded):,} bytes, more than {_MAX_RECORD_BYTES:,}: save less in `extra`"
        )
    return encoded


def _plain(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray, jax.Array)):  # a loss, the state of a random generator
        return np.asarray(jax.device_get(value)).tolist()
    raise TypeError(f"`extra` has a value of type {type(value).__name__}: give what JSON has, or arrays")


def read_record(path: epath.Path) -> Record:
    """Reads the record of a step's folder; raises `CheckpointRemoved` if there is no such folder (any more)."""
    # The id before the read: it is another one of a folder that is replaced meanwhile.
    file, identity = path / RECORD_FILE, folder_id(path)
    try:
        content = untrusted.parse_json(untrusted.read_file(file, limit_bytes=_MAX_RECORD_BYTES))
    except (FileNotFoundError, NotADirectoryError) as error:
        if not path.exists():
            raise CheckpointRemoved(path) from error
        names = first_names(path)
        names = f"; the folder holds {names}" if names else ""
        raise CheckpointError(f"{file} is missing{names}: this is not a complete checkpoint of zero_jax") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {with_remedy(error)}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read ({error}): the file is damaged or cut off") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        saved_format = content.get("format") if isinstance(content, dict) else None
        raise CheckpointError(
            f"{file} is of format {quoted(saved_format)}, and this release of zero_jax reads {FORMAT!r}"
        )
    checksum = content.pop("checksum", None)
    if checksum != untrusted.json_checksum(content):
        raise CheckpointError(f"{file} does not match its checksum: the file is damaged")
    try:
        untrusted.mapping(content, keys={"format", "step", "loss", "leaves", "extra"})
        extra = dict(untrusted.mapping(content["extra"]))
        classes = untrusted.mapping(extra.pop(_CLASSES, {}))
        record = Record(
            path=path,
            step=untrusted.whole_number(content["step"]),
            loss=None if content["loss"] is None else untrusted.number(content["loss"]),
            leaves={name: _leaf_from_json(name, x) for name, x in untrusted.mapping(content["leaves"]).items()},
            classes={name: untrusted.text(kind) for name, kind in classes.items()},
            extra=extra,
            folder_id=identity,
        )
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


def file_key(name: str) -> str:
    """Returns the key of a leaf in the files: its name, with `%` behind a slash at its end, which tensorstore drops."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"leaf {name!r} of the state cannot be saved: its name is no Unicode text, rename it"
        ) from error
    return f"{name}%" if name.rstrip("%").endswith("/") else name


def is_bits(dtype: str) -> bool:
    """Returns whether values of a dtype are stored as their bits."""
    return not dtype.startswith("key<") and jnp.dtype(dtype).itemsize == 1 and dtype not in _PLAIN_BYTES


def _leaf_from_json(name: str, record: Any) -> SavedLeaf:
    try:
        fields = untrusted.mapping(record, keys={field.name for field in dataclasses.fields(SavedLeaf)})
        leaf = SavedLeaf(
            shape=untrusted.shape(fields["shape"]),
            dtype=untrusted.text(fields["dtype"]),
            stored_shape=untrusted.shape(fields["stored_shape"]),
            stored_dtype=untrusted.text(fields["stored_dtype"]),
            fingerprint=untrusted.whole_number(fields["fingerprint"], below=2**32),
        )
    except ValueError as error:
        raise ValueError(f"leaf {quoted(name)}: {error}") from error
    if leaf.is_key:
        key_dims = leaf.stored_shape[len(leaf.shape) :]
        fits = leaf.stored_dtype == "uint32" and leaf.stored_shape == (*leaf.shape, *key_dims) and len(key_dims) == 1
    else:
        stored = "uint8" if _is_number(leaf.dtype) and is_bits(leaf.dtype) else leaf.dtype
        fits = _is_number(leaf.dtype) and (leaf.stored_shape, leaf.stored_dtype) == (leaf.shape, stored)
    if not fits:
        stored = f"{leaf.stored_dtype}{list(leaf.stored_shape)}"
        why = printable(f"{leaf.dtype}{list(leaf.shape)} is never stored as {stored}")
        raise ValueError(f"leaf {quoted(name)}: {why}")
    return leaf


def _is_number(name: str) -> bool:
    """Returns whether a text is the name of a numeric dtype of JAX, or of bool."""
    try:
        dtype = jnp.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        return False
    # `jnp.dtype` also takes other names, such as `f4` and `>i2`, which no save writes.
    return dtype.name == name and (dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number))


def first_names(folder: epath.Path) -> str:
    """Returns the first five names in a folder, for an error message."""
    try:
        names = sorted(printable(path.name) for path in folder.iterdir())
    except OSError:
        return ""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
