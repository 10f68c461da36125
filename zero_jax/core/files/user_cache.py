"""The user's cache folder: its path, entries with checksums, and eviction of the least recently used.

Several processes may use a folder at once. Files that are no entries of the cache are never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pathlib
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator

from zero_jax.core.files.untrusted import open_regular

MAX_BYTES = 2 * 10**9
HIDDEN = ".zero_jax-"
_DISCARDED = f"{HIDDEN}discarded-"  # an entry that is being removed, renamed so that no process starts to read it
PARTIAL = f"{HIDDEN}partial-"  # an entry that is being written; a day old, it is removed by `evict_oldest`
_ABANDONED_SECONDS = 24 * 3600.0


def cache_folder(kind: str) -> pathlib.Path:
    """Returns the folder of a kind of entries (`programs`, `tokens`): `zero_jax/<kind>` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return pathlib.Path(base or pathlib.Path.home() / ".cache") / "zero_jax" / kind
    except RuntimeError as error:
        raise ValueError(f"no folder for the cache of {kind} ({error}): set HOME or XDG_CACHE_HOME") from error


def write_entry(path: pathlib.Path, content: bytes, *, mark: bytes) -> None:
    """Writes an entry atomically, after a mark of its kind and version and a checksum of name and content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the entry's folder: only within a file system is a rename atomic.
    handle, name = tempfile.mkstemp(prefix=PARTIAL, dir=path.parent)
    partial = pathlib.Path(name)
    try:
        with open(handle, "wb") as file:
            file.write(mark + _checksum(path, content) + content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_entry(path: pathlib.Path, *, mark: bytes) -> bytes | None:
    """Returns the content of an entry and marks it as used, or None; removes a damaged entry."""
    written = _read(path)
    if not written.startswith(mark):
        return None  # of another version, or not of this cache: not removed
    checksum, content = written[len(mark) :][:32], written[len(mark) + 32 :]
    if checksum != _checksum(path, content):
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    _touch(path)
    return content


def _checksum(path: pathlib.Path, content: bytes) -> bytes:
    # With the name, which is the entry's key: an entry that was renamed is not taken for another one.
    return hashlib.sha256(path.name.encode() + b"\0" + content).digest()


def has_mark(path: pathlib.Path, mark: bytes) -> bool:
    """Returns whether a regular file begins with a mark; False for a link to one."""
    return _read(path, len(mark)) == mark


def _read(path: pathlib.Path, num_bytes: int = -1) -> bytes:
    """Returns the first bytes of a file, all by default; none of a link, a pipe, or what cannot be read."""
    # A `ValueError` is of what is no regular file.
    with contextlib.suppress(OSError, ValueError):
        if not path.is_symlink():
            with open_regular(path) as file:
                return file.read(num_bytes)
    return b""


@contextlib.contextmanager
def in_use(entry: pathlib.Path) -> Iterator[None]:
    """Keeps processes of this machine from evicting an entry, a file or a folder, while the context is open."""
    handle = os.open(entry, os.O_RDONLY | os.O_NONBLOCK)  # a pipe, which is no entry, is not waited for
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_SH)
        # Between `open` and `flock` another process may have removed the entry, or renamed a new one to its place.
        if not os.path.samestat(os.fstat(handle), os.stat(entry)):
            raise FileNotFoundError(f"{entry} was replaced while it was opened")
        _touch(entry)
        yield
    finally:
        os.close(handle)


def evict_oldest(
    folder: pathlib.Path,
    *,
    is_own: Callable[[pathlib.Path], bool],
    max_bytes: int = MAX_BYTES,
    keep: pathlib.Path | None = None,
) -> list[pathlib.Path]:
    """Removes, and returns, the least recently used own entries until the rest fits, without `keep` and `in_use`."""
    try:
        paths = list(folder.iterdir())
    except OSError:
        return []
    entries, removed = [], []
    for path in paths:
        if path.name.startswith((_DISCARDED, PARTIAL)):
            with contextlib.suppress(OSError):
                # The newest of all: a folder has the time of its last new file, and one may be written for days.
                last = max(x.lstat().st_mtime for x in [path, *path.rglob("*")])
                is_old = time.time() - last > _ABANDONED_SECONDS
                if is_old or path.name.startswith(_DISCARDED):
                    remove_unused(path)  # the clock may have been set forward while it is written
        elif is_own(path) and (entry := _use_and_bytes(path)):
            entries.append((*entry, path))
    excess = sum(num_bytes for _, num_bytes, _ in entries) - max_bytes
    for _, num_bytes, path in sorted(entries):
        if excess > 0 and path != keep and remove_unused(path):
            removed.append(path)
            excess -= num_bytes
    return removed


def _touch(entry: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        # The time of modification: file systems may not record that of access (`noatime`).
        os.utime(entry)


def _use_and_bytes(path: pathlib.Path) -> tuple[float, int] | None:
    """Returns the time of the last use of an entry and its bytes, or None if it was removed meanwhile."""
    try:
        files = [path, *path.rglob("*")] if path.is_dir() else [path]
        # The size on the disk: a sparse file takes less than its length.
        num_bytes = sum(file.lstat().st_blocks * 512 for file in files)
        return path.lstat().st_mtime, num_bytes
    except OSError:
        return None


def remove_unused(path: pathlib.Path) -> bool:
    """Removes an entry that is not `in_use`, where the file system has locks; returns whether it is gone."""
    discarded = path.with_name(f"{_DISCARDED}{uuid.uuid4().hex}")
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while a process has it `in_use`
        # Renamed at once and removed at leisure: a folder that is half removed would be read as an entry.
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
