"""Layers without params of their own: normalization, causal self-attention, rotary positions and losses of tokens.

Names end in the letters of their dims: `B` batch, `T` and `S` tokens, `H` heads (of queries), `G` heads of keys and
values, `R` heads of queries that share one of those, `K` head.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jax import Array

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
}


def leave(x: Array, kind: str) -> Array:
    """Leaves an array where it is: the `place` of a model whose activations nobody places."""
    del kind
    return x


def rms_norm(x: Array, scale: Array, eps: float = 1e-6, *, offset: bool = False) -> Array:
    """Scales every vector to a root mean square of one, measured in float32, then by `scale`, or by 1 + `scale`."""
    mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    y = x * jax.lax.rsqrt(mean_square + eps)
    # As transformers does: Gemma casts the scaled vector, Llama scales the cast one.
    return (y * (1 + scale.astype(jnp.float32))).astype(x.dtype) if offset else y.astype(x.dtype) * scale


def layer_norm(x: Array, scale: Array, bias: Array, eps: float = 1e-5) -> Array:
    """Moves and scales every vector to mean 0 and variance 1, measured in float32, then by `scale` and `bias`."""
    centered = x.astype(jnp.float32)
    centered -= jnp.mean(centered, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    return (centered * jax.lax.rsqrt(variance + eps)).astype(x.dtype) * scale + bias


def causal_attention(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    segments_BT: Array | None = None,
    *,
    scale: float | None = None,
    local_window_size: tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
) -> Array:
    """Returns causal self-attention `[B, T, H, K]`, within segments, with a float32 softmax.

    Args:
      q_BTHK: queries.
      k_BTGK: keys; `H / G` heads of queries share each.
      v_BTGK: values; their heads may have another width than those of the keys.
      segments_BT: the document of each token; a token attends to its own alone. None: there is one document.
      scale: what logits are multiplied by; None is `K ** -0.5`.
      local_window_size: tokens to the left and to the right that a token attends to besides itself; None: all before.
      logits_soft_cap: c: logits x become `c * tanh(x / c)`.
    """
    has_own_width = v_BTGK.shape[-1] != k_BTGK.shape[-1]
    # `jax.nn.dot_product_attention` has no cap, one width, and a float16 dot on GPUs alone.
    if q_BTHK.dtype != jnp.float16 and logits_soft_cap is None and not has_own_width:
        same_B1TT = None if segments_BT is None else (segments_BT[:, None, :, None] == segments_BT[:, None, None, :])
        return jax.nn.dot_product_attention(
            q_BTHK, k_BTGK, v_BTGK, mask=same_B1TT, is_causal=True, scale=scale, local_window_size=local_window_size
        )
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    B, T, H, K = q_BTHK.shape
    G = k_BTGK.shape[2]
    distance_TT = jnp.arange(T)[:, None] - jnp.arange(T)
    is_seen = distance_TT >= 0
    if local_window_size is not None:
        is_seen &= (distance_TT <= local_window_size[0]) & (distance_TT >= -local_window_size[1])
    if segments_BT is not None:
        is_seen = is_seen & (segments_BT[:, None, None, :, None] == segments_BT[:, None, None, None, :])
    logits_BGRTT = einsum("BTGRK,BSGK->BGRTS", q_BTHK.reshape(B, T, G, H // G, K), k_BTGK)
    logits_BGRTT *= K**-0.5 if scale is None else scale
    if logits_soft_cap is not None:
        logits_BGRTT = logits_soft_cap * jnp.tanh(logits_BGRTT / logits_soft_cap)
    weights_BGRTT = jax.nn.softmax(jnp.where(is_seen, logits_BGRTT, -1e30)).astype(v_BTGK.dtype)
    return einsum("BGRTS,BSGK->BTGRK", weights_BGRTT, v_BTGK).astype(v_BTGK.dtype).reshape(B, T, H, -1)


def rotate(
    x_BTHK: Array, frequencies: Array | None = None, *, interleaved: bool = False, magnitude: float = 1.0
) -> Array:
    """Turns each pair of features by an angle that grows with the token's place (RoFormer, equation 34).

    Args:
      x_BTHK: queries or keys.
      frequencies: the angles of each pair from a token to the next; features that are left over stay as they are. None
        takes those of the paper, for all features.
      interleaved: a pair are two features side by side, which return half a head apart; otherwise they are half a head
        apart already.
      magnitude: what turned features are multiplied by.
    """
    num_tokens, head_dim = x_BTHK.shape[1], x_BTHK.shape[-1]
    if frequencies is None:
        frequencies = 10_000.0 ** (-jnp.arange(0, head_dim, 2) / head_dim)
    angles_T1K = (jnp.arange(num_tokens)[:, None] * frequencies)[:, None]
    half = frequencies.shape[0]
    turned_BTHK = x_BTHK if 2 * half == head_dim else x_BTHK[..., : 2 * half]
    if interleaved:
        turned_BTHK = jnp.concatenate([turned_BTHK[..., ::2], turned_BTHK[..., 1::2]], axis=-1)
    cos_T1K = jnp.tile(jnp.cos(angles_T1K) * magnitude, 2)
    sin_T1K = jnp.tile(jnp.sin(angles_T1K) * magnitude, 2) * jnp.repeat(jnp.array([-1.0, 1.0]), half)
    # Halves change places before they become float32: XLA:TPU else copies the float32 arrays, twice.
    swapped_BTHK = jnp.roll(turned_BTHK, half, axis=-1)
    turned_BTHK = turned_BTHK.astype(jnp.float32) * cos_T1K + swapped_BTHK.astype(jnp.float32) * sin_T1K
    turned_BTHK = turned_BTHK.astype(x_BTHK.dtype)
    return turned_BTHK if 2 * half == head_dim else jnp.concatenate([turned_BTHK, x_BTHK[..., 2 * half :]], axis=-1)


def capped(logits: Array, soft_cap: float | None) -> Array:
    """Returns logits that are bent to stay below a soft cap."""
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def whole_logits(hidden_BTD: Array, head_DV: Array, targets_BT: Array, *, soft_cap: float | None = None) -> Array:
    """Returns the cross-entropy `[B, T]` in nats, in float32, of logits that are all made at once."""
    # In float32: the 8 bits of bfloat16 would round losses to steps of about a hundredth.
    logits_BTV = capped((hidden_BTD @ head_DV).astype(jnp.float32), soft_cap)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)


def mean_loss(losses_BT: Array, weights_BT: Array | None = None) -> tuple[Array, dict[str, Array]]:
    """Returns the (weighted) mean of losses in nats, and the same in bits as `aux`."""
    if weights_BT is None:
        loss = losses_BT.mean()
    else:
        # An empty batch has no weight; its loss is nothing.
        loss = (losses_BT * weights_BT).sum() / jnp.maximum(weights_BT.sum(), 1e-6)
    return loss, {"bits_per_token": loss / jnp.log(2.0)}
