"""Options for fine-tuning with adapters: `--lora` and those beside it."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
from collections.abc import Sequence
from typing import Any, Literal

import jax
import optax
from jax.sharding import AbstractMesh

from zero_jax.checkpoint import find_checkpoint, restore
from zero_jax.cli.models.options import preset_config
from zero_jax.cli.models.presets import ModelConfig, init_function
from zero_jax.cli.options import field_values
from zero_jax.core.field_checks import check_fields
from zero_jax.core.tree import PyTree, key_shape, leaf_names
from zero_jax.core.variables import Variables
from zero_jax.finetuning import Lora
from zero_jax.sharding.mesh import make_mesh
from zero_jax.trainer import Model
from zero_jax.training import ZeroConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The adapters of a run.

    Attributes:
      lora: train low-rank adapters of these leaves alone: patterns of paths separated by commas, each with the letters
        of its dims where the model does not stack its layers: `blocks/query,blocks/value` or `layers/*/kernel=io`.
      lora_rank: the rank of an update.
      lora_alpha: updates are scaled by lora_alpha / lora_rank.
      lora_dora: also learn the norm of each output (DoRA).
      lora_base: how the frozen params are stored; int8, nf4 (QLoRA) and nf4_double (whose scales are quantized too) are
        for the adapted ones, the others are then in bfloat16.
      lora_train: patterns of leaves that are trained as they are, separated by commas.
    """

    lora: str | None = None
    lora_rank: int = 8
    lora_alpha: float = 16.0
    lora_dora: bool = False
    lora_base: Literal["own", "bfloat16", "int8", "nf4", "nf4_double"] = "bfloat16"
    lora_train: str | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` for invalid values."""
        check_fields(self, lowest={"lora_rank": 1})
        if self.lora_alpha <= 0:
            raise ValueError(f"lora_alpha={self.lora_alpha}: give a positive number, such as twice the rank")


def adapted_model(model: Model, options: argparse.Namespace) -> Model:
    """Returns a model whose params are adapters, if the options ask for that, else the model itself.

    Raises:
      ValueError: rules that do not fit the model, or options of adapters without `--lora`.
    """
    config = LoraConfig(**field_values(LoraConfig, options))
    if config.lora is None:
        if config != LoraConfig():
            raise ValueError("--lora-rank and its like need --lora: give the patterns of the leaves to adapt")
        return model
    init_fn = model.init_fn
    shapes = jax.eval_shape(init_fn, key_shape())
    lora = _lora(config, config.lora, model.config, leaf_names(shapes))
    lora.targets(shapes)

    def init_adapters(key: jax.Array) -> Variables:
        return lora.init(init_fn(key), key)

    def adapt(params: PyTree, key: jax.Array) -> Variables:
        return lora.init(params, key)

    jax.eval_shape(init_adapters, key_shape())
    specs = model.param_specs
    if specs is not None:
        mesh: Any = AbstractMesh((getattr(options, "TrainConfig.model_axis"),), ("model",))
        specs = lora.param_specs(shapes, specs, mesh=mesh)
    return dataclasses.replace(
        model,
        init_fn=init_adapters,
        loss_fn=lora.loss_fn(model.loss_fn),
        generate_fn=None,
        param_specs=specs,
        base_init_fn=init_fn,
        base_param_specs=model.param_specs,
        adapt_fn=adapt,
        adapters=config,
    )


def merged_params(path: str, *, step: int | None, dtype: str | None, options: argparse.Namespace) -> PyTree:
    """Returns the params of a checkpoint with its adapters merged, in the memory of the host.

    `path` is a run's folder, its checkpoints, or the folder of one step; `dtype` is as for `Lora.merge`, `options` are
    those of the run. A step of None is the newest.

    Raises:
      CheckpointError: no checkpoint, or a damaged one.
      ValueError: a run without adapters, or options of another run.
    """
    config = LoraConfig(**field_values(LoraConfig, options))
    if config.lora is None:
        raise ValueError("--merged is for runs with --lora, and this one has no adapters: leave it out")
    shape = preset_config(options)
    init_fn = init_function(shape)
    shapes = jax.eval_shape(init_fn, key_shape())
    lora = _lora(config, config.lora, shape, leaf_names(shapes))
    record, _ = find_checkpoint(path, step)
    restored = restore(
        record.path.parent,
        step=record.step,
        init_fn=lambda key: lora.init(init_fn(key), key),
        tx=optax.identity(),
        mesh=make_mesh(devices=jax.devices("cpu")[:1]),
        config=ZeroConfig(stage=0, precision="fp32"),
        params_only=True,
    )
    return lora.merge(restored.state, dtype=dtype)


def _lora(config: LoraConfig, rules: str, shape: ModelConfig, paths: Sequence[str]) -> Lora:
    stacked = [path for path in paths if getattr(shape, "scan", True) and path.startswith(("blocks/", "layers/"))]
    return Lora(
        rules=_rules(rules, stacked),
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dora=config.lora_dora,
        base=config.lora_base,
        train=tuple((config.lora_train or "").replace(",", " ").split()),
    )


def refuse_lora(options: argparse.Namespace) -> None:
    """Raises `ValueError` for options of adapters beside a model of the user's own."""
    if LoraConfig(**field_values(LoraConfig, options)) != LoraConfig():
        raise ValueError(
            "--lora is for the presets: adapt your own loss function with zero.Lora, and leave it out here"
        )


def _rules(text: str, stacked: Sequence[str]) -> dict[str, str]:
    """Returns the rules of an option; patterns of leaves that stack the layers of a model are for matrices `sio`."""
    rules = {}
    for rule in text.replace(",", " ").split():
        pattern, separator, dims = rule.partition("=")
        rules[pattern] = dims if separator else "sio" if fnmatch.filter(stacked, pattern) else "io"
    return rules
