"""Did you mean: the closest of some known names, for error messages."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import tomllib
from collections.abc import Iterable, Mapping

from zero_jax.core.text_tables import printable

_MAX_CHARACTERS = 1000  # of a name from outside


@functools.cache
def _table() -> dict[str, dict[str, str]]:
    names = tomllib.loads(importlib.resources.files("zero_jax.core").joinpath("close_match.toml").read_text("utf-8"))
    tables = {"missing": names.pop("missing"), "names": names}
    return {name: {word: x for x, words in table.items() for word in words.split()} for name, table in tables.items()}


def names_elsewhere() -> Mapping[str, str]:
    """Returns what a config's field is called here, by what transformers, MaxText, DeepSpeed and others call it."""
    return _table()["names"]


def missing_here(name: str) -> str:
    """Returns what there is instead of an option that other systems have and this has not; '' for any other name."""
    instead = _table()["missing"].get(_plain(name))
    return f"{instead}. " if instead else ""


def did_you_mean(
    name: object, known: Iterable[object], text: str = "did you mean {!r}? ", *, cutoff: float = 0.6
) -> str:
    """Returns a hint with the closest known name (formatted by `text`), or '' if none is as similar as `cutoff`.

    A known name that other systems call so comes first. Upper and lower case are the same, unless names differ in
    nothing else.
    """
    # difflib takes quadratic time.
    name, known = str(name)[:_MAX_CHARACTERS], [str(other) for other in known]
    ours = names_elsewhere().get(_plain(name))
    for other in known:
        if ours is not None and _plain(other) == ours:
            return text.format(printable(other))
    by_lower: dict[str, list[str]] = {}
    for other in known:
        by_lower.setdefault(other.lower(), []).append(other)
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    # Names that differ in case alone: the nearest in the case that was written. A cutoff of 0 always finds one.
    return text.format(printable(*difflib.get_close_matches(name, by_lower[near[0]], n=1, cutoff=0.0))) if near else ""


def _plain(name: str) -> str:
    """Returns an option or a key as the name of a field."""
    return name.strip("-").replace("-", "_").lower()
