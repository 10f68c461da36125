"""The model of a command: a preset of the reference GPT, or the user's own functions."""

import argparse
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from zero_jax.attention import dot_product_attention
from zero_jax.cli.options import add_fields, explicit, field_values, option_fields, reader, refuse
from zero_jax.core.close_match import did_you_mean
from zero_jax.core.field_checks import check_fields
from zero_jax.core.signatures import check_takes
from zero_jax.core.tree import PyTree
from zero_jax.models import gpt
from zero_jax.planning import batch_of, resolve
from zero_jax.trainer import Model
from zero_jax.training import MeshLoss, sequence_parallel, softmax_cross_entropy_with_integer_labels


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model to plan for.

    Attributes:
      name: name of the model.
      init_fn: `init_fn(key) -> params`.
      loss_fn: the loss function.
      batch_fn: returns the shapes of a batch by its number of examples.
      config: the reference model's shape, or None for a model of the user's own.
      specs_fn: returns the params' specs for a size of the axis `model`; it raises where they do not split over that,
        and returns None for params without specs, or with specs of their own.
    """

    name: str
    init_fn: Callable[..., PyTree]
    loss_fn: Callable[..., Any] | MeshLoss
    batch_fn: Callable[[int], PyTree]
    config: gpt.GPTConfig | None
    specs_fn: Callable[[int], PyTree] = lambda model: None


def add_model_options(group: Any) -> None:
    """Adds the options that choose a preset and change its shape."""
    presets = ", ".join(gpt.PRESETS)
    default = "gpt-tiny"
    group.add_argument(
        "--model",
        dest="preset",
        type=reader(str),
        default=default,
        metavar="PRESET",
        help=f"one of {presets} (default: %(default)s)",
    )
    add_fields(group, gpt.GPTConfig, default_of=None)
    add_fields(group, ActivationConfig, default_of=ActivationConfig())


def add_own_model_options(group: Any) -> None:
    """Adds the options that name the user's own functions."""
    where = "as module:function, or path/to/file.py:function"
    text = reader(str)
    group.add_argument(
        "--loss", type=text, metavar="REF", help=f"your own loss function, {where}; it stands for --model"
    )
    group.add_argument(
        "--init", type=text, metavar="REF", help=f"the function that makes its params from a key, {where}"
    )
    group.add_argument(
        "--batch",
        type=text,
        metavar="REF",
        help="a function that returns a batch (arrays or ShapeDtypeStructs) of any number of examples",
    )
    group.add_argument(
        "--param-specs",
        type=text,
        metavar="REF",
        help="how its params are sharded over the axis `model`: a tree of PartitionSpecs, a dict from regular "
        "expressions of leaf paths to PartitionSpecs, or a function of the params' shapes, or of nothing, that returns "
        "one of them",
    )


def preset_config(options: argparse.Namespace) -> gpt.GPTConfig:
    """Returns the shape of the preset, with the changes by options.

    Raises:
      ValueError: there is no such preset, or the shape cannot be built.
    """
    name = options.preset
    if name not in gpt.PRESETS:
        hint = did_you_mean(name, gpt.PRESETS, cutoff=0)
        raise ValueError(f"unknown model {name!r}: {hint}Choose one of {', '.join(gpt.PRESETS)}")
    changes = {name: value for name, value in field_values(gpt.GPTConfig, options).items() if value is not None}
    return dataclasses.replace(gpt.PRESETS[name], **changes)


def preset_model(options: argparse.Namespace) -> Model:
    """Returns the model to train."""
    config = preset_config(options)
    return Model(
        name=options.preset,
        config=config,
        vocab_size=config.vocab_size,
        seq_len=config.seq_len,
        init_fn=functools.partial(gpt.init, config),
        loss_fn=gpt_loss(config, _activations(options)),
        generate_fn=functools.partial(gpt.generate, config),
        param_specs=gpt_specs(config, getattr(options, "TrainConfig.model_axis", 1)),
    )


def gpt_loss(config: gpt.GPTConfig, activations: ActivationConfig) -> Callable[..., Any] | MeshLoss:
    """Returns the loss function of a reference GPT, a `MeshLoss` if its activations depend on the mesh."""
    if activations == ActivationConfig():
        return gpt.loss_fn(config, attend=_attend)
    return MeshLoss(functools.partial(_loss_on_mesh, config, activations))


def _loss_on_mesh(config: gpt.GPTConfig, activations: ActivationConfig, mesh: Mesh) -> Callable[..., Any]:
    place, token_losses = gpt.leave, gpt.whole_logits
    if activations.sequence_parallel:
        place = sequence_parallel(mesh)
    if activations.loss_chunk is not None:
        losses = softmax_cross_entropy_with_integer_labels
        token_losses = functools.partial(losses, mesh=mesh, chunk_size=activations.loss_chunk)
    return gpt.loss_fn(config, place=place, token_losses=token_losses, attend=_attend)


def _attend(q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, segments_BT: Array | None) -> Array:
    """Runs causal attention by the kernel of the hardware that the step is for, if it has one."""
    return dot_product_attention(q_BTHK, k_BTHK, v_BTHK, is_causal=True, segment_ids=segments_BT)


def _activations(options: argparse.Namespace) -> ActivationConfig:
    return ActivationConfig(**field_values(ActivationConfig, options))


def gpt_specs(config: gpt.GPTConfig, model: int) -> PyTree:
    """Returns the specs of a reference GPT's params; a vocabulary that does not divide is not sharded.

    Raises:
      ValueError: heads or hidden features that do not divide, or a size below 1.
    """
    if model < 1:
        raise ValueError(f"model_axis={model}: give at least 1, which is no tensor parallelism")
    return None if model == 1 else gpt.param_specs(config, vocab=config.vocab_size % model == 0, model_size=model)


def planned_model(options: argparse.Namespace) -> PlannedModel:
    """Returns the model to plan for.

    Raises:
      ValueError: a reference that cannot be imported, or some of the references without the others.
    """
    own = {name: getattr(options, name) for name in ("loss", "init", "batch")}
    if any(own.values()):
        missing = [f"--{name}" for name, ref in own.items() if not ref]
        if missing:
            raise ValueError(f"a model of your own needs --loss, --init and --batch: give {' and '.join(missing)} too")
        refuse_presets(options)
        batch, init_fn = function_of("--batch", own["batch"]), function_of("--init", own["init"])
        check_takes(f"--batch {own['batch']!r}", batch, (), remedy="name a function of nothing that returns a batch")
        return PlannedModel(
            name=own["loss"],
            init_fn=init_fn,
            loss_fn=function_of("--loss", own["loss"]),
            batch_fn=lambda num_examples: batch_of(batch(), num_examples),
            config=None,
            specs_fn=own_specs(options.param_specs, init_fn),
        )
    if options.param_specs:
        raise ValueError(
            f"--param-specs {options.param_specs!r} is for a model of your own (--loss, --init, --batch): "
            "the presets know their specs"
        )
    return gpt_model(options.preset, preset_config(options), _activations(options))


def refuse_presets(options: argparse.Namespace) -> None:
    """Raises `ValueError` for options of the presets beside a model of the user's own."""
    reason = "is of the presets, and --loss stands for a model of your own: leave it out"
    if "preset" in explicit(options):
        raise ValueError(f"--model {options.preset}: that {reason}")
    names = [name for config in (gpt.GPTConfig, ActivationConfig) for name in option_fields(config)]
    refuse(options, [f"--{name.replace('_', '-')}" for name in names], reason=f"that {reason}")


def gpt_model(name: str, config: gpt.GPTConfig, activations: ActivationConfig = ActivationConfig()) -> PlannedModel:
    """Returns a reference GPT with the trainer's batches."""

    def batch(num_examples: int) -> PyTree:
        tokens = jax.ShapeDtypeStruct((num_examples, config.seq_len), jnp.int32)
        weights = jax.ShapeDtypeStruct(tokens.shape, jnp.float32)
        return {"inputs": tokens, "targets": tokens, "weights": weights}

    return PlannedModel(
        name=name,
        init_fn=functools.partial(gpt.init, config),
        loss_fn=gpt_loss(config, activations),
        batch_fn=batch,
        config=config,
        specs_fn=functools.partial(gpt_specs, config),
    )


def own_specs(reference: str | None, init_fn: Callable[..., PyTree]) -> Callable[[int], PyTree]:
    """Returns a function from the size of the axis `model` to the specs that `--param-specs` names."""
    if not reference:
        return lambda model: None
    value = resolve("--param-specs", reference)
    if not callable(value):
        return lambda model: value
    takes_params = bool(inspect.signature(value).parameters)
    shapes = jax.eval_shape(init_fn, jax.eval_shape(lambda: jax.random.key(0))) if takes_params else None
    specs = value(shapes) if takes_params else value()
    return lambda model: specs


def function_of(option: str, reference: str) -> Callable[..., Any]:
    """Imports a function by `module:function`."""
    function = resolve(option, reference)
    if not callable(function):
        raise ValueError(f"{option} {reference!r} is of type {type(function).__name__}: name a function")
    return function
