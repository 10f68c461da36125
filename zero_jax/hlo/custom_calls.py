"""Reads the work of kernels that a compiled program calls: Pallas on TPU, cuDNN's attention on GPU.

XLA's cost models know nothing of them, so a schedule that leaves them out is too fast by as much as they take.
"""

import base64
import binascii
import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from zero_jax.hlo.kernels import Work, kernel_work
from zero_jax.hlo.layout import Array, parse_shape
from zero_jax.hlo.program import Instruction, Program

# The Mosaic module in the bytecode of a kernel, an `ir.Module` of MLIR; None for what cannot be decoded.
Decode = Callable[[bytes], Any]
_PALLAS = '"tpu_custom_call"'
_ATTENTION = re.compile(r'custom_call_target="__cudnn\$fmha(\w+)"')
_SCORES = re.compile(r'"intermediate_tensor_shape":\{.*?"dimensions":\[([^\]]*)\]')
# Products of a fused attention: scores and output; in the backward pass the scores again, and four gradients.
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5


def kernel_call(program: Program, computation: str, instruction: Instruction, decode: Decode | None) -> Work | None:
    """Returns the work of a custom call, or None where it is of no known kind; 0 bytes where it does not say them.

    A Pallas kernel's own `cost_estimate` comes first; else the matrix products in its body count over its grid. Causal
    attention of cuDNN counts half, and attention in a window what the window leaves.

    Without `decode`, only Pallas kernels with a `cost_estimate` are known.
    """
    if _PALLAS in instruction.line:
        return _pallas(program, computation, instruction, decode)
    if match := _ATTENTION.search(instruction.line):
        return _cudnn(program, computation, instruction, is_backward="Backward" in match[1])
    return None


def _pallas(program: Program, computation: str, instruction: Instruction, decode: Decode | None) -> Work | None:
    line = instruction.line
    estimate = re.search(r'"cost_estimate":\{([^}]*)\}', line)
    figures = dict(re.findall(r'"(\w+)":"?(-?\d+)', estimate[1])) if estimate else {}
    num_bytes = int(figures.get("bytes_accessed", 0))
    if int(figures.get("flops", 0)) > 0:
        return Work(engine="pallas", flops=float(figures["flops"]), bytes=num_bytes)
    work = _body_work(program, computation, instruction, decode)
    return None if work is None else dataclasses.replace(work, bytes=num_bytes)


def _body_work(program: Program, computation: str, instruction: Instruction, decode: Decode | None) -> Work | None:
    body = re.search(r'"custom_call_config":\{.*?"body":"([^"]*)"', instruction.line)
    if not body or decode is None:
        return None
    try:
        module = decode(base64.b64decode(body[1], validate=True))
    except binascii.Error:
        return None
    scalars = [_literal(program, computation, name) for name in instruction.operands]
    return None if module is None else kernel_work(module, scalars)


def _literal(program: Program, computation: str, name: str) -> np.ndarray | None:
    """The value of an operand that is a constant of integers which the text has in full.

    Or a slice of one, whose rows are all the same: as where each device has its share of the heads of a mask.
    """
    instruction = program.computations[computation].get(name)
    literal = program.literal(computation, name)
    if instruction is None or literal is None:
        return None
    shape = parse_shape(instruction.shape)
    values = np.array([int(digits) for digits in re.findall(r"-?\d+", literal)])
    if not isinstance(shape, Array) or not shape.num_elements or not values.size:
        return None
    if values.size == 1:  # a scalar, broadcast
        return np.full(shape.dims, values[0])
    if values.size % shape.num_elements:
        return None
    rows = values.reshape(-1, *shape.dims)
    return rows[0] if (rows == rows[0]).all() else None


def _cudnn(program: Program, computation: str, instruction: Instruction, *, is_backward: bool) -> Work | None:
    """Fused attention: its scores are `[batch, heads, queries, keys]`, and each product has them on one side."""
    operands = instruction.operands
    line = instruction.line.replace('": ', '":')  # JSON as Python writes it, or as XLA does
    scores = _SCORES.search(line)
    query = program.computations[computation].get(operands[0]) if operands else None
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
