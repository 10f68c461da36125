"""Folders that are written under another name and appear when they are complete."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import uuid
from collections.abc import Iterator

from zero_jax.core.files.system_errors import with_remedy


@contextlib.contextmanager
def partial_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes a hidden folder beside `target`, whose files the body writes and moves; removes what is left of it."""
    # Not by the number of the process, which others have in containers that share a file system, and other threads.
    partial = target.parent / f".{target.name}.partial-{uuid.uuid4().hex[:12]}"
    try:
        partial.mkdir(parents=True)
        yield partial
    except OSError as error:
        raise ValueError(f"cannot write {target}: {with_remedy(error)}; nothing was left there") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
