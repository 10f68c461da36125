"""Folders whose files are written under another name, and appear when all of them are complete."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator

from zero_jax.core.files.system_errors import with_remedy
from zero_jax.core.files.user_cache import HIDDEN, in_use, remove_unused


@contextlib.contextmanager
def hidden_folder(target: pathlib.Path, kind: str) -> Iterator[pathlib.Path]:
    """Makes a hidden folder for what is to become `target`, and removes what is left of it.

    So it does with what a process has left that was killed, where the file system has locks. `OSError`s are the body's.
    """
    folder = _beside(target)
    folder.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target)
    with contextlib.ExitStack() as stack:
        path = None
        while path is None:
            # Not by the number of the process, which others have in containers that share a file system, and other
            # threads.
            new = folder / f"{HIDDEN}{kind}-{target.name}-{uuid.uuid4().hex[:12]}"
            new.mkdir()
            with contextlib.suppress(FileNotFoundError):  # another process has taken it for one that was abandoned
                stack.enter_context(in_use(new))
                path = new
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        yield path


def remove_abandoned(target: pathlib.Path) -> None:
    """Removes hidden folders for `target` that no process has in use: of those that were killed."""
    with contextlib.suppress(OSError):
        for path in _beside(target).iterdir():
            if re.fullmatch(rf"{re.escape(HIDDEN)}[a-z]+-{re.escape(target.name)}-[0-9a-f]{{12}}", path.name):
                remove_unused(path)


def _beside(target: pathlib.Path) -> pathlib.Path:
    # In it where it is a folder already: it may be a mount, beside which another disk is.
    return target if os.path.isdir(target) else target.parent


@contextlib.contextmanager
def partial_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes a hidden folder for `target`, whose files the body writes and moves; removes what is left of it."""
    try:
        with hidden_folder(target, "partial") as partial:
            yield partial
    except OSError as error:
        raise ValueError(f"cannot write {target}: {with_remedy(error)}; nothing was left there") from error


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
