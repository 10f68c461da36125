"""The families of the Hugging Face hub: keys of `config.json`, what missing ones mean, names of tensors.

They are the table `hub_families.toml`, which says what its columns are.
"""

import dataclasses
import importlib.resources
import tomllib
import typing
from collections.abc import Mapping
from typing import Any

from zero_jax.models.decoder_config import DecoderConfig
from zero_jax.models.tensor_name import TensorName


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A `model_type` of the hub; the fields are the columns of the table."""

    architecture: str
    keys: Mapping[str, str]
    own: Mapping[str, str]
    aliases: Mapping[str, str]
    defaults: Mapping[str, Any]
    must_be: Mapping[str, tuple[Any, ...]]  # the values that will do, null among them; an empty tuple: any
    settings: Mapping[str, Any]
    layer: str
    tensors: Mapping[str, str]
    experts: Mapping[str, str]
    others: Mapping[str, str]
    are_transposed: bool = True
    fused: str | None = None


_TABLE = tomllib.loads(importlib.resources.files("zero_jax.models").joinpath("hub_families.toml").read_text("utf-8"))
_MAPPINGS = [field.name for field in dataclasses.fields(Family) if typing.get_origin(field.type) is Mapping]


def _columns(name: str) -> dict[str, Any]:
    """Returns the columns of a family, those of the one that it is like included."""
    row = dict(_TABLE[name])
    base = _columns(row.pop("like")) if "like" in row else {column: {} for column in _MAPPINGS}
    for column, value in row.items():
        if column in _MAPPINGS:
            # A key of the table may be several names, which have the same value.
            base[column] = base[column] | {name: x for names, x in value.items() for name in names.split()}
        else:
            base[column] = value
    return base


def _allowed(values: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    # TOML has no null, which a config may have for any key.
    return {key: () if value == "any" else (*value, None) for key, value in values.items()}


def _family(name: str) -> Family:
    columns = _columns(name)
    return Family(**{**columns, "must_be": _allowed(columns["must_be"])})


# Keys by our names of the same: sizes, which every config has, and settings.
SIZES: dict[str, str] = _TABLE["every"]["sizes"]
SETTINGS: dict[str, str] = _TABLE["every"]["keys"]
DEFAULTS: dict[str, Any] = _TABLE["every"]["defaults"]
MUST_BE = _allowed(_TABLE["every"]["must_be"])
FAMILIES = {name: _family(name) for name in _TABLE if "architecture" in _TABLE[name]}


def tensor_names(config: DecoderConfig, *, model_type: str) -> dict[str, TensorName]:
    """Returns the name of the tensor (or tensors, one a layer and expert) of every param, by the param's path."""
    family = FAMILIES[model_type]
    rest, parts = {**family.tensors, **_own_tensors(config, model_type)}, _parts(config, family.fused)
    names = {}
    for path, shape in config.shapes.items():
        stack, _, name = path.rpartition("/")
        of_stack = rest | dict(family.experts) if stack != "dense_blocks" and config.num_experts else rest
        templates = {name: family.layer + each for name, each in of_stack.items()} if stack else family.others
        weight = name.removesuffix("_bias")
        template = templates[name] if name in templates else templates[weight].removesuffix("weight") + "bias"
        # A matrix of a stack is `[layers, in, out]`, of experts `[layers, experts, in, out]`.
        is_matrix = bool(stack) and len(shape) > 2
        is_transposed = name == "head" or (is_matrix and family.are_transposed)
        # The hub counts the layers of all stacks in one row, those on top last.
        first = {"blocks": config.num_dense_layers, "extra_blocks": config.num_layers}.get(stack, 0)
        names[path] = TensorName(template, is_transposed, part=parts.get(weight) if stack else None, first=first)
    return names


def _own_tensors(config: DecoderConfig, model_type: str) -> dict[str, str]:
    """Returns the names of Falcon's norms, which depend on their number, and of DeepSeek's queries."""
    if model_type == "deepseek_v3" and config.latent is not None and config.latent.query_rank is not None:
        return {"query": "self_attn.q_b_proj.weight"}
    if model_type != "falcon":
        return {}
    if config.parallel and not config.shared_norm:
        return {"attention_norm": "ln_attn.weight", "mlp_norm": "ln_mlp.weight"}
    return {"attention_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight"}


def _parts(config: DecoderConfig, fused: str | None) -> dict[str, tuple[int, int, int]]:
    """Returns which features of a tensor that query, key and value share are whose, as `TensorName.part`."""
    latent = config.latent
    if latent is not None:
        keys, narrow = config.head_dim - latent.rotary_dim, latent.key_rank
        both, vector = keys + latent.value_dim, narrow + latent.rotary_dim
        # One tensor has keys and values head by head, another the latent vector and the keys that are turned.
        parts = {"key": (0, keys, both), "value": (keys, both, both)}
        return parts | {"latent": (0, narrow, vector), "key_turned": (narrow, vector, vector)}
    if fused is None:
        return {}
    num_groups = config.num_kv_heads if fused == "groups" else 1
    queries = config.num_heads // num_groups * config.head_dim
    keys = config.num_kv_heads // num_groups * config.head_dim
    ends = {"query": (0, queries), "key": (queries, queries + keys), "value": (queries + keys, queries + 2 * keys)}
    return {name: (*each, queries + 2 * keys) for name, each in ends.items()}
