"""The model of a plan: of a preset or the hub, with shapes of its batches, or the user's own functions."""

import argparse
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.cli.models.own import function_of, import_own_model, read_own_model
from zero_jax.cli.models.presets import (
    ActivationConfig,
    ModelConfig,
    init_function,
    loss_function,
    model_name,
    model_specs,
    preset_config,
)
from zero_jax.cli.options import field_values
from zero_jax.core.signatures import check_takes
from zero_jax.core.tree import PyTree
from zero_jax.models.decoder_config import DecoderConfig
from zero_jax.planning import batch_of
from zero_jax.trainer import first_batch
from zero_jax.training import MeshLoss

# Entries of the vocabulary whose logits `--auto` tries to make at a time.
_LOSS_CHUNK = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model to plan for."""

    name: str  # name of the model
    init_fn: Callable[..., PyTree]  # `init_fn(key) -> params`
    loss_fn: Callable[..., Any] | MeshLoss  # the loss function
    batch_fn: Callable[[int], PyTree]  # returns the shapes of a batch by its number of examples
    config: ModelConfig | None  # the reference model's shape, or None for a model of the user's own
    # Returns the params' specs for a size of the axis `model`; it raises where they do not split over that, and returns
    # None for params without specs, or with specs of their own
    specs_fn: Callable[[int], PyTree] = lambda model: None
    # Returns a batch with values of the shapes that `batch_fn` returned
    values_fn: Callable[[PyTree], PyTree] = lambda batch: batch
    activations: ActivationConfig | None = None  # the options of the reference model's activations


def planned_model(options: argparse.Namespace) -> PlannedModel:
    """Returns the model to plan for."""
    if options.batch:  # stands for batches
        if getattr(options, "OwnModelConfig.batches"):
            raise ValueError("--batch makes one batch and --batches all of them: give one of the two")
        setattr(options, "OwnModelConfig.batches", options.batch)
    config = read_own_model(options)
    if config is None:
        activations = ActivationConfig(**field_values(ActivationConfig, options))
        return reference_model(model_name(options), preset_config(options), activations)
    own = import_own_model(config)
    batch = functools.partial(first_batch, f"--batches {config.batches!r}", own.batches)
    if options.batch:
        label, remedy = f"--batch {options.batch!r}", "name a function of nothing that returns a batch"
        batch = check_takes(label, function_of("--batch", options.batch), (), remedy=remedy)
    return PlannedModel(
        name=str(config.loss),
        init_fn=own.init_fn,
        loss_fn=own.loss_fn,
        batch_fn=lambda num_examples: batch_of(batch(), num_examples),
        config=None,
        specs_fn=lambda model: own.param_specs,
        values_fn=functools.partial(_own_values, batch),
    )


def _own_values(batch_fn: Callable[[], PyTree], shapes: PyTree) -> PyTree:
    """Returns the user's batch, its examples repeated or cut to a number of examples."""
    batch = batch_fn()
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batch)):
        raise ValueError("--verify runs the step: give batches of arrays with values, not of ShapeDtypeStructs")

    def resized(x: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        return np.resize(np.asarray(x), shape.shape) if shape.shape else np.asarray(x)  # repeats examples

    return jax.tree.map(resized, batch, shapes)


def other_activations(model: PlannedModel, fixed: Collection[str]) -> dict[str, ActivationConfig]:
    """Returns the activations that keep less, by what they change; options in `fixed` stay as they are."""
    plain, config = model.activations, model.config
    if plain is None or config is None:
        return {}
    free: dict[str, Any] = {"sequence_parallel": True, "loss_chunk": _LOSS_CHUNK}
    if config.vocab_size < 2 * _LOSS_CHUNK:  # one chunk would be most of the logits
        del free["loss_chunk"]
    free = {x: free[x] for x in free if f"ActivationConfig.{x}" not in fixed and not getattr(plain, x)}
    others = {}
    for names in itertools.chain.from_iterable(itertools.combinations(free, size) for size in (1, 2)):
        other = dataclasses.replace(plain, **{name: free[name] for name in names})
        with contextlib.suppress(ValueError):  # a model whose logits are not made in chunks
            loss_function(config, other)
            others[" ".join(name if free[name] is True else f"{name}={free[name]}" for name in names)] = other
    return others


def small_model(model: PlannedModel) -> PlannedModel:
    """Returns a small reference model of the same form; a model of the user's own as it is."""
    config = model.config
    if config is None:
        return model
    sizes = {"vocab_size": 256, "seq_len": 64, "num_layers": 2, "num_experts": 8, "experts_per_token": 2, "window": 32}
    sizes |= {"learned_positions": 64}
    fields = {name: min(getattr(config, name), size) for name, size in sizes.items() if getattr(config, name, None)}
    fields |= {"num_heads": 4, "d_model": 64}
    if isinstance(config, DecoderConfig):
        fields |= {"num_kv_heads": 4 if config.num_kv_heads == config.num_heads else 2, "head_dim": 16, "d_hidden": 128}
        fields |= {"num_dense_layers": min(config.num_dense_layers, 1)}
        fields |= {"d_hidden_dense": 128} if config.d_hidden_dense else {}
        if config.latent is not None:
            # `and`: a model without that vector stays one without.
            ranks = {"query_rank": config.latent.query_rank and 32, "key_rank": 16}
            fields["latent"] = dataclasses.replace(config.latent, **ranks, rotary_dim=8, value_dim=16)
        if config.routing is not None:
            fields["routing"] = dataclasses.replace(config.routing, num_groups=2, num_kept=1)
    return reference_model(f"a small {model.name}", dataclasses.replace(config, **fields), model.activations)


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
    random = np.random.default_rng(0)
    tokens = {name: random.integers(0, vocab_size, shapes[name].shape, np.int32) for name in ("inputs", "targets")}
    return tokens | {"weights": random.random(shapes["weights"].shape, np.float32)}
