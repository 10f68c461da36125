"""Records of a run as JSON Lines: appended, truncated where a run resumes, and read.

A record is a dict of metrics with a `kind` (`train`, `validation`) and a `step`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from zero_jax.core.files.partial_folder import sync
from zero_jax.core.files.untrusted import open_regular
from zero_jax.core.text_tables import plain

Record = Mapping[str, Any]


@contextlib.contextmanager
def whole_file(path: pathlib.Path, *, outlasts: bool = True) -> Iterator[pathlib.Path]:
    """Yields a hidden path beside a file to write to, which takes the file's place in the end, or is removed.

    Waits for the disk, unless the file need not outlast a crash of the system.
    """
    # The name ends as the file's does: matplotlib reads the format in it.
    partial = path.with_name(f".partial-{path.name}")
    try:
        yield partial
        if outlasts:
            sync(partial)
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_text(path: pathlib.Path, text: str, *, outlasts: bool = True) -> None:
    """Writes a file atomically, as `whole_file`; the `OSError` names it, unlike the system's own on a full disk."""
    try:
        with whole_file(path, outlasts=outlasts) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


class JsonLinesWriter:
    """Appends records to a file, each as a line of JSON, completely or not at all; NaN and infinities become null."""

    def __init__(
        self,
        path: str | pathlib.Path,
        *,
        resume_step: int | None = None,
        is_evaluated: bool = True,
        log: Callable[[str], None] = print,
    ):
        """Opens the file.

        In a file that exists, what the resumed run writes again is removed: records after `resume_step` and, unless
        `is_evaluated`, the validation at it. None makes a new file. Lines that are no records are moved to a file
        beside it, `.damaged`, with a line for the `log`; half a line at the end, which a crash leaves, is removed.
        """
        self._path = pathlib.Path(path)
        if resume_step is not None and self._path.exists():
            _cut(self._path, resume_step, is_evaluated, log)
        self._file = self._open("xb" if resume_step is None else "ab")

    def write(self, record: Record) -> None:
        """Writes a record, to a new file if the folder was removed; its `OSError` names the file."""
        line = left = json.dumps(plain(record)).encode() + b"\n"
        try:
            if not self._path.exists():
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file.close()
                self._file = self._open("ab")
            while left:
                # An unbuffered file may take a part of the line, as on a disk that gets full.
                left = left[self._file.write(left) :]
        except OSError as error:
            if left != line:
                self._file.truncate(self._file.seek(self._size_bytes))  # half a line
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self._size_bytes += len(line)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _open(self, mode: Literal["xb", "ab"]) -> io.FileIO:
        # Unbuffered: a line that could not be written must not appear later, between others.
        file = open(self._path, mode, buffering=0)
        self._size_bytes = file.seek(0, os.SEEK_END)
        return file


def read_records(path: str | pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a JSON Lines file, without invalid lines, such as an incomplete last one."""
    return (record for _, record in _lines(path) if record is not None)


def _lines(path: str | pathlib.Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yields the lines of a file, each with its record if it is one; never waits for a pipe."""
    try:
        file = open_regular(path)
    except ValueError as error:  # readers of records expect the errors of files
        raise OSError(errno.EINVAL, "it is no regular file: move it away", str(path)) from error
    with file:
        for line in file:
            yield line, _parse(line)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    # JSON has integers of any size, and steps go into NumPy's arrays of 64 bits.
    return record if isinstance(step, int) and abs(step) < 2**63 else None


def _cut(path: pathlib.Path, last_step: int, is_evaluated: bool, log: Callable[[str], None]) -> None:
    """Removes records after a step, and its validation unless evaluated, atomically; moves damaged lines."""
    damaged = list[bytes]()
    with whole_file(path) as partial:
        with open(partial, "w", encoding="utf-8") as file:
            for line, record in _lines(path):
                if record is None:
                    damaged += [line] if line.endswith(b"\n") else []
                # A bool counts 0 or 1: records up to `last_step`, and before it a validation that is made again.
                elif record["step"] < last_step + (is_evaluated or record.get("kind") != "validation"):
                    file.write(json.dumps(record) + "\n")
        if damaged:
            # Before the rename: after a crash between the two, damaged lines are in both files, not in none.
            with open(path.with_name(f"{path.name}.damaged"), "ab") as file:
                file.writelines(damaged)
    if damaged:
        log(f"{path.name}: {len(damaged)} damaged lines, which are no records, are in {path.name}.damaged now")
