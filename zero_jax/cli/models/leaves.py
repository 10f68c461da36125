"""The leaves of a model that is not trained yet, for `zero-jax inspect`: paths, shapes, names on the hub, adapters."""

from __future__ import annotations

import argparse
import dataclasses
import math

import jax

from zero_jax.cli.models.adapters import choose_lora
from zero_jax.cli.models.presets import init_function, model_name, preset_config
from zero_jax.core.text_tables import aligned, format_count
from zero_jax.core.tree import key_shape, leaf_names, leaves_by_name
from zero_jax.core.variables import Variables
from zero_jax.models.decoder_config import DecoderConfig
from zero_jax.models.huggingface import hf_config, tensor_names
from zero_jax.pretrained import open_hf


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelLeaf:
    """A leaf of a model."""

    path: str  # its path, as rules of adapters and specs match it
    shape: tuple[int, ...]  # its shape
    # Its tensor in the hub's files, with `{layer}` for the number of a layer; None where it has none
    tensor: str | None
    num_params: int  # its elements
    num_trained: int  # what is trained of it or for it: the elements of its adapters, or its own


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelLeaves:
    """The leaves of a model, in its order; prints as a table."""

    name: str
    leaves: tuple[ModelLeaf, ...]
    has_adapters: bool

    def __str__(self) -> str:
        has_tensors = any(leaf.tensor for leaf in self.leaves)
        rows = [("leaf", "shape", "params", *["trained"] * self.has_adapters, *["in files of the hub"] * has_tensors)]
        for leaf in self.leaves:
            shape = " x ".join(map(str, leaf.shape)) or "scalar"
            trained = [f"{leaf.num_trained:,}" if leaf.num_trained else ""] * self.has_adapters
            rows.append((leaf.path, shape, f"{leaf.num_params:,}", *trained, *[leaf.tensor or ""] * has_tensors))
        total = sum(leaf.num_params for leaf in self.leaves)
        trained = f"{sum(leaf.num_trained for leaf in self.leaves):,} of " if self.has_adapters else ""
        heading = f"{self.name}: {len(self.leaves)} leaves, {trained}{format_count(total)} params"
        return f"{heading}{' are trained' * self.has_adapters}\n{aligned(rows, right=(2, 3) if trained else (2,))}"


def model_leaves(options: argparse.Namespace) -> ModelLeaves:
    """Returns the leaves of the preset or of the hub's folder, and what of them `--lora` and its like train.

    Raises:
      ValueError: no such model, or rules of adapters that do not fit it.
    """
    shape = preset_config(options)
    init_fn = init_function(shape)
    params = jax.eval_shape(init_fn, key_shape())
    tensors: dict[str, str] = {}
    if isinstance(shape, DecoderConfig):
        family = open_hf(options.from_hf).hf_config if options.from_hf is not None else hf_config(shape)
        names = tensor_names(shape, model_type=family["model_type"])
        tensors = {path: name.template for path, name in names.items()}
    chosen = choose_lora(options, shape, params)
    trained: dict[str, int] = {}
    if chosen is not None:
        made: Variables = jax.eval_shape(lambda key: chosen.lora.init(init_fn(key), key), key_shape())
        by_leaf = dict.fromkeys(leaf_names(params), 0)
        for path, x in leaves_by_name(made.params).items():
            by_leaf[path if path in by_leaf else path.rpartition("/")[0]] += x.size
        trained = by_leaf
    leaves = tuple(
        ModelLeaf(
            path=path,
            shape=tuple(x.shape),
            tensor=tensors.get(path),
            num_params=math.prod(x.shape),
            num_trained=trained.get(path, 0),
        )
        for path, x in leaves_by_name(params).items()
    )
    return ModelLeaves(name=model_name(options), leaves=leaves, has_adapters=chosen is not None)
