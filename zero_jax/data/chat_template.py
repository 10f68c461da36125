"""The chat template of a tokenizer's folder: conversations as text, as transformers renders them, cut at the answers.

A template is a Jinja program (`chat_template.jinja`, or `chat_template` in `tokenizer_config.json`). It is not trusted:
it runs in Jinja's sandbox.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from zero_jax.core.extras import extra
from zero_jax.core.files.untrusted import mapping, read_json, read_text

_FILE, _CONFIG, _TOKENS = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
_READ: Mapping[str, Any] = {"what": "the tokenizer's", "remedy": "mend or remove it", "limit_bytes": 1 << 24}
ANSWER = "assistant"


@dataclasses.dataclass(frozen=True)
class Turn:
    """A part of a conversation's text, which the loss is on if it `is_answer`."""

    text: str
    is_answer: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A chat template.

    Attributes:
      path: the file that it is in.
      source: its text.
      tokens: the texts of special tokens by the names that the template has for them, such as `bos_token`.
    """

    path: pathlib.Path
    source: str
    tokens: Mapping[str, str]

    def turns(self, messages: Sequence[Mapping[str, Any]], *, tools: Any, where: str) -> list[Turn]:
        """Returns the text of a conversation in parts: an answer begins after the generation prompt.

        `where` is the place of the conversation, for errors; `tools` are the functions that the model may call.

        Raises:
          ValueError: the template fails, or renders the beginning of the conversation otherwise than all of it.
        """
        rendered, end, turns = self._render(messages, tools, where), 0, []
        for i, message in enumerate(messages):
            if message["role"] != ANSWER:
                continue
            prompt = self._render(messages[:i], tools, where, add_generation_prompt=True)
            answered = self._render(messages[: i + 1], tools, where)
            if not (rendered.startswith(answered) and answered.startswith(prompt) and len(prompt) >= end):
                raise ValueError(
                    f"{where}: the chat template of {self.path} renders the conversation up to message {i + 1} "
                    "otherwise when more follows, so that its answer has no place in the text: give conversations with "
                    f"one answer, at their end, {self._remedy}"
                )
            turns += [Turn(rendered[end : len(prompt)], is_answer=False), Turn(answered[len(prompt) :], is_answer=True)]
            end = len(answered)
        return [*turns, Turn(rendered[end:], is_answer=False)]

    @property
    def _remedy(self) -> str:
        return f"or train without the template, with --tokenizer a copy of {self.path.parent / 'tokenizer.json'} alone"

    def _render(self, messages: Sequence[Any], tools: Any, where: str, *, add_generation_prompt: bool = False) -> str:
        variables = {"messages": list(messages), "tools": tools, "documents": None, **self.tokens}
        compiled = self._compiled
        try:
            return compiled.render(**variables, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template raises anything
            raise ValueError(
                f"{where}: the chat template of {self.path} fails for the first {len(messages)} messages "
                f"({type(error).__name__}: {error}): mend the conversation, {self._remedy}"
            ) from error

    @functools.cached_property
    def _compiled(self) -> Any:
        """The template, compiled with the settings, filters and functions that transformers has.

        Only `strftime_now` is left out: the text would depend on the day. Templates have a date for that case, or fail.
        """
        with extra("train"):
            import jinja2  # pyright: ignore[reportMissingImports]
            from jinja2.ext import Extension, loopcontrols  # pyright: ignore[reportMissingImports]
            from jinja2.sandbox import ImmutableSandboxedEnvironment  # pyright: ignore[reportMissingImports]

        class Generation(Extension):
            """Renders the contents of `{% generation %}` blocks, by which transformers marks answers."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        def tojson(value: Any, **options: Any) -> str:
            return json.dumps(value, **{"ensure_ascii": False, **options})

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = raise_exception
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise ValueError(f"{self.path} has no valid chat template ({error}): mend it, {self._remedy}") from error


def find_chat_template(folder: pathlib.Path) -> ChatTemplate | None:
    """Returns the chat template in a tokenizer's folder, or None.

    Raises:
      ValueError: a file that cannot be read, or that has something else in the place of the template.
    """

    def read(name: str) -> dict[str, Any]:
        return read_json(folder / name, **_READ) if (folder / name).exists() else {}

    config = read(_CONFIG)
    path, source = folder / _CONFIG, config.get("chat_template")
    if (folder / _FILE).is_file():
        path, source = folder / _FILE, read_text(folder / _FILE, **_READ)
    elif isinstance(source, list):  # several by name
        templates = [mapping(t) for t in source]
        source = next((t.get("template") for t in templates if t.get("name") == "default"), None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"{path}: 'chat_template' holds {type(source).__name__}, not a string: mend or remove it")
    special = (read(_TOKENS) | config).items()
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in special}
    tokens = {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}
    return ChatTemplate(path=path, source=source, tokens=tokens)
