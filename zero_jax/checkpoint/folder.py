"""What a `Checkpointer` makes, replaces and deletes in its folder, by its own marks; everything else is left alone.

A save is written into `step_00000200.zero_jax-tmp`, in which a mark is the first file, and gets the name
`step_00000200` when it is whole. What is to be deleted is renamed first, and its mark goes last. So whatever a crash
leaves behind is known by name and mark together. In a bucket, where nothing can be renamed, a save is written in place:
the mark is the first object, `commit_success.txt` the last one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator

from etils import epath

from zero_jax.checkpoint.finding import COMMITTED, list_step_folders
from zero_jax.checkpoint.record import RECORD_FILE, CheckpointError, read_record, step_path
from zero_jax.core.files.untrusted import is_bucket, parse_json, read_file

MARK = "zero_jax.json"
_MAX_MARK_BYTES = 1 << 12
_PART = re.compile(r"step_(\d+)\.zero_jax-(tmp|replaced|deleted)")
# All that this release writes into a checkpoint, and that earlier ones had orbax write there.
_WRITTEN = re.compile(
    rf"({re.escape(MARK)}|commit_success\.txt|_CHECKPOINT_METADATA|record(/(metadata|commit_success\.txt))?"
    r"|state(/(commit_success\.txt|_METADATA|_sharding|manifest\.ocdbt|array_metadatas(/\w+)?|d(/[0-9a-f]+)?"
    r"|ocdbt\.process_\w+(/(manifest\.ocdbt|d(/[0-9a-f]+)?))?))?)(\.__lock)?"
)


class InTheWay(OSError):
    """Something that `Checkpointer` did not write has the name that it needs."""


class CheckpointFolder:
    """The folder of a `Checkpointer` that holds its lock; used by the first process alone."""

    def __init__(self, directory: epath.Path, log: Callable[[str], None]) -> None:
        """Touches nothing yet.

        Args:
          directory: the folder.
          log: is told what was removed or left.
        """
        self.directory, self._log = directory, log
        self._told: set[str] = set()

    def make(self) -> None:
        """Makes the folder itself.

        Raises:
          OSError: it cannot be made, or is a file.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.directory)) from error

    def writing(self, step: int) -> epath.Path:
        """Returns the folder that a save is written into; the same in all processes."""
        final = step_path(self.directory, step)
        return final if is_bucket(final) else _part(final, "tmp")

    def begin(self, step: int) -> None:
        """Removes what saves that were cut off have left, and makes the folder that a save is written into.

        Raises:
          OSError: the folder cannot be made, or something else has its name.
        """
        final, place = step_path(self.directory, step), self.writing(step)
        self._tidy(self._log)
        if _is_there(final):
            reason = _not_removable(final, step)
            if reason:
                raise InTheWay(f"{final} is in the way: {reason}. Move it away")
            if is_bucket(final):
                _remove(final)
        place.mkdir(parents=True, exist_ok=True)
        foreign = sorted(x.name for x in place.iterdir() if x.name != MARK)
        if foreign or os.path.islink(place):
            raise InTheWay(
                f"{place} is in the way: it holds {', '.join(foreign[:3])}, of another program. Move it away"
            )
        try:
            _write(place / MARK, _mark(step))
        except OSError:
            self.abandon()
            raise

    def publish(self, step: int, record: bytes) -> None:
        """Adds the record to a save of which all else is written, and lets it be the checkpoint of its step."""
        final, place = step_path(self.directory, step), self.writing(step)
        (place / RECORD_FILE).parent.mkdir(exist_ok=True)
        _write(place / RECORD_FILE, record)
        if is_bucket(final):
            (place / COMMITTED).write_text(f"the checkpoint of step {step} is whole")
            return
        old = _part(final, "replaced")
        if _is_there(final):
            reason = _not_removable(final, step)
            if reason:
                raise InTheWay(f"{final} is in the way: {reason}. Move it away")
            _mark_it(final, step)
            os.rename(final, old)
        os.rename(place, final)
        _sync(self.directory)
        if _is_there(old):
            self._discard(old, step)

    def abandon(self) -> None:
        """Removes the part of a save that failed, and puts back a checkpoint that it was to replace."""
        with contextlib.suppress(OSError):
            self._tidy(lambda _: None)

    def delete(self, step: int) -> None:
        """Deletes a checkpoint, so that a part of it is never taken for one, unless it holds what others wrote."""
        path = step_path(self.directory, step)
        reason = _not_removable(path, step)
        if reason:
            if reason not in self._told:
                self._log(f"{path} is not deleted: {reason}")
            self._told.add(reason)
        elif is_bucket(path):
            _remove(path)
        else:
            self._discard(path, step)

    def own_steps(self) -> list[int]:
        """Returns the steps of whole checkpoints that were written here, in order."""
        return [step for step in list_step_folders(self.directory) if _is_whole(self.directory, step)]

    def _discard(self, path: epath.Path, step: int) -> None:
        with contextlib.suppress(OSError):  # on a full disk it is deleted all the same, to make room
            _mark_it(path, step)
        doomed = _part(step_path(self.directory, step), "deleted")
        os.rename(path, doomed)
        _remove(doomed)

    def _tidy(self, log: Callable[[str], None]) -> None:
        """Finishes what was cut off: deletions, replacements, and saves by removing their parts."""
        for path in sorted(self.directory.iterdir()):
            match = _PART.fullmatch(path.name)
            step, kind = (int(match[1]), match[2]) if match else (-1, "")
            if is_bucket(path):
                step = next((step for step in _unfinished(path)), -1)
            if step < 0 or (match and path.name != _part(step_path(self.directory, step), kind).name):
                continue
            if not (is_marked(path, step) or _is_bare(path, step)) or _foreign(path):
                continue
            final = step_path(self.directory, step)
            if kind == "replaced" and not _is_there(final):
                os.rename(path, final)
            else:
                _remove(path)
                log(f"removed {path}: a save or a deletion that was cut off")


def _unfinished(path: epath.Path) -> Iterator[int]:
    """Yields the step of a folder in a bucket that a save was writing to."""
    match = re.fullmatch(r"step_(\d+)", path.name)
    if match and path == step_path(path.parent, int(match[1])) and not (path / COMMITTED).exists():
        yield int(match[1])


def is_marked(path: epath.Path, step: int) -> bool:
    """Tells whether a folder has the mark of a checkpoint, or a part of one, of a step."""
    if os.path.islink(path):
        return False
    try:
        return parse_json(read_file(path / MARK, limit_bytes=_MAX_MARK_BYTES)) == json.loads(_mark(step))
    except (OSError, ValueError):
        return False


def _is_bare(path: epath.Path, step: int) -> bool:
    """Tells whether a folder was made for a save that was ended before it had written its mark."""
    if is_bucket(path) or os.path.islink(path) or not path.is_dir():
        return False
    found = list(path.iterdir())
    if found != [path / MARK]:
        return not found
    try:
        return _mark(step).startswith(read_file(path / MARK, limit_bytes=_MAX_MARK_BYTES))
    except (OSError, ValueError):
        return False


def _not_removable(path: epath.Path, step: int) -> str:
    """Returns why a step's folder may not be replaced or deleted; nothing if a Checkpointer wrote all of it."""
    if os.path.islink(path):
        return "it is a symbolic link"
    if not path.is_dir():
        return "it is not a folder"
    if not is_marked(path, step):  # of an earlier release, whose mark is the record
        try:
            read_record(path)
        except CheckpointError as error:
            return f"zero_jax did not write it there ({error})"
    foreign = _foreign(path)
    return f"it holds {', '.join(foreign[:3])}, which zero_jax did not write" if foreign else ""


def _is_whole(directory: epath.Path, step: int) -> bool:
    path = step_path(directory, step)
    try:
        return not os.path.islink(path) and read_record(path).step == step
    except CheckpointError:
        return False


def _foreign(path: epath.Path) -> list[str]:
    """Returns what a folder holds that no save writes there."""
    found, pending = [], [path]
    while pending:
        for entry in pending.pop().iterdir():
            name = os.fspath(entry)[len(os.fspath(path)) :].strip("/")
            if os.path.islink(entry) or not _WRITTEN.fullmatch(name):
                found.append(name)
            elif entry.is_dir():
                pending.append(entry)
    return sorted(found)


def _remove(path: epath.Path) -> None:
    """Removes a folder of which all is our own: what makes it a checkpoint first, the mark last."""
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


def _is_there(path: epath.Path) -> bool:
    return os.path.lexists(path) if not is_bucket(path) else path.exists()


def _part(final: epath.Path, kind: str) -> epath.Path:
    return final.parent / f"{final.name}.zero_jax-{kind}"


def _mark(step: int) -> bytes:
    return json.dumps({"zero_jax": "checkpoint", "step": step}).encode()


def _mark_it(path: epath.Path, step: int) -> None:
    """Marks a checkpoint of an earlier release."""
    if not is_marked(path, step):
        _write(path / MARK, _mark(step))


def _write(path: epath.Path, content: bytes) -> None:
    """Writes a file so that it is there after a power cut, if anything that comes later is."""
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
