"""What a field of a config may hold, read from its annotation, and checks of values: types, finite numbers, ranges.

The checks, the options of the command line and the keys of config files are made from the same record, `FieldKind`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import numbers
import operator
import os
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from zero_jax.core.close_match import did_you_mean, missing_here
from zero_jax.core.text_tables import is_unicode

Config = TypeVar("Config")
_SIMPLE = {"bool": bool, "int": int, "float": float, "str": str}
_LARGEST_INT = 2**63 - 1
_WORDS: Mapping[type, str] = {bool: "True or False", int: "a whole number", float: "a finite number", str: "text"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldKind:
    """What a field may hold."""

    types: tuple[type, ...] = ()  # those of bool, int, float and str that are members of its union
    words: tuple[Any, ...] = ()  # the words of its `Literal`s, if it takes no numbers and no text
    other_words: tuple[Any, ...] = ()  # the words that it takes beside these
    is_optional: bool = False  # whether None is a value
    is_mapping: bool = False  # whether a mapping is one
    has_others: bool = False  # whether values of other types are

    @property
    def base(self) -> type | None:
        """The type that its text on the command line stands for (a dict is of NAME=VALUE); None if there is none."""
        if self.is_mapping:
            return dict
        return str if self.words else next(iter(self.types), None)


def read_kind(annotation: str, text_of: Callable[[str], str | None] = lambda name: None) -> FieldKind:
    """Reads an annotation such as `int | None`; `text_of` returns the text that a name of the module stands for."""
    types, words, others, names = [], [], [], set()
    for member in _members(ast.parse(annotation, mode="eval").body, text_of):
        name = _name(member.value if isinstance(member, ast.Subscript) else member)
        names.add(name)
        if name == "Literal" and isinstance(member, ast.Subscript):
            literal = ast.literal_eval(member.slice)
            words += literal if isinstance(literal, tuple) else [literal]
        elif name in _SIMPLE:
            types.append(_SIMPLE[name])
        elif name not in ("None", "NoneType", "Mapping"):
            others.append(name)
    return FieldKind(
        types=tuple(types),
        words=() if types else tuple(words),
        other_words=tuple(words) if types else (),
        is_optional=bool(names & {"None", "NoneType"}),
        is_mapping="Mapping" in names,
        has_others=bool(others),
    )


def _members(node: ast.expr, text_of: Callable[[str], str | None]) -> Iterator[ast.expr]:
    """Yields the members of a union, `X | Y` or as Python shows one with a `Literal`: `Optional[X]`, `Union[X, Y]`."""
    if isinstance(node, ast.BinOp):
        yield from _members(node.left, text_of)
        yield from _members(node.right, text_of)
    elif isinstance(node, ast.Subscript) and _name(node.value) in ("Optional", "Union"):
        members = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        members += [ast.Constant(None)] if _name(node.value) == "Optional" else []
        for member in members:
            yield from _members(member, text_of)
    elif isinstance(node, ast.Name) and node.id not in _SIMPLE and (text := text_of(node.id)) is not None:
        yield from _members(ast.parse(text, mode="eval").body, text_of)
    else:
        yield node


def _name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


@functools.cache
def field_kinds(config_class: type) -> dict[str, FieldKind]:
    """Returns what each field of a dataclass may hold."""
    module = vars(sys.modules[config_class.__module__])

    def text_of(name: str) -> str | None:
        value = module.get(name)
        return inspect.formatannotation(value) if typing.get_origin(value) is typing.Literal else None

    fields = {field.name: field.type for field in dataclasses.fields(config_class)}
    texts = {name: x if isinstance(x, str) else inspect.formatannotation(x) for name, x in fields.items()}
    return {name: read_kind(text, text_of) for name, text in texts.items()}


def brief(config_class: type[Config]) -> type[Config]:
    """Makes the `repr` of a dataclass show only the fields that differ from their defaults."""

    def shown(self: Any) -> str:
        fields = [field for field in dataclasses.fields(config_class) if field.repr]  # type: ignore[arg-type]
        needs = any(x.default is x.default_factory is dataclasses.MISSING for x in fields)
        # Of an instance where one can be made without arguments: `__post_init__` may convert defaults.
        usual = {x.name: x.default for x in fields} if needs else vars(config_class())
        texts = []
        for field in fields:
            value, default = getattr(self, field.name), usual[field.name]
            # Types first: 1 == True, and `==` of arrays is an array.
            if value is not default and not (type(value) is type(default) and value == default):
                texts.append(f"{field.name}={repr(value) if dataclasses.is_dataclass(value) else _shown(value)}")
        return f"{config_class.__name__}({', '.join(texts)})"

    config_class.__repr__ = shown
    return config_class


def hinted(config_class: type[Config]) -> type[Config]:
    """Makes the error for an unknown field name the one that is meant, such as `learning_rate` for `lr`; and `brief`.

    A field of one of its parts, the dataclasses among its defaults, is named with the part.
    """
    make = brief(config_class).__init__

    @functools.wraps(make)
    def init(self: Any, *args: Any, **values: Any) -> None:
        fields = dataclasses.fields(config_class)  # type: ignore[arg-type]
        unknown = values.keys() - {field.name for field in fields}
        if unknown:
            parts = {field.name: field.default for field in fields if dataclasses.is_dataclass(field.default)}
            known = {
                inner.name: f"{name}={type(part).__name__}({inner.name}=...)"
                for name, part in parts.items()
                for inner in dataclasses.fields(part)  # type: ignore[arg-type]
            } | {field.name: field.name for field in fields}
            name = min(unknown)
            hint = did_you_mean(name, known, "{}")
            meant = missing_here(name) or (f"did you mean {known[hint]}? " if hint else "")
            raise TypeError(
                f"{config_class.__name__} has no field {name!r}: {meant}It has {', '.join(x.name for x in fields)}"
            )
        make(self, *args, **values)

    config_class.__init__ = init
    return config_class


def check_fields(
    config: Any,
    *,
    lowest: Mapping[str, float] | None = None,
    highest: Mapping[str, float] | None = None,
    prefix: str = "",
) -> None:
    """Checks the fields of a frozen dataclass: types, finite numbers, ranges, words.

    Only fields of bool, int, float, str, None and `Literal`s are checked, against the `lowest` and `highest` values by
    name. NumPy numbers are converted to Python's, and paths to text. A prefix is shown before the names in errors.
    """
    lowest, highest = lowest or {}, highest or {}
    for name, kind in field_kinds(type(config)).items():
        if kind.has_others or kind.is_mapping:
            continue
        label, value = prefix + name, getattr(config, name)
        value = _checked(label, value, kind)
        object.__setattr__(config, name, value)
        if value is None:
            continue
        none = " or None" if kind.is_optional else ""
        if name in lowest and not value >= lowest[name]:
            hint = "; none may be negative" if lowest[name] == 0 else ""
            raise ValueError(f"{label}={_shown(value)}: give at least {lowest[name]:,}{none}{hint}")
        if name in highest and not value <= highest[name]:
            raise ValueError(f"{label}={_shown(value)}: give at most {highest[name]:,}{none}")


def _shown(value: Any) -> str:
    from zero_jax.core import tree  # with JAX, which the help of the command line does without

    return tree.shown(value)


def check_value(name: str, value: Any, kind: type, *, is_optional: bool = False) -> None:
    """Raises `ValueError` for a value that is not of a type (bool, int, float or str), or not finite."""
    _checked(name, value, FieldKind(types=(kind,), is_optional=is_optional))


def check_word(name: str, value: Any, words: Sequence[str], *, is_optional: bool = False) -> None:
    """Raises `ValueError` for a value that is none of some words, with the nearest of them."""
    _checked(name, value, FieldKind(words=tuple(words), is_optional=is_optional))


def _checked(name: str, value: Any, kind: FieldKind) -> Any:
    allowed, words = kind.types, kind.words or kind.other_words
    if (value is None and kind.is_optional) or (isinstance(value, str) and value in words):
        return value
    for simple in allowed:
        converted = _CONVERTERS[simple](value)
        if converted is not None:
            return converted
    wanted = [_WORDS[simple] for simple in allowed]
    hint = did_you_mean(value, words) if isinstance(value, str) else ""
    if words:
        wanted.append(f"one of {', '.join(map(str, words))}" if words[1:] else repr(words[0]))
    wanted += ["None"] if kind.is_optional else []
    if isinstance(value, int) and int in allowed:
        wanted[0] += f" between -{_LARGEST_INT + 1} and {_LARGEST_INT}"
    elif isinstance(value, str) and str in allowed:
        wanted[0] += " of valid Unicode without NUL"
    raise ValueError(f"{name}={_shown(value)}: {hint}give {' or '.join(wanted)}")


def _as_bool(value: Any) -> bool | None:
    return bool(value) if type(value).__name__ in ("bool", "bool_") else None


def _as_int(value: Any) -> int | None:
    # A bool of Python is an `Integral`.
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
    return text if isinstance(text, str) and "\0" not in text and is_unicode(text) else None


_CONVERTERS: Mapping[type, Any] = {bool: _as_bool, int: _as_int, float: _as_float, str: _as_str}
