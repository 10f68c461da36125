"""The model of a command: a preset of the reference models, or the user's own functions."""

import argparse
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.cli.config_classes import option_fields
from zero_jax.cli.models.hub import hub_config, model_name
from zero_jax.cli.models.presets import (
    ActivationConfig,
    ModelConfig,
    check_changes,
    find_preset,
    generate_function,
    init_function,
    loss_function,
    model_specs,
    shape_changes,
)
from zero_jax.cli.options import (
    explicit,
    field_values,
    option_of,
    refuse,
)
from zero_jax.core.signatures import check_takes
from zero_jax.core.tree import PyTree, key_shape
from zero_jax.models.decoder_config import DecoderConfig
from zero_jax.planning import batch_of, resolve
from zero_jax.pretrained import open_hf
from zero_jax.trainer import Model, first_batch
from zero_jax.training import MeshLoss


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
      values_fn: returns a batch with values of the shapes that `batch_fn` returned.
      activations: the options of the reference model's activations.
    """

    name: str
    init_fn: Callable[..., PyTree]
    loss_fn: Callable[..., Any] | MeshLoss
    batch_fn: Callable[[int], PyTree]
    config: ModelConfig | None
    specs_fn: Callable[[int], PyTree] = lambda model: None
    values_fn: Callable[[PyTree], PyTree] = lambda batch: batch
    activations: ActivationConfig | None = None


def preset_config(options: argparse.Namespace) -> ModelConfig:
    """Returns the shape of the preset or of the hub's folder, with the changes by options.

    Raises:
      ValueError: there is no such preset or folder, or the shape cannot be built.
    """
    if options.from_hf is not None:
        return hub_config(options)
    preset, changes = find_preset(options.preset), shape_changes(options)
    check_changes(options.preset, preset, changes)
    return dataclasses.replace(preset, **changes)


def preset_model(options: argparse.Namespace, *, has_checkpoint: bool = False) -> Model:
    """Returns the model to train, or one whose params a checkpoint has: those of the hub's folder are not read."""
    config = preset_config(options)
    return Model(
        name=model_name(options),
        config=config,
        vocab_size=config.vocab_size,
        seq_len=config.seq_len,
        init_fn=init_function(config),
        loss_fn=loss_function(config, _activations(options)),
        generate_fn=generate_function(config),
        param_specs=model_specs(config, getattr(options, "TrainConfig.model_axis", 1)),
        load_fn=None
        if options.from_hf is None or has_checkpoint
        else open_hf(options.from_hf, seq_len=config.seq_len).load,
    )


def _activations(options: argparse.Namespace) -> ActivationConfig:
    return ActivationConfig(**field_values(ActivationConfig, options))


def planned_model(options: argparse.Namespace) -> PlannedModel:
    """Returns the model to plan for.

    Raises:
      ValueError: a reference that cannot be imported, or some of the references without the others.
    """
    refs = {name: getattr(options, name) for name in ("loss", "init", "batch", "batches")}
    if any(refs.values()):
        missing = [f"--{name}" for name in ("loss", "init") if not refs[name]]
        missing += [] if refs["batch"] or refs["batches"] else ["--batches"]
        if missing:
            raise ValueError(
                f"a model of your own needs --loss, --init and --batches: give {' and '.join(missing)} too"
            )
        if refs["batch"] and refs["batches"]:
            raise ValueError("--batch makes one batch and --batches all of them: give one of the two")
        refuse_presets(options)
        batch, init_fn = _batch_function(refs["batch"], refs["batches"]), function_of("--init", refs["init"])
        return PlannedModel(
            name=refs["loss"],
            init_fn=init_fn,
            loss_fn=function_of("--loss", refs["loss"]),
            batch_fn=lambda num_examples: batch_of(batch(), num_examples),
            config=None,
            specs_fn=own_specs(options.param_specs, init_fn),
            values_fn=functools.partial(_own_values, batch),
        )
    if options.param_specs:
        raise ValueError(
            f"--param-specs {options.param_specs!r} is for a model of your own (--loss, --init, --batches): "
            "the presets know their specs"
        )
    return reference_model(model_name(options), preset_config(options), _activations(options))


def _batch_function(batch: str | None, batches: str | None) -> Callable[[], PyTree]:
    """Returns a function of nothing that returns the batch of `--batch`, or the first one of `--batches`."""
    if not batch:
        assert batches is not None
        return functools.partial(first_batch, f"--batches {batches!r}", resolve("--batches", batches))
    function = function_of("--batch", batch)
    return check_takes(f"--batch {batch!r}", function, (), remedy="name a function of nothing that returns a batch")


def _own_values(batch_fn: Callable[[], PyTree], shapes: PyTree) -> PyTree:
    """Returns the user's batch, its examples repeated or cut to a number of examples."""
    batch = batch_fn()
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batch)):
        raise ValueError("--verify runs the step: give batches of arrays with values, not of ShapeDtypeStructs")

    def resized(x: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        return np.resize(np.asarray(x), shape.shape) if shape.shape else np.asarray(x)

    return jax.tree.map(resized, batch, shapes)


def small_model(model: PlannedModel) -> PlannedModel:
    """Returns a small reference model of the same form; a model of the user's own as it is."""
    config = model.config
    if config is None:
        return model
    sizes = {"vocab_size": 256, "seq_len": 64, "num_layers": 2, "num_experts": 4, "experts_per_token": 2, "window": 32}
    sizes |= {"learned_positions": 64}
    fields = {name: min(getattr(config, name), size) for name, size in sizes.items() if getattr(config, name, None)}
    fields |= {"num_heads": 4, "d_model": 64}
    if isinstance(config, DecoderConfig):
        fields |= {"num_kv_heads": 4 if config.num_kv_heads == config.num_heads else 2, "head_dim": 16, "d_hidden": 128}
        fields |= {"num_dense_layers": min(config.num_dense_layers, 1)}
        fields |= {"d_hidden_dense": 128} if config.d_hidden_dense else {}
        if config.latent is not None:
            ranks = {"query_rank": config.latent.query_rank and 32, "key_rank": 16}
            fields["latent"] = dataclasses.replace(config.latent, **ranks, rotary_dim=8, value_dim=16)
        if config.routing is not None:
            fields["routing"] = dataclasses.replace(config.routing, num_groups=2, num_kept=1)
    return reference_model(f"a small {model.name}", dataclasses.replace(config, **fields), model.activations)


def refuse_presets(options: argparse.Namespace) -> None:
    """Raises `ValueError` for options of the presets beside a model of the user's own."""
    reason = "is of the presets, and --loss stands for a model of your own: leave it out"
    for option, name in (("--model", "preset"), ("--from-hf", "from_hf")):
        if name in explicit(options):
            raise ValueError(f"{option} {getattr(options, name)}: that {reason}")
    names = [name for config in ("GPTConfig", "DecoderConfig", "ActivationConfig") for name in option_fields(config)]
    refuse(options, list(map(option_of, names)), reason=f"that {reason}")


def reference_model(name: str, config: ModelConfig, activations: ActivationConfig | None = None) -> PlannedModel:
    """Returns a reference model with the trainer's batches."""

    def batch(num_examples: int) -> PyTree:
        tokens = jax.ShapeDtypeStruct((num_examples, config.seq_len), jnp.int32)
        weights = jax.ShapeDtypeStruct(tokens.shape, jnp.float32)
        return {"inputs": tokens, "targets": tokens, "weights": weights}

    return PlannedModel(
        name=name,
        init_fn=init_function(config),
        loss_fn=loss_function(config, activations or ActivationConfig()),
        batch_fn=batch,
        config=config,
        specs_fn=functools.partial(model_specs, config),
        values_fn=functools.partial(_token_values, config.vocab_size),
        activations=activations,
    )


def _token_values(vocab_size: int, shapes: PyTree) -> PyTree:
    """Returns random tokens and weights."""
    random = np.random.default_rng(0)
    tokens = {name: random.integers(0, vocab_size, shapes[name].shape, np.int32) for name in ("inputs", "targets")}
    return tokens | {"weights": random.random(shapes["weights"].shape, np.float32)}


def own_specs(reference: str | None, init_fn: Callable[..., PyTree]) -> Callable[[int], PyTree]:
    """Returns a function from the size of the axis `model` to the specs that `--param-specs` names."""
    if not reference:
        return lambda model: None
    value = resolve("--param-specs", reference)
    if not callable(value):
        return lambda model: value
    takes_params = bool(inspect.signature(value).parameters)
    shapes = jax.eval_shape(init_fn, key_shape()) if takes_params else None
    specs = value(shapes) if takes_params else value()
    return lambda model: specs


def function_of(option: str, reference: str) -> Callable[..., Any]:
    """Imports a function by `module:function`."""
    function = resolve(option, reference)
    if not callable(function):
        raise ValueError(f"{option} {reference!r} is of type {type(function).__name__}: name a function")
    return function
