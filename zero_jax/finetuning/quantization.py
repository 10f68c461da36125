"""Frozen weights in 8 or 4 bits: int8 with a scale per block, and NF4 (QLoRA, arXiv:2305.14314).

A weight is a stack of matrices `[*stack, rows, columns]`, whose rows are inputs or outputs, whichever come first in it.
A block is `block_size` rows of one column, with one scale, its largest absolute value. Double quantization (QLoRA,
section 3) stores a scale as 8 bits, and a float32 step for a group of up to 256 blocks beside each other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh

from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.quantized import largest_size
from zero_jax.sharding.spec import Dims

# QLoRA, appendix E: the quantiles of the normal distribution that NF4's 16 codes stand for.
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FORMATS = ("int8", "nf4", "nf4_double")
DEFAULT_BLOCK_SIZE = 64
_LARGEST_GROUP = 256  # blocks that share a step


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["codes", "scales", "steps"], meta_fields=["format", "dims"]
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A frozen weight in few bits."""

    # `int8[*stack, rows, columns]`; for NF4 `uint8[*stack, rows / 2, columns]`, whose low four bits are the codes of
    # the first half of the rows
    codes: Any
    scales: Any  # `float32[*stack, rows / block_size, columns]`; `uint8` with double quantization
    # `float32[*stack, rows / block_size, columns / group]` with double quantization, which multiply scales
    steps: Any = None
    format: str  # one of `FORMATS`
    dims: tuple[int, ...]  # the shape of one weight of the stack

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return (*self.scales.shape[:-2], *self.dims)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What it is built from: codes and scales, and steps if there are any."""
        return tuple(jax.tree.leaves((self.codes, self.scales, self.steps)))


def quantize(
    weight: Any, format: str, *, num_stack: int = 0, num_rows_dims: int = 1, block_size: int = DEFAULT_BLOCK_SIZE
) -> QuantizedWeight:
    """Returns a weight with each element rounded to the nearest code of its block.

    Args:
      weight: the weight, `[*stack, *rows, *columns]`.
      format: `int8`, `nf4` or `nf4_double`.
      num_stack: how many dims are a stack of weights.
      num_rows_dims: how many of the dims after it are rows.
      block_size: the number of rows of a column that share a scale.

    Raises:
      ValueError: an unknown format, or rows that do not divide into blocks.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: choose one of {', '.join(FORMATS)}")
    stack, dims = weight.shape[:num_stack], tuple(weight.shape[num_stack:])
    rows = math.prod(dims[:num_rows_dims])
    has_halves = format != "int8"
    if not isinstance(block_size, int) or block_size < 1 or rows % block_size or (has_halves and rows % 2):
        even = " and into two halves" if has_halves else ""
        raise ValueError(
            f"a weight of {rows} rows (shape {list(weight.shape)}) does not divide into blocks of {block_size}{even}: "
            "choose another block_size, adapt other leaves, or take the base in bfloat16"
        )
    codes, scales, steps = _quantized(
        jnp.reshape(weight, (*stack, rows, math.prod(dims[num_rows_dims:]))), format=format, block_size=block_size
    )
    return QuantizedWeight(codes=codes, scales=scales, steps=steps, format=format, dims=dims)


@functools.partial(jax.jit, static_argnames=("format", "block_size"))
def _quantized(matrix: jax.Array, *, format: str, block_size: int) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    *stack, rows, columns = matrix.shape
    blocks = matrix.astype(jnp.float32).reshape(*stack, rows // block_size, block_size, columns)
    scales, steps = largest_size(blocks, -2), None
    stored = scales
    if format == "nf4_double":
        # A divisor: a group does not go on in the next row of blocks, which another device may have.
        group = max(n for n in range(1, _LARGEST_GROUP + 1) if columns % n == 0)
        groups = scales.reshape(*scales.shape[:-1], columns // group, group)
        steps = groups.max(-1) / 255
        stored = jnp.round(groups / jnp.where(steps == 0, 1, steps)[..., None]).astype(jnp.uint8).reshape(scales.shape)
        scales = _scales(stored, steps)  # as they will be: codes are of the rounded scales
    # A block of zeros has the scale 0, and 0 / 0 would be NaN.
    unit = blocks / jnp.where(scales == 0, 1, scales)[..., None, :]
    if format == "int8":
        return jnp.round(unit * 127).astype(jnp.int8).reshape(matrix.shape), stored, steps
    # The nearest level: how many midpoints between levels lie below.
    levels = np.asarray(NF4_LEVELS, np.float32)
    codes = sum((unit > middle).astype(jnp.uint8) for middle in (levels[1:] + levels[:-1]) / 2)
    codes = jnp.asarray(codes).reshape(matrix.shape)
    return codes[..., : rows // 2, :] | (codes[..., rows // 2 :, :] << 4), stored, steps


def dequantize(weight: QuantizedWeight) -> jax.Array:
    """Returns a quantized weight in float32."""
    return built(weight.format, weight.dims, *weight.arrays)


def quantized_dims(
    stored: QuantizedWeight, dims: Dims, *, num_stack: int, num_rows_dims: int, mesh: Mesh
) -> dict[str, Dims]:
    """Returns the axes of the dims of a quantized weight's arrays, from those of its own dims.

    Several dims of a weight are one of the matrix that is stored, which can have the axes of the first of them. Rows
    are left unsharded where the axes do not divide the blocks, and those of NF4 always: the two rows of a code are far
    from each other.
    """
    stack, rows, columns = dims[:num_stack], dims[num_stack:][:num_rows_dims], dims[num_stack:][num_rows_dims:]
    row, column = (first if not any(rest) else () for first, *rest in (rows, columns))
    row = row if stored.format == "int8" and stored.scales.shape[-2] % axis_size(mesh, row) == 0 else ()
    of_arrays = {"codes": (*stack, row, column), "scales": (*stack, row, column)}
    if stored.steps is not None:
        divides = stored.steps.shape[-1] % axis_size(mesh, column) == 0
        of_arrays["steps"] = (*stack, row, column if divides else ())
    return of_arrays


def built(format: str, dims: tuple[int, ...], codes: Any, scales: Any, *steps: Any) -> jax.Array:
    """Returns the weight of its arrays, `[*stack, *dims]`, of any part of the stack."""
    return dequantize_p.bind(codes, scales, *steps, format=format).reshape(*scales.shape[:-2], *dims)


def _scales(stored: jax.Array, steps: jax.Array) -> jax.Array:
    """Returns the scales of double quantization."""
    groups = stored.astype(jnp.float32).reshape(*steps.shape, -1)
    return (groups * steps[..., None]).reshape(stored.shape)


def _dequantized(codes: jax.Array, scales: jax.Array, *steps: jax.Array, format: str) -> jax.Array:
    scales = _scales(scales, *steps) if steps else scales
    if format == "int8":
        unit = codes.astype(jnp.float32) / 127
    else:
        both = jnp.concatenate([codes & 15, codes >> 4], axis=-2)
        unit = jnp.asarray(NF4_LEVELS, jnp.float32)[both.astype(jnp.int32)]
    *stack, num_blocks, columns = scales.shape
    rows = unit.shape[-2]  # [*stack, rows, columns]
    unit = unit.reshape(*stack, num_blocks, rows // num_blocks, columns)
    return (unit * scales[..., None, :]).reshape(*stack, rows, columns)


# A primitive: nothing of it runs on shards, which would unpack the codes before they are gathered, and no remat policy
# takes it for a product.

dequantize_p = jex_core.Primitive("zero_dequantize")


def _abstract(codes: Any, scales: Any, *steps: Any, format: str) -> Any:
    rows = codes.shape[-2] * (1 if format == "int8" else 2)
    return scales.update(shape=(*scales.shape[:-2], rows, scales.shape[-1]), dtype=np.dtype(np.float32))


def _jvp(primals: Any, tangents: Any, *, format: str) -> tuple[Any, Any]:
    """Differentiates by the last array, scales or steps, in which a weight is linear; the others are integers."""
    out = dequantize_p.bind(*primals, format=format)
    if isinstance(tangents[-1], ad.Zero):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, dequantize_p.bind(*primals[:-1], ad.instantiate_zeros(tangents[-1]), format=format)


def _batch(args: Any, dims: Any, *, format: str) -> tuple[Any, int]:
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    return dequantize_p.bind(
        *(batching.bdim_at_front(x, dim, size) for x, dim in zip(args, dims, strict=True)), format=format
    ), 0


dequantize_p.def_abstract_eval(_abstract)
dequantize_p.def_impl(jax.jit(_dequantized, static_argnames="format"))
ad.primitive_jvps[dequantize_p] = _jvp
batching.primitive_batchers[dequantize_p] = _batch
mlir.register_lowering(dequantize_p, mlir.lower_fun(_dequantized, multiple_results=False))
