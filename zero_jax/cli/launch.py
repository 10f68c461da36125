"""The command `zero-jax launch`: several processes on this machine."""

import argparse
import os
import shutil
import sys
from collections.abc import Collection

from zero_jax.cli.options import field_values, with_config_file
from zero_jax.cli.run_config import read_config
from zero_jax.cluster import NUM_PROCESSES, LaunchConfig, launch
from zero_jax.core.close_match import did_you_mean
from zero_jax.core.output import unstalled

_PYTHONS = ("python", "python3")


def launch_command(options: argparse.Namespace) -> int:
    """Runs `zero-jax launch`."""
    config = LaunchConfig(**field_values(LaunchConfig, options))
    command = command_line(options.command, options.known)
    if config.min_processes is not None and options.command[1] == "train":
        train = options.known["train"]
        # As the processes will read it, config file included.
        if read_config(with_config_file(lambda: train.parse_args(options.command[2:]))).resume != "auto":
            raise ValueError(
                "--min-processes starts `train` again, which begins anew each time: add `--resume auto` to it"
            )
    result = launch(command, config=config)
    if result.status:
        print(f"zero-jax launch: {result}", file=unstalled(sys.stderr), flush=True)
    return result.status


def command_line(words: list[str], known: Collection[str]) -> list[str]:
    """Returns the program to start and its arguments, from the words after the options of `launch`."""
    if not words or words[0] != "--":
        before = f"before {words[0]!r}" if words else "and a command, such as `-- train`"
        raise ValueError(f"what to run follows after `--`: write `--` {before}")
    name, *arguments = words[1:] or [""]
    if name == "launch" or NUM_PROCESSES in os.environ:
        raise ValueError("a launched process cannot launch: give the command itself, such as `-- train`")
    if name in known:
        return [sys.executable, "-m", "zero_jax", name, *arguments]
    if name in _PYTHONS:
        return [sys.executable, *arguments]  # the one that has zero_jax
    program = shutil.which(name)
    if program is None:
        hint = did_you_mean(name, [*known, *_PYTHONS])
        commands = ", ".join(sorted(set(known) - {"launch"}))
        raise ValueError(f"{name!r} is no command of zero-jax and no program: {hint}Commands are {commands}")
    return [program, *arguments]
