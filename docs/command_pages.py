"""Writes a page for each command and for each table of a config file, from what `--help all` is made of."""

import argparse
import re
import typing

from zero_jax.cli import build_parser
from zero_jax.cli.command_options import SECTIONS, model_keys
from zero_jax.cli.config_classes import defaults_of, option_fields
from zero_jax.cli.help import examples_of, shown_value, usual_options, without_python

TYPES = {bool: "true or false", int: "integer", float: "number", str: "text", dict: "table"}


def pages() -> dict[str, str]:
    """Returns the text of each page by its name."""
    (action,) = (x for x in build_parser()._actions if isinstance(x, argparse._SubParsersAction))
    parsers: typing.Any = action.choices
    texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
    written = {name: command_page(name, parser.with_options()) for name, parser in parsers.items()}
    written |= {f"config-{section}": config_page(section) for section in SECTIONS}
    commands = [f"- [`zero-jax {name}`]({name}.md): {escaped(texts[name])}" for name in parsers]
    tables = [f"- [`[{section}]`](config-{section}.md)" for section in SECTIONS]
    written["index"] = "\n".join(
        [
            "# Commands and config files",
            "",
            *commands,
            "",
            "## Tables of a config file",
            "",
            "`zero-jax train --config FILE` reads these, and `--show-config` prints all of them; `plan`, `memory` and",
            "`comms` read the same files.",
            "",
            *tables,
            "",
            *("```{toctree}", ":hidden:", "", *[name for name in written if name != "index"], "```", ""),
        ]
    )
    return written


def command_page(name: str, parser: argparse.ArgumentParser) -> str:
    """Returns the page of a command."""
    lines = [f"# zero-jax {name}", "", escaped(parser.description or ""), ""]
    lines += ["```", parser.format_usage().removeprefix("usage: ").strip(), "```", ""]
    if examples := examples_of(name):
        lines += ["```", *examples.splitlines(), "```", ""]
    usual = usual_options(name)
    if usual:
        lines += ["## The usual options", ""]
        lines += [f"- `{head}`: {escaped(text)}" for head, text in usual.values()] + [""]
    for group in parser._action_groups:
        rows = [row for action in group._group_actions if (row := option_row(parser, action))]
        lines += [f"## {escaped((group.title or '').capitalize())}", "", *rows, ""] if rows else []
    return "\n".join(lines)


def option_row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Returns the line of an option or argument."""
    text = (action.help or "").replace("%%", "%").replace("%(default)s", str(action.default))
    names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    takes = "" if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction) else action.metavar
    value = f" {takes or ''}" if action.option_strings else ""
    return f"- `{(names + value).strip()}`: {escaped(text)}"


def config_page(section: str) -> str:
    """Returns the page of a table of a config file."""
    config = SECTIONS[section]
    fields, defaults = option_fields(config), defaults_of(config)
    lines = [f"# [{section}]", "", "| key | value | default | |", "| --- | --- | --- | --- |"]
    for name, field in fields.items():
        kind = ", ".join(map(str, field.words)) or TYPES[field.kind.base or str]
        default = "the preset's" if section == "model" else shown_value(defaults[name])
        text = without_python(field.help, ())
        lines.append(row(f"`{name}`", escaped(kind), f"`{default}`", escaped(text)))
    if section == "model":
        for destination, kind in model_keys().items():
            name = destination.rpartition(".")[2]
            help_text = option_fields("DecoderConfig")[name].help if "." in destination else "`--model`, `--from-hf`"
            lines.append(
                row(f"`{name}`", TYPES[kind.base or str], "the preset's", escaped(without_python(help_text, ())))
            )
    return "\n".join([*lines, ""])


def row(*cells: str) -> str:
    """Returns a row of a table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def escaped(text: str) -> str:
    """Returns text in which Markdown finds nothing but its code spans."""
    parts = text.split("`")
    plain = [re.sub(r"([*_<>\[\]$~#])", r"\\\1", part) if i % 2 == 0 else part for i, part in enumerate(parts)]
    return "`".join(plain)
