"""Folders that are written under another name and appear when they are complete."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

from zero_jax.core.files.system_errors import with_remedy


@contextlib.contextmanager
def partial_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes a hidden folder beside `target`, whose files the body writes and moves; removes what is left of it."""
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)  # of a process of the same id that was killed
    try:
        partial.mkdir(parents=True)
        yield partial
    except OSError as error:
        raise ValueError(f"cannot write {target}: {with_remedy(error)}; nothing was left there") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
