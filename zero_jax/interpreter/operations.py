"""A rule for each opcode without control flow: from an instruction and the values of its operands to its own."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from zero_jax.hlo import Array, Instruction, integers
from zero_jax.interpreter import indexing
from zero_jax.interpreter.elementwise import ELEMENTWISE, compare, elementwise, reduce_precision
from zero_jax.interpreter.products import convolution, dot
from zero_jax.interpreter.values import (
    NotInterpretable,
    Value,
    array_shape,
    bitcast,
    convert,
    dtype_of,
    literal,
    spread,
    undefined,
)

# From an instruction, and the values of its operands, to its own.
Rule = Callable[["Context", list[Value]], Value]
# Custom calls whose result is their first operand.
_IDENTITY_CALLS = frozenset({
    "GatherScatterIndicesBitpacked", "AssumeGatherIndicesInBound", "Sharding", "SPMDFullToShardShape",
    "SPMDShardToFullShape", "MoveToHost", "MoveToDevice", "annotate_device_placement", "PinToDevice",
    "PrepareAsyncCallDone", "LayoutConstraint", "ShapeBarrier", "ZeroCrop",
})  # fmt: skip
# Custom calls of one matrix `[..., n, n]` or of many.
_MATRIX_CALLS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "Cholesky": np.linalg.cholesky,
    "InvertDiagBlocksLowerTriangular": lambda x: np.linalg.inv(np.tril(x)),
    "InvertDiagBlocksUpperTriangular": lambda x: np.linalg.inv(np.triu(x)),
}


@dataclasses.dataclass(frozen=True)
class Context:
    """An instruction with its attributes and the instructions of its operands."""

    instruction: Instruction
    operands: Sequence[Instruction]
    num_devices: int

    @functools.cached_property
    def attributes(self) -> dict[str, str]:
        """The attributes by name, without their braces' meaning."""
        return read_attributes(self.instruction)

    @functools.cached_property
    def dimensions(self) -> list[int]:
        """The attribute `dimensions`; none where it is left out."""
        return integers(self.attributes.get("dimensions", ""))

    @functools.cached_property
    def shape(self) -> Array:
        """The shape of the result, one array."""
        return array_shape(self.instruction.shape)

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """The dtype of the result."""
        return dtype_of(self.shape.dtype)

    @functools.cached_property
    def literal(self) -> np.ndarray:
        """The value of a constant."""
        return literal(self.instruction.operands_text, self.instruction.shape)

    @property
    def is_tuple(self) -> bool:
        """Whether the result is a tuple."""
        return self.instruction.shape.startswith("(")

    @functools.cached_property
    def called(self) -> dict[str, str]:
        """The computations that it calls, by the attributes that name them."""
        return self.instruction.called

    def result(self, values: Sequence[Value]) -> Value:
        """Returns the values of a tuple, or that of the one array."""
        return tuple(values) if self.is_tuple else values[0]

    def operand_shape(self, number: int = 0) -> Array:
        """The shape of an operand, one array."""
        return array_shape(self.operands[number].shape)


def read_attributes(instruction: Instruction) -> dict[str, str]:
    """Returns the attributes of an instruction by name: what follows its operands."""
    text, start = instruction.line, instruction.attributes_at
    parts, depth, quoted = [], 0, False
    for place in range(start, len(text)):  # cut at the commas that are in no bracket and no string
        letter = text[place]
        if letter == '"' and text[place - 1] != "\\":
            quoted = not quoted
        elif not quoted and letter in "{([":
            depth += 1
        elif not quoted and letter in "})]":
            depth -= 1
        elif letter == "," and depth == 0 and not quoted:
            parts.append(text[start:place])
            start = place + 1
    parts.append(text[start:])
    pairs = (part.strip().partition("=") for part in parts)
    return {name: value.strip() for name, separator, value in pairs if separator}


def rule_of(instruction: Instruction) -> Rule:
    """Returns the rule of an instruction by its opcode; raises `NotInterpretable` if there is none."""
    opcode = instruction.opcode
    if opcode in ELEMENTWISE:
        return lambda context, xs: elementwise(opcode, xs, context.dtype)
    if opcode in _RULES:
        return _RULES[opcode]
    base, _, phase = opcode.rpartition("-")
    if phase == "done" and base in _RULES:
        return lambda _, xs: xs[0][1]
    if phase == "start" and base in _RULES:
        return functools.partial(_started, base)
    raise NotInterpretable(f"the operation {opcode!r}: {instruction.line.strip()[:400]}")


def _started(opcode: str, context: Context, xs: list[Value]) -> Value:
    """The start of an asynchronous operation, which yields its operands and its result."""
    array = context.instruction.arrays[len(context.operands)]  # the result comes behind the operands
    shape = f"{array}{{{array.layout}}}"
    of_result = dataclasses.replace(context, instruction=context.instruction._replace(opcode=opcode, shape=shape))
    return tuple(xs), _RULES[opcode](of_result, xs)


def _iota(context: Context, _: list[Value]) -> Value:
    along = int(context.attributes.get("iota_dimension", 0))
    places = np.indices((1, *context.shape.dims, 1), sparse=True)[1 + along]  # of a scalar 0
    return np.broadcast_to(convert(places[..., 0], context.dtype), (1, *context.shape.dims))


def _bitcast_convert(context: Context, xs: list[Value]) -> Value:
    dtype, source = context.dtype, dtype_of(context.operand_shape().dtype)
    if (dtype.kind == "V" and "int" in dtype.name) or (source.kind == "V" and "int" in source.name):
        raise NotInterpretable("bitcast-convert of integers of less than 8 bits")
    x = np.ascontiguousarray(xs[0])
    x = x[..., None] if dtype.itemsize < source.itemsize else x
    return x.view(dtype).reshape(len(x), *context.shape.dims)


def _broadcast(context: Context, xs: list[Value]) -> Value:
    (x,), dims, into = xs, context.shape.dims, context.dimensions
    sizes = dict(zip(into, x.shape[1:], strict=True))
    x = x.transpose(0, *(1 + place for place in np.argsort(into))) if into else x
    return np.broadcast_to(x.reshape(len(x), *(sizes.get(dim, 1) for dim in range(len(dims)))), (len(x), *dims))


def _slice(context: Context, xs: list[Value]) -> Value:
    numbers = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", context.attributes["slice"])
    return xs[0][(slice(None), *(slice(int(first), int(last), int(step or 1)) for first, last, step in numbers))]


def _pad(context: Context, xs: list[Value]) -> Value:
    padding, fields = [], context.attributes.get("padding", "") if context.shape.dims else ""
    for field in filter(None, fields.split("x")):
        low, high, *gap = map(int, field.split("_"))
        padding.append((low, high, *(gap or [0])))
    return indexing.pad(xs[0], convert(xs[1], xs[0].dtype), padding)


def _fft(context: Context, xs: list[Value]) -> Value:
    kind, length = context.attributes["fft_type"], integers(context.attributes["fft_length"])
    transform = {"FFT": np.fft.fftn, "IFFT": np.fft.ifftn, "RFFT": np.fft.rfftn, "IRFFT": np.fft.irfftn}[kind]
    return transform(xs[0], s=length, axes=tuple(range(-len(length), 0))).astype(context.dtype)


def _custom_call(context: Context, xs: list[Value]) -> Value:
    target = context.attributes.get("custom_call_target", "").strip('"')
    parts, devices = context.instruction.arrays, context.num_devices
    if target == "AllocateBuffer":
        return context.result([undefined(part, devices) for part in parts])
    if target == "AsyncCollectiveStart":
        return xs[1], xs[0], *(undefined(part, devices) for part in parts[2:])
    if target == "AsyncCollectiveDone":
        return xs[2]
    if target == "PrepareAsyncCallStart":  # nothing reads its value
        return np.zeros(1, np.uint32)
    if target == "TopK":  # of equal ones the first
        order = np.argsort(-convert(xs[0], np.dtype(np.float64)), axis=-1, kind="stable")[..., : parts[0].dims[-1]]
        return np.take_along_axis(xs[0], order, -1), order.astype(np.int32)
    if target in _MATRIX_CALLS:
        return _MATRIX_CALLS[target](xs[0])
    if target in _IDENTITY_CALLS:
        # Of another shape it is none of the forms that are known.
        is_array = bool(xs) and not context.is_tuple and not isinstance(xs[0], tuple)
        if is_array and str(context.operand_shape()) == str(context.shape):
            return xs[0]
        if target == "PrepareAsyncCallDone":
            return np.zeros(1, np.uint32)
    raise NotInterpretable(f"the custom call {target!r}")


def _same(_: Context, xs: list[Value]) -> Value:
    return xs[0] if len(xs) == 1 else tuple(xs)


_RULES: Mapping[str, Rule] = {
    "add-dependency": lambda c, xs: xs[0],
    "after-all": lambda c, xs: np.zeros(1, bool),
    "bitcast": lambda c, xs: bitcast(xs[0], c.operand_shape(), c.shape),
    "bitcast-convert": _bitcast_convert,
    "broadcast": _broadcast,
    "compare": lambda c, xs: compare(c.attributes["direction"], c.attributes.get("type", ""), *xs),
    "concatenate": lambda c, xs: np.concatenate([convert(x, c.dtype) for x in spread(xs)], 1 + c.dimensions[0]),
    "constant": lambda c, xs: c.literal,
    "convert": lambda c, xs: convert(xs[0], c.dtype),
    "convolution": lambda c, xs: convolution(xs[0], xs[1], c.attributes, c.shape.dims, c.dtype),
    "copy": _same,
    "copy-done": lambda c, xs: xs[0][0],
    "copy-start": lambda c, xs: (xs[0], xs[0], np.zeros(1, np.uint32)),
    "custom-call": _custom_call,
    "domain": lambda c, xs: xs[0],
    "dot": lambda c, xs: dot(xs[0], xs[1], c.attributes, c.dtype),
    "dynamic-slice": lambda c, xs: indexing.dynamic_slice(xs[0], xs[1:], c.shape.dims),
    "dynamic-update-slice": lambda c, xs: indexing.dynamic_update_slice(
        convert(xs[0], c.dtype), convert(xs[1], c.dtype), xs[2:]
    ),
    "fft": _fft,
    "gather": lambda c, xs: indexing.gather(xs[0], xs[1], indexing.gather_windows(c.attributes), len(c.shape.dims)),
    "get-tuple-element": lambda c, xs: xs[0][int(c.attributes["index"])],
    "iota": _iota,
    "opt-barrier": _same,
    "optimization-barrier": _same,
    "pad": _pad,
    "partition-id": lambda c, xs: np.arange(c.num_devices).astype(c.dtype),
    "reduce-precision": lambda c, xs: reduce_precision(
        xs[0], int(c.attributes["exponent_bits"]), int(c.attributes["mantissa_bits"])
    ),
    "replica-id": lambda c, xs: np.zeros(1, c.dtype),
    "reshape": lambda c, xs: xs[0].reshape(len(xs[0]), *c.shape.dims),
    "reverse": lambda c, xs: np.flip(xs[0], tuple(1 + dim for dim in c.dimensions)),
    "slice": _slice,
    "transpose": lambda c, xs: xs[0].transpose(0, *(1 + dim for dim in c.dimensions)),
    "tuple": lambda c, xs: tuple(xs),
}
