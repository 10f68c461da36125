"""Where what can be made again is kept for the next run."""

import os
import pathlib


def cache_folder(kind: str) -> pathlib.Path:
    """Returns the folder for things of a kind (`programs`, `tokens`), below `zero_jax` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "zero_jax" / kind
