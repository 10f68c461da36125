"""Writes, replaces and deletes the checkpoints in a folder, atomically; files of other programs are never touched.

A save writes a marker file and then everything else into `step_00000200.zero_jax-tmp`, and renames that folder to
`step_00000200` when it is complete; an older checkpoint of that step is exchanged with it atomically. A deletion
renames the folder first, and removes the marker last. So the name and the marker together identify what a crash leaves
behind. Buckets have no rename: there a save writes in place, first the marker and last `commit_success.txt`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from typing import Any

from etils import epath

from zero_jax.checkpoint.finding import list_step_folders
from zero_jax.checkpoint.record import COMMITTED, RECORD_FILE, STEP, CheckpointError, read_record, step_path
from zero_jax.core.files.system_errors import with_remedy
from zero_jax.core.files.untrusted import is_bucket, parse_json, read_file
from zero_jax.core.text_tables import printable

MARK = "zero_jax.json"
_ANY_FOLDER, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD and the flag of renameat2(2)
_MAX_MARK_BYTES = 1 << 12
_TEMPORARY = re.compile(r"step_(\d+)\.zero_jax-(tmp|replaced|deleted)")
# All files that this release writes into a checkpoint, and that orbax wrote for earlier releases.
_WRITTEN = re.compile(
    rf"({re.escape(MARK)}|commit_success\.txt|_CHECKPOINT_METADATA|record(/(metadata|commit_success\.txt))?"
    r"|state(/(commit_success\.txt|_METADATA|_sharding|manifest\.ocdbt|array_metadatas(/\w+)?|d(/[0-9a-f]+)?"
    r"|ocdbt\.process_\w+(/(manifest\.ocdbt|d(/[0-9a-f]+)?))?))?)(\.__lock)?"
)


class InTheWay(OSError):
    """A file that `Checkpointer` did not write has the name of a checkpoint."""


class CheckpointFolder:
    """The folder of a `Checkpointer`; used by the process that has its lock."""

    def __init__(self, directory: epath.Path, log: Callable[[str], None]) -> None:
        """Touches no file yet; `log` is called with a line for what is removed, or cannot be."""
        self.directory, self._log = directory, log
        self._reported: set[str] = set()

    def make(self) -> None:
        """Makes the folder; raises `OSError` where it cannot be made, or is a file."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.directory)) from error

    def writing(self, step: int) -> epath.Path:
        """Returns the folder that a save is written to; the same in all processes."""
        final = step_path(self.directory, step)
        return final if is_bucket(final) else _temporary(final, "tmp")

    def begin(self, step: int) -> None:
        """Removes incomplete saves, and makes the folder that a save is written to.

        Raises:
          OSError: the folder cannot be made, or another file has its name.
        """
        final, partial = step_path(self.directory, step), self.writing(step)
        self._clean_up(self._log)
        if _exists(final):
            _check_removable(final, step)
            if is_bucket(final):
                _remove(final)
        partial.mkdir(parents=True, exist_ok=True)
        foreign = sorted(printable(x.name) for x in partial.iterdir() if x.name != MARK)
        if foreign or os.path.islink(partial):
            raise InTheWay(
                f"{partial} is in the way: it holds {', '.join(foreign[:3])} of another program. Move it away"
            )
        try:
            _write(partial / MARK, _marker_content(step))
        except OSError:
            self.abandon()
            raise

    def publish(self, step: int, record: bytes) -> None:
        """Completes a save: writes its record, and renames its folder to that of its step."""
        final, partial = step_path(self.directory, step), self.writing(step)
        (partial / RECORD_FILE).parent.mkdir(exist_ok=True)
        _write(partial / RECORD_FILE, record)
        if is_bucket(final):
            (partial / COMMITTED).write_text(f"the checkpoint of step {step} is complete")
            return
        old = _temporary(final, "replaced")
        if _exists(final):
            _check_removable(final, step)
            _add_marker(final, step)
            if _exchange(partial, final):
                old = partial
            else:
                os.rename(final, old)
        if not _exists(final):
            os.rename(partial, final)
        _sync(self.directory)
        if _exists(old):
            try:
                self._discard(old, step)
            except OSError as error:
                why = with_remedy(error)
                self._log(f"the checkpoint of step {step} is saved, but the older one of it cannot be deleted: {why}")

    def abandon(self) -> None:
        """Removes a failed save, and restores the checkpoint that it was to replace."""
        with contextlib.suppress(OSError):
            self._clean_up(lambda _: None)

    def delete(self, step: int) -> None:
        """Deletes a checkpoint atomically, unless its folder contains files of other programs."""
        path = step_path(self.directory, step)
        reason = _not_removable(path, step)
        if reason:
            if reason not in self._reported:
                self._log(f"{path} is not deleted: {reason}")
            self._reported.add(reason)
        elif is_bucket(path):
            _remove(path)
        else:
            self._discard(path, step)

    def own_steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints that are stored here, in order."""
        return [step for step in list_step_folders(self.directory) if _is_complete(self.directory, step)]

    def _discard(self, path: epath.Path, step: int) -> None:
        with contextlib.suppress(OSError):  # a full disk: deleted all the same, to make room
            _add_marker(path, step)
        doomed = _temporary(step_path(self.directory, step), "deleted")
        os.rename(path, doomed)
        _remove(doomed)

    def _clean_up(self, log: Callable[[str], None]) -> None:
        """Finishes interrupted deletions and replacements, and removes interrupted saves."""
        in_bucket = is_bucket(self.directory)
        for path in sorted(self.directory.iterdir()):
            match = (STEP if in_bucket else _TEMPORARY).fullmatch(path.name)
            if not match or (in_bucket and (path / COMMITTED).exists()):
                continue
            step, kind = int(match[1]), "" if in_bucket else match[2]
            final = step_path(self.directory, step)
            if path.name != (_temporary(final, kind) if kind else final).name:
                continue
            if not (is_marked(path, step) or _is_unmarked(path, step)) or _foreign(path):
                continue
            if kind == "replaced" and not _exists(final):
                os.rename(path, final)
            else:
                _remove(path)
                log(f"removed {path}: a save or a deletion that was cut off")


def is_marked(path: epath.Path, step: int) -> bool:
    """Returns whether a folder has the marker of a checkpoint, complete or not, of a step."""
    if os.path.islink(path):
        return False
    try:
        return parse_json(read_file(path / MARK, limit_bytes=_MAX_MARK_BYTES)) == json.loads(_marker_content(step))
    except (OSError, ValueError):
        return False


def _is_unmarked(path: epath.Path, step: int) -> bool:
    """Returns whether a folder is of a save that ended before its marker was written."""
    if is_bucket(path) or os.path.islink(path) or not path.is_dir():
        return False
    entries = list(path.iterdir())
    if entries != [path / MARK]:
        return not entries
    try:
        return _marker_content(step).startswith(read_file(path / MARK, limit_bytes=_MAX_MARK_BYTES))
    except (OSError, ValueError):
        return False


def _not_removable(path: epath.Path, step: int) -> str:
    """Returns why a step's folder may not be replaced or deleted; '' if a Checkpointer wrote all of it."""
    if os.path.islink(path):
        return "it is a symbolic link"
    if not path.is_dir():
        return "it is not a folder"
    if not is_marked(path, step):  # of an earlier release, which has the record as its marker
        try:
            read_record(path)
        except CheckpointError as error:
            return f"zero_jax did not write it there ({error})"
    foreign = _foreign(path)
    return f"it holds {', '.join(foreign[:3])}, which zero_jax did not write" if foreign else ""


def _check_removable(path: epath.Path, step: int) -> None:
    if reason := _not_removable(path, step):
        raise InTheWay(f"{path} is in the way: {reason}. Move it away")


def _is_complete(directory: epath.Path, step: int) -> bool:
    path = step_path(directory, step)
    try:
        return not os.path.islink(path) and read_record(path).step == step
    except CheckpointError:
        return False


def _foreign(path: epath.Path) -> list[str]:
    """Returns the files in a folder that no save writes."""
    foreign, pending = [], [path]
    while pending:
        for entry in pending.pop().iterdir():
            name = os.fspath(entry)[len(os.fspath(path)) :].strip("/")
            if os.path.islink(entry) or not _WRITTEN.fullmatch(name):
                foreign.append(printable(name))
            elif entry.is_dir():
                pending.append(entry)
    return sorted(foreign)


def _remove(path: epath.Path) -> None:
    """Removes a folder that has only our files: first the file that commits it, last the marker."""
    (path / COMMITTED).unlink(missing_ok=True)
    for entry in path.iterdir():
        if entry.name == MARK:
            continue
        if not entry.is_dir():
            entry.unlink(missing_ok=True)
        elif is_bucket(entry):
            entry.rmtree()
        else:
            shutil.rmtree(entry)  # does not follow links
    (path / MARK).unlink(missing_ok=True)
    if is_bucket(path):
        if path.exists():
            path.rmtree()
    else:
        os.rmdir(path)


def _exists(path: epath.Path) -> bool:
    return os.path.lexists(path) if not is_bucket(path) else path.exists()


def _exchange(partial: epath.Path, final: epath.Path) -> bool:
    """Exchanges the names of two folders atomically; returns False if the system cannot."""
    rename: Any = getattr(ctypes.CDLL(None), "renameat2", None)  # of Linux, on local file systems
    names = os.fsencode(partial), os.fsencode(final)
    return rename is not None and rename(_ANY_FOLDER, names[0], _ANY_FOLDER, names[1], _RENAME_EXCHANGE) == 0


def _temporary(final: epath.Path, kind: str) -> epath.Path:
    return final.parent / f"{final.name}.zero_jax-{kind}"


def _marker_content(step: int) -> bytes:
    return json.dumps({"zero_jax": "checkpoint", "step": step}).encode()


def _add_marker(path: epath.Path, step: int) -> None:
    """Adds the marker to a checkpoint of an earlier release."""
    if not is_marked(path, step):
        _write(path / MARK, _marker_content(step))


def _write(path: epath.Path, content: bytes) -> None:
    """Writes a file and flushes it to the disk."""
    if is_bucket(path):
        path.write_bytes(content)
        return
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)


def _sync(folder: epath.Path) -> None:
    with contextlib.suppress(OSError):  # not every file system syncs folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
