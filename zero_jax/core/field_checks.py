"""Checks of the values of a config's fields: types, finite numbers, ranges, words."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import operator
import os
import sys
import typing
from collections.abc import Mapping
from typing import Any

from zero_jax.core.close_match import did_you_mean
from zero_jax.core.field_kinds import FieldKind, read_kind
from zero_jax.core.tree import shown

_LARGEST_INT = 2**63 - 1
_WORDS: Mapping[type, str] = {bool: "True or False", int: "a whole number", float: "a finite number", str: "text"}


@functools.cache
def field_kinds(config_class: type) -> dict[str, FieldKind]:
    """Returns what each field of a dataclass may hold."""
    module = vars(sys.modules[config_class.__module__])

    def text_of(name: str) -> str | None:
        value = module.get(name)
        return inspect.formatannotation(value) if typing.get_origin(value) is typing.Literal else None

    fields = dataclasses.fields(config_class)
    return {field.name: read_kind(_text(field.type), text_of) for field in fields}


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def check_fields(
    config: Any, *, lowest: Mapping[str, float] | None = None, highest: Mapping[str, float] | None = None
) -> None:
    """Checks the fields of a frozen dataclass: types, finite numbers, ranges, words.

    Only fields of bool, int, float, str, None and `Literal`s are checked. NumPy numbers are converted to Python's, and
    paths to text.

    Args:
      config: an instance of a dataclass, in its `__post_init__`.
      lowest: the smallest value by the name of a field; None passes where a field may be None.
      highest: the largest value by the name of a field.

    Raises:
      ValueError: the first wrong field, its value, and what to give.
    """
    lowest, highest = lowest or {}, highest or {}
    for name, kind in field_kinds(type(config)).items():
        if kind.has_others or kind.is_mapping:
            continue
        value = _checked(name, getattr(config, name), kind)
        object.__setattr__(config, name, value)
        if value is None:
            continue
        none = " or None" if kind.is_optional else ""
        if name in lowest and not value >= lowest[name]:
            hint = "; none may be negative" if lowest[name] == 0 else ""
            raise ValueError(f"{name}={shown(value)}: give at least {lowest[name]:,}{none}{hint}")
        if name in highest and not value <= highest[name]:
            raise ValueError(f"{name}={shown(value)}: give at most {highest[name]:,}{none}")


def check_value(name: str, value: Any, kind: type, *, is_optional: bool = False) -> None:
    """Raises `ValueError` for a value that is not of a type (bool, int, float or str), or not finite."""
    _checked(name, value, FieldKind(types=(kind,), is_optional=is_optional))


def _checked(name: str, value: Any, kind: FieldKind) -> Any:
    allowed, words = kind.types, kind.words
    if (value is None and kind.is_optional) or (isinstance(value, str) and value in words):
        return value
    for simple in allowed:
        converted = _CONVERTERS[simple](value)
        if converted is not None:
            return converted
    wanted = [_WORDS[simple] for simple in allowed]
    hint = did_you_mean(value, words) if isinstance(value, str) else ""
    wanted += [f"one of {', '.join(map(str, words))}"] if words else []
    wanted += ["None"] if kind.is_optional else []
    if isinstance(value, int) and int in allowed:
        wanted[0] += f" between -{_LARGEST_INT + 1} and {_LARGEST_INT}"
    elif isinstance(value, str) and str in allowed:
        wanted[0] += " of valid Unicode without NUL"
    raise ValueError(f"{name}={shown(value)}: {hint}give {' or '.join(wanted)}")


def _as_bool(value: Any) -> bool | None:
    return bool(value) if type(value).__name__ in ("bool", "bool_") else None


def _as_int(value: Any) -> int | None:
    if _as_bool(value) is not None or not isinstance(value, numbers.Integral):
        return None
    number = operator.index(value)
    return number if -_LARGEST_INT - 1 <= number <= _LARGEST_INT else None


def _as_float(value: Any) -> float | None:
    if _as_bool(value) is not None or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    if not math.isfinite(number):
        return None
    return value if type(value) is int else number


def _as_str(value: Any) -> str | None:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or "\0" in text:
        return None
    try:
        text.encode()
    except UnicodeEncodeError:
        return None
    return text


_CONVERTERS: Mapping[type, Any] = {bool: _as_bool, int: _as_int, float: _as_float, str: _as_str}
