"""A decoder-only transformer whose config makes it a GPT-2, GPT-NeoX, Falcon, Llama, Qwen, Gemma, Mistral or Mixtral.

Like the GPT it knows nothing of meshes or sharding. Layers are stacked `[layers, ...]` and run by one `lax.scan` over
periods of layers (a period is longer than one layer where layers with and without a sliding window alternate).

Names end in the letters of their dims: `B` batch, `T` tokens, `D` model, `N` query heads, `K` key and value heads, `H`
head, `F` hidden, `E` experts, `V` vocabulary.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from zero_jax.models.decoder_config import DecoderConfig
from zero_jax.models.gpt import Attend, Batch, LossFn, Params, PlaceFn, TokenLosses, mean_loss, places, whole_logits
from zero_jax.models.layers import causal_attention, layer_norm, leave, rms_norm, rotate
from zero_jax.models.rope import rope_frequencies
from zero_jax.models.sampling import generate_tokens

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
}


def init(config: DecoderConfig, key: Array) -> Params:
    """Makes float32 params, whose shapes are `config.shapes`: `embed` [V, D], `blocks` [layers, ...] and so on."""
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
    if config.norm == "layer":
        params["final_norm_bias"] = jnp.zeros(config.d_model)
    if config.learned_positions:
        position_key = jax.random.fold_in(embed_key, 1)
        params["position"] = 0.02 * jax.random.normal(position_key, (config.learned_positions, config.d_model))
    if not config.tie_embedding:
        params["head"] = 0.02 * jax.random.normal(head_key, (config.d_model, config.vocab_size))
    return params


def param_specs(config: DecoderConfig, *, vocab: bool = True, model_size: int | None = None) -> Params:
    """Returns Megatron's tensor parallelism over the mesh axis `model`, as a tree of `PartitionSpec`s like the params.

    Heads and hidden features are sharded, of each expert too; key and value heads only where the axis divides them.

    Without `vocab` the vocabulary is not sharded; `model_size` is the size of the axis.

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
    column_names = {"query", "gate", "up", "query_bias", "gate_bias", "up_bias"} | (
        {"key", "value", "key_bias", "value_bias"} if shares_keys else set()
    )

    def spec(name: str, shape: tuple[int, ...]) -> PartitionSpec:
        dims: list[str | None] = [None] * (1 + len(shape))
        if name in column_names:
            dims[-1] = "model"
        elif name in ("out", "down"):
            dims[-2] = "model"
        return PartitionSpec(*dims)

    specs: Params = {name: PartitionSpec() for name in config.shapes if "/" not in name}
    specs["blocks"] = {name: spec(name, shape) for name, shape in config.block_shapes.items()}
    if vocab:
        specs["embed"] = PartitionSpec("model", None)
        specs |= {} if config.tie_embedding else {"head": PartitionSpec(None, "model")}
    return specs


def hidden(
    config: DecoderConfig,
    params: Params,
    tokens_BT: Array,
    segments_BT: Array | None = None,
    *,
    place: PlaceFn = leave,
    attend: Attend = causal_attention,
) -> tuple[Array, Array]:
    """Returns the last hidden states `[B, T, D]`, and the loss that balances the experts (a scalar, 0 without any).

    Tokens attend to those of their own segment only (None: all are one document); `place` is as for `gpt.hidden`,
    `attend` is causal attention with the arguments of `layers.causal_attention`.
    """
    x_BTD = params["embed"][tokens_BT]
    if config.scale_embedding:
        x_BTD *= jnp.asarray(config.d_model**0.5, x_BTD.dtype)
    if config.learned_positions:
        x_BTD += params["position"][places(tokens_BT, segments_BT)]
    x_BTD = place(x_BTD, "residual")

    def block(x_BTD: Array, layer: Params, window: bool) -> tuple[Array, Array]:
        run = functools.partial(apply_block, config, segments_BT=segments_BT, place=place, attend=attend, window=window)
        # Inside a scan XLA cannot merge the recomputation with the forward pass, so barriers against it only cost.
        return (jax.checkpoint(run, prevent_cse=False) if config.remat else run)(x_BTD, layer)

    def period(x_BTD: Array, layers: Params, *, first: int, num_layers: int) -> tuple[Array, Array]:
        balance = jnp.zeros(())
        for i in range(num_layers):
            layer = jax.tree.map(lambda stack, i=i: stack[i], layers)
            x_BTD, layer_balance = block(x_BTD, layer, config.has_window(first + i))
            balance += layer_balance
        return x_BTD, balance

    blocks, size = params["blocks"], 1 if config.window is None else config.window_period
    if size == 1:
        x_BTD, balances = jax.lax.scan(lambda x_BTD, layer: block(x_BTD, layer, config.has_window(0)), x_BTD, blocks)
        return place(_norm(config, x_BTD, params, "final_norm"), "gathered"), balances.sum()
    num_periods, num_left = divmod(config.num_layers, size)
    in_periods, balance = num_periods * size, jnp.zeros(())
    if num_periods:
        stacks = jax.tree.map(lambda w: w[:in_periods].reshape(num_periods, size, *w.shape[1:]), blocks)
        x_BTD, balances = jax.lax.scan(functools.partial(period, first=0, num_layers=size), x_BTD, stacks)
        balance = balances.sum()
    if num_left:
        left = jax.tree.map(lambda w: w[in_periods:], blocks)
        x_BTD, left_balance = period(x_BTD, left, first=in_periods, num_layers=num_left)
        balance += left_balance
    return place(_norm(config, x_BTD, params, "final_norm"), "gathered"), balance


def apply_block(
    config: DecoderConfig,
    x_BTD: Array,
    params: Params,
    *,
    segments_BT: Array | None,
    place: PlaceFn,
    attend: Attend,
    window: bool,
) -> tuple[Array, Array]:
    """Runs one block, with or without a sliding window; returns the residual stream and the experts' balance loss."""
    norm = functools.partial(_norm, config, params=params)
    y_BTD = place(norm(x_BTD, name="attention_norm"), "gathered")
    attended_BTD = place(_attention(config, y_BTD, params, segments_BT, attend=attend, window=window), "residual")
    if config.post_norms:
        attended_BTD = norm(attended_BTD, name="attention_post_norm")
    if not config.parallel:
        x_BTD += attended_BTD
    if not config.shared_norm:
        y_BTD = place(norm(x_BTD, name="mlp_norm"), "gathered")
    y_BTD, balance = _experts(config, y_BTD, params) if config.num_experts else (_mlp(config, y_BTD, params), 0.0)
    y_BTD = place(y_BTD, "residual")
    if config.post_norms:
        y_BTD = norm(y_BTD, name="mlp_post_norm")
    if config.parallel:
        y_BTD += attended_BTD
    return x_BTD + y_BTD, jnp.asarray(balance)


def _projected(y: Array, params: Params, name: str) -> Array:
    """Returns `y @ weight`, plus the bias if there is one."""
    projected = y @ params[name]
    return projected + params[f"{name}_bias"] if f"{name}_bias" in params else projected


def _mlp(config: DecoderConfig, y_BTD: Array, params: Params) -> Array:
    activate = _ACTIVATIONS[config.activation]
    if config.gated_mlp:
        hidden_BTF = activate(_projected(y_BTD, params, "gate")) * _projected(y_BTD, params, "up")
    else:
        hidden_BTF = activate(_projected(y_BTD, params, "up"))
    return _projected(hidden_BTF, params, "down")


def _attention(
    config: DecoderConfig, y_BTD: Array, params: Params, segments_BT: Array | None, *, attend: Attend, window: bool
) -> Array:
    query_BTNH, key_BTKH, value_BTKH = (
        _projected(y_BTD, params, name).reshape(*y_BTD.shape[:2], -1, config.head_dim)
        for name in ("query", "key", "value")
    )
    if config.qk_norm:
        query_BTNH = _norm(config, query_BTNH, params, "query_norm")
        key_BTKH = _norm(config, key_BTKH, params, "key_norm")
    if config.num_rotary:
        turn = _rotation(config, window)
        query_BTNH, key_BTKH = turn(query_BTNH), turn(key_BTKH)
    out_BTNH = attend(
        query_BTNH,
        key_BTKH,
        value_BTKH,
        segments_BT,
        scale=config.head_dim**-0.5 if config.query_scale is None else config.query_scale,
        local_window_size=(config.window - 1, 0) if window and config.window else None,
        logits_soft_cap=config.attention_soft_cap,
    )
    return _projected(out_BTNH.reshape(*y_BTD.shape[:2], -1), params, "out")


def _rotation(config: DecoderConfig, window: bool) -> Callable[[Array], Array]:
    """Returns how rotary positions turn queries and keys, in a layer with a sliding window or in one without."""
    if window and config.window_rope_theta:
        return functools.partial(rotate, frequencies=rope_frequencies(config.window_rope_theta, config.num_rotary))
    scaling = config.rope_scaling
    frequencies = rope_frequencies(config.rope_theta, config.num_rotary, scaling)
    return functools.partial(rotate, frequencies=frequencies, magnitude=1.0 if scaling is None else scaling.magnitude)


def _norm(config: DecoderConfig, x: Array, params: Params, name: str) -> Array:
    if config.norm == "layer":
        return layer_norm(x, params[name], params[f"{name}_bias"], config.norm_eps)
    return rms_norm(x, params[name], config.norm_eps, offset=config.norm_offset)


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


def generate(config: DecoderConfig, params: Params, prompt_T: Array, key: Array, **settings: Any) -> Array:
    """Samples tokens that follow a prompt; arguments as for `sampling.generate_tokens`."""
    sizes = {"seq_len": config.seq_len, "vocab_size": config.vocab_size}
    return generate_tokens(functools.partial(apply, config, params), prompt_T, key, **sizes, **settings)


def _head(config: DecoderConfig, params: Params) -> Array:
    return params["embed"].T if config.tie_embedding else params["head"]


def _capped(config: DecoderConfig, logits: Array) -> Array:
    cap = config.logits_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def loss_fn(
    config: DecoderConfig,
    *,
    place: PlaceFn = leave,
    token_losses: TokenLosses = whole_logits,
    attend: Attend = causal_attention,
) -> LossFn:
    """Makes `loss_fn(params, batch) -> (loss, aux)`, with the arguments and batches of `gpt.loss_fn`.

    Raises:
      ValueError: `token_losses` that make the logits in parts, where the logits have a soft cap.
    """
    if config.logits_soft_cap is not None and token_losses is not whole_logits:
        raise ValueError(
            f"logits_soft_cap={config.logits_soft_cap} needs all logits at once: leave out token_losses (loss_chunk)"
        )

    def loss(params: Params, batch: Batch) -> tuple[Array, dict[str, Array]]:
        hidden_BTD, balance = hidden(config, params, batch["inputs"], batch.get("segments"), place=place, attend=attend)
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
