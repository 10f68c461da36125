"""Promotion of dtypes, floats of 8 bits and fewer included."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp


def promoted(*dtypes: Any) -> Any:
    """Returns the dtype that JAX promotes to.

    JAX promotes floats of 8 bits and fewer to no other dtype. They stand for bfloat16 here, which has all their values.
    """
    if len(set(map(jnp.dtype, dtypes))) == 1:
        return jnp.dtype(dtypes[0])
    is_small = [jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1 for dtype in dtypes]
    wide = (jnp.bfloat16 if small else dtype for dtype, small in zip(dtypes, is_small, strict=True))
    return functools.reduce(jnp.promote_types, wide)
