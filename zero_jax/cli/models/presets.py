"""The models that the commands know: GPTs and decoders by preset, or by a folder of the Hugging Face hub."""

import argparse
import dataclasses
import functools
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any

from jax import Array
from jax.sharding import Mesh

from zero_jax.cli.command_options import MAX_SEQ_LEN
from zero_jax.cli.config_classes import option_fields
from zero_jax.cli.options import explicit, field_values, option_of
from zero_jax.core.close_match import did_you_mean
from zero_jax.core.field_checks import check_fields
from zero_jax.core.files.untrusted import user_path
from zero_jax.core.tree import PyTree
from zero_jax.data import DataConfig, load_tokenizer
from zero_jax.models import decoder, gpt
from zero_jax.models.decoder_config import DECODERS, DecoderConfig
from zero_jax.models.gpt import GPTConfig
from zero_jax.pretrained import TOKENIZER, attend, open_hf, read_decoder
from zero_jax.trainer import Model
from zero_jax.training import MeshLoss, sequence_parallel, softmax_cross_entropy_with_integer_labels

ModelConfig = GPTConfig | DecoderConfig
PRESETS: Mapping[str, ModelConfig] = {**gpt.PRESETS, **DECODERS}
# The modules have the same functions: `init`, `loss_fn`, `generate`, `param_specs`.
_MODULES: Mapping[type, types.ModuleType] = {GPTConfig: gpt, DecoderConfig: decoder}
_KINDS: Mapping[type, str] = {GPTConfig: "a GPT", DecoderConfig: "a decoder"}
# What may differ from the config of a checkpoint of the hub: the params keep their shapes and their meaning.
_MAY_CHANGE = ("seq_len", "expert_capacity", "expert_balance")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """How the activations of a preset are sharded, and its loss is chunked.

    Attributes:
      sequence_parallel: shard the residual stream over the axis `model` along the sequence (Korthikanti et al. 2022).
      loss_chunk: entries of the vocabulary whose logits are made at a time; None makes all at once.
    """

    sequence_parallel: bool = False
    loss_chunk: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, lowest={"loss_chunk": 1})


def shape_changes(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of a model's shape that the options set."""
    return field_values(GPTConfig, options) | field_values(DecoderConfig, options)


def model_name(options: argparse.Namespace) -> str:
    """Returns the name of the preset, or of the hub's folder."""
    return options.preset if options.from_hf is None else pathlib.Path(options.from_hf).absolute().name


def model_section(options: argparse.Namespace, config: Any = None) -> dict[str, Any]:
    """Returns the section `model` of a config file: what options change, or of a preset the full shape, `config`."""
    shape = shape_changes(options)
    if options.from_hf is not None:
        return {"from_hf": str(user_path(options.from_hf).absolute()), **shape}
    if config is not None:
        shape = {name: getattr(config, name) for name in option_fields(type(config).__name__)}
    return {"preset": options.preset, **shape}


def preset_config(options: argparse.Namespace) -> ModelConfig:
    """Returns the shape of the preset or of the hub's folder, with the changes by options."""
    name, folder, changes = options.preset, options.from_hf, shape_changes(options)
    if folder is None:
        if name not in PRESETS:
            raise ValueError(f"unknown model {name!r}: {did_you_mean(name, PRESETS)}Choose one of {', '.join(PRESETS)}")
        _check_changes(name, PRESETS[name], changes)
        return dataclasses.replace(PRESETS[name], **changes)
    if "preset" in explicit(options):
        raise ValueError(f"--model {name} and --from-hf {folder} are two models: leave out one of them")
    wrong = [option_of(change) for change in changes if change not in _MAY_CHANGE]
    if wrong:
        raise ValueError(f"{' and '.join(wrong)}: --from-hf takes the model's shape from its config.json: leave it out")
    config = read_decoder(folder, seq_len=changes.get("seq_len"))
    # A length that is given replaces the limit.
    return dataclasses.replace(config, **{"seq_len": min(config.seq_len, MAX_SEQ_LEN), **changes})


def experts_of(options: argparse.Namespace) -> str:
    """Returns the pattern of the params that are experts, for `--experts auto`."""
    config, is_own = preset_config(options), getattr(options, "OwnModelConfig.loss", None) is not None
    patterns = None if is_own or isinstance(config, GPTConfig) else config.expert_params
    if patterns is None:
        what = "a model of your own" if is_own else f"{model_name(options)} without experts"
        raise ValueError(f"--experts auto: {what}: give a regular expression of the paths of params, or leave it out")
    return patterns


def _check_changes(name: str, config: ModelConfig, changes: Mapping[str, Any]) -> None:
    """Raises `ValueError` for options of fields that the kind of model does not have."""
    fields = option_fields(type(config).__name__)
    for field in (field for field in changes if field not in fields):
        option, nearest = option_of(field), did_you_mean(field, fields, "{}")
        hint = f"did you mean {option_of(nearest)}? " if nearest else ""
        raise ValueError(f"{option}: {name} is {_KINDS[type(config)]}, which has no {field}: {hint}leave it out")


def preset_model(options: argparse.Namespace, *, has_checkpoint: bool = False) -> Model:
    """Returns the model to train, or one whose params a checkpoint has: those of the hub's folder are not read."""
    config, folder = preset_config(options), None if has_checkpoint else options.from_hf
    return Model(
        name=model_name(options),
        config=config,
        vocab_size=config.vocab_size,
        seq_len=config.seq_len,
        init_fn=init_function(config),
        loss_fn=loss_function(config, ActivationConfig(**field_values(ActivationConfig, options))),
        generate_fn=functools.partial(_MODULES[type(config)].generate, config),
        param_specs=model_specs(config, getattr(options, "TrainConfig.model_axis", 1)),
        load_fn=None if folder is None else open_hf(folder, seq_len=config.seq_len).load,
    )


def hub_data(config: DataConfig, folder: str, *, vocab_size: int) -> DataConfig:
    """Returns a data config with the tokenizer of the hub's folder, where it has none of its own."""
    path = config.tokenizer
    if path == "auto":
        path = str(user_path(folder) / TOKENIZER)
        if not pathlib.Path(path).is_file():
            raise ValueError(
                f"{folder} has no {TOKENIZER}: give --tokenizer bytes or the path of one, or save the folder's "
                "tokenizer anew with transformers, which writes that file"
            )
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer {path} makes tokens up to {tokenizer.vocab_size - 1:,}, and the model in {folder} has "
            f"{vocab_size:,}: give the tokenizer that the model was trained with"
        )
    return dataclasses.replace(config, tokenizer=path)


def init_function(config: ModelConfig) -> Callable[[Array], PyTree]:
    """Returns the function from a key to the params."""
    return functools.partial(_MODULES[type(config)].init, config)


def loss_function(config: ModelConfig, activations: ActivationConfig) -> Callable[..., Any] | MeshLoss:
    """Returns the loss function, a `MeshLoss` if its activations depend on the mesh."""
    if activations == ActivationConfig():
        return _MODULES[type(config)].loss_fn(config, attend=attend)
    if activations.loss_chunk is not None:  # refused here rather than on the mesh, if the model has no logits in parts
        _MODULES[type(config)].loss_fn(config, token_losses=softmax_cross_entropy_with_integer_labels)
    return MeshLoss(functools.partial(_loss_on_mesh, config, activations))


def _loss_on_mesh(config: ModelConfig, activations: ActivationConfig, mesh: Mesh) -> Callable[..., Any]:
    place, token_losses = decoder.leave, decoder.whole_logits
    if activations.sequence_parallel:
        place = sequence_parallel(mesh)
    if activations.loss_chunk is not None:
        losses = softmax_cross_entropy_with_integer_labels
        token_losses = functools.partial(losses, mesh=mesh, chunk_size=activations.loss_chunk)
    return _MODULES[type(config)].loss_fn(config, place=place, token_losses=token_losses, attend=attend)


def model_specs(config: ModelConfig, model: int) -> PyTree:
    """Returns the specs of the params for a size of the axis `model`; a vocabulary that does not divide stays whole."""
    if model < 1:
        raise ValueError(f"model_axis={model}: give at least 1, which is no tensor parallelism")
    vocab = config.vocab_size % model == 0  # GPT-2 has 50,257 tokens
    return None if model == 1 else _MODULES[type(config)].param_specs(config, vocab=vocab, model_size=model)
