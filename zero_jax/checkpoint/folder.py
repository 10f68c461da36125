"""Writes, replaces and deletes the checkpoints in a folder, atomically; files of other programs are never touched.

A save writes a marker file and then everything else into `step_00000200.zero_jax-tmp`, and renames that folder to
`step_00000200` when it is complete. An older checkpoint of that step is first renamed to
`step_00000200.zero_jax-replaced`, which readers take where the step has no other folder. A deletion renames the folder
first, and removes the marker last. So the name and the marker together identify what a crash leaves behind. Buckets
have no rename: there a save writes in place, first the marker and last `commit_success.txt`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable

from etils import epath

from zero_jax.checkpoint.record import COMMITTED, RECORD_FILE, REPLACED, step_path
from zero_jax.core.files.system_errors import with_remedy
from zero_jax.core.files.untrusted import is_bucket, read_file
from zero_jax.core.text_tables import printable

MARK = "zero_jax.json"
_PARTIAL, _DELETED = ".zero_jax-tmp", ".zero_jax-deleted"
_ANY_NAME = re.compile(r"step_(\d+)(.*)")
_MAX_MARK_BYTES = 1 << 12
# All files that a save writes into a checkpoint: ours, and those of orbax and tensorstore.
_WRITTEN = re.compile(
    # `.__lock` ends the name under which tensorstore writes a file before it renames it.
    rf"({re.escape(MARK)}|{re.escape(COMMITTED)}|record(/metadata)?"
    r"|state(/(_METADATA|_sharding|manifest\.ocdbt|array_metadatas(/\w+)?|d(/[0-9a-f]+)?"
    r"|ocdbt\.process_\w+(/(manifest\.ocdbt|d(/[0-9a-f]+)?))?))?)(\.__lock)?"
)


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
        return self._path(step, "" if is_bucket(self.directory) else _PARTIAL)

    def begin(self, step: int) -> None:
        """Removes incomplete saves, and makes the folder that a save is written to."""
        self._clean_up(self._log)
        partial = self.writing(step)
        # The final folder too: what cannot be replaced is refused now, and not when all is written.
        for path in (self._path(step), partial):
            if _exists(path):
                _check_removable(path, step)
        if _exists(partial):  # in a bucket: the older checkpoint
            _remove(partial)
        partial.mkdir(exist_ok=is_bucket(partial))  # a bucket may still have the folder in a cache of names
        _write(partial / MARK, _marker_of(step))

    def publish(self, step: int, record: bytes) -> None:
        """Completes a save: writes its record, and renames its folder to that of its step."""
        final, partial, old = self._path(step), self.writing(step), self._path(step, REPLACED)
        (partial / RECORD_FILE).parent.mkdir(exist_ok=True)
        _write(partial / RECORD_FILE, record)
        if partial == final:
            (partial / COMMITTED).write_text(f"the checkpoint of step {step} is complete")
            return
        if _exists(final):
            _check_removable(final, step)  # again: it may have got files of others since `begin`
            os.rename(final, old)
        # A crash here leaves `old` alone, which readers take, and which the next save renames back.
        os.rename(partial, final)
        # The rename has to be on the disk before the older checkpoint is deleted.
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
        path = self._path(step)
        reason = _reason_to_keep(path, step)
        if reason:
            if reason not in self._reported:
                self._log(f"{path} is not deleted: {reason}")
            self._reported.add(reason)
        elif is_bucket(path):
            _remove(path)
        else:
            self._discard(path, step)

    def _path(self, step: int, kind: str = "") -> epath.Path:
        final = step_path(self.directory, step)
        return final.with_name(final.name + kind)

    def _discard(self, path: epath.Path, step: int) -> None:
        os.rename(path, self._path(step, _DELETED))
        _remove(self._path(step, _DELETED))

    def _clean_up(self, log: Callable[[str], None]) -> None:
        """Finishes interrupted deletions and replacements, and removes interrupted saves."""
        in_bucket = is_bucket(self.directory)
        kinds = {""} if in_bucket else {_PARTIAL, REPLACED, _DELETED}
        for path in sorted(self.directory.iterdir()):
            match = _ANY_NAME.fullmatch(path.name)
            if not match or match[2] not in kinds or (in_bucket and (path / COMMITTED).exists()):
                continue
            step, kind = int(match[1]), match[2]
            # A name of fewer digits, as `step_9`, is not ours.
            if path != self._path(step, kind) or _reason_to_keep(path, step, may_lack_marker=not in_bucket):
                continue
            if kind == REPLACED and not _exists(self._path(step)):
                os.rename(path, self._path(step))
            else:
                _remove(path)
                log(f"removed {path}: a save or a deletion that was cut off")


def _check_removable(path: epath.Path, step: int) -> None:
    if reason := _reason_to_keep(path, step):
        raise FileExistsError(f"{path} is in the way: {reason}. Move it away")


def _reason_to_keep(path: epath.Path, step: int, *, may_lack_marker: bool = False) -> str:
    """Returns why a step's folder may not be replaced or deleted, or ''; after a cut save it `may_lack_marker`."""
    if os.path.islink(path):
        return "it is a symbolic link"
    if not path.is_dir():
        return "it is not a folder"
    if foreign := _foreign(path):
        return f"it holds {', '.join(foreign[:3])}, which zero_jax did not write"
    try:
        marker = read_file(path / MARK, limit_bytes=_MAX_MARK_BYTES)
    except FileNotFoundError:
        marker = b""
    except (OSError, ValueError) as error:
        return f"its {MARK} cannot be read ({error})"
    # A crash may come before the marker, or within it (also at the end of a deletion, which removes it last).
    is_cut_off = may_lack_marker and os.listdir(path) in ([], [MARK]) and _marker_of(step).startswith(marker)
    return "" if marker == _marker_of(step) or is_cut_off else f"it has no {MARK} of step {step}"


def _foreign(path: epath.Path) -> list[str]:
    """Returns the files and folders in a folder that no save writes."""
    foreign, pending = [], [path]
    while pending:
        folder = pending.pop()
        # `iterdir` of etils leaves out names that end with a tilde, which editors give to copies of files.
        names = [entry.name for entry in folder.iterdir()] if is_bucket(folder) else os.listdir(folder)
        for entry in (folder / name for name in names):
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
        if entry.is_dir():
            entry.rmtree()  # does not follow links
        elif entry.name != MARK:
            entry.unlink(missing_ok=True)
    (path / MARK).unlink(missing_ok=True)
    if not is_bucket(path):
        os.rmdir(path)  # not `path.rmdir()`, which would remove names that end with a tilde
    elif path.exists():
        path.rmtree()


def _exists(path: epath.Path) -> bool:
    # The first for a link that leads nowhere, the second for buckets.
    return os.path.lexists(path) or path.exists()


def _marker_of(step: int) -> bytes:
    return json.dumps({"zero_jax": "checkpoint", "step": step}).encode()


def _write(path: epath.Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        if not is_bucket(path):
            file.flush()
            os.fsync(file.fileno())
    _sync(path.parent)


def _sync(folder: epath.Path) -> None:
    with contextlib.suppress(OSError):  # not every file system syncs folders, and buckets have none
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
