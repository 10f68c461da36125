"""The options of `zero-jax train` as the config of a run, as a config file, and as `--show-config` shows them."""

import argparse
import dataclasses
import glob
import importlib.metadata
import itertools
import os
import pathlib
from collections.abc import Callable, Collection
from typing import Any

import jax

import zero_jax
from zero_jax.analysis import PAPER_CONFIGS
from zero_jax.cli.command_options import CONFIG_PARTS, SECTIONS
from zero_jax.cli.config_classes import defaults_of, option_fields
from zero_jax.cli.config_file import write_file
from zero_jax.cli.models.presets import ActivationConfig, experts_of, model_section
from zero_jax.cli.options import explicit, field_values, from_file, log_line, option_of
from zero_jax.cluster import NUM_PROCESSES, patient_flags
from zero_jax.core.device_put import simulated_threads
from zero_jax.core.files.partial_folder import partial_folder, publish
from zero_jax.core.files.user_cache import has_mark
from zero_jax.planning import PlanReport
from zero_jax.pretrained import copy_companions, open_hf, run_companions, write_config
from zero_jax.trainer import CONFIG_TITLE, Model, Run, TrainConfig
from zero_jax.training import ZeroConfig
from zero_jax.transforms import resolve_remat

# The fields that the rows of the paper's Table 3 set; precision keeps its own option.
_PAPER_FIELDS = ("stage", "remat", "combine_bytes")
# The fields that a plan decides on, which its config file always has, and what the title of that begins with.
_PLANNED_FIELDS = "stage num_microbatches remat attention overlap secondary keep_gathered offload"
_PLANNED, _PLAN_TITLE = {f"ZeroConfig.{name}" for name in _PLANNED_FIELDS.split()}, "planned for"
_NUM_SIMULATED_DEVICES = 8
_MAX_SIMULATED_DEVICES = 1024
_HOW_LONG = ("steps", "epochs")


def read_config(options: argparse.Namespace) -> TrainConfig:
    """Returns the config of a run by the options of `train`."""
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
    """Returns the config of the options, in which `--paper-config` sets the options that it stands for."""
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
    zero = dataclasses.replace(default, **field_values(ZeroConfig, options))
    return dataclasses.replace(zero, experts=experts_of(options)) if zero.experts == "auto" else zero


def set_sections(options: argparse.Namespace, *, keep: Collection[str]) -> dict[str, dict[str, Any]]:
    """Returns the sections of a config file, without the model's, of options not at their defaults or in `keep`."""
    sections: dict[str, dict[str, Any]] = {}
    for section, config in SECTIONS.items():
        defaults = defaults_of(config)
        for name, value in field_values(config, options).items() if section != "model" else ():
            if f"{config}.{name}" in keep or value != defaults[name]:
                sections.setdefault(section, {})[name] = value
    return sections


def save_options(run: Run, options: argparse.Namespace, *, log: Callable[[str], None]) -> None:
    """Writes the options that are set as a config file for the same run."""
    model = {"model": model_section(options)} if isinstance(run.model, Model) else {}
    sections = {**model, **set_sections(options, keep=explicit(options) | from_file(options))}
    if "lora" in sections:  # whose weights mean nothing without them
        sections["lora"] = field_values(SECTIONS["lora"], options)
    title = f"{CONFIG_TITLE}, for `zero-jax train --config` (zero_jax {zero_jax.__version__})"
    path = run.folder / "config.toml"
    if path.exists() and not has_mark(path, f"# {CONFIG_TITLE}".encode()):  # a file of the user's
        names = (path.with_name(f"config-{i}.toml") for i in itertools.count(1))
        kept = next(name for name in names if not name.exists())
        log(f"{path} is no file that a run wrote: it is {kept.name} now, and config.toml has the options of this run")
        path.rename(kept)
    write_file(path, sections, title=title)
    if options.from_hf is not None:
        _keep_companions(options.from_hf, run.folder)


def _keep_companions(folder: str, run: pathlib.Path) -> None:
    """Copies tokenizer and config, with the files' dtype, to the folder of a run, for `zero-jax export --to-hf`."""
    target = run_companions(run)
    if target.exists():  # of a run that is resumed
        return
    source = open_hf(folder)
    with partial_folder(target) as partial:  # a run that is killed here has all of them or none
        copy_companions(folder, partial)
        write_config(partial, source.hf_config, source.dtypes)
        publish(partial, target)


def check_plan_file(path: pathlib.Path) -> None:
    """Raises `ValueError` for a file that cannot be written, or that would be lost: one that no plan has written."""
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--write-config {path}: there is no such folder, make it first")
    if path.is_symlink():
        # The file appears by a rename, which takes the place of a link, and not of the file that it leads to.
        raise ValueError(f"--write-config {path} is a link, which would be replaced: give the path that it leads to")
    if not path.exists() or has_mark(path, f"# {_PLAN_TITLE}".encode()):
        return
    raise ValueError(
        f"--write-config {path} exists, and `zero-jax plan` did not write it: give another name, or remove it"
    )


def write_plan(
    options: argparse.Namespace,
    report: PlanReport,
    model: Any,
    *,
    zero: ZeroConfig,
    activations: ActivationConfig | None = None,
) -> None:
    """Writes a config for `zero-jax train` of what was planned; `activations` are those of a search."""
    planned = {f"ZeroConfig.{name}": getattr(zero, name) for name in option_fields("ZeroConfig")}
    planned["ZeroConfig.remat"] = resolve_remat(zero.remat).name
    if activations is not None:
        planned |= {f"ActivationConfig.{name}": value for name, value in dataclasses.asdict(activations).items()}
    sizes = {"replica": "replica", "model_axis": "model", "pipe": "pipe"}
    run = {f"TrainConfig.{name}": report.mesh.get(axis, 1) for name, axis in sizes.items()}
    run["TrainConfig.batch_size"] = report.batch_size
    options = argparse.Namespace(**{**vars(options), **planned, **run, "TrainConfig.devices": None})
    sections = set_sections(options, keep=_PLANNED | run.keys())
    sections = {"model": model_section(options, model), **sections}
    write_file(options.write_config, sections, title=f"{_PLAN_TITLE} {report.topology} by zero-jax plan")
    log_line(f"wrote {options.write_config}: zero-jax train --config {options.write_config}")


def resolved_sections(config: TrainConfig, model: Model | None, options: argparse.Namespace) -> dict[str, Any]:
    """Returns what a run would use, by the sections of a config file; `model` is None for one of the user's own."""
    zero = dataclasses.replace(config.zero, skip_nonfinite=config.zero.skip_nonfinite is not False)
    optimizer = config.optimizer.resolved(config.steps) if config.epochs is None else config.optimizer
    devices = config.devices
    # Of several processes none may ask JAX for devices before it has joined the others.
    if devices is None and NUM_PROCESSES not in os.environ:
        devices = len(jax.devices())
    used = {**vars(config), "zero": zero, "optimizer": optimizer, "run": {**vars(config), "devices": devices}}
    left_out = {"data", "model", "activations", "lora"} if model is None else {"own_model"}
    if not getattr(options, "LoraConfig.lora"):
        left_out.add("lora")
    sections: dict[str, Any] = {}
    for section, config_class in SECTIONS.items():
        if section == "model" and model is not None:
            sections[section] = model_section(options, model.config)
        elif section not in left_out:
            values = used.get(section) or field_values(config_class, options)
            values = values if isinstance(values, dict) else vars(values)
            sections[section] = {name: values[name] for name in option_fields(config_class)}
    del sections["run"]["epochs" if config.epochs is None else "steps"]  # only one of them decides
    return sections


def choose_platform(num_devices: int | None) -> None:
    """Sets the platform and the simulated devices before JAX, which else takes any TPU or GPU plugin that is there."""
    settings = jax.config.values
    has_tpu = bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))
    has_gpu = bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/dxg"))
    plugins = [plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")]
    # The plugin of CUDA may be installed where there is no GPU, and JAX would try it.
    other_plugins = [name for name in plugins if "cuda" not in name]
    if not (has_tpu or has_gpu or other_plugins or settings["jax_platforms"]):
        jax.config.update("jax_platforms", "cpu")
    is_set = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not is_set and settings["jax_num_cpu_devices"] < 1:
        if num_devices is not None and not 1 <= num_devices <= _MAX_SIMULATED_DEVICES:
            raise ValueError(
                f"devices={num_devices}: a CPU stands in for 1 to {_MAX_SIMULATED_DEVICES:,}; `zero-jax plan` "
                "compiles for more"
            )
        jax.config.update("jax_num_cpu_devices", num_devices or _NUM_SIMULATED_DEVICES)
    if jax.config.values["jax_platforms"] == "cpu":
        # Simulated devices take turns on few cores, and XLA ends a program whose devices wait for one another for long.
        os.environ["XLA_FLAGS"] = patient_flags(os.environ.get("XLA_FLAGS", ""))
        num_simulated = max(_NUM_SIMULATED_DEVICES, jax.config.values["jax_num_cpu_devices"])
        # Before the devices are made, when XLA:CPU reads it.
        os.environ.setdefault("NPROC", simulated_threads(num_simulated))
