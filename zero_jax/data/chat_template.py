"""The chat template of a tokenizer's folder: conversations as text, as transformers renders them, cut at the answers.

A template is a Jinja program (`chat_template.jinja`, or `chat_template` in `tokenizer_config.json`). It is not trusted:
it runs in Jinja's sandbox, in a process of its own (`rendering.py`) whose time and memory are limited.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from zero_jax.core.extras import extra
from zero_jax.core.files.untrusted import read_json, read_text
from zero_jax.core.text_tables import is_unicode, printable

_FILE, _CONFIG, _TOKENS = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
_READ: Mapping[str, Any] = {"what": "the tokenizer's", "remedy": "mend or remove it", "limit_bytes": 1 << 24}
_PROGRAM = pathlib.Path(__file__).with_name("rendering.py")
ANSWER = "assistant"
# Processor time for a conversation, and more for each answer, up to which the conversation is rendered anew.
_SECONDS, _SECONDS_PER_ANSWER, _MAX_SECONDS = 10, 0.1, 300


@dataclasses.dataclass(frozen=True)
class Turn:
    """A part of a conversation's text, which the loss is on if it `is_answer`, and after which a document may end."""

    text: str
    is_answer: bool
    ends: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A chat template."""

    path: pathlib.Path  # the file that it is in
    source: str  # its text
    # The texts of special tokens by the names that the template has for them, such as `bos_token`
    tokens: Mapping[str, str]

    @property
    def remedy(self) -> str:
        """How to do without the template."""
        return f"or train without the template, with --tokenizer a copy of {self.path.parent / 'tokenizer.json'} alone"


class Renderer:
    """A process that renders the conversations of a template; `reads_tools` says whether that reads `tools`."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        with extra("train"):
            import jinja2  # noqa: F401  # pyright: ignore[reportMissingImports]

        try:
            self._process = subprocess.Popen(
                # -P: Python would import from the program's folder first, whose modules have plain names.
                [sys.executable, "-P", str(_PROGRAM)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends that one
            )  # fmt: skip
        except OSError as error:
            raise ValueError(
                f"{template.path}: a process for the template cannot be started ({error.strerror}): end others, "
                f"{template.remedy}"
            ) from error
        request = {"source": template.source, "tokens": template.tokens}
        answer = self._ask(request, _SECONDS, f"{template.path}: its chat template")
        if "error" in answer:
            self.close()
            raise ValueError(
                f"{template.path} has no valid chat template ({printable(answer['error'])}): mend it, {template.remedy}"
            )
        self.reads_tools: bool = answer["reads_tools"]

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, answers: Sequence[int], tools: Any, where: str
    ) -> tuple[list[Turn], list[tuple[int, str]]]:
        """Returns a conversation with `tools` as parts of text; learned `answers` begin after the generation prompt.

        And the fields that the template has not read, each with the index of its message.
        """
        seconds = min(_SECONDS + _SECONDS_PER_ANSWER * len(answers), _MAX_SECONDS)
        what, remedy = f"{where}: the chat template of {self._template.path}", self._template.remedy
        answer = self._ask({"messages": messages, "answers": answers, "tools": tools}, seconds, what)
        if (error := answer.get("error")) is not None:
            raise ValueError(
                f"{what} fails for the first {answer['num_messages']} messages ({printable(error)}): mend the "
                f"conversation, {remedy}"
            )
        if "otherwise" in answer:
            raise ValueError(
                f"{what} renders the conversation up to message {answer['otherwise'] + 1} otherwise when more follows, "
                f"so that its answer has no place in the text: give conversations with one answer, at their end, "
                f"{remedy}"
            )
        text, turns, last = answer["text"], [], 0
        if not is_unicode(text):
            raise ValueError(f"{what} renders a lone surrogate, no text: mend the template, {remedy}")
        for first, end in answer["answers"]:
            turns += [Turn(text[last:first], is_answer=False), Turn(text[first:end], is_answer=True)]
            last = end
        return [*turns, Turn(text[last:], is_answer=False)], [*map(tuple, answer["unread"])]

    def _ask(self, request: Mapping[str, Any], seconds: float, what: str) -> dict[str, Any]:
        """Returns the process's answer; raises `ValueError` if it ended without one."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            # A line: JSON escapes the line breaks of texts.
            process.stdin.write(json.dumps({**request, "seconds": seconds}).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if line.endswith(b"\n"):
            return json.loads(line)
        last_words = process.communicate()[1].decode(errors="replace").strip().rpartition("\n")[2]
        if process.returncode == -signal.SIGPROF:
            why = f"takes more than {seconds:.0f} s of processor time"
        else:
            why = f"ended its process ({printable(last_words) or f'exit status {process.returncode}'})"
        raise ValueError(f"{what} {why}: mend the template, {self._template.remedy}")


def find_chat_template(folder: pathlib.Path) -> ChatTemplate | None:
    """Returns the chat template in a tokenizer's folder, or None."""

    def read(name: str) -> dict[str, Any]:
        return read_json(folder / name, **_READ) if (folder / name).exists() else {}

    config = read(_CONFIG)
    path, source = folder / _CONFIG, config.get("chat_template")
    if (folder / _FILE).is_file():
        path, source = folder / _FILE, read_text(folder / _FILE, **_READ)
    elif isinstance(source, list):  # several by name
        templates = [template for template in source if isinstance(template, dict)]
        if not any(template.get("name") == "default" for template in templates):
            raise ValueError(
                f"{path}: none of its {len(source)} chat templates is called 'default': name or remove one"
            )
        source = next(template.get("template") for template in templates if template["name"] == "default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"{path}: 'chat_template' holds {type(source).__name__}, not a string: mend or remove it")
    special = (read(_TOKENS) | config).items()
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in special}
    tokens = {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}
    return ChatTemplate(path=path, source=source, tokens=tokens)
