"""A function for each instruction without control flow, made once from its opcode, attributes and shapes."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from zero_jax.hlo import Array, Instruction, arrays, parse_shape
from zero_jax.interpreter import indexing
from zero_jax.interpreter.elementwise import ELEMENTWISE, compare, elementwise, reduce_precision
from zero_jax.interpreter.indexing import integers
from zero_jax.interpreter.products import convolution, dot
from zero_jax.interpreter.values import (
    NotInterpretable,
    Value,
    array_shape,
    bitcast,
    convert,
    dtype_of,
    literal,
    same_shape,
    spread,
    undefined,
)

Function = Callable[[list[Value]], Value]
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
# Custom calls whose result nothing reads for its value.
_TOKEN_CALLS = frozenset({"PrepareAsyncCallStart"})


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
    def shape(self) -> Array:
        """The shape of the result, one array."""
        return array_shape(self.instruction.shape)

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """The dtype of the result."""
        return dtype_of(self.shape.dtype)

    def operand_shape(self, number: int = 0) -> Array:
        """The shape of an operand, one array."""
        return array_shape(self.operands[number].shape)


def read_attributes(instruction: Instruction) -> dict[str, str]:
    """Returns the attributes of an instruction by name: what follows its operands."""
    text, start = instruction.line, instruction.attributes_at
    parts, depth, quoted = [], 0, False
    for place in range(start, len(text)):
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


def operation(context: Context) -> Function:
    """Returns the function of an instruction, from its operands' values to its own.

    Raises:
      NotInterpretable: The opcode is not known.
    """
    opcode = context.instruction.opcode
    if opcode in ELEMENTWISE:
        dtype = context.dtype
        return lambda operands: elementwise(opcode, operands, dtype)
    if opcode in _OPERATIONS:
        return _OPERATIONS[opcode](context)
    base, _, phase = opcode.rpartition("-")
    if phase == "done" and base in _OPERATIONS:
        return lambda operands: operands[0][1]
    if phase == "start" and base in _OPERATIONS:
        return _started(context, base)
    raise NotInterpretable(f"the operation {opcode!r}")


def _started(context: Context, opcode: str) -> Function:
    """The start of an asynchronous operation, which yields its operands and its result."""
    shape = parse_parts(context.instruction.shape)[len(context.operands)]
    function = operation(
        dataclasses.replace(context, instruction=context.instruction._replace(opcode=opcode, shape=shape))
    )
    return lambda operands: (tuple(operands), function(operands))


def _constant(context: Context) -> Function:
    value = literal(context.instruction.operands_text, context.instruction.shape)
    return lambda _: value


def _iota(context: Context) -> Function:
    dims = context.shape.dims
    along = int(context.attributes.get("iota_dimension", 0))
    row = np.arange(dims[along]) if dims else np.zeros((), int)
    shape = [size if dim == along else 1 for dim, size in enumerate(dims)]
    value = convert(np.broadcast_to(row.reshape(shape), dims), context.dtype)[None]
    return lambda _: value


def _compare(context: Context) -> Function:
    direction, kind = context.attributes["direction"], context.attributes.get("type", "")
    return lambda operands: compare(direction, kind, *operands)


def _convert(context: Context) -> Function:
    dtype = context.dtype
    return lambda operands: convert(operands[0], dtype)


def _bitcast(context: Context) -> Function:
    source, target = context.operand_shape(), context.shape
    return lambda operands: bitcast(operands[0], source, target)


def _bitcast_convert(context: Context) -> Function:
    dims, dtype = context.shape.dims, context.dtype
    source = dtype_of(context.operand_shape().dtype)
    if (dtype.kind == "V" and "int" in dtype.name) or (source.kind == "V" and "int" in source.name):
        raise NotInterpretable("bitcast-convert of integers of less than 8 bits")

    def apply(operands: list[Value]) -> Value:
        x = np.ascontiguousarray(operands[0])
        x = x[..., None] if dtype.itemsize < source.itemsize else x
        return x.view(dtype).reshape(len(x), *dims)

    return apply


def _broadcast(context: Context) -> Function:
    dims, into = context.shape.dims, integers(context.attributes.get("dimensions"))
    sizes = dict(zip(into, context.operand_shape().dims, strict=True))
    shape = [sizes.get(dim, 1) for dim in range(len(dims))]
    order = [0, *(1 + place for place in np.argsort(into))] if into else None

    def apply(operands: list[Value]) -> Value:
        x = operands[0] if order is None else operands[0].transpose(order)
        return np.broadcast_to(x.reshape(len(x), *shape), (len(x), *dims))

    return apply


def _reshape(context: Context) -> Function:
    dims = context.shape.dims
    return lambda operands: operands[0].reshape(len(operands[0]), *dims)


def _transpose(context: Context) -> Function:
    order = [0, *(1 + dim for dim in integers(context.attributes["dimensions"]))]
    return lambda operands: operands[0].transpose(order)


def _reverse(context: Context) -> Function:
    dims = tuple(1 + dim for dim in integers(context.attributes["dimensions"]))
    return lambda operands: np.flip(operands[0], dims)


def _slice(context: Context) -> Function:
    numbers = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", context.attributes["slice"])
    slices = tuple(slice(int(first), int(last), int(step or 1)) for first, last, step in numbers)
    return lambda operands: operands[0][(slice(None), *slices)]


def _concatenate(context: Context) -> Function:
    axis = 1 + integers(context.attributes["dimensions"])[0]
    dtype = context.dtype
    return lambda operands: np.concatenate([convert(x, dtype) for x in spread(operands)], axis=axis)


def _pad(context: Context) -> Function:
    fields = context.attributes.get("padding", "")
    padding = []
    for field in fields.split("x") if fields and context.shape.dims else []:
        low, high, *gap = (int(number) for number in field.split("_"))
        padding.append((low, high, gap[0] if gap else 0))
    return lambda operands: indexing.pad(operands[0], convert(operands[1], operands[0].dtype), padding)


def _dynamic_slice(context: Context) -> Function:
    sizes = context.shape.dims
    return lambda operands: indexing.dynamic_slice(operands[0], operands[1:], sizes)


def _dynamic_update_slice(context: Context) -> Function:
    dtype = context.dtype

    def apply(operands: list[Value]) -> Value:
        x, update, *starts = operands
        return indexing.dynamic_update_slice(convert(x, dtype), convert(update, dtype), starts)

    return apply


def _gather(context: Context) -> Function:
    windows, rank = indexing.gather_windows(context.attributes), len(context.shape.dims)
    return lambda operands: indexing.gather(operands[0], operands[1], windows, rank)


def _dot(context: Context) -> Function:
    attributes, dtype = context.attributes, context.dtype
    return lambda operands: dot(operands[0], operands[1], attributes, dtype)


def _convolution(context: Context) -> Function:
    attributes, dims, dtype = context.attributes, context.shape.dims, context.dtype
    return lambda operands: convolution(operands[0], operands[1], attributes, dims, dtype)


def _partition_id(context: Context) -> Function:
    value = np.arange(context.num_devices).astype(context.dtype)
    return lambda _: value


def _replica_id(context: Context) -> Function:
    value = np.zeros(1, context.dtype)
    return lambda _: value


def _tuple(context: Context) -> Function:
    del context
    return tuple


def _get_tuple_element(context: Context) -> Function:
    index = int(context.attributes["index"])
    return lambda operands: operands[0][index]


def _identity(context: Context) -> Function:
    del context
    return lambda operands: operands[0] if len(operands) == 1 else tuple(operands)


def _first(context: Context) -> Function:
    del context
    return lambda operands: operands[0]


def _copy_start(context: Context) -> Function:
    del context
    return lambda operands: (operands[0], operands[0], np.zeros(1, np.uint32))


def _copy_done(context: Context) -> Function:
    del context
    return lambda operands: operands[0][0]


def _token(context: Context) -> Function:
    del context
    return lambda _: np.zeros(1, bool)


def _reduce_precision(context: Context) -> Function:
    exponent, mantissa = int(context.attributes["exponent_bits"]), int(context.attributes["mantissa_bits"])
    return lambda operands: reduce_precision(operands[0], exponent, mantissa)


def _fft(context: Context) -> Function:
    kind, length = context.attributes["fft_type"], integers(context.attributes["fft_length"])
    transform = {"FFT": np.fft.fftn, "IFFT": np.fft.ifftn, "RFFT": np.fft.rfftn, "IRFFT": np.fft.irfftn}[kind]
    dtype, axes = context.dtype, range(-len(length), 0)
    return lambda operands: transform(operands[0], s=length, axes=tuple(axes)).astype(dtype)


def _custom_call(context: Context) -> Function:
    target = context.attributes.get("custom_call_target", "").strip('"')
    text, devices = context.instruction.shape, context.num_devices
    if target == "AllocateBuffer":
        return lambda _: tuple_of(text, lambda part: undefined(part, devices))
    if target == "AsyncCollectiveStart":
        rest = parse_parts(text)[2:]
        return lambda operands: (operands[1], operands[0], *(undefined(part, devices) for part in rest))
    if target == "AsyncCollectiveDone":
        return lambda operands: operands[2]
    if target in _TOKEN_CALLS:
        return lambda _: np.zeros(1, np.uint32)
    if target == "TopK":
        return functools.partial(_top_k, size=array_shape(parse_parts(text)[0]).dims[-1])
    if target in _MATRIX_CALLS:
        return lambda operands: _MATRIX_CALLS[target](operands[0])
    if target in _IDENTITY_CALLS:
        if context.operands and same_shape(parse_shape(context.operands[0].shape), parse_shape(text)):
            return lambda operands: operands[0]
        if target == "PrepareAsyncCallDone":
            return lambda _: np.zeros(1, np.uint32)
    raise NotInterpretable(f"the custom call {target!r}")


def _top_k(operands: list[Value], *, size: int) -> Value:
    x = operands[0]
    order = np.argsort(-convert(x, np.dtype(np.float64)), axis=-1, kind="stable")[..., :size]
    return np.take_along_axis(x, order, -1), order.astype(np.int32)


def parse_parts(text: str) -> list[str]:
    """Returns the texts of a tuple's arrays, or of the one array."""
    return [f"{part}{{{part.layout}}}" if part.layout else str(part) for part in arrays(parse_shape(text))]


def tuple_of(text: str, make: Callable[[str], Value]) -> Value:
    """Returns what is made of each array of a shape."""
    parts = [make(part) for part in parse_parts(text)]
    return parts[0] if isinstance(parse_shape(text), Array) else tuple(parts)


_OPERATIONS: Mapping[str, Callable[[Context], Function]] = {
    "add-dependency": _first, "after-all": _token, "bitcast": _bitcast, "bitcast-convert": _bitcast_convert,
    "broadcast": _broadcast, "compare": _compare, "concatenate": _concatenate, "constant": _constant,
    "convert": _convert, "convolution": _convolution, "copy": _identity, "copy-done": _copy_done,
    "copy-start": _copy_start, "custom-call": _custom_call, "domain": _first, "dot": _dot,
    "dynamic-slice": _dynamic_slice, "dynamic-update-slice": _dynamic_update_slice, "fft": _fft, "gather": _gather,
    "get-tuple-element": _get_tuple_element, "iota": _iota, "opt-barrier": _identity, "optimization-barrier": _identity,
    "pad": _pad, "partition-id": _partition_id, "reduce-precision": _reduce_precision, "replica-id": _replica_id,
    "reshape": _reshape, "reverse": _reverse, "slice": _slice, "transpose": _transpose, "tuple": _tuple,
}  # fmt: skip
