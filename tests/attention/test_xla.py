"""Attention by XLA is `jax.nn.dot_product_attention`, with segments, a soft cap and values of another size."""

import chex
import jax
import jax.numpy as jnp
import pytest
from attention_cases import random_arrays

import zero_jax as zero


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"local_window_size": (3, 1)},
        {"is_causal": True, "local_window_size": 2, "scale": 0.3},
        {"query_seq_lengths": jnp.array([5, 24])},
        {"key_value_seq_lengths": jnp.array([0, 7])},
        {"query_seq_lengths": jnp.array([5, 24]), "key_value_seq_lengths": jnp.array([3, 7]), "is_causal": True},
    ],
)
@pytest.mark.parametrize("sizes", [{}, *(pytest.param(s, marks=pytest.mark.slow) for s in ({"s": 7}, {"t": 5}))])
def test_the_explicit_form_is_that_of_jax(options, sizes):
    q, k, v = random_arrays(**sizes)
    wide = jnp.concatenate([v, v], -1)
    out = zero.dot_product_attention(q, k, wide, **options)
    expected = jax.nn.dot_product_attention(q, k, v, **options)
    chex.assert_trees_all_close(out, jnp.concatenate([expected, expected], -1), atol=1e-6)
    capped = zero.dot_product_attention(q, k, v, logits_soft_cap=1e4, **options)
    chex.assert_trees_all_close(capped, expected, atol=1e-5)  # tanh(x / c) rounds x


def test_segments_are_a_mask():
    q, k, v = random_arrays()
    ids = jnp.array([[0] * 5 + [1] * 19, [3] * 24])
    mask = ids[:, None, :, None] == ids[:, None, None, :]
    expected = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)
    for segments in (ids, (ids, ids)):
        out = zero.dot_product_attention(q, k, v, segment_ids=segments, is_causal=True)
        chex.assert_trees_all_equal(out, expected)
    out = zero.dot_product_attention(q[0], k[0], v[0], segment_ids=ids[0], is_causal=True)
    chex.assert_trees_all_close(out, expected[0], atol=1e-6)


def test_a_soft_cap_bounds_the_logits():
    q, k, v = random_arrays(n=2, k=2)
    logits = 2 * jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, k) * 8**-0.5 / 2)
    expected = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)
    chex.assert_trees_all_close(zero.dot_product_attention(q, k, v, logits_soft_cap=2.0), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"key": jnp.zeros((2, 24, 3, 8)), "value": jnp.zeros((2, 24, 3, 8))}, "no multiple of the 3 key heads"),
        ({"value": jnp.zeros((2, 23, 2, 8))}, "do not fit"),
        ({"query": jnp.zeros((2, 24, 4, 8), jnp.bfloat16)}, "cast them to one dtype"),
        ({"query": jnp.zeros((12, 8))}, "query has shape"),
        ({"segment_ids": jnp.zeros((2, 5), int)}, "segment_ids have shape"),
        ({"segment_ids": jnp.zeros((2, 24))}, "give integers"),
    ],
)
def test_what_does_not_fit_is_refused(change, said):
    arguments = dict(zip(("query", "key", "value"), random_arrays(), strict=True)) | change
    with pytest.raises(ValueError, match=said):
        zero.dot_product_attention(**arguments)
