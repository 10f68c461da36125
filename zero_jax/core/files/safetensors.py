"""Safetensors files: headers that are checked, tensors as views of a file, files that are made before their tensors.

The format (https://github.com/huggingface/safetensors, "Format") is 8 bytes with the length of the header, a header in
JSON, and the tensors' bytes. The library `safetensors` takes and returns tensors in memory; here slices of them are
read and written in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import mmap
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zero_jax.core.files import untrusted
from zero_jax.core.files.system_errors import with_remedy
from zero_jax.core.text_tables import quoted

# Names of dtypes in the format's headers.
DTYPES: Mapping[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
MODEL_FILE = "model.safetensors"  # where it is the only one
INDEX = "model.safetensors.index.json"
_FILES = re.compile(rf"{re.escape(MODEL_FILE)}|{re.escape(INDEX)}|model-\d{{5,}}-of-\d{{5,}}\.safetensors")
_NAMES = {code: name for name, code in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # of the library
_METADATA = "__metadata__"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor of a file: its name there, and the name of its dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor(Tensor):
    """A tensor in a file, and the byte that it begins at."""

    path: pathlib.Path
    offset: int
    version: tuple[int, int] | None = None  # size and time of modification of the file whose header was read

    def check(self) -> None:
        """Raises `ValueError` if the file is gone, or has changed since its header was read."""
        try:
            is_same = self.version in (None, _version(os.stat(self.path)))
        except OSError as error:
            raise ValueError(f"{with_remedy(error)}: it was there when the reading began") from error
        if not is_same:
            raise ValueError(f"{self.path} changed while it was read: load again when it is written completely")

    def open(self, mode: Any = "r") -> np.ndarray:
        """Returns the tensor as a map of the file, of which only what is used is read ("r") or written ("r+")."""
        # mmap refuses an empty range.
        if 0 in self.shape:
            return np.empty(self.shape, jnp.dtype(self.dtype))
        self.check()  # a map beyond the end of a file would end the process
        mapped = np.memmap(self.path, jnp.dtype(self.dtype), mode, self.offset, self.shape or (1,))
        if mode != "r" and isinstance(mapped.base, mmap.mmap):
            # Pages that are written are mapped alone: Linux maps large folios around them, up to all of a file for a
            # column.
            mapped.base.madvise(mmap.MADV_RANDOM)
        return mapped.reshape(self.shape)


def read_header(path: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name; of the file only the header is read."""
    try:
        with untrusted.open_regular(path) as file:
            status = os.fstat(file.fileno())
            size = status.st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"its header would take {length:,} of its {size:,} bytes")
            header = untrusted.mapping(untrusted.parse_json(file.read(length), object_pairs_hook=untrusted.unique_keys))
        return _tensors(path, header, start=8 + length, version=_version(status))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {with_remedy(error)}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no complete safetensors file: {error}. Copy or download it again") from error


def _version(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _tensors(
    path: pathlib.Path, header: Mapping[str, Any], *, start: int, version: tuple[int, int]
) -> dict[str, StoredTensor]:
    tensors, end, size = {}, 0, version[0]
    entries = {name: entry for name, entry in header.items() if name != _METADATA}
    # The format has neither gaps nor overlaps: in the order of bytes, each tensor begins where the one before ends.
    for name, entry in sorted(entries.items(), key=lambda item: _offsets(*item)):
        first, last = _offsets(name, entry)
        if (dtype := _NAMES.get(untrusted.text(entry["dtype"]))) is None:
            raise ValueError(f"the dtype {quoted(entry['dtype'])} of {quoted(name)} is unknown")
        where = {"path": path, "offset": start + first, "version": version}
        tensor = StoredTensor(name=name, dtype=dtype, shape=untrusted.shape(entry["shape"]), **where)
        if first != end or last - first != tensor.num_bytes:
            raise ValueError(f"{quoted(name)} of shape {list(tensor.shape)} would be at bytes {first} to {last}")
        tensors[name], end = tensor, last
    if start + end != size:
        raise ValueError(f"it has {size:,} bytes, and its tensors end at {start + end:,}")
    return tensors


def _offsets(name: str, entry: Any) -> tuple[int, int]:
    if not (isinstance(entry, dict) and entry.keys() >= {"dtype", "shape", "data_offsets"}):
        raise ValueError(f"the entry of {quoted(name)} lacks dtype, shape or data_offsets")
    offsets = entry["data_offsets"]
    if not (isinstance(offsets, list) and len(offsets) == 2):
        raise ValueError(f"the data_offsets of {quoted(name)} are no pair")
    first, last = map(untrusted.whole_number, offsets)
    return first, last


def split_by_size(tensors: Sequence[Tensor], max_bytes: int, name: str = MODEL_FILE) -> dict[str, list[Tensor]]:
    """Assigns tensors to files by size, in their order; a larger tensor has a file of its own, a single file `name`."""
    files: list[list[Tensor]] = [[]]
    num_bytes = 0
    for tensor in tensors:
        if files[-1] and num_bytes + tensor.num_bytes > max_bytes:
            files.append([])
            num_bytes = 0
        files[-1].append(tensor)
        num_bytes += tensor.num_bytes
    if len(files) == 1:
        return {name: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": file for i, file in enumerate(files, 1)}


def find_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a folder that have the names of `create_files`, in order."""
    return sorted(path for path in folder.glob("model*") if _FILES.fullmatch(path.name))


def create(path: pathlib.Path, tensors: Sequence[Tensor], *, metadata: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Makes a file with a header and room for the tensors, and returns them by name, to be written in place."""
    # transformers refuses files without a `format` that it knows.
    header: dict[str, Any] = {_METADATA: {"format": "pt", **metadata}}
    end = 0
    for tensor in tensors:
        if tensor.name == _METADATA:
            raise ValueError(f"a tensor cannot be called {_METADATA!r}, which the format has for itself: rename it")
        offsets = [end, end + tensor.num_bytes]
        header[tensor.name] = {"dtype": DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
        end = offsets[1]
    content = json.dumps(header, separators=(",", ":")).encode()
    # The format pads a header with spaces, which JSON allows, so that tensors begin at a multiple of 8 bytes.
    content += b" " * (-len(content) % 8)
    start = 8 + len(content)
    with path.open("xb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.flush()
        if end and hasattr(os, "posix_fallocate"):  # a map of a file without space ends the process
            os.posix_fallocate(file.fileno(), 0, start + end)
        file.truncate(start + end)
    first = {tensor.name: start + header[tensor.name]["data_offsets"][0] for tensor in tensors}
    return {x.name: StoredTensor(path=path, offset=first[x.name], **vars(x)) for x in tensors}


@contextlib.contextmanager
def create_files(
    folder: pathlib.Path,
    tensors: Sequence[Tensor],
    *,
    max_bytes: int,
    metadata: Mapping[str, str],
    name: str = MODEL_FILE,
) -> Iterator[dict[str, StoredTensor]]:
    """Yields new tensors by name to write to, in files of at most `max_bytes`, with an index if several."""
    files = split_by_size(tensors, max_bytes, name)
    stored: dict[str, StoredTensor] = {}
    for file_name, of_file in files.items():
        stored |= create(folder / file_name, of_file, metadata=metadata)
    yield stored
    if len(files) > 1:
        total = sum(tensor.num_bytes for tensor in tensors)
        file_of = {tensor.name: file_name for file_name, of_file in files.items() for tensor in of_file}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        # After the files: an index never names a file that is not written.
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
