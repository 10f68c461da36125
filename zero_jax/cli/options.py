"""The parser of the command line, and the values of options and of keys of config files, read by their kind.

The destination of a config's field is `ClassName.field`.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import pkgutil
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NoReturn

from zero_jax.cli.config_classes import option_fields
from zero_jax.cli.help import CONFIGS, Help
from zero_jax.core.close_match import did_you_mean, missing_here
from zero_jax.core.extras import pip_install
from zero_jax.core.field_checks import FieldKind
from zero_jax.core.text_tables import is_unicode, plain, printable_lines, quoted

_LARGEST_COUNT = 2**31 - 1  # of int32, the type of steps, tokens and rows on a device
_LARGEST_INTEGER = 2**63 - 1
_LARGEST_NUMBER = 3.4e38  # of float32
_MAX_CHARACTERS = 4_000  # Python converts no more digits than 4,300
# Where the path of a text option may be: on this machine, or also in a bucket.
PathPlace = Literal["local", "anywhere"]
# The schemes of buckets, each with the packages of which one is needed: checkpoints go through etils.epath and
# tensorstore, which both have to support the scheme.
_SCHEMES: Mapping[str, tuple[str, ...]] = {"gs": ("gcsfs", "tensorflow"), "s3": ("s3fs",)}
# Names of fields, by what they have in common.
_FIELDS: Mapping[str, list[str]] = {name: text.split() for name, text in CONFIGS["fields"].items()}
# What there is besides the choices of an option.
_BEYOND = {"OptimizerConfig.optimizer": "; in Python zero.Trainer and zero.plan take any optax optimizer, as tx"}
_EXPLICIT, _FROM_FILE = "explicit options", "options of the config file"


class Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors that name the closest option; `options` adds the options when needed."""

    def __init__(self, *, options: Callable[[Parser], None] | None = None, **kwargs: Any):
        super().__init__(allow_abbrev=False, add_help=False, formatter_class=_HelpFormatter, **kwargs)
        self.add_argument("-h", "--help", action=Help, nargs="?", metavar="all", help="show the usual options, or all")
        self._options = options

    def with_options(self) -> Parser:
        """Returns the parser, with its options added."""
        add, self._options = self._options, None
        if add is not None:
            add(self)
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown options here, where the command's own options are known."""
        self.with_options()
        words, options = sys.argv[1:] if args is None else list(args), self._option_string_actions
        if all(action.nargs not in (argparse.PARSER, argparse.REMAINDER) for action in self._actions):
            own = words[: words.index("--")] if "--" in words else words
            # First of all: argparse would only say that an option of the right name is missing. After an option that
            # takes a value it says that the value is missing.
            after = (word for x, word in itertools.pairwise(["", *own]) if x not in options or options[x].nargs == 0)
            self._refuse([word for word in after if word.startswith("--") and word.split("=")[0] not in options], words)
        parsed, unknown = super().parse_known_args(words, namespace)
        # argparse does not tell a value that was given from the same default.
        names = {word.split("=")[0] for word in words}
        dests = {action.dest for action in self._actions if names & set(action.option_strings)}
        setattr(parsed, _EXPLICIT, explicit(parsed) | dests)
        self._refuse(unknown, words)
        return parsed, unknown

    def _refuse(self, unknown: Sequence[str], words: Sequence[str]) -> None:
        """Refuses the first of the unknown words of a command line, if there is one, with what there is instead."""
        if not unknown:
            return
        word, options = unknown[0].split("=")[0], self._option_string_actions
        hint = missing_here(word) or did_you_mean(word, options, "did you mean {}? ")
        if any(word in getattr(action, "instead_of", ()) for action in self._actions):
            hint = f"a run, or a folder of the hub, goes as PATH: leave out {word}. "
        for before, after in itertools.pairwise(words):
            if after == unknown[0] and not after.startswith("-") and before in options and options[before].nargs == 0:
                hint = f"{before} takes no value. "
        self.error(f"unknown argument {unknown[0]!r}: {hint}`{self.prog} --help` lists the options")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuses a value that is none of the choices, and names the closest one."""
        if action.choices is not None and value is not None and value not in action.choices:
            hint, names = did_you_mean(value, action.choices), ", ".join(map(str, action.choices))
            more = _BEYOND.get(action.dest, "")
            raise argparse.ArgumentError(
                action, f"invalid choice: {quoted(value, limit=60)}: {hint}Choose one of {names}{more}"
            )

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        """Lists the choices where the value of an option is missing."""
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            names = f": one of {', '.join(map(str, action.choices))}" if action.choices else ""
            raise argparse.ArgumentError(action, f"{error.message}{names}") from error

    def error(self, message: str) -> NoReturn:
        """Prints the error without the usage, and ends the program."""
        self.exit(2, f"{self.prog}: error: {printable_lines(message)}\n")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=34, width=min(120, shutil.get_terminal_size().columns))


def with_config_file(parse: Callable[[], argparse.Namespace]) -> argparse.Namespace:
    """Parses a command line, and once more with the values of its config file; ends the program on an error."""
    options = parse()
    if getattr(options, "config", None):
        try:  # by its name: it imports NumPy, which the help does not need
            values = pkgutil.resolve_name("zero_jax.cli.config_file:read_file")(options.config)
        except ValueError as error:
            options.parser.error(str(error))
        planned = {name: f"TrainConfig.{name}" for name in option_fields("PlanConfig")}
        values |= {f"PlanConfig.{name}": values[run] for name, run in planned.items() if run in values}
        # As defaults, so that the command line has the last word when it is parsed again.
        options.parser.set_defaults(**values, **{_FROM_FILE: frozenset(values)})
        options = parse()
    return options


def explicit(options: argparse.Namespace) -> frozenset[str]:
    """Returns the destinations of the options on the command line itself, without those of a config file."""
    return getattr(options, _EXPLICIT, frozenset())


def from_file(options: argparse.Namespace) -> frozenset[str]:
    """Returns the destinations of the options that the config file sets."""
    return getattr(options, _FROM_FILE, frozenset())


def refuse(options: argparse.Namespace, names: Collection[str], *, reason: str) -> None:
    """Raises `ValueError` with a reason if the command line has one of these options (names with dashes)."""
    fields = {destination.split(".")[-1] for destination in explicit(options)}
    refused = [name for name in dict.fromkeys(names) if name[2:].replace("-", "_") in fields]
    if refused:
        raise ValueError(f"{' and '.join(refused)}: {reason}")


def command_of(name: str, *, has_bugs: bool) -> Callable[[argparse.Namespace], int]:
    """Returns the command `module:name`, imported when called; a `ValueError` that is no bug becomes status 2."""

    def run(options: argparse.Namespace) -> int:
        try:
            return pkgutil.resolve_name(name)(options)
        except ValueError as error:
            if has_bugs:
                raise
            return options.parser.error(str(error))

    return run


def option_of(field: str) -> str:
    """Returns the option of a config's field."""
    return f"--{field.replace('_', '-')}"


def reader(kind: FieldKind, **limits: Any) -> Callable[[str], Any]:
    """Returns the parser of an option's text, for `add_argument(type=...)`; the limits are those of `check_value`."""

    def parse(text: str) -> Any:
        text = os.path.expanduser(text) if limits.get("place") else text  # not every shell does it after `=`
        try:
            return read_value(text, kind, is_text=True, **limits)
        except ValueError as error:  # whose message argparse shows
            raise argparse.ArgumentTypeError(str(error)) from error

    # argparse names a type by it in its errors.
    parse.__name__ = getattr(kind.base, "__name__", "")
    parse.__dict__["place"] = limits.get("place")
    return parse


def read_value(value: Any, kind: FieldKind, *, is_text: bool = False, **limits: Any) -> Any:
    """Returns the value of a field for one of a config file, or for a text of the command line (`is_text`).

    The word none stands for None where the kind has that; the limits are those of `check_value`.
    """
    if kind.is_optional and str(value).lower() == "none":
        return None
    if value in kind.other_words:
        return value
    base: Any = kind.base
    if kind.is_mapping and isinstance(value, Mapping):
        return {name: None if entry == "none" else entry for name, entry in value.items()}
    check_value(value, **limits)
    if is_text or (base is float and type(value) is int):
        try:
            value = base(value)
        except ValueError as error:
            number = "a whole number, such as 100" if base is int else "a number, such as 0.1 or 1e9"
            wanted = ", or ".join([number, *kind.other_words])
            raise ValueError(f"invalid {base.__name__} value: {quoted(value, limit=60)}: give {wanted}") from error
        check_value(value, **limits)
    if type(value) is not base or (kind.words and value not in kind.words and not is_text):
        text = repr(value)
        of_type = " or ".join([f"a value of type {base.__name__}", *kind.other_words])
        wanted = f"one of {', '.join(kind.words)}" if kind.words else of_type
        raise ValueError(f"{text if len(text) <= 100 else f'{text[:100]}...'}: give {wanted}")
    return value


def is_path(action: argparse.Action) -> bool:
    """Returns whether an option or argument is a path of this machine, by its `reader`."""
    return getattr(action.type, "place", None) is not None


def limits_of(destination: str) -> dict[str, Any]:
    """Returns the limits of `check_value` for an option by its destination."""
    is_wide = destination.rpartition(".")[2] in _FIELDS["wide"]
    place = next((place for place in ("local", "anywhere") if destination in _FIELDS[place]), None)
    return {"place": place, "largest": _LARGEST_INTEGER if is_wide else _LARGEST_COUNT}


def field_values(config: type | str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the values of a config's fields, without those that the command has no option for."""
    class_name = config if isinstance(config, str) else config.__name__
    names = {name: f"{class_name}.{name}" for name in option_fields(class_name)}
    return {name: getattr(options, dest) for name, dest in names.items() if hasattr(options, dest)}


def check_value(
    value: Any, *, place: PathPlace | None = None, lowest: int | None = None, largest: int = _LARGEST_INTEGER
) -> None:
    """Raises `ValueError` for a number not finite or out of range, or an invalid text (a path with a `place`)."""
    if isinstance(value, bool):
        return
    if isinstance(value, int) and abs(value) > largest:
        raise ValueError(f"{quoted(value, limit=60)} is out of range: give an integer of at most {largest}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not finite: give a number")
    if isinstance(value, float) and abs(value) > _LARGEST_NUMBER:
        raise ValueError(f"{value} is out of range: give a number of float32, at most {_LARGEST_NUMBER}")
    if isinstance(value, int | float) and lowest is not None and value < lowest:
        raise ValueError(f"{value}: give at least {lowest}")
    if isinstance(value, str):
        _check_text(value)
        if place is not None:
            _check_path(value, place)


def _check_text(value: str) -> None:
    if "\0" in value:
        raise ValueError(f"{quoted(value, limit=60)} holds a NUL character: leave it out")
    if len(value) > _MAX_CHARACTERS:
        raise ValueError(f"{quoted(value, limit=60)} has {len(value):,} characters: give at most {_MAX_CHARACTERS:,}")
    if not is_unicode(value):
        raise ValueError(f"{value!r} is no valid Unicode: give text in UTF-8")


def _check_path(value: str, place: PathPlace) -> None:
    if not value.strip():
        raise ValueError(f"{value!r} names nothing: give a path")
    scheme, separator, location = value.partition("://")
    if not separator:
        return
    if place == "local":
        raise ValueError(f"{value!r} is a URL: give a path of this machine")
    schemes = " and ".join(f"{name}://" for name in _SCHEMES)
    if scheme not in _SCHEMES:
        raise ValueError(f"{value!r}: the scheme {scheme}:// is unknown: give a folder, or a URL of {schemes}")
    if not location.strip("/"):
        raise ValueError(f"{value!r} names no bucket: give a URL such as {scheme}://bucket/folder")
    packages = _SCHEMES[scheme]
    if not any(map(importlib.util.find_spec, packages)):
        raise ValueError(f"{value!r}: {scheme}:// needs `{pip_install(packages[0])}`, or give a folder")


def print_result(options: argparse.Namespace, result: Any, record: Any = None) -> None:
    """Prints a result, with `--json` its record, or itself, as a JSON object."""
    # `plain` has None for numbers that are not finite: NaN is no JSON.
    shown = json.dumps(plain(result if record is None else record)) if options.json else printable_lines(result)
    print(shown)


def log_line(line: str) -> None:
    """Prints a line of progress to stderr."""
    print(printable_lines(line), file=sys.stderr, flush=True)
