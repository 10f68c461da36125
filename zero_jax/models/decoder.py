"""A decoder-only transformer that covers Llama, Qwen, Gemma, Mistral and Mixtral by config, as pure functions.

Like the GPT it knows nothing of meshes or sharding. Layers are stacked `[layers, ...]` and run by one `lax.scan` over
periods of layers (a period is longer than one layer where layers with and without a sliding window alternate).

Names end in the letters of their dims: `B` batch, `T` tokens, `D` model, `N` query heads, `K` key and value heads, `H`
head, `F` hidden, `E` experts, `V` vocabulary.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from zero_jax.models.decoder_config import DecoderConfig
from zero_jax.models.gpt import Batch, LossFn, Params, TokenLosses, mean_loss, whole_logits

_ACTIVATIONS = {"silu": jax.nn.silu, "gelu": functools.partial(jax.nn.gelu, approximate=True)}


def init(config: DecoderConfig, key: Array) -> Params:
    """Makes float32 params: `embed` [V, D], `final_norm` [D], `head` [D, V] unless tied, `blocks` [layers, ...]."""
    scale = 0.0 if config.norm_offset else 1.0
    embed_key, head_key, blocks_key = jax.random.split(key, 3)
    shapes = config.block_shapes
    blocks = {}
    for (name, shape), block_key in zip(shapes.items(), jax.random.split(blocks_key, len(shapes)), strict=True):
        shape = (config.num_layers, *shape)
        if name.endswith("_norm"):
            blocks[name] = jnp.full(shape, scale)
        elif name.endswith("_bias"):
            blocks[name] = jnp.zeros(shape)
        else:
            # What writes to the residual stream starts smaller, so that it does not grow with depth (as in GPT-2).
            into_stream = (2 * config.num_layers) ** -0.5 if name in ("out", "down") else 1.0
            blocks[name] = 0.02 * into_stream * jax.random.normal(block_key, shape)
    params: Params = {"embed": 0.02 * jax.random.normal(embed_key, (config.vocab_size, config.d_model))}
    params |= {"blocks": blocks, "final_norm": jnp.full(config.d_model, scale)}
    if not config.tie_embedding:
        params["head"] = 0.02 * jax.random.normal(head_key, (config.d_model, config.vocab_size))
    return params


def param_specs(config: DecoderConfig, *, vocab: bool = True, model_size: int | None = None) -> Params:
    """Returns Megatron's tensor parallelism over the mesh axis `model`, as a tree of `PartitionSpec`s like the params.

    Heads and hidden features are sharded, of each expert too; key and value heads only where the axis divides them.

    Args:
      config: the model's shape.
      vocab: whether the vocabulary is sharded too.
      model_size: size of the axis.

    Raises:
      ValueError: `model_size` does not divide the query heads, the hidden features or the vocabulary.
    """
    sizes = {"num_heads": config.num_heads, "d_hidden": config.d_hidden} | (
        {"vocab_size": config.vocab_size} if vocab else {}
    )
    for name, size in sizes.items():
        if model_size is not None and size % model_size:
            raise ValueError(f"{name}={size} is no multiple of the {model_size} devices of the axis model")
    shares_keys = model_size is None or config.num_kv_heads % model_size == 0
    column_names = {"query", "gate", "up", "query_bias"} | (
        {"key", "value", "key_bias", "value_bias"} if shares_keys else set()
    )

    def spec(name: str, shape: tuple[int, ...]) -> PartitionSpec:
        dims: list[str | None] = [None] * (1 + len(shape))
        if name in column_names:
            dims[-1] = "model"
        elif name in ("out", "down"):
            dims[-2] = "model"
        return PartitionSpec(*dims)

    specs: Params = {
        "embed": PartitionSpec("model", None) if vocab else PartitionSpec(),
        "blocks": {name: spec(name, shape) for name, shape in config.block_shapes.items()},
        "final_norm": PartitionSpec(),
    }
    if not config.tie_embedding:
        specs["head"] = PartitionSpec(None, "model") if vocab else PartitionSpec()
    return specs


def dot_product_attention(
    query_BTNH: Array,
    key_BTKH: Array,
    value_BTKH: Array,
    *,
    scale: float,
    is_causal: bool,
    local_window_size: tuple[int, int] | None,
    segment_ids: Array | None,
    logits_soft_cap: float | None,
) -> Array:
    """Returns attention `[B, T, N, H]` with a float32 softmax; the arguments of `zero_jax.dot_product_attention`."""
    B, T, N, H = query_BTNH.shape
    K = key_BTKH.shape[2]
    logits_BKGTS = jnp.einsum(
        "BTKGH,BSKH->BKGTS",
        query_BTNH.reshape(B, T, K, N // K, H),
        key_BTKH,
        preferred_element_type=jnp.float32,
    )
    logits_BKGTS *= scale
    if logits_soft_cap is not None:
        logits_BKGTS = logits_soft_cap * jnp.tanh(logits_BKGTS / logits_soft_cap)
    distance_TT = jnp.arange(T)[:, None] - jnp.arange(T)
    is_seen = distance_TT >= 0 if is_causal else jnp.ones((T, T), bool)
    if local_window_size is not None:
        left, right = local_window_size
        is_seen &= (distance_TT <= left) & (distance_TT >= -right)
    if segment_ids is not None:
        is_seen = is_seen & (segment_ids[:, None, None, :, None] == segment_ids[:, None, None, None, :])
    weights_BKGTS = jax.nn.softmax(jnp.where(is_seen, logits_BKGTS, -1e30)).astype(value_BTKH.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS, value_BTKH).reshape(B, T, N, H)


Attention = Callable[..., Array]


def hidden(
    config: DecoderConfig,
    params: Params,
    tokens_BT: Array,
    segments_BT: Array | None = None,
    *,
    attention: Attention = dot_product_attention,
) -> tuple[Array, Array]:
    """Returns the last hidden states `[B, T, D]`, and the loss that balances the experts (a scalar, 0 without any).

    Args:
      config: the model's shape.
      params: its params.
      tokens_BT: the tokens.
      segments_BT: the document of each token; tokens attend to their own document only. None: one document.
      attention: a function like `dot_product_attention`.
    """
    x_BTD = params["embed"][tokens_BT]
    if config.scale_embedding:
        x_BTD *= jnp.asarray(config.d_model**0.5, x_BTD.dtype)

    def period(x_BTD: Array, layers: Params, *, first: int, num_layers: int) -> tuple[Array, Array]:
        balance = jnp.zeros(())
        for i in range(num_layers):
            block = functools.partial(
                apply_block, config, segments_BT=segments_BT, attention=attention, window=config.has_window(first + i)
            )
            if config.remat:
                block = jax.checkpoint(block, prevent_cse=False)
            x_BTD, layer_balance = block(x_BTD, jax.tree.map(lambda stack, i=i: stack[i], layers))
            balance += layer_balance
        return x_BTD, balance

    size = 1 if config.window is None else config.window_period
    num_periods, num_left = divmod(config.num_layers, size)
    in_periods, left = num_periods * size, params["blocks"]
    balances = jnp.zeros(1)
    if num_periods:
        stacks = jax.tree.map(lambda w: w[:in_periods].reshape(num_periods, size, *w.shape[1:]), params["blocks"])
        x_BTD, balances = jax.lax.scan(functools.partial(period, first=0, num_layers=size), x_BTD, stacks)
        left = jax.tree.map(lambda w: w[in_periods:], params["blocks"])
    x_BTD, balance = period(x_BTD, left, first=in_periods, num_layers=num_left)
    return _rms_norm(config, x_BTD, params["final_norm"]), balances.sum() + balance


def apply_block(
    config: DecoderConfig,
    x_BTD: Array,
    params: Params,
    *,
    segments_BT: Array | None,
    attention: Attention,
    window: bool,
) -> tuple[Array, Array]:
    """Runs one block, with or without a sliding window; returns the residual stream and the experts' balance loss."""
    norm = functools.partial(_rms_norm, config)
    y_BTD = _attend(config, norm(x_BTD, params["attention_norm"]), params, segments_BT, attention, window)
    x_BTD += norm(y_BTD, params["attention_post_norm"]) if config.post_norms else y_BTD
    y_BTD, balance = norm(x_BTD, params["mlp_norm"]), jnp.zeros(())
    if config.num_experts:
        y_BTD, balance = _experts(config, y_BTD, params)
    else:
        y_BTD = (_ACTIVATIONS[config.activation](y_BTD @ params["gate"]) * (y_BTD @ params["up"])) @ params["down"]
    return x_BTD + (norm(y_BTD, params["mlp_post_norm"]) if config.post_norms else y_BTD), balance


def _attend(
    config: DecoderConfig,
    y_BTD: Array,
    params: Params,
    segments_BT: Array | None,
    attention: Attention,
    window: bool,
) -> Array:
    heads = []
    for name in ("query", "key", "value"):
        projected = y_BTD @ params[name]
        if config.qkv_bias:
            projected += params[f"{name}_bias"]
        heads.append(projected.reshape(*y_BTD.shape[:2], -1, config.head_dim))
    query_BTNH, key_BTKH, value_BTKH = heads
    if config.qk_norm:
        query_BTNH = _rms_norm(config, query_BTNH, params["query_norm"])
        key_BTKH = _rms_norm(config, key_BTKH, params["key_norm"])
    cos, sin = _rotations(config, y_BTD.shape[1], window)
    out_BTNH = attention(
        _rotate(query_BTNH, cos, sin),
        _rotate(key_BTKH, cos, sin),
        value_BTKH,
        scale=config.head_dim**-0.5 if config.query_scale is None else config.query_scale,
        is_causal=True,
        local_window_size=(config.window - 1, 0) if window and config.window else None,
        segment_ids=segments_BT,
        logits_soft_cap=config.attention_soft_cap,
    )
    return out_BTNH.reshape(*y_BTD.shape[:2], -1) @ params["out"]


def _rotations(config: DecoderConfig, num_tokens: int, window: bool) -> tuple[Array, Array]:
    """Returns the cosines and sines `[T, 1, H/2]` of rotary positions."""
    theta = config.window_rope_theta if window and config.window_rope_theta else config.rope_theta
    frequencies = theta ** (-jnp.arange(0, config.head_dim, 2) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is not None and not (window and config.window_rope_theta):
        stretched = frequencies / scaling.factor
        if scaling.low_freq_factor is None:
            frequencies = stretched
        else:
            turns = scaling.original_seq_len * frequencies / (2 * jnp.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            share = jnp.clip((turns - low) / (high - low), 0, 1)
            frequencies = share * frequencies + (1 - share) * stretched
    angles_T1F = (jnp.arange(num_tokens)[:, None] * frequencies)[:, None]
    return jnp.cos(angles_T1F), jnp.sin(angles_T1F)


def _rotate(x_BTNH: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTNH.dtype)


def _rms_norm(config: DecoderConfig, x: Array, scale: Array) -> Array:
    """Scales vectors to a root mean square of 1, in float32, then by `scale` (or 1 + `scale`)."""
    y = x.astype(jnp.float32)
    y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + config.norm_eps)
    if config.norm_offset:
        return (y * (1 + scale.astype(jnp.float32))).astype(x.dtype)
    return y.astype(x.dtype) * scale


def _experts(config: DecoderConfig, y_BTD: Array, params: Params) -> tuple[Array, Array]:
    """Returns the weighted outputs of each token's experts, and the loss that balances the experts of a sequence."""
    E, k, T = config.num_experts, config.experts_per_token, y_BTD.shape[1]
    router_BTE = jax.nn.softmax((y_BTD @ params["router"]).astype(jnp.float32))
    top_BTk, chosen_BTk = jax.lax.top_k(router_BTE, k)
    if config.normalize_expert_weights:
        top_BTk /= top_BTk.sum(axis=-1, keepdims=True)
    chosen_BTkE = jax.nn.one_hot(chosen_BTk, E)
    weights_BTE = jnp.einsum("BTk,BTkE->BTE", top_BTk, chosen_BTkE)
    activate, dtype = _ACTIVATIONS[config.activation], y_BTD.dtype
    if config.expert_capacity is None:
        hidden_BTEF = activate(jnp.einsum("BTD,EDF->BTEF", y_BTD, params["gate"]))
        hidden_BTEF *= jnp.einsum("BTD,EDF->BTEF", y_BTD, params["up"])
        hidden_BTEF *= weights_BTE[..., None].astype(dtype)
        out_BTD = jnp.einsum("BTEF,EFD->BTD", hidden_BTEF, params["down"])
    else:
        capacity = min(T, math.ceil(config.expert_capacity * k * T / E))
        is_chosen_BTE = chosen_BTkE.sum(axis=2)
        place_BTE = jnp.cumsum(is_chosen_BTE, axis=1) - is_chosen_BTE
        place_BTE = jnp.where(is_chosen_BTE > 0, place_BTE, capacity).astype(jnp.int32)
        dispatch_BTEC = jax.nn.one_hot(place_BTE, capacity, dtype=dtype)  # a place past the capacity is no place
        taken_BECD = jnp.einsum("BTEC,BTD->BECD", dispatch_BTEC, y_BTD)
        hidden_BECF = activate(jnp.einsum("BECD,EDF->BECF", taken_BECD, params["gate"]))
        hidden_BECF *= jnp.einsum("BECD,EDF->BECF", taken_BECD, params["up"])
        combine_BTEC = dispatch_BTEC * weights_BTE[..., None].astype(dtype)
        out_BTD = jnp.einsum("BTEC,BECD->BTD", combine_BTEC, jnp.einsum("BECF,EFD->BECD", hidden_BECF, params["down"]))
    share_BE = chosen_BTkE.sum(axis=2).mean(axis=1) * (E / k)
    return out_BTD.astype(dtype), (share_BE * router_BTE.mean(axis=1)).sum(axis=-1).mean()


def apply(config: DecoderConfig, params: Params, tokens_BT: Array, segments_BT: Array | None = None) -> Array:
    """Returns the logits `[B, T, V]` of the next token at each position, in the params' dtype."""
    logits_BTV = hidden(config, params, tokens_BT, segments_BT)[0] @ _head(config, params)
    return _capped(config, logits_BTV)


def _head(config: DecoderConfig, params: Params) -> Array:
    return params["embed"].T if config.tie_embedding else params["head"]


def _capped(config: DecoderConfig, logits: Array) -> Array:
    cap = config.logits_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def loss_fn(
    config: DecoderConfig, *, attention: Attention = dot_product_attention, token_losses: TokenLosses = whole_logits
) -> LossFn:
    """Makes `loss_fn(params, batch) -> (loss, aux)`, with the batches and `token_losses` of the GPT's.

    Raises:
      ValueError: `token_losses` that make the logits in parts, where the logits have a soft cap.
    """
    if config.logits_soft_cap is not None and token_losses is not whole_logits:
        raise ValueError(f"logits_soft_cap={config.logits_soft_cap} needs logits made at once: leave token_losses out")

    def loss(params: Params, batch: Batch) -> tuple[Array, dict[str, Array]]:
        hidden_BTD, balance = hidden(config, params, batch["inputs"], batch.get("segments"), attention=attention)
        head_DV, targets_BT = _head(config, params), batch["targets"]
        if config.logits_soft_cap is None:
            losses_BT = token_losses(hidden_BTD, head_DV, targets_BT)
        else:
            log_probs_BTV = jax.nn.log_softmax(_capped(config, (hidden_BTD @ head_DV).astype(jnp.float32)))
            losses_BT = -jnp.take_along_axis(log_probs_BTV, targets_BT[..., None], axis=-1)[..., 0]
        mean, aux = mean_loss(losses_BT, batch.get("weights"))
        if config.expert_balance:
            aux["expert_balance"] = balance / config.num_layers
            mean += config.expert_balance * aux["expert_balance"]
        return mean, aux

    return loss
