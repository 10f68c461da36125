"""Fingerprints of arrays: a checksum of each leaf, computed on the devices from shards.

The fingerprint is the sum, modulo 2^32, of a hash of each 32-bit word of an array and the word's index. For a given
index the hash (the finalizer of MurmurHash3) is one-to-one: a change of one word always changes the fingerprint, any
other change with a probability of 1 - 2^-32. The order of the sum does not matter: devices sum their own shards,
however the array is sharded, and a host sums slices.

Checksums of files (zarr3's `crc32c` codec, which orbax 0.12 does not set for values) detect damage on the disk, but not
between the devices and the files, nor a chunk of another save. And checkpoints without them must stay readable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_INDEX_FACTOR = 0x9E3779B9
_FACTORS = (0x85EBCA6B, 0xC2B2AE35)
_SHIFTS = (16, 13, 16)


def fingerprint(x: Array, *, on_cpu: bool = False) -> Array:
    """Returns the fingerprint `uint32[]` of an encoded array, under `jit`; `on_cpu` is for CPU devices."""
    words = _device_words(x)
    index, stride = jnp.uint32(0), 1
    for dim in reversed(range(words.ndim)):
        # Modulo 2^32, in which uint32 counts: arrays may have more words than that.
        index = index + lax.broadcasted_iota(np.uint32, words.shape, dim) * np.uint32(stride % 2**32)
        stride *= words.shape[dim]
    hashes = _hash(words + index * np.uint32(_INDEX_FACTOR))
    if not on_cpu:
        return jnp.sum(hashes, dtype=np.uint32)
    # XLA:CPU computes two sums as it reads the words; for one it makes an array of hashes first, 4 times slower. The
    # two of each shard are gathered, where one is an all-reduce.
    halves = (hashes & np.uint32(0xFFFF), hashes >> np.uint32(16))
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])  # noqa: E731
    low, high = lax.reduce(halves, (np.uint32(0), np.uint32(0)), add, tuple(range(hashes.ndim)))
    return low + (high << np.uint32(16))


def host_fingerprint(x: np.ndarray, index: Sequence[slice] | None = None, shape: Sequence[int] | None = None) -> int:
    """Returns the fingerprint of a host array, or what its slice `index` adds to that of all of it, modulo 2^32."""
    shape = x.shape if shape is None else tuple(shape)
    starts = [part.indices(size)[0] for part, size in zip(index or (), shape, strict=bool(index))] or [0] * x.ndim
    if x.dtype == np.bool_:
        x = x.astype(np.uint8)
    word_bytes = min(x.dtype.itemsize, 4)
    num_words = x.dtype.itemsize // word_bytes
    # A narrow element is a word of its own, as on the devices: two in one word would depend on how dims are sharded.
    words = np.ascontiguousarray(x).reshape(-1).view(f"<u{word_bytes}").astype(np.uint32).reshape(*x.shape, num_words)
    positions, stride = np.arange(num_words, dtype=np.uint32), num_words
    for dim in reversed(range(x.ndim)):
        # In 64 bits, then modulo 2^32: it is the index that devices count in uint32.
        offsets = (np.arange(x.shape[dim], dtype=np.uint64) + np.uint64(starts[dim])) * np.uint64(stride % 2**32)
        positions = positions + offsets.astype(np.uint32).reshape(-1, *[1] * (x.ndim - dim))
        stride *= shape[dim]
    return int(_hash(words + positions * np.uint32(_INDEX_FACTOR)).sum(dtype=np.uint64)) % 2**32


def _hash(x: Any) -> Any:
    x = x ^ (x >> np.uint32(_SHIFTS[0]))
    x = x * np.uint32(_FACTORS[0])
    x = x ^ (x >> np.uint32(_SHIFTS[1]))
    x = x * np.uint32(_FACTORS[1])
    return x ^ (x >> np.uint32(_SHIFTS[2]))


def _device_words(x: Array) -> Array:
    """Returns the bits of an array as `uint32`, with a last dim for the words of an element."""
    if jnp.issubdtype(x.dtype, np.complexfloating):
        # In the order of the host's memory, where an element is its real part and then its imaginary one.
        parts = [_device_words(part) for part in (x.real, x.imag)]
        return jnp.concatenate(parts, axis=-1)
    if x.dtype == np.bool_:
        x = x.astype(np.uint8)
    bits = 8 * x.dtype.itemsize
    words = lax.bitcast_convert_type(x, np.dtype(f"uint{min(bits, 32)}")).astype(np.uint32)
    return words if bits > 32 else words[..., None]
