"""Operations counted on jaxprs, against sums by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import zero_jax as zero
from zero_jax.models import gpt
from zero_jax.transforms.flops import forward_flops

X = jax.ShapeDtypeStruct((3, 4), jnp.float32)
W = jax.ShapeDtypeStruct((4, 5), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def test_a_product_is_two_operations_a_multiply_add():
    assert forward_flops(jnp.matmul, X, W) == 2 * 3 * 4 * 5


def test_a_batched_product():
    left, right = jax.ShapeDtypeStruct((7, 3, 4), jnp.float32), jax.ShapeDtypeStruct((7, 4, 5), jnp.float32)
    assert forward_flops(jnp.matmul, left, right) == 7 * 2 * 3 * 4 * 5


def test_fused_attention_counts_every_query_with_every_key():
    q, k = jax.ShapeDtypeStruct((2, 7, 4, 8), jnp.float32), jax.ShapeDtypeStruct((2, 9, 2, 8), jnp.float32)
    fused, plain = (functools.partial(zero.dot_product_attention, implementation=name) for name in ("splash", "xla"))
    assert forward_flops(fused, q, k, k) == forward_flops(plain, q, k, k) == 2 * 2 * 2 * 4 * 7 * 9 * 8


def test_a_convolution():
    image, kernel = jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32), jax.ShapeDtypeStruct((3, 3, 3, 5), jnp.float32)
    convolve = functools.partial(
        lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    assert forward_flops(convolve, image, kernel) == 2 * (2 * 8 * 8 * 5) * (3 * 3 * 3)


def test_a_grouped_convolution_has_fewer():
    image, kernel = jax.ShapeDtypeStruct((1, 8, 4), jnp.float32), jax.ShapeDtypeStruct((3, 1, 4), jnp.float32)
    convolve = functools.partial(
        lax.conv_general_dilated,
        window_strides=(1,),
        padding="SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=4,
    )
    assert forward_flops(convolve, image, kernel) == 2 * (8 * 4) * 3


def test_a_scan_counts_every_iteration():
    def loop(x, w):
        return lax.scan(lambda x, _: (x @ w, None), x, length=6)[0]

    assert forward_flops(loop, X, SQUARE) == 6 * 2 * 3 * 4 * 4


def test_remat_jit_and_custom_derivatives_are_looked_into():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, None), lambda _, g: (g, g))
    assert forward_flops(jax.jit(jax.checkpoint(product)), X, W) == 2 * 3 * 4 * 5


def test_a_conditional_counts_its_costliest_branch():
    def either(x, w):
        return lax.cond(x.sum() > 0, lambda: x @ w @ w, lambda: x @ w)

    assert forward_flops(either, X, SQUARE) == 2 * 2 * 3 * 4 * 4


@pytest.mark.parametrize("scan", [True, False])
def test_a_transformer(scan):
    config = gpt.GPTConfig(vocab_size=32, seq_len=8, num_layers=3, d_model=16, num_heads=2, scan=scan)
    params = jax.eval_shape(functools.partial(gpt.init, config), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    blocks = 3 * (12 * 16 * 16 * 2 * 16 + 2 * (2 * 8 * 8 * 16) * 2)  # weights; scores and their product with values
    head = 2 * 16 * 32 * 16
    assert forward_flops(gpt.loss_fn(config), params, {"inputs": tokens, "targets": tokens}) == blocks + head
