"""The command line `zero-jax`; its options are the fields of the config dataclasses.

The `cli` modules are the only ones that change process-wide settings, such as the platform and the number of devices.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

import zero_jax
from zero_jax.cli import checkpoint as cli_checkpoint
from zero_jax.cli import completion as cli_completion
from zero_jax.cli import data as cli_data
from zero_jax.cli import deepspeed as cli_deepspeed
from zero_jax.cli import launch as cli_launch
from zero_jax.cli import plan as cli_plan
from zero_jax.cli import train as cli_train
from zero_jax.cli.options import Parser
from zero_jax.core.extras import MissingPackage

_COMMANDS = (cli_train, cli_plan, cli_data, cli_checkpoint, cli_launch, cli_deepspeed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = parse(arguments)
    status = 0
    try:
        status = options.run(options)
        sys.stdout.flush()
    except MissingPackage as error:
        options.parser.error(str(error))
    except BrokenPipeError:  # the reader, such as `head`, ended
        _silence()
        return status or 141
    except OSError as error:
        _silence()
        with contextlib.suppress(OSError):  # a terminal that is gone
            print(f"{options.parser.prog}: error: {error}", file=sys.stderr)
        return status or 1
    return status


def _silence() -> None:
    """Discards what is left in the buffer of stdout, which Python would write again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line and its config file; ends the program with a line on an error."""
    parser = build_parser()
    return cli_train.with_config_file(lambda: parser.parse_args(arguments))


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of `zero-jax` and its commands."""
    parser = Parser(prog="zero-jax", description="ZeRO for JAX: sharded training as PartitionSpec rules.")
    parser.add_argument("--version", action="version", version=f"zero-jax {zero_jax.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        module.add_commands(commands)
    cli_completion.add_commands(commands, build_parser=build_parser)
    return parser
