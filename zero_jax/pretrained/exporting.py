"""Writes a checkpoint of a run as a folder of the hub, without devices."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from zero_jax.checkpoint import open_params
from zero_jax.core.tree import PyTree, leaves_by_name
from zero_jax.models.decoder_config import DecoderConfig, RopeScaling
from zero_jax.models.huggingface import decoder_config, hf_config, tensor_names
from zero_jax.pretrained.folder import CONFIG, copy_companions, read_config, run_companions
from zero_jax.pretrained.saving import MAX_FILE_BYTES, SavedHF, save_arrays, write_config, write_folder


def export_hf(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    ema: bool = False,
    params: PyTree | None = None,
) -> SavedHF:
    """Writes the params of a checkpoint of a decoder as a folder of the hub, in slices of bounded size.

    Args:
      path: a run's folder, its folder of checkpoints, or the folder of one step.
      out: the folder to make; it must not exist, or be empty.
      step: the step; None takes the newest.
      dtype: floating dtype of the files; None takes that of the config that the run began with, or as was saved.
      max_file_bytes: bytes of tensors in a file; a larger tensor has a file of its own.
      ema: take the params' moving average instead of the params.
      params: write these instead, such as those with adapters merged into them.

    Raises:
      CheckpointError: no checkpoint, or a damaged one.
      ValueError: a model that is no decoder, a folder with something in it, no space.
    """
    saved = open_params(path, step=step, ema=ema)
    config = _decoder(saved.model)
    source = _source(pathlib.Path(path))
    found = read_config(source) if source else hf_config(config)
    if source and decoder_config(found, seq_len=config.seq_len).shapes != config.shapes:
        raise ValueError(f"{source / CONFIG} is of another model than the checkpoint: remove it, or give its own run")
    names = tensor_names(config, model_type=found["model_type"])
    dtype = dtype or found.get("dtype") or found.get("torch_dtype")

    def add(target: pathlib.Path, written: Mapping[str, str]) -> None:
        if source:
            copy_companions(source, target)
        write_config(target, found, written)

    how: dict[str, Any] = {"dtype": dtype, "dtypes": {}, "max_file_bytes": max_file_bytes, "add": add}
    if params is not None:
        return save_arrays(out, leaves_by_name(params), names, **how)
    _check_no_adapters(saved.leaves, names)
    pieces = {name: lambda name=name: saved.pieces(name) for name in saved.leaves}
    return write_folder(out, saved.leaves, names, pieces, **how)


def _check_no_adapters(leaves: Collection[str], names: Collection[str]) -> None:
    """Raises `ValueError` for the factors of adapters in the place of params."""
    factors = sorted(name for name in leaves if name not in names and name.rpartition("/")[0] in names)
    if factors:
        raise ValueError(f"the checkpoint has adapters ({factors[0]}): merge them into the params with --merged")


def _decoder(model: Any) -> DecoderConfig:
    """Returns the shape of the decoder that a run recorded."""
    fields = {field.name for field in dataclasses.fields(DecoderConfig)}
    if not isinstance(model, Mapping) or not fields <= model.keys():
        name = model.get("name") if isinstance(model, Mapping) else None
        raise ValueError(
            f"the checkpoint is of the model {name!r}, which is no decoder of the hub's families: export it as plain "
            "safetensors, with --out"
        )
    shape = {name: model[name] for name in fields}
    try:
        scaling = None if shape["rope_scaling"] is None else RopeScaling(**shape["rope_scaling"])
        return DecoderConfig(**{**shape, "rope_scaling": scaling})
    except TypeError as error:
        raise ValueError(f"the checkpoint's model cannot be read ({error})") from error


def _source(path: pathlib.Path) -> pathlib.Path | None:
    """Returns the folder with the config that a run began with, or None where it began without one."""
    absolute = path.expanduser().absolute()
    folders = [run_companions(folder) for folder in (absolute, *absolute.parents[:2])]
    return next((folder for folder in folders if (folder / CONFIG).is_file()), None)
