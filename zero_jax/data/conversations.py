"""Conversations and instructions from JSON Lines: only answers are targets, and no conversation is split over rows.

A line is `{"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}` or `{"prompt": ..., "completion": ...}`,
or has the fields of ShareGPT or Alpaca, which become messages. Messages are rendered by the tokenizer's chat template.
Without one, a message becomes `<|role|>`, a line break, its content and a line break; an answer (role `assistant`, or a
completion) ends with the tokenizer's end of document instead. A prompt and its completion have no markers. Other fields
are counted.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from zero_jax.core.text_tables import quoted
from zero_jax.data.chat_template import ChatTemplate, Renderer, Turn
from zero_jax.data.documents import json_lines
from zero_jax.data.messages import IDENTITIES, MARKS, SpecialTexts, as_messages, checked, marked, string
from zero_jax.data.parts import Dataset, hash_of, lowest_that_fit
from zero_jax.data.sources import Source
from zero_jax.data.tokenizer import JsonTokenizer, Tokenizer

_PROMPT = ("prompt", "completion")
_SHOWN_FIELDS = 8
# Rows that are kept open while conversations are packed: more fill rows better and take longer.
_MAX_OPEN_ROWS = 256


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ConversationPart:
    """The conversations of a training or validation part, packed in rows."""

    tokens: np.ndarray  # all tokens, one conversation after the other
    is_answer: np.ndarray  # for each token whether it is of an answer
    offsets: np.ndarray  # where each conversation begins, and the end of the last one: `[num_conversations + 1]`
    rows: tuple[tuple[int, ...], ...]  # the conversations of each row

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def num_rows(self, *, seq_len: int) -> int:
        """Returns the number of rows that the conversations are packed in."""
        return len(self.rows)

    def cut_rows(self, rows: np.ndarray, *, seq_len: int) -> dict[str, np.ndarray]:
        """Returns packed rows by their numbers, as `Part` has it; `weights` are 1 for targets in answers."""
        shape = (len(rows), seq_len)
        inputs, targets, segments = (np.zeros(shape, np.int32) for _ in range(3))
        weights = np.zeros(shape, np.float32)
        for i, row in enumerate(rows.tolist()):
            position = 0
            conversations = self.rows[row] if row >= 0 else ()
            for segment, conversation in enumerate(conversations):
                first, last = self.offsets[conversation], self.offsets[conversation + 1]
                span = slice(position, position + last - first - 1)
                inputs[i, span] = self.tokens[first : last - 1]
                targets[i, span] = self.tokens[first + 1 : last]
                weights[i, span] = self.is_answer[first + 1 : last]
                segments[i, span] = segment
                position = span.stop
            # The padding is a document of its own, which no conversation attends to.
            segments[i, position:] = len(conversations)
        return {"inputs": inputs, "targets": targets, "weights": weights, "segments": segments}


def load_conversations(
    source: Source, tokenizer: Tokenizer, *, template: ChatTemplate | None, seq_len: int, validation_fraction: float
) -> Dataset:
    """Reads, tokenizes and packs conversations, split by a hash of their content; a template needs a JSON tokenizer."""
    tokens, answers, num_cut = [], [], 0
    with _Reader(tokenizer, template) as reader:
        for where, record in json_lines(source):
            conversation, is_answer = reader.tokenized(record, where)
            num_cut += len(conversation) > seq_len + 1
            if not is_answer[1 : seq_len + 1].any():
                raise ValueError(
                    f"{where}: no answer begins within the first {seq_len} tokens of {len(conversation):,}: shorten "
                    "the prompt, or give a longer --seq-len"
                )
            tokens.append(conversation[: seq_len + 1])  # the rest is neither trained on nor part of any share
            answers.append(is_answer[: seq_len + 1])
    hashes = np.array([hash_of(x.tobytes()) for x in tokens], np.uint64)
    chosen = _validation(hashes, np.array([len(x) for x in tokens]), validation_fraction, source)
    digest = hashlib.sha256(repr((tokenizer.fingerprint, seq_len)).encode())
    for vector in (*tokens, *answers, chosen):
        # With its length: else the same tokens in other conversations would have the same hash.
        digest.update(len(vector).to_bytes(8, "little") + np.ascontiguousarray(vector, "<u4").tobytes())
    train, validation = (
        _part([tokens[i] for i in indices], [answers[i] for i in indices], seq_len)
        for indices in (np.flatnonzero(~chosen), np.flatnonzero(chosen))
    )
    part, aim = (train, "to learn") if len(train.rows) else (validation, "to predict")  # all may be for validation
    notes = [f"{int(part.is_answer.sum()):,} tokens of answers {aim}, in {len(part.rows):,} rows"]
    if template is not None:
        # A template's special tokens are no text, and may be beyond it.
        assert isinstance(tokenizer, JsonTokenizer)
        highest = max(int(vector.max()) for vector in tokens)
        tokenizer = dataclasses.replace(tokenizer, vocab_size=max(tokenizer.vocab_size, highest + 1))
        notes.append(f"messages as by the chat template of {template.path}")
    if num_cut:
        notes.append(f"{num_cut:,} conversations are longer than {seq_len} tokens and lose their end")
    if unused := sorted(reader.num_unused.items(), key=lambda item: (-item[1], item[0])):
        shown = ", ".join(f"{name} ({count:,})" for name, count in unused[:_SHOWN_FIELDS])
        more = f" and {len(unused) - _SHOWN_FIELDS} more" if len(unused) > _SHOWN_FIELDS else ""
        notes.append(f"fields that are part of no text: {shown}{more}")
    return Dataset(
        name=source.name,
        tokenizer=tokenizer,
        num_documents=len(tokens),
        train=train,
        validation=validation,
        fingerprint=digest.hexdigest()[:32],
        notes=tuple(notes),
        hashes=hashes,
    )


class _Reader(contextlib.ExitStack):
    """Makes tokens of records, and counts the fields that are part of no text."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None):
        super().__init__()
        self._tokenizer, self._template = tokenizer, template
        self.num_unused: collections.Counter[str] = collections.Counter()
        if template is None:
            self._special = SpecialTexts(MARKS, "which marks a turn")
            return
        assert isinstance(tokenizer, JsonTokenizer)
        self._renderer = self.enter_context(contextlib.closing(Renderer(template)))
        what = f"which the tokenizer {tokenizer.name} takes for a special token of the chat template"
        self._special = SpecialTexts(tokenizer.special_texts, what, tokenizer)

    def tokenized(self, record: Mapping[str, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of a conversation, and which are of learned answers or their ends; raises `ValueError`."""
        record = as_messages(record, where)
        if "messages" in record:
            self.num_unused.update(map(quoted, record.keys() - {"messages", "tools"}))
            return self._of_messages(record, where)
        if "prompt" in record or "completion" in record:
            self.num_unused.update(map(quoted, record.keys() - {*_PROMPT}))
            prompt, completion = (string(record, name, where) for name in _PROMPT)
            turns = [Turn(prompt, is_answer=False), Turn(completion, is_answer=True, ends=True)]
            return _of_pieces(turns, self._tokenizer)
        fields = ", ".join(map(quoted, list(record)[:8])) or "none"
        raise ValueError(
            f"{where} has neither 'messages' nor 'prompt' and 'completion' (it has {fields}): write one of them, "
            "'conversations' as ShareGPT has them, or 'instruction' and 'output' as Alpaca, or read plain text with "
            "--format jsonl"
        )

    def _of_messages(self, record: Mapping[str, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
        conversation = checked(record, where)
        self._special.check(conversation, where)
        messages, tools = conversation.messages, conversation.tools
        names = {(i, name) for i, message in enumerate(messages) for name in IDENTITIES if message.get(name)}
        if self._template is None:
            self._count_names(names)
            return _of_pieces(marked(conversation, where), self._tokenizer)
        if tools and not self._renderer.reads_tools:
            raise ValueError(
                f"{where} has 'tools', which the chat template of {self._template.path} does not read: leave them out, "
                f"or give another template, {self._template.remedy}"
            )
        turns, unread = self._renderer.render(messages, answers=conversation.answers, tools=tools, where=where)
        self._count_names(names & set(unread))
        for i, name in unread:
            if name not in ("role", *IDENTITIES) and messages[i][name]:
                raise ValueError(
                    f"{where}: message {i + 1} has the field {quoted(name)}, which the chat template of "
                    f"{self._template.path} does not read: remove it, or {self._template.remedy}"
                )
        assert isinstance(self._tokenizer, JsonTokenizer)
        return _of_rendered(turns, self._tokenizer)

    def _count_names(self, places: Iterable[tuple[int, str]]) -> None:
        self.num_unused.update(f"{name!r} of messages" for _, name in places)


def _of_pieces(turns: Sequence[Turn], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    pieces, marks = [], []
    for turn in turns:
        piece = tokenizer.encode(turn.text).astype(np.int32)
        if turn.ends:
            piece = np.append(piece, np.int32(tokenizer.end_of_document))
        pieces.append(piece)
        marks.append(np.full(len(piece), turn.is_answer))
    return np.concatenate(pieces), np.concatenate(marks)


def _of_rendered(turns: Sequence[Turn], tokenizer: JsonTokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Tokenizes a rendered conversation as one text; a token is of the part that its text ends in."""
    tokens, ends = tokenizer.encode_rendered("".join(turn.text for turn in turns))
    # From the left: a token that ends where a part does is of that part.
    part = np.searchsorted(np.cumsum([len(turn.text) for turn in turns]), ends)
    return tokens.astype(np.int32), np.array([turn.is_answer for turn in turns])[part]


def _validation(hashes: np.ndarray, lengths: np.ndarray, fraction: float, source: Source) -> np.ndarray:
    """Selects the conversations to validate on, those with the lowest hashes; equal ones are on one side."""
    chosen = lowest_that_fit(hashes, lengths, int(fraction * int(lengths.sum())))
    if (not chosen.any() and fraction) or (chosen.all() and fraction < 1):
        raise ValueError(
            f"{source.name} has {len(hashes):,} conversation{'s' if len(hashes) != 1 else ''}, of which "
            f"{int(chosen.sum()):,} fit into the validation_fraction of {fraction}: give more, or another fraction"
        )
    return chosen


def _part(tokens: Sequence[np.ndarray], answers: Sequence[np.ndarray], seq_len: int) -> ConversationPart:
    lengths = np.array([len(x) for x in tokens], np.int64)
    return ConversationPart(
        tokens=np.concatenate([np.zeros(0, np.int32), *tokens]),
        is_answer=np.concatenate([np.zeros(0, bool), *answers]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        rows=pack(lengths - 1, room=seq_len),
    )


def pack(lengths: np.ndarray, *, room: int) -> tuple[tuple[int, ...], ...]:
    """Returns the numbers of the lengths in each row: in their order, each goes to the open row that it fills best."""
    rows: list[list[int]] = []
    room_left: dict[int, int] = {}  # of open rows, oldest first
    for i, length in enumerate(lengths.tolist()):
        fits = [(row_room, row) for row, row_room in room_left.items() if row_room >= length]
        row = min(fits)[1] if fits else len(rows)
        if not fits:
            rows.append([])
            room_left[row] = room
        rows[row].append(i)
        room_left[row] -= length
        if room_left[row] == 0:
            del room_left[row]
        # A list, because the dict shrinks meanwhile.
        for oldest in list(itertools.islice(room_left, max(0, len(room_left) - _MAX_OPEN_ROWS))):
            del room_left[oldest]
    return tuple(map(tuple, rows))
