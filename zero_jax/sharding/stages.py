"""The stage table: the groups of the train state that each ZeRO stage shards."""

from __future__ import annotations

import numbers
from collections.abc import Mapping

# The groups of the train state that each stage shards over `data` (paper section 5: P_os, P_os+g, P_os+g+p). The paper
# does not cover model state: a loss function uses it like params.
# This table is the only reader of `stage`.
_SHARDED_GROUPS: Mapping[int, frozenset[str]] = {
    0: frozenset(),
    1: frozenset({"master", "opt_state"}),
    2: frozenset({"master", "opt_state", "grads"}),
    3: frozenset({"master", "opt_state", "grads", "params", "model_state"}),
}

# What a secondary shard (ZeRO++ hpZ, section 4.2) is of: what is gathered for its use is sharded over fast axes only.
SECONDARY_GROUPS = frozenset({"params", "model_state"})


def sharded_groups(stage: int) -> frozenset[str]:
    """Returns which of `params`, `master`, `grads`, `opt_state`, `model_state` a stage shards over `data`.

    Raises:
      ValueError: there is no such stage.
    """
    if isinstance(stage, bool) or not isinstance(stage, numbers.Integral) or stage not in _SHARDED_GROUPS:
        raise ValueError(f"unknown ZeRO stage {repr(stage)[:60]}: choose one of {', '.join(map(str, _SHARDED_GROUPS))}")
    return _SHARDED_GROUPS[int(stage)]
