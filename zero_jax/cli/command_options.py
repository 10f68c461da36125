"""The options of every command, from `commands.toml`. Nothing here imports JAX or a config class."""

import argparse
import string
from collections.abc import Iterator, Mapping
from typing import Any

from zero_jax.cli.config_classes import CONFIG_MODULES, defaults_of, keys_of, option_fields
from zero_jax.cli.help import COMMANDS, CONFIGS, INCLUDED, shown_value, without_python
from zero_jax.cli.options import command_of, limits_of, option_of, reader
from zero_jax.core.field_checks import FieldKind
from zero_jax.core.text_tables import quoted

_METAVARS: Mapping[type | None, str] = {int: "N", float: "X", str: "TEXT"}
_TYPES: Mapping[str, type] = {"int": int, "float": float, "str": str, "path": str}
MAX_SEQ_LEN = 4096  # of --from-hf without --seq-len: contexts of 131,072 tokens are common, and do not fit
SECTIONS: Mapping[str, str] = CONFIGS["sections"]  # the config class of each section of a config file
CONFIG_PARTS: list[str] = CONFIGS["fields"]["parts"].split()  # those that are fields of `TrainConfig`


def model_keys() -> dict[str, FieldKind]:
    """Returns the keys of the section `model` of a config file, by destination, that are no field of a GPT."""
    kinds = {"preset": FieldKind(types=(str,)), "from_hf": FieldKind(types=(str,), is_optional=True)}
    for name, field in option_fields("DecoderConfig").items():
        if name not in option_fields("GPTConfig"):
            kinds[f"DecoderConfig.{name}"] = field.kind
    return kinds


def add_options(parser: argparse.ArgumentParser, command: str) -> None:
    """Adds the options of a command, by its table."""
    table = COMMANDS[command]
    parser.description = table["description"]
    groups: dict[str, Any] = {"": parser}
    for row in _rows(table["options"]):
        title = row.pop("group", "")
        if title not in groups:
            is_choice = title == "one of"  # argparse has no title for such a group
            groups[title] = (
                parser.add_mutually_exclusive_group(required=True) if is_choice else parser.add_argument_group(title)
            )
        (_add_config if "config" in row else _add_own)(groups[title], row)
    parser.set_defaults(run=command_of(table["run"], has_bugs=table.get("has_bugs", False)))


def _rows(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        yield from _rows(INCLUDED[row["include"]]) if "include" in row else [dict(row)]


def _add_config(group: Any, row: dict[str, Any]) -> None:
    """Adds an option for each number, word or switch of a config class, with the help of the field's docstring line."""
    config, unset, short = row.pop("config"), row.pop("unset", ""), row.pop("short", {})
    left_out = {*row.pop("without", "").split()} | (
        option_fields(row.pop("not_of")).keys() if "not_of" in row else set()
    )
    left_out |= option_fields(config).keys() - option_fields(row.pop("of_both", config)).keys()
    # A column of `commands.toml` that nothing reads is a typo.
    assert not row, row
    defaults, all_fields = defaults_of(config), frozenset(name for x in CONFIG_MODULES for name in option_fields(x))
    for name, field in option_fields(config).items():
        if name in left_out:
            continue
        kind, destination, names = field.kind, f"{config}.{name}", [short.get(name), option_of(name)]
        shown = unset or shown_value(defaults[name])
        settings: dict[str, Any] = {
            "dest": destination,
            # Without a default the options have no such value unless it is given: that of the preset or the run stays.
            "default": argparse.SUPPRESS if unset else defaults[name],
            # argparse formats a help by `%`.
            "help": f"{without_python(field.help, all_fields)} (default: {shown})".replace("%", "%%"),
        }
        if kind.base is bool:
            settings["action"] = argparse.BooleanOptionalAction
        elif kind.base is dict:
            # Each use of the option adds one entry.
            names[-1] = option_of(name).removesuffix("s")
            settings |= {"action": _AddEntry, "metavar": "NAME=VALUE", "type": reader(FieldKind(types=(str,)))}
        else:
            words = f"{{{','.join(map(str, field.words))}}}" if field.words else ""
            settings["metavar"] = words or "|".join([_METAVARS[kind.base], *kind.other_words])
            settings["type"] = reader(kind, **limits_of(destination))
        action = group.add_argument(*filter(None, names), **settings)
        if field.words:
            # Choices are refused and completed, suggestions are completed alone.
            action.choices, action.suggested = None if field.is_open else field.words, field.words


class _AddEntry(argparse.Action):
    """Adds NAME=VALUE to a dict; the value none is None."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name, separator, value = values.partition("=")
        if not (name and separator and value):
            raise argparse.ArgumentError(self, f"{quoted(values, limit=60)} is not of the form NAME=VALUE")
        entries = getattr(namespace, self.dest) or {}  # copied below: it may be the default of the parser
        setattr(namespace, self.dest, {**entries, name: None if value.lower() == "none" else value})


def _add_own(group: Any, row: dict[str, Any]) -> None:
    """Adds an option or argument; what the row has beside the columns here are settings of `add_argument`."""
    name, text, kind = row.pop("name"), row.pop("help", ""), row.pop("type", "")
    instead_of = row.pop("instead_of", ())
    if kind == "path":  # completion offers files for what has a place
        row.setdefault("metavar", "FILE")
    if kind:
        limits = limits_of(name.lstrip("-").replace("-", "_"))
        limits["place"] = row.pop("place", "local" if kind == "path" else limits["place"])
        words = tuple(row.pop("or", ()))
        field = FieldKind(types=(_TYPES[kind],), is_optional=row.pop("is_optional", False), other_words=words)
        row["type"] = reader(field, lowest=row.pop("lowest", None), **limits)
    if "choices_of" in row:
        row["choices"] = tuple(choice for source in row.pop("choices_of") for choice in _choices(source))
    if not row.keys() & {"type", "choices", "nargs"}:
        row["action"] = argparse.BooleanOptionalAction if "default" in row else "store_true"
    texts = {"choices": ", ".join(row.get("choices", ())), "max_seq_len": f"{MAX_SEQ_LEN:,}"}
    group.add_argument(name, help=string.Template(text).substitute(texts), **row).instead_of = instead_of


def _choices(source: str) -> list[str]:
    """Returns the names of the commands, the keys of a dict, as `module name`, or the word itself."""
    module, _, name = source.partition(" ")
    return keys_of(module, name) if name else [*COMMANDS] if source == "commands" else [source]
