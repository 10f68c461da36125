"""Writes params as a folder of the hub: config, tokenizer, and safetensors files in the names of the family.

The files appear all at once, by a rename, or one by one in a folder that is there already, the weights first. A single
process writes its shards directly into the files. Several processes each write their shards to a file of their own,
from which the first process fills the tensors: not all network file systems support a file that two processes write.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, Shard

from zero_jax.checkpoint import check_outside, open_params
from zero_jax.core.agreement import Agreement, from_first_process
from zero_jax.core.files.partial_folder import hidden_folder, partial_folder, publish, remove_abandoned
from zero_jax.core.files.safetensors import MODEL_FILE, StoredTensor, Tensor, create_files
from zero_jax.core.files.system_errors import with_remedy
from zero_jax.core.files.untrusted import user_path
from zero_jax.core.signatures import check_arguments
from zero_jax.core.text_tables import Report, printable, quoted
from zero_jax.core.tree import PyTree, leaves_by_name
from zero_jax.models.decoder_config import RECORDS, DecoderConfig
from zero_jax.models.huggingface import decoder_config, hf_config, tensor_names
from zero_jax.models.tensor_name import TensorName
from zero_jax.pretrained.folder import CONFIG, copy_companions, read_config, run_companions
from zero_jax.pretrained.loading import HFModel, Pretrained
from zero_jax.pretrained.mapping import Index, LeafTensors, check_parts, check_paths, indices, tensor_shape
from zero_jax.training import TrainState

MAX_FILE_BYTES = 5 * 10**9
_FLOATS = ("float32", "float16", "bfloat16")
# Returns slices of a param, which are read one after the other.
Pieces = Callable[[], Iterable[tuple[Index, np.ndarray]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedHF(Report):
    """A folder that was written, with the number and bytes of its tensors.

    Example:
      >>> saved = zero.save_hf(folder / "model", decoder.init(shape, jax.random.key(0)), shape)
      >>> saved.num_tensors
      21
    """

    folder: str
    num_files: int
    num_tensors: int
    num_bytes: int

    def __str__(self) -> str:
        files = f"{self.num_files} file" + "s" * (self.num_files != 1)
        return f"{self.num_tensors} tensors, {self.num_bytes:,} bytes, in {files} in {self.folder}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderToWrite:
    """A folder to write."""

    path: str | os.PathLike[str]  # the folder to make; it must not exist, or be empty
    names: Mapping[str, TensorName]  # the tensors of each param, by its path
    max_file_bytes: int  # bytes of tensors in a file; a larger tensor has a file of its own
    dtype: Any = None  # floating dtype of the files, or None
    # Dtypes by tensor, where `dtype` is None; the params' own for others
    dtypes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] | None = None  # the content of its `config.json`, if it has one
    companions: str | os.PathLike[str] | None = None  # the folder whose tokenizer and settings are copied, or None
    file: str = MODEL_FILE  # the name of the file, where there is one
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)  # further files of text, by name

    @property
    def target(self) -> pathlib.Path:
        """The absolute path."""
        return user_path(self.path).absolute()


def save_hf(
    folder: str | os.PathLike[str],
    params: TrainState | PyTree,
    like: Pretrained | HFModel | DecoderConfig,
    *,
    dtype: Any = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> SavedHF:
    """Writes the params of a decoder as a folder of the Hugging Face hub, which transformers loads.

    Every process calls it; the folder is one that all of them see. It appears when all of it is written.

    Args:
      folder: the folder to make; it must not exist, or be empty.
      params: the params, or a train state, whose master params are written.
      like: what the params were loaded from, whose config, tokenizer and dtypes are taken; or the shape of a decoder,
        for a config of the nearest family.
      dtype: floating dtype of the files; None takes those that the params were loaded from, or the params' own.
      max_file_bytes: bytes of tensors in a file; a larger tensor has a file of its own.

    Raises:
      ValueError: the folder has something in it or is below a checkpoint, other params, a shape of no family, no space.

    Example:
      >>> params = decoder.init(shape, jax.random.key(0))
      >>> zero.save_hf(folder / "model", params, shape).num_tensors
      21
    """
    check_arguments(folder=folder, like=like, dtype=dtype, max_file_bytes=max_file_bytes)
    source = like.source if isinstance(like, Pretrained) else like
    is_shape = isinstance(source, DecoderConfig)
    config, hub_config = (source, hf_config(source)) if is_shape else (source.config, source.hf_config)
    leaves = leaves_by_name(params.masters if isinstance(params, TrainState) else params)
    check_shapes(leaves, config.shapes)
    to_write = FolderToWrite(
        path=folder,
        names=tensor_names(config, model_type=hub_config["model_type"]),
        max_file_bytes=max_file_bytes,
        dtype=dtype,
        dtypes={} if is_shape else source.dtypes,
        config=hub_config,
        companions=None if is_shape else source.folder,
    )
    return save_arrays(to_write, leaves)


def save_tensors(
    folder: str | os.PathLike[str],
    params: TrainState | PyTree,
    names: Mapping[str, TensorName],
    *,
    dtype: Any = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> SavedHF:
    """Writes the params of any model as safetensors files, by the names of their tensors, as `save_hf` does.

    Raises:
      ValueError: as `save_hf`; params without names, or that differ and have one tensor.
    """
    check_arguments(folder=folder, dtype=dtype, max_file_bytes=max_file_bytes)
    leaves = leaves_by_name(params.masters if isinstance(params, TrainState) else params)
    return save_arrays(FolderToWrite(path=folder, names=names, max_file_bytes=max_file_bytes, dtype=dtype), leaves)


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

    `path`, `step` and `ema` are as for `zero.checkpoint.export`, `out` and `max_file_bytes` as for `save_hf`. A `dtype`
    of None takes that of the config that the run began with, or as was saved. `params` are written instead, such as
    those with adapters merged into them.

    Raises:
      CheckpointError: no checkpoint, or a damaged one.
      ValueError: a model that is no decoder, a folder with something in it, no space.
    """
    saved = open_params(path, step=step, ema=ema)
    config, hub_config, source = run_decoder(path, saved.model)
    folder = FolderToWrite(
        path=out,
        names=tensor_names(config, model_type=hub_config["model_type"]),
        max_file_bytes=max_file_bytes,
        dtype=dtype or hub_config.get("dtype") or hub_config.get("torch_dtype"),
        config=hub_config,
        companions=source,
    )
    if params is not None:
        return save_arrays(folder, leaves_by_name(params))
    # Adapters have the paths of params and a name below them: what they adapt is the run's model state.
    factors = sorted(x for x in saved.leaves if x not in folder.names and x.rpartition("/")[0] in folder.names)
    if factors:
        raise ValueError(f"the checkpoint has adapters ({factors[0]}): merge them into the params with --merged")
    pieces = {name: lambda name=name: saved.pieces(name) for name in saved.leaves}
    return write_folder(folder, saved.leaves, pieces)


def save_arrays(folder: FolderToWrite, leaves: Mapping[str, Array]) -> SavedHF:
    """Writes arrays on the devices of any number of processes, which all call it."""
    # What each process has by itself, such as arrays on the host, the first one writes.
    divided = {path: x for path, x in leaves.items() if isinstance(x, jax.Array) and not x.is_fully_addressable}
    pieces: dict[str, Pieces] = {path: lambda x=x: _own_shards(x) for path, x in leaves.items() if path not in divided}
    if jax.process_count() == 1:
        return write_folder(folder, leaves, pieces)
    target = folder.target

    def begin() -> str:
        _check_free(target)
        try:
            return str(stack.enter_context(hidden_folder(target, "parts")))  # the files of all processes
        except OSError as error:
            raise ValueError(f"cannot write {target}: {with_remedy(error)}") from error

    def write() -> str:
        complete = pieces | _pieces_of_parts(parts, divided)
        return json.dumps(dataclasses.asdict(write_folder(folder, leaves, complete, parts=parts)))

    with contextlib.ExitStack() as stack:
        parts = pathlib.Path(from_first_process(begin))
        with Agreement(lambda numbers: ValueError(f"process {numbers} cannot write {target}: see its log")):
            _write_parts(parts / str(jax.process_index()), divided.values())
        return SavedHF(**json.loads(from_first_process(write)))


def write_folder(
    folder: FolderToWrite, leaves: Mapping[str, Any], pieces: Mapping[str, Pieces], *, parts: pathlib.Path | None = None
) -> SavedHF:
    """Writes a folder from slices of `leaves`, which have a shape and a dtype; it may have `parts` in it already."""
    plan, target = _plan_tensors(folder, leaves), folder.target
    _check_free(target, parts)
    # By name: params that share a tensor each write a part of it.
    tensors = list({tensor.name: tensor for each in plan.values() for tensor in each.values()}.values())
    written: dict[str, str] = {}  # tensors, by the param that they are written of
    with partial_folder(target) as partial:
        limit = folder.max_file_bytes
        with create_files(partial, tensors, max_bytes=limit, metadata={}, name=folder.file) as stored:
            for path, each in plan.items():
                of_leaf = {index: stored[tensor.name] for index, tensor in each.items()}
                shape, name = tuple(leaves[path].shape), folder.names[path]
                leaf = LeafTensors(path=path, shape=shape, name=name, tensors=of_leaf)
                for index, values in pieces[path]():
                    leaf.write(index, values, written)
                if name.part is None:  # parts do not overlap
                    written |= dict.fromkeys((tensor.name for tensor in each.values()), path)
        num_files = len(list(partial.glob("*.safetensors")))
        if folder.companions is not None:
            copy_companions(folder.companions, partial)
        if folder.config is not None:
            write_config(partial, folder.config, {tensor.name: tensor.dtype for tensor in tensors})
        for name, text in folder.texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        publish(partial, target)
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    return SavedHF(folder=str(target), num_files=num_files, num_tensors=len(tensors), num_bytes=num_bytes)


def _plan_tensors(folder: FolderToWrite, leaves: Mapping[str, Any]) -> dict[str, dict[tuple[int, ...], Tensor]]:
    """Returns the tensors to write of each param, by the index of its leading dims."""
    dtype = None if folder.dtype is None else jnp.dtype(folder.dtype).name
    if dtype is not None and dtype not in _FLOATS:
        raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(_FLOATS)}, or none")
    check_paths(leaves, folder.names)
    check_parts(folder.names)
    plan, planned = {}, dict[str, tuple[Tensor, bool]]()
    for path, leaf in leaves.items():
        own_dtype, name = jnp.dtype(leaf.dtype).name, folder.names[path]
        if own_dtype not in _FLOATS and dtype is None:
            raise ValueError(f"param {path!r} is {own_dtype}: give a dtype of the files, one of {', '.join(_FLOATS)}")
        shape = tensor_shape(path, tuple(leaf.shape), name)
        plan[path] = {
            index: Tensor(name=tensor, dtype=dtype or folder.dtypes.get(tensor, own_dtype), shape=shape)
            for index in indices(tuple(leaf.shape), name)
            for tensor in [name.of(index)]
        }
        for tensor in plan[path].values():
            # A part does not go into a tensor that is written as a whole.
            made = tensor, name.part is None
            if planned.setdefault(tensor.name, made) != made:
                other, _ = planned[tensor.name]
                theirs, own = (f"{x.dtype}{list(x.shape)}" for x in (other, tensor))
                why = f"which makes it {theirs} and not {own}: give a dtype of the files, or parts that fit"
                if other == tensor:
                    why = "and one of them is a part of it, the other all of it: give parts of both"
                raise ValueError(f"param {path!r} shares the tensor {tensor.name} with another one, {why}")
    return plan


def _check_free(target: pathlib.Path, parts: pathlib.Path | None = None) -> None:
    """Raises `ValueError` for a folder with more than `parts` in it, or below a checkpoint: nothing is overwritten."""
    check_outside(target)
    remove_abandoned(target)
    # A link to a folder is one. A folder cannot be renamed to a link to nothing.
    if os.path.lexists(target) and not os.path.isdir(target):
        raise ValueError(f"{target} is no folder: choose another one")
    others = [path.name for path in target.iterdir() if path != parts] if os.path.exists(target) else []
    if others:
        raise ValueError(f"{target} has {printable(others[0])} in it: choose a folder that is new or empty")


def write_config(folder: pathlib.Path, hf_config: Mapping[str, Any], dtypes: Mapping[str, str]) -> None:
    """Writes `config.json`, with the dtype of most tensors."""
    config = dict(hf_config)
    # Newer releases of transformers call it `dtype`, and read both.
    key = "dtype" if "dtype" in config else "torch_dtype"
    names = list(dtypes.values())
    # Sorted, so that of dtypes of as many tensors it is always the same one.
    config[key] = max(sorted(set(names)), key=names.count)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check_shapes(leaves: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `ValueError` for params that are not those of a model, by their paths and shapes."""
    check_paths(leaves, shapes)
    for path, shape in shapes.items():
        if tuple(leaves[path].shape) != shape:
            raise ValueError(
                f"param {path!r} has shape {list(leaves[path].shape)}, the model {list(shape)}: give its own params"
            )


def _decoder(model: Any) -> DecoderConfig:
    """Returns the shape of the decoder that a run recorded."""
    if not isinstance(model, Mapping) or not {"num_kv_heads", "head_dim"} <= model.keys():
        name = model.get("name") if isinstance(model, Mapping) else None
        raise ValueError(
            f"the checkpoint is of the model {quoted(name)}, which is no decoder of the hub's families: export it as "
            "plain safetensors, with --out"
        )
    # A run of an earlier release recorded fewer fields: what it had is the default of the others.
    shape = {field.name: model[field.name] for field in dataclasses.fields(DecoderConfig) if field.name in model}
    try:
        shape |= {name: record(**shape[name]) for name, record in RECORDS.items() if shape.get(name) is not None}
        return DecoderConfig(**shape)
    except TypeError as error:
        raise ValueError(f"the checkpoint's model cannot be read ({error})") from error


def run_decoder(
    path: str | os.PathLike[str], model: Any
) -> tuple[DecoderConfig, Mapping[str, Any], pathlib.Path | None]:
    """Returns the decoder of a run, as recorded in its `model`, its `config.json`, and the folder that has it."""
    config, absolute = _decoder(model), user_path(path).absolute()
    # A run's folder, its folder of checkpoints, or that of a step.
    folders = [run_companions(folder) for folder in (absolute, *absolute.parents[:2])]
    source = next((folder for folder in folders if (folder / CONFIG).is_file()), None)
    hub_config = read_config(source) if source else hf_config(config)
    if source and decoder_config(hub_config, seq_len=config.seq_len).shapes != config.shapes:
        raise ValueError(f"{source / CONFIG} is of another model than the checkpoint: remove it, or give its own run")
    return config, hub_config, source


def _owners(x: Array) -> list[Shard]:
    """Returns the shards that make up an array, one of each slice: the same in all processes."""
    # In one order: from it follows where a process's parts begin in its file.
    return sorted((shard for shard in x.global_shards if shard.replica_id == 0), key=lambda shard: shard.device.id)


def _own_shards(x: Array) -> Iterator[tuple[Index, np.ndarray]]:
    """Yields the shards of an array that this process writes, one on the host at a time."""
    if not isinstance(x, jax.Array):
        yield tuple(slice(None) for _ in x.shape), np.asarray(x)
        return
    for shard in _owners(x):
        if shard.data is not None:  # it is here
            yield shard.index, np.asarray(shard.data)


def _write_parts(path: pathlib.Path, leaves: Iterable[Array]) -> None:
    """Writes this process's shards of all params to a file of its own."""
    try:
        with path.open("xb") as file:
            for x in leaves:
                for _, values in _own_shards(x):
                    # As bytes: of bfloat16 NumPy exports no buffer.
                    file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ValueError(f"cannot write {path}: {with_remedy(error)}; all processes need this folder") from error


def _pieces_of_parts(parts: pathlib.Path, leaves: Mapping[str, Array]) -> dict[str, Pieces]:
    """Returns the slices of each param in the files of all processes, which are to be complete here."""
    ends: dict[int, int] = {}
    places: dict[str, list[tuple[Index, StoredTensor]]] = {}
    for path, x in leaves.items():
        places[path] = []
        for shard in _owners(x):
            process, shape = shard.device.process_index, x.sharding.shard_shape(x.shape)
            start, dtype = ends.get(process, 0), jnp.dtype(x.dtype).name
            part = StoredTensor(path=parts / str(process), name=path, dtype=dtype, shape=shape, offset=start)
            ends[process] = start + part.num_bytes
            places[path].append((shard.index, part))
    for process, end in ends.items():
        with contextlib.suppress(OSError):
            # In a folder that processes do not share, their files are missing here.
            # The size alone: each process has flushed its file, and has agreed, before this is called.
            if (parts / str(process)).stat().st_size == end:
                continue
        raise ValueError(f"{parts / str(process)} is not complete here: save to a folder that all processes share")
    return {path: lambda each=each: ((index, part.open()) for index, part in each) for path, each in places.items()}
