"""The help of the commands: the usual options with examples, or all of them (`--help all`)."""

import argparse
import copy
import importlib.resources
import re
import string
import textwrap
import tomllib
from collections.abc import Collection
from typing import Any


def _read_table() -> dict[str, Any]:
    table = tomllib.loads(importlib.resources.files("zero_jax.cli").joinpath("commands.toml").read_text("utf-8"))
    texts = table.pop("texts")

    def filled(value: Any) -> Any:
        return string.Template(value).safe_substitute(texts) if isinstance(value, str) else value

    return {command: {name: filled(value) for name, value in entry.items()} for command, entry in table.items()}


COMMANDS: dict[str, dict[str, Any]] = _read_table()  # by name, each with its usage, texts and options
INCLUDED = COMMANDS.pop("include")  # options of several commands
CONFIGS = COMMANDS.pop("configs")  # what is known of config classes and their fields


def usual_options(command: str) -> dict[str, tuple[str, str]]:
    """Returns the usual options of a command, each with its argument and a line; none of a command with few."""
    lines = filter(None, COMMANDS.get(command, {}).get("usual", "").splitlines())
    words = (line.partition(": ") for line in lines)
    return {head.split(" ")[0]: (head, text) for head, _, text in words}


def examples_of(command: str) -> str:
    """Returns the examples of a command, a line each."""
    return COMMANDS.get(command, {}).get("examples", "")


class Help(argparse.Action):
    """`--help` shows the usual options of a command, if it has many, and `--help all` all of them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Prints the help, and ends the program."""
        print(help_text(parser, everything=values == "all"))
        parser.exit()


def help_text(parser: argparse.ArgumentParser, *, everything: bool) -> str:
    """Returns the help of a command, or of `zero-jax` itself."""
    command = parser.prog.partition(" ")[2]
    usual, examples = usual_options(command), examples_of(command)
    shown = f"\nexamples:\n{textwrap.indent(examples, '  ')}\n" if examples else ""
    if everything or not usual:
        return f"{parser.format_help()}{shown}"
    by_name = {name: action for action in parser._actions for name in action.option_strings}
    num_more = len([action for action in parser._actions if action.option_strings]) - len(usual)
    formatter = parser.formatter_class(prog=parser.prog)
    formatter.add_text(parser.description)
    formatter.start_section("the usual options")
    for name, (head, text) in usual.items():
        # argparse lays the line out for the terminal's width; it formats a help by `%`.
        action = copy.copy(by_name[name])
        action.option_strings, action.metavar = [name], head.removeprefix(name).strip()
        is_shown = action.default not in (None, argparse.SUPPRESS, False) and "instead" not in text
        default = f" ({shown_value(action.default)})" if is_shown else ""
        action.help = f"{text}{default}".replace("%", "%%")
        formatter.add_argument(action)
    formatter.end_section()
    more = f"`{parser.prog} --help all` has {num_more} more options."
    return f"{parser.format_usage()}\n{formatter.format_help()}{shown}\n{more}"


def shown_value(value: Any) -> str:
    """Returns a value as a command line has it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def without_python(text: str, fields: Collection[str]) -> str:
    """Returns the line of a docstring on a field as help: options instead of `fields`, none instead of None."""
    text = re.sub(r"([.,;]? [Oo]r| and)? an? `[A-Z]\w+`", "", text)  # a class stands for what an option cannot say
    text = re.sub(r" \(`zero\.[^)]*\)", "", text)
    text = text.replace("None", "none").replace("`", "")
    named = lambda found: f"--{found[0].replace('_', '-')}" if found[0] in fields else found[0]  # noqa: E731
    return re.sub(r"(?<![-/.\w])[a-z]+(_[a-z0-9]+)+\b", named, text)
