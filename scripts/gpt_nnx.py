"""The GPT of `zero_jax.models.gpt` in Flax NNX: the same function of the same number of params."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from gpt_linen import attention, path_specs
from jax import Array
from jax.sharding import PartitionSpec

from zero_jax.models.decoder import Batch, LossFn, TokenLosses, mean_loss, places, whole_logits
from zero_jax.models.gpt import GPTConfig

_normal = nnx.initializers.normal(0.02)


class Block(nnx.Module):
    """One transformer block: attention, then an MLP, each added to the residual stream."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        """Makes the block's params."""
        d_model, hidden = config.d_model, config.mlp_ratio * config.d_model
        into_stream = nnx.initializers.normal(0.02 * (2 * config.num_layers) ** -0.5)

        def linear(num_in: int, num_out: int, kernel_init: Any = _normal) -> nnx.Linear:
            return nnx.Linear(num_in, num_out, use_bias=False, kernel_init=kernel_init, rngs=rngs)

        self.config = config
        self.attention_norm = nnx.RMSNorm(d_model, rngs=rngs)
        self.query = linear(d_model, d_model)
        self.key = linear(d_model, d_model)
        self.value = linear(d_model, d_model)
        self.out = linear(d_model, d_model, into_stream)
        self.mlp_norm = nnx.RMSNorm(d_model, rngs=rngs)
        self.up = linear(d_model, hidden)
        self.down = linear(hidden, d_model, into_stream)

    def __call__(self, x_BTD: Array, segments_BT: Array | None = None) -> Array:
        """Maps the residual stream to itself."""
        y_BTD = self.attention_norm(x_BTD)
        x_BTD += self.out(attention(self.config, self.query(y_BTD), self.key(y_BTD), self.value(y_BTD), segments_BT))
        return x_BTD + self.down(jax.nn.gelu(self.up(self.mlp_norm(x_BTD))))


class GPT(nnx.Module):
    """A decoder-only transformer with one table for embedding and logits."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        """Makes all params; with `config.scan` the blocks' are stacked along a first dim."""
        self.config = config
        self.blocks: Any
        self.embed = nnx.Embed(config.vocab_size, config.d_model, embedding_init=_normal, rngs=rngs)
        # By default the module remembers the dtype that it was made with, and casts bf16 params (and with them the
        # whole model) back to float32; without a dtype it follows its params.
        self.embed.dtype = None
        self.final_norm = nnx.RMSNorm(config.d_model, rngs=rngs)
        if config.position == "learned":
            self.position = nnx.Param(_normal(rngs.params(), (config.seq_len, config.d_model)))
        if config.scan:

            @nnx.split_rngs(splits=config.num_layers)
            @nnx.vmap(in_axes=0, out_axes=0)
            def stack(rngs: nnx.Rngs) -> Block:
                return Block(config, rngs=rngs)

            self.blocks = stack(rngs)
        else:
            self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])

    def __call__(self, tokens_BT: Array, segments_BT: Array | None = None) -> Array:
        """Returns the logits `[B, T, V]` of the next token at every place."""
        return self.embed.attend(self.hidden(tokens_BT, segments_BT))

    def hidden(self, tokens_BT: Array, segments_BT: Array | None = None) -> Array:
        """Returns the last hidden states `[B, T, D]`."""
        config = self.config

        def apply_block(block: Block, x_BTD: Array) -> Array:
            return block(x_BTD, segments_BT)

        x_BTD = self.embed(tokens_BT)
        if config.position == "learned":
            x_BTD += self.position[places(tokens_BT, segments_BT)]
        if config.remat:
            apply_block = nnx.remat(apply_block, prevent_cse=not config.scan)
        if config.scan:
            x_BTD = nnx.scan(apply_block, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x_BTD)
        else:
            for block in self.blocks:
                x_BTD = apply_block(block, x_BTD)
        return self.final_norm(x_BTD)


def param_specs(config: GPTConfig, *, vocab: bool = True, model_size: int | None = None) -> dict[str, PartitionSpec]:
    """Returns what `gpt.param_specs` does, as patterns of the paths of these params."""
    layer = "blocks" if config.scan else r"blocks/\d+"
    names = {"layer": layer, "leaf": "kernel/value", "embedding": "embed/embedding/value"}
    return path_specs(config, **names, vocab=vocab, model_size=model_size)


def make(config: GPTConfig, *, token_losses: TokenLosses = whole_logits) -> tuple[Callable[[Array], Any], LossFn]:
    """Makes `init_fn(key) -> params` and `loss_fn(params, batch) -> (loss, aux)`; arguments as for `gpt.loss_fn`.

    The params are an `nnx.State`.
    """
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))

    def init_fn(key: Array) -> Any:
        return nnx.state(GPT(config, rngs=nnx.Rngs(key)), nnx.Param)

    def loss_fn(params: Any, batch: Batch) -> tuple[Array, dict[str, Array]]:
        model = nnx.merge(graphdef, params)
        hidden_BTD = model.hidden(batch["inputs"], batch.get("segments"))
        losses_BT = token_losses(hidden_BTD, model.embed.embedding[...].T, batch["targets"])
        return mean_loss(losses_BT, batch.get("weights"))

    return init_fn, loss_fn
