"""Layers without params of their own: normalization, causal self-attention, rotary positions.

Names end in the letters of their dims: `B` batch, `T` and `S` tokens, `D` model, `H` heads, `K` head.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array


def leave(x: Array, kind: str) -> Array:
    """Leaves an array where it is: the `place` of a model whose activations nobody places."""
    del kind
    return x


def rms_norm(x_BTD: Array, scale_D: Array) -> Array:
    """Scales every vector to a root mean square of one, measured in float32, then by `scale_D`."""
    mean_square_BT1 = jnp.mean(jnp.square(x_BTD.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x_BTD * jax.lax.rsqrt(mean_square_BT1 + 1e-6)).astype(x_BTD.dtype) * scale_D


def causal_attention(q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, segments_BT: Array | None = None) -> Array:
    """Returns causal self-attention `[B, T, H, K]`, within segments, with a float32 softmax."""
    same_B1TT = None if segments_BT is None else (segments_BT[:, None, :, None] == segments_BT[:, None, None, :])
    if q_BTHK.dtype == jnp.float16:
        return _float16_attention(q_BTHK, k_BTHK, v_BTHK, same_B1TT)
    return jax.nn.dot_product_attention(q_BTHK, k_BTHK, v_BTHK, mask=same_B1TT, is_causal=True)


def _float16_attention(q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, mask_B1TT: Array | None) -> Array:
    """Does what `jax.nn.dot_product_attention` does, which asks for a float16 dot that only GPUs have."""
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    num_tokens, head_dim = q_BTHK.shape[1], q_BTHK.shape[-1]
    is_seen = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
    is_seen = is_seen if mask_B1TT is None else is_seen & mask_B1TT
    logits_BHTT = einsum("BTHK,BSHK->BHTS", q_BTHK, k_BTHK) * head_dim**-0.5
    weights_BHTT = jax.nn.softmax(jnp.where(is_seen, logits_BHTT, -1e30))
    return einsum("BHTS,BSHK->BTHK", weights_BHTT.astype(v_BTHK.dtype), v_BTHK).astype(v_BTHK.dtype)


def rotate(x_BTHK: Array) -> Array:
    """Turns each pair of features by an angle that grows with the token's place (RoFormer, equation 34)."""
    num_tokens, head_dim = x_BTHK.shape[1], x_BTHK.shape[-1]
    frequencies = 10_000.0 ** (-jnp.arange(0, head_dim, 2) / head_dim)
    angles_T1K = (jnp.arange(num_tokens)[:, None] * frequencies)[:, None]
    cos, sin = jnp.cos(angles_T1K), jnp.sin(angles_T1K)
    first, second = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    turned_BTHK = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned_BTHK.astype(x_BTHK.dtype)
