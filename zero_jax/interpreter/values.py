"""The values of a program: NumPy arrays with the devices in front, their dtypes, literals and memory orders."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import ml_dtypes  # noqa: F401 - NumPy then knows its dtypes by name
import numpy as np

from zero_jax.hlo import Array, minor_to_major, parse_shape, tile_sizes

Value = Any  # np.ndarray [devices or 1, *dims], or a tuple of values

_DTYPES = {
    **{"token": "bool", "opaque": "bool"},  # whose value nothing reads
    **{"pred": "bool", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"},
    **{"c64": "complex64", "c128": "complex128"},
    **{f"s{bits}": f"int{bits}" for bits in (2, 4, 8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (2, 4, 8, 16, 32, 64)},
    **{f"f8{kind}": f"float8_{kind}" for kind in "e3m4 e4m3 e4m3fn e4m3b11fnuz e4m3fnuz e5m2 e5m2fnuz".split()},
}
_COMMENT = re.compile(r"/\*.*?\*/")
_UNDEFINED = 0x5A  # bytes of memory that nothing was written to yet, where a dtype has no NaN


class NotInterpretable(Exception):
    """The program has something that the interpreter does not know: a kernel, or an operation of another release."""


def dtype_of(name: str) -> np.dtype:
    """Returns the NumPy dtype of an HLO dtype; raises `NotInterpretable` if it is not known."""
    if name not in _DTYPES:
        raise NotInterpretable(f"arrays of dtype {name!r}")
    return np.dtype(_DTYPES[name])


def array_shape(text: str) -> Array:
    """Reads the shape of one array; raises `NotInterpretable` for a tuple."""
    shape = parse_shape(text)
    if not isinstance(shape, Array):
        raise NotInterpretable(f"a tuple {text!r} where an array is expected")
    return shape


def is_small_float(dtype: np.dtype) -> bool:
    """Whether arithmetic in a dtype is computed in float32 and rounded: bfloat16, float16 and the float8s."""
    return dtype == np.float16 or (dtype.kind == "V" and "int" not in dtype.name)


def widened(x: np.ndarray) -> np.ndarray:
    """Returns an array in a dtype that NumPy computes in: float32 or int32 for the smaller ones of ml_dtypes."""
    if is_small_float(x.dtype):
        return x.astype(np.float32)
    return x.astype(np.int32) if x.dtype.kind == "V" else x


def convert(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns an array in another dtype as XLA converts: floats to integers saturate, NaN is 0."""
    if x.dtype == dtype:
        return x
    x = widened(x)
    if dtype.kind == "b":
        return x != 0
    if dtype.kind in "iu" and x.dtype.kind == "f":
        info = np.iinfo(dtype)
        # float64 has all 32-bit integers; the largest of 64 bits are put in afterwards.
        truncated = np.where(np.isnan(x), 0, np.trunc(x.astype(np.float64)))
        inside = np.clip(truncated, info.min, info.max)
        result = np.where(inside >= float(info.max), 0, inside).astype(dtype)
        return np.where(truncated >= float(info.max), dtype.type(info.max), result)
    if x.dtype.kind == "c" and dtype.kind != "c":
        x = np.real(x)
    if x.dtype.kind in "iub" and dtype.kind == "V":
        x = x.astype(np.float32 if "int" not in dtype.name else np.int32)
    return x.astype(dtype)


def undefined(shape: Array, num_devices: int) -> np.ndarray:
    """Returns what memory holds before it is written to: NaN, or odd integers."""
    dtype = dtype_of(shape.dtype)
    has_nan = dtype.kind in "fcV" and "int" not in dtype.name
    return np.full((num_devices, *shape.dims), np.nan if has_nan else np.int32(_UNDEFINED)).astype(dtype)


def literal(text: str, shape_text: str) -> np.ndarray:
    """Reads a constant such as 1.5, {1, 2} or {{true}}; `NotInterpretable` for {...}."""
    shape = array_shape(shape_text)
    if "..." in text:
        raise NotInterpretable("a constant that the program's text leaves out: pass the text with all constants")
    dtype = dtype_of(shape.dtype)
    words = re.sub(r"[{},]", " ", _COMMENT.sub("", text)).split()
    if dtype.kind == "c":  # (1, -2)
        parts = [float(word.strip("()")) for word in words]
        numbers = np.array([complex(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)])
    elif dtype.kind == "b":
        numbers = np.array([word in ("true", "1") for word in words])
    elif "int" in dtype.name:
        numbers = np.array([int(word) for word in words], object)  # integers of 64 bits, signed or not
    else:
        numbers = np.array([float(word) for word in words])
    return numbers.astype(dtype).reshape(1, *shape.dims)


def bitcast(x: np.ndarray, source: Array, target: Array) -> np.ndarray:
    """Returns the array that the memory of another holds, read with another shape, layout or dtype."""
    dtype = dtype_of(target.dtype)
    if {x.dtype.kind, dtype.kind} in ({"b", "u"}, {"b", "i"}):  # XLA:TPU holds a boolean scalar in as many bits
        x = convert(x, dtype)
    if dtype.itemsize != x.dtype.itemsize:
        raise NotInterpretable(f"a bitcast of {source} to {target}, whose elements have another size")
    if dtype != x.dtype:
        x = x.view(dtype)
    places = _moved(source.dims, source.layout, target.dims, target.layout)
    flat = x.reshape(x.shape[0], -1)
    return (flat if places is None else flat[:, places]).reshape(-1, *target.dims)


@functools.lru_cache(maxsize=4096)
def _moved(dims: tuple[int, ...], layout: str, new_dims: tuple[int, ...], new_layout: str) -> np.ndarray | None:
    """Returns, for each element of a bitcast's result in order, which element of its operand it is; None for the same.

    Elements are at equal places in memory; a smaller result leaves out what is behind it. Where tiles are padded
    otherwise, so that this is not known, the order of the dims from major to minor decides, as in XLA's own definition
    of a bitcast.
    """
    old, new = _memory_order(dims, layout, tiled=True), _memory_order(new_dims, new_layout, tiled=True)
    length = min(len(old), len(new))
    holds = new[:length] >= 0
    if (new[length:] >= 0).any() or (old[:length][holds] < 0).any():
        if math.prod(dims) != math.prod(new_dims):
            raise NotInterpretable(f"a bitcast of {dims} to {new_dims} that reads padding")
        old, new = _memory_order(dims, layout, tiled=False), _memory_order(new_dims, new_layout, tiled=False)
        length, holds = len(old), np.ones(len(old), bool)
    places = np.empty(math.prod(new_dims), np.int64)
    places[new[:length][holds]] = old[:length][holds]  # by the place in memory that both have
    is_same = len(places) == math.prod(dims) and (places == np.arange(len(places))).all()
    return None if is_same else places


@functools.lru_cache(maxsize=4096)
def _memory_order(dims: tuple[int, ...], layout: str, *, tiled: bool) -> np.ndarray:
    """Returns which element each place in memory holds, -1 for padding."""
    elements = np.arange(math.prod(dims)).reshape(dims)
    order = minor_to_major(layout, len(dims))
    elements = elements.transpose(tuple(reversed(order)))
    for tile in tile_sizes(layout) if tiled else ():
        if 0 in tile:
            raise NotInterpretable(f"the layout {layout!r}")
        elements = _cut(elements, tile)
    return elements.reshape(-1)


def _cut(elements: np.ndarray, tile: Sequence[int]) -> np.ndarray:
    """Cuts the minor dims of an array into tiles: [m, n] becomes [m / a, n / b, a, b], padded by -1."""
    elements = elements.reshape((1,) * (len(tile) - elements.ndim) + elements.shape)
    first = elements.ndim - len(tile)
    padding = [(0, 0)] * first + [(0, -size % by) for size, by in zip(elements.shape[first:], tile, strict=True)]
    elements = np.pad(elements, padding, constant_values=-1)
    sizes = [part for size, by in zip(elements.shape[first:], tile, strict=True) for part in (size // by, by)]
    split = elements.reshape(*elements.shape[:first], *sizes)
    outer, inner = range(first, first + 2 * len(tile), 2), range(first + 1, first + 2 * len(tile), 2)
    return split.transpose(*range(first), *outer, *inner)


def every_device(x: np.ndarray, num_devices: int) -> np.ndarray:
    """Returns a value with an entry for each device, without copying."""
    return x if len(x) == num_devices else np.broadcast_to(x, (num_devices, *x.shape[1:]))


def spread(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns arrays with the same number of devices in front, without copying."""
    num_devices = max(map(len, values))
    return [every_device(x, num_devices) for x in values]
