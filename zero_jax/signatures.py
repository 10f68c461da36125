"""Whether what a user gave can be called as it will be."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from zero_jax.tree import shown


def check_takes(
    what: str, function: Any, arguments: Sequence[str], *, keywords: Sequence[str] = (), remedy: str
) -> Callable[..., Any]:
    """Returns a function; raises `ValueError` for what is none, or cannot be called with these arguments.

    Args:
      what: what to call it, such as the name of the parameter that it was given for.
      function: the function.
      arguments: names of the positional arguments that it will get.
      keywords: names of those that it will get by keyword.
      remedy: what to give instead.
    """
    called = f"({', '.join([*arguments, *(f'{name}=...' for name in keywords)])})"
    check_callable(what, function, remedy=remedy)
    try:  # a wrapper may take less than what it wraps
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some built-in functions have none
        return function
    try:
        signature.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        takes = f"{name}({', '.join(signature.parameters)})"
        raise ValueError(f"{what}: {takes} cannot be called with {called} ({error}): {remedy}") from None
    return function


def check_callable(what: str, function: Any, *, remedy: str) -> None:
    """Raises `ValueError` for what is no function."""
    if not callable(function):
        raise ValueError(f"{what}={shown(function)} is no function: {remedy}")


def place_of(function: Callable[..., Any]) -> str:
    """Returns `file:line (name)` of a function, or its name alone if it is not of Python."""
    inner: Any = function
    while inner is not None:
        function = inner
        inner = function.func if isinstance(function, functools.partial) else getattr(function, "__wrapped__", None)
    named: Any = function if hasattr(function, "__qualname__") else type(function).__call__
    code = getattr(named, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} ({named.__qualname__})" if code else named.__qualname__


def check_methods(what: str, value: Any, names: Sequence[str], *, remedy: str) -> None:
    """Raises `ValueError` for what does not have methods of these names."""
    missing = [name for name in names if not callable(getattr(value, name, None))]
    if missing:
        raise ValueError(f"{what}={shown(value)} has no {'() and no '.join(missing)}(): {remedy}")
