"""Errors of the system in words: the file, the reason, and what to do about it."""

from __future__ import annotations

import errno
import os
import pathlib
from collections.abc import Mapping

from zero_jax.core.text_tables import printable

_WRITABLE = "permission was denied: make the file and its folder readable and writable, or choose another place"
_REMEDIES: Mapping[int, str] = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EFBIG: "a file may not grow that large: raise the limit (`ulimit -f`)",
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.EROFS: "the file system is read-only: mount it for writing, or choose another place",
    errno.ENOENT: "it does not exist, or was removed: check the path",
    errno.ENOTDIR: "a part of the path is a file: choose another path, or move that file away",
    errno.EISDIR: "it is a folder where a file belongs: move it away",
    errno.EEXIST: "it exists already: move it away, or choose another place",
    errno.ENOTEMPTY: "the folder has something in it: move that away, or choose another place",
    errno.EBUSY: "another program uses it: end that one",
    errno.ETXTBSY: "another program uses it: end that one",
    errno.ENAMETOOLONG: "the name is too long: choose a shorter one",
    errno.ELOOP: "symbolic links lead in a circle: remove one of them",
    errno.EMFILE: "too many files are open: raise the limit (`ulimit -n`)",
    errno.ENFILE: "too many files are open on this machine: end other programs",
    errno.ENOMEM: "the memory is full: end other programs",
    errno.EIO: "the disk or its connection fails: see the system's log, and choose another place",
    errno.ESTALE: "the network file system has lost it: mount it again",
    errno.ENXIO: "it is no regular file: move it away",
}
_MAX_CHARACTERS = 2000  # of an error of a library
_OTHER = "the system says no more: check that the place can be used, or choose another one"
_LEADS_NOWHERE = "a part of the path is a link to a place that does not exist: mount its disk, or remove the link"
_REMOVED = "the current folder was removed: change to one that exists"


def with_remedy(error: Exception) -> str:
    """Returns the first line of an error, and what to do about it if the system's reason is known."""
    code = error.errno if isinstance(error, OSError) else None
    if isinstance(error, OSError) and code is not None:
        files = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
        reason = error.strerror or os.strerror(code)
        if files:
            reason = f"{' -> '.join(map(printable, files))}: {reason}"
        is_gone = code == errno.ENOENT and not any(map(os.path.isabs, files)) and not _has_current_folder()
        is_lost = code in (errno.ENOENT, errno.EEXIST, errno.ENOTDIR) and any(map(_leads_nowhere, files))
        remedy = _REMOVED if is_gone else _LEADS_NOWHERE if is_lost else _REMEDIES.get(code, _OTHER)
        return f"{reason} ({remedy})"
    lines = str(error).splitlines() or [type(error).__name__]
    # tensorstore appends its spec and lines of its source.
    first = printable(lines[0], limit=_MAX_CHARACTERS).split(" [tensorstore_spec=")[0].split(" [source locations=")[0]
    # Libraries such as tensorstore have the system's reason in the text alone.
    remedies = [text for known, text in _REMEDIES.items() if os.strerror(known) in first]
    return f"{first} ({remedies[0]})" if remedies else first


def _leads_nowhere(path: str) -> bool:
    parts = (path, *map(os.fspath, pathlib.PurePath(path).parents))
    return any(os.path.islink(part) and not os.path.exists(part) for part in parts)


def _has_current_folder() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True
