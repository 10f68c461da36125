"""Counts the work of kernels that a compiled program calls: Pallas on TPU, cuDNN's attention on GPU.

XLA's cost models know nothing of them, so a schedule that leaves them out is too fast by as much as they take. The body
of a Pallas kernel is in the program as MLIR bytecode (Mosaic); its operations are given here as MLIR's own Python API
has them. Its matrix products count over the steps of its grid that run them: a branch or a loop that depends on the
grid, or on scalars whose values are known, counts as often as it is taken, so of block-sparse attention the blocks that
its mask leaves out do not count.
"""

import base64
import binascii
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zero_jax.hlo.layout import Array, parse_shape
from zero_jax.hlo.program import Instruction, Program

_VECTOR = re.compile(r"(?:vector|memref)<((?:\d+x)*)[a-z]")
_INTEGER = re.compile(r"(-?\d+|true|false)\b")
_BOOLEANS = {"true": "1", "false": "0"}

Known = np.ndarray | None
_BINARY: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "addi": np.add,
    "subi": np.subtract,
    "muli": np.multiply,
    "divsi": lambda a, b: np.trunc(a / np.where(b == 0, 1, b)).astype(np.int64),
    "floordivsi": lambda a, b: a // np.where(b == 0, 1, b),
    "ceildivsi": lambda a, b: -(-a // np.where(b == 0, 1, b)),
    "remsi": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)),
    "minsi": np.minimum,
    "maxsi": np.maximum,
    "andi": np.bitwise_and,
    "ori": np.bitwise_or,
    "xori": np.bitwise_xor,
}
_CASTS = ("extsi", "extui", "trunci", "index_cast", "index_castui", "bitcast")
# The numbers of MLIR's arith.cmpi: eq, ne, slt, sle, sgt, sge, and the same without sign.
_COMPARE = (np.equal, np.not_equal, *(np.less, np.less_equal, np.greater, np.greater_equal) * 2)


# The Mosaic module in the bytecode of a kernel, an `ir.Module` of MLIR; None for what cannot be decoded.
Decode = Callable[[bytes], Any]
_PALLAS = '"tpu_custom_call"'
_ATTENTION = re.compile(r'custom_call_target="__cudnn\$fmha(\w+)"')
_SCORES = re.compile(r'"intermediate_tensor_shape":\{.*?"dimensions":\[([^\]]*)\]')
# Products of a fused attention: scores and output; in the backward pass the scores again, and four gradients.
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one execution of an instruction."""

    # Floating-point operations of the matrix products and convolutions in it, 2 for a multiply-add, without the blocks
    # that a kernel's mask leaves out; all else is bound by memory.
    flops: float
    bytes: int = 0  # bytes read and written; of an operand that is only sliced or updated in place, the slice
    is_known: bool = True  # whether all of it was understood; not so for custom calls of unknown targets
    # The kind of kernel that does it: 'pallas', 'cudnn attention' or 'cudnn attention backward'; '' for the compiler's
    # own code.
    engine: str = ""
    # Whether it is known how much of a kernel is executed; where not, a branch counts as taken, and a loop as one
    # iteration.
    is_exact: bool = True


def kernel_call(program: Program, instruction: Instruction, decode: Decode | None) -> Work | None:
    """Returns the work of a custom call, or None where it is of no known kind; 0 bytes where it does not say them.

    A Pallas kernel's own `cost_estimate` comes first; else the matrix products in its body count over its grid. Causal
    attention of cuDNN counts half, and attention in a window what the window leaves.

    Without `decode`, only Pallas kernels with a `cost_estimate` are known.
    """
    if _PALLAS in instruction.line:
        return _pallas(program, instruction, decode)
    if match := _ATTENTION.search(instruction.line):
        return _cudnn(program, instruction, is_backward="Backward" in match[1])
    return None


def _pallas(program: Program, instruction: Instruction, decode: Decode | None) -> Work | None:
    line = instruction.line
    estimate = re.search(r'"cost_estimate":\{([^}]*)\}', line)
    figures = dict(re.findall(r'"(\w+)":"?(-?\d+)', estimate[1])) if estimate else {}
    num_bytes = int(figures.get("bytes_accessed", 0))
    if int(figures.get("flops", 0)) > 0:
        return Work(engine="pallas", flops=float(figures["flops"]), bytes=num_bytes)
    body = re.search(r'"custom_call_config":\{.*?"body":"([^"]*)"', line)
    if not body or decode is None:
        return None
    try:
        module = decode(base64.b64decode(body[1], validate=True))
    except binascii.Error:
        return None
    scalars = [_literal(program, operand) for operand in program.operands(instruction)]
    work = None if module is None else kernel_work(module, scalars)
    return None if work is None else dataclasses.replace(work, bytes=num_bytes)


def _literal(program: Program, operand: Instruction) -> np.ndarray | None:
    """The value of an operand that is a constant of integers in the text, or a slice of one with equal rows."""
    shape, literal = parse_shape(operand.shape), program.literal(operand)
    if literal is None:
        return None
    values = np.array([int(digits) for digits in re.findall(r"-?\d+", literal)])
    if not isinstance(shape, Array) or not shape.num_elements or not values.size:
        return None
    if values.size == 1:  # a scalar, broadcast
        return np.full(shape.dims, values[0])
    if values.size % shape.num_elements:
        return None
    rows = values.reshape(-1, *shape.dims)
    return rows[0] if (rows == rows[0]).all() else None


def _cudnn(program: Program, instruction: Instruction, *, is_backward: bool) -> Work | None:
    """Fused attention: its scores are `[batch, heads, queries, keys]`, and each product has them on one side."""
    line = instruction.line.replace('": ', '":')  # JSON as Python writes it, or as XLA does
    scores = _SCORES.search(line)
    query = program.operand(instruction, 0)
    if not scores or query is None:
        return None
    batch, heads, queries, keys = (int(size) for size in re.findall(r"\d+", scores[1]))
    elements = query.arrays[0].num_elements
    head_dim = elements // max(batch * heads * queries, 1)
    mask = re.search(r'"mask_type":"(\w+)"', line)
    is_causal = mask is not None and "CAUSAL" in mask[1]
    window = re.search(r'"sliding_window_length":"?(\d+)', line)
    width = keys / 2 if is_causal else keys
    if window and int(window[1]):
        width = min(width, int(window[1]))
    products = _BACKWARD_PRODUCTS if is_backward else _FORWARD_PRODUCTS
    return Work(
        engine="cudnn attention backward" if is_backward else "cudnn attention",
        flops=2.0 * math.prod((products, batch, heads, queries, head_dim)) * width,
        is_exact=mask is None or "PADDING" not in mask[1],
    )


def kernel_work(module: Any, scalars: Sequence[Known]) -> Work | None:
    """Counts a kernel's products, with constant `scalars` as its scalar prefetch; None without a static grid."""
    functions = [operation for operation in _walk(module.operation) if _name(operation) == "func.func"]
    for function in functions:
        if bounds := _attribute(function, "iteration_bounds"):  # such as array<i64: 2, 3>
            grid = [int(size) for size in re.findall(r"-?\d+", bounds.partition(":")[2])]
            return None if min(grid, default=1) < 0 else _GridBody(grid).run(function.regions[0], scalars)
    # Without a grid, the kernel is the function that is no index map.
    kernels = [function for function in functions if "transform_" not in _attribute(function, "sym_name")]
    return _GridBody([]).run(kernels[0].regions[0], scalars) if kernels else None


def _walk(operation: Any) -> Iterator[Any]:
    yield operation
    for region in operation.regions:
        for inner in _operations(region):
            yield from _walk(inner)


def _operations(region: Any) -> Iterator[Any]:
    return (operation.operation for block in region.blocks for operation in block.operations)


def _name(operation: Any) -> str:
    return operation.name.removeprefix("stable_mosaic.")


def _attribute(operation: Any, name: str) -> str:
    return str(operation.attributes[name]) if name in operation.attributes else ""


class _GridBody:
    """Runs a body at all steps of a grid at once: a value is an array that broadcasts to the grid, or None."""

    def __init__(self, grid: Sequence[int]):
        self.grid = grid
        self.values: dict[Any, Known] = {}
        self.flops = 0.0
        self.is_exact = True

    def run(self, region: Any, scalars: Sequence[Known]) -> Work:
        rank, arguments = len(self.grid), list(region.blocks[0].arguments)
        for place, (argument, size) in enumerate(zip(arguments, self.grid, strict=False)):
            shape = [size if dim == place else 1 for dim in range(rank)]
            self.values[argument] = np.arange(size).reshape(shape)
        self.values.update(zip(arguments[rank:], scalars, strict=False))
        self.region(region, np.ones([1] * rank))
        return Work(flops=float(self.flops), engine="pallas", is_exact=bool(self.is_exact))

    def region(self, region: Any, times: np.ndarray) -> None:
        """Runs a region that is executed so many times at each step of the grid."""
        for operation in _operations(region):
            self.operation(operation, times)

    def operation(self, operation: Any, times: np.ndarray) -> None:
        name, known = _name(operation), [self.values.get(operand) for operand in operation.operands]
        regions, results = list(operation.regions), list(operation.results)
        if name in ("tpu.matmul", "vector.contract"):
            # `times` has a dim of size 1 for each dim of the grid that it does not depend on.
            num_steps = times.sum() * math.prod(self.grid) / times.size
            self.flops += num_steps * _product_flops(operation)
        elif name == "scf.if":
            self.branches(regions, known[0], times)
        elif name == "scf.for":
            self.region(regions[0], times * self.num_trips(known))
        elif name in ("scf.while", "func.call"):
            self.is_exact = False
            for region in regions[-1:]:  # the body, behind the condition
                self.region(region, times)
        elif regions:
            for region in regions:
                self.region(region, times)
        elif len(results) == 1 and "vector<" not in str(results[0].type):
            self.values[results[0]] = _scalar(operation, known)

    def branches(self, regions: Sequence[Any], condition: Known, times: np.ndarray) -> None:
        if condition is not None:
            for region, taken in zip(regions, (condition != 0, condition == 0), strict=False):
                self.region(region, times * taken)
            return
        # Not known: as if the branch of most operations were taken.
        before, flops = self.flops, []
        for region in regions:
            self.flops = before
            self.region(region, times)
            flops.append(self.flops)
        self.flops = max(flops, default=before)
        self.is_exact &= self.flops == before

    def num_trips(self, known: Sequence[Known]) -> np.ndarray:
        lower, upper, step = (*known, None, None, None)[:3]
        if lower is None or upper is None or step is None:
            self.is_exact = False
            return np.ones(())
        return np.maximum(-(-(upper - lower) // np.maximum(step, 1)), 0)


def _scalar(operation: Any, known: Sequence[Known]) -> Known:
    """The value of an operation on integers, as far as it is known."""
    dialect, _, name = _name(operation).rpartition(".")
    if (dialect, name) == ("arith", "constant"):
        match = _INTEGER.match(_attribute(operation, "value"))
        return np.asarray(int(_BOOLEANS.get(match[1], match[1]))) if match else None
    if any(value is None for value in known):
        return None
    values = [value for value in known if value is not None]
    if (dialect, name) == ("memref", "load"):
        array, indices = values[0], values[1:]
        is_element = len(indices) == array.ndim
        # Clipped: all steps of the grid are run at once, those too that do not come here.
        clipped = [np.clip(index, 0, size - 1) for index, size in zip(indices, array.shape, strict=False)]
        return array[tuple(np.broadcast_arrays(*clipped))] if is_element and clipped else None
    if dialect != "arith":
        return None
    if name in _CASTS:
        return values[0].astype(np.int64)
    if name == "select":
        return np.where(values[0] != 0, values[1], values[2])
    if name == "cmpi" and (match := _INTEGER.match(_attribute(operation, "predicate"))):
        return _COMPARE[int(match[1])](values[0], values[1]).astype(np.int64)
    return _BINARY[name](values[0], values[1]) if name in _BINARY else None


def _product_flops(operation: Any) -> float:
    """The operations of one matrix product, from its attributes and the types of its operands and its result."""
    types = "".join(f"{value.type} " for value in (*operation.operands, *operation.results))
    shapes = [[int(size) for size in dims.split("x") if size] for dims in _VECTOR.findall(types)]
    if len(shapes) < 3:
        return 0.0
    left, out = shapes[0], shapes[-1]
    maps = [re.findall(r"d\d+", x) for x in re.findall(r"-> \(([^)]*)\)", _attribute(operation, "indexing_maps"))]
    if contracting := re.search(r"<\[([\d, ]*)\]", _attribute(operation, "dimension_numbers")):
        inner = math.prod(left[int(dim)] for dim in contracting[1].split(",") if dim.strip())
    elif len(maps) == 3:
        inner = math.prod(size for size, dim in zip(left, maps[0], strict=True) if dim not in maps[2])
    else:
        inner = left[0] if _attribute(operation, "transpose_lhs") == "true" else left[-1]
    return 2.0 * math.prod(out) * inner
