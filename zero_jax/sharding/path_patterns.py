"""Regular expressions of full leaf paths, such as `layers/.*/kernel`, with a value each; the first match counts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any


class PathPatterns:
    """Patterns of leaf paths, of the setting that errors name."""

    def __init__(self, setting: str, patterns: Mapping[str, Any]):
        """Compiles the patterns.

        Raises:
          ValueError: one is not a regular expression, or they are no dict.
        """
        if not isinstance(patterns, Mapping):
            raise ValueError(f"{setting}={patterns!r}: give a dict from regular expressions of leaf paths to values")
        self._setting = setting
        self._values: dict[re.Pattern[str], Any] = {}
        for pattern, value in patterns.items():
            try:
                self._values[re.compile(pattern)] = value
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"{setting}: {pattern!r} is not a regular expression of leaf paths, such as 'layers/.*/kernel': "
                    f"{error}"
                ) from error

    @classmethod
    def of_list(cls, setting: str, patterns: Any) -> PathPatterns:
        """Returns patterns without values; raises `ValueError` for anything but a list of them."""
        is_list = isinstance(patterns, Sequence) and not isinstance(patterns, str)
        if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(f"{setting}={patterns!r}: give a list of regular expressions of whole leaf paths")
        return cls(setting, dict.fromkeys(patterns, True))

    def of(self, path: str, default: Any = None) -> Any:
        """Returns the value of the first pattern that matches a path."""
        return next((value for pattern, value in self._values.items() if pattern.fullmatch(path)), default)

    def matches(self, path: str) -> bool:
        """Returns whether any pattern matches a path."""
        return any(pattern.fullmatch(path) for pattern in self._values)

    def check_matched(self, paths: Sequence[str]) -> None:
        """Raises `ValueError` if a pattern matches none of the paths, and so would be ignored."""
        for pattern in self._values:
            if not any(map(pattern.fullmatch, paths)):
                near = difflib.get_close_matches(pattern.pattern, paths, n=3, cutoff=0)
                raise ValueError(
                    f"{self._setting}: {pattern.pattern!r} matches the path of no leaf; some are {', '.join(near)}"
                )
