"""Attention on TPUs: JAX's Pallas kernel "splash attention", which skips blocks of logits that a mask leaves out.

Examples of a device are mapped over, sequences padded to blocks. Padding is hidden by the mask, which is computed
within the kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_infos

from zero_jax.attention.xla import Band, Operands
from zero_jax.program import jaxprs
from zero_jax.program.evaluation import evaluate

_LANES = 128  # sizes of blocks are multiples of it
_BLOCK = 512
_MAX_BLOCK = 2048
# The fused backward kernel writes a part of the queries' cotangent for each block of keys: for more, a second kernel.
_MAX_PARTS = 8
# A block of keys of the backward pass has at most so many elements, to fit into a core's memory.
_MAX_BLOCK_ELEMENTS = _MAX_BLOCK * 128


@dataclasses.dataclass(frozen=True)
class Splash:
    """The kernels, on a TPU or interpreted."""

    interpret: bool

    def forward(self, of: Operands, call: Any) -> list[jax.Array]:
        """Returns results `[B, T, N, V]` and log-sum-exps `[B, N, T]`."""
        plan = _plan(of, call)
        visited = jax.tree.map(jnp.asarray, plan.forward)

        def of_example(query: Any, key: Any, value: Any, *segments: Any) -> Any:
            ids = kernel.SegmentIds(*segments) if segments else None
            options = dict(plan.options, interpret=self.interpret)
            out, (lse,) = kernel._splash_attention_forward(visited, query, key, value, ids, None, **options)
            return out, lse

        operands = plan.padded(of)
        out, lse = jax.vmap(_with_costs(of_example, plan.cost(operands, backward=False)))(*operands)
        return [plan.unpadded(out, of.query), lse[:, :, : of.query.shape[1]]]

    def backward(
        self, of: Operands, call: Any, *, out: jax.Array, lse: jax.Array, cotangent: jax.Array
    ) -> list[jax.Array]:
        """Returns the cotangents of query, key and value."""
        plan = _plan(of, call)
        visited = jax.tree.map(jnp.asarray, (plan.backward_query, plan.backward))

        def of_example(query: Any, key: Any, value: Any, out: Any, lse: Any, cotangent: Any, *segments: Any) -> Any:
            ids = kernel.SegmentIds(*segments) if segments else None
            residuals = (query, key, value, ids, None, out, lse, *visited)
            options = dict(plan.options, interpret=self.interpret)
            _, _, _, *cotangents, _, _ = kernel._splash_attention_bwd(**options, res=residuals, do=cotangent)
            return tuple(cotangents)

        operands, extra = plan.padded(of), plan.queries - of.query.shape[1]
        results = plan.by_heads(out, extra), jnp.pad(lse, ((0, 0), (0, 0), (0, extra))), plan.by_heads(cotangent, extra)
        operands = [*operands[:3], *results, *operands[3:]]
        dq, dk, dv = jax.vmap(_with_costs(of_example, plan.cost(operands, backward=True)))(*operands)
        dq = (dq.astype(jnp.float32) * call.scale).astype(of.query.dtype)  # of the queries before `padded` scaled them
        return [plan.unpadded(x, like) for x, like in zip((dq, dk, dv), of[:3], strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Plan:
    """How the kernels run on operands of some shapes."""

    queries: int  # places of queries, with padding
    keys: int  # places of keys, with padding
    scale: float  # what queries are multiplied by
    share: float  # the share of the logits' blocks that are computed
    forward: Any  # the blocks that the forward kernel visits
    backward: Any  # the blocks that the backward kernel visits
    backward_query: Any  # those that the kernel of the queries' cotangents visits, if that is one of its own
    options: dict[str, Any]  # the arguments that the kernels have in common

    def by_heads(self, x: jax.Array, extra: int) -> jax.Array:
        """Returns `[B, N, T + extra, H]` of `[B, T, N, H]`."""
        return jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, extra), (0, 0)))

    def unpadded(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """Returns `[B, T, N, H]` of `[B, N, T + extra, H]`."""
        return jnp.swapaxes(x[:, :, : like.shape[1]], 1, 2)

    def padded(self, of: Operands) -> list[jax.Array]:
        """Returns the operands of the kernels, with scaled queries."""
        extra, extra_keys = self.queries - of.query.shape[1], self.keys - of.key.shape[1]
        # The kernels take no scale of logits.
        query = (of.query.astype(jnp.float32) * self.scale).astype(of.query.dtype)
        ids = [jnp.pad(x, ((0, 0), (0, n))) for x, n in zip(of.extras, (extra, extra_keys), strict=False)]
        arrays = (query, extra), (of.key, extra_keys), (of.value, extra_keys)
        return [*(self.by_heads(x, n) for x, n in arrays), *ids]

    def cost(self, operands: Sequence[jax.Array], *, backward: bool) -> pl.CostEstimate:
        """Returns what the kernels do on an example: products of the blocks visited, of which the backward has five."""
        query, _, value = operands[:3]
        logits = int(query.shape[1] * self.queries * self.keys * self.share)
        per_logit = _flops_per_logit(query.shape[-1], value.shape[-1], backward=backward)
        num_bytes = sum(x.size * x.dtype.itemsize for x in operands) // query.shape[0]
        return pl.CostEstimate(flops=2 * logits * per_logit, transcendentals=logits, bytes_accessed=2 * num_bytes)


def _plan(of: Operands, call: Any) -> _Plan:
    sizes = of.query.shape[1], of.key.shape[1]
    blocks = block_sizes(*sizes, max(of.query.shape[-1], of.value.shape[-1]))
    visited, function = _visited(*sizes, call.band, blocks)
    forward, backward, backward_query = visited
    queries, keys = _round_up(sizes[0], blocks.block_q), _round_up(sizes[1], blocks.block_kv)
    options = {
        "mask_value": kernel.DEFAULT_MASK_VALUE,
        "is_mqa": False,
        "save_residuals": True,
        "block_sizes": blocks,
        "residual_checkpoint_name": None,
        "mask_function": function,
        "attn_logits_soft_cap": call.soft_cap,
    }
    return _Plan(
        queries=queries,
        keys=keys,
        scale=call.scale,
        share=_share(forward, (queries // blocks.block_q) * (keys // blocks.block_kv)),
        forward=forward,
        backward=backward,
        backward_query=backward_query,
        options=options,
    )


def work(query: Any, key: Any, value: Any, call: Any, *, backward: bool) -> tuple[float, float]:
    """Returns what `attention_work` does."""
    plan, (b, _, n, h) = _plan(Operands(query, key, value, ()), call), query.shape
    per_logit = _flops_per_logit(h, value.shape[-1], backward=backward)
    flops = 2.0 * b * n * plan.queries * plan.keys * plan.share * per_logit
    blocks = plan.options["block_sizes"]
    num_parts = plan.keys // blocks.block_kv if backward and blocks.use_fused_bwd_kernel else 0
    part_bytes = b * n * plan.queries * h * query.dtype.itemsize
    return flops, float((num_parts + 1) * part_bytes) if num_parts > 1 else 0.0


def _flops_per_logit(head_size: int, value_size: int, *, backward: bool) -> int:
    """Returns the multiply-adds of the products for a logit: two, in the backward pass five."""
    return 3 * head_size + 2 * value_size if backward else head_size + value_size


def block_sizes(num_queries: int, num_keys: int, head_size: int) -> kernel.BlockSizes:
    """Returns the blocks of the kernels for sequences of some lengths, to which these are padded.

    Blocks of 512 x 512 logits; where sequences are long, more keys are loaded at once. Few blocks would leave a causal
    mask nothing to skip, many parts of the queries' cotangents cost memory.
    """
    block = _block(num_queries, _BLOCK)
    compute = _block(num_keys, _BLOCK)
    most = min(_MAX_BLOCK, _MAX_BLOCK_ELEMENTS // _round_up(head_size, _LANES), num_keys // 4) // compute
    num_parts = lambda loaded: -(-num_keys // loaded)  # noqa: E731
    loaded = min(
        (compute * n for n in range(1, max(most, 1) + 1)),
        key=lambda loaded: (num_parts(loaded) > _MAX_PARTS, num_parts(loaded) * loaded, -loaded),
    )
    is_fused = num_parts(loaded) <= _MAX_PARTS
    return kernel.BlockSizes(
        block_q=block,
        block_kv=loaded,
        block_kv_compute=compute,
        block_q_dkv=block,
        block_kv_dkv=loaded,
        block_kv_dkv_compute=compute,
        block_q_dq=None if is_fused else block,
        block_kv_dq=None if is_fused else loaded,
        use_fused_bwd_kernel=is_fused,
    )


def _block(size: int, largest: int) -> int:
    """Returns the size of equal blocks, up to `largest`, that pad a sequence little."""
    num_blocks = -(-size // largest)
    return _round_up(-(-size // num_blocks), _LANES)


def _round_up(size: int, block: int) -> int:
    return -(-size // block) * block


@dataclasses.dataclass(frozen=True)
class _BandMask(masks.Mask):
    """The mask of a band, of sequences of some sizes in arrays of a padded shape; kernels use `mask_function`."""

    padded: tuple[int, int]
    sizes: tuple[int, int]
    band: Band

    @property
    def shape(self) -> tuple[int, ...]:
        return self.padded

    @property
    def q_sequence(self) -> np.ndarray:
        return np.arange(self.padded[0], dtype=np.int32)

    def mask_function(self, queries: Any, keys: Any) -> Any:
        """Tells which queries see which keys; queries that are padding see some key."""
        num_queries, num_keys = self.sizes
        left, right = self.band.left, self.band.right
        # Computed in the kernel for each logit: no term that leaves out nothing.
        terms = []
        if right is not None:
            terms.append(keys <= queries + right if right else keys <= queries)
        if left is not None:
            is_seen = keys >= queries - left
            terms.append(is_seen | (queries >= num_queries) if num_queries < self.shape[0] else is_seen)
        if num_keys < self.shape[1] and (right is None or num_queries - 1 + right >= num_keys):
            terms.append(keys < num_keys)
        return functools.reduce(lambda a, b: a & b, terms)

    def __getitem__(self, index: Any) -> np.ndarray:
        rows, columns = (np.arange(part.start, part.stop) for part in index)
        visible = self.mask_function(rows[:, None], columns[None, :])
        return np.broadcast_to(visible, (len(rows), len(columns)))


@functools.lru_cache(maxsize=64)
def _visited(num_queries: int, num_keys: int, band: Band, blocks: kernel.BlockSizes) -> Any:
    """Returns the blocks that the kernels visit, and the function that masks their logits."""
    shape = _round_up(num_queries, blocks.block_q), _round_up(num_keys, blocks.block_kv)
    sizes = num_queries, num_keys
    is_full = band == Band(None, None) and num_keys == shape[1]
    mask = masks.MultiHeadMask([masks.FullMask(shape) if is_full else _BandMask(shape, sizes, band)])
    forward, function = mask_infos.process_mask(mask, (blocks.block_q, blocks.block_kv))
    backward, _ = mask_infos.process_mask_dkv(
        mask, (blocks.block_q_dkv, blocks.block_kv_dkv), shrink_grid=not blocks.use_fused_bwd_kernel
    )
    backward_query = None
    if not blocks.use_fused_bwd_kernel:
        backward_query, _ = mask_infos.process_mask(mask, (blocks.block_q_dq, blocks.block_kv_dq))
    return (forward, backward, backward_query), function


def _share(info: Any, num_blocks: int) -> float:
    return 1.0 if info.block_mask is None else float(np.count_nonzero(info.block_mask)) / num_blocks


def _with_costs(function: Callable[..., Any], cost: pl.CostEstimate) -> Callable[..., Any]:
    """Returns a function with an estimate of what its kernels cost, which those of JAX do not have."""

    def run(*arrays: jax.Array) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*arrays)
        jaxpr, consts = jaxprs.open_jaxpr(closed)
        num_calls = sum(eqn.primitive.name == "pallas_call" for eqn in jaxpr.eqns)
        each = dataclasses.replace(cost, **{k: v // num_calls for k, v in dataclasses.asdict(cost).items()})
        before_cast: dict[Any, Any] = {}

        def equation(eqn: Any, values: list[Any]) -> list[Any]:
            if eqn.primitive.name == "pallas_call":
                eqn = eqn.replace(params={**eqn.params, "cost_estimate": each})
            elif eqn.primitive.name == "convert_element_type":
                before_cast[eqn.outvars[0]] = values[0]
            # The sum of the parts of the queries' cotangents, one for each block of keys.
            elif eqn.primitive.name == "reduce_sum" and eqn.params["axes"] == (0,):
                return [_added(before_cast.get(eqn.invars[0], values[0]), values[0].dtype)]
            return jaxprs.bind(eqn, values)

        return jax.tree.unflatten(jax.tree.structure(shape), evaluate(jaxpr, consts, arrays, equation))

    return run


def _added(parts: jax.Array, dtype: Any) -> jax.Array:
    """Returns the sum over the leading dim, in `dtype`: XLA:TPU adds slices faster than it reduces a leading dim."""
    return functools.reduce(jnp.add, [parts[i].astype(dtype) for i in range(parts.shape[0])])
