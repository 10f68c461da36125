"""The configurations that the ZeRO paper measures, C1 to C5 of its Table 3, as `ZeroConfig`s."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from zero_jax.analysis.paper import CONFIGS
from zero_jax.training import ZeroConfig

# The paper gives no size for its buffers.
_BUFFER_BYTES = 64 << 20

# What each of the paper's words switches on. M_D needs no switch: every step donates its state, and XLA lays out a
# program's memory before it runs.
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "P_os": {"stage": 1},
    "P_os+g": {"stage": 2},
    "P_os+g+p": {"stage": 3},
    "C_B": {"combine_bytes": _BUFFER_BYTES},
    "M_D": {},
    "P_a": {"remat": "full_sharded"},
    "P_a+cpu": {"remat": "full_offloaded"},
}


def _config(words: tuple[str, ...]) -> ZeroConfig:
    fields: dict[str, Any] = {"precision": "bf16", "remat": "full"}
    for word in words:
        fields |= _FIELDS[word]
    return ZeroConfig(**fields)


# All rematerialize every block and train in bfloat16, where the paper trains in float16. The mesh and the model's own
# sharding are added with `dataclasses.replace(PAPER_CONFIGS["C4"], param_specs=...)`.
PAPER_CONFIGS: Mapping[str, ZeroConfig] = types.MappingProxyType(
    {name: _config(words) for name, words in CONFIGS.items()}
)
