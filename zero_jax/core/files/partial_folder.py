"""Folders whose files are written under another name, and appear when all of them are complete."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterable, Iterator

from zero_jax.core.files.system_errors import with_remedy


def hidden_path(target: pathlib.Path, kind: str) -> pathlib.Path:
    """Returns a new hidden path for what is to become `target`: beside it, or in it where it is a folder already."""
    # In it, as it may be a mount, beside which another disk is. Not by the number of the process, which others have in
    # containers that share a file system, and other threads.
    return (target if os.path.isdir(target) else target.parent) / f".{target.name}.{kind}-{uuid.uuid4().hex[:12]}"


@contextlib.contextmanager
def partial_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes a hidden folder for `target`, whose files the body writes and moves; removes what is left of it."""
    partial = hidden_path(target, "partial")
    try:
        partial.mkdir(parents=True)
        yield partial
    except OSError as error:
        raise ValueError(f"cannot write {target}: {with_remedy(error)}; nothing was left there") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish(partial: pathlib.Path, target: pathlib.Path, *, removed: Iterable[pathlib.Path] = ()) -> None:
    """Moves what a partial folder has to its target: by one rename where that is new, else file by file.

    Files of the target that are to be `removed` go before.
    """
    if partial.parent != target:
        partial.rename(target)
        return
    try:
        for path in removed:
            path.unlink()
        # JSON last: an index or a config, by which readers begin, is there when what it names is.
        for path in sorted(partial.iterdir(), key=lambda path: (path.suffix == ".json", path.name)):
            path.replace(target / path.name)
    except OSError as error:  # not that of `partial_folder`, which says that nothing was left there
        raise ValueError(f"cannot write all of {target}: {with_remedy(error)}; some of its files may be new") from error
