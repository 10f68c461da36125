"""Blockwise quantization of what is sent: params that are gathered (qwZ) and gradients that are scattered (qgZ).

ZeRO++ (arXiv:2306.10209), sections 3.1 and 3.3. A block is a run of elements along one dim of a device's shard, with
one scale: codes and scales are sharded as the array is, and move through the same shardings.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from zero_jax.core.field_checks import brief, check_value, check_word
from zero_jax.core.signatures import check_is
from zero_jax.core.tree import PathPatterns, shown
from zero_jax.core.variables import MODEL_STATE
from zero_jax.sharding.mesh import Axes, are_names, axis_size
from zero_jax.sharding.rules import LeafPlacement
from zero_jax.sharding.spec import Dims, num_shards

# What a new format is added to; its codes are an entry of `CODES`.
GatherFormat = Literal["int8", "fp8"]
GradFormat = Literal["int8", "int4"]
SCALE_DTYPE = jnp.bfloat16
# Without a block size: blocks of at most this many elements, and at least so many that scales are worth their bytes.
LARGEST_BLOCK, SMALLEST_BLOCK = 128, 32


@brief
@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantize:
    """What a train step sends quantized: gathers of params (qwZ) and the sums of gradients over devices (qgZ).

    A format is one for all params, or a dict from regular expressions of full leaf paths to formats (None: as it is);
    the first that matches counts, and leaves that match none are not quantized. Model state is quantized only where a
    pattern names it (`model_state/...`). What the optimizer keeps is never quantized.

    Attributes:
      gathers: the format of gathered params: `int8` or `fp8` (e4m3), half the bytes of bfloat16. None: none.
      grads: the format in which gradients go from device to device, `int8` or `int4`; they are summed in float32.
      block_size: elements along one dim of a device's shard that share a scale (bfloat16). None takes for each leaf
        the largest divisor of its shard up to 128, and leaves as they are those that have none from 32 on.
      grads_over: the mesh axis, or axes, over which gradients are sent quantized, such as `replica` for the network
        between slices alone. None takes all axes of `data`.
      error_feedback: add what quantization dropped of a gradient to that of the next step, before it is quantized. The
        train state keeps it in float32, `TrainState.grad_errors`. A flag for all params, or a dict from regular
        expressions to flags. It needs gradients that are sent once a step, over one axis, as `grads_over="replica"`.

    Example:
      >>> config = zero.ZeroConfig(stage=3, quantize=zero.Quantize(gathers="int8", grads="int4"))
      >>> config.resolved_quantize().gathers
      'int8'
    """

    gathers: str | Mapping[str, str | None] | None = None
    grads: str | Mapping[str, str | None] | None = None
    block_size: int | None = None
    grads_over: str | Sequence[str] | None = None
    error_feedback: bool | Mapping[str, bool] = False

    def __post_init__(self) -> None:
        for name, formats in (("gathers", GatherFormat), ("grads", GradFormat), ("error_feedback", None)):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                PathPatterns(f"quantize: {name}", value)
            for each in value.values() if isinstance(value, Mapping) else (value,):
                if name == "error_feedback":
                    check_value(f"quantize: {name}", each, bool)
                else:
                    check_word(f"quantize: {name}", each, get_args(formats), is_optional=True)
        check_value("block_size", self.block_size, int, is_optional=True)
        if self.block_size is not None and (self.block_size < 2 or self.block_size % 2):
            raise ValueError(
                f"quantize: block_size={self.block_size}: give an even number of elements, such as 64, or None"
            )
        if self.grads_over is not None and not are_names(self.grads_over):
            raise ValueError(
                f"quantize: grads_over={shown(self.grads_over)}: give the name of a mesh axis, such as 'replica'"
            )
        for name in ("grads_over", "error_feedback"):
            if getattr(self, name) and self.grads is None:
                setting = f"{name}={getattr(self, name)!r}"
                raise ValueError(f"quantize: {setting} without grads: give grads='int8' or 'int4' too")

    def grad_axes(self, axes: Axes) -> tuple[str, ...]:
        """Returns the mesh axes over which gradients are sent quantized: not between stages of a pipeline."""
        over = axes.data_of_stage if self.grads_over is None else self.grads_over
        return () if self.grads is None else (over,) if isinstance(over, str) else tuple(over)

    def format_of(self, what: str, path: str) -> Any:
        """Returns the format of a leaf in `gathers` or `grads`, or None; its flag in `error_feedback`."""
        value = getattr(self, what)
        if isinstance(value, Mapping):
            return PathPatterns(f"quantize: {what}", value).of(path)
        return None if path.startswith(f"{MODEL_STATE}/") else value

    def formats(self, path: str) -> Formats:
        """Returns the formats of a leaf."""
        gather, grad = (self.format_of(what, path) for what in ("gathers", "grads"))
        return Formats(gather=gather, grad=grad, block_size=self.block_size)


def check_quantize(quantize: Any) -> Quantize | None:
    """Returns the settings; raises `ValueError` for anything but a `Quantize` or None."""
    remedy = "give a zero.Quantize, as zero.Quantize(gathers='int8'), or None"
    check_is("quantize", quantize, Quantize | None, remedy=remedy)
    return quantize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Formats:
    """The formats that a leaf is gathered in and that its gradient is sent in, None for its own dtype."""

    gather: str | None = None
    grad: str | None = None
    block_size: int | None = None


PLAIN = Formats()
_FLOATS = frozenset({"bfloat16", "float16", "float32", "float64"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codes:
    """The codes of a format, as they are sent: of `x / scale`, float32 numbers from `-largest` to `largest`."""

    largest: float
    error: float  # what coding explains of a relative difference between steps
    dtype: Any  # of bytes: XLA may widen a float8
    per_byte: int = 1
    to_bytes: Callable[[jax.Array, int], jax.Array]  # of such numbers `[..., block, ...]`, with the dim of the block
    from_bytes: Callable[[jax.Array, int], jax.Array]  # float32 numbers again


def _int4_bytes(unit: jax.Array, dim: int) -> jax.Array:
    low, high = jnp.split(jnp.round(unit).astype(jnp.int8).astype(jnp.uint8), 2, axis=dim)
    return (low & 15) | (high << 4)  # the halves of a block share its bytes


def _int4_numbers(codes: jax.Array, dim: int) -> jax.Array:
    # Both codes in the high bits, so that the shift of a signed byte extends their signs.
    signed = lax.bitcast_convert_type(jnp.concatenate([codes << 4, codes & 0xF0], axis=dim), jnp.int8)
    return (signed >> 4).astype(jnp.float32)


CODES: Mapping[str, Codes] = {
    "int8": Codes(
        largest=127.0,
        error=5e-2,
        dtype=jnp.int8,
        to_bytes=lambda unit, _: jnp.round(unit).astype(jnp.int8),
        from_bytes=lambda codes, _: codes.astype(jnp.float32),
    ),
    "fp8": Codes(
        largest=448.0,
        error=1e-1,
        dtype=jnp.int8,
        to_bytes=lambda unit, _: lax.bitcast_convert_type(unit.astype(jnp.float8_e4m3fn), jnp.int8),
        from_bytes=lambda codes, _: lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32),
    ),
    # -8 is left out: codes are symmetric.
    "int4": Codes(largest=7.0, error=5e-1, dtype=jnp.uint8, per_byte=2, to_bytes=_int4_bytes, from_bytes=_int4_numbers),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """How an array becomes codes and scales, and those the array again: the `coding` of a `Chain`."""

    format: str  # a key of `CODES`
    dim: int  # the dim that blocks are along, from the end: -1 is the last
    size: int  # the elements of a block

    @property
    def parts(self) -> tuple[tuple[Any, float], ...]:
        """The dtypes of codes and of scales, each with how many there are for an element."""
        codes = CODES[self.format]
        return (codes.dtype, 1 / codes.per_byte), (SCALE_DTYPE, 1 / self.size)

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns codes, bytes like `x` (fewer along `dim` where several share one), and a scale for each block.

        A block with an element that is not finite has a scale that is not, and is not finite when it is decoded.
        """
        place, codes = x.ndim + self.dim, CODES[self.format]
        blocks = self._split(x, place, self.size).astype(jnp.float32)  # [..., blocks, size, ...] for the dim
        scales = (largest_size(blocks, place + 1) / codes.largest).astype(SCALE_DTYPE)
        # The rounded scale is what is sent: codes are of that.
        wide = scales.astype(jnp.float32)
        unit = blocks / jnp.expand_dims(jnp.where(wide == 0, 1, wide), place + 1)
        # Clipped, because a scale that was rounded down gives more than the largest code.
        sent = codes.to_bytes(jnp.clip(unit, -codes.largest, codes.largest), place + 1)
        return sent.reshape(*x.shape[:place], -1, *x.shape[place + 1 :]), scales

    def decode(self, parts: Sequence[jax.Array], dtype: Any) -> jax.Array:
        """Returns the array of codes and scales."""
        (sent, scales), codes = parts, CODES[self.format]
        place = sent.ndim + self.dim
        unit = codes.from_bytes(self._split(sent, place, self.size // codes.per_byte), place + 1)
        x = unit * jnp.expand_dims(scales.astype(jnp.float32), place + 1)
        return x.reshape(*sent.shape[:place], -1, *sent.shape[place + 1 :]).astype(dtype)

    @staticmethod
    def _split(x: jax.Array, place: int, size: int) -> jax.Array:
        # Without the barrier XLA:TPU computes in the shape without blocks, and writes a scale `size` times to memory.
        return lax.optimization_barrier(
            x.reshape(*x.shape[:place], x.shape[place] // size, size, *x.shape[place + 1 :])
        )


def blocks_of(
    format: str, path: str, shape: Sequence[int], dims: Dims, *, mesh: Mesh, block_size: int | None
) -> Blocks | None:
    """Returns the blocks of a leaf's shards, along one of its last two dims if they are there; None if there are none.

    `dims` are those of the leaf where it is cut finest; `path` is for errors.

    Raises:
      ValueError: a block size that divides no dim of the shard.
    """
    local = [extent // axis_size(mesh, axes) for extent, axes in zip(shape, dims, strict=True)]
    step = CODES[format].per_byte
    sizes = {i - len(local): _block(extent, block_size, step) for i, extent in enumerate(local)}  # by the dim
    # Blocks along the second to last dim leave the lanes of an accelerator as they are.
    best = max(sizes, key=lambda dim: (sizes[dim] > 0 and dim >= -2, sizes[dim], dim == -2, dim), default=0)
    if best and sizes[best]:
        return Blocks(format=format, dim=best, size=sizes[best])
    if block_size is not None:
        largest = max((_block(extent, None, step) for extent in local), default=0)
        raise ValueError(
            f"quantize: block_size={block_size} divides no dim of the shard {local} that each device has of {path!r} "
            f"(shape {list(shape)}): give block_size={largest or None} (None: a size for each leaf), or leave it as "
            f"it is by a dict of formats with {path!r}: None in front"
        )
    return None


def blocks_of_leaf(
    quantize: Quantize | None, what: str, leaf: LeafPlacement, *, mesh: Mesh, shape: Sequence[int] | None = None
) -> Blocks | None:
    """Returns the blocks in which a leaf is sent, or None where it is sent as it is.

    `what` is `gathers` or `grads`; `shape` that of a part of the leaf that is sharded alike, such as a row of a stack.
    """
    if quantize is None or _not_sent(leaf, mesh):
        return None
    if (format := quantize.format_of(what, leaf.path)) is None:
        return None
    return blocks_of(format, leaf.path, shape or leaf.shape, leaf.dims, mesh=mesh, block_size=quantize.block_size)


def spread_over(blocks: Blocks | None, shape: Sequence[int], dims: Dims, axis: str, *, mesh: Mesh) -> Dims | None:
    """Returns `dims` with one more axis, so that whole blocks of a shard go to each device along it; None if none do.

    A quantized sum over an axis that does not shard an array sends such parts to be summed, and gathers their sums.
    """
    if blocks is None or mesh.shape[axis] == 1:
        return None
    for i, (extent, axes) in enumerate(zip(shape, dims, strict=True)):
        # A block is not cut: along its dim there are as many units as blocks.
        units = extent // axis_size(mesh, axes) // (blocks.size if i == len(shape) + blocks.dim else 1)
        if units % mesh.shape[axis] == 0:
            return (*dims[:i], (*axes, axis), *dims[i + 1 :])
    return None


def _not_sent(leaf: LeafPlacement, mesh: Mesh) -> str:
    """Says why a leaf is not quantized whatever the formats are; empty where it may be."""
    if leaf.dtype not in _FLOATS:
        return f"its dtype is {leaf.dtype}"
    return "" if num_shards(mesh, leaf.dims) > 1 else leaf.reason


def check_leaves(quantize: Quantize, leaves: Sequence[LeafPlacement], *, mesh: Mesh, axes: Axes) -> None:
    """Checks the settings for the leaves of a model; on a mesh of one shard nothing is sent, and all is valid.

    Raises:
      ValueError: a pattern that matches no leaf, or none that can be quantized; a block size that does not divide; an
        axis that gradients are not summed over.
    """
    summed = {axis: mesh.shape[axis] for axis in axes.of_stage.batch}
    unknown = next((axis for axis in quantize.grad_axes(axes) if axis not in summed), None)
    if unknown is not None:
        raise ValueError(
            f"quantize: grads_over={quantize.grads_over!r}: gradients are not summed over {unknown!r}, but over "
            f"{summed}: name axes of these, or None"
        )
    for what in ("gathers", "grads", "error_feedback"):
        value = getattr(quantize, what)
        patterns = value if isinstance(value, Mapping) else {}
        sends = "gathers" if what == "gathers" else "grads"
        over = quantize.grad_axes(axes) if sends == "grads" else axes.data
        PathPatterns(f"quantize: {what}", patterns).check_matched([leaf.path for leaf in leaves])
        sent = {leaf.path for leaf in leaves if blocks_of_leaf(quantize, sends, leaf, mesh=mesh) is not None}
        for pattern, format in (patterns or {".*": value}).items():
            matched = [leaf for leaf in leaves if re.fullmatch(pattern, leaf.path)]
            if not format or axis_size(mesh, over) == 1 or sent & {leaf.path for leaf in matched}:
                continue
            largest = max(matched, key=lambda leaf: leaf.num_bytes)
            small = f"no dim of its shard has a divisor from {SMALLEST_BLOCK} to {LARGEST_BLOCK}"
            which = f"{pattern!r} matches" if patterns else "there is"
            raise ValueError(
                f"quantize: {what}={value!r}: {which} no leaf to quantize; the largest is {largest.path!r} of shape "
                f"{largest.shape}: {_not_sent(largest, mesh) or small}. Leave {what} out, or give a block_size that "
                "divides its shards"
            )


def largest_size(blocks: jax.Array, dim: int) -> jax.Array:
    """Returns the largest of the absolute values along a dim; infinity where one is not finite."""
    # XLA:CPU leaves NaN out of a maximum (docs/xla_faults.md), but no infinity.
    return jnp.where(jnp.isfinite(blocks), jnp.abs(blocks), jnp.inf).max(dim)


def _block(extent: int, block_size: int | None, step: int) -> int:
    if block_size is not None:
        return block_size if extent and extent % block_size == 0 else 0
    sizes = (size for size in range(LARGEST_BLOCK, SMALLEST_BLOCK - 1, -1) if extent % size == 0 and size % step == 0)
    return next(sizes, 0) if extent else 0
