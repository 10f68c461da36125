"""A decoder-only transformer, as pure functions: by its config that of any family from GPT-2 to DeepSeek-V3.

Like the GPT it knows nothing of meshes or sharding. Layers are stacked `[layers, ...]` and run by one `lax.scan` over
periods of layers (a period is longer than one layer where layers with and without a sliding window alternate). The
first layers of a mixture of experts may be a stack without experts.

Names end in the letters of their dims: `B` batch, `T` tokens, `D` model, `N` query heads, `K` key and value heads, `H`
head, `F` hidden, `E` experts, `V` vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from zero_jax.models.decoder_config import DecoderConfig
from zero_jax.models.experts import Experts, run_all, run_dispatched, sigmoid_routes, softmax_routes
from zero_jax.models.layers import (
    ACTIVATIONS,
    capped,
    causal_attention,
    layer_norm,
    leave,
    mean_loss,
    rms_norm,
    rotate,
    whole_logits,
)
from zero_jax.models.rope import places, rope_frequencies
from zero_jax.models.sampling import generate_tokens

Params = dict[str, Any]
Batch = dict[str, Array]
LossFn = Callable[[Any, Batch], tuple[Array, dict[str, Array]]]
TokenLosses = Callable[..., Array]
PlaceFn = Callable[[Array, str], Array]
Attend = Callable[..., Array]
Losses = dict[str, Array]  # of experts, `[B]` of each kind; empty without any


class Hooks(NamedTuple):
    """What a caller has a say in within the blocks.

    Attributes:
      segments_BT: which document each token belongs to; tokens then see their own document only. None: one document.
      place: `place(x_BTD, kind)` may shard activations: `residual` is what is added to the residual stream, `gathered`
        what goes into the matrices of a block or of the head, which need every token.
      attend: causal attention with the arguments of `layers.causal_attention`.
    """

    segments_BT: Array | None = None
    place: PlaceFn = leave
    attend: Attend = causal_attention


# As Megatron-LM: what reads the residual stream is sharded by columns and what writes to it by rows, so that attention
# and MLP have one all-reduce each.
_INTO_STREAM = ("out", "down", "shared_down")
_COLUMNS = {"query", "gate", "up", "query_bias", "gate_bias", "up_bias", "shared_gate", "shared_up"}
_KEY_COLUMNS = {"key", "value", "key_bias", "value_bias"}


def init(config: DecoderConfig, key: Array) -> Params:
    """Makes float32 params, whose shapes are `config.shapes`: `embed` [V, D], `blocks` [layers, ...] and so on."""
    scale = 0.0 if config.norm_offset else 1.0  # norms multiply by 1 in both cases
    embed_key, head_key, blocks_key = jax.random.split(key, 3)
    params: Params = {"embed": 0.02 * jax.random.normal(embed_key, (config.vocab_size, config.d_model))}
    params |= {"blocks": _init_stack(config, "blocks", blocks_key), "final_norm": jnp.full(config.d_model, scale)}
    for i, stack in enumerate(config.stacks):
        if stack != "blocks":
            # By `fold_in`: with more keys of the split, the params of a config without such a stack would be others.
            params[stack] = _init_stack(config, stack, jax.random.fold_in(blocks_key, 1 + i))
    if config.norm == "layer":
        params["final_norm_bias"] = jnp.zeros(config.d_model)
    if config.learned_positions:
        position_key = jax.random.fold_in(embed_key, 1)
        params["position"] = 0.02 * jax.random.normal(position_key, (config.learned_positions, config.d_model))
    if not config.tie_embedding:
        params["head"] = 0.02 * jax.random.normal(head_key, (config.d_model, config.vocab_size))
    return params


def _init_stack(config: DecoderConfig, stack: str, key: Array) -> Params:
    num_layers, shapes = config.stacks[stack]
    blocks = {}
    for (name, shape), block_key in zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True):
        shape = (num_layers, *shape)
        if name.endswith("_norm"):
            blocks[name] = jnp.full(shape, 0.0 if config.norm_offset else 1.0)
        elif name.endswith("_bias"):
            blocks[name] = jnp.zeros(shape)
        else:
            # What writes to the residual stream starts smaller, so that it does not grow with depth (as in GPT-2).
            into_stream = (2 * config.num_layers) ** -0.5 if name in _INTO_STREAM else 1.0
            blocks[name] = 0.02 * into_stream * jax.random.normal(block_key, shape)
    return blocks


def param_specs(config: DecoderConfig, *, vocab: bool = True, model_size: int | None = None) -> Params:
    """Returns Megatron's tensor parallelism over the mesh axis `model`, as a tree of `PartitionSpec`s like the params.

    Heads and hidden features are sharded, of each expert too; key and value heads only where the axis, of `model_size`,
    divides them. It has to divide all others, or `ValueError` is raised. Without `vocab` the vocabulary is not sharded.
    """
    sizes = {"num_heads": config.num_heads, "d_hidden": config.d_hidden}
    sizes |= {} if config.d_hidden_dense is None else {"d_hidden_dense": config.d_hidden_dense}
    sizes |= {"vocab_size": config.vocab_size} if vocab else {}
    for name, size in sizes.items():
        if model_size is not None and size % model_size:
            hint = " or leave the vocabulary whole with vocab=False" if name == "vocab_size" else ""
            raise ValueError(
                f"{name}={size} does not split over the {model_size} devices of the model axis: choose a multiple of "
                f"{model_size}{hint}"
            )
    # Key heads that the devices do not divide are on each of them: a part of a head is of no use.
    shares_keys = model_size is None or config.num_kv_heads % model_size == 0
    column_names = _COLUMNS | (_KEY_COLUMNS if shares_keys else set())

    def spec(name: str, shape: tuple[int, ...]) -> PartitionSpec:
        dims: list[str | None] = [None] * (1 + len(shape))
        if name in column_names:
            dims[-1] = "model"
        elif name in _INTO_STREAM:
            dims[-2] = "model"
        return PartitionSpec(*dims)

    specs: Params = {name: PartitionSpec() for name in config.shapes if "/" not in name}
    for stack, (_, shapes) in config.stacks.items():
        specs[stack] = {name: spec(name, shape) for name, shape in shapes.items()}
    if vocab:
        specs["embed"] = PartitionSpec("model", None)
        specs |= {} if config.tie_embedding else {"head": PartitionSpec(None, "model")}
    return specs


def hidden(config: DecoderConfig, params: Params, tokens_BT: Array, hooks: Hooks) -> tuple[Array, Losses]:
    """Returns the last hidden states `[B, T, D]`, and the losses of the experts, summed over the layers.

    Blocks that are not stacked are a list, which a Python loop runs.
    """
    x_BTD = params["embed"][tokens_BT]
    if config.scale_embedding:
        # Rounded to the dtype first, as transformers does for Gemma.
        x_BTD *= jnp.asarray(config.d_model**0.5, x_BTD.dtype)
    if config.learned_positions:
        x_BTD += params["position"][places(tokens_BT, hooks.segments_BT)]
    x_BTD = hooks.place(x_BTD, "residual")

    blocks, is_list = params["blocks"], isinstance(params["blocks"], list)

    def block(x_BTD: Array, layer: Params, window: bool) -> tuple[Array, Losses]:
        run = functools.partial(apply_block, config, hooks=hooks, window=window)
        # Inside a scan XLA cannot merge the recomputation with the forward pass, so barriers against it only cost.
        return (jax.checkpoint(run, prevent_cse=is_list) if config.remat else run)(x_BTD, layer)

    def each_of(x_BTD: Array, layers: Sequence[Params], first: int = 0) -> tuple[Array, Losses]:
        losses = []
        for i, layer in enumerate(layers, first):
            x_BTD, of_layer = block(x_BTD, layer, config.has_window(i))
            losses.append(of_layer)
        return x_BTD, _total(losses)

    def period(x_BTD: Array, layers: Params, *, first: int = 0, num_layers: int) -> tuple[Array, Losses]:
        # Unrolled: whether a layer has a window is known when it is traced, and a scan traces one layer for all.
        return each_of(x_BTD, [jax.tree.map(lambda w, i=i: w[i], layers) for i in range(num_layers)], first)

    if config.num_dense_layers:  # a config with these has no window
        x_BTD, _ = jax.lax.scan(lambda x_BTD, layer: block(x_BTD, layer, False), x_BTD, params["dense_blocks"])
    losses: list[Losses] = []
    size = 1 if config.window is None or is_list else config.window_period
    num_periods, num_left = divmod(config.num_layers - config.num_dense_layers, size)
    in_periods = num_periods * size
    if is_list:
        x_BTD, of_all = each_of(x_BTD, blocks)
        losses.append(of_all)
    elif size == 1:
        x_BTD, each = jax.lax.scan(lambda x_BTD, layer: block(x_BTD, layer, config.has_window(0)), x_BTD, blocks)
        losses.append(jax.tree.map(lambda of_layers: of_layers.sum(axis=0), each))
    elif num_periods:  # layers of a period differ, periods do not
        stacks = jax.tree.map(lambda w: w[:in_periods].reshape(num_periods, size, *w.shape[1:]), blocks)
        x_BTD, each = jax.lax.scan(functools.partial(period, num_layers=size), x_BTD, stacks)
        losses.append(jax.tree.map(lambda of_layers: of_layers.sum(axis=0), each))
    if num_left:  # the last period is cut off, as in Gemma 3 1B: 26 layers in periods of 6
        left = jax.tree.map(lambda w: w[in_periods:], blocks)
        x_BTD, of_rest = period(x_BTD, left, first=in_periods, num_layers=num_left)
        losses.append(of_rest)
    return hooks.place(_norm(config, x_BTD, params, "final_norm"), "gathered"), _total(losses)


def _total(losses: Sequence[Losses]) -> Losses:
    return jax.tree.map(lambda *each: functools.reduce(jnp.add, each), *losses)


def apply_block(
    config: DecoderConfig, x_BTD: Array, params: Params, hooks: Hooks, window: bool = False
) -> tuple[Array, Losses]:
    """Runs one block, with or without a sliding window; returns the residual stream and the losses of its experts."""
    norm, place = functools.partial(_norm, config, params=params), hooks.place
    y_BTD = place(norm(x_BTD, name="attention_norm"), "gathered")
    attended_BTD = place(_attention(config, y_BTD, params, hooks, window), "residual")
    if config.post_norms:
        attended_BTD = norm(attended_BTD, name="attention_post_norm")
    if not config.parallel:
        x_BTD += attended_BTD
    if not config.shared_norm:
        y_BTD = place(norm(x_BTD, name="mlp_norm"), "gathered")
    if "router" in params:
        y_BTD, losses = _experts(config, y_BTD, params)
    else:
        y_BTD, losses = _mlp(config, y_BTD, params), {}
    y_BTD = place(y_BTD, "residual")
    if config.post_norms:
        y_BTD = norm(y_BTD, name="mlp_post_norm")
    if config.parallel:
        y_BTD += attended_BTD
    return x_BTD + y_BTD, losses


def _projected(y: Array, params: Params, name: str) -> Array:
    """Returns `y @ weight`, plus the bias if there is one."""
    projected = y @ params[name]
    return projected + params[f"{name}_bias"] if f"{name}_bias" in params else projected


def _mlp(config: DecoderConfig, y_BTD: Array, params: Params) -> Array:
    hidden_BTF = ACTIVATIONS[config.activation](_projected(y_BTD, params, "gate" if config.gated_mlp else "up"))
    if config.gated_mlp:
        hidden_BTF *= _projected(y_BTD, params, "up")
    return _projected(hidden_BTF, params, "down")


def _attention(config: DecoderConfig, y_BTD: Array, params: Params, hooks: Hooks, window: bool) -> Array:
    scale, scaling = config.head_dim**-0.5 if config.query_scale is None else config.query_scale, config.rope_scaling
    if config.latent is not None:
        sizes = {"num_heads": config.num_heads, "theta": config.rope_theta, "scaling": scaling}
        heads = config.latent.heads(y_BTD, params, **sizes)
        # YaRN sharpens the softmax over longer contexts; elsewhere by the magnitude of the turned features.
        scale *= 1.0 if scaling is None else scaling.logits_factor
    else:
        heads = _heads(config, y_BTD, params, window)
    out_BTNH = hooks.attend(
        *heads,
        hooks.segments_BT,
        scale=scale,
        # A token itself is one of its window, and none of the tokens to the left.
        local_window_size=(config.window - 1, 0) if window and config.window else None,
        logits_soft_cap=config.attention_soft_cap,
    )
    return _projected(out_BTNH.reshape(*y_BTD.shape[:2], -1), params, "out")


def _heads(config: DecoderConfig, y_BTD: Array, params: Params, window: bool) -> tuple[Array, Array, Array]:
    query_BTNH, key_BTKH, value_BTKH = (
        _projected(y_BTD, params, name).reshape(*y_BTD.shape[:2], -1, config.head_dim)
        for name in ("query", "key", "value")
    )
    # Before the rotation, as in Qwen 3 and Gemma 3: scales of single features do not commute with it.
    if config.qk_norm:
        query_BTNH = _norm(config, query_BTNH, params, "query_norm")
        key_BTKH = _norm(config, key_BTKH, params, "key_norm")
    if config.num_rotary:
        turn = _rotation(config, window)
        query_BTNH, key_BTKH = turn(query_BTNH), turn(key_BTKH)
    return query_BTNH, key_BTKH, value_BTKH


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


def _experts(config: DecoderConfig, y_BTD: Array, params: Params) -> tuple[Array, Losses]:
    """Returns the weighted outputs of each token's experts, and the losses of their loads."""
    k, normalize, routing = config.experts_per_token, config.normalize_expert_weights, config.routing
    if routing is None:
        routes = softmax_routes(y_BTD @ params["router"], k, normalize=normalize)
    else:
        # In float32, as transformers does: scores that round to one another would choose other experts.
        logits_BTE = jnp.einsum("BTD,DE->BTE", y_BTD, params["router"], preferred_element_type=jnp.float32)
        routes = sigmoid_routes(logits_BTE, params["router_bias"], k, routing, normalize=normalize)
    activate = ACTIVATIONS[config.activation]
    experts = Experts(params["gate"], params["up"], params["down"], activate)
    if config.expert_capacity is None:
        out_BTD = run_all(y_BTD, routes, experts)
    else:
        out_BTD = run_dispatched(y_BTD, routes, experts, capacity=config.expert_capacity)
    if config.num_shared_experts:
        out_BTD += (activate(y_BTD @ params["shared_gate"]) * (y_BTD @ params["shared_up"])) @ params["shared_down"]
    losses = {"balance": routes.balance()}
    if routing is not None and routing.bias_rate:
        losses["bias"] = routing.bias_rate * routes.bias_term(params["router_bias"])
    return out_BTD.astype(y_BTD.dtype), losses


def apply(config: DecoderConfig, params: Params, tokens_BT: Array, segments_BT: Array | None = None) -> Array:
    """Returns the logits `[B, T, V]` of the next token at each position, in the params' dtype."""
    logits_BTV = hidden(config, params, tokens_BT, Hooks(segments_BT))[0] @ _head(config, params)
    return capped(logits_BTV, config.logits_soft_cap)


def generate(config: DecoderConfig, params: Params, prompt_T: Array, key: Array, **settings: Any) -> Array:
    """Samples tokens that follow a prompt; arguments as for `sampling.generate_tokens`."""
    sizes = {"seq_len": config.seq_len, "vocab_size": config.vocab_size}
    return generate_tokens(functools.partial(apply, config, params), prompt_T, key, **sizes, **settings)


def _head(config: DecoderConfig, params: Params) -> Array:
    return params["embed"].T if config.tie_embedding else params["head"]


def loss_fn(
    config: DecoderConfig,
    *,
    place: PlaceFn = leave,
    token_losses: TokenLosses = whole_logits,
    attend: Attend = causal_attention,
) -> LossFn:
    """Makes `loss_fn(params, batch) -> (loss, aux)`.

    A batch has int `inputs` and `targets`, both `[B, T]`; it may have `weights`, how much each target counts, and
    `segments`, which document each input belongs to. `place` and `attend` are those of `Hooks`;
    `token_losses(hidden_BTD, head_DV, targets_BT)` returns the losses `[B, T]`, float32: a function that makes the
    logits in parts saves the memory of the whole. Where logits have a soft cap, it is called with `soft_cap=` as well.
    """
    cap = config.logits_soft_cap
    of_tokens = token_losses if cap is None else functools.partial(token_losses, soft_cap=cap)

    def loss(params: Params, batch: Batch) -> tuple[Array, dict[str, Array]]:
        hooks, weights_BT = Hooks(batch.get("segments"), place, attend), batch.get("weights")
        hidden_BTD, losses = hidden(config, params, batch["inputs"], hooks)
        mean, aux = mean_loss(of_tokens(hidden_BTD, _head(config, params), batch["targets"]), weights_BT)
        if config.num_extra_tokens:
            run = functools.partial(apply_block, config, hooks=hooks)
            extra_BT, of_experts = _extra_losses(config, params, hidden_BTD, batch, run=run, of_tokens=of_tokens)
            aux["extra_tokens"], _ = mean_loss(extra_BT, weights_BT)
            mean += config.extra_token_weight * aux["extra_tokens"]
            losses = _total([losses, of_experts])
        # A sequence counts by what its tokens weigh, as in the loss, so that microbatches add up to the batch.
        of_sequences = {name: jnp.broadcast_to(x_B[:, None], batch["targets"].shape) for name, x_B in losses.items()}
        if config.expert_balance and config.num_experts:
            num_layers = config.num_layers - config.num_dense_layers + config.num_extra_tokens
            aux["expert_balance"] = mean_loss(of_sequences["balance"], weights_BT)[0] / num_layers
            mean += config.expert_balance * aux["expert_balance"]
        # It is 0, and has a gradient in the biases alone.
        if "bias" in losses:
            mean += mean_loss(of_sequences["bias"], weights_BT)[0]
        return mean, aux

    return loss


def _extra_losses(
    config: DecoderConfig,
    params: Params,
    hidden_BTD: Array,
    batch: Batch,
    *,
    run: Callable[[Array, Params], tuple[Array, Losses]],
    of_tokens: TokenLosses,
) -> tuple[Array, Losses]:
    """Returns the mean loss `[B, T]` of the predictions of tokens after the next, and the losses of their experts.

    Each prediction is made of the former one's hidden state and the token between (DeepSeek-V3, section 2.2). Its loss
    is at the place where the next token is that target, so that the target's weight counts for both.
    """
    targets_BT, segments_BT = batch["targets"], batch.get("segments")
    total_BT, losses = jnp.zeros(targets_BT.shape, jnp.float32), []
    for depth in range(1, config.num_extra_tokens + 1):
        layer = jax.tree.map(lambda stack, i=depth - 1: stack[i], params["extra_blocks"])
        norm = functools.partial(_norm, config, params=layer)
        # The token before the one that is predicted here: for depth 1 the next token, which is the target.
        between_BTD = params["embed"][jnp.roll(targets_BT, 1 - depth, axis=1)]
        pairs = (norm(between_BTD, name="embed_norm"), norm(hidden_BTD, name="hidden_norm"))
        x_BTD = jnp.concatenate(pairs, axis=-1) @ layer["project"]
        x_BTD, of_layer = (jax.checkpoint(run) if config.remat else run)(x_BTD, layer)
        losses.append(of_layer)
        hidden_BTD = norm(x_BTD, name="final_norm")
        losses_BT = of_tokens(hidden_BTD, _head(config, params), jnp.roll(targets_BT, -depth, axis=1))
        is_seen_BT = jnp.arange(targets_BT.shape[1]) >= depth
        if segments_BT is not None:
            is_seen_BT &= jnp.roll(segments_BT, depth, axis=1) == segments_BT
        # What the rolls bring round from the end of the sequence is among the first `depth` losses, which do not count.
        total_BT += jnp.where(is_seen_BT, jnp.roll(losses_BT, depth, axis=1), 0.0)
    return total_BT / config.num_extra_tokens, _total(losses)
