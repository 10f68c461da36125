"""The options that say what ZeRO does, and the paper's names for some of them."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from zero_jax.analysis import PAPER_CONFIGS
from zero_jax.cli.options import add_fields, explicit, given
from zero_jax.training import ZeroConfig

# What the rows of the paper's Table 3 differ in; precision is left to its own option.
_PAPER_FIELDS = ("stage", "remat", "combine_bytes")


def add_zero_options(group: Any, *, default: ZeroConfig) -> None:
    """Adds an option for each field, and one for several of them by the paper's name."""
    add_fields(group, ZeroConfig, default_of=default)
    group.add_argument(
        "--paper-config",
        choices=tuple(PAPER_CONFIGS),
        help="a row of Table 3 of the ZeRO paper: stands for a --stage, a --remat and --combine-bytes",
    )


def read_zero(options: argparse.Namespace, *, default: ZeroConfig) -> ZeroConfig:
    """Returns what the options say; those that `--paper-config` stands for are set as if they had been given.

    Raises:
      ValueError: one of them was given too, with another value, or a value is not valid.
    """
    name = options.paper_config
    if name is not None:
        for field in _PAPER_FIELDS:
            destination, value = f"ZeroConfig.{field}", getattr(PAPER_CONFIGS[name], field)
            told = getattr(options, destination)
            if destination in explicit(options) and told != value:
                option = f"--{field.replace('_', '-')}"
                raise ValueError(f"--paper-config {name} is {option} {value}, not {told}: leave out one of the two")
            setattr(options, destination, value)
    return dataclasses.replace(default, **given(ZeroConfig, options))
