"""A checkpoint folder of the hub: its config, and the tensors of its files, checked before they are read."""

from __future__ import annotations

import os
import pathlib
import shutil
import warnings
from typing import Any

from zero_jax.core.close_match import did_you_mean
from zero_jax.core.files.safetensors import INDEX, MODEL_FILE, StoredTensor, read_header
from zero_jax.core.files.untrusted import mapping, read_json, text, user_path
from zero_jax.core.text_tables import printable, quoted

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
# Files beside the weights: tokenizer and generation settings.
COMPANIONS = (
    TOKENIZER,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
_RUN_FOLDER = "hf"  # of a run, with the config and the companions of the checkpoint that it began with
_MAX_JSON_BYTES = 1 << 27


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the content of a folder's `config.json`."""
    return _read_json(_checked(folder) / CONFIG)


def _checked(folder: str | os.PathLike[str]) -> pathlib.Path:
    path = user_path(folder)
    if not path.is_dir():
        name = str(folder) if len(pathlib.PurePath(folder).parts) == 2 else "NAME"  # as the hub has it
        raise ValueError(
            f"{path} is no folder: give one with {CONFIG} and *.safetensors, as "
            f"`hf download {name} --local-dir {path.name}` makes of a model of the hub"
        )
    return path


def read_tensors(folder: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Returns the tensors of a folder's files by name, from the files' headers."""
    path = _checked(folder)
    if not (path / INDEX).exists():
        if not (path / MODEL_FILE).exists():
            weights = sorted(
                printable(entry.name) for entry in path.iterdir() if entry.suffix in (".safetensors", ".bin", ".pth")
            )
            contents = f"it has {', '.join(weights[:4])}" if weights else "it has no weights"
            raise ValueError(
                f"{path} has neither {MODEL_FILE} nor {INDEX} ({contents}): give a folder with one of them, such as "
                "`model.save_pretrained` of transformers writes"
            )
        return read_header(path / MODEL_FILE)
    index = _read_json(path / INDEX)
    try:
        file_of = {name: text(file) for name, file in mapping(index.get("weight_map")).items()}
    except ValueError as error:
        why = f"{path / INDEX} has no weight_map from tensors to files: {error}"
        raise ValueError(f"{why}: copy or download it again") from error
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(file_of.values())):
        # A name with slashes could lead out of the folder.
        if file != pathlib.PurePath(file).name or not os.path.isfile(path / file):
            there = [entry.name for entry in path.glob("*.safetensors") if entry.name not in file_of.values()]
            why = "no file, or a link to none" if os.path.lexists(path / file) else "not there"
            raise ValueError(
                f"{path / INDEX} names the file {quoted(file)}, which is {why}: {did_you_mean(file, there)}copy or "
                "download it again"
            )
        of_file = read_header(path / file)
        repeated = sorted(tensors.keys() & of_file.keys())
        if repeated:
            raise ValueError(f"{path / file} has {quoted(repeated[0])}, which {tensors[repeated[0]].path.name} has too")
        tensors |= of_file
    # Not the other way round: tensors that the index lacks are left over, which `match` refuses.
    for name, file in file_of.items():
        if name not in tensors or tensors[name].path.name != file:
            raise ValueError(
                f"{path / INDEX} says that {quoted(name)} is in {printable(file)}, which does not have it: download "
                "both again"
            )
    return tensors


def copy_companions(source: str | os.PathLike[str], target: pathlib.Path) -> None:
    """Copies the config, tokenizer and generation settings of a folder to another one; warns of what cannot be."""
    folder = user_path(source)
    if not folder.is_dir():
        warnings.warn(f"{folder} is gone: its tokenizer is not saved, copy it from elsewhere", stacklevel=2)
    for name in (CONFIG, *COMPANIONS):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
        # The hub's cache has links to files, which lead to nothing when it was cleaned.
        elif os.path.lexists(folder / name):
            message = f"{folder / name} is no file, or a link to none, and is not saved: copy it from elsewhere"
            warnings.warn(message, stacklevel=2)


def run_companions(run: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the folder, in that of a run, of config and companions of the checkpoint that the run began with."""
    return pathlib.Path(run) / _RUN_FOLDER


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    return read_json(path, "the checkpoint's", remedy="copy or download it again", limit_bytes=_MAX_JSON_BYTES)
