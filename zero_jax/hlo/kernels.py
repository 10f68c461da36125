"""Counts the work of a Pallas TPU kernel: the matrix products of its body, over the steps of its grid that run them.

The body of a kernel is in the program as MLIR bytecode (Mosaic); what is read here is its text in the generic form.
A branch or a loop that depends on the grid, or on scalars whose values are known, counts as often as it is taken: so of
block-sparse attention the blocks that its mask leaves out do not count.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

_OPERATION = re.compile(r'\s*(?:(%[^=]*?) = )?"([\w.]+)"\(([^)]*)\)(.*)')
_VECTOR = re.compile(r"(?:vector|memref)<((?:\d+x)*)[a-z]")
_INTEGER = re.compile(r"value = (-?\d+|true|false)\b")
_BOOLEANS = {"true": "1", "false": "0"}
_CONTRACTING = re.compile(r"dimension_numbers = #tpu.dot_dimension_numbers<\[([\d, ]*)\]")

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelWork:
    """The work of one call of a kernel.

    Attributes:
      flops: Operations of its matrix products, 2 for a multiply-add.
      is_exact: Whether all branches and loops around them could be decided; where not, a branch counts as taken, and a
        loop as one iteration.
    """

    flops: float
    is_exact: bool


@dataclasses.dataclass
class _MlirOperation:
    """An operation of the text; `end` is what follows its operands, without its regions."""

    results: list[str]
    name: str
    operands: list[str]
    end: str
    regions: list["_MlirRegion"] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _MlirRegion:
    arguments: list[str] = dataclasses.field(default_factory=list)
    operations: list[_MlirOperation] = dataclasses.field(default_factory=list)


def kernel_work(text: str, scalars: Sequence[Known] = ()) -> KernelWork | None:
    """Counts the work of a kernel.

    Args:
      text: The module of the kernel in MLIR's generic form.
      scalars: The operands of the call from the first on, where they are constants: its scalar prefetch.

    Returns:
      The work, or None where the text has no kernel with a static grid.
    """
    functions = [operation for operation in _parse(text).walk() if operation.name == "func.func"]
    for function in functions:
        if bounds := re.search(r"iteration_bounds = array<i64(?:: ([-\d, ]*))?>", function.end):
            grid = [int(size) for size in (bounds[1] or "").split(",") if size.strip()]
            if min(grid, default=1) < 0:
                return None
            return _GridBody(grid).run(function.regions[0], scalars)
    # Without a grid, the kernel is the function that is no index map.
    kernels = [function for function in functions if "transform_" not in function.end]
    return _GridBody([]).run(kernels[0].regions[0], scalars) if kernels else None


class _MlirModule(_MlirRegion):
    def walk(self) -> Iterator[_MlirOperation]:
        """Yields all operations."""
        stack = list(self.operations)
        while stack:
            operation = stack.pop(0)
            yield operation
            stack = [inner for region in operation.regions for inner in region.operations] + stack


def _parse(text: str) -> _MlirModule:
    """Reads the operations, with their regions nested as the text has them."""
    tree = _MlirModule()
    open_regions: list[_MlirRegion] = [tree]
    open_operations: list[_MlirOperation] = []
    for line in text.split("\n"):
        stripped = line.strip()
        if stripped.startswith("^"):
            open_regions[-1].arguments = re.findall(r"(%\w+):", stripped)
        elif stripped.startswith("}, {"):
            open_regions.pop()
            open_regions.append(_MlirRegion())
            open_operations[-1].regions.append(open_regions[-1])
        elif stripped.startswith("})") and open_operations:
            open_regions.pop()
            open_operations.pop().end += stripped[2:]
        elif match := _OPERATION.match(line):
            results = re.findall(r"%\w+", match[1] or "")
            name = match[2].removeprefix("stable_mosaic.")
            operation = _MlirOperation(results, name, re.findall(r"%\w+(?:#\d+)?", match[3]), match[4])
            open_regions[-1].operations.append(operation)
            if stripped.endswith("({"):
                open_regions.append(_MlirRegion())
                operation.regions.append(open_regions[-1])
                open_operations.append(operation)
        elif re.search(r"\(\{$", stripped):  # a module, or an operation of another form
            open_regions.append(_MlirRegion())
            operation = _MlirOperation([], "", [], "", [open_regions[-1]])
            open_regions[-2].operations.append(operation)
            open_operations.append(operation)
    return tree


class _GridBody:
    """Runs a body at all steps of a grid at once: a value is an array that broadcasts to the grid, or None."""

    def __init__(self, grid: Sequence[int]):
        self.grid = grid
        self.values: dict[str, Known] = {}
        self.flops = 0.0
        self.is_exact = True

    def run(self, region: _MlirRegion, scalars: Sequence[Known]) -> KernelWork:
        rank = len(self.grid)
        for place, (name, size) in enumerate(zip(region.arguments, self.grid, strict=False)):
            shape = [size if dim == place else 1 for dim in range(rank)]
            self.values[name] = np.arange(size).reshape(shape)
        self.values.update(zip(region.arguments[rank:], scalars, strict=False))
        self.region(region, np.ones([1] * rank))
        return KernelWork(flops=float(self.flops), is_exact=bool(self.is_exact))

    def region(self, region: _MlirRegion, times: np.ndarray) -> None:
        """Runs a region that is executed so many times at each step of the grid."""
        for operation in region.operations:
            self.operation(operation, times)

    def operation(self, operation: _MlirOperation, times: np.ndarray) -> None:
        name, known = operation.name, [self.values.get(operand) for operand in operation.operands]
        if name in ("tpu.matmul", "vector.contract"):
            num_steps = times.sum() * math.prod(self.grid) / times.size
            self.flops += num_steps * _product_flops(operation.end)
        elif name == "scf.if":
            self.branches(operation, known[0], times)
        elif name == "scf.for":
            self.region(operation.regions[0], times * self.num_trips(known))
        elif name in ("scf.while", "func.call"):
            self.is_exact = False
            for region in operation.regions[-1:]:
                self.region(region, times)
        elif operation.regions:
            for region in operation.regions:
                self.region(region, times)
        elif len(operation.results) == 1 and "vector<" not in operation.end.rpartition("->")[2]:
            self.values[operation.results[0]] = _scalar(operation, known)

    def branches(self, operation: _MlirOperation, condition: Known, times: np.ndarray) -> None:
        if condition is not None:
            for region, taken in zip(operation.regions, (condition != 0, condition == 0), strict=False):
                self.region(region, times * taken)
            return
        before, flops = self.flops, []
        for region in operation.regions:
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


def _scalar(operation: _MlirOperation, known: Sequence[Known]) -> Known:
    """The value of an operation on integers, as far as it is known."""
    dialect, _, name = operation.name.rpartition(".")
    if operation.name == "arith.constant":
        match = _INTEGER.search(operation.end)
        return np.asarray(int(_BOOLEANS.get(match[1], match[1]))) if match else None
    if any(value is None for value in known):
        return None
    values = [value for value in known if value is not None]
    if operation.name == "memref.load":
        array, indices = values[0], values[1:]
        inside = len(indices) == array.ndim
        clipped = [np.clip(index, 0, size - 1) for index, size in zip(indices, array.shape, strict=False)]
        return array[tuple(np.broadcast_arrays(*clipped))] if inside and clipped else None
    if dialect != "arith":
        return None
    if name in _CASTS:
        return values[0].astype(np.int64)
    if name == "select":
        return np.where(values[0] != 0, values[1], values[2])
    if name == "cmpi" and (match := re.search(r"predicate = (\d+)", operation.end)):
        return _COMPARE[int(match[1])](values[0], values[1]).astype(np.int64)
    return _BINARY[name](values[0], values[1]) if name in _BINARY else None


def _product_flops(end: str) -> float:
    """The operations of one matrix product, from its attributes and the types of its operands and its result."""
    attributes, _, types = end.rpartition(" : (")
    shapes = [[int(size) for size in dims.split("x") if size] for dims in _VECTOR.findall(types)]
    if len(shapes) < 3:
        return 0.0
    left, out = shapes[0], shapes[-1]
    maps = [re.findall(r"d\d+", dims) for dims in re.findall(r"affine_map<[^>]*-> \(([^)]*)\)>", attributes)]
    if contracting := _CONTRACTING.search(attributes):
        inner = math.prod(left[int(dim)] for dim in contracting[1].split(",") if dim.strip())
    elif len(maps) == 3:
        inner = math.prod(size for size, dim in zip(left, maps[0], strict=True) if dim not in maps[2])
    else:
        inner = left[0] if "transpose_lhs = true" in attributes else left[-1]
    return 2.0 * math.prod(out) * inner
