"""Reads documents from text files, JSON Lines and Parquet, in pieces of some kilobytes."""

import dataclasses
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from zero_jax.core.extras import pip_install
from zero_jax.core.text_tables import is_unicode, printable, quoted
from zero_jax.data.sources import Source, SourceFile, read_rows

_T = TypeVar("_T")
_BLOCK_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 28  # of JSON
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_REPLACEMENT = "\ufffd"
# The end of a word before a space: tokenizers begin a new token there, so that a cut changes no token.
_SEAM = re.compile(rb"[A-Za-z0-9](?=[ \n])")
# Many data sets of conversations come as one list.
_OF_A_LIST = "write an object a line, as `jq -c '.[]' FILE > FILE.jsonl` makes of a list"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a document.

    Attributes:
      text: the text.
      ends: whether it is the last piece of its document.
      num_replaced: replacement characters for invalid Unicode.

    Example:
      >>> _ = (folder / "a.txt").write_text("one text")
      >>> source = zero.data.find_source(str(folder / "a.txt"), format="auto")
      >>> next(iter(zero.data.read_text(source, text_field="text"))).text
      'one'
    """

    text: str
    ends: bool = True
    num_replaced: int = 0


def read_text(source: Source, *, text_field: str = "text") -> Iterator[Piece]:
    """Reads the documents of a source one after the other.

    A text file is a document, in pieces; so is a line of JSON Lines and a row of Parquet.

    Args:
      source: files of format `text`, `jsonl` or `parquet`.
      text_field: the field of a line, or the column, that holds the text.

    Raises:
      ValueError: a file cannot be read; names the file and the line.

    Example:
      >>> _ = (folder / "a.txt").write_text("one text")
      >>> source = zero.data.find_source(str(folder / "a.txt"), format="auto")
      >>> "".join(piece.text for piece in zero.data.read_text(source, text_field="text"))
      'one text'
    """
    if source.format == "jsonl":
        records = _records(source, text_field)
        return (record_text(record, text_field, where, num_replaced) for where, record, num_replaced in records)
    read = {"text": _read_file, "parquet": _read_parquet}[source.format]
    return of_each_file(source, lambda file: read(file, text_field))


def record_text(record: Mapping[str, Any], text_field: str, where: str, num_replaced: int = 0) -> Piece:
    """Returns the text of a record as a document; raises `ValueError` with the record's place if it has none.

    Lone surrogates, which JSON can have and Unicode text cannot, are replaced too.
    """
    if text_field not in record:
        fields = ", ".join(map(quoted, list(record)[:8])) or "none"
        is_chat = "messages" in record or {"prompt", "completion"} <= {*record}
        remedy = f"{'read conversations with --format chat, or ' * is_chat}name the one that holds the text"
        raise ValueError(f"{where} has no field {text_field!r} (it has {fields}): {remedy} with --text-field")
    text = record[text_field]
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {text_field!r} holds {type(text).__name__}, not a string: mend or remove it")
    if not is_unicode(text):
        text, num_surrogates = re.subn("[\ud800-\udfff]", _REPLACEMENT, text)
        num_replaced += num_surrogates
    return Piece(text=text, num_replaced=num_replaced)


def of_each_file(source: Source, read: Callable[[SourceFile], Iterator[_T]]) -> Iterator[_T]:
    """Reads the files of a source one after another; raises `ValueError` if one changes meanwhile."""
    for file in source.files:
        try:
            yield from read(file)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"cannot read {file} ({error}): it may be cut off; write it again") from error
        file.check()


def _read_file(file: SourceFile, _: str) -> Iterator[Piece]:
    with file.path.open("rb") as stream:
        buffer = stream.read(len(_BYTE_ORDER_MARK)).removeprefix(_BYTE_ORDER_MARK)
        while block := stream.read(_BLOCK_BYTES):
            buffer += block
            cut = _last_seam(buffer)
            if cut:
                yield _decode(buffer[:cut], ends=False)
                buffer = buffer[cut:]
        yield _decode(buffer)


def _last_seam(block: bytes) -> int:
    """Returns where to cut a block: after the last word, or else before the last character."""
    seams = [match.end() for match in _SEAM.finditer(block, max(0, len(block) - (1 << 14)))]
    if seams:
        return seams[-1]
    if len(block) < 2 * _BLOCK_BYTES:
        return 0
    cut = block.rfind(b"\n") + 1 or len(block) - 1
    while cut > len(block) - 4 and block[cut] & 0xC0 == 0x80:  # not inside a character
        cut -= 1
    return cut


def _decode(raw: bytes, *, ends: bool = True) -> Piece:
    text = raw.decode(errors="replace")
    if _REPLACEMENT not in text:
        return Piece(text=text, ends=ends)
    # Without those that the text has of its own.
    return Piece(text=text, ends=ends, num_replaced=text.count(_REPLACEMENT) - raw.count(_REPLACEMENT.encode()))


def json_lines(source: Source) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Reads the objects of JSON Lines, or of the rows of a table, each with its place, such as `line N of FILE`."""
    for where, record, num_replaced in _records(source):
        if num_replaced:
            raise ValueError(f"{where} is not in UTF-8: mend or remove the line")
        yield where, record


def _records(source: Source, field: str | None = None) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """Reads lines or rows, each with its place and the number of replacements for invalid Unicode."""
    if (table := source.table) is None:
        yield from of_each_file(source, _read_json_lines)
        return
    # Other columns may be pictures.
    table = table.select_columns([field]) if field in table.column_names else table
    for i, row in enumerate(read_rows(table, source.name), 1):
        yield f"row {i} of {source.name}", row, 0


def _read_json_lines(file: SourceFile) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    is_zipped = file.path.name.lower().endswith(".gz")
    with gzip.open(file.path) if is_zipped else file.path.open("rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(_MAX_LINE_BYTES + 1), b""), 1):
            if len(line) > _MAX_LINE_BYTES:  # a small .gz may hold terabytes
                raise ValueError(
                    f"line {number} of {file} has more than {_MAX_LINE_BYTES:,} bytes: divide it into several"
                )
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if line.strip():
                decoded, where = _decode(line), f"line {number} of {file}"
                yield where, _json_object(decoded.text, where, is_first=number == 1), decoded.num_replaced


def _json_object(line: str, where: str, *, is_first: bool) -> Mapping[str, Any]:
    of_list = _OF_A_LIST if is_first and line.lstrip().startswith("[") else ""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # thousands of brackets
        remedy = of_list or "mend or remove the line"
        raise ValueError(f"{where} is no JSON ({error}): {remedy}") from error
    if not isinstance(record, dict):
        remedy = of_list or "write {...} with its fields"
        raise ValueError(f"{where} is a JSON {type(record).__name__}, not an object: {remedy}")
    return record


def _read_parquet(file: SourceFile, text_field: str) -> Iterator[Piece]:
    """Reads a column 256 rows at a time; `grain.experimental.ParquetIterDataset` loads all columns of a row group."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        command = pip_install("zero-jax[parquet]")
        raise ValueError(f"{file} is Parquet, which needs pyarrow: {command}") from error
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(file.path) as table:
            _check_column(table.schema_arrow, text_field, file)
            for batch in table.iter_batches(batch_size=256, columns=[text_field]):
                # As bytes: a column of strings may hold invalid UTF-8, which pyarrow would raise for.
                for raw in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                    row += 1
                    if raw is None:
                        raise ValueError(f"row {row} of {file}: column {text_field!r} is null: fill or remove the row")
                    yield _decode(raw)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"cannot read {file} as Parquet ({error}): write it again") from error


def _check_column(schema: Any, text_field: str, file: SourceFile) -> None:
    if text_field not in schema.names:
        columns = ", ".join(map(quoted, schema.names[:8]))
        raise ValueError(
            f"{file} has no column {text_field!r} (it has {columns}): name the one that holds the text with "
            "--text-field"
        )
    if schema.names.count(text_field) > 1:
        raise ValueError(f"{file} has several columns {text_field!r}: write it again with one of them")
    kind = schema.field(text_field).type
    kind = getattr(kind, "value_type", kind) if str(kind).startswith("dictionary") else kind
    if str(kind) not in ("string", "large_string", "string_view", "binary", "large_binary"):
        raise ValueError(
            f"{file}: column {text_field!r} holds {printable(kind)}, not strings: choose another --text-field"
        )
