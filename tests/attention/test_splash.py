"""The kernel of TPUs, interpreted, computes what XLA does, and so do its gradients."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import random_arrays, random_segments, values_and_grads

import zero_jax as zero
from zero_jax.attention.splash import _visited, block_sizes
from zero_jax.attention.xla import Band

LENGTHS = {"query_seq_lengths": jnp.array([24, 5]), "key_value_seq_lengths": jnp.array([0, 9])}
CASES = [
    ({}, {}),
    ({"t": 7, "s": 30}, {"is_causal": True}),
    ({"t": 30, "s": 7, "k": 1}, {"is_causal": True, "scale": 0.4}),
    ({"t": 130, "s": 150, "b": 1, "n": 2}, {"is_causal": True, "local_window_size": (20, 3)}),
    ({"t": 12, "s": 40, "v": 16}, {"local_window_size": (3, 5)}),
    ({"k": 4}, {"logits_soft_cap": 2.0, "is_causal": True}),
    ({}, LENGTHS),
    ({}, {"is_causal": True, "segment_ids": random_segments(24)}),
    ({}, {"segment_ids": random_segments(24), **LENGTHS}),
    ({"s": 40}, {"segment_ids": (random_segments(24), random_segments(40) + 1)}),  # some queries see no key
]


# What is quick has each option once.
@pytest.mark.parametrize(
    ("sizes", "options"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (i in (0, 1, 6, 7))) for i, case in enumerate(CASES)],
)
def test_the_kernel_computes_what_xla_does(sizes, options):
    arrays = random_arrays(**sizes)
    fused, plain = (values_and_grads(arrays, name, **options) for name in ("splash", "xla"))
    chex.assert_trees_all_close(fused, plain, atol=1e-5)  # float32: sums in another order


def test_bfloat16_is_as_near_as_it_can_be():
    arrays = random_arrays(dtype=jnp.bfloat16)
    fused = values_and_grads(arrays, "splash", is_causal=True)
    exact = values_and_grads([x.astype(jnp.float32) for x in arrays], "xla", is_causal=True)
    assert fused[0].dtype == jnp.bfloat16
    for x, y in zip(jax.tree.leaves(fused), jax.tree.leaves(exact), strict=True):
        assert np.linalg.norm(x.astype(jnp.float32) - y) < 0.01 * np.linalg.norm(y)  # bfloat16 has 8 bits


@pytest.mark.slow
def test_examples_may_be_mapped_and_derivatives_taken_forward_and_twice():
    q, k, v = random_arrays(b=3, t=5, s=6)
    both = [functools.partial(zero.dot_product_attention, implementation=name) for name in ("splash", "xla")]
    mapped = [jax.jit(jax.vmap(f, (0, None, 0)))(q, k[0], v) for f in both]
    chex.assert_trees_all_close(*mapped, atol=1e-5)
    moved = [jax.jit(functools.partial(jax.jvp, f))((q, k, v), (jnp.sin(q), k, v))[1] for f in both]
    chex.assert_trees_all_close(*moved, atol=1e-5)
    total = lambda f: lambda q: jnp.square(f(q, k, v)).sum()  # noqa: E731
    twice = [jax.jit(jax.grad(lambda q, f=f: jnp.square(jax.grad(total(f))(q)).sum()))(q) for f in both]
    chex.assert_trees_all_close(*twice, rtol=1e-4, atol=1e-4)  # squares of squares


@pytest.mark.parametrize("num_places", [1, 127, 128, 129, 384, 513, 2048, 6200, 8192, 20_000, 131_072])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_blocks_cover_a_sequence_with_little_padding(num_places, head_size):
    blocks = block_sizes(num_places, num_places, head_size)
    for size in (blocks.block_q, blocks.block_kv, blocks.block_kv_compute):
        assert size % 128 == 0 and blocks.block_kv % blocks.block_kv_compute == 0
        padded = -(-num_places // size) * size
        assert padded - num_places < max(0.25 * num_places, 256)
    num_parts = -(-num_places // blocks.block_kv_dkv)
    assert not blocks.use_fused_bwd_kernel or num_parts <= 8  # each is a copy of the queries' cotangent


def test_queries_without_a_key_are_found_without_a_list_of_all_places():
    sides = [None, *range(-3, 7)]
    for left, right, num_queries, num_keys in itertools.product(sides, sides, range(6), range(6)):
        band = Band(left, right)
        expected = bool(np.any(band.first(num_queries) > band.last(num_queries, num_keys)))
        assert band.has_unseeing(num_queries, num_keys) == expected, (band, num_queries, num_keys)
    assert not Band(None, 0).has_unseeing(10**15, 10**15)


def test_a_causal_mask_halves_the_work():
    blocks = block_sizes(4096, 4096, 128)
    (forward, backward, _), function = _visited(4096, 4096, Band(None, 0), blocks)
    for info in (forward, backward):
        num_blocks = (4096 // blocks.block_q) * (4096 // blocks.block_kv)
        assert np.count_nonzero(info.block_mask) / num_blocks < 0.7
    assert function(np.array([[3]]), np.array([[3]])) and not function(np.array([[3]]), np.array([[4]]))


def test_a_long_sequence_has_a_kernel_for_the_queries_cotangents(monkeypatch):
    monkeypatch.setattr("zero_jax.attention.splash._MAX_PARTS", 0)
    arrays = random_arrays(b=1, t=20, s=200, n=2)
    fused, plain = (values_and_grads(arrays, name, local_window_size=(9, 150)) for name in ("splash", "xla"))
    chex.assert_trees_all_close(fused, plain, atol=1e-5)
