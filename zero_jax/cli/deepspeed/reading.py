"""Reads a DeepSpeed config file, and checks it against the table of known keys."""

from __future__ import annotations

import collections
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from zero_jax.cli.deepspeed.keys import KEYS, SECTIONS, Kind
from zero_jax.cli.options import check_value
from zero_jax.core.close_match import did_you_mean
from zero_jax.core.files.untrusted import read_text
from zero_jax.core.text_tables import quoted
from zero_jax.core.tree import shown

_MAX_BYTES = 1 << 20
_WANTED: Mapping[Kind, str] = {
    "bool": "true or false",
    "int": "an integer",
    "number": "a number",
    "text": "text",
    "list": "a list",
    "block": "an object of keys",
    "any": "a value",
}
_WORDS = {"true": True, "false": False}  # which DeepSpeed reads as booleans, too


def read_json(path: str | pathlib.Path) -> dict[str, Any]:
    """Reads a DeepSpeed config file.

    Raises:
      ValueError: it cannot be read, or is no JSON object with each key once.
    """
    text = read_text(path, "the DeepSpeed config", remedy="give a JSON file", limit_bytes=_MAX_BYTES)
    problem = f"cannot read the DeepSpeed config {path}"
    try:
        config = json.loads(text, object_pairs_hook=_once_each, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError(f"{problem}: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{problem}: {str(error).splitlines()[0]}; give JSON, without comments") from error
    if not isinstance(config, dict):
        raise ValueError(f"{problem}: it holds {shown(config)}: give an object of keys, such as {{...}}")
    return config


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = collections.Counter(name for name, _ in pairs)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if repeated:
        raise ValueError(f"the key {quoted(repeated[0])} is there twice: leave one")
    return dict(pairs)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def flatten(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the values by dotted key, and for each unknown key the nearest known one as a hint.

    Raises:
      ValueError: a value of the wrong kind.
    """
    values: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    for key, value in _entries(config, ""):
        if key in KEYS:
            values[key] = _checked(key, value, KEYS[key].kind)
        else:
            values[key], unknown[key] = value, _nearest(key)
    return values, unknown


def _entries(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        key = prefix + name
        if key not in SECTIONS:
            yield key, value
        elif isinstance(value, Mapping):
            yield from _entries(value, f"{key}.")
        elif key in KEYS:  # a section that may also be a value, such as "zero_optimization": true
            yield key, value
        elif value is not None:
            raise ValueError(f"{key} = {shown(value)}: give an object of keys")


def _nearest(key: str) -> str:
    """Returns a hint with the nearest known key: of the same section first, then of any."""
    section, _, name = key.rpartition(".")
    anywhere = {known.rpartition(".")[2]: known for known in (*KEYS, *SECTIONS)}
    siblings = {known.rpartition(".")[2]: known for known in (*KEYS, *SECTIONS) if known.rpartition(".")[0] == section}
    for key_by_name in (siblings, anywhere):
        hint = did_you_mean(name, key_by_name, "{}", cutoff=0.75)
        if hint:
            return f"did you mean {key_by_name[hint]!r}?"
    return "DeepSpeed documents no such key"


def _checked(key: str, value: Any, kind: Kind) -> Any:
    """Returns a value of the kind that a key takes; numbers that are whole pass as integers."""
    if kind == "any" or value is None or (value == "auto" and kind != "block"):
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number:
        try:
            check_value(value)  # Python's integers may be larger than any float
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
    if kind == "bool" and isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    if kind == "int" and is_number and float(value).is_integer():
        return int(value)
    right = {
        "bool": isinstance(value, bool),
        "int": False,
        "number": is_number,
        "text": isinstance(value, str),
        "list": isinstance(value, list),
        "block": isinstance(value, Mapping | bool),
    }
    if not right[kind]:
        raise ValueError(f"{key} = {shown(value)}: give {_WANTED[kind]}")
    return value
