"""The options of every command. Nothing here imports JAX or a config class: `zero-jax train --help` is a second's work.

`set_defaults(run=...)` has the function that runs the command, which is imported when it is called.
"""

from __future__ import annotations

import argparse
from typing import Any

from zero_jax.cli.config_classes import defaults_of, keys_of, option_fields
from zero_jax.cli.options import add_fields, add_json, add_path, imported, limits_of, reader
from zero_jax.core.field_checks import FieldKind

MAX_SEQ_LEN = 4096  # of --from-hf without --seq-len: contexts of 131,072 tokens are common, and do not fit
# Where each shell looks for the script of `zero-jax completion`.
_COMPLETION_PLACES = {
    "bash": "~/.local/share/bash-completion/completions/zero-jax",
    "zsh": "a folder of your $fpath, as _zero-jax",
    "fish": "~/.config/fish/completions/zero-jax.fish",
}
# The parts of `TrainConfig` that are sections of a config file: their classes and the titles of their options.
CONFIG_PARTS = {
    "data": ("DataConfig", "text"),
    "optimizer": ("OptimizerConfig", "optimizer"),
    "zero": ("ZeroConfig", "ZeRO"),
    "checkpoint": ("CheckpointConfig", "checkpoints"),
    "log": ("WriterConfig", "where figures go"),
}
# The config class of each section of a config file.
SECTIONS = {
    "model": "GPTConfig",
    "activations": "ActivationConfig",
    "own_model": "OwnModelConfig",
    "lora": "LoraConfig",
    **{part: config for part, (config, _) in CONFIG_PARTS.items()},
    "run": "TrainConfig",
}


def model_keys() -> dict[str, FieldKind]:
    """Returns the keys of the section `model` of a config file, by destination, that are no field of a GPT."""
    kinds = {"preset": FieldKind(types=(str,)), "from_hf": FieldKind(types=(str,), is_optional=True)}
    for name, field in option_fields("DecoderConfig").items():
        if name not in option_fields("GPTConfig"):
            kinds[f"DecoderConfig.{name}"] = field.kind
    return kinds


def _read_config_file(path: str) -> dict[str, Any]:
    from zero_jax.cli.config_file import read_file  # with NumPy, which the help does not need

    return read_file(path, SECTIONS, extra=model_keys())


def add_train_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zero-jax train`."""
    parser.description = (
        "Trains a transformer on text, by default a small GPT on the source code of Python's standard library, at ZeRO "
        "stage 3 on all devices there are (on a CPU: 8 simulated ones); or with --loss, --init and --batches any "
        "model. Leaves checkpoints, a picture of the loss, its figures and the config in a folder of its own. Exit "
        "status: 0 done, 2 bad usage, 3 stopped because the loss stayed not finite, 75 saved and stopped by a signal, "
        "76 hung."
    )
    add_path(parser, "--config", help="take what is not given here from a TOML file, as `zero-jax plan --auto` writes")
    _add_model(parser)
    add_fields(parser.add_argument_group("a model of your own"), "OwnModelConfig")
    add_fields(parser.add_argument_group("adapters"), "LoraConfig")
    for part, (config, title) in CONFIG_PARTS.items():
        _add_part(parser.add_argument_group(title), config, part)
    add_fields(parser.add_argument_group("run"), "TrainConfig")
    parser.add_argument(
        "--show-config",
        action="store_true",
        help="print what would be used, defaults included, as a config file; run nothing",
    )
    add_json(parser)
    parser.set_defaults(run=imported("zero_jax.cli.train:train"), read_config_file=_read_config_file)


def _add_part(group: Any, config: str, part: str, *, without: tuple[str, ...] = ()) -> None:
    """Adds the options of a part of `TrainConfig`, with its defaults there."""
    add_fields(group, config, defaults=defaults_of(config, part=part), without=without)
    if config == "ZeroConfig":
        group.add_argument(
            "--paper-config",
            choices=tuple(keys_of("analysis.paper", "CONFIGS")),
            help="a row of Table 3 of the ZeRO paper: stands for a --stage, a --remat and --combine-bytes",
        )


def _add_model(parser: argparse.ArgumentParser) -> Any:
    """Adds the options that choose a preset and change its shape; returns their group."""
    group = parser.add_argument_group("model")
    presets = (*keys_of("models.gpt", "PRESETS"), *keys_of("models.decoder_config", "DECODERS"))
    group.add_argument(
        "--model", dest="preset", choices=presets, default="gpt-tiny", metavar="PRESET",
        help=f"one of {', '.join(presets)} (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--from-hf", type=reader(str, is_optional=True, place="local"), metavar="FOLDER",
        help="a checkpoint of the Hugging Face hub, with config.json and *.safetensors: model, params and tokenizer "
        f"are taken from there, and --seq-len is {MAX_SEQ_LEN:,} at most by default",
    )  # fmt: skip
    add_fields(group, "ActivationConfig")
    gpt_fields, decoder_fields = option_fields("GPTConfig").keys(), option_fields("DecoderConfig").keys()
    add_fields(group, "GPTConfig", defaults=None, without=gpt_fields - decoder_fields)
    add_fields(parser.add_argument_group("model: GPTs alone"), "GPTConfig", defaults=None, without=decoder_fields)
    title = "model: decoders alone (all presets but gpt-*)"
    add_fields(parser.add_argument_group(title), "DecoderConfig", defaults=None, without=gpt_fields)
    return group


def add_plot_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zero-jax plot`."""
    parser.description = (
        "Draws a figure of one or several runs, finished or not, from the metrics.jsonl in their folders: each "
        "training step pale, the mean over some steps, and evaluations as dots."
    )
    add_path(parser, "runs", nargs="+", metavar="RUN", help="folder of a run")
    add_path(parser, "--out", default="curves.png", help="the picture: .png, .svg or .pdf (default: curves.png)")
    parser.add_argument(
        "--metric", type=reader(str), default="loss", metavar="NAME",
        help="name of a figure in the records, such as grad_norm, learning_rate or mfu (default: loss)",
    )  # fmt: skip
    axes = tuple(keys_of("trainer.reporting.curves", "X_LABELS"))
    parser.add_argument("--x", choices=axes, default="step", help="what it is drawn against (default: step)")
    parser.add_argument("--title", type=reader(str), default="", metavar="TEXT", help="what stands above the picture")
    parser.set_defaults(run=imported("zero_jax.cli.train:plot"))


def add_sample_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zero-jax sample`."""
    parser.description = "Prints text that a trained model generates after a prompt, its adapters merged."
    _add_model_path(parser, "SampleConfig")
    add_path(parser, "--tokenizer", help="the tokenizer's file, or bytes (default: that of the run)")
    parser.set_defaults(run=imported("zero_jax.cli.look:sample"))


def add_evaluate_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zero-jax evaluate`."""
    parser.description = (
        "Prints the loss and the perplexity of a trained model, its adapters merged, on all documents of --data, or by "
        "default on what the run validates on."
    )
    _add_model_path(parser, "EvaluateConfig")
    without = ("validation_fraction", "prefetch_batches")
    add_fields(
        parser.add_argument_group("text"), "DataConfig", defaults=None, default_text="the run's", without=without
    )
    parser.set_defaults(run=imported("zero_jax.cli.look:evaluate"))


def _add_model_path(parser: argparse.ArgumentParser, config: str) -> None:
    text = "a run's folder, its checkpoints, one of them, or a folder of the Hugging Face hub"
    add_path(parser, "path", metavar="PATH", help=text)
    add_fields(parser, config)
    add_json(parser)
    parser.set_defaults(config_name=config)


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zero-jax plan`."""
    _add_planning(
        parser, "plan", "reports whether it fits, what a device stores and sends, and how long a step may take."
    )
    auto = parser.add_argument_group("search")
    auto.add_argument(
        "--auto", action="store_true",
        help="choose stage, replica, secondary shard, model axis, microbatches, remat, attention, overlap and batch "
        "size, except those set by options; offload, where nothing fits without; whether to quantize in given formats",
    )  # fmt: skip
    auto.add_argument(
        "--max-compiles", type=reader(int, lowest=0), default=4, metavar="N", help="settings to compile (default: 4)"
    )
    auto.add_argument(
        "--host-memory-bytes", type=reader(int, lowest=1, **limits_of("host_memory_bytes")), metavar="N",
        help="memory of a host for each of its devices (default: what is known of such hosts)",
    )  # fmt: skip
    auto.add_argument("--layouts", action="store_true", help="compile several layouts of `data` over the hardware")
    parser.add_argument(
        "--verify", action="store_true",
        help="also compile a small model of this form for a few of these devices, run that program on this machine, "
        "and compare its numbers with one device",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=reader(float, lowest=1), metavar="N",
        help="also show the days and device-hours of training on so many tokens, such as 100e9",
    )  # fmt: skip
    add_path(auto, "--write-config", help="write the result as a config for `zero-jax train --config`")


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zero-jax memory`."""
    _add_planning(parser, "memory", "shows the memory of a device by group, beside what the paper's formulas give.")
    parser.add_argument("--paper", action="store_true", help="reprint the paper's tables from its formulas, and end")
    parser.add_argument("--estimate", action="store_true", help="by formula only: compile nothing")
    add_path(parser, "--plot", help="draw stages 0 to 3, by formula and measured (.png, .svg, .pdf)")


def add_comms_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zero-jax comms`."""
    _add_planning(parser, "comms", "lists what a device sends, by mesh axis, phase and param, beside the ideal.")
    parser.add_argument("--estimate", action="store_true", help="by formula only: compile nothing")


def _add_planning(parser: argparse.ArgumentParser, command: str, does: str) -> None:
    """Adds the options that `plan`, `memory` and `comms` have."""
    compiles = "Compiles the real train step with the hardware's own compiler, which needs no such hardware, and "
    parser.description = compiles + does
    add_fields(parser.add_argument_group("hardware"), "PlanConfig")
    group, where = _add_model(parser), "as module:function, or path/to/file.py:function"
    texts = {
        "--loss": f"your own loss function, {where}; it stands for --model",
        "--init": f"the function that makes its params from a key, {where}",
        "--batches": "its batches, as for `zero-jax train`; the first one is read",
        "--batch": "instead, a function that returns one batch (arrays or ShapeDtypeStructs) of any number of examples",
        "--param-specs": "how its params are sharded over the axis `model`: a tree of PartitionSpecs, a dict from "
        "regular expressions of leaf paths to PartitionSpecs, or a function of the params' shapes, or of nothing, that "
        "returns one of them",
    }
    for option, text in texts.items():
        group.add_argument(option, type=reader(str), metavar="REF", help=text)
    _add_part(parser.add_argument_group("ZeRO"), "ZeroConfig", "zero")
    _add_part(parser.add_argument_group("optimizer"), "OptimizerConfig", "optimizer", without=("warmup_steps",))
    add_json(parser)
    parser.set_defaults(run=imported(f"zero_jax.cli.plan.commands:run_{command}"))


def add_tokenize_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zero-jax tokenize`."""
    parser.description = (
        "Trains a byte-level BPE on text (--vocab-size), writes text as a folder of tokens that `zero-jax train "
        "--data` maps (--tokens), or both."
    )
    without = ("validation_fraction", "prefetch_batches", "token_cache", "separate_documents")
    add_fields(parser.add_argument_group("text"), "DataConfig", without=without)
    group = parser.add_argument_group("what to make")
    group.add_argument(
        "--vocab-size", type=reader(int, lowest=1), metavar="N", help="train a tokenizer of N tokens on the text"
    )
    add_path(group, "--out", help="where the tokenizer goes (default: tokenizer.json)")
    add_path(group, "--tokens", metavar="FOLDER", help="write the tokens there; there must be no such folder yet")
    add_json(parser)
    parser.set_defaults(run=imported("zero_jax.cli.data:tokenize"))


def add_inspect_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zero-jax inspect`."""
    parser.description = (
        "Prints the leaves of a checkpoint with shapes and dtypes, its step, and the config and position in the data "
        "of the run that saved it."
    )
    _add_checkpoint(parser)
    add_fields(parser, "InspectConfig")
    parser.set_defaults(run=imported("zero_jax.cli.checkpoint:inspect"))


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zero-jax export`."""
    parser.description = (
        "Writes the params of a checkpoint as safetensors files with an index, leaf by leaf, in bounded memory."
    )
    _add_checkpoint(parser)
    target = parser.add_mutually_exclusive_group(required=True)
    add_path(target, "--out", metavar="FOLDER", help="folder to write into")
    add_path(
        target, "--to-hf", metavar="FOLDER",
        help="folder to make as the Hugging Face hub has them, for transformers: decoders alone, in the names of their "
        "family, with config.json and the tokenizer of --from-hf, and by default in its dtype",
    )  # fmt: skip
    add_fields(parser, "ExportConfig")
    parser.set_defaults(run=imported("zero_jax.cli.checkpoint:export_params"))


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    text = "a run's folder, its checkpoints, or the folder of one step"
    parser.add_argument("path", type=reader(str, place="anywhere"), metavar="PATH", help=text)
    add_json(parser)


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zero-jax launch`."""
    parser.description = (
        "Runs a command of zero-jax, such as `train`, or any program, such as `python my_script.py`, as several "
        "processes on this machine that work together, each with simulated CPU devices. Where one fails, all end, and "
        "with --min-processes the command is started again with those that are left. The exit status is that of the "
        "process that failed first."
    )
    group, num_processes = parser.add_argument_group("processes"), defaults_of("LaunchConfig")["num_processes"]
    group.add_argument(
        "-n", "--num-processes", type=reader(int), metavar="N", default=num_processes,
        dest="LaunchConfig.num_processes", help=f"processes to start on this machine (default: {num_processes})",
    )  # fmt: skip
    add_fields(group, "LaunchConfig", without=("num_processes",))
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run, after `--`")
    parser.set_defaults(run=imported("zero_jax.cli.launch:launch_command"))


def add_from_deepspeed_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zero-jax from-deepspeed`."""
    parser.description = (
        "Prints the config file that `zero-jax train --config` takes for a DeepSpeed config, and key by key what was "
        "translated, what was not and why. Exit status: 0 done, 1 the file has unknown keys, and nothing is written, 2 "
        "it cannot be read."
    )
    add_path(parser, "path", metavar="DS_CONFIG", help="the JSON file, such as ds_config.json")
    add_path(parser, "--out", help="write the config file there, and print the list")
    parser.add_argument("--force", action="store_true", help="write over an existing file")
    parser.add_argument(
        "--devices", type=reader(int, lowest=1), metavar="N",
        help="number of devices that the DeepSpeed config is for, from which it infers its batch size",
    )  # fmt: skip
    parser.add_argument(
        "--per-device-batch-size", type=reader(int, lowest=1), metavar="N",
        help="the Hugging Face Trainer's per_device_train_batch_size, where batch sizes are auto",
    )  # fmt: skip
    add_json(parser)
    parser.set_defaults(run=imported("zero_jax.cli.deepspeed.command:from_deepspeed"))


def add_help_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `zero-jax help`."""
    parser.description = "Shows the usual options of a command with examples, or with `all` every option."
    parser.add_argument(
        "topic", nargs="?", choices=(*parser.get_default("known"), "all"), metavar="COMMAND", help="a command"
    )
    parser.add_argument("all", nargs="?", choices=("all",), metavar="all", help="every option")
    parser.set_defaults(run=imported("zero_jax.cli.commands:show"))


def add_completion_options(parser: argparse.ArgumentParser) -> None:
    """Adds the argument of `zero-jax completion`."""
    places = "; ".join(f"{shell}: {place}" for shell, place in _COMPLETION_PLACES.items())
    parser.description = f"Prints the script with which a shell completes zero-jax. Save it where it looks ({places})."
    shells = tuple(_COMPLETION_PLACES)
    parser.add_argument("shell", choices=shells, metavar="SHELL", help=f"one of {', '.join(shells)}")
    parser.set_defaults(run=imported("zero_jax.cli.commands:complete"))
