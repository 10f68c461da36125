"""Costs of the instructions of a compiled program: the compiler's own cycles, else flops and bytes (a roofline)."""

import dataclasses
import math
import re

from zero_jax.hlo.kernels import Decode, Work, kernel_call
from zero_jax.hlo.opcodes import COLLECTIVES, FORWARDS, FREE, MOVES, SLICES
from zero_jax.hlo.program import Instruction, Program, integers
from zero_jax.hlo.windows import read_windows

_FREE_CUSTOM_CALLS = (
    "AllocateBuffer AsyncCollectiveStart AsyncCollectiveDone ConcatBitcast AssumeGatherIndicesInBound "
    "GatherScatterIndicesBitpacked PrepareAsyncCallStart PrepareAsyncCallDone SliceId ZeroCrop"
).split()
_GEMMS = re.compile(r'custom_call_target="__cublas\$(?:lt\$)?(?:gemm|matmul)[^"]*"')
_HANDS_THROUGH = (*FORWARDS, "fusion")  # of what `_moved` has an operand of: nothing is read or written
_DAY_CYCLES = 86_400 * 10**9  # a day at 1 GHz: more is no count of cycles


def cycles(instruction: Instruction) -> int | None:
    """Returns XLA:TPU's cycles of an instruction, or None; JAX 0.12 has the largest integer where it knows none."""
    match = re.search(r'"estimated_cycles":"(-?\d+)"', instruction.line)
    return int(match[1]) if match and 0 <= int(match[1]) < _DAY_CYCLES else None


def roofline(program: Program, instruction: Instruction, *, decode: Decode | None = None) -> Work:
    """Counts flops and bytes of memory of an instruction outside of fusions; `decode` reads Pallas kernels."""
    opcode = instruction.opcode
    if opcode in FREE or instruction.part or _is_free_call(instruction):
        return Work(flops=0)
    num_bytes = _moved_bytes(program, instruction)
    if opcode == "custom-call" and (call := kernel_call(program, instruction, decode)):
        return dataclasses.replace(call, bytes=call.bytes or num_bytes)
    flops = _flops(program, instruction)
    known = opcode != "custom-call" or flops is not None
    return Work(flops=flops or 0, bytes=num_bytes, is_known=known)


def _flops(program: Program, instruction: Instruction) -> float | None:
    """The flops of an instruction and of what it calls; None for a custom call that is not understood."""
    opcode, line = instruction.opcode, instruction.line
    if opcode == "fusion":
        inner = program.computations.get(instruction.first_called, {}).values()
        return sum(_flops(program, instruction) or 0 for instruction in inner)
    if opcode == "dot":
        return _dot_flops(program, instruction, r"lhs_contracting_dims=\{([^}]*)\}")
    if opcode == "convolution" or (opcode == "custom-call" and "dim_labels=" in line):
        return _convolution_flops(program, instruction)
    if opcode == "custom-call":
        if not _GEMMS.search(line):
            return None
        return _dot_flops(program, instruction, r'"lhs_contracting_dimensions":\[([^\]]*)\]')
    return 0


def _dot_flops(program: Program, instruction: Instruction, contracting: str) -> float:
    match = re.search(contracting, instruction.line)
    left = program.operands(instruction)[0].arrays[0]
    inner = math.prod(left.dims[dim] for dim in integers(match[1])) if match else 1
    return 2 * instruction.arrays[0].num_elements * inner


def _convolution_flops(program: Program, instruction: Instruction) -> float:
    """Counts multiply-adds with real elements only: XLA:TPU writes batched matmuls as padded convolutions."""
    line = instruction.line
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line)
    operands = [operand.arrays[0] for operand in program.operands(instruction)]
    if not labels or len(operands) < 2:
        return 0
    left, kernel, out = (array.dims for array in (*operands[:2], instruction.arrays[0]))
    # XLA:GPU's gradients of a convolution have the labels and the window of that, of which they give an operand.
    if '"__cudnn$convBackwardInput"' in line:
        left, out = out, left
    elif '"__cudnn$convBackwardFilter"' in line:
        kernel, out = out, kernel
    window = re.search(r"window=\{([^}]*)\}", line)
    spatial = sorted(filter(str.isdigit, labels[3]), key=int)
    num_pairs = 1
    for label, along in zip(spatial, read_windows(window and window[1], len(spatial)), strict=True):
        _, inside = along.inputs(left[labels[1].index(label)], out[labels[3].index(label)])
        num_pairs *= int(inside.sum())
    # As many with groups: of features the kernel has the inputs of one group, of examples the result has those of one.
    return 2 * num_pairs * out[labels[3].index("b")] * out[labels[3].index("f")] * kernel[labels[2].index("i")]


def _moved_bytes(program: Program, instruction: Instruction) -> int:
    opcode, result = instruction.opcode, _bytes(instruction)
    operands = [*map(_bytes, program.operands(instruction))]
    if opcode in ("dynamic-slice", "slice"):
        return 2 * result
    if opcode == "gather":
        return 2 * result + sum(operands[1:])
    if opcode == "dynamic-update-slice":
        return 2 * operands[1]
    if opcode == "scatter":
        return 2 * operands[-1] + sum(operands[1:-1])
    if opcode != "fusion":
        return result + sum(operands)
    num_read = sum(_read_bytes(program, parameter) for parameter in program.parameters(instruction.first_called))
    root = program.root(instruction.first_called)
    return num_read + (_written_bytes(program, root) if root else result)


def _read_bytes(program: Program, value: Instruction, *, is_copied: bool = False) -> int:
    """The bytes of a value inside a fusion that are read: the slices, if it is only sliced or updated in place.

    None are of what the fusion returns as it got it; a value that `is_copied` is made of a parameter.
    """
    all_bytes, total = _bytes(value), 0
    root = program.roots.get(value.computation)
    if value.name == root:
        return all_bytes if is_copied else 0
    for user in program.users(value.computation)[value.name]:
        is_first = user.operands[0] == value.name and value.name not in user.operands[1:]
        if _by_links(user):
            continue
        if user.opcode == "tuple" and user.name == root:
            total += all_bytes if is_copied else 0
        elif _moved(program, user) == value:  # by the share of it that is read: a convert has other bytes
            read = _read_bytes(program, user, is_copied=is_copied or user.opcode not in _HANDS_THROUGH)
            total += read * all_bytes // max(_bytes(user), 1)
        elif user.opcode == "fusion":  # of a product: what makes its operands, and what follows it
            places = zip(program.parameters(user.first_called), user.operands, strict=False)
            total += sum(_read_bytes(program, x) for x, operand in places if operand == value.name)
        elif is_first and user.opcode in SLICES:
            total += _bytes(user)
        elif is_first and user.opcode == "scatter":
            total += _bytes(program.operands(user)[-1])
        elif not (is_first and user.opcode == "dynamic-update-slice"):
            return all_bytes
    return min(all_bytes, total)


def _written_bytes(program: Program, root: Instruction) -> int:
    """The bytes that a fusion with this root writes: those of the updates, where it updates in place.

    None are of what it returns as it got it.
    """
    total = 0
    for output in program.operands(root) if root.opcode == "tuple" else [root]:
        origin, is_forwarded = output, True
        while moved := _moved(program, origin):
            origin, is_forwarded = moved, is_forwarded and origin.opcode in _HANDS_THROUGH
        if _by_links(origin) or (origin.opcode == "parameter" and is_forwarded):
            continue
        updates = {"dynamic-update-slice": 1, "scatter": -1}.get(origin.opcode)
        if origin.opcode == "fusion" and (last := program.root(origin.first_called)):
            written = _written_bytes(program, last)
        else:
            written = _bytes(origin if updates is None else program.operands(origin)[updates])
        total += written * _bytes(output) // max(_bytes(origin), 1)  # in the dtype that is written
    return total


def _moved(program: Program, instruction: Instruction) -> Instruction | None:
    """The operand whose elements are the result, in another dtype, shape or layout; None where the result is made.

    A fusion within a fusion may only hand one through: XLA:TPU has operands of a product so.
    """
    if instruction.opcode != "fusion":
        return program.operand(instruction, 0) if instruction.opcode in MOVES else None
    origin = program.root(instruction.first_called)
    while origin and origin.opcode in FORWARDS:
        origin = program.operand(origin, 0)
    return program.operand(instruction, int(origin.operands[0])) if origin and origin.opcode == "parameter" else None


def _by_links(instruction: Instruction) -> bool:
    """Whether a fusion that starts a collective, drives it on or ends it has this of the collective, not of its own."""
    return instruction.opcode in COLLECTIVES or _is_free_call(instruction)


def _is_free_call(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and any(f'"{x}"' in instruction.line for x in _FREE_CUSTOM_CALLS)


def _bytes(instruction: Instruction) -> int:
    """The bytes of all arrays of a result, without padding."""
    return sum(array.packed_bytes for array in instruction.arrays)
