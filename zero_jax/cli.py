"""The command line `zero-jax`; its options are the fields of the config dataclasses.

This is the only module that touches process-wide settings (which platform, how many simulated devices), and the only
one that imports the reference models.
"""

import argparse
import dataclasses
import difflib
import functools
import glob
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import shutil
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax

from zero_jax import trainer
from zero_jax.models import gpt

_NUM_SIMULATED_DEVICES = 8

# Fields that the command line does not offer: what is no number or word, what the shipped models have no use for, and
# the roles of mesh axes, which `trainer` names itself.
_NOT_OPTIONS = frozenset({"zero", "data_axes", "replica_axes", "param_specs", "overrides", "loss_weight"})
_PARTS = {"data": "text", "optimizer": "optimizer", "zero": "ZeRO"}


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors name the nearest valid option, and that takes no abbreviations."""

    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown options here, where the command's own options are known."""
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            options = [name for action in self._actions for name in action.option_strings]
            near = difflib.get_close_matches(rest[0].split("=")[0], options, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            self.error(f"unknown argument {rest[0]!r}: {hint}`{self.prog} --help` lists the options")
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        """Prints the error alone, without the long list of options, and ends the program."""
        self.exit(2, f"{self.prog}: error: {message}\n")


class _HelpFormatter(argparse.HelpFormatter):
    """Gives the options' names room."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=34, width=min(120, shutil.get_terminal_size().columns))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    return options.run(options, parser)


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of `zero-jax` and its commands."""
    parser = _Parser(prog="zero-jax", description="ZeRO for JAX: sharded training as PartitionSpec rules.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    train = commands.add_parser(
        "train",
        usage="zero-jax train [OPTION ...]",
        help="train a transformer on text",
        description="Trains a GPT on text, by default a small one on the source code of Python's standard library, at "
        "ZeRO stage 3 on all devices there are (on a CPU: 8 simulated ones). Leaves a picture of the loss, a log and "
        "the config in a folder of its own.",
    )
    _add_train_options(train)
    train.set_defaults(run=_train, parser=train)
    return parser


def _add_train_options(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", default="gpt-tiny", metavar="PRESET", help=f"one of {', '.join(gpt.PRESETS)} (default: %(default)s)"
    )
    _add_fields(model, gpt.GPTConfig, default_of=None)
    defaults = trainer.TrainConfig()
    for field, title in _PARTS.items():
        part = getattr(defaults, field)
        _add_fields(parser.add_argument_group(title), type(part), default_of=part)
    _add_fields(parser.add_argument_group("run"), trainer.TrainConfig, default_of=defaults)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, the log to stderr")


def _add_fields(group: Any, config_class: type, *, default_of: Any) -> None:
    """Adds an option for each field that is a number, a word or a switch; without `default_of`, None is not given."""
    for name, kind in _option_fields(config_class).items():
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
            parse = functools.partial(_parse_optional, kind.base) if kind.is_optional else kind.base
            group.add_argument(option, type=parse, metavar=_METAVARS[kind.base], **settings)


_METAVARS: Mapping[type, str] = {int: "N", float: "X", str: "TEXT"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kind:
    """The type of an option: a base type, whether None is a value, and the words it is limited to."""

    base: type
    is_optional: bool
    choices: tuple[str, ...] = ()


def _option_fields(config_class: type) -> dict[str, _Kind]:
    """Returns the fields of a config that the command line offers."""
    hints = typing.get_type_hints(config_class)
    kinds = {
        field.name: _kind(hints[field.name])
        for field in dataclasses.fields(config_class)
        if field.name not in _NOT_OPTIONS and not (config_class is trainer.TrainConfig and field.name in _PARTS)
    }
    return {name: kind for name, kind in kinds.items() if kind}


def _kind(hint: Any) -> _Kind | None:
    if typing.get_origin(hint) is typing.Literal:
        return _Kind(base=str, is_optional=False, choices=typing.get_args(hint))
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = typing.get_args(hint) if is_union else (hint,)
    simple = [member for member in members if member in (bool, int, float, str)]
    return _Kind(base=simple[0], is_optional=type(None) in members) if simple else None


def _parse_optional(base: type, text: str) -> Any:
    return None if text.lower() == "none" else base(text)


@functools.cache
def _field_help(config_class: type) -> dict[str, str]:
    """Reads what the `Attributes:` section of a config's docstring says of each field."""
    section = inspect.cleandoc(config_class.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.split(r"^  (\w+): ", section, flags=re.MULTILINE)[1:]
    told = {name: " ".join(text.split()).rstrip(".") for name, text in zip(entries[::2], entries[1::2], strict=True)}
    return {field.name: told.get(field.name, "") for field in dataclasses.fields(config_class)}


def _train(options: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    log = functools.partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    try:
        config = _read(trainer.TrainConfig, options)
        config = dataclasses.replace(config, **{part: _read_part(part, options) for part in _PARTS})
        model = _model(options)
        _choose_platform(config.devices)
        run = trainer.prepare(config, model=model)
    except ValueError as error:
        options.parser.error(str(error))
    result = trainer.execute(run, log=log)
    if options.json:
        print(json.dumps(_finite(dataclasses.asdict(result))))
    else:
        log(str(result))
    return 0


def _read_part(part: str, options: argparse.Namespace) -> Any:
    default = getattr(trainer.TrainConfig(), part)
    return dataclasses.replace(default, **_given(type(default), options))


def _read(config_class: type, options: argparse.Namespace) -> Any:
    return config_class(**_given(config_class, options))


def _given(config_class: type, options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, f"{config_class.__name__}.{name}") for name in _option_fields(config_class)}


def _model(options: argparse.Namespace) -> trainer.Model:
    if options.model not in gpt.PRESETS:
        near = difflib.get_close_matches(options.model, gpt.PRESETS, n=1, cutoff=0)[0]
        raise ValueError(
            f"unknown model {options.model!r}: did you mean {near!r}? Choose one of {', '.join(gpt.PRESETS)}"
        )
    changes = {name: value for name, value in _given(gpt.GPTConfig, options).items() if value is not None}
    config = dataclasses.replace(gpt.PRESETS[options.model], **changes)
    return trainer.Model(
        name=options.model,
        config=config,
        vocab_size=config.vocab_size,
        seq_len=config.seq_len,
        init_fn=functools.partial(gpt.init, config),
        loss_fn=gpt.loss_fn(config),
        generate_fn=functools.partial(gpt.generate, config),
    )


def _choose_platform(num_devices: int | None) -> None:
    """Settles what JAX runs on before it looks: simulated devices in case it is a CPU, and no search for an absent TPU.

    Where libtpu is installed for its compiler alone, JAX would ask around the network for a TPU that is not there.
    """
    settings = jax.config.values
    has_tpu = bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))
    has_plugins = bool(importlib.metadata.entry_points(group="jax_plugins"))
    if importlib.util.find_spec("libtpu") and not (has_tpu or has_plugins or settings["jax_platforms"]):
        jax.config.update("jax_platforms", "cpu")
    is_told = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not is_told and settings["jax_num_cpu_devices"] < 1:
        jax.config.update("jax_num_cpu_devices", num_devices or _NUM_SIMULATED_DEVICES)


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """Replaces what JSON has no number for by null."""
    return {
        name: None if isinstance(value, float) and not abs(value) < float("inf") else value
        for name, value in record.items()
    }


if __name__ == "__main__":
    sys.exit(main())
