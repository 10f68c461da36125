"""The reference models by preset: GPTs and decoders, and the options that change their shapes."""

import argparse
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from jax import Array
from jax.sharding import Mesh

from zero_jax.cli.config_classes import option_fields
from zero_jax.cli.options import field_values, option_of
from zero_jax.core.close_match import did_you_mean
from zero_jax.core.field_checks import check_fields
from zero_jax.core.tree import PyTree
from zero_jax.models import decoder, gpt
from zero_jax.models.decoder_config import DECODERS, DecoderConfig
from zero_jax.models.gpt import GPTConfig
from zero_jax.pretrained import attend
from zero_jax.training import MeshLoss, sequence_parallel, softmax_cross_entropy_with_integer_labels

ModelConfig = GPTConfig | DecoderConfig
PRESETS: Mapping[str, ModelConfig] = {**gpt.PRESETS, **DECODERS}
# The modules have the same functions: `init`, `loss_fn`, `generate`, `param_specs`.
_MODULES: Mapping[type, types.ModuleType] = {GPTConfig: gpt, DecoderConfig: decoder}
_KINDS: Mapping[type, str] = {GPTConfig: "a GPT", DecoderConfig: "a decoder"}


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


def find_preset(name: str) -> ModelConfig:
    """Returns the shape of a preset; raises `ValueError` if there is none of that name."""
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS)
        raise ValueError(f"unknown model {name!r}: {hint}Choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def check_changes(name: str, config: ModelConfig, changes: Mapping[str, Any]) -> None:
    """Raises `ValueError` for options of fields that the kind of model does not have."""
    fields = option_fields(type(config).__name__)
    for field in changes:
        if field not in fields:
            option, nearest = option_of(field), did_you_mean(field, fields, "{}")
            hint = f"did you mean {option_of(nearest)}? " if nearest else ""
            raise ValueError(f"{option}: {name} is {_KINDS[type(config)]}, which has no {field}: {hint}leave it out")


def init_function(config: ModelConfig) -> Callable[[Array], PyTree]:
    """Returns the function from a key to the params."""
    return functools.partial(_MODULES[type(config)].init, config)


def generate_function(config: ModelConfig) -> Callable[..., Array]:
    """Returns the function that samples tokens."""
    return functools.partial(_MODULES[type(config)].generate, config)


def loss_function(config: ModelConfig, activations: ActivationConfig) -> Callable[..., Any] | MeshLoss:
    """Returns the loss function, a `MeshLoss` if its activations depend on the mesh.

    Raises:
      ValueError: the loss in chunks, of a model whose logits have a soft cap.
    """
    if activations == ActivationConfig():
        return _MODULES[type(config)].loss_fn(config, attend=attend)
    if activations.loss_chunk is not None:  # refused here rather than on the mesh, if the model has no logits in parts
        _MODULES[type(config)].loss_fn(config, token_losses=softmax_cross_entropy_with_integer_labels)
    return MeshLoss(functools.partial(_loss_on_mesh, config, activations))


def _loss_on_mesh(config: ModelConfig, activations: ActivationConfig, mesh: Mesh) -> Callable[..., Any]:
    place, token_losses = gpt.leave, gpt.whole_logits
    if activations.sequence_parallel:
        place = sequence_parallel(mesh)
    if activations.loss_chunk is not None:
        losses = softmax_cross_entropy_with_integer_labels
        token_losses = functools.partial(losses, mesh=mesh, chunk_size=activations.loss_chunk)
    return _MODULES[type(config)].loss_fn(config, place=place, token_losses=token_losses, attend=attend)


def model_specs(config: ModelConfig, model: int) -> PyTree:
    """Returns the specs of the params for a size of the axis `model`; a vocabulary that does not divide is not sharded.

    Raises:
      ValueError: heads or hidden features that do not divide, or a size below 1.
    """
    if model < 1:
        raise ValueError(f"model_axis={model}: give at least 1, which is no tensor parallelism")
    vocab = config.vocab_size % model == 0
    return None if model == 1 else _MODULES[type(config)].param_specs(config, vocab=vocab, model_size=model)
