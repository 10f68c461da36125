"""What a checkpoint's record says of each leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from zero_jax.core.untrusted import mapping, shape, text, whole_number

_PLAIN_BYTES = frozenset({"bool", "int8", "uint8"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedLeaf:
    """What is known of a saved leaf besides its values.

    Attributes:
      shape: global shape, as the train state has it.
      dtype: dtype as the train state has it; `key<threefry2x32>` for PRNG keys of that kind.
      stored_shape: shape in the files.
      stored_dtype: dtype in the files.
      fingerprint: see `zero_jax.checkpoint.fingerprint`.
    """

    shape: tuple[int, ...]
    dtype: str
    stored_shape: tuple[int, ...]
    stored_dtype: str
    fingerprint: int

    @property
    def nbytes(self) -> int:
        """Bytes in memory, in the stored form."""
        return int(np.prod(self.stored_shape, dtype=np.int64)) * jnp.dtype(self.stored_dtype).itemsize

    @property
    def is_key(self) -> bool:
        """Whether the leaf holds PRNG keys."""
        return self.dtype.startswith("key<")


def is_bits(dtype: str) -> bool:
    """Tells whether a dtype is stored as bits."""
    return not dtype.startswith("key<") and jnp.dtype(dtype).itemsize == 1 and dtype not in _PLAIN_BYTES


def leaves_to_json(leaves: Mapping[str, SavedLeaf]) -> dict[str, Any]:
    """Returns what a checkpoint's record says of its leaves."""
    return {name: dataclasses.asdict(leaf) for name, leaf in leaves.items()}


def leaves_from_json(record: Any) -> dict[str, SavedLeaf]:
    """Reads what `leaves_to_json` wrote.

    Raises:
      ValueError: it did not write that; names the leaf.
    """
    leaves = {}
    for name, leaf in mapping(record).items():
        try:
            leaves[name] = _leaf_from_json(leaf)
        except ValueError as error:
            raise ValueError(f"leaf {name!r}: {error}") from error
    return leaves


def _leaf_from_json(record: Any) -> SavedLeaf:
    found = mapping(record, keys={field.name for field in dataclasses.fields(SavedLeaf)})
    leaf = SavedLeaf(
        shape=shape(found["shape"]),
        dtype=text(found["dtype"]),
        stored_shape=shape(found["stored_shape"]),
        stored_dtype=text(found["stored_dtype"]),
        fingerprint=whole_number(found["fingerprint"], below=2**32),
    )
    if leaf.is_key:
        rest = leaf.stored_shape[len(leaf.shape) :]
        fits = leaf.stored_dtype == "uint32" and leaf.stored_shape == (*leaf.shape, *rest) and len(rest) == 1
    else:
        stored = "uint8" if _is_number(leaf.dtype) and is_bits(leaf.dtype) else leaf.dtype
        fits = _is_number(leaf.dtype) and (leaf.stored_shape, leaf.stored_dtype) == (leaf.shape, stored)
    if not fits:
        given = f"{leaf.stored_dtype}{list(leaf.stored_shape)}"
        raise ValueError(f"{leaf.dtype}{list(leaf.shape)} is never stored as {given}"[:300])
    return leaf


def _is_number(name: str) -> bool:
    """Tells whether a text is the name of a dtype that arrays of JAX have."""
    try:
        dtype = jnp.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        return False
    return dtype.name == name and (dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number))
