"""The families of the Hugging Face hub: keys of `config.json`, what missing ones mean, names of tensors.

They are the table `hub_families.toml`, which says what its columns are.
"""

import dataclasses
import importlib.resources
import tomllib
import typing
from collections.abc import Mapping
from typing import Any


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
