"""Widening casts of params, put off until the param is gathered: narrow bytes are cheaper to move.

What only moves elements commutes with a cast. So a cast stays pending (`Lazy.cast`) through slices, transposes and
lookups, up to the first operation that computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from zero_jax.transforms.gather.deferred import Lazy, Value

_MOVES = frozenset("broadcast_in_dim concatenate reshape rev slice split squeeze stack transpose unstack".split())
_MOVES_BY_INDEX = frozenset({"dynamic_slice", "gather"})


def put_off(eqn: Any, values: Sequence[Lazy | Value]) -> Lazy | None:
    """Returns the result of a widening cast of what is not gathered yet, with the cast pending, or None."""
    value = values[0]
    if eqn.primitive.name != "convert_element_type" or not isinstance(value, Lazy) or value.dims is None:
        return None
    narrow, wide = value.aval.dtype, eqn.outvars[0].aval.dtype
    if narrow == wide:
        return dataclasses.replace(value, cast=None)  # there and back again
    used = value.cast or narrow
    exact = jnp.promote_types(used, wide) == wide and all(jnp.issubdtype(d, jnp.floating) for d in (narrow, wide))
    return dataclasses.replace(value, cast=wide) if exact else None


def pending(eqn: Any, values: Sequence[Lazy | Value]) -> tuple[bool, Any]:
    """Tells whether an equation may come before the casts that are pending on its inputs, and which these are.

    Returns:
      `(True, None)` where none is pending.
    """
    casts = {value.cast for value in values if isinstance(value, Lazy)}
    if casts == {None}:
        return True, None
    moved = values[:1] if eqn.primitive.name in _MOVES_BY_INDEX else values
    moves = eqn.primitive.name in _MOVES | _MOVES_BY_INDEX and all(isinstance(value, Lazy) for value in moved)
    return (True, casts.pop()) if moves and len(casts) == 1 else (False, None)
