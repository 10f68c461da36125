"""Did you mean: the closest of some known names, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from zero_jax.core.text_tables import printable

_MAX_CHARACTERS = 1000  # of a name from outside


def did_you_mean(
    name: object, known: Iterable[object], text: str = "did you mean {!r}? ", *, cutoff: float = 0.6
) -> str:
    """Returns a hint with the closest known name (formatted by `text`), or '' if none is as similar as `cutoff`.

    Upper and lower case are the same, unless names differ in nothing else.
    """
    name = str(name)[:_MAX_CHARACTERS]
    by_lower: dict[str, list[str]] = {}
    for other in map(str, known):
        by_lower.setdefault(other.lower(), []).append(other)
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return text.format(printable(*difflib.get_close_matches(name, by_lower[near[0]], n=1, cutoff=0.0))) if near else ""
