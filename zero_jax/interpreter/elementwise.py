"""Operations of one element each, by opcode: XLA's definitions in NumPy."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping

import numpy as np

from zero_jax.interpreter.values import convert, is_small_float, widened

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divides; integers round towards zero, and by zero give -1 (all bits set)."""
    if a.dtype.kind not in "iu":
        return a / b
    safe = np.where(b == 0, 1, b)
    rest = np.fmod(a, safe)  # of the sign of `a`; NumPy's `//` rounds down
    return np.where(b == 0, np.array(-1).astype(a.dtype), (a - rest) // safe).astype(a.dtype)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind not in "iu":
        return np.fmod(a, b)
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b)))


def _power(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind not in "iu":
        return np.power(a, b)
    return np.where(b < 0, np.where(abs(a) == 1, np.where(b % 2 == 0, 1, a), 0), np.power(a, np.maximum(b, 0)))


def _shift(shift: np.ufunc, kind: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Shifts the bits of integers, taken as signed (`i`) or not (`u`); by too many, all of them."""
    bits, last = a.view(f"{kind}{a.dtype.itemsize}"), a.dtype.itemsize * 8 - 1
    # C, and so NumPy, does not define a shift by more bits than there are; XLA fills with zeros, or with the sign.
    inside = (b >= 0) & (b <= last)
    shifted = shift(bits, np.where(inside, b, last).astype(bits.dtype))
    return (shifted if kind == "i" else np.where(inside, shifted, 0).astype(bits.dtype)).view(a.dtype)


def _leading_zeros(x: np.ndarray) -> np.ndarray:
    unsigned = x.view(f"u{x.dtype.itemsize}")
    count = np.full(x.shape, x.dtype.itemsize * 8, x.dtype)
    for bit in range(x.dtype.itemsize * 8):
        count = np.where(unsigned >> np.array(bit, unsigned.dtype) != 0, x.dtype.itemsize * 8 - 1 - bit, count)
    return count.astype(x.dtype)


def _select(which: np.ndarray, yes: np.ndarray, no: np.ndarray) -> np.ndarray:
    scalar = (...,) + (None,) * (max(yes.ndim, no.ndim) - which.ndim)  # one condition for all elements
    return np.where(which[scalar], yes, no)


ELEMENTWISE: Mapping[str, Callable[..., np.ndarray]] = {
    "abs": np.abs, "add": np.add, "and": np.bitwise_and, "atan2": np.arctan2, "cbrt": np.cbrt, "ceil": np.ceil,
    "complex": lambda real, imag: real + 1j * imag, "cosine": np.cos, "count-leading-zeros": _leading_zeros,
    "divide": _quotient, "erf": _erf, "exponential": np.exp, "exponential-minus-one": np.expm1, "floor": np.floor,
    "imag": np.imag, "is-finite": np.isfinite, "log": np.log, "log-plus-one": np.log1p,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "maximum": np.maximum, "minimum": np.minimum, "multiply": np.multiply, "negate": np.negative, "not": np.invert,
    "or": np.bitwise_or, "power": _power, "real": np.real, "remainder": _remainder,
    "popcnt": lambda x: np.bitwise_count(x.view(f"u{x.dtype.itemsize}")),  # NumPy counts the bits of a value's size
    "round-nearest-afz": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x), "round-nearest-even": np.rint,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "select": _select, "shift-left": functools.partial(_shift, np.left_shift, "u"),
    "shift-right-arithmetic": functools.partial(_shift, np.right_shift, "i"),
    "shift-right-logical": functools.partial(_shift, np.right_shift, "u"), "sine": np.sin, "sqrt": np.sqrt,
    "sign": lambda x: x / np.where(x == 0, 1, abs(x)) if x.dtype.kind == "c" else np.sign(x),
    "subtract": np.subtract, "tan": np.tan, "tanh": np.tanh, "xor": np.bitwise_xor, "acos": np.arccos,
    "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh, "atanh": np.arctanh, "cosh": np.cosh, "sinh": np.sinh,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, _like(low, x)), _like(high, x)),
}  # fmt: skip
COMPARISONS: Mapping[str, Callable[..., np.ndarray]] = {
    "EQ": operator.eq, "NE": operator.ne, "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge
}  # fmt: skip
OF_BOOLEANS: Mapping[str, Callable[..., np.ndarray]] = {
    "add": np.logical_or, "multiply": np.logical_and, "maximum": np.logical_or, "minimum": np.logical_and
}  # fmt: skip


def _like(bound: np.ndarray, x: np.ndarray) -> np.ndarray:
    return bound[(...,) + (None,) * (x.ndim - bound.ndim)]


def elementwise(opcode: str, operands: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Applies one of `ELEMENTWISE` to arrays `[devices, *dims]` of any dtypes, in float32 at least, and rounds once."""
    function = ELEMENTWISE[opcode]
    if opcode == "select":
        return np.asarray(function(operands[0], *(convert(x, dtype) for x in operands[1:])))
    if dtype.kind == "b" and operands[0].dtype.kind == "b":
        return OF_BOOLEANS.get(opcode, function)(*operands)
    # Programs may mix dtypes: each operand is converted to that of the result.
    if len({x.dtype for x in operands}) > 1 and opcode != "complex":
        operands = [convert(x, dtype) for x in operands]
    small = is_small_float(operands[0].dtype) or operands[0].dtype.kind == "V"
    result = np.asarray(function(*(widened(x) if small else x for x in operands)))
    return convert(result, dtype)


def compare(direction: str, kind: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compares two arrays; `TOTALORDER` orders floats by their bits, -NaN first and NaN last."""
    if a.dtype != b.dtype:
        dtype = np.result_type(widened(a), widened(b))
        a, b = convert(a, dtype), convert(b, dtype)
    a, b = (_ordered(x) if kind == "TOTALORDER" and x.dtype.kind in "fV" else widened(x) for x in (a, b))
    return COMPARISONS[direction](a, b)


def _ordered(x: np.ndarray) -> np.ndarray:
    """Returns integers in the total order of floats."""
    bits = x.view(f"i{x.dtype.itemsize}")
    # The bits of negative floats are in descending order.
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


def reduce_precision(x: np.ndarray, exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """Rounds floats to a number of bits of exponent and mantissa, to nearest, ties to even."""
    wide = widened(x).astype(np.float64)
    mantissa, exponent = np.frexp(wide)  # of [0.5, 1): its first bit is the one that no format stores
    rounded = np.ldexp(np.rint(np.ldexp(mantissa, mantissa_bits + 1)), exponent - mantissa_bits - 1)
    largest = 2.0 ** (2 ** (exponent_bits - 1) - 1) * (2 - 2.0**-mantissa_bits)
    smallest = 2.0 ** (2 - 2 ** (exponent_bits - 1))
    rounded = np.where(np.abs(rounded) > largest, np.copysign(np.inf, rounded), rounded)
    rounded = np.where(np.abs(rounded) < smallest, np.copysign(0.0, rounded), rounded)
    return convert(np.where(np.isfinite(wide), rounded, wide).astype(widened(x).dtype), x.dtype)
