"""The command line `zero-jax`: the only importer of `zero_jax.models`, the only place with process-wide settings.

`main` parses the arguments (`options`: the fields of the config dataclasses are the options) and calls one module for
each command: `train`, `plan`, `data`, `checkpoint`, `plot`, `launch`. `model` makes the model that a command is about.
"""

from zero_jax.cli.commands import build_parser, main

__all__ = ["build_parser", "main"]
