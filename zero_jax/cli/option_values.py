"""What the value of an option may be, wherever it comes from: a command line or a config file.

What the option is for decides the rest: that is checked by the config class that has it.
"""

from __future__ import annotations

import importlib.util
import math
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any, Literal

LARGEST_COUNT = 2**31 - 1  # of int32, which counts steps, tokens and rows on a device
LARGEST_INTEGER = 2**63 - 1
LARGEST_NUMBER = 3.4e38  # of float32, which is what becomes of it on a device
_MAX_CONFIG_BYTES = 1 << 16
_MAX_TEXT = 4_000  # Python converts no more digits than 4,300
# A text that is the place of something: on this machine, or there or in a bucket.
Place = Literal["local", "anywhere"]
# What a bucket takes, one of each: checkpoints are read and written through etils.epath and tensorstore, which both
# have to know the scheme.
_SCHEMES: Mapping[str, tuple[str, ...]] = {"gs": ("gcsfs", "tensorflow"), "s3": ("s3fs",)}


def check_value(value: Any, *, place: Place | None = None, largest: int = LARGEST_INTEGER) -> None:
    """Refuses a value that no option can have.

    Args:
      value: an integer, a number, a text, or anything else, which passes.
      place: where a text may lead, if it is the place of something.
      largest: the largest integer.

    Raises:
      ValueError: not finite, out of range, or a text that leads nowhere; without the option's name.
    """
    if isinstance(value, bool):
        return
    if isinstance(value, int) and abs(value) > largest:
        raise ValueError(f"{_short(value)} is out of range: give an integer of at most {largest}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not finite: give a number")
    if isinstance(value, float) and abs(value) > LARGEST_NUMBER:
        raise ValueError(f"{value} is out of range: give a number of float32, at most {LARGEST_NUMBER}")
    if isinstance(value, str):
        _check_text(value)
        if place is not None:
            _check_place(value, place)


def _check_text(value: str) -> None:
    if "\0" in value:
        raise ValueError(f"{_short(value)} holds a NUL character: leave it out")
    if len(value) > _MAX_TEXT:
        raise ValueError(f"{_short(value)} has {len(value):,} characters: give at most {_MAX_TEXT:,}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{value!r} is no valid Unicode: give text in UTF-8") from error


def _check_place(value: str, place: Place) -> None:
    if not value.strip():
        raise ValueError(f"{value!r} names nothing: give a path")
    scheme, separator, rest = value.partition("://")
    if not separator:
        return
    if place == "local":
        raise ValueError(f"{value!r} is a URL: give a path of this machine")
    known = " and ".join(f"{name}://" for name in _SCHEMES)
    if scheme not in _SCHEMES:
        raise ValueError(f"{value!r}: the scheme {scheme}:// is unknown: give a folder, or a URL of {known}")
    if not rest.strip("/"):
        raise ValueError(f"{value!r} names no bucket: give a URL such as {scheme}://bucket/folder")
    packages = _SCHEMES[scheme]
    if not any(map(importlib.util.find_spec, packages)):
        raise ValueError(f"{value!r}: {scheme}:// needs `pip install {packages[0]}`, or give a folder")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def read_toml(path: str | pathlib.Path) -> dict[str, Any]:
    """Reads a TOML file.

    Raises:
      ValueError: no such file, a folder or a pipe, too large, no text, or no TOML.
    """
    what = f"cannot read the config file {path}"
    try:
        file = pathlib.Path(path)
        if file.exists() and not file.is_file():
            kind = "a folder" if file.is_dir() else "no regular file"
            raise ValueError(f"{what} (it is {kind}): give a TOML file")
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError(f"{what} (it has {file.stat().st_size:,} bytes): a config has a few thousand at most")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{what} ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the config file {path} is no TOML: it is no text in UTF-8 ({error})") from error
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(f"the config file {path} is nested too deeply: write sections of values") from error
    except ValueError as error:  # an integer of too many digits is no TOMLDecodeError
        beside = pathlib.Path(path).with_suffix(".toml")
        hint = f"; did you mean {beside}?" if beside != pathlib.Path(path) and beside.is_file() else ""
        raise ValueError(f"the config file {path} is no TOML: {str(error).splitlines()[0]}{hint}") from error
