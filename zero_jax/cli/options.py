"""Command-line options made of the fields of config dataclasses, and config files of the same fields."""

import argparse
import dataclasses
import functools
import inspect
import json
import pathlib
import re
import shutil
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from zero_jax.cli.option_values import LARGEST_COUNT, LARGEST_INTEGER, Place, check_value, read_toml
from zero_jax.core.close_match import did_you_mean
from zero_jax.core.json_lines import write_text


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors name the nearest valid option, and that takes no abbreviations."""

    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown options here, where the command's own options are known."""
        parsed, rest = super().parse_known_args(args, namespace)
        words = {word.split("=")[0] for word in (sys.argv[1:] if args is None else args)}
        own = {action.dest for action in self._actions if words & set(action.option_strings)}
        setattr(parsed, _EXPLICIT, explicit(parsed) | own)
        if rest:
            options = [name for action in self._actions for name in action.option_strings]
            hint = did_you_mean(rest[0].split("=")[0], options, "did you mean {}? ")
            self.error(f"unknown argument {rest[0]!r}: {hint}`{self.prog} --help` lists the options")
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        """Prints the error alone, without the long list of options, and ends the program."""
        known = [name for action in self._actions for name in action.choices or () if action.nargs == argparse.PARSER]
        wrong = re.search(r"invalid choice: '([^']*)'", message)
        message += did_you_mean(wrong[1], known, ": did you mean {!r}?") if wrong else ""
        self.exit(2, f"{self.prog}: error: {message}\n")


_EXPLICIT = "options that were given"


def explicit(options: argparse.Namespace) -> frozenset[str]:
    """Returns where the options that the command line itself has were put, those of a config file left out."""
    return getattr(options, _EXPLICIT, frozenset())


def refuse(options: argparse.Namespace, names: Collection[str], *, reason: str) -> None:
    """Refuses options that would say nothing.

    Args:
      options: what was given.
      names: names of options, with their dashes.
      reason: why none of them has a meaning here.

    Raises:
      ValueError: one of them was given.
    """
    asked = explicit(options)
    found = [name for name in names if any(one.split(".")[-1] == name[2:].replace("-", "_") for one in asked)]
    if found:
        raise ValueError(f"{' and '.join(found)}: {reason}")


class _HelpFormatter(argparse.HelpFormatter):
    """Gives the options' names room."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=34, width=min(120, shutil.get_terminal_size().columns))


def add_fields(group: Any, config_class: type, *, default_of: Any, without: Collection[str] = ()) -> None:
    """Adds an option for each field that is a number, a word or a switch; without `default_of`, None is not given."""
    for name, kind in option_fields(config_class).items():
        if name in without:
            continue
        default = None if default_of is None else getattr(default_of, name)
        shown = "the preset's" if default_of is None else "none" if default is None else default
        text = f"{_field_help(config_class)[name]} (default: {shown})".replace("%", "%%")
        option = "--" + name.replace("_", "-")
        destination = f"{config_class.__name__}.{name}"
        settings: dict[str, Any] = {"dest": destination, "default": default, "help": text}
        if kind.base is bool:
            group.add_argument(option, action=argparse.BooleanOptionalAction, **settings)
        elif kind.choices:
            group.add_argument(option, choices=kind.choices, **settings)
        else:
            parse = reader(kind.base, is_optional=kind.is_optional, **_limits(destination))
            group.add_argument(option, type=parse, metavar=_METAVARS[kind.base], **settings)


# Fields that the command line does not offer: the roles of mesh axes, which the commands name themselves, and what is
# no number or word or has no use for the shipped models. `remat` of a command is the policy, for any model.
_NOT_OPTIONS = frozenset(
    {
        "zero",
        "data_axes",
        "replica_axes",
        "model_axes",
        "param_specs",
        "axis_rules",
        "overrides",
        "loss_weight",
        "GPTConfig.remat",
    }
)
# The texts that are places of files; `checkpoints` may be in a bucket.
PLACES: Mapping[str, Place] = {
    "DataConfig.data": "local",
    "DataConfig.tokenizer": "local",
    "DataConfig.token_cache": "local",
    "TrainConfig.out": "local",
    "TrainConfig.name": "local",
    "TrainConfig.checkpoints": "anywhere",
    "TrainConfig.init_from": "anywhere",
    "PlanConfig.cache": "local",
}
# Integers of 64 bits, or bounded by the machine; all others are counted in 32 bits on a device.
_WIDE = frozenset({"batch_size", "combine_bytes", "min_shard_size", "seed"})
_METAVARS: Mapping[type, str] = {int: "N", float: "X", str: "TEXT"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """The type of an option: a base type, whether None is a value, and the words it is limited to."""

    base: type
    is_optional: bool
    choices: tuple[str, ...] = ()


def option_fields(config_class: type) -> dict[str, Kind]:
    """Returns the fields of a config that the command line offers."""
    hints = typing.get_type_hints(config_class)
    kinds = {
        field.name: _kind(hints[field.name])
        for field in dataclasses.fields(config_class)
        if not {field.name, f"{config_class.__name__}.{field.name}"} & _NOT_OPTIONS
    }
    return {name: kind for name, kind in kinds.items() if kind}


def _kind(hint: Any) -> Kind | None:
    if typing.get_origin(hint) is typing.Literal:
        return Kind(base=str, is_optional=False, choices=typing.get_args(hint))
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = typing.get_args(hint) if is_union else (hint,)
    simple = [member for member in members if member in (bool, int, float, str)]
    return Kind(base=simple[0], is_optional=type(None) in members) if simple else None


def reader(
    base: type,
    *,
    place: Place | None = None,
    is_optional: bool = False,
    lowest: int | None = None,
    largest: int = LARGEST_COUNT,
) -> Callable[[str], Any]:
    """Returns what reads the text of an option, for `add_argument(type=...)`.

    Args:
      base: `int`, `float` or `str`.
      place: where a text may lead, if it is the place of something.
      is_optional: whether `none` is a value.
      lowest: the smallest number that it takes.
      largest: the largest integer that it takes.
    """

    def parse(text: str) -> Any:
        if is_optional and text.lower() == "none":
            return None
        _check(text)
        value = base(text)
        _check(value, place=place, largest=largest)
        if lowest is not None and value < lowest:
            raise argparse.ArgumentTypeError(f"{value}: give at least {lowest}")
        return value

    parse.__name__ = base.__name__  # which argparse's own errors name
    return parse


def _limits(destination: str) -> dict[str, Any]:
    """Returns what `check_value` has to know of an option."""
    is_wide = destination.rpartition(".")[2] in _WIDE
    return {"place": PLACES.get(destination), "largest": LARGEST_INTEGER if is_wide else LARGEST_COUNT}


def _check(value: Any, **limits: Any) -> None:
    try:
        check_value(value, **limits)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@functools.cache
def _field_help(config_class: type) -> dict[str, str]:
    """Reads what the `Attributes:` section of a config's docstring says of each field."""
    section = inspect.cleandoc(config_class.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.split(r"^  (\w+): ", section, flags=re.MULTILINE)[1:]
    told = {name: " ".join(text.split()).rstrip(".") for name, text in zip(entries[::2], entries[1::2], strict=True)}
    return {field.name: told.get(field.name, "") for field in dataclasses.fields(config_class)}


def given(config_class: type, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of a config as they were given, those that the command does not offer left out."""
    names = {name: f"{config_class.__name__}.{name}" for name in option_fields(config_class)}
    return {name: getattr(options, dest) for name, dest in names.items() if hasattr(options, dest)}


def read_file(
    path: str | pathlib.Path, sections: Mapping[str, type], extra: Mapping[str, Kind] = types.MappingProxyType({})
) -> dict[str, Any]:
    """Reads a config file in TOML; returns its values by the names that the options of the same fields have.

    Args:
      path: the file.
      sections: its sections, and the config class that each holds fields of.
      extra: further keys of the section `model` and what they hold, returned by their own names.

    Raises:
      ValueError: no such file, no TOML, an unknown section or key, or a value of the wrong type.
    """
    found = read_toml(path)
    values: dict[str, Any] = {}
    for section, entries in found.items():
        _check_known(f"{path}: section", section, sections)
        if not isinstance(entries, dict):
            raise ValueError(f"{path}: {section!r} is a value: write a section [{section}] of values")
        own = extra if section == "model" else {}
        kinds = {**option_fields(sections[section]), **own}
        for name, value in entries.items():
            _check_known(f"{path}: key of [{section}]", name, kinds)
            destination = name if name in own else f"{sections[section].__name__}.{name}"
            values[destination] = _checked(f"{path}: {section}.{name}", value, kinds[name], _limits(destination))
    return values


def _check_known(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(f"{what} {name!r} is unknown: {did_you_mean(name, known)}Known are {', '.join(known)}")


def _checked(what: str, value: Any, kind: Kind, limits: Mapping[str, Any]) -> Any:
    if kind.is_optional and value == "none":
        return None
    try:
        check_value(value, **limits)
        if kind.base is float and type(value) is int:
            value = float(value)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    if type(value) is not kind.base or (kind.choices and value not in kind.choices):
        wanted = f"one of {', '.join(kind.choices)}" if kind.choices else f"a value of type {kind.base.__name__}"
        raise ValueError(f"{what} = {_shown(value)}: give {wanted}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def write_file(path: str | pathlib.Path, sections: Mapping[str, Mapping[str, Any]], *, title: str) -> None:
    """Writes a config file that `read_file` takes; None is written as "none"."""
    lines = [f"# {title}"]
    for section, entries in sections.items():
        lines += ["", f"[{section}]"]
        lines += [f"{name} = {json.dumps('none' if value is None else value)}" for name, value in entries.items()]
    write_text(pathlib.Path(path), "\n".join(lines) + "\n")


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """Replaces what JSON has no number for by null."""
    return {
        name: None if isinstance(value, float) and not abs(value) < float("inf") else value
        for name, value in record.items()
    }
