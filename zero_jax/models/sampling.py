"""Samples text from a model, token by token."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array


def generate_tokens(
    apply: Callable[[Array], Array],
    prompt_T: Array,
    key: Array,
    *,
    seq_len: int,
    vocab_size: int,
    num_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Array:
    """Returns `num_tokens` int32 tokens that follow a prompt of one or more; only its last `seq_len` tokens are seen.

    `apply` returns the logits `[1, T, V]` of tokens `[1, T]`, with `T` up to `seq_len`. A `temperature` below one
    sharpens the choice, 0 always takes the likeliest token; `top_k` chooses among as many of the likeliest.

    The model sees a fixed window, of `seq_len` tokens or as many as there will be, so one compiled program serves every
    step. There is no cache of keys and values: this is for looking at a model, not for serving.
    """
    if prompt_T.ndim != 1 or not prompt_T.size:
        raise ValueError(f"the prompt has shape {prompt_T.shape}: give one row of at least one token")
    if num_tokens < 1 or temperature < 0 or (top_k is not None and not 1 <= top_k <= vocab_size):
        raise ValueError(
            f"num_tokens={num_tokens}, temperature={temperature}, top_k={top_k}: num_tokens is at least 1, temperature "
            f"not negative, top_k between 1 and the vocabulary's {vocab_size}, or None"
        )
    seq_len = min(seq_len, prompt_T.size + num_tokens)
    prompt_T = prompt_T[-seq_len:].astype(jnp.int32)
    # Whatever is to the right of the last real token is never seen, because attention is causal.
    window_T = jnp.zeros(seq_len, jnp.int32).at[: prompt_T.size].set(prompt_T)

    def add_token(carry: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], Array]:
        window_T, length = carry
        logits_V = apply(window_T[None])[0, length - 1].astype(jnp.float32)
        token = _choose(logits_V, key, temperature, top_k)
        # Once the window is full, it moves on by a token.
        is_full = length == seq_len
        window_T = jnp.where(is_full, jnp.roll(window_T, -1), window_T)
        length = jnp.where(is_full, length, length + 1)
        return (window_T.at[length - 1].set(token), length), token

    _, tokens = jax.lax.scan(add_token, (window_T, jnp.int32(prompt_T.size)), jax.random.split(key, num_tokens))
    return tokens


def _choose(logits_V: Array, key: Array, temperature: float, top_k: int | None) -> Array:
    if temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    if top_k is not None:
        # Tokens as likely as the last of them stay, too.
        floor = jax.lax.top_k(logits_V, top_k)[0][-1]
        logits_V = jnp.where(logits_V < floor, -jnp.inf, logits_V)
    return jax.random.categorical(key, logits_V / temperature).astype(jnp.int32)
