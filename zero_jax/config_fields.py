"""Checks the fields of a config against their types: no NaN, no infinity, no bool for a number."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import typing
from typing import Any

_WANTED = {bool: "True or False", int: "a whole number", float: "a finite number", str: "a string"}


def check_fields(config: Any) -> None:
    """Raises `ValueError` for a field of a config dataclass whose value is not of its type, or not finite.

    Fields of other types than bool, int, float, str and their unions with None are left to the config's own checks.
    """
    for name, (kind, is_optional) in _simple_fields(type(config)).items():
        value = getattr(config, name)
        if not (is_optional and value is None):
            check_value(name, value, kind, is_optional=is_optional)


def check_value(name: str, value: Any, kind: type, *, is_optional: bool = False) -> None:
    """Raises `ValueError` for a value that is not of a kind: bool, int (that 64 bits hold), float (finite) or str."""
    if not _is_of(value, kind):
        shown = repr(value)
        shown = shown if len(shown) < 60 else f"{shown[:57]}..."
        raise ValueError(f"{name}={shown}: give {_WANTED[kind]}{', or None' if is_optional else ''}")


def _is_of(value: Any, kind: type) -> bool:
    if kind in (bool, str) or isinstance(value, bool):
        return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if kind is int:
        return isinstance(value, numbers.Integral) and -(2**63) <= int(value) < 2**63
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


@functools.cache
def _simple_fields(config_class: type) -> dict[str, tuple[type, bool]]:
    """Returns the kind of each field of a simple type, and whether it may be None."""
    hints = typing.get_type_hints(config_class)
    simple: dict[str, tuple[type, bool]] = {}
    for field in dataclasses.fields(config_class):
        members = typing.get_args(hints[field.name]) or (hints[field.name],)
        kinds = [member for member in members if member is not type(None)]
        if len(kinds) == 1 and kinds[0] in _WANTED and typing.get_origin(hints[field.name]) is not list:
            simple[field.name] = (kinds[0], type(None) in members)
    return simple
