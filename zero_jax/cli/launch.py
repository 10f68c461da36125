"""The command `zero-jax launch`: several processes on this machine."""

import argparse
import os
import shutil
import sys
from collections.abc import Collection, Sequence

from zero_jax.cli.models.own import read_own_model
from zero_jax.cli.options import field_values, with_config_file
from zero_jax.cli.run_config import read_config
from zero_jax.cluster import NUM_PROCESSES, LaunchConfig, launch
from zero_jax.core.close_match import did_you_mean

_PYTHONS = ("python", "python3")


def launch_command(options: argparse.Namespace) -> int:
    """Runs `zero-jax launch`."""
    config = LaunchConfig(**field_values(LaunchConfig, options))
    command = command_line(options.command, options.known)
    refused: list[int] = []
    if config.min_processes is not None and options.command[1] == "train":
        refused = _refused_numbers(options.known["train"], options.command[2:], config)
    result = launch(command, config=config, refused=refused)
    if result.status:
        print(f"zero-jax launch: {result}", file=sys.stderr, flush=True)
    return result.status


def _refused_numbers(parser: argparse.ArgumentParser, arguments: Sequence[str], config: LaunchConfig) -> list[int]:
    """Returns numbers of processes that do not divide mesh or batch; raises `ValueError` for a run that begins anew."""
    options = with_config_file(lambda: parser.parse_args(arguments))
    run = read_config(options)
    if run.resume != "auto":
        raise ValueError("--min-processes starts `train` again, which begins anew each time: add `--resume auto` to it")
    own_model = read_own_model(options)

    def divides(num_processes: int) -> bool:
        num_before = (num_processes - 1) * config.devices_per_process
        num_devices = run.devices or num_before + config.devices_per_process
        num_examples = None if own_model else run.batch_size
        shards, remainder = divmod(num_devices, run.model_axis * run.pipe)
        return (
            num_before < num_devices <= num_before + config.devices_per_process  # none without a device
            and not remainder
            and not shards % run.replica
            and (num_examples is None or not num_examples % (shards * run.zero.num_microbatches))
        )

    return [number for number in range(1, config.num_processes) if not divides(number)]


def command_line(words: Sequence[str], known: Collection[str]) -> list[str]:
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
