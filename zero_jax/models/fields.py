"""Checks the fields of the reference models' configs: whole numbers, numbers, switches, words.

The models import nothing of zero_jax, so that this does not go through `core.field_checks`.
"""

import dataclasses
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal

_LARGEST: Mapping[str, int] = {"num_layers": 100_000}
_LARGEST_NUMBER = 2**31 - 1
_MAX_PARAMS = 10**16


def check_fields(config: Any, *, may_be_zero: Collection[str] = ()) -> None:
    """Raises `ValueError` for the first field of a dataclass that is no such number, switch or word, or out of range.

    None passes where it may. All numbers but those that `may_be_zero` are positive.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, value, hint = field.name, getattr(config, field.name), hints[field.name]
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kind, *others = typing.get_args(hint) if is_union else (hint,)
        if value is None and type(None) in others:
            continue
        if kind is bool and not isinstance(value, bool):
            raise ValueError(f"{name}={short(value)}: give True or False")
        if kind in (int, float):
            _check_number(name, value, kind, may_be_zero=name in may_be_zero)
        words = typing.get_args(kind)
        if typing.get_origin(kind) is Literal and value not in words:
            raise ValueError(f"{name}={short(value)} is unknown: use {' or '.join(map(repr, words))}")


def _check_number(name: str, value: Any, kind: type, *, may_be_zero: bool) -> None:
    # A bool is an int of Python.
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise ValueError(f"{name}={short(value)}: give {'a whole number' if kind is int else 'a number'}")
    # Written so that NaN, of which all comparisons are false, is refused too.
    if not (value > 0 or (value == 0 and may_be_zero)):
        at_least = "0 or more" if may_be_zero else f"{name} of at least 1" if kind is int else "a number above 0"
        raise ValueError(f"{name}={short(value)} is not positive: give {at_least}")
    largest = _LARGEST.get(name, _LARGEST_NUMBER)
    if value > largest:
        raise ValueError(f"{name}={short(value)}: give at most {largest}")


def check_num_params(config: Any, *names: str) -> None:
    """Raises `ValueError` for a model larger than any that could be built, with the sizes that make it so."""
    if config.num_params > _MAX_PARAMS:
        sizes = ", ".join(f"{name}={getattr(config, name)}" for name in names)
        raise ValueError(f"{sizes} are {config.num_params:.2g} params: give sizes of at most {_MAX_PARAMS:.2g} in all")


def short(value: Any) -> str:
    """Returns a value of any size for an error: its beginning, with control characters as escapes."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
