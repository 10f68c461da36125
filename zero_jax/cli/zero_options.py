"""The `ZeroConfig` of the options, with `--paper-config`, which sets several of them by the paper's name."""

from __future__ import annotations

import argparse
import dataclasses

from zero_jax.analysis import PAPER_CONFIGS
from zero_jax.cli.options import explicit, field_values, option_of
from zero_jax.training import ZeroConfig

# The fields that the rows of the paper's Table 3 set; precision keeps its own option.
_PAPER_FIELDS = ("stage", "remat", "combine_bytes")


def read_zero(options: argparse.Namespace, *, default: ZeroConfig) -> ZeroConfig:
    """Returns the config of the options, in which `--paper-config` sets the options that it stands for.

    Raises:
      ValueError: one of these has another value on the command line, or a value is not valid.
    """
    name = options.paper_config
    if name is not None:
        for field in _PAPER_FIELDS:
            destination, value = f"ZeroConfig.{field}", getattr(PAPER_CONFIGS[name], field)
            chosen = getattr(options, destination)
            if destination in explicit(options) and chosen != value:
                raise ValueError(
                    f"--paper-config {name} is {option_of(field)} {value}, not {chosen}: leave out one of the two"
                )
            setattr(options, destination, value)
    return dataclasses.replace(default, **field_values(ZeroConfig, options))
