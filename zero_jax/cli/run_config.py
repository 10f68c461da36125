"""The options of `zero-jax train` as the config of a run, as a config file, and as `--show-config` shows them."""

from __future__ import annotations

import argparse
import dataclasses
import glob
import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any

import jax

import zero_jax
from zero_jax.analysis import PAPER_CONFIGS
from zero_jax.cli.command_options import CONFIG_PARTS, SECTIONS
from zero_jax.cli.config_classes import defaults_of, option_fields
from zero_jax.cli.config_file import write_file
from zero_jax.cli.models.hub import keep_companions, model_section
from zero_jax.cli.options import explicit, field_values, from_file, option_of
from zero_jax.cluster import NUM_PROCESSES, patient_flags
from zero_jax.trainer import Model, Run, TrainConfig
from zero_jax.training import ZeroConfig

# The fields that the rows of the paper's Table 3 set; precision keeps its own option.
_PAPER_FIELDS = ("stage", "remat", "combine_bytes")
_NUM_SIMULATED_DEVICES = 8
_MAX_SIMULATED_DEVICES = 1024
_HOW_LONG = ("steps", "epochs")


def read_config(options: argparse.Namespace) -> TrainConfig:
    """Returns the config of a run by the options of `train`.

    Raises:
      ValueError: invalid values.
    """
    values = field_values(TrainConfig, options)
    given = [name for name in _HOW_LONG if f"TrainConfig.{name}" in explicit(options)]
    if len(given) > 1:
        raise ValueError("--steps and --epochs both say how long: leave out one of them")
    for name in given:  # the command line has the last word over a config file
        values = {key: value for key, value in values.items() if key == name or key not in _HOW_LONG}
    return TrainConfig(**values, **{part: read_part(part, options) for part in CONFIG_PARTS})


def read_part(part: str, options: argparse.Namespace) -> Any:
    """Returns the config of a part of a run."""
    default = getattr(TrainConfig(), part)
    if isinstance(default, ZeroConfig):
        return read_zero(options, default=default)
    return dataclasses.replace(default, **field_values(type(default), options))


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


def set_values(section: str, values: Mapping[str, Any], *, keep: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Returns the values of a section of a config file that are not its defaults, and those named in `keep`."""
    defaults = defaults_of(SECTIONS[section], **({"part": section} if section in CONFIG_PARTS else {}))
    return {name: value for name, value in values.items() if name in keep or value != defaults[name]}


def save_options(run: Run, options: argparse.Namespace) -> None:
    """Writes the options that are set as a config file for the same run."""
    given = explicit(options) | from_file(options)
    sections: dict[str, Any] = {}
    for section, config in SECTIONS.items():
        fields = field_values(config, options)
        kept = frozenset(name for name in fields if f"{config}.{name}" in given)
        sections[section] = set_values(section, fields, keep=kept) if section != "model" else {}
    if isinstance(run.model, Model):
        sections["model"] = model_section(options)
    if sections["lora"]:  # whose weights mean nothing without them
        sections["lora"] = field_values(SECTIONS["lora"], options)
    sections = {section: entries for section, entries in sections.items() if entries}
    title = f"the options of this run that are set, for `zero-jax train --config` (zero_jax {zero_jax.__version__})"
    write_file(run.folder / "config.toml", sections, title=title)
    if options.from_hf is not None:
        keep_companions(options.from_hf, run.folder)


def full_model(options: argparse.Namespace, config: Any) -> dict[str, Any]:
    """Returns the section `model` of a config file, with the full shape of a preset."""
    if options.from_hf is not None:
        return model_section(options)
    shape = dataclasses.asdict(config)
    return {"preset": options.preset} | {name: shape[name] for name in option_fields(type(config).__name__)}


def resolved_sections(config: TrainConfig, model: Model | None, options: argparse.Namespace) -> dict[str, Any]:
    """Returns what a run would use, by the sections of a config file; `model` is None for one of the user's own."""
    zero = dataclasses.replace(config.zero, skip_nonfinite=config.zero.skip_nonfinite is not False)
    optimizer = config.optimizer.resolved(config.steps) if config.epochs is None else config.optimizer
    parts = {**vars(config), "zero": zero, "optimizer": optimizer}
    sections = {name: {x: getattr(parts[name], x) for x in option_fields(SECTIONS[name])} for name in CONFIG_PARTS}
    own = {name: field_values(SECTIONS[name], options) for name in ("activations", "own_model", "lora")}
    if model is None:
        sections = {"own_model": own["own_model"], **sections}
        del sections["data"]
    else:
        adapters = {"lora": own["lora"]} if own["lora"]["lora"] else {}
        sections = {
            "model": full_model(options, model.config),
            "activations": own["activations"],
            **adapters,
            **sections,
        }
    run = {name: getattr(config, name) for name in option_fields("TrainConfig")}
    if config.devices is None and NUM_PROCESSES not in os.environ:
        run["devices"] = len(jax.devices())
    return sections | {
        "run": {name: value for name, value in run.items() if name not in _HOW_LONG or value is not None}
    }


def choose_platform(num_devices: int | None) -> None:
    """Sets the platform before JAX initializes its backends, and the number of simulated devices of a CPU.

    Otherwise JAX looks for a TPU or GPU if libtpu or a GPU plugin is installed, even if only for its compiler.

    Raises:
      ValueError: more devices than a CPU can simulate.
    """
    settings = jax.config.values
    has_tpu = bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))
    has_gpu = bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/dxg"))
    plugins = [plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")]
    other_plugins = [name for name in plugins if "cuda" not in name]
    if not (has_tpu or has_gpu or other_plugins or settings["jax_platforms"]):
        jax.config.update("jax_platforms", "cpu")
    if jax.config.values["jax_platforms"] == "cpu":
        os.environ["XLA_FLAGS"] = patient_flags(os.environ.get("XLA_FLAGS", ""))
    is_set = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not is_set and settings["jax_num_cpu_devices"] < 1:
        if num_devices is not None and not 1 <= num_devices <= _MAX_SIMULATED_DEVICES:
            raise ValueError(
                f"devices={num_devices}: a CPU stands in for 1 to {_MAX_SIMULATED_DEVICES:,}; `zero-jax plan` "
                "compiles for more"
            )
        jax.config.update("jax_num_cpu_devices", num_devices or _NUM_SIMULATED_DEVICES)
