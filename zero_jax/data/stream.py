"""Streams: data sets of the hub that are read document by document while a run trains, in `Lane`s.

Each lane reads a part of the documents, in the order of the data set, and cuts them into rows, which are shuffled
within blocks. The rows of a batch are divided over the lanes, and a lane's state says where it is to the row: so a run
goes on with any number of processes, each of which reads the lanes of its own rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from zero_jax.core.files.untrusted import mapping, text, whole_number
from zero_jax.data.documents import record_text
from zero_jax.data.parts import Dataset, TokenPart, hash_of
from zero_jax.data.sources import open_hub, read_rows
from zero_jax.data.tokenizer import Tokenizer

_BLOCK_TOKENS, _MOST_BLOCK_ROWS = 1 << 20, 512  # that are shuffled among each other, and read again by a resumed run
_VALIDATION_TOKENS, _VALIDATION_ROWS = 1 << 19, 32  # of a stream: as many as these, and as many rows
_HASHES = 1 << 64


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Stream(Dataset):
    """A data set that is read as it is needed; `train` has no tokens of it.

    Attributes:
      open_table: opens the stream anew.
      text_field: the column with the text.
      validation_fraction: the share of the documents, those with the lowest hashes, that are not trained on.
    """

    open_table: Callable[[], Any]
    text_field: str
    validation_fraction: float

    def __str__(self) -> str:
        split = f", {self.validation.size:,} tokens of it to validate on" if self.validation_fraction else ""
        return "; ".join([f"{self.name}: a stream{split}", *self.notes])


def open_stream(
    data: str, tokenizer: Tokenizer, *, text_field: str, seq_len: int, validation_fraction: float
) -> Stream:
    """Opens a stream, and reads the documents to validate on: the first ones of those with the lowest hashes."""

    def open_table() -> Any:
        return open_hub(data, is_streamed=True)

    table = open_table()
    shape = (data, text_field, tokenizer.fingerprint, sorted(map(str, (table.features or {}).items())))
    wanted, documents, size = max(_VALIDATION_TOKENS, _VALIDATION_ROWS * seq_len), [], 0
    for number, record in enumerate(read_rows(table, data) if validation_fraction else (), 1):
        content = record_text(record, text_field, f"row {number} of {data}").text
        if content and hash_of(content.encode()) < validation_fraction * _HASHES:
            documents.append(_tokens(content, tokenizer))
            size += len(documents[-1])
        if size > wanted:
            break
    validation = _part(documents)
    if validation_fraction:
        validation.check_size(data, "validation", seq_len, fraction=validation_fraction)
    digest = hashlib.sha256(repr((shape, validation_fraction)).encode())
    for tokens in documents:
        digest.update(np.ascontiguousarray(tokens, "<u4").tobytes())
    return Stream(
        name=data,
        tokenizer=tokenizer,
        num_documents=0,
        train=_part([]),
        validation=validation,
        fingerprint=digest.hexdigest()[:32],
        open_table=open_table,
        text_field=text_field,
        validation_fraction=validation_fraction,
    )


def _tokens(content: str, tokenizer: Tokenizer) -> np.ndarray:
    return np.append(tokenizer.encode(content).astype(np.int32), np.int32(tokenizer.end_of_document))


def _part(documents: list[np.ndarray]) -> TokenPart:
    offsets = np.cumsum([0, *map(len, documents)])
    return TokenPart(tokens=np.concatenate([np.zeros(0, np.int32), *documents]), starts=offsets[:-1], offsets=offsets)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a document is: the pass, the state of the table before it (None: its beginning), and its tokens."""

    epoch: int
    before: str | None
    tokens: np.ndarray = dataclasses.field(compare=False)


class Lane:
    """The rows of a part of a stream's documents, pass after pass, shuffled within blocks."""

    def __init__(self, stream: Stream, part: tuple[int, int], *, seq_len: int, seed: int, state: Any = None):
        """Begins at the first row of a part (its number, of how many), or at a state that `state` has returned."""
        self._stream, (self._lane, self._num_lanes), self._seq_len = stream, part, seq_len
        self._seed, self._num_rows = seed, max(1, min(_MOST_BLOCK_ROWS, _BLOCK_TOKENS // seq_len))
        first = {"epoch": 0, "before": None, "skip": 0, "block": 0, "row": 0}
        state = first if state is None else mapping(state, keys={*first})
        self._start: dict[str, Any] = {name: whole_number(state[name]) for name in ("epoch", "skip", "block")}
        self._start["before"] = None if state["before"] is None else text(state["before"])
        self._row, self._rows = whole_number(state["row"], below=self._num_rows), None
        self._next = self._start
        self._documents: Iterator[_Place] | None = None
        self._pending: list[_Place] = []  # read, and of the next block

    def state(self) -> dict[str, Any]:
        """Returns where the next row is: the beginning of its block, and its number there."""
        return {**self._start, "row": self._row}

    def read(self) -> dict[str, np.ndarray]:
        """Returns the next row, as `Part.cut_rows` has it, without the dim of rows."""
        if self._rows is None:
            self._rows = self._read_block()
        # By the block's number: a run that goes on within a block shuffles it as before.
        order = np.random.default_rng([self._seed, self._lane, self._start["block"]]).permutation(self._num_rows)
        row = {name: x[order[self._row]] for name, x in self._rows.items()}
        self._row += 1
        if self._row == self._num_rows:
            self._start, self._row, self._rows = self._next, 0, None
        return row

    def _read_block(self) -> dict[str, np.ndarray]:
        """Reads the documents of a block; the next one begins with the last token of this one, in its document."""
        if self._documents is None:
            self._documents = self._read_documents(self._start["epoch"], self._start["before"])
        needed, skip = self._num_rows * self._seq_len, self._start["skip"]
        places, size = self._pending, sum(len(place.tokens) for place in self._pending) - skip
        # One more token than inputs: the target of the last.
        while size < needed + 1:
            places.append(next(self._documents))
            size += len(places[-1].tokens)
        documents = [places[0].tokens[skip:], *(place.tokens for place in places[1:])]
        part = _part(documents)
        last = int(np.searchsorted(part.offsets, needed, side="right")) - 1
        inside = needed - int(part.offsets[last]) + (skip if last == 0 else 0)
        place, self._pending = places[last], places[last:]
        self._next = {"epoch": place.epoch, "skip": inside, "block": self._start["block"] + 1, "before": place.before}
        return part.cut_rows(np.arange(self._num_rows), seq_len=self._seq_len)

    def _read_documents(self, epoch: int, before: str | None) -> Iterator[_Place]:
        from datasets.distributed import split_dataset_by_node  # pyright: ignore[reportMissingImports]

        stream, limit = self._stream, self._stream.validation_fraction * _HASHES
        while True:
            table = split_dataset_by_node(stream.open_table(), rank=self._lane, world_size=self._num_lanes)
            if before is not None:
                table.load_state_dict(json.loads(before))
            has_any = before is not None  # a place is before a document to train on
            for record in read_rows(table, stream.name):
                after = json.dumps(table.state_dict())
                content = record_text(record, stream.text_field, f"a row of {stream.name}").text
                if content and hash_of(content.encode()) >= limit:
                    has_any = True
                    yield _Place(epoch, before, _tokens(content, stream.tokenizer))
                before = after
            if not has_any:  # or this would pass over the table for ever
                raise ValueError(
                    f"{stream.name} has no documents to train on in part {self._lane + 1} of {self._num_lanes}: give "
                    "more text, fewer processes, or another --validation-fraction"
                )
            epoch, before = epoch + 1, None


class LaneRows:
    """The rows of batches that this process reads, from their lanes."""

    def __init__(
        self, stream: Stream, rows: np.ndarray, shape: tuple[int, int], *, num_lanes: int, seed: int, states: Any
    ):
        """Takes the indices of the rows that this process reads of a batch of a shape, and lanes' states, or None."""
        batch_size, seq_len = shape
        lanes = np.arange(batch_size) * num_lanes // batch_size
        state_of = {} if states is None else mapping(states, keys={str(lane) for lane in range(num_lanes)})
        self._lanes = {
            lane: Lane(stream, (lane, num_lanes), seq_len=seq_len, seed=seed, state=state_of.get(str(lane)))
            for lane in sorted({*lanes[rows].tolist()})
        }
        # All rows of a lane are read, those of other processes too: its order is that of the batch.
        self._read_rows = [(row, lane) for row, lane in enumerate(lanes.tolist()) if lane in self._lanes]
        self._own_rows = rows

    def read(self) -> dict[str, np.ndarray]:
        """Returns the rows of the next batch, `[len(rows), seq_len]`."""
        read = {row: self._lanes[lane].read() for row, lane in self._read_rows}
        rows = [read[row] for row in self._own_rows.tolist()]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def state(self) -> dict[str, Any]:
        """Returns the states of this process's lanes."""
        return {str(lane): rows.state() for lane, rows in self._lanes.items()}
