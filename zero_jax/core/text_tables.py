"""Formats tables and numbers of bytes for people; 1 GB is 1e9 bytes, as in the ZeRO paper."""

from collections.abc import Container, Iterable, Sequence

_UNITS = (("GB", 1e9), ("MB", 1e6), ("KB", 1e3))


def aligned(rows: Iterable[Sequence[str]], *, right: Container[int] = ()) -> str:
    """Returns rows of equal length as a table with aligned columns, those with a number in `right` to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([(cell.rjust if i in right else cell.ljust)(widths[i]) for i, cell in enumerate(row)] for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in padded)


def format_bytes(num_bytes: float, *, decimals: int = 2) -> str:
    """Returns a number of bytes in the largest unit that gives at least 1, such as `1.50 GB` or `12 bytes`."""
    for unit, scale in _UNITS:
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:,.{decimals}f} {unit}"
    return f"{num_bytes:,.0f} bytes"
