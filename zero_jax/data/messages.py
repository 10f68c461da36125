"""The messages of a conversation: checked field by field, for special tokens too, and as text without a template.

A message has a `role` and a `content`. An answer (role `assistant`) may have `reasoning_content`, `tool_calls`, and the
`weight` 0, by which it is context that is not learned. Nothing is dropped: a field that has no place in the text is
refused, apart from names and ids, which are counted.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zero_jax.core.close_match import did_you_mean
from zero_jax.core.text_tables import is_unicode, quoted
from zero_jax.data.chat_template import ANSWER, Turn
from zero_jax.data.tokenizer import JsonTokenizer

ROLES = ("system", "user", "assistant", "tool")
# Fields that say who speaks, and not what: counted where they are not part of the text.
IDENTITIES = ("name", "tool_call_id")
_OF_ANSWERS = ("reasoning_content", "tool_calls")
_FIELDS = ("role", "content", "weight", *_OF_ANSWERS, *IDENTITIES)
_OF_CALLS = ("id", "type", "index", "function")
_TOOLS = "tools"


# Names of the roles in data of ShareGPT's form, and the fields of Alpaca's.
_SPEAKERS = {"human": "user", "gpt": ANSWER} | {role: role for role in ROLES}
_ALPACA = ("instruction", "input", "output")


def as_messages(record: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns a record of the form of ShareGPT or Alpaca with `messages`, any other as it is.

    ShareGPT has `conversations` of `from` and `value`, Alpaca an `instruction`, maybe an `input`, and an `output`; both
    may have a `system`.
    """
    if "messages" in record or record.keys() >= {"prompt", "completion"}:
        return record
    if "conversations" in record:
        turns, own = record["conversations"], ("conversations", "system")
        if not isinstance(turns, list):
            raise ValueError(f"{where}: 'conversations' is {quoted(turns)}: give a list of messages")
        messages = [_of_sharegpt(turn, f"{where}: message {number}") for number, turn in enumerate(turns, 1)]
    elif "instruction" in record:
        own, given = (*_ALPACA, "system"), [name for name in _ALPACA[:2] if record.get(name) not in (None, "")]
        text = "\n\n".join(string(record, name, where) for name in given)
        messages = [{"role": "user", "content": text}, {"role": ANSWER, "content": string(record, "output", where)}]
    else:
        return record
    if record.get("system") not in (None, ""):
        messages = [{"role": "system", "content": string(record, "system", where)}, *messages]
    return {name: value for name, value in record.items() if name not in own} | {"messages": messages}


def _of_sharegpt(turn: Any, place: str) -> Any:
    if not isinstance(turn, dict) or turn.get("from") is None or turn.get("role") is not None:
        return turn  # which `checked` takes as a message, or refuses
    speaker, content = string(turn, "from", place), string(turn, "value", place)
    if speaker not in _SPEAKERS:
        hint = did_you_mean(speaker, _SPEAKERS)
        raise ValueError(f"{place} is from {quoted(speaker)}: {hint}the names are {', '.join(_SPEAKERS)}")
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return {**others, "role": _SPEAKERS[speaker], "content": content}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation that was checked."""

    messages: list[dict[str, Any]]  # the messages, without their weights
    tools: list[Any] | None  # the functions that the model may call, or None
    answers: list[int]  # the indices of the answers that are learned


def checked(record: Mapping[str, Any], where: str) -> Conversation:
    """Returns the conversation of a record with `messages` and maybe `tools`; `where` begins the errors."""
    messages, tools = record["messages"], record.get(_TOOLS)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: 'messages' is {quoted(messages)}: give a list of messages")
    if not (tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))):
        raise ValueError(f"{where}: 'tools' is {quoted(tools)}: give a list of objects, or leave it out")
    for number, message in enumerate(messages, 1):
        _check_message(message, f"{where}: message {number}")
    if not any(message["role"] == ANSWER for message in messages):
        raise ValueError(f"{where} has no message of the role {ANSWER!r}: nothing of it could be learned; remove it")
    answers = [i for i, m in enumerate(messages) if m["role"] == ANSWER and m.get("weight") != 0]
    if not answers:
        raise ValueError(f"{where}: each answer has the weight 0: nothing of it could be learned; remove the line")
    messages = [{name: value for name, value in m.items() if name != "weight"} for m in messages]
    return Conversation(messages=messages, tools=tools or None, answers=answers)


def _check_message(message: Any, place: str) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"{place} is {type(message).__name__}, not an object: give 'role' and 'content'")
    role = string(message, "role", place)
    if role not in ROLES:
        hint = did_you_mean(role, ROLES)
        raise ValueError(f"{place} has the role {quoted(role)}: {hint}the roles are {', '.join(ROLES)}")
    weight, calls = message.get("weight"), message.get("tool_calls")
    if weight is not None and (isinstance(weight, bool) or weight not in ((0, 1) if role == ANSWER else (0,))):
        raise ValueError(
            f"{place}: 'weight' is {quoted(weight)}: give 0 for an answer that is not learned, 1 for one that is, and "
            "none for other messages"
        )
    for name in _OF_ANSWERS:
        if message.get(name) and role != ANSWER:
            raise ValueError(f"{place} has {name!r} and the role {role!r}: only an answer ({ANSWER}) has that")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise ValueError(f"{place}: 'tool_calls' is {quoted(calls)}: give a list of objects, or leave it out")
    if not (calls and message.get("content") is None):  # a call may be all of an answer
        string(message, "content", place)
    for name in ("reasoning_content", *IDENTITIES):
        if message.get(name) is not None:
            string(message, name, place)


def string(record: Mapping[str, Any], name: str, where: str) -> str:
    """Returns a field; raises `ValueError` for what is missing, and for what is no text."""
    if name not in record:
        raise ValueError(f"{where} has no field {name!r}: add it, or remove the line")
    text = record[name]
    if not isinstance(text, str):
        raise ValueError(f"{where}: {name!r} holds {type(text).__name__}, not a string: mend or remove the line")
    _check_unicode(text, f"{where}: {name!r}")
    return text


def _check_unicode(text: str, what: str) -> None:
    if not is_unicode(text):
        raise ValueError(f"{what} holds a lone surrogate, no text: mend or remove the line")


def strings(conversation: Conversation, where: str) -> Iterator[tuple[str, str]]:
    """Yields each string that a template can take from a conversation, at any depth, keys included, with its place."""
    values = [(f"{where}: message {i}", message) for i, message in enumerate(conversation.messages, 1)]
    for place, value in [*values, (f"{where}: {_TOOLS!r}", conversation.tools)]:
        waiting = [value]
        while waiting:  # not by recursion: the nesting comes from outside
            value = waiting.pop()
            if isinstance(value, str):
                _check_unicode(value, place)
                yield place, value
            elif isinstance(value, dict):
                waiting += [*value.keys(), *value.values()]
            elif isinstance(value, list):
                waiting += value


class SpecialTexts:
    """Finds text that would become a special token, or a mark of a turn: whole, or divided over two strings."""

    def __init__(self, texts: Sequence[str], what: str, tokenizer: JsonTokenizer | None = None):
        """Takes the texts, what they are (for errors), and the tokenizer that parses them, if one does."""
        self._texts, self._what, self._tokenizer = texts, what, tokenizer
        self._beginnings = {text[:i] for text in texts for i in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def check(self, conversation: Conversation, where: str) -> None:
        """Raises `ValueError` for a conversation with such text."""
        texts = [*strings(conversation, where)]
        heads: dict[str, str] = {}  # what strings begin with, each with its place
        tails: dict[str, str] = {}
        for place, text in texts:
            if (special := next((x for x in self._texts if x in text), None)) is not None:
                self._refuse(f"{place} has the text {quoted(special)}")
            stripped = text.strip()  # as templates do
            for length in range(1, min(self._longest, len(stripped) + 1)):
                heads.setdefault(stripped[:length], place)
                tails.setdefault(stripped[-length:], place)
        if not self._beginnings.isdisjoint(tails):  # rarely
            for special, i in ((text, i) for text in self._texts for i in range(1, len(text))):
                if special[:i] in tails and special[i:] in heads:
                    places = f"{tails[special[:i]]} ends with the beginning of {quoted(special)}, {heads[special[i:]]}"
                    self._refuse(f"{places} begins with the rest")
        if self._tokenizer is not None:
            special = self._tokenizer.hidden_special([text for _, text in texts])
            if special is not None:
                self._refuse(f"{where} has text that the tokenizer normalizes to {quoted(special)}")

    def _refuse(self, problem: str) -> None:
        raise ValueError(f"{problem}, {self._what}: write it in another way, or remove the line")


# What begins a message in text without a template.
MARKS = tuple(f"<|{name}|>" for name in (*ROLES, _TOOLS))


def marked(conversation: Conversation, where: str) -> list[Turn]:
    """Returns a conversation as text without a template; raises `ValueError` for a field that has no place there."""
    turns = []
    if conversation.tools:
        turns.append(Turn(_message(_TOOLS, "\n".join(map(_json, conversation.tools))), is_answer=False))
    for i, message in enumerate(conversation.messages):
        place = f"{where}: message {i + 1}"
        for name, value in message.items():
            if name not in _FIELDS and value not in (None, [], {}):
                raise ValueError(
                    f"{place} has the field {quoted(name)}, which has no place in the text: "
                    f"{did_you_mean(name, _FIELDS)}remove it, or give a tokenizer with a chat template that has one"
                )
        if message["role"] == ANSWER:
            turns.append(Turn(_message(ANSWER), is_answer=False))
            turns.append(Turn(_answer(message, place), is_answer=i in conversation.answers, ends=True))
        else:
            turns.append(Turn(_message(message["role"], message["content"]), is_answer=False))
    return turns


def _message(role: str, content: str | None = None) -> str:
    return f"<|{role}|>\n" if content is None else f"<|{role}|>\n{content}\n"


def _answer(message: Mapping[str, Any], place: str) -> str:
    """Returns reasoning, content and calls, in the marks that Qwen's templates have for them."""
    reasoning, content = message.get("reasoning_content"), message.get("content")
    parts = [f"<think>\n{reasoning}\n</think>"] if reasoning else []
    parts += [content] if content else []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        other = [name for name in call if name not in _OF_CALLS] if function is not call else []
        if other or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{place} has the call {quoted(call)}: give {{'function': {{'name': ..., 'arguments': ...}}}}"
            )
        function = {name: value for name, value in function.items() if function is not call or name not in _OF_CALLS}
        parts.append(f"<tool_call>\n{_json(function)}\n</tool_call>")
    return "\n".join(parts)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
