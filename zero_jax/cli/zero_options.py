"""The options of `ZeroConfig`, and `--paper-config`, which stands for several of them by the paper's name."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from zero_jax.analysis import PAPER_CONFIGS
from zero_jax.cli.options import add_fields, explicit, field_values, reader
from zero_jax.sharding.quantized import GATHER_FORMATS, GRAD_FORMATS, Quantize
from zero_jax.training import ZeroConfig

# The fields that the rows of the paper's Table 3 set; precision keeps its own option.
_PAPER_FIELDS = ("stage", "remat", "combine_bytes")


def add_zero_options(group: Any, *, default: ZeroConfig) -> None:
    """Adds the options of `ZeroConfig`, and `--paper-config`."""
    add_fields(group, ZeroConfig, default_of=default)
    group.add_argument(
        "--paper-config",
        choices=tuple(PAPER_CONFIGS),
        help="a row of Table 3 of the ZeRO paper: stands for a --stage, a --remat and --combine-bytes",
    )
    group.add_argument(
        "--quantize-gathers", choices=GATHER_FORMATS, help="the format that params are gathered in (default: none)"
    )
    group.add_argument(
        "--quantize-grads", choices=GRAD_FORMATS, help="the format that gradients are sent in (default: none)"
    )
    group.add_argument(
        "--quantize-block-size",
        type=reader(int, is_optional=True, lowest=2),
        metavar="N",
        help="elements of a shard that share a scale of --quantize-gathers and --quantize-grads (default: by leaf)",
    )


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
                option = f"--{field.replace('_', '-')}"
                raise ValueError(f"--paper-config {name} is {option} {value}, not {chosen}: leave out one of the two")
            setattr(options, destination, value)
    return dataclasses.replace(default, **field_values(ZeroConfig, options), quantize=_read_quantize(options, default))


def _read_quantize(options: argparse.Namespace, default: ZeroConfig) -> Quantize | None:
    gathers, grads, block_size = options.quantize_gathers, options.quantize_grads, options.quantize_block_size
    if gathers is None and grads is None:
        if block_size is not None:
            raise ValueError(
                f"--quantize-block-size {block_size} without anything to quantize: give --quantize-gathers or "
                "--quantize-grads too"
            )
        return default.quantize
    return Quantize(gathers=gathers, grads=grads, block_size=block_size)
