"""The program of a process that renders chat templates: the system limits its processor time and its memory.

A template is a program from outside. No check of its text bounds what it does (`'a' * 10**9`, `'%999999999d' % 1`,
nested loops, filters), and nothing stops a thread. `chat_template.py` starts this file by its path, as it needs nothing
of zero_jax. It reads a JSON object a line and answers each with one: the template, then conversations.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_BYTES = 1 << 30  # of memory
_MAX_CHARACTERS = 1 << 24  # of a conversation's text
_ERROR_CHARACTERS = 500  # of an error's text


class _Generation(Extension):
    """Renders the contents of `{% generation %}` blocks, by which transformers marks answers."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """Returns the settings, filters and functions that transformers has, but for what gives another text each time."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    del environment.filters["random"], environment.globals["lipsum"]
    return environment


class _Message(dict):
    """A message that notes which of its fields the template reads."""

    def __init__(self, fields: Mapping[str, Any]):
        super().__init__(fields)
        self.__unread = {key for key, value in fields.items() if value is not None}

    def __getitem__(self, key: Any) -> Any:
        self.__unread.discard(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.__unread.discard(key)
        return super().get(key, default)

    @staticmethod
    def __reading_all(name: str) -> Any:
        def method(self: _Message, *arguments: Any) -> Any:
            self.__unread.clear()
            return getattr(dict, name)(self, *arguments)

        return method

    __iter__, __repr__, keys, values, items, copy = map(
        __reading_all, ("__iter__", "__repr__", "keys", "values", "items", "copy")
    )

    @classmethod
    def unread(cls, messages: Sequence[_Message]) -> list[tuple[int, str]]:
        """Returns the fields that were not read, each with the index of its message."""
        return [(i, key) for i, message in enumerate(messages) for key in sorted(message.__unread)]


class _Failed(Exception):
    """The template fails for the first messages of a conversation."""


class _Renderer:
    def __init__(self, start: Mapping[str, Any]):
        environment = _environment()
        self.template = environment.from_string(start["source"])
        self.reads_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(start["source"]))
        self._variables = {**start["tokens"], "documents": None}

    def render(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a conversation's text, where its learned answers begin and end, and the fields that were not read."""
        plain, messages = request["messages"], [_Message(message) for message in request["messages"]]
        variables = {**self._variables, "tools": request["tools"], "add_generation_prompt": False}
        text, spans, last = self._text(messages, variables), [], 0
        for i in request["answers"]:
            # Of plain messages: what a template reads is noted of the complete text alone.
            prompt = self._text(plain[:i], {**variables, "add_generation_prompt": True})
            with_answer = self._text(plain[: i + 1], variables)
            first, end = len(prompt), len(with_answer)
            if not (text.startswith(prompt) and text.startswith(with_answer) and last <= first <= end):
                return {"otherwise": i}
            spans.append((first, end))
            last = end
        return {"text": text, "answers": spans, "unread": _Message.unread(messages)}

    def _text(self, messages: Sequence[Any], variables: Mapping[str, Any]) -> str:
        parts, size = [], 0
        try:
            for part in self.template.generate({**variables, "messages": messages}):
                parts.append(part)
                size += len(part)
                if size > _MAX_CHARACTERS:
                    raise ValueError(f"the text has more than {_MAX_CHARACTERS:,} characters")
            return "".join(parts)
        except Exception as error:  # a template raises anything
            raise _Failed(len(messages), _described(error)) from None


def _described(error: Exception) -> str:
    text = "it takes more memory than it may" if isinstance(error, MemoryError) else str(error)
    return f"{type(error).__name__}: {text}"[:_ERROR_CHARACTERS]


def main() -> None:
    """Answers the lines of the standard input until it ends."""
    for limit, value in ((resource.RLIMIT_AS, _MAX_BYTES), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
            resource.setrlimit(limit, (value, value))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent that ignores it has its children ignore it
    renderer = None
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # the system ends this process then
        try:
            if renderer is None:
                renderer = _Renderer(request)
                answer: dict[str, Any] = {"reads_tools": renderer.reads_tools}
            else:
                answer = renderer.render(request)
        except _Failed as failed:
            answer = {"num_messages": failed.args[0], "error": failed.args[1]}
        except Exception as error:
            answer = {"error": _described(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
