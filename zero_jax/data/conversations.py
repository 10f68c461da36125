"""Conversations and instructions from JSON Lines: only answers are targets, and no conversation is split over rows.

A line is `{"messages": [{"role": ..., "content": ...}, ...]}` or `{"prompt": ..., "completion": ...}`. Messages are
rendered by the tokenizer's chat template. Without one, a message becomes `<|role|>`, a line break, its content and a
line break; an answer (role `assistant`, or a completion) ends with the tokenizer's end of document instead. A prompt
and its completion have no markers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zero_jax.core.close_match import did_you_mean
from zero_jax.data.chat_template import ANSWER, ChatTemplate, Turn
from zero_jax.data.documents import json_lines
from zero_jax.data.sources import Source
from zero_jax.data.tokenizer import JsonTokenizer, Tokenizer
from zero_jax.data.train_validation_split import lowest_that_fit

ROLES = ("system", "user", "assistant", "tool")
# Rows that are kept open while conversations are packed: more fill rows better and take longer.
_MAX_OPEN_ROWS = 256


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ConversationPart:
    """The conversations of a training or validation part, packed in rows.

    Attributes:
      tokens: all tokens, one conversation after the other.
      is_answer: for each token whether it is of an answer.
      offsets: where each conversation begins, and the end of the last one: `[num_conversations + 1]`.
      rows: the conversations of each row.
    """

    tokens: np.ndarray
    is_answer: np.ndarray
    offsets: np.ndarray
    rows: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def num_rows(self) -> int:
        """Number of rows that the conversations are packed in."""
        return len(self.rows)

    def cut_rows(self, rows: np.ndarray, *, seq_len: int) -> dict[str, np.ndarray]:
        """Returns packed rows by their numbers, as `batches.cut_rows` does; `weights` are 1 for targets in answers."""
        shape = (len(rows), seq_len)
        inputs, targets, segments = (np.zeros(shape, np.int32) for _ in range(3))
        weights = np.zeros(shape, np.float32)
        for i, row in enumerate(rows.tolist()):
            position = 0
            conversations = self.rows[row] if row >= 0 else ()
            for segment, conversation in enumerate(conversations):
                first, last = self.offsets[conversation], self.offsets[conversation + 1]
                last = min(last, first + seq_len + 1)
                span = slice(position, position + last - first - 1)
                inputs[i, span] = self.tokens[first : last - 1]
                targets[i, span] = self.tokens[first + 1 : last]
                weights[i, span] = self.is_answer[first + 1 : last]
                segments[i, span] = segment
                position = span.stop
            segments[i, position:] = len(conversations)
        return {"inputs": inputs, "targets": targets, "weights": weights, "segments": segments}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversations:
    """Tokenized conversations, split into two parts.

    Attributes:
      train: those to train on.
      validation: those to validate on.
      num_conversations: how many were read.
      num_cut: how many are longer than a row and lose their end.
      fingerprint: a hash of tokens, answers and split.
    """

    train: ConversationPart
    validation: ConversationPart
    num_conversations: int
    num_cut: int
    fingerprint: str


def load_conversations(
    source: Source, tokenizer: Tokenizer, *, template: ChatTemplate | None, seq_len: int, validation_fraction: float
) -> Conversations:
    """Reads and tokenizes conversations, splits them by a hash of their content, and packs them in rows.

    Args:
      source: files of JSON Lines.
      tokenizer: the tokenizer; one of the `tokenizers` library if there is a template.
      template: the tokenizer's chat template, or None.
      seq_len: tokens in a row.
      validation_fraction: the share of tokens to validate on, in whole conversations.

    Raises:
      ValueError: a line that is no conversation, with file and number; or one part has no conversation with an answer.
    """
    tokens, answers, num_cut = [], [], 0
    for where, record in json_lines(source):
        conversation, is_answer = _tokenized(record, where, tokenizer, template)
        num_cut += len(conversation) > seq_len + 1
        if not is_answer[1 : seq_len + 1].any():
            raise ValueError(
                f"{where}: no answer begins within the first {seq_len} tokens of {len(conversation):,}: shorten the "
                "prompt, or give a longer --seq-len"
            )
        tokens.append(conversation)
        answers.append(is_answer)
    chosen = _validation(tokens, validation_fraction, source)
    digest = hashlib.sha256(repr((tokenizer.fingerprint, seq_len)).encode())
    for vector in (*tokens, *answers, chosen):
        digest.update(len(vector).to_bytes(8, "little") + np.ascontiguousarray(vector, "<u4").tobytes())
    parts = [
        _part([tokens[i] for i in indices], [answers[i] for i in indices], seq_len)
        for indices in (np.flatnonzero(~chosen), np.flatnonzero(chosen))
    ]
    return Conversations(
        train=parts[0],
        validation=parts[1],
        num_conversations=len(tokens),
        num_cut=num_cut,
        fingerprint=digest.hexdigest()[:32],
    )


def _tokenized(
    record: Mapping[str, Any], where: str, tokenizer: Tokenizer, template: ChatTemplate | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of a conversation and which of them are of answers, the end of each included.

    Raises:
      ValueError: a record that is no conversation.
    """
    if "messages" in record:
        messages = _checked(record["messages"], where)
        if template is not None:
            assert isinstance(tokenizer, JsonTokenizer)
            _check_no_special_token(messages, tokenizer, where)
            return _of_rendered(template.turns(messages, tools=record.get("tools"), where=where), tokenizer)
        turns = [turn for message in messages for turn in _marked(message["role"], message["content"])]
    elif "prompt" in record or "completion" in record:
        prompt, completion = (_text(record, name, where) for name in ("prompt", "completion"))
        turns = [Turn(prompt, is_answer=False), Turn(completion, is_answer=True)]
    else:
        fields = ", ".join(map(repr, list(record)[:8])) or "none"
        raise ValueError(
            f"{where} has neither 'messages' nor 'prompt' and 'completion' (it has {fields}): write one of them, "
            "or read plain text with --format jsonl"
        )
    return _of_pieces(turns, tokenizer)


def _checked(messages: Any, where: str) -> list[dict[str, Any]]:
    """Returns messages; raises `ValueError` for anything else, and where none is an answer."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: 'messages' is {json.dumps(messages)[:40]}: give a list of messages")
    for number, message in enumerate(messages, 1):
        place = f"{where}: message {number}"
        if not isinstance(message, dict):
            raise ValueError(f"{place} is {type(message).__name__}, not an object: give 'role' and 'content'")
        role = _text(message, "role", place)
        if role not in ROLES:
            hint = did_you_mean(role, ROLES)
            raise ValueError(f"{place} has the role {role!r}: {hint}the roles are {', '.join(ROLES)}")
        _text(message, "content", place)
    if not any(message["role"] == ANSWER for message in messages):
        raise ValueError(f"{where} has no message of the role {ANSWER!r}: nothing of it could be learned; remove it")
    return messages


def _marked(role: str, content: str) -> list[Turn]:
    is_answer = role == ANSWER
    return [Turn(f"<|{role}|>\n", is_answer=False), Turn(content if is_answer else f"{content}\n", is_answer=is_answer)]


def _check_no_special_token(messages: Sequence[Mapping[str, Any]], tokenizer: JsonTokenizer, where: str) -> None:
    """Raises `ValueError` for text that would be tokenized as a special token of the template."""
    for number, message in enumerate(messages, 1):
        special = next((text for text in tokenizer.special_texts if text in message["content"]), None)
        if special is not None:
            raise ValueError(
                f"{where}: message {number} has the text {special!r}, which the tokenizer {tokenizer.name} takes for a "
                "special token of the chat template: write it in another way, or remove the line"
            )


def _text(record: Mapping[str, Any], name: str, where: str) -> str:
    if name not in record:
        raise ValueError(f"{where} has no field {name!r}: add it, or remove the line")
    text = record[name]
    if not isinstance(text, str):
        raise ValueError(f"{where}: {name!r} holds {type(text).__name__}, not a string: mend or remove the line")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: {name!r} holds a lone surrogate, no text: mend or remove the line") from None
    return text


def _of_pieces(turns: Sequence[Turn], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Tokenizes each part by itself; an answer ends with the end of a document."""
    pieces, marks = [], []
    for turn in turns:
        piece = tokenizer.encode(turn.text).astype(np.int32)
        if turn.is_answer:
            piece = np.append(piece, np.int32(tokenizer.end_of_document))
        pieces.append(piece)
        marks.append(np.full(len(piece), turn.is_answer))
    return np.concatenate(pieces), np.concatenate(marks)


def _of_rendered(turns: Sequence[Turn], tokenizer: JsonTokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Tokenizes a rendered conversation as one text; a token that begins before an answer and ends in it is learned."""
    texts = list(itertools.accumulate(turn.text for turn in turns))
    *before, tokens = tokenizer.encode_rendered(texts)
    # A part ends at the token up to which the shorter text has the same tokens.
    differences = [np.flatnonzero(x[: len(tokens)] != tokens[: len(x)]) for x in before]
    ends = [*(int(d[0]) if d.size else len(x) for d, x in zip(differences, before, strict=True)), len(tokens)]
    is_answer = np.zeros(len(tokens), bool)
    for turn, first, last in zip(turns, [0, *ends], ends, strict=False):
        is_answer[first:last] = turn.is_answer
    return tokens.astype(np.int32), is_answer


def _validation(tokens: Sequence[np.ndarray], fraction: float, source: Source) -> np.ndarray:
    """Selects the conversations to validate on, those with the lowest hashes; equal ones are on one side."""
    hashes = [int.from_bytes(hashlib.blake2b(x.tobytes(), digest_size=8).digest(), "little") for x in tokens]
    lengths = np.array([len(x) for x in tokens], np.int64)
    chosen = lowest_that_fit(np.array(hashes, np.uint64), lengths, int(fraction * int(lengths.sum())))
    if not chosen.any() or chosen.all():
        raise ValueError(
            f"{source.name} has {len(tokens):,} conversation{'s' if len(tokens) != 1 else ''}, of which "
            f"{int(chosen.sum()):,} fit into the validation_fraction of {fraction}: give more, or another fraction"
        )
    return chosen


def _part(tokens: Sequence[np.ndarray], answers: Sequence[np.ndarray], seq_len: int) -> ConversationPart:
    lengths = np.array([len(x) for x in tokens])
    return ConversationPart(
        tokens=np.concatenate(tokens),
        is_answer=np.concatenate(answers),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        rows=pack(np.minimum(lengths - 1, seq_len), room=seq_len),
    )


def pack(lengths: np.ndarray, *, room: int) -> tuple[tuple[int, ...], ...]:
    """Packs lengths into rows: each goes to the open row that it fills best, in their order.

    Returns:
      The numbers of the lengths in each row.
    """
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
        for oldest in list(itertools.islice(room_left, max(0, len(room_left) - _MAX_OPEN_ROWS))):
            del room_left[oldest]
    return tuple(map(tuple, rows))
