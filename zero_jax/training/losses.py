"""Chunked cross-entropy over a large vocabulary: the full logits are never in memory.

Logits are computed and freed a chunk of the vocabulary at a time (the constant-size buffers of the ZeRO paper, section
6.2, for the largest temporary of a language model). The chunks are of the vocabulary rather than of the tokens: each
chunk of the head's gradient is then complete at once, so it is reduced across devices once and leaves as a shard, where
chunks of tokens would each add to a gradient of the entire head.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh, NamedSharding

from zero_jax.sharding.chains import scatter_shardings, scattered
from zero_jax.sharding.mesh import axes_of, axis_size
from zero_jax.sharding.spec import dims_of, named_along

# 4096 float32 logits of 8192 tokens are 128 MiB, and a product of that size keeps any device's matrix units busy.
CHUNK_SIZE = 4096
_NO_TOKEN = jnp.iinfo(jnp.int32).min


def softmax_cross_entropy_with_integer_labels(
    hidden: Array,
    head: Array,
    labels: Array,
    *,
    where: Array | None = None,
    soft_cap: float | None = None,
    mesh: Mesh | None,
    chunk_size: int = CHUNK_SIZE,
    data_axes: Sequence[str] | None = None,
    model_axes: Sequence[str] | None = None,
) -> Array:
    """Returns softmax cross-entropy of `hidden @ head` with integer labels, without materializing the logits.

    Replaces `optax.softmax_cross_entropy_with_integer_labels(hidden @ head, labels)`. Products take the argument dtypes
    and sum in float32; logits, losses and the sums of the gradients are float32. The backward pass recomputes the
    logits: a third product of this size beside the two of the gradients. Reverse mode only.

    Args:
      hidden: The last hidden states, `[..., features]`.
      head: The output weights, `[features, vocabulary]`; for a tied table `[vocabulary, features]` pass `table.T`.
      labels: The target tokens, integers `[...]` between 0 and the size of the vocabulary.
      where: Which losses to compute, bool `[...]`; the others are 0. None: all.
      soft_cap: Logits become `soft_cap * tanh(logits / soft_cap)` (Gemma 2); None: they stay as they are.
      mesh: The mesh of the train step, so that each chunk of the head's gradient is reduced to shards once, and a head
        that is sharded by vocabulary over `model` stays so. None is for one device: by default XLA gathers and sums
        the full gradient for every chunk.
      chunk_size: Entries of the vocabulary per chunk; logits take `4 * tokens * chunk_size` bytes.
      data_axes: The mesh axes of `data`, if not by their names.
      model_axes: The mesh axes that the vocabulary may be sharded over, if not by their names.

    Returns:
      The losses in nats, float32 `[...]`.

    Raises:
      ValueError: Shapes or dtypes that do not fit, a chunk size below 1, or a soft cap that is not positive.

    Example:
      >>> hidden, head, labels = jnp.ones((2, 8, 16)), jnp.ones((16, 64)), jnp.zeros((2, 8), jnp.int32)
      >>> zero.losses.softmax_cross_entropy_with_integer_labels(hidden, head, labels, mesh=None, chunk_size=32).shape
      (2, 8)
    """
    hidden, head, labels = jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(labels)
    _check(hidden, head, labels, where, chunk_size)
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f"soft_cap={soft_cap!r} is not a positive number: give the model's, such as 30.0, or None")
    num_blocks, shardings = 1, ()
    if mesh is not None:
        axes = axes_of(mesh, data=data_axes)
        num_model = axis_size(mesh, axes.model if model_axes is None else model_axes)
        num_blocks = num_model if head.shape[1] % num_model == 0 else 1
        shardings = _grad_shardings(mesh, axes.data, num_features=head.shape[0])
    chunks = _Chunks(
        num_features=head.shape[0],
        num_blocks=num_blocks,
        block_size=head.shape[1] // num_blocks,
        size=min(math.ceil(chunk_size / num_blocks), head.shape[1] // num_blocks),
        shardings=shardings,
        soft_cap=soft_cap,
    )
    if shardings and any(dims_of(shardings[-1], 3)):
        head = scattered(head, dim=0)
    losses: Any = _losses(chunks, hidden, head, labels)
    return losses if where is None else jnp.where(where, losses, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chunks:
    """Chunks of a head that is sharded by vocabulary: every chunk takes a part of each shard (block).

    If the size does not divide, the last chunk overlaps the previous one: no padding, and one shape for all.
    """

    num_features: int
    num_blocks: int
    block_size: int
    size: int  # of a chunk, in each block
    shardings: tuple[NamedSharding, ...]  # of the steps that reduce a chunk of the gradient
    soft_cap: float | None

    @property
    def num_chunks(self) -> int:
        return math.ceil(self.block_size / self.size)

    def start(self, index: Array) -> Array:
        """Returns where a chunk starts in each block."""
        return jnp.minimum(index * self.size, self.block_size - self.size)

    def blocks(self, head: Array) -> Array:
        """Returns the head as `[features, blocks, block]`."""
        return head.reshape(self.num_features, self.num_blocks, self.block_size)

    def logits(self, hidden: Array, blocks: Array, index: Array) -> tuple[Array, Array, Array, Array]:
        """Returns a chunk of the head, its logits `[..., blocks, size]`, their tokens, and the slopes of the cap."""
        start = self.start(index)
        chunk = lax.dynamic_slice_in_dim(blocks, start, self.size, axis=2)
        logits = jnp.einsum("...d,dbv->...bv", hidden, chunk, preferred_element_type=jnp.float32)
        share = jnp.zeros(()) if self.soft_cap is None else jnp.tanh(logits / self.soft_cap)
        logits = logits if self.soft_cap is None else self.soft_cap * share
        place = start + jnp.arange(self.size)
        tokens = jnp.arange(self.num_blocks)[:, None] * self.block_size + place
        is_repeated = place < index * self.size  # by the chunk before
        logits, tokens = jnp.where(is_repeated, -jnp.inf, logits), jnp.where(is_repeated, _NO_TOKEN, tokens)
        return chunk, logits, tokens, (1 + share) * (1 - share)

    def placed(self, grad: Array) -> Array:
        """Reduces a chunk of the head's gradient across devices, but over axes that a `jax.shard_map` has mapped."""
        mapped, shape = jax.sharding.get_abstract_mesh().manual_axes, grad.shape
        if self.num_blocks == 1:  # over some dims of a torus XLA:TPU reduce-scatters matrices alone
            grad = grad.reshape(self.num_features, -1)
        for sharding in self.shardings:
            axes = dims_of(sharding, len(shape))[0]
            left = tuple(axis for axis in axes if axis not in mapped)
            if left or not axes:
                grad = _pin(named_along(sharding.mesh, grad.ndim, {0: left}), grad)
        return grad.reshape(shape)


def _grad_shardings(mesh: Mesh, data: Sequence[str], *, num_features: int) -> tuple[NamedSharding, ...]:
    """Returns the shardings that reduce-scatter a chunk's gradient `[features, blocks, size]` by feature.

    If the features do not divide, it is all-reduced. By default XLA would gather every chunk to the sharding of the
    head's gradient.
    """
    axes = tuple(data) if num_features % axis_size(mesh, data) == 0 else ()
    steps = scatter_shardings(mesh, (axes, (), ()), axes)
    return tuple(named_along(s.mesh, 3, {0: dims_of(s, 3)[0]}) for s in steps)


def _pin(sharding: NamedSharding, x: Array) -> Array:
    """Constrains an array's sharding, except under `vmap`, where the train step keeps gradients per device."""
    pin = custom_vmap(lambda x: lax.with_sharding_constraint(x, sharding))
    pin.def_vmap(lambda size, batched, x: (x, batched[0]))
    return pin(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(chunks: _Chunks, hidden: Array, head: Array, labels: Array) -> Array:
    return _forward(chunks, hidden, head, labels)[0]


def _forward(chunks: _Chunks, hidden: Array, head: Array, labels: Array) -> tuple[Array, Any]:
    """Sums the exponentials chunk by chunk, relative to the largest logit so far."""
    blocks = chunks.blocks(head)

    def body(carry: tuple[Array, Array, Array], index: Array) -> tuple[tuple[Array, Array, Array], None]:
        largest, total, label_logits = carry
        _, logits, tokens, _ = chunks.logits(hidden, blocks, index)
        new = jnp.maximum(largest, logits.max(-1))
        total = total * jnp.exp(largest - new) + jnp.exp(logits - new[..., None]).sum(-1)
        hits = tokens == labels[..., None, None]
        return (new, total, label_logits + jnp.where(hits, logits, 0).sum(-1)), None

    # Reduced per block until the end, so that blocks on several devices are reduced once.
    zeros = jnp.zeros((*labels.shape, chunks.num_blocks), jnp.float32)
    # Not -inf, of which the first `largest - new` would be NaN where a chunk is of -inf alone.
    start = (jnp.full_like(zeros, jnp.finfo(jnp.float32).min), zeros, zeros)
    (largest, total, label_logits), _ = lax.scan(body, start, jnp.arange(chunks.num_chunks))
    log_normalizers = jax.nn.logsumexp(largest, axis=-1, b=total)
    return log_normalizers - label_logits.sum(-1), (hidden, head, labels, log_normalizers)


def _backward(chunks: _Chunks, residuals: Any, cotangent: Array) -> tuple[Array, Array, None]:
    """Recomputes the logits chunk by chunk, and accumulates the gradients of each chunk."""
    hidden, head, labels, log_normalizers = residuals
    blocks = chunks.blocks(head)

    def body(carry: tuple[Array, Array], index: Array) -> tuple[tuple[Array, Array], None]:
        grad_hidden, grad_blocks = carry
        chunk, logits, tokens, slopes = chunks.logits(hidden, blocks, index)
        probabilities = jnp.exp(logits - log_normalizers[..., None, None])
        errors = jnp.where(tokens == labels[..., None, None], probabilities - 1, probabilities)
        errors = (errors * slopes * cotangent[..., None, None]).astype(jnp.result_type(hidden, head))
        grad_hidden += jnp.einsum("...bv,dbv->b...d", errors, chunk, preferred_element_type=jnp.float32)
        # In the head's dtype, because that is also the dtype in which it is summed across devices.
        grad_chunk = jnp.einsum("...d,...bv->dbv", hidden, errors, preferred_element_type=head.dtype)
        grad_chunk = chunks.placed(grad_chunk)
        # The overlap of the last chunk with the previous one is written twice: hence the order from last to first.
        grad_blocks = lax.dynamic_update_slice_in_dim(grad_blocks, grad_chunk, chunks.start(index), axis=2)
        return (grad_hidden, grad_blocks), None

    # As in the forward pass, per block: what blocks on several devices have is summed once.
    zeros = jnp.zeros((chunks.num_blocks, *hidden.shape), jnp.float32)
    start = (zeros, chunks.placed(jnp.zeros(blocks.shape, head.dtype)))
    order = jnp.arange(chunks.num_chunks)
    (grad_hidden, grad_blocks), _ = lax.scan(body, start, order, reverse=True)
    return grad_hidden.sum(0).astype(hidden.dtype), grad_blocks.reshape(head.shape), None


_losses.defvjp(_forward, _backward)


def _check(hidden: Array, head: Array, labels: Array, where: Array | None, chunk_size: int) -> None:
    if head.ndim != 2 or not hidden.ndim or hidden.shape[-1] != head.shape[0]:
        raise ValueError(
            f"hidden states of shape {hidden.shape} cannot be multiplied with a head of shape {head.shape}: give "
            "`[..., features]` and `[features, vocabulary]`, the transpose of a tied table"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels of shape {labels.shape} are not one for each of the hidden states of shape {hidden.shape}: "
            f"give labels of shape {hidden.shape[:-1]}"
        )
    if where is not None and jnp.shape(where) != labels.shape:
        raise ValueError(f"where has shape {jnp.shape(where)}, and labels {labels.shape}: give both the same")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels are {labels.dtype}: give integers between 0 and {head.shape[1] - 1}")
    for name, x in (("hidden", hidden), ("head", head)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} is {x.dtype}: give floating point numbers")
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(
            f"chunk_size={chunk_size!r} is not a positive integer: give a few thousand, such as {CHUNK_SIZE}"
        )
