"""The GPT of `zero_jax.models.gpt` in Flax Linen: the same function of the same number of params."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from zero_jax.models import gpt
from zero_jax.models.decoder import Batch, LossFn, TokenLosses, mean_loss, places, whole_logits
from zero_jax.models.gpt import GPTConfig
from zero_jax.models.layers import causal_attention, rotate

_normal = nn.initializers.normal(0.02)


def attention(config: GPTConfig, q_BTD: Array, k_BTD: Array, v_BTD: Array, segments_BT: Array | None = None) -> Array:
    """Returns causal self-attention `[B, T, D]` over `num_heads` heads, within segments."""
    shape_BTHK = (*q_BTD.shape[:2], config.num_heads, config.head_dim)
    q_BTHK, k_BTHK, v_BTHK = (x_BTD.reshape(shape_BTHK) for x_BTD in (q_BTD, k_BTD, v_BTD))
    if config.position == "rotary":
        q_BTHK, k_BTHK = rotate(q_BTHK), rotate(k_BTHK)
    return causal_attention(q_BTHK, k_BTHK, v_BTHK, segments_BT).reshape(q_BTD.shape)


class Block(nn.Module):
    """One transformer block: attention, then an MLP, each added to the residual stream."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x_BTD: Array, segments_BT: Array | None = None) -> tuple[Array, None]:
        """Maps the residual stream to itself; the second result is what `nn.scan` asks for."""
        d_model, num_layers = self.config.d_model, self.config.num_layers
        into_stream = nn.initializers.normal(0.02 * (2 * num_layers) ** -0.5)

        def dense(features: int, name: str, kernel_init: Any = _normal) -> nn.Dense:
            return nn.Dense(features, use_bias=False, kernel_init=kernel_init, name=name)

        y_BTD = nn.RMSNorm(name="attention_norm")(x_BTD)
        q_BTD, k_BTD, v_BTD = (dense(d_model, name)(y_BTD) for name in ("query", "key", "value"))
        x_BTD += dense(d_model, "out", into_stream)(attention(self.config, q_BTD, k_BTD, v_BTD, segments_BT))
        y_BTD = nn.RMSNorm(name="mlp_norm")(x_BTD)
        y_BTF = jax.nn.gelu(dense(self.config.mlp_ratio * d_model, "up")(y_BTD))
        return x_BTD + dense(d_model, "down", into_stream)(y_BTF), None


class GPT(nn.Module):
    """A decoder-only transformer with one table for embedding and logits."""

    config: GPTConfig

    @nn.compact
    def __call__(self, tokens_BT: Array, segments_BT: Array | None = None, *, head: bool = True) -> Array:
        """Returns the logits `[B, T, V]` of the next token at every place, or without `head` the hidden states."""
        config = self.config
        embed = nn.Embed(config.vocab_size, config.d_model, embedding_init=_normal, name="embed")
        x_BTD = embed(tokens_BT)
        if config.position == "learned":
            position_TD = self.param("position", _normal, (config.seq_len, config.d_model))
            x_BTD += position_TD[places(tokens_BT, segments_BT)]
        block = nn.remat(Block, prevent_cse=not config.scan) if config.remat else Block
        if config.scan:
            stack = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
                length=config.num_layers,
            )
            x_BTD, _ = stack(config, name="blocks")(x_BTD, segments_BT)
        else:
            for layer in range(config.num_layers):
                x_BTD, _ = block(config, name=f"block_{layer}")(x_BTD, segments_BT)
        x_BTD = nn.RMSNorm(name="final_norm")(x_BTD)
        return embed.attend(x_BTD) if head else x_BTD


def param_specs(config: GPTConfig, *, vocab: bool = True, model_size: int | None = None) -> dict[str, PartitionSpec]:
    """Returns what `gpt.param_specs` does, as patterns of the paths of these params."""
    names = {"layer": "blocks" if config.scan else r"block_\d+", "leaf": "kernel", "embedding": "embed/embedding"}
    return path_specs(config, **names, vocab=vocab, model_size=model_size)


def path_specs(
    config: GPTConfig, *, layer: str, leaf: str, embedding: str, vocab: bool, model_size: int | None
) -> dict[str, PartitionSpec]:
    """Returns what `param_specs` does for this GPT in Flax, as patterns of the paths of its params."""
    gpt.param_specs(config, vocab=vocab, model_size=model_size)  # says what does not divide
    stack = (None,) if config.scan else ()
    specs = {
        rf"{layer}/(query|key|value|up)/{leaf}": PartitionSpec(*stack, None, "model"),
        rf"{layer}/(out|down)/{leaf}": PartitionSpec(*stack, "model"),
    }
    return specs | {embedding: PartitionSpec("model")} if vocab else specs


def make(config: GPTConfig, *, token_losses: TokenLosses = whole_logits) -> tuple[Callable[[Array], Any], LossFn]:
    """Makes `init_fn(key) -> params` and `loss_fn(params, batch) -> (loss, aux)`; arguments as for `gpt.loss_fn`."""
    model = GPT(config)

    def init_fn(key: Array) -> Any:
        return model.init(key, jnp.zeros((1, config.seq_len), jnp.int32))["params"]

    def loss_fn(params: Any, batch: Batch) -> tuple[Array, dict[str, Array]]:
        hidden_BTD: Any = model.apply({"params": params}, batch["inputs"], batch.get("segments"), head=False)
        table_VD = nn.unbox(params["embed"]["embedding"])
        return mean_loss(token_losses(hidden_BTD, table_VD.T, batch["targets"]), batch.get("weights"))

    return init_fn, loss_fn
