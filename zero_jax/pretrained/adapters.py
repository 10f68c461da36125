"""Adapters as the library PEFT has them: leaves by the names of modules, and folders of adapters, in and out.

A folder has `adapter_config.json` and `adapter_model.safetensors`, with `base_model.model.MODULE.lora_A.weight`
`[rank, in]` and `lora_B.weight` `[out, rank]` of each adapted matrix, in DoRA its `lora_magnitude_vector` `[out]`, and
the weights of modules that are trained as they are.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.checkpoint import open_params
from zero_jax.core.close_match import did_you_mean
from zero_jax.core.files.safetensors import StoredTensor, read_header
from zero_jax.core.files.untrusted import read_json, user_path
from zero_jax.core.signatures import check_arguments
from zero_jax.core.text_tables import quoted
from zero_jax.core.tree import PyTree, leaves_by_name
from zero_jax.core.variables import Variables
from zero_jax.finetuning import Lora
from zero_jax.models.decoder_config import DecoderConfig
from zero_jax.models.huggingface import hf_config, tensor_names
from zero_jax.models.tensor_name import TensorName
from zero_jax.pretrained.loading import HFModel, Pretrained, warn_of_nonfinite
from zero_jax.pretrained.mapping import match
from zero_jax.pretrained.saving import FolderToWrite, SavedHF, check_shapes, run_decoder, save_arrays, write_folder
from zero_jax.training import TrainState

Like = Pretrained | HFModel | DecoderConfig
ALL_LINEAR = "all-linear"
_CONFIG, _FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _WEIGHT = "base_model.model.", ".weight"
_MAX_BYTES = 1 << 24  # of the config
# Keys that say what is read elsewhere, or nothing of the function that the adapters make.
_KNOWN = frozenset(
    "peft_type r lora_alpha use_dora use_rslora init_lora_weights base_model_name_or_path revision task_type "
    "auto_mapping peft_version inference_mode lora_dropout target_modules exclude_modules modules_to_save "
    "layers_to_transform layers_pattern megatron_core qalora_group_size eva_config runtime_config".split()
)
# Ways of initialization that leave the base as it is; others (PiSSA, OLoRA, LoftQ) change it whenever PEFT loads them.
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Decoder:
    """The names and shapes of a decoder's params, and the folder it comes from."""

    names: Mapping[str, TensorName]
    shapes: Mapping[str, tuple[int, ...]]
    folder: str | None = None

    @classmethod
    def of(cls, like: Like) -> _Decoder:
        source = like.source if isinstance(like, Pretrained) else like
        if isinstance(source, DecoderConfig):
            return cls(names=tensor_names(source, model_type=hf_config(source)["model_type"]), shapes=source.shapes)
        names = tensor_names(source.config, model_type=source.hf_config["model_type"])
        return cls(names=names, shapes=source.config.shapes, folder=source.folder)

    @property
    def structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The params by path, as shapes."""
        return {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in self.shapes.items()}

    @property
    def modules(self) -> dict[str, str]:
        """The modules of matrices by path, such as `model.layers.{layer}.self_attn.q_proj`."""
        return {path: _module(name) for path, name in self.names.items() if self.labels(path)}

    def labels(self, path: str) -> str:
        """Returns which dims of a param are a stack, in and out, as a rule of `Lora` has them; '' for no matrix."""
        num_stack = self.names[path].num_indices
        is_matrix = self.names[path].template.endswith(_WEIGHT) and len(self.shapes[path]) - num_stack == 2
        return "s" * num_stack + "io" if is_matrix else ""

    def adapter_shapes(self, lora: Lora) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of what is trained, by path."""
        plain = dataclasses.replace(lora, base="own")  # nothing to quantize
        variables = jax.eval_shape(lambda params: plain.init(params, jax.random.key(0)), self.structs)
        return {path: tuple(x.shape) for path, x in leaves_by_name(variables.params).items()}

    def adapter_names(self, lora: Lora) -> dict[str, TensorName]:
        """Returns the tensors of what is trained, by path; raises `ValueError` for what PEFT has no names for."""
        names: dict[str, TensorName] = {}
        for path, target in lora.targets(self.structs).items():
            name, module = self.names[path], f"{_PREFIX}{_module(self.names[path])}"
            if name.num_indices > 1:
                raise ValueError(
                    f"leaf {path!r} is of experts, whose adapters PEFT has no lasting form for: merge them, with "
                    "Lora.merge or `zero-jax export --merged`"
                )
            if name.part is not None:
                raise ValueError(
                    f"leaf {path!r} shares the module {_module(name)} with others, which PEFT adapts as one: merge the "
                    "adapters, with Lora.merge or `zero-jax export --merged`"
                )
            if target.labels != self.labels(path) or (path == "embed" and "head" not in self.names):
                why = "a table that is the head too" if target.labels == self.labels(path) else f"as {target.labels!r}"
                raise ValueError(f"leaf {path!r} is adapted {why}, which PEFT has not: merge it, with Lora.merge")
            is_table = not name.is_transposed
            # PEFT has the factors of a table as parameters of it, those of other matrices as modules.
            a, b = ("lora_embedding_A", "lora_embedding_B") if is_table else ("lora_A.weight", "lora_B.weight")
            made = {"a": TensorName(f"{module}.{a}", True), "b": TensorName(f"{module}.{b}", True)}
            if lora.dora:
                made["magnitude"] = TensorName(f"{module}.lora_magnitude_vector")
            names |= {f"{path}/{x}": dataclasses.replace(tensor, first=name.first) for x, tensor in made.items()}
        for path in lora.trained(self.structs):
            module = _module(self.names[path])
            others = [x.template for x in self.names.values() if x.template.startswith(f"{module}.")]
            name = self.names[path]
            if len(others) > 1 or not name.template.endswith(_WEIGHT) or name.num_indices > 1 or name.part is not None:
                raise ValueError(
                    f"leaf {path!r} is a part of {module}, which PEFT saves whole: merge it, with Lora.merge"
                )
            if path == "embed" and "head" not in self.names:
                raise ValueError(f"leaf {path!r} is the head too, which PEFT saves as two: merge it, with Lora.merge")
            names[path] = dataclasses.replace(self.names[path], template=_PREFIX + self.names[path].template)
        return names


def lora_rules(like: Like, targets: str | Sequence[str]) -> dict[str, str]:
    """Returns the `Lora.rules` of the leaves of modules that are named as PEFT's `target_modules`.

    Args:
      like: a loaded checkpoint of the hub, or the shape of a decoder.
      targets: names or ends of names, such as `["q_proj", "self_attn.v_proj"]`, also as one text with commas;
        `all-linear` are all matrices but table and head.

    Raises:
      ValueError: a name of no module that has a matrix.

    Example:
      >>> zero.lora_rules(DECODERS["llama-3-8b"], "q_proj,v_proj")
      {'blocks/query': 'sio', 'blocks/value': 'sio'}
    """
    check_arguments(like=like, targets=targets.split(",") if isinstance(targets, str) else targets)
    decoder = _Decoder.of(like)
    modules = decoder.modules
    words = targets.replace(",", " ").split() if isinstance(targets, str) else list(targets)
    rules: dict[str, str] = {}
    for word in words:
        # With the dot a word matches components alone: `proj` is no end of `q_proj`.
        paths = [path for path, module in modules.items() if f".{module}".endswith(f".{word}")]
        # PyTorch has linear layers as [out, in], and tables as they are.
        if word == ALL_LINEAR:
            paths = [path for path in modules if decoder.names[path].is_transposed and path != "head"]
        if not paths:
            ends = sorted({module.rpartition(".")[2] for module in modules.values()})
            raise ValueError(
                f"{quoted(word)} is the name of no module with a matrix: {did_you_mean(word, ends)}they are "
                f"{', '.join(ends)}, or {ALL_LINEAR} for all but table and head"
            )
        rules |= {path: decoder.labels(path) for path in paths}
    if not rules:
        raise ValueError(f"targets={targets!r}: name a module at least, or {ALL_LINEAR}")
    return rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedAdapters:
    """The adapters of a PEFT folder.

    Attributes:
      lora: which leaves are adapted, and how; its `alpha` is that of the folder, or makes the same scale.
      adapters: their arrays by leaf, on the host in float32, as `Lora.init` makes them.

    Example:
      >>> zero.load_peft(peft, shape).lora.alpha
      16.0
    """

    lora: Lora
    adapters: dict[str, Any]

    def on(self, params: PyTree | Variables) -> Variables:
        """Returns these adapters as params, with the frozen base of `params` as model state; see `Lora.init`."""
        return dataclasses.replace(self.lora.init(params, jax.random.key(0)), params=self.adapters)


def load_peft(
    folder: str | os.PathLike[str],
    like: Like,
    *,
    base: Literal["own", "bfloat16", "int8", "nf4", "nf4_double"] = "bfloat16",
) -> LoadedAdapters:
    """Loads the adapters of a PEFT folder, to train on, or to merge into the base.

        loaded = zero.load_hf("Llama-3.2-1B", mesh=mesh, config=config)
        tuned = zero.load_peft("Llama-3.2-1B-tuned", loaded)
        state = zero.init_state(tuned.on(loaded.params), tx, key, mesh=mesh, config=loaded.config)
        step = zero.make_train_step(tuned.lora.loss_fn(loaded.loss_fn), tx, mesh=mesh, config=loaded.config)

    Args:
      folder: a folder with `adapter_config.json` and `adapter_model.safetensors`.
      like: the checkpoint of the hub that they are for, or its shape.
      base: how the frozen params are stored, as for `Lora`.

    Raises:
      ValueError: no such files, a kind of adapters or a setting that `Lora` does not have, or tensors that are missing,
        left over or of another shape, as of another model.

    Example:
      >>> loaded = zero.load_peft(peft, shape)  # peft: a folder with adapter_config.json
      >>> loaded.lora.rank, sorted(loaded.adapters)
      (4, ['blocks/query'])
    """
    check_arguments(folder=folder, like=like)
    path, decoder = user_path(folder), _Decoder.of(like)
    config = read_json(path / _CONFIG, "PEFT's", remedy="give a folder that PEFT has saved", limit_bytes=_MAX_BYTES)
    settings = _settings(path / _CONFIG, config)
    tensors = read_header(path / _FILE)
    lora = Lora(**_leaves(path, decoder, tensors), **settings, base=base)
    leaves = match(path, tensors, decoder.adapter_shapes(lora), decoder.adapter_names(lora))
    adapters: dict[str, Any] = {}
    for name, leaf in leaves.items():
        values = leaf.read(tuple(map(slice, leaf.shape)), jnp.dtype(jnp.float32))
        target, _, part = name.rpartition("/")
        if name in lora.trained(decoder.structs):
            adapters[name] = values
        else:
            adapters.setdefault(target, {})[part] = values
    for tensor in tensors.values():
        tensor.check()  # or values of two versions of the file are mixed
    counts = {name: int(np.sum(~np.isfinite(x))) for name, x in leaves_by_name(adapters).items()}
    warn_of_nonfinite(path, adapters, {name: count for name, count in counts.items() if count})
    return LoadedAdapters(lora=lora, adapters=adapters)


def _settings(path: pathlib.Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rank, alpha and DoRA of a config; raises `ValueError` for what `Lora` does not have."""
    kind, start = config.get("peft_type"), config.get("init_lora_weights", True)
    if kind != "LORA":
        raise ValueError(f"{path}: peft_type={quoted(kind)} is not supported: only 'LORA' is")
    if start not in _PLAIN_STARTS:
        raise ValueError(
            f"{path}: init_lora_weights={quoted(start)} changes the base when PEFT loads the adapters: save them with "
            "path_initial_model_for_weight_conversion, which leaves the base as it is"
        )
    # A setting that is off or empty is none, whatever release of PEFT wrote it.
    unknown = [key for key, value in config.items() if key not in _KNOWN and value not in (None, False, "none", [], {})]
    if unknown:
        raise ValueError(
            f"{path}: {unknown[0]}={quoted(config[unknown[0]])} is not supported: merge the adapters with PEFT, and "
            "take the merged model"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{path}: r={quoted(rank)}: the config needs a whole number of at least 1")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ValueError(f"{path}: lora_alpha={quoted(alpha)}: the config needs a number above 0")
    alpha *= math.sqrt(rank) if config.get("use_rslora") else 1  # alpha / sqrt(rank) is the scale there
    return {"rank": rank, "alpha": float(alpha), "dora": bool(config.get("use_dora"))}


def _leaves(path: pathlib.Path, decoder: _Decoder, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Returns the rules of the leaves that are adapted in a file, and those that are trained as they are."""
    modules = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in tensors if ".lora_" in name}
    rules, train = {}, []
    for leaf, name in decoder.names.items():
        # Adapters of some layers alone choose the leaf, too: `match` names the layers that are missing.
        labels, others = decoder.labels(leaf), (0,) * (name.num_indices - 1)
        stack = [(i, *others) for i in range(decoder.shapes[leaf][0])] if name.num_indices else [()]
        if labels and modules.intersection(name.of(index).rpartition(".")[0] for index in stack):
            rules[leaf] = labels
        elif f"{_PREFIX}{name.of(stack[0])}" in tensors:
            train.append(leaf)
    if not rules:
        raise ValueError(f"{path / _FILE} has no adapters of this model's modules: it is for another model")
    return {"rules": rules, "train": tuple(train)}


def _module(name: TensorName) -> str:
    return name.template.rpartition(".")[0]


def save_peft(
    folder: str | os.PathLike[str],
    adapters: TrainState | Variables | PyTree,
    lora: Lora,
    like: Like,
    *,
    dtype: Any = None,
) -> SavedHF:
    """Writes adapters as a PEFT folder, which `peft.PeftModel.from_pretrained` and servers of adapters load.

    Every process calls it; the folder is one that all of them see. It appears when all of it is written. Adapters that
    were trained on a quantized base are for that base: on the hub's own weights they compute something near to it.

    Args:
      folder: the folder to make; it must not exist, or be empty.
      adapters: a train state, whose master params are written; what `Lora.init` returned; or the params of one of them.
      lora: the adapters' settings.
      like: the checkpoint of the hub that they are for, or its shape.
      dtype: floating dtype of the file; None keeps theirs.

    Raises:
      ValueError: adapters of other shapes, ones that PEFT has no form for (of experts, of a table that is the head), a
        folder with something in it, or no space.

    Example:
      >>> lora = zero.Lora(rules=zero.lora_rules(shape, "q_proj"), rank=4)
      >>> adapters = lora.init(decoder.init(shape, jax.random.key(0)), jax.random.key(1))
      >>> zero.save_peft(folder / "adapters", adapters, lora, shape).num_tensors
      4
    """
    check_arguments(folder=folder, like=like, lora=lora, dtype=dtype)
    decoder = _Decoder.of(like)
    params = adapters.masters if isinstance(adapters, TrainState) else adapters
    leaves = leaves_by_name(params.params if isinstance(params, Variables) else params)
    to_write = _to_write(folder, lora, decoder, dtype)
    check_shapes(leaves, decoder.adapter_shapes(lora))
    return save_arrays(to_write, leaves)


def export_peft(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    lora: Lora,
    *,
    step: int | None = None,
    dtype: str | None = None,
    ema: bool = False,
) -> SavedHF:
    """Writes the adapters of a checkpoint as a PEFT folder, as `save_peft` does, without reading its base.

    `path`, `step` and `ema` (of the adapters) are as for `zero.checkpoint.export`; `lora` and `dtype` as for
    `save_peft`.

    Raises:
      CheckpointError: no checkpoint, or a damaged one.
      ValueError: a model that is no decoder, or as for `save_peft`.
    """
    saved = open_params(path, step=step, ema=ema)
    config, hub_config, source = run_decoder(path, saved.model)
    names = tensor_names(config, model_type=hub_config["model_type"])
    decoder = _Decoder(names=names, shapes=config.shapes, folder=None if source is None else source.as_posix())
    to_write = _to_write(out, lora, decoder, dtype)
    check_shapes(saved.leaves, decoder.adapter_shapes(lora))
    return write_folder(to_write, saved.leaves, {name: lambda name=name: saved.pieces(name) for name in saved.leaves})


def _to_write(folder: str | os.PathLike[str], lora: Lora, decoder: _Decoder, dtype: Any) -> FolderToWrite:
    names = decoder.adapter_names(lora)
    targets, trained = (
        # By their last part: PEFT takes them for the modules of all layers that end so.
        sorted({_module(decoder.names[path]).rpartition(".")[2] for path in paths})
        for paths in (lora.targets(decoder.structs), lora.trained(decoder.structs))
    )
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": decoder.folder}
    config |= {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "use_dora": lora.dora,
        "use_rslora": False,
    }
    config |= {"bias": "none", "fan_in_fan_out": False, "init_lora_weights": True, "inference_mode": True}
    config |= {"target_modules": targets, "modules_to_save": trained or None}
    texts = {_CONFIG: json.dumps(config, indent=2) + "\n"}
    # PEFT reads one file.
    return FolderToWrite(path=folder, names=names, file=_FILE, max_file_bytes=2**63, dtype=dtype, texts=texts)
