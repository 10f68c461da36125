"""Finds the files of a data set and their format, or opens one of the Hugging Face hub by the package `datasets`."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import os
import pathlib
import re
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from zero_jax.core.extras import extra
from zero_jax.core.files.untrusted import open_regular, user_path
from zero_jax.core.text_tables import printable

HUB = "hf:"  # begins the name of a data set of the hub
_FORM = re.compile(r"(?P<name>[^:@]+)(:(?P<subset>[^@]+))?(@(?P<split>.+))?")
Format = Literal["auto", "text", "jsonl", "chat", "parquet", "tokens", "arrayrecord"]

# Tables, generated text and code about syntax, unlike the Python that people write.
_STDLIB_SKIPPED = frozenset(
    "site-packages dist-packages test tests idlelib idle_test lib2to3 encodings pydoc_data turtledemo".split()
)
_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrayrecord": "arrayrecord",
    ".array_record": "arrayrecord",
    ".npy": "tokens",
    ".bin": "tokens",
}
_OF_FILE_SYSTEM = "lost+found"  # in the root of a disk, where only the superuser may list it
_BESIDE_TOKENS = ".documents.npy"  # the offsets of a token file's documents, no data of its own


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file of a data set, with its size and modification time when it was listed."""

    path: pathlib.Path  # its path
    name: str  # its path relative to the data set's folder
    size_bytes: int  # its size
    modified_ns: int  # its modification time, in nanoseconds

    def __str__(self) -> str:
        return printable(self.path)

    def check(self) -> None:
        """Raises `ValueError` if the file is gone or has changed."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise ValueError(f"{self} vanished while it was read ({error.strerror}): run again") from error
        if (status.st_size, status.st_mtime_ns) != (self.size_bytes, self.modified_ns):
            raise ValueError(f"{self} changed while it was read: run again when it is written completely")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """The files of a data set.

    Attributes:
      name: the path of the data set, or `stdlib`.
      format: how to read the files; never `auto`.
      files: the files, sorted by name.
      num_left_out: files of a folder that are not read: empty ones, binary ones among text, those of other formats.
      table: a `datasets.Dataset` in place of files, whose rows are read as lines of JSON are.

    Example:
      >>> _ = (folder / "a.txt").write_text("one text")
      >>> source = zero.data.find_source(str(folder / "a.txt"), format="auto")
      >>> source.name.endswith("a.txt")
      True
    """

    name: str
    format: Format
    files: tuple[SourceFile, ...]
    num_left_out: int = 0
    table: Any = dataclasses.field(default=None, compare=False)

    def fingerprint(self, *settings: str) -> str:
        """Returns a hash of settings, and of the paths, sizes and times of the files and of offsets beside them."""
        digest = hashlib.sha256(repr((self.format, *settings)).encode())
        beside = [offsets_beside(file.path) for file in self.files if self.format == "tokens"]
        offsets = [source_file(path, root=path.parent) for path in beside if path.is_file()]
        for file in (*self.files, *offsets):
            digest.update(repr((str(file.path.resolve()), file.name, file.size_bytes, file.modified_ns)).encode())
        if self.table is not None:
            digest.update(repr((self.name, self.table._fingerprint)).encode())
        return digest.hexdigest()[:24]


def find_source(data: str, *, format: Format = "auto") -> Source:
    """Finds the files of a data set.

    Args:
      data: `stdlib`, the path of a file or of a folder, a pattern such as `corpus/*.jsonl`, or `hf:NAME`.
      format: how to read them; `auto` goes by the names of the files.

    Raises:
      ValueError: there are none, all are empty or binary, formats are mixed, or one cannot be read.

    Example:
      >>> _ = (folder / "a.txt").write_text("one text")
      >>> zero.data.find_source(str(folder / "a.txt"), format="auto").format
      'text'
    """
    if data.startswith(HUB):
        table = open_hub(data, is_streamed=False)
        if not len(table):
            raise ValueError(f"{data} has no rows: give another data set, or another split (hf:NAME@SPLIT)")
        return Source(name=data, format="chat" if format == "chat" else "jsonl", files=(), table=table)
    try:
        return _find_files(data, format)
    except OSError as error:
        raise ValueError(
            f"cannot read {printable(error.filename)} ({error.strerror}): make it readable, or move it"
        ) from error


def _find_files(data: str, format: Format) -> Source:
    if data == "stdlib":
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        paths = [path for path in root.rglob("*.py") if _STDLIB_SKIPPED.isdisjoint(path.relative_to(root).parts)]
        if not paths:
            raise ValueError(f"this Python has no .py files at {root}: give the path of some text with --data PATH")
        return _source(f"Python's standard library ({root})", root, paths, "text")
    root = user_path(data)
    if root.is_file():
        return _source(str(root), root.parent, [root], _choose([root], format, root))
    is_folder = root.is_dir()
    paths = [*_files_below(root)] if is_folder else [*map(pathlib.Path, glob.glob(str(root), recursive=True))]
    # Not `is_file`, by which a link to nothing would be left out without a word.
    paths = [path for path in paths if stat.S_ISREG(path.stat().st_mode)]
    if not is_folder:
        root = pathlib.Path()
        if not paths:
            raise ValueError(
                f"there is no {data}: give the path of a text file or of a folder of them, of .jsonl, .parquet, "
                "ArrayRecord or token files, or 'stdlib' for the source code of Python's standard library"
            )
    paths = [path for path in paths if not path.name.endswith(_BESIDE_TOKENS)]
    return _source(data, root, paths, _choose(paths, format, root))


def _files_below(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields what is in a folder and those below it, hidden ones left out; raises `OSError` for one it cannot list."""
    is_read = lambda name: not name.startswith(".") and name != _OF_FILE_SYSTEM  # noqa: E731

    def fail(error: OSError) -> None:
        raise error

    seen = {os.path.realpath(root)}
    for place, folders, names in os.walk(root, onerror=fail, followlinks=True):
        yield from (pathlib.Path(place, name) for name in filter(is_read, names))
        below, folders[:] = sorted(filter(is_read, folders)), []
        for name in below:
            # Links may lead to a folder twice, or in a circle.
            if (target := os.path.realpath(os.path.join(place, name))) not in seen:
                seen.add(target)
                folders.append(name)


def source_file(path: pathlib.Path, *, root: pathlib.Path | None = None) -> SourceFile:
    """Returns a file with its present size and modification time, named relative to the folder `root`."""
    status = path.stat()
    inside = path.relative_to(root) if root and path.is_relative_to(root) else path
    return SourceFile(path=path, name=inside.as_posix(), size_bytes=status.st_size, modified_ns=status.st_mtime_ns)


def offsets_beside(path: pathlib.Path) -> pathlib.Path:
    """Returns the file with the offsets of the documents in a token file, which need not be there."""
    return path.with_name(path.stem + _BESIDE_TOKENS)


def _choose(paths: Sequence[pathlib.Path], format: Format, root: pathlib.Path) -> Format:
    """Returns the format of files: `format`, or by their names where that is `auto`."""
    if format != "auto":
        return format
    kinds: dict[Format, list[pathlib.Path]] = {}
    for path in paths:
        kinds.setdefault(_format_of(path), []).append(path)
    if "text" in kinds and not [path for path in kinds["text"] if _is_text(path)]:
        del kinds["text"]
    if "text" in kinds and len(paths) > 1:
        kinds.pop("tokens", None)  # among text, what ends in .bin is anything
    if [*kinds] == ["text"] and all(path.suffix.lower() == ".json" for path in paths):
        raise ValueError(
            f"{root}: a file that ends in .json may hold a JSON object a line, or text: say --format jsonl for the "
            "text of its objects, or --format text for the file as it stands"
        )
    if len(kinds) > 1:
        counts = ", ".join(
            f"{len(files)} of {kind} ({printable(files[0].name)})" for kind, files in sorted(kinds.items())
        )
        raise ValueError(f"{root} holds files of several formats: {counts}. Say which to read with --format")
    return next(iter(kinds)) if kinds else "text"


def _format_of(path: pathlib.Path) -> Format:
    kinds: list[Format] = [kind for ending, kind in _FORMATS.items() if path.name.lower().endswith(ending)]
    return kinds[0] if kinds else "text"


def _source(name: str, root: pathlib.Path, paths: Iterable[pathlib.Path], format: Format) -> Source:
    """Makes a source of the files that are not empty and, for text, not binary."""
    # File systems list files in different orders, and documents follow this one.
    paths = sorted(paths)
    named_format = "jsonl" if format == "chat" else format
    with_suffix = [path for path in paths if _format_of(path) == named_format] if format != "text" else []
    non_empty = [path for path in with_suffix or paths if (_is_text(path) if format == "text" else _num_bytes(path))]
    if not non_empty:
        raise ValueError(
            f"{name} holds no text (files that are empty, hidden, or have a NUL byte, as UTF-16 and archives have, or "
            "are pointers of Git LFS, which `git lfs pull` replaces, do not count): "
            "give the path of a text file or of a folder of them"
            if format == "text"
            else f"{name} is empty: give files of format {format} that hold something"
        )
    return Source(
        name=name,
        format=format,
        files=tuple(source_file(path, root=root) for path in non_empty),
        num_left_out=len(paths) - len(non_empty),
    )


def _is_text(path: pathlib.Path) -> bool:
    """Returns whether a file is text, as git decides: no NUL in the first 8,000 bytes; a pointer of Git LFS is none."""
    try:
        with open_regular(path) as file:
            head = file.read(8000)
    except ValueError:
        return False
    return bool(head) and b"\0" not in head


def _num_bytes(path: pathlib.Path) -> int:
    try:
        with open_regular(path) as file:
            return os.fstat(file.fileno()).st_size
    except ValueError as error:
        raise ValueError(f"cannot read {printable(os.fspath(path))}: {error}") from error


def open_hub(data: str, *, is_streamed: bool) -> Any:
    """Opens a data set: a `datasets.Dataset`, or if `is_streamed` a `datasets.IterableDataset`.

    `data` is `hf:` and the name on the hub, or a folder of files or one that `Dataset.save_to_disk` wrote, with
    `:SUBSET` and `@SPLIT` (train without that) if they are needed.
    """
    with extra("hf"):
        import datasets  # pyright: ignore[reportMissingImports]

    place = data.removeprefix(HUB)
    match = None if user_path(place).is_dir() else _FORM.fullmatch(place)
    name, subset, split = match.group("name", "subset", "split") if match else (place, None, None)
    folder = user_path(name)
    try:
        if (folder / "state.json").is_file():
            table = datasets.Dataset.load_from_disk(str(folder))
            # `datasets` gives lanes shards of their own where their number divides that of the shards; else each lane
            # reads all rows and skips those of the others.
            return table.to_iterable_dataset(num_shards=min(64, len(table)) or 1) if is_streamed else table
        path = str(folder) if folder.is_dir() else name
        return datasets.load_dataset(path, subset, split=split or "train", streaming=is_streamed)
    except Exception as error:  # of any library that it reads with
        raise _unreadable(data, error, "give hf:NAME, or hf:NAME:SUBSET@SPLIT, of the hub or of a folder") from error


def read_rows(table: Any, data: str) -> Iterator[Any]:
    """Yields the rows of a data set that `open_hub` opened; raises `ValueError` where its library cannot go on."""
    rows = iter(table)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # a connection that ends, a damaged file
            raise _unreadable(data, error, "mend the file, or the connection, and run again") from error
        yield row


def _unreadable(data: str, error: Exception, remedy: str) -> ValueError:
    why = printable((str(error).splitlines() or [""])[0])
    return ValueError(f"{data} cannot be read by `datasets` ({type(error).__name__}: {why}): {remedy}")
