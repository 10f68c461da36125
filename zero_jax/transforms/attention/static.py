"""Values of a jaxpr that do not depend on its inputs: numbers, ranges, and masks made of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# Larger arrays are not computed while tracing.
MAX_ELEMENTS = 2**26


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """An array whose values are known.

    Attributes:
      shape: its shape.
      make: computes it, once; a numpy array, which may be a view with strides of 0.
    """

    shape: tuple[int, ...]
    make: Callable[[], np.ndarray | None]

    @functools.cached_property
    def array(self) -> np.ndarray | None:
        """The values; None if they cannot be had."""
        try:
            array = self.make()
        except (TypeError, ValueError, ArithmeticError, IndexError, MemoryError):
            return None
        return None if array is None else np.asarray(array)

    @functools.cached_property
    def scalar(self) -> Any:
        """The number that all values are; None if they differ."""
        array = self.array
        if array is None or not array.size:
            return None
        small = without_broadcasts(array)
        first = small.flat[0]
        return first if small.size == 1 or bool((small == first).all()) else None


def known(value: Any) -> Known:
    """Returns a value that is at hand."""
    return Known(np.shape(value), lambda: np.asarray(value))


def without_broadcasts(array: np.ndarray) -> np.ndarray:
    """Returns an array with size 1 in dims along which it is a view of one value."""
    cut = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)
    return array[cut]


def compute(eqn: Any, operands: Sequence[Known]) -> Known | None:
    """Returns the result of an equation on known operands; None for a primitive without a rule."""
    rule = _RULES.get(eqn.primitive.name)
    if rule is None or len(eqn.outvars) != 1:
        return None
    aval = eqn.outvars[0].aval

    def make() -> np.ndarray | None:
        arrays = [operand.array for operand in operands]
        if any(array is None for array in arrays):
            return None
        if eqn.primitive.name not in _VIEWS:
            size = math.prod(np.broadcast_shapes(*(without_broadcasts(a).shape for a in arrays)))  # pyright: ignore[reportArgumentType]
            if size > MAX_ELEMENTS:
                return None
            arrays = [without_broadcasts(a) for a in arrays] if eqn.primitive.name in _ELEMENTWISE else arrays  # pyright: ignore[reportArgumentType]
        with np.errstate(all="ignore"):
            result = np.asarray(rule(eqn.params, *arrays))
        result = result.astype(aval.dtype, copy=False)
        return result if result.shape == aval.shape else np.broadcast_to(result, aval.shape)

    return Known(aval.shape, make)


def _broadcast(params: Any, x: np.ndarray) -> np.ndarray:
    shape = params["shape"]
    place = [1] * len(shape)
    for i, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        place[i] = size
    return np.broadcast_to(x.reshape(place) if x.ndim else x, shape)


def _slice(params: Any, x: np.ndarray) -> np.ndarray:
    strides = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _dynamic_slice(params: Any, x: np.ndarray, *starts: Any) -> np.ndarray:
    sizes = params["slice_sizes"]
    firsts = [min(max(int(i), 0), n - size) for i, n, size in zip(starts, x.shape, sizes, strict=True)]
    return x[tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))]


def _select(params: Any, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    del params
    return np.where(which, cases[1], cases[0]) if which.dtype == bool else np.choose(which, cases)


def _div(params: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    del params
    return np.trunc(x / y) if np.issubdtype(x.dtype, np.integer) else x / y


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, *arrays: function(*arrays)


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    name: _plain(function)
    for name, function in {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
        "neg": np.negative, "abs": np.abs, "sign": np.sign, "not": np.invert, "and": np.bitwise_and,
        "or": np.bitwise_or, "xor": np.bitwise_xor, "eq": np.equal, "ne": np.not_equal, "lt": np.less,
        "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "rem": np.fmod, "square": np.square,
        "sqrt": np.sqrt, "exp": np.exp, "log": np.log, "pow": np.power, "is_finite": np.isfinite, "floor": np.floor,
        "ceil": np.ceil, "tanh": np.tanh, "rsqrt": lambda x: 1 / np.sqrt(x),
    }.items()
} | {
    "div": _div,
    "select_n": _select,
    "clamp": lambda params, low, x, high: np.minimum(np.maximum(x, low), high),
    "integer_pow": lambda params, x: x ** params["y"] if params["y"] >= 0 else 1 / x ** -params["y"],
    "convert_element_type": lambda params, x: x.astype(params["new_dtype"]),
}  # fmt: skip
_VIEWS: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": lambda params, x: x.reshape(params["new_sizes"]),
    "transpose": lambda params, x: x.transpose(params["permutation"]),
    "squeeze": lambda params, x: x.squeeze(tuple(params["dimensions"])),
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    **dict.fromkeys(("copy", "copy_p", "stop_gradient", "sharding_constraint", "name"), _plain(lambda x: x)),
}
_OTHERS: dict[str, Callable[..., Any]] = {
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
    "reduce_and": lambda params, x: x.all(tuple(params["axes"])),
    "reduce_or": lambda params, x: x.any(tuple(params["axes"])),
    "reduce_max": lambda params, x: x.max(tuple(params["axes"])),
    "reduce_min": lambda params, x: x.min(tuple(params["axes"])),
    "reduce_sum": lambda params, x: x.sum(tuple(params["axes"])),
    "cumsum": lambda params, x: np.flip(np.flip(x, params["axis"]).cumsum(params["axis"]), params["axis"])
    if params["reverse"]
    else x.cumsum(params["axis"]),
}
_RULES = {**_ELEMENTWISE, **_VIEWS, **_OTHERS}
