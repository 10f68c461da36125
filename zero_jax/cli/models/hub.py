"""The option `--from-hf`: model, params and tokenizer of a checkpoint of the Hugging Face hub."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import shutil
from typing import Any

from zero_jax.cli.command_options import MAX_SEQ_LEN
from zero_jax.cli.models.presets import shape_changes
from zero_jax.cli.options import explicit, option_of
from zero_jax.core.files.untrusted import user_path
from zero_jax.data import DataConfig, load_tokenizer
from zero_jax.models.decoder_config import DecoderConfig
from zero_jax.pretrained import TOKENIZER, copy_companions, open_hf, read_decoder, run_companions, write_config

# What may differ from the checkpoint's config: the params keep their shapes and their meaning.
_MAY_CHANGE = ("seq_len", "expert_capacity", "expert_balance")


def model_name(options: argparse.Namespace) -> str:
    """Returns the name of the preset, or of the hub's folder."""
    return options.preset if options.from_hf is None else pathlib.Path(options.from_hf).absolute().name


def model_section(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the section `model` of a config file: the preset, or the hub's folder, with the changes by options."""
    if options.from_hf is None:
        return {"preset": options.preset, **shape_changes(options)}
    return {"from_hf": str(user_path(options.from_hf).absolute()), **shape_changes(options)}


def hub_config(options: argparse.Namespace) -> DecoderConfig:
    """Returns the shape of the model in the folder of `--from-hf`.

    Raises:
      ValueError: another model by an option too, options that would change its params, or a folder of no known family.
    """
    if "preset" in explicit(options):
        raise ValueError(
            f"--model {options.preset} and --from-hf {options.from_hf} are two models: leave out one of them"
        )
    changes = shape_changes(options)
    wrong = [name for name in changes if name not in _MAY_CHANGE]
    if wrong:
        names = map(option_of, wrong)
        raise ValueError(f"{' and '.join(names)}: --from-hf takes the model's shape from its config.json: leave it out")
    config = read_decoder(options.from_hf, seq_len=changes.get("seq_len"))
    if "seq_len" not in changes:
        changes["seq_len"] = min(config.seq_len, MAX_SEQ_LEN)
    return dataclasses.replace(config, **changes)


def hub_data(config: DataConfig, folder: str, *, vocab_size: int) -> DataConfig:
    """Returns a data config with the folder's tokenizer, where it has none of its own.

    Raises:
      ValueError: the folder has no tokenizer, or one with tokens that the model does not have.
    """
    path = config.tokenizer
    if path == "auto":
        path = str(user_path(folder) / TOKENIZER)
        if not pathlib.Path(path).is_file():
            raise ValueError(
                f"{folder} has no {TOKENIZER}: give --tokenizer, or save the folder's tokenizer anew with "
                "transformers, which writes that file"
            )
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer {path} makes tokens up to {tokenizer.vocab_size - 1:,}, and the model in {folder} has "
            f"{vocab_size:,}: give the tokenizer that the model was trained with"
        )
    return dataclasses.replace(config, tokenizer=path)


def keep_companions(folder: str, run: pathlib.Path) -> None:
    """Copies tokenizer and config, with the files' dtype, to the folder of a run, for `zero-jax export --to-hf`."""
    target = run_companions(run)
    if target.exists():  # of a run that is resumed
        return
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        source = open_hf(folder)
        partial.mkdir()
        copy_companions(folder, partial)
        write_config(partial, source.hf_config, source.dtypes)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
