"""Attention on NVIDIA GPUs: the flash attention of cuDNN, through JAX's primitives for it.

Segments are sequences of their own to cuDNN (its packed layout): it is told where each begins, and how long it is. It
takes a fixed number of them at once, and tokens of one segment have to lie side by side; `_within_segments` does the
other cases in rounds, and in another order of the tokens.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from zero_jax.attention.xla import Operands
from zero_jax.core.extras import pip_install

INSTALL = f'{pip_install("zero-jax[cuda]")}, or "zero-jax[gpu-compiler]" for plans on machines without a GPU'
# What the backward pass takes, by the major compute capability (NVIDIA's support matrix of scaled dot-product
# attention). Hopper (9) alone has wide heads. Hopper and the Blackwell of data centers (10) have segments, and one pair
# of widths of keys and values. The Blackwell of workstations (12) has what Ampere (8) has.
MAX_HEAD_SIZE = 128
WIDE_HEAD_SIZE, WITH_WIDE_HEADS = 256, (9,)
OWN_VALUES, FIRST_WITH_OWN_VALUES = (192, 128), 91000  # widths of keys and of values; the version that takes them
WITH_SEGMENTS = (9, 10)
# Segments of an example that a call takes, on average over the batch. Each costs a little, used or not: on an H100 8
# took no longer than one whole sequence, 64 twice as long (4 x 2,048 tokens, 16 heads of 128).
SEGMENTS_AT_ONCE = 8
_MOST_ELEMENTS = 2**31 - 1  # of an array, in which cuDNN is told the places of segments as int32

_Arrays = Sequence[Array]


def installed_version() -> int:
    """Returns the version of the library, such as 91200; 0 if there is none."""
    versions = importlib.import_module("jax._src.lib").cuda_versions
    try:
        return 0 if versions is None else versions.cudnn_get_version()
    except RuntimeError:
        return 0


def forward(of: Operands, call: Any) -> list[Array]:
    """Returns results `[B, T, N, V]` and log-sum-exps `[B, N, T]`."""
    arrays = [of.query, of.key, of.value]
    if (segments := _segments(of)) is None:
        return _run("fwd", arrays, call, lengths=of.extras, is_training=True)

    def run(packed: _Packed, query: Array, key: Array, value: Array) -> list[Array]:
        where = {"lengths": [packed.lengths] * 2, "starts": packed.starts}
        out, by_segment = _run("fwd", [query, key, value], call, **where, is_training=True)
        return [out, by_segment[packed.segment, :, packed.place]]

    out, lse = _within_segments(run, arrays, segments)
    return [out, lse.swapaxes(1, 2)]


def backward(of: Operands, call: Any, *, out: Array, lse: Array, cotangent: Array) -> list[Array]:
    """Returns the cotangents of query, key and value."""
    arrays = [of.query, of.key, of.value]
    if (segments := _segments(of)) is None:
        return _run("bwd", arrays, call, lse, out, cotangent, lengths=of.extras)

    def run(packed: _Packed, query: Array, key: Array, value: Array, lse: Array, *rest: Array) -> list[Array]:
        shape = (packed.lengths.size, lse.shape[2], lse.shape[1])
        by_segment = jnp.zeros(shape, lse.dtype).at[packed.segment, :, packed.place].set(lse, mode="drop")
        where = {"lengths": [packed.lengths] * 2, "starts": packed.starts}
        return _run("bwd", [query, key, value], call, by_segment, *rest, **where)

    return _within_segments(run, [*arrays, lse.swapaxes(1, 2), out, cotangent], segments)


def _segments(of: Operands) -> Array | None:
    """Returns the segments `[B, T]` of an attention; what has one dim are lengths."""
    return of.extras[0] if of.extras and of.extras[0].ndim == 2 else None


class _Packed(NamedTuple):
    """The segments that one call takes, numbered from 0 over the whole batch."""

    starts: Array  # [C + 1], the first token of each, counted over the batch; of those that are not there, B * T
    lengths: Array  # [C], tokens of each
    segment: Array  # [B, T], the segment of each token; C for the tokens of other calls
    place: Array  # [B, T], the place of each token in its segment


class _Runs(NamedTuple):
    """The runs of equal ids in the rows of segments `[B, T]`, numbered over the batch."""

    starts: Array  # [B * T + C + 1], the first token of each; of those that are not there, B * T
    of_token: Array  # [B, T]
    count: Array  # how many there are

    def packed(self, first: Any, num_at_once: int) -> _Packed:
        """Returns so many of them, from the run `first` on."""
        starts = jax.lax.dynamic_slice(self.starts, (first,), (num_at_once + 1,))
        tokens = jnp.arange(self.of_token.size, dtype=jnp.int32).reshape(self.of_token.shape)
        number = self.of_token - first
        is_here = (number >= 0) & (number < num_at_once)
        place = tokens - self.starts[self.of_token]
        return _Packed(starts, jnp.diff(starts), jnp.where(is_here, number, num_at_once), place)


def _runs(segments: Array, num_at_once: int) -> _Runs:
    starts_run = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    size = segments.size
    # With as many more as a call takes: the last round has a whole slice of them (`packed`).
    starts = jnp.flatnonzero(starts_run, size=size + num_at_once + 1, fill_value=size).astype(jnp.int32)
    of_token = jnp.cumsum(starts_run.ravel(), dtype=jnp.int32).reshape(segments.shape) - 1
    return _Runs(starts, of_token, of_token[-1, -1] + 1)


def _within_segments(run: Callable[..., Sequence[Array]], arrays: _Arrays, segments: Array) -> list[Array]:
    """Calls a kernel of packed segments on arrays `[B, T, ...]`, and returns its results, which have tokens there too.

    `run(packed, *arrays)` has to be right at the tokens of `packed` alone.
    """
    if segments.shape[0] > 1 and max(x.size for x in arrays) > _MOST_ELEMENTS:  # in halves, until places fit int32
        half = segments.shape[0] // 2
        parts = [
            _within_segments(run, [x[part] for x in arrays], segments[part])
            for part in (slice(half), slice(half, None))
        ]
        return [jnp.concatenate(results) for results in zip(*parts, strict=True)]
    num_at_once = segments.shape[0] * SEGMENTS_AT_ONCE
    # Outside of the branches, where the compiler shares them among layers. The order of the tokens in a segment stays,
    # which is all that a causal mask asks.
    order = jnp.argsort(segments, axis=1, stable=True)
    in_order = _runs(jnp.take_along_axis(segments, order, axis=1), num_at_once)
    runs = _runs(segments, num_at_once)

    def at_once(*arrays: Array) -> list[Array]:
        return list(run(runs.packed(0, num_at_once), *arrays))

    def in_rounds(*arrays: Array) -> list[Array]:
        arrays = tuple(_taken(x, order) for x in arrays)

        def a_round(state: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
            first, results = state
            packed = in_order.packed(first, num_at_once)
            is_here = packed.segment < num_at_once
            new = [jnp.where(_over(is_here, x), x, old) for x, old in zip(run(packed, *arrays), results, strict=True)]
            return first + num_at_once, new

        shapes = jax.eval_shape(at_once, *arrays)
        begin = (jnp.int32(0), [jnp.zeros(x.shape, x.dtype) for x in shapes])
        _, results = jax.lax.while_loop(lambda state: state[0] < in_order.count, a_round, begin)
        back = jnp.argsort(order, axis=1)
        return [_taken(x, back) for x in results]

    is_one_run_each = runs.count == in_order.count  # in order there are as many runs as segments
    return jax.lax.cond(is_one_run_each & (runs.count <= num_at_once), at_once, in_rounds, *arrays)


def _over(of_tokens: Array, x: Array) -> Array:
    """Returns an array `[B, T]` with dims of size 1 for the others of an array."""
    return of_tokens.reshape(*of_tokens.shape, *[1] * (x.ndim - 2))


def _taken(x: Array, order: Array) -> Array:
    return jnp.take_along_axis(x, _over(order, x), axis=1)


def _run(
    kernel: str, arrays: _Arrays, call: Any, *more: Array, lengths: _Arrays, starts: Array | None = None, **how: bool
) -> list[Array]:
    """Runs a kernel, `fwd` or `bwd`, the latter with `more`: log-sum-exps, results and their cotangent.

    The former returns results `[B, T, N, V]` and log-sum-exps, `[B, N, T]` or of segments `[C, N, T]`.
    """
    kernels = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    unused = jnp.zeros(0, arrays[0].dtype)
    mask = "_".join(["PADDING"] * bool(lengths) + ["CAUSAL"] * (call.band.right == 0)) or "NO_MASK"
    window = None if call.band.left is None else call.band.left + 1  # the keys that a query sees, itself included
    of_query, of_key = lengths or (unused, unused)
    offsets = [unused, unused]
    if starts is not None:
        batch, num_tokens = arrays[0].shape[:2]
        num_segments = (starts.size - 1) // batch
        # As many as JAX's shape of them has; cuDNN reads the first ones, in elements.
        padded = jnp.pad(starts, (0, batch - 1), constant_values=batch * num_tokens).reshape(batch, num_segments + 1)
        of_query, of_key = (x.reshape(batch, num_segments) for x in (of_query, of_key))
        offsets = [padded * (x.shape[2] * x.shape[3]) for x in arrays[:2]]
    settings = dict(
        scale=call.scale,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=kernels.MaskType[mask],
        layout=kernels.AttentionLayout.BTNH.value,
        sliding_window_length=window,
    )
    if "score_mod_name" in inspect.signature(kernels._dot_product_attention_fwd_cuda_lowering).parameters:  # JAX 0.12
        settings |= {"score_mod_name": None, "score_mod_jaxpr": None}
    pages = [unused, unused]
    primitive = getattr(kernels, f"_dot_product_attention_{kernel}_p")
    operands = [*arrays, unused, of_query, of_key, *offsets, *pages, *more]
    return list(primitive.bind(*operands, **settings, **how))
