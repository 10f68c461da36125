"""The user's cache folder: where it is, entries that prove their content, and a bound on their size.

Several processes may use one folder at once. What is no entry of the cache's own is never touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import pathlib
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator

MAX_BYTES = 2 * 10**9
_DISCARDED = ".zero_jax-discarded-"  # an entry on its way out, renamed so that nobody begins to read it
_PARTIAL = ".zero_jax-partial-"
_ABANDONED_SECONDS = 24 * 3600.0


def cache_folder(kind: str) -> pathlib.Path:
    """Returns the folder for things of a kind (`programs`, `tokens`), below `zero_jax` in the user's cache folder.

    Raises:
      ValueError: the user has no home folder, and `XDG_CACHE_HOME` is not set.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return pathlib.Path(base or pathlib.Path.home() / ".cache") / "zero_jax" / kind
    except RuntimeError as error:
        raise ValueError(f"no folder for the cache of {kind} ({error}): set HOME or XDG_CACHE_HOME") from error


def write_entry(path: pathlib.Path, content: bytes, *, mark: bytes) -> None:
    """Writes a file that `read_entry` believes, in one move: a process that ends in between leaves no entry.

    Args:
      path: the file; its name becomes part of what is proved, so that no entry stands in for another.
      content: what to keep.
      mark: the line that files of this kind and version begin with.

    Raises:
      OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=_PARTIAL, dir=path.parent)
    partial = pathlib.Path(name)
    try:
        with open(handle, "wb") as file:
            file.write(mark + _proof(path, content) + content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_entry(path: pathlib.Path, *, mark: bytes) -> bytes | None:
    """Returns what `write_entry` wrote and counts it as used, or None; an entry that is damaged is removed."""
    try:
        written = path.read_bytes()
    except OSError:
        return None
    if not has_mark(path, mark):
        return None  # of another version, or not of this cache: not ours to remove
    proof, content = written[len(mark) :][:32], written[len(mark) + 32 :]
    if proof != _proof(path, content):
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    touch(path)
    return content


def _proof(path: pathlib.Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + b"\0" + content).digest()


def has_mark(path: pathlib.Path, mark: bytes) -> bool:
    """Whether a regular file begins with a mark."""
    try:
        if path.is_symlink() or not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(mark)) == mark
    except OSError:
        return False


def touch(entry: pathlib.Path) -> None:
    """Counts an entry, a file or a folder, as used now; `evict_oldest` goes by that."""
    with contextlib.suppress(OSError):
        os.utime(entry)


@contextlib.contextmanager
def in_use(entry: pathlib.Path) -> Iterator[None]:
    """Keeps an entry, a file or a folder, from being evicted while the context is open, by processes of this machine.

    Raises:
      OSError: there is no such entry (any more).
    """
    handle = os.open(entry, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_SH)
        if not os.path.samestat(os.fstat(handle), os.stat(entry)):
            raise FileNotFoundError(f"{entry} was replaced while it was opened")
        touch(entry)
        yield
    finally:
        os.close(handle)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entry:
    path: pathlib.Path
    num_bytes: int
    used: float


def evict_oldest(
    folder: pathlib.Path,
    *,
    is_own: Callable[[pathlib.Path], bool],
    max_bytes: int = MAX_BYTES,
    keep: pathlib.Path | None = None,
) -> list[pathlib.Path]:
    """Removes the entries of a folder that were not used for longest, until the rest is within a size.

    Args:
      folder: the cache; only what is directly in it is looked at.
      is_own: whether a path, a file or a folder, is an entry of this cache, by a mark that nothing else carries.
      max_bytes: the size that all entries may have together.
      keep: an entry to leave there however large it is: the one that is needed now.

    Returns:
      What was removed. Entries that are `in_use`, and those that cannot be removed, stay.
    """
    try:
        paths = list(folder.iterdir())
    except OSError:
        return []
    _remove_abandoned(paths)
    whole = [path for path in paths if not path.name.startswith((_DISCARDED, _PARTIAL))]
    entries = [entry for path in whole if is_own(path) and (entry := _entry(path))]
    excess, removed = sum(entry.num_bytes for entry in entries) - max_bytes, []
    for entry in sorted(entries, key=lambda entry: entry.used):
        if excess <= 0:
            break
        if entry.path != keep and _remove(entry.path):
            removed.append(entry.path)
            excess -= entry.num_bytes
    return removed


def _entry(path: pathlib.Path) -> _Entry | None:
    """Takes down an entry, or returns None if it vanished meanwhile."""
    try:
        files = [path, *path.rglob("*")] if path.is_dir() else [path]
        # What it takes on the disk: a file with holes takes less than its size.
        num_bytes = sum(file.lstat().st_blocks * 512 for file in files)
        return _Entry(path=path, num_bytes=num_bytes, used=path.lstat().st_mtime)
    except OSError:
        return None


def _remove(path: pathlib.Path) -> bool:
    """Removes an entry that nobody uses, in one move; returns whether it is gone."""
    discarded = path.with_name(f"{_DISCARDED}{uuid.uuid4().hex}")
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.rename(discarded)
    except FileNotFoundError:
        return True  # another process was faster
    except OSError:
        return False  # in use, or in a folder that cannot be written
    finally:
        os.close(handle)
    return _discard(discarded)


def _discard(path: pathlib.Path) -> bool:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
    return not path.exists()


def _remove_abandoned(paths: list[pathlib.Path]) -> None:
    """Removes what processes left that ended while they wrote or removed an entry, a day ago or earlier."""
    for path in paths:
        with contextlib.suppress(OSError):
            is_old = time.time() - path.lstat().st_mtime > _ABANDONED_SECONDS
            if path.name.startswith(_DISCARDED) or (path.name.startswith(_PARTIAL) and is_old):
                _discard(path)
