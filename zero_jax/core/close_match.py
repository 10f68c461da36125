"""Did you mean: the closest of some known names, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(
    name: object, known: Iterable[object], text: str = "did you mean {!r}? ", *, cutoff: float = 0.6
) -> str:
    """Returns a hint that names the closest known name, or '' if none is close.

    Args:
      name: the unknown name.
      known: the known names.
      text: format of the hint, with braces for the closest name.
      cutoff: how similar the closest has to be, from 0 (anything) to 1 (equal).
    """
    near = difflib.get_close_matches(str(name), [str(other) for other in known], n=1, cutoff=cutoff)
    return text.format(near[0]) if near else ""
