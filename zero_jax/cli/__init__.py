"""The command line `zero-jax`: the only place with process-wide settings.

`main` parses the arguments and runs a command: `train` (with `plot`), `plan` (with `memory` and `comms`), `data`,
`runs` (`inspect`, `export`, `sample`, `evaluate`), `launch`, `deepspeed/`; `models/` makes the model of a command, and
`run_config` the config of a run.
`commands.toml` has the texts and the options of all commands: `help` reads it, and `command_options` adds the options,
most of them made by `options` from the fields of the config dataclasses, which `config_classes` reads from their
source: neither JAX nor a config class is imported for `--help` and completion. `config_file` reads the same fields from
TOML.
"""

from zero_jax.cli.commands import build_parser, main

__all__ = ["build_parser", "main"]
