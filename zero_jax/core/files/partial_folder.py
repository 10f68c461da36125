"""Folders whose files are written under another name, and appear when all of them are complete."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator

from zero_jax.core.files.system_errors import with_remedy
from zero_jax.core.files.user_cache import HIDDEN, PARTIAL, in_use, remove_unused

_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")  # of the kernel, since the machine was started


@contextlib.contextmanager
def hidden_folder(target: pathlib.Path, kind: str, *, folder: pathlib.Path | None = None) -> Iterator[pathlib.Path]:
    """Makes a hidden folder for what is to become `target`, beside it or in a `folder`; removes what is left of it.

    So it does with those that processes of this machine have left that were killed. `OSError`s are the body's.
    """
    folder = folder or _beside(target)
    folder.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target, folder)
    with contextlib.ExitStack() as stack:
        # Under another name until it is locked. Not by the number of the process, which others have in containers that
        # share a file system, and other threads.
        new = folder / f"{PARTIAL}{uuid.uuid4().hex}"
        new.mkdir()
        stack.callback(shutil.rmtree, new, ignore_errors=True)
        stack.enter_context(in_use(new))
        path = new.rename(folder / f"{HIDDEN}{kind}-{target.name}-{_locks(folder)}-{uuid.uuid4().hex[:12]}")
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        yield path


def remove_abandoned(target: pathlib.Path, folder: pathlib.Path | None = None) -> None:
    """Removes hidden folders for `target` that no process has in use: of those of this machine that were killed."""
    with contextlib.suppress(OSError):
        folder = folder or _beside(target)
        own = rf"[a-z]+-{re.escape(target.name)}-{_locks(folder)}-[0-9a-f]{{12}}|discarded-[0-9a-f]{{32}}"
        for path in folder.iterdir():
            if re.fullmatch(rf"{re.escape(HIDDEN)}({own})", path.name):
                remove_unused(path)


def _locks(folder: pathlib.Path) -> str:
    """Returns a name of the locks of a folder: those of one kernel and one mount, without /proc of this call alone."""
    # Over NFS, Lustre and FUSE, locks of folders are not seen by other machines, nor through other mounts.
    try:
        kernel = _BOOT_ID.read_text()
    except OSError:
        kernel = uuid.uuid4().hex
    return hashlib.sha256(f"{kernel} {os.stat(folder).st_dev}".encode()).hexdigest()[:12]


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


def sync(path: pathlib.Path) -> None:
    """Waits until a file is on the disk; raises the `OSError` of a write to it, which a server may report only then.

    Before a file gets its name, else a crash of the system may leave an empty one under that. File systems that cannot
    say so are not asked.
    """
    with open(path, "rb") as file:
        try:
            os.fsync(file.fileno())
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise


def publish(partial: pathlib.Path, target: pathlib.Path, *, removed: Iterable[pathlib.Path] = ()) -> None:
    """Moves what a partial folder has to its target: by one rename where that is new, else file by file.

    Files of the target that are to be `removed` go before.
    """
    for path in partial.iterdir():
        sync(path)
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
