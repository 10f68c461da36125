"""What a field of a config dataclass may hold, read from the text of its annotation; imports no JAX.

The checks of values, the options of the command line and the keys of config files are all made from this record.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

_SIMPLE = {"bool": bool, "int": int, "float": float, "str": str}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldKind:
    """What a field may hold.

    Attributes:
      types: those of bool, int, float and str that are members of its union.
      words: the words of its `Literal`s.
      is_optional: whether None is a value.
      is_mapping: whether a mapping is one.
      has_others: whether values of other types are.
    """

    types: tuple[type, ...] = ()
    words: tuple[Any, ...] = ()
    is_optional: bool = False
    is_mapping: bool = False
    has_others: bool = False

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
            found = ast.literal_eval(member.slice)
            words += found if isinstance(found, tuple) else [found]
        elif name in _SIMPLE:
            types.append(_SIMPLE[name])
        elif name not in ("None", "NoneType", "Mapping"):
            others.append(name)
    return FieldKind(
        types=tuple(types),
        words=tuple(words),
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
