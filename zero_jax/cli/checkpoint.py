"""The commands `zero-jax inspect` (describes a checkpoint, or a model) and `export` (writes params as safetensors)."""

import argparse
import pathlib

import jax

from zero_jax.checkpoint import describe, export, parse_size
from zero_jax.cli.models.adapters import export_adapters, merged_params
from zero_jax.cli.models.leaves import model_leaves
from zero_jax.cli.options import print_result, refuse, with_config_file
from zero_jax.core.files.untrusted import user_path
from zero_jax.core.tree import leaf_names
from zero_jax.pretrained import TensorName, export_hf, run_companions, save_tensors

_CONFIG = "config.toml"
_MERGED_DTYPES = ("float32", "float16", "bfloat16")


def inspect(options: argparse.Namespace) -> int:
    """Runs `zero-jax inspect`."""
    if (options.path is None) == (options.preset is None and options.from_hf is None):
        raise ValueError("give the PATH of a checkpoint, or a model by --model or --from-hf: one of them")
    if options.path is None:
        if options.step is not None or options.verify:
            raise ValueError("--step and --verify are of a checkpoint: leave them out")
        print_result(options, model_leaves(options))
        return 0
    description = describe(options.path, step=options.step, verify_leaves=options.verify)
    print_result(options, description)
    return 1 if description.problems else 0


def export_params(options: argparse.Namespace) -> int:
    """Runs `zero-jax export`."""
    if options.merged:
        refuse(options, ("--ema",), reason="--merged takes the params themselves: leave it out")
        refuse(options, ("--force",), reason="--merged writes over nothing: give a new folder")
        if options.dtype not in (None, *_MERGED_DTYPES):
            names = ", ".join(_MERGED_DTYPES)
            raise ValueError(f"--dtype {options.dtype}: with --merged give one of {names}, or leave it out")
    elif options.to_hf is not None or options.to_peft is not None:
        refuse(options, ("--force", "--no-force"), reason="this writes over nothing: give a new folder")
    settings = {"step": options.step, "dtype": options.dtype, "ema": options.ema}
    if options.to_peft is not None:
        refuse(options, ("--merged", "--no-merged", "--max-shard-size"), reason="--to-peft writes the adapters alone")
        print_result(options, export_adapters(options.path, options.to_peft, settings, _run_options(options)))
        return 0
    limit, params = parse_size(options.max_shard_size), None
    if options.merged:
        params = merged_params(options.path, step=options.step, dtype=options.dtype, options=_run_options(options))
    if options.to_hf is not None:
        result = export_hf(options.path, options.to_hf, **settings, max_file_bytes=limit, params=params)
    elif params is None:
        result = export(options.path, options.out, **settings, max_shard_bytes=limit, force=options.force)
    else:
        tensors = {name: TensorName(name.replace("/", ".")) for name in leaf_names(params)}
        result = save_tensors(options.out, params, tensors, dtype=options.dtype, max_file_bytes=limit)
    print_result(options, result)
    return 0


def _run_options(options: argparse.Namespace) -> argparse.Namespace:
    """Returns the options of a run with adapters, from its config file."""
    file = find_run_config(options.path)
    if file is None:
        raise ValueError(f"{options.path} has no {_CONFIG} with the options of --lora: give the folder of a run")
    run = read_run_options(file, options.known["train"])
    jax.config.update("jax_platforms", "cpu")
    return run


def find_run_config(path: str) -> pathlib.Path | None:
    """Returns the config file of the run that a path is of: its folder, its checkpoints, or one of them."""
    folder = user_path(path).absolute()
    return next((x / _CONFIG for x in (folder, *folder.parents[:2]) if (x / _CONFIG).is_file()), None)


def read_run_options(file: pathlib.Path, train: argparse.ArgumentParser, *more: str) -> argparse.Namespace:
    """Returns the options of a run by its config file, and `more` words of a command line, by the parser of `train`."""
    run = with_config_file(lambda: train.parse_args(["--config", str(file), *more]))
    if run.from_hf is not None and run_companions(file.parent).is_dir():
        run.from_hf = str(run_companions(file.parent))  # where it came from may be gone
    return run
