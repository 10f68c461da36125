"""The command line `zero-jax`: the only place with process-wide settings.

`main` parses the arguments and runs a command, which has its own module: `train`, `plan` (with `memory` and `comms`),
`data`, `checkpoint`, `launch`, `completion`, `deepspeed/`. `options` makes the options from the fields of the config
dataclasses, `config_file` reads the same fields from TOML, `models/` makes the model of a command.
"""

from zero_jax.cli.commands import build_parser, main

__all__ = ["build_parser", "main"]
