"""Text for people: foreign text and values as they can be shown, tables, numbers of bytes (1 GB is 1e9 bytes)."""

import dataclasses
import html
import math
import numbers
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

_UNITS = (("GB", 1e9), ("MB", 1e6), ("KB", 1e3))
_LINE_CHARACTERS = 20_000
_LARGEST = 9  # elements of a collection that is shown as it is


class Report:
    """A result whose text is a table: it is shown as that text, also as the last line of a notebook's cell."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__repr__ = Report.__repr__  # which `dataclass` leaves as it is, because it is the class's own

    def __repr__(self) -> str:
        return str(self)

    def to_json(self) -> Any:
        """Returns the fields and the properties as plain data."""
        return plain(self, own=False)

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre; overflow-x: auto">{html.escape(str(self))}</pre>'


def plain(value: Any, *, own: bool = True) -> Any:
    """Returns a value as plain data: of a dataclass fields and properties, of a `Report` its `to_json` where `own`."""
    if own and isinstance(value, Report):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        names += [name for kind in type(value).__mro__ for name, x in vars(kind).items() if isinstance(x, property)]
        figures = {name: getattr(value, name) for name in names if not name.startswith("_")}
        return {name: plain(x) for name, x in figures.items() if not callable(x)}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str | int) else str(key): plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    # Before the integers: a bool is one.
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    return str(value)


def flattened(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields what is in nested mappings and dataclasses, each with its name, such as `zero.stage`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if not (isinstance(value, Mapping) and value):
        yield name, value
        return
    for key, inner in value.items():
        yield from flattened(inner, f"{name}.{key}" if name else key)


def printable(text: object, *, limit: int = 300, keep: str = "") -> str:
    """Returns text from outside as it can be shown in an error, a log, a terminal or a page.

    Control characters, which would move a terminal's cursor or begin a line of a log, lone surrogates and invisible
    characters become escapes (`\\x1b`), apart from those in `keep`. Text longer than `limit` characters is cut, and its
    length follows.
    """
    text = str(text)
    if len(text) > limit:
        text = f"{text[:limit]}... ({len(text):,} characters)"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: object) -> str:
    """Returns lines of our own as `printable` text: what they name, which is bounded there, may come from outside."""
    return "\n".join(printable(line, limit=_LINE_CHARACTERS, keep="\t") for line in str(text).split("\n"))


def is_unicode(text: str) -> bool:
    """Returns whether text has no lone surrogates, which JSON and names of files can have and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def quoted(value: Any, *, limit: int = 400) -> str:
    """Returns a value from outside as `printable` text: its `repr`, cut where it is long."""
    if isinstance(value, list | tuple | dict | set) and len(value) > _LARGEST:
        return f"a {type(value).__name__} of {len(value):,}"
    try:
        # Cut first: a text from outside may have gigabytes.
        text = repr(value[: limit + 1]) if isinstance(value, str | bytes) else repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits
        return f"a {type(value).__name__}"
    text = " ".join(text.split())
    return printable(text if len(text) <= limit else f"{text[: limit - 3]}...", limit=limit)


def aligned(rows: Iterable[Sequence[str]], *, right: Container[int] = ()) -> str:
    """Returns rows of equal length as a table with aligned columns, those with a number in `right` to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([(cell.rjust if i in right else cell.ljust)(widths[i]) for i, cell in enumerate(row)] for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in padded)


def format_count(number: int) -> str:
    """Formats a number of params in three digits or so, such as `1.24B`, `18.7M` or `640`."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            # Three digits of 999.5 and more would be 1e+03.
            return f"{number / size:.3g}{unit}" if number < 999.5 * size else f"{number / size:,.0f}{unit}"
    return str(number)


def format_figure(x: float, *, decimals: int) -> str:
    """Formats a number with some decimals, such as `2.718`, or where these would lose its digits, `0.00123`."""
    return f"{x:.{decimals}f}" if abs(x) >= 0.1 else f"{x:.3g}"


def format_bytes(num_bytes: float, *, decimals: int = 2) -> str:
    """Returns a number of bytes in the largest unit that gives at least 1, such as `1.50 GB` or `12 bytes`."""
    for unit, scale in _UNITS:
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:,.{decimals}f} {unit}"
    return f"{num_bytes:,.0f} bytes"
