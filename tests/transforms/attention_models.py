"""Attention as models write it: `SAME` are what a kernel computes, `OTHER` look like it and are another function.

Each case is `attend(q, k, v, data)` of q `[B, T, N, H]`, k and v `[B, S, K, H]`, and of data: `segments` `[B, T]`,
`valid` `[B, S]`, `bias` `[N, T, S]`, `temperature` `[B, N, T, 1]`, a `key`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SCALE = 6**-0.5
LOW = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    attend: Callable[..., Any]
    q_shape: tuple[int, ...] = (2, 8, 4, 6)
    k_shape: tuple[int, ...] = (2, 8, 4, 6)
    reason: str = ""
    says: str = ""


SAME: dict[str, Case] = {}
OTHER: dict[str, Case] = {}


def same(says="", **shapes):
    def add(attend):
        SAME[attend.__name__] = Case(attend=attend, says=says, **shapes)
        return attend

    return add


def other(reason, **shapes):
    def add(attend):
        OTHER[attend.__name__] = Case(attend=attend, reason=reason, **shapes)
        return attend

    return add


def causal(t, s=None):
    return jnp.tril(jnp.ones((t, s or t), bool))


def scores(q, k):
    return jnp.einsum("btnh,bsnh->bnts", q, k)


def values(p, v):
    return jnp.einsum("bnts,bsnh->btnh", p, v)


def masked(x, mask, fill=-1e30):
    return jnp.where(mask, x, fill)


# --- the same function ------------------------------------------------------------------------------------------------


@same("no mask")
def no_mask(q, k, v, data):
    return values(jax.nn.softmax(scores(q, k) * SCALE), v)


@same("8 x 12", k_shape=(2, 12, 4, 6))
def cross_attention(q, k, v, data):
    return values(jax.nn.softmax(scores(q, k) * SCALE), v)


@same("causal")
def by_hand(q, k, v, data):
    x = masked(scores(q, k) / math.sqrt(6), causal(8))
    x = jnp.exp(x - x.max(-1, keepdims=True))
    return values(x / x.sum(-1, keepdims=True), v)


@same("causal")
def divided_after_the_values(q, k, v, data):
    x = masked(scores(q, k) * SCALE, causal(8))
    x = jnp.exp(x - jax.lax.stop_gradient(x.max(-1, keepdims=True)))
    return values(x, v) / jnp.einsum("bnts->btn", x)[..., None]


@same("causal")
def by_logsumexp(q, k, v, data):
    x = masked(scores(q, k) * SCALE, causal(8), -jnp.inf)
    return values(jnp.exp(x - jax.nn.logsumexp(x, axis=-1, keepdims=True)), v)


@same("causal")
def by_log_softmax(q, k, v, data):
    return values(jnp.exp(jax.nn.log_softmax(masked(scores(q, k) * SCALE, causal(8)))), v)


@same("causal")
def softmax_where(q, k, v, data):
    return values(jax.nn.softmax(scores(q, k) * SCALE, where=causal(8)), v)


@same("causal")
def weights_set_to_zero(q, k, v, data):
    x = jnp.exp(scores(q, k) * SCALE) * causal(8)
    return values(x / (x.sum(-1, keepdims=True)), v)


@same("causal")
def sum_with_a_guard(q, k, v, data):
    x = masked(scores(q, k) * SCALE, causal(8))
    x = jnp.exp(x - x.max(-1, keepdims=True))
    return values(x / jnp.maximum(x.sum(-1, keepdims=True), 1e-6), v)


@same("causal")
def added_mask(q, k, v, data):
    return values(jax.nn.softmax(scores(q, k) * SCALE + jnp.where(causal(8), 0.0, -1e9)[None, None]), v)


@same("causal")
def added_mask_of_numpy(q, k, v, data):
    return values(jax.nn.softmax(scores(q, k) * SCALE + np.triu(np.full((8, 8), -np.inf, np.float32), 1)), v)


@same("causal")
def mask_of_gpt_2(q, k, v, data):
    mask = causal(8).astype(jnp.float32)
    return values(jax.nn.softmax(scores(q, k) * SCALE * mask - 1e10 * (1 - mask)), v)


@same("causal")
def mask_from_positions(q, k, v, data):
    at = jnp.broadcast_to(jnp.arange(8), (2, 8))
    return values(jax.nn.softmax(masked(scores(q, k) * SCALE, (at[:, :, None] >= at[:, None, :])[:, None])), v)


@same("causal")
def mask_turned_round(q, k, v, data):
    i, j = jnp.arange(8)[:, None], jnp.arange(8)[None]
    return values(jax.nn.softmax(jnp.where(i < j, -1e30, scores(q, k) * SCALE)), v)


@same("causal")
def mask_of_a_longer_sequence(q, k, v, data):
    mask = jax.lax.dynamic_slice(causal(32)[None, None], (0, 0, 0, 0), (1, 1, 8, 8))
    return values(jax.nn.softmax(masked(scores(q, k) * SCALE, mask)), v)


@same("window -inf to 1")
def part_of_a_longer_mask(q, k, v, data):
    mask = jax.lax.dynamic_slice(causal(32), (8, 7), (8, 8))
    return values(jax.nn.softmax(masked(scores(q, k) * SCALE, mask)), v)


@same("causal")
def positions_in_blocks(q, k, v, data):
    at = (4 * jnp.arange(2)[:, None] + jnp.arange(4)).reshape(8)
    return values(jax.nn.softmax(masked(scores(q, k) * SCALE, at[:, None] >= at)), v)


@same("causal, segments")
def packed(q, k, v, data):
    ids = data["segments"]
    mask = causal(8) & (ids[:, None, :, None] == ids[:, None, None, :])
    return values(jax.nn.softmax(masked(scores(q, k) * SCALE, mask, LOW)), v)


@same("segments")
def packed_without_order(q, k, v, data):
    ids = data["segments"]
    differ = ids[:, None, :, None] != ids[:, None, None, :]
    return values(jax.nn.softmax(jnp.where(differ, -1e30, scores(q, k) * SCALE)), v)


@same("causal, segments")
def two_added_masks(q, k, v, data):
    ids = data["segments"]
    x = scores(q, k) * SCALE + jnp.where(ids[:, None, :, None] == ids[:, None, None, :], 0.0, -1e9)
    return values(jax.nn.softmax(x + jnp.where(causal(8), 0.0, -1e9)), v)


@same("batch 2, 8 x 8, 4 heads, causal, segments")
def packed_with_heads_in_the_batch(q, k, v, data):
    ids = data["segments"]
    mask = jnp.broadcast_to((ids[:, None, :, None] == ids[:, None, None, :]) & causal(8), (2, 4, 8, 8))
    q, k, v = (x.transpose(0, 2, 1, 3).reshape(8, 8, 6) for x in (q, k, v))
    p = jax.nn.softmax(masked(q @ k.swapaxes(1, 2) * SCALE, mask.reshape(8, 8, 8)))
    return (p @ v).reshape(2, 4, 8, 6).transpose(0, 2, 1, 3)


@same("causal, window -3 to 0")
def sliding_window(q, k, v, data):
    i, j = jnp.arange(8)[:, None], jnp.arange(8)[None]
    return values(jax.nn.softmax(masked(scores(q, k) * SCALE, (j <= i) & (i - j < 4))), v)


@same("window -2 to 2")
def window_on_both_sides(q, k, v, data):
    i, j = jnp.arange(8)[:, None], jnp.arange(8)[None]
    return values(jax.nn.softmax(masked(scores(q, k) * SCALE, jnp.abs(i - j) <= 2)), v)


@same("causal")
def window_as_long_as_the_sequence(q, k, v, data):
    i, j = jnp.arange(8)[:, None], jnp.arange(8)[None]
    return values(jax.nn.softmax(masked(scores(q, k) * SCALE, (j <= i) & (i - j < 8))), v)


@same("4 heads (2 of keys), causal", k_shape=(2, 8, 2, 6))
def llama(q, k, v, data):
    def turned(x):
        angles = jnp.arange(8)[:, None] * 100.0 ** (-jnp.arange(3) / 3)
        cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
        a, b = x[..., :3], x[..., 3:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    q, k, v = turned(q), jnp.repeat(turned(k), 2, axis=2), jnp.repeat(v, 2, axis=2)
    x = scores(q, k).astype(jnp.float32) / math.sqrt(6)
    return values(jax.nn.softmax(x + jnp.where(causal(8), 0, LOW)).astype(q.dtype), v)


@same("4 heads (2 of keys), causal, window -4 to 0, soft cap 5", k_shape=(2, 8, 2, 6))
def gemma(q, k, v, data):
    q = (q * SCALE).reshape(2, 8, 2, 2, 6)
    x = jnp.einsum("BTKGH,BSKH->BTKGS", q, k).reshape(2, 8, 4, 8)
    x = jnp.tanh(x / 5.0) * 5.0
    mask = causal(8) & ~jnp.tril(jnp.ones((8, 8), bool), -5)
    p = jax.nn.softmax(jnp.where(mask[None, :, None], x, -2.3819763e38)).reshape(2, 8, 2, 2, 8)
    return jnp.einsum("BTKGS,BSKH->BTKGH", p, v).reshape(2, 8, 4, 6)


@same("4 heads (1 of keys), causal", k_shape=(2, 8, 1, 6))
def one_head_of_keys(q, k, v, data):
    x = jnp.einsum("btnh,bsh->bnts", q, k[:, :, 0]) * SCALE
    return jnp.einsum("bnts,bsh->btnh", jax.nn.softmax(masked(x, causal(8))), v[:, :, 0])


@same("causal")
def haiku(q, k, v, data):
    x = jnp.einsum("...thd,...Thd->...htT", q, k) / np.sqrt(6)
    return jnp.einsum("...htT,...Thd->...thd", jax.nn.softmax(jnp.where(causal(8), x, -1e30)), v)


@same("causal")
def heads_first(q, k, v, data):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    p = jax.nn.softmax(masked(q @ k.swapaxes(-1, -2) * SCALE, causal(8)))
    return (p @ v).transpose(0, 2, 1, 3)


@same("causal")
def keys_first(q, k, v, data):
    x = masked(jnp.einsum("bsnh,btnh->bstn", k, q) * SCALE, causal(8).T[None, :, :, None])
    return jnp.einsum("bsnh,bstn->btnh", v, jax.nn.softmax(x, axis=1))


@same("causal")
def mapped_over_examples_and_heads(q, k, v, data):
    def head(q, k, v):
        return jax.nn.softmax(jnp.where(causal(8), q @ k.T * SCALE, -1e30)) @ v

    return jax.vmap(jax.vmap(head, in_axes=1, out_axes=1))(q, k, v)


@same("causal")
def in_a_checkpoint(q, k, v, data):
    return jax.checkpoint(functools.partial(by_hand, data=data))(q, k, v)


@same("causal")
def in_a_scan(q, k, v, data):
    mask = causal(8)

    def layer(carry, w):
        q, mask = carry
        p = jax.nn.softmax(masked(scores(q * w, k) * SCALE, mask))
        return (jnp.tanh(values(p, v)), mask), None

    return jax.lax.scan(jax.checkpoint(layer), (q, mask), jnp.linspace(0.5, 1.0, 3))[0][0]


@same("causal, segments")
def packed_in_a_scan(q, k, v, data):
    same_document = data["segments"][:, :, None] == data["segments"][:, None, :]

    def layer(q, w):
        p = jax.nn.softmax(masked(scores(q * w, k) * SCALE, (same_document & causal(8))[:, None]))
        return jnp.tanh(values(p, v)), None

    return jax.lax.scan(layer, q, jnp.linspace(0.5, 1.0, 3))[0]


@same("causal")
def in_a_branch(q, k, v, data):
    at_all = data["segments"].sum() >= 0
    return jax.lax.cond(at_all, lambda q: by_hand(q, k, v, data), lambda q: q, q)


@same("causal")
def rounded_scale(q, k, v, data):
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    x = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32) * 0.5, k.astype(jnp.float32))
    return values(jax.nn.softmax(masked(x, causal(8))), v.astype(jnp.float32))


@same("no mask")
def softmax_over_two_dims_of_keys(q, k, v, data):
    k, v = k.reshape(2, 2, 4, 4, 6), v.reshape(2, 2, 4, 4, 6)
    x = jnp.einsum("btnh,bijnh->bntij", q, k) * SCALE
    return jnp.einsum("bntij,bijnh->btnh", jax.nn.softmax(x, axis=(-2, -1)), v)


# --- other functions --------------------------------------------------------------------------------------------------


@other("without a key")
def strictly_causal(q, k, v, data):
    i, j = jnp.arange(8)[:, None], jnp.arange(8)[None]
    return values(jax.nn.softmax(masked(scores(q, k) * SCALE, j < i)), v)


@other("does not have the query's own place", k_shape=(2, 12, 4, 6))
def window_of_later_keys(q, k, v, data):
    i, j = jnp.arange(8)[:, None], jnp.arange(12)[None]
    return values(jax.nn.softmax(masked(scores(q, k) * SCALE, (j > i) & (j < i + 4))), v)


@other("neither causal nor a window")
def dilated(q, k, v, data):
    i, j = jnp.arange(8)[:, None], jnp.arange(8)[None]
    return values(jax.nn.softmax(masked(scores(q, k) * SCALE, (j <= i) & ((i - j) % 2 == 0))), v)


@other("neither causal nor a window")
def blocks_of_two(q, k, v, data):
    i, j = jnp.arange(8)[:, None], jnp.arange(8)[None]
    return values(jax.nn.softmax(masked(scores(q, k) * SCALE, j // 2 <= i // 2)), v)


@other("neither causal nor a window")
def other_mask_for_a_head(q, k, v, data):
    mask = jnp.stack([causal(8)] * 3 + [jnp.ones((8, 8), bool)])
    return values(jax.nn.softmax(masked(scores(q, k) * SCALE, mask)), v)


@other("computed from data")
def padding(q, k, v, data):
    return values(jax.nn.softmax(masked(scores(q, k) * SCALE, data["valid"][:, None, None] & causal(8))), v)


@other("computed from params or data")
def padding_that_is_added(q, k, v, data):
    return values(jax.nn.softmax(scores(q, k) * SCALE + jnp.where(data["valid"], 0, -1e9)[:, None, None]), v)


@other("without a key")
def segments_without_their_own_place(q, k, v, data):
    ids = data["segments"]
    i, j = jnp.arange(8)[:, None], jnp.arange(8)[None]
    mask = (ids[:, None, :, None] == ids[:, None, None, :]) & (j < i)
    return values(jax.nn.softmax(masked(scores(q, k) * SCALE, mask)), v)


@other("no segments", q_shape=(8, 8, 4, 6), k_shape=(8, 8, 4, 6))
def an_array_and_its_transpose(q, k, v, data):
    table = data["segments"]
    return values(jax.nn.softmax(masked(scores(q, k) * SCALE, table == table.T)), v)


@other("precision")
def products_of_high_precision(q, k, v, data):
    x = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest")
    return values(jax.nn.softmax(x * SCALE), v)


@other("computed from data")
def segments_of_two_arrays(q, k, v, data):
    mask = data["segments"][:, None, :, None] == data["valid"].astype(jnp.int32)[:, None, None, :]
    return values(jax.nn.softmax(masked(scores(q, k) * SCALE, mask)), v)


@other("scaled by computed values")
def temperature_of_each_row(q, k, v, data):
    return values(jax.nn.softmax(scores(q, k) * data["temperature"]), v)


@other("not over the keys")
def softmax_over_queries(q, k, v, data):
    return values(jax.nn.softmax(scores(q, k) * SCALE, axis=-2), v)


@other("dropout")
def dropout(q, k, v, data):
    p = jax.nn.softmax(scores(q, k) * SCALE)
    keep = jax.random.bernoulli(data["key"], 0.9, p.shape)
    return values(jnp.where(keep, p / 0.9, 0), v)


@other("of the weights")
def softmax_twice(q, k, v, data):
    return values(jax.nn.softmax(jax.nn.softmax(scores(q, k) * SCALE)), v)


@other("results, too")
def weights_returned(q, k, v, data):
    p = jax.nn.softmax(scores(q, k) * SCALE)
    return values(p, v), p


@other("used elsewhere")
def weights_penalized(q, k, v, data):
    p = jax.nn.softmax(scores(q, k) * SCALE)
    return values(p, v) + (p * jnp.log(p)).sum()


@other("a bias that is computed")
def learned_bias(q, k, v, data):
    return values(jax.nn.softmax(scores(q, k) * SCALE + data["bias"]), v)


@other("a bias that is no mask")
def alibi(q, k, v, data):
    distance = jnp.arange(8)[None] - jnp.arange(8)[:, None]
    bias = distance * 2.0 ** -jnp.arange(1, 5)[:, None, None] + jnp.where(causal(8), 0, -1e30)
    return values(jax.nn.softmax(scores(q, k) * SCALE + bias), v)


@other("a bias that is no mask")
def soft_mask(q, k, v, data):
    return values(jax.nn.softmax(scores(q, k) * SCALE + jnp.where(causal(8), 0, -10.0)), v)


@other("are as high as")
def mask_of_zeros(q, k, v, data):
    return values(jax.nn.softmax(scores(q, k) * SCALE * causal(8)), v)


@other("not divided by their sum")
def masked_after_the_softmax(q, k, v, data):
    return values(jax.nn.softmax(scores(q, k) * SCALE) * causal(8), v)


@other("not divided by their sum")
def no_sum(q, k, v, data):
    x = scores(q, k) * SCALE
    return values(jnp.exp(x - x.max(-1, keepdims=True)), v)


@other("divided by computed values")
def softmax_and_one(q, k, v, data):
    x = jnp.exp(scores(q, k) * SCALE)
    return values(x / (1 + x.sum(-1, keepdims=True)), v)


@other("not divided by their sum")
def sum_without_a_derivative(q, k, v, data):
    x = jnp.exp(scores(q, k) * SCALE)
    return values(x / jax.lax.stop_gradient(x.sum(-1, keepdims=True)), v)


@other("not divided by their sum")
def sum_of_other_logits(q, k, v, data):
    x = scores(q, k) * SCALE
    return values(jnp.exp(x) / jnp.exp(2 * x).sum(-1, keepdims=True), v)


@other("tanh of")
def soft_cap_of_a_mask(q, k, v, data):
    return values(jax.nn.softmax(5 * jnp.tanh(masked(scores(q, k) * SCALE, causal(8)) / 5)), v)


@other("not looked into")
def in_a_function_with_its_own_derivative(q, k, v, data):
    @jax.custom_vjp
    def attend(q, k, v):
        return no_mask(q, k, v, data)

    attend.defvjp(lambda q, k, v: (attend(q, k, v), (q, k, v)), lambda saved, g: (g, *saved[1:]))
    return attend(q, k, v)


@other("inside shard_map, which is not looked into")
def in_a_shard_map_with_collectives(q, k, v, data):
    """Its collectives name an axis, of which nothing that is traced outside of it knows."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    split = jax.sharding.PartitionSpec("data")

    def attend(q, k, v):
        return no_mask(q, *(jax.lax.all_gather(x, "data", tiled=True)[: len(q)] for x in (k, v)), data)

    return jax.shard_map(jax.checkpoint(attend), mesh=mesh, in_specs=split, out_specs=split)(q, k, v)
