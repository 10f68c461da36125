"""A decoder-only GPT as pure functions on a dict of arrays: the decoder of `GPTConfig.decoder`, with inits of its own.

Nothing here knows about meshes, stages or sharding: this is the kind of model that a user brings. The compute dtype is
the params' dtype, so casting the params to bfloat16 runs the model in bfloat16; softmax and loss stay float32.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from zero_jax.models import decoder, decoder_config
from zero_jax.models.decoder import LossFn, Params, TokenLosses, whole_logits
from zero_jax.models.decoder_config import DecoderConfig
from zero_jax.models.fields import check_fields, check_num_params


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Says the shape of a GPT.

    Attributes:
      vocab_size: number of tokens in the vocabulary.
      seq_len: tokens in a sequence, and the longest context.
      num_layers: number of transformer blocks.
      d_model: width of the residual stream.
      num_heads: attention heads; they share `d_model`.
      mlp_ratio: hidden width of the MLP, in multiples of `d_model`.
      position: how a token knows its place: `rotary` turns queries and keys, `learned` adds a table of `seq_len` rows.
      scan: whether the layers are stacked and run by one `lax.scan`, or kept apart and run by a Python loop.
      remat: whether a block's inner activations are recomputed in the backward pass.
    """

    vocab_size: int = 256
    seq_len: int = 128
    num_layers: int = 4
    d_model: int = 128
    num_heads: int = 4
    mlp_ratio: int = 4
    position: Literal["rotary", "learned"] = "rotary"
    scan: bool = True
    remat: bool = True

    def __post_init__(self):
        """Refuses shapes that cannot be built."""
        check_fields(self)
        if self.d_model % self.num_heads:
            raise ValueError(
                f"d_model={self.d_model} does not split over num_heads={self.num_heads}: "
                "choose a d_model that is a multiple of num_heads"
            )
        if self.position == "rotary" and self.head_dim % 2:
            raise ValueError(
                f"rotary positions turn pairs, but d_model/num_heads={self.head_dim} is odd: "
                "choose an even head size, or position='learned'"
            )
        check_num_params(self, "d_model", "num_layers", "mlp_ratio", "vocab_size")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads

    @property
    def decoder(self) -> DecoderConfig:
        """The decoder that it is; without `scan` its blocks are a list."""
        return DecoderConfig(
            vocab_size=self.vocab_size,
            seq_len=self.seq_len,
            num_layers=self.num_layers,
            d_model=self.d_model,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim,
            d_hidden=self.mlp_ratio * self.d_model,
            gated_mlp=False,
            activation="gelu",
            norm_eps=1e-6,
            learned_positions=self.seq_len if self.position == "learned" else 0,
            tie_embedding=True,
            remat=self.remat,
        )

    @property
    def num_params(self) -> int:
        """Number of parameters, from the shapes alone."""
        return self.decoder.num_params


PRESETS = {name: GPTConfig(**fields) for name, fields in decoder_config.PRESETS["gpts"].items()}


def init(config: GPTConfig, key: Array) -> Params:
    """Makes float32 params; the same key gives the same values whether or not the layers are stacked."""
    # The key of learned positions is drawn for rotary ones, too, so that all other params are the same.
    embed_key, position_key, *block_keys = jax.random.split(key, 2 + config.num_layers)
    params: Params = {
        "embed": _normal(embed_key, (config.vocab_size, config.d_model)),
        "final_norm": jnp.ones(config.d_model),
    }
    if config.position == "learned":
        params["position"] = _normal(position_key, (config.seq_len, config.d_model))
    init_block = functools.partial(_init_block, config)
    if config.scan:
        params["blocks"] = jax.vmap(init_block)(jnp.stack(block_keys))
    else:
        params["blocks"] = [init_block(block_key) for block_key in block_keys]
    return params


def param_specs(config: GPTConfig, *, vocab: bool = True, model_size: int | None = None) -> Params:
    """Returns Megatron's tensor parallelism over the mesh axis `model`, as `decoder.param_specs` does."""
    specs = decoder.param_specs(config.decoder, vocab=vocab, model_size=model_size)
    if not config.scan:
        # The specs are of stacks: a block by itself has no dim of layers.
        block = {name: PartitionSpec(*spec[1:]) for name, spec in specs["blocks"].items()}
        specs["blocks"] = [block] * config.num_layers
    return specs


def apply(config: GPTConfig, params: Params, tokens_BT: Array, segments_BT: Array | None = None) -> Array:
    """Returns the logits `[B, T, V]` of the next token at every place, in the params' dtype."""
    return decoder.apply(config.decoder, params, tokens_BT, segments_BT)


def loss_fn(config: GPTConfig, *, token_losses: TokenLosses = whole_logits, **options: Any) -> LossFn:
    """Makes `loss_fn(params, batch) -> (loss, aux)`; options and batches are as for `decoder.loss_fn`."""
    return decoder.loss_fn(config.decoder, token_losses=token_losses, **options)


def generate(config: GPTConfig, params: Params, prompt_T: Array, key: Array, **settings: Any) -> Array:
    """Samples tokens that follow a prompt; arguments as for `sampling.generate_tokens`."""
    return decoder.generate(config.decoder, params, prompt_T, key, **settings)


def _normal(key: Array, shape: tuple[int, ...], scale: float = 1.0) -> Array:
    """Draws weights with the standard deviation 0.02 of GPT-2, times `scale`."""
    return 0.02 * scale * jax.random.normal(key, shape)


def _init_block(config: GPTConfig, key: Array) -> Params:
    d_model, hidden = config.d_model, config.mlp_ratio * config.d_model
    # The matrices that write to the residual stream start smaller, so that it does not grow with depth (as in GPT-2).
    into_stream = (2 * config.num_layers) ** -0.5
    query, key_, value, out, up, down = jax.random.split(key, 6)
    return {
        "attention_norm": jnp.ones(d_model),
        "query": _normal(query, (d_model, d_model)),
        "key": _normal(key_, (d_model, d_model)),
        "value": _normal(value, (d_model, d_model)),
        "out": _normal(out, (d_model, d_model), into_stream),
        "mlp_norm": jnp.ones(d_model),
        "up": _normal(up, (d_model, hidden)),
        "down": _normal(down, (hidden, d_model), into_stream),
    }
