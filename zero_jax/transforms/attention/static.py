"""Values of a jaxpr that do not depend on its inputs: numbers, ranges, and masks made of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from zero_jax.core import jaxprs

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
        except (TypeError, ValueError, ArithmeticError, IndexError, MemoryError, RuntimeError):
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
    """Returns the result of an equation on known operands; None where that is not computed."""
    if len(eqn.outvars) != 1 or eqn.effects or jaxprs.inner_jaxprs(eqn):
        return None
    name, aval = eqn.primitive.name, eqn.outvars[0].aval

    def make() -> np.ndarray | None:
        arrays: list[np.ndarray] = []
        for operand in operands:
            if operand.array is None:
                return None
            arrays.append(operand.array)
        if name in _ELEMENTWISE:
            arrays = [without_broadcasts(array) for array in arrays]
            if math.prod(np.broadcast_shapes(*(array.shape for array in arrays))) > MAX_ELEMENTS:
                return None
        elif name not in _VIEWS and max(math.prod(aval.shape), *(array.size for array in arrays)) > MAX_ELEMENTS:
            return None
        rule = _ELEMENTWISE.get(name) or _VIEWS.get(name)
        with np.errstate(all="ignore"):
            result = np.asarray(rule(eqn.params, *arrays) if rule else _by_jax(eqn, arrays)).astype(
                aval.dtype, copy=False
            )
        return result if result.shape == aval.shape else np.broadcast_to(result, aval.shape)

    return Known(aval.shape, make)


def evaluated(eqn: Any, numbers: Sequence[Any]) -> Any:
    """Returns an elementwise equation on numbers in place of arrays; None where that is not known."""
    rule = _ELEMENTWISE.get(eqn.primitive.name)
    if rule is None:
        return None
    with np.errstate(all="ignore"):
        return np.asarray(rule(eqn.params, *map(np.asarray, numbers))).astype(eqn.outvars[0].aval.dtype)[()]


def _by_jax(eqn: Any, arrays: Sequence[np.ndarray]) -> Any:
    """Evaluates an equation by JAX while something else is traced."""
    with jax.ensure_compile_time_eval():
        return jaxprs.bind(eqn, [jax.numpy.asarray(array) for array in arrays])[0]


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
    "transpose": lambda params, x: x.transpose(params["permutation"]),
    "squeeze": lambda params, x: x.squeeze(tuple(params["dimensions"])),
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    **dict.fromkeys(("copy", "copy_p", "stop_gradient", "sharding_constraint", "name"), _plain(lambda x: x)),
}
