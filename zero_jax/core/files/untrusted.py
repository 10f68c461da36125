"""Reads untrusted files and JSON: bounded in size, and validated field by field."""

from __future__ import annotations

import collections
import errno
import json
import math
import os
import pathlib
import stat
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
from etils import epath

from zero_jax.core.text_tables import printable, quoted

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}


_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_POINTER_BYTES = 1024  # by its specification


def is_bucket(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is in a bucket, which has no locks, no rename and no folders."""
    return "://" in os.fspath(path)


def user_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns a local path with `~` as the user's home folder; where there is no such user, it is a name."""
    return pathlib.Path(os.path.expanduser(path))


def read_file(path: epath.Path, *, limit_bytes: int) -> bytes:
    """Reads a regular file of bounded size; never waits for a pipe or a device."""
    if is_bucket(path):
        if not path.exists():  # not every backend says so by an error that is known here
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        if (size := path.stat().length) > limit_bytes:
            raise ValueError(f"it has {size:,} bytes, more than the {limit_bytes:,} that are read")
        return path.read_bytes()
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        # `read` allocates what it is asked for; a file that grows meanwhile is read on.
        content = file.read(min(num_bytes, limit_bytes) + 1)
        if num_bytes < len(content) <= limit_bytes:
            content += file.read(limit_bytes + 1 - len(content))
    if len(content) > limit_bytes:
        raise ValueError(f"it has more than the {limit_bytes:,} bytes that are read")
    return content


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a local regular file to read its bytes; never waits for a pipe or a device."""
    # Before it is opened, too: to open a device, or a pipe with a writer, has effects.
    _check_kind(os.stat(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        _check_kind(status)  # it may be another file by now
        if status.st_size < _MAX_POINTER_BYTES and os.pread(descriptor, len(_POINTER), 0) == _POINTER:
            raise ValueError("it is a pointer of Git LFS in the place of the file: run `git lfs pull` there")
    except ValueError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def open_array(path: str | os.PathLike[str]) -> np.memmap:
    """Returns the array of a `.npy` file as a map, of which no more than the header is read yet."""
    open_regular(path).close()
    try:
        return np.lib.format.open_memmap(os.fspath(path), mode="r")
    except (TypeError, SyntaxError, OverflowError, MemoryError, RecursionError) as error:  # of a header
        raise ValueError(f"its header is none of an array: {type(error).__name__}") from error


def read_text(path: str | os.PathLike[str], what: str, *, remedy: str, limit_bytes: int) -> str:
    """Reads a file that a user named, text in UTF-8 without its byte order mark; errors say `what` and the remedy."""
    try:
        return read_file(epath.Path(path), limit_bytes=limit_bytes).decode("utf-8-sig")
    except OSError as error:
        why = error.strerror
    except UnicodeDecodeError as error:
        why = f"it is no text in UTF-8: {error}"
    except ValueError as error:
        why = str(error)
    raise ValueError(f"cannot read {what} {path} ({why}): {remedy}")


def read_json(
    path: str | os.PathLike[str], what: str, *, remedy: str, limit_bytes: int, **options: Any
) -> dict[str, Any]:
    """Reads a file that a user named, a JSON object, as `read_text` reads text; options are those of `json.loads`."""
    text = read_text(path, what, remedy=remedy, limit_bytes=limit_bytes)
    try:
        return dict(mapping(parse_json(text.encode(), **options)))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON object ({error}): {remedy}") from error


def _check_kind(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"it {_is_no_file(status)}")


def _is_no_file(status: os.stat_result) -> str:
    return f"is {_KINDS.get(stat.S_IFMT(status.st_mode), 'of an unknown kind')}, not a file"


def irregular(folder: epath.Path) -> list[str]:
    """Lists what in a local folder is no file or folder, or is reached twice by links, with the reason, by path."""
    problems: list[str] = []
    seen: set[tuple[int, int]] = set()
    pending = [os.fspath(folder)]
    while pending:
        place = pending.pop()
        name = printable(os.path.relpath(place, folder))
        try:
            status = os.stat(place)
            if stat.S_ISREG(status.st_mode):
                continue
            if not stat.S_ISDIR(status.st_mode):
                problems.append(f"{name} {_is_no_file(status)}")
            elif (status.st_dev, status.st_ino) in seen:
                problems.append(f"{name} leads to a folder that is there already")
            else:
                seen.add((status.st_dev, status.st_ino))
                pending += [entry.path for entry in os.scandir(place)]
        except OSError as error:
            problems.append(f"{name} cannot be read ({error.strerror or error})")
    return sorted(problems)


def parse_json(text: bytes, **options: Any) -> Any:
    """Parses JSON by `json.loads`, with a `ValueError` for any that cannot be."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of JSON, as a hook of `json.loads` that refuses one with a key twice."""
    counts = collections.Counter(name for name, _ in pairs)
    if repeated := sorted(name for name, count in counts.items() if count > 1):
        raise ValueError(f"the key {quoted(repeated[0])} is there twice: leave one")
    return dict(pairs)


def json_checksum(value: Any) -> int:
    """Returns the CRC-32 of a value as JSON, whatever the order of its keys."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def whole_number(value: Any, *, below: int = 2**63) -> int:
    """Checks that a value is an integer from 0 to below a bound, and returns it."""
    # Not `isinstance`: true of JSON is a bool, which is an int of Python.
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{quoted(value)} is not a whole number from 0 to {below - 1}")
    return value


def number(value: Any) -> float:
    """Checks that a value is a number, NaN and infinities included, and returns it."""
    # `float` of an int from 2^1024 on raises OverflowError.
    if type(value) not in (int, float) or (type(value) is int and abs(value) > 2**1000):
        raise ValueError(f"{quoted(value)} is not a number")
    return float(value)


def text(value: Any) -> str:
    """Checks that a value is text, and returns it."""
    if not isinstance(value, str):
        raise ValueError(f"{quoted(value)} is not a text")
    return value


def flag(value: Any) -> bool:
    """Checks that a value is a bool, and returns it."""
    if not isinstance(value, bool):
        raise ValueError(f"{quoted(value)} is neither true nor false")
    return value


def mapping(value: Any, *, keys: set[str] | None = None) -> Mapping[str, Any]:
    """Checks that a value is an object, with exactly `keys` if not None, and returns it."""
    if not isinstance(value, dict):
        raise ValueError(f"{quoted(value)} is not an object")
    if keys is not None and value.keys() != keys:
        odd = {"lacks": sorted(keys - value.keys()), "has": sorted(value.keys() - keys)}
        raise ValueError(
            " and ".join(f"it {word} {', '.join(map(quoted, these))}" for word, these in odd.items() if these)
        )
    return value


def shape(value: Any) -> tuple[int, ...]:
    """Checks that a value is the shape of an array, and returns it."""
    # NumPy has at most 64 dims.
    if not isinstance(value, list) or len(value) > 64:
        raise ValueError(f"{quoted(value)} is not a shape")
    sizes = tuple(whole_number(size) for size in value)
    if math.prod(sizes) >= 2**63:
        raise ValueError(f"{quoted(value)} has more elements than an array can have")
    return sizes
