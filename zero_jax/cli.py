"""The command line `zero-jax`; its options are the fields of the config dataclasses.

This module and `cli_plan` are the only ones that touch process-wide settings: which platform, how many devices.
"""

import argparse
import dataclasses
import functools
import glob
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax

from zero_jax import cli_plan, trainer
from zero_jax.cli_model import add_model_options, preset_model
from zero_jax.models.gpt import GPTConfig
from zero_jax.options import Parser, add_fields, finite, given, read_file

_NUM_SIMULATED_DEVICES = 8
_PARTS = {"data": "text", "optimizer": "optimizer", "zero": "ZeRO"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if getattr(options, "config", None):
        try:
            options.parser.set_defaults(**read_file(options.config, _sections(), extra=("preset",)))
        except ValueError as error:
            options.parser.error(str(error))
        options = parser.parse_args(arguments)
    try:
        status = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of `zero-jax` and its commands."""
    parser = Parser(prog="zero-jax", description="ZeRO for JAX: sharded training as PartitionSpec rules.")
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
    cli_plan.add_commands(commands)
    return parser


def _sections() -> dict[str, type]:
    """Returns the sections of a config file."""
    defaults = trainer.TrainConfig()
    parts = {part: type(getattr(defaults, part)) for part in _PARTS}
    return {"model": GPTConfig, **parts, "run": trainer.TrainConfig}


def _add_train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="take what is not given here from a TOML file, as `zero-jax plan --auto` writes",
    )
    add_model_options(parser.add_argument_group("model"))
    defaults = trainer.TrainConfig()
    for field, title in _PARTS.items():
        part = getattr(defaults, field)
        add_fields(parser.add_argument_group(title), type(part), default_of=part)
    add_fields(parser.add_argument_group("run"), trainer.TrainConfig, default_of=defaults)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, the log to stderr")


def _train(options: argparse.Namespace) -> int:
    log = functools.partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    try:
        config = trainer.TrainConfig(**given(trainer.TrainConfig, options))
        config = dataclasses.replace(config, **{part: _read_part(part, options) for part in _PARTS})
        model = preset_model(options)
        _choose_platform(config.devices)
        run = trainer.prepare(config, model=model)
    except ValueError as error:
        options.parser.error(str(error))
    result = trainer.execute(run, log=log)
    if options.json:
        print(json.dumps(finite(dataclasses.asdict(result))))
    else:
        log(str(result))
    return 0


def _read_part(part: str, options: argparse.Namespace) -> Any:
    default = getattr(trainer.TrainConfig(), part)
    return dataclasses.replace(default, **given(type(default), options))


def _choose_platform(num_devices: int | None) -> None:
    """Settles what JAX runs on before it looks: simulated devices in case of a CPU, and no search for what is absent.

    Where libtpu or a GPU plugin is installed for its compiler alone, JAX would look for a TPU or GPU that is not there.
    """
    settings = jax.config.values
    has_tpu = bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))
    has_gpu = bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/dxg"))
    plugins = [one.name for one in importlib.metadata.entry_points(group="jax_plugins")]
    other_plugins = [name for name in plugins if "cuda" not in name]
    if not (has_tpu or has_gpu or other_plugins or settings["jax_platforms"]):
        jax.config.update("jax_platforms", "cpu")
    is_told = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not is_told and settings["jax_num_cpu_devices"] < 1:
        jax.config.update("jax_num_cpu_devices", num_devices or _NUM_SIMULATED_DEVICES)


if __name__ == "__main__":
    sys.exit(main())
