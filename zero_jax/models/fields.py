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
    """Checks the type and the range of each field that is a number, a switch or a word; None passes where it may.

    Args:
      config: an instance of a dataclass, in its `__post_init__`.
      may_be_zero: the numbers that may be 0; all others are positive.

    Raises:
      ValueError: the first wrong field, its value, and what to give.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        members = typing.get_args(hint) if is_union else (hint,)
        if value is None and type(None) in members:
            continue
        if members[0] is bool:
            if not isinstance(value, bool):
                raise ValueError(f"{field.name}={short(value)}: give True or False")
        elif members[0] in (int, float):
            _check_number(field.name, value, members[0], lowest=0 if field.name in may_be_zero else 1)
        elif typing.get_origin(members[0]) is Literal:
            words = typing.get_args(members[0])
            if value not in words:
                raise ValueError(f"{field.name}={short(value)} is unknown: use {' or '.join(map(repr, words))}")


def _check_number(name: str, value: Any, kind: type, *, lowest: int) -> None:
    allowed, wanted = (int, "a whole number") if kind is int else (int | float, "a number")
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise ValueError(f"{name}={short(value)}: give {wanted}")
    if not (value > 0 or (value == 0 and lowest == 0)):
        at_least = f"{name} of at least {lowest}" if kind is int else "a number above 0"
        raise ValueError(f"{name}={short(value)} is not positive: give {at_least if lowest else '0 or more'}")
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
