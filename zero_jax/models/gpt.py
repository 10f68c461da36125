"""A decoder-only GPT as pure functions on a dict of arrays.

Nothing here knows about meshes, stages or sharding: this is the kind of model that a user brings. The compute dtype is
the params' dtype, so casting the params to bfloat16 runs the model in bfloat16; softmax and loss stay float32.

Names end in the letters of their dims: `B` batch, `T` tokens, `D` model, `H` heads, `K` head, `F` hidden,
`V` vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec

from zero_jax.models.fields import check_fields, check_num_params
from zero_jax.models.layers import causal_attention, leave, rms_norm, rotate
from zero_jax.models.sampling import generate_tokens

Params = dict[str, Any]
Batch = dict[str, Array]
LossFn = Callable[[Any, Batch], tuple[Array, dict[str, Array]]]
TokenLosses = Callable[[Array, Array, Array], Array]
PlaceFn = Callable[[Array, str], Array]
Attend = Callable[..., Array]


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
    def num_params(self) -> int:
        """Number of parameters, from the shapes alone."""
        per_block = (4 + 2 * self.mlp_ratio) * self.d_model**2 + 2 * self.d_model
        rows = self.vocab_size + (self.seq_len if self.position == "learned" else 0) + 1
        return self.num_layers * per_block + rows * self.d_model


def _paper(*, num_layers: int, d_model: int, num_heads: int, vocab_size: int = 50304) -> GPTConfig:
    return GPTConfig(
        vocab_size=vocab_size,
        seq_len=1024,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        position="learned",
    )


PRESETS: dict[str, GPTConfig] = {
    "gpt-tiny": GPTConfig(),
    "gpt-mini": GPTConfig(seq_len=256, num_layers=6, d_model=384, num_heads=6),
    "gpt-small": GPTConfig(vocab_size=50304, seq_len=1024, num_layers=12, d_model=768, num_heads=12),
    "gpt-medium": GPTConfig(vocab_size=50304, seq_len=1024, num_layers=24, d_model=1024, num_heads=16),
    "gpt-271m": GPTConfig(vocab_size=32768, seq_len=1024, num_layers=4, d_model=2048, num_heads=16, position="learned"),
    "gpt-large": GPTConfig(vocab_size=50304, seq_len=1024, num_layers=36, d_model=1280, num_heads=20),
    "gpt-xl": GPTConfig(vocab_size=50304, seq_len=1024, num_layers=48, d_model=1600, num_heads=25),
    "gpt-7b": GPTConfig(vocab_size=50304, seq_len=2048, num_layers=32, d_model=4096, num_heads=32),
    # The ZeRO paper's models: layers x width of its section 10, sequences of 1024 tokens; heads of 128 (gpt-4b: 96).
    "gpt-4b": _paper(num_layers=64, d_model=2304, num_heads=24),
    "gpt-8b": _paper(num_layers=72, d_model=3072, num_heads=24),
    "gpt-13b": _paper(num_layers=62, d_model=4096, num_heads=32),
    "gpt-60b": _paper(num_layers=75, d_model=8192, num_heads=64),
    "gpt-100b": _paper(num_layers=125, d_model=8192, num_heads=64),
    "gpt-170b": _paper(num_layers=212, d_model=8192, num_heads=64),
    "gpt-1t": _paper(num_layers=128, d_model=25600, num_heads=160, vocab_size=51200),
}


def init(config: GPTConfig, key: Array) -> Params:
    """Makes float32 params; the same key gives the same values whether or not the layers are stacked."""
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
    """Returns Megatron's tensor parallelism over the mesh axis `model`, as a tree of `PartitionSpec`s like the params.

    Heads and hidden features are split; a block then sums over `model` twice forward and twice backward (Shoeybi et
    al. 2019, section 3).

    Without `vocab` the table of the vocabulary is not split; else it is by rows, and logits are split too, never whole.
    `model_size` is for an error that names what does not divide over the axis.

    Raises:
      ValueError: If `model_size` does not divide the heads, the hidden features or the vocabulary.
    """
    sizes = {"num_heads": config.num_heads, "hidden (mlp_ratio x d_model)": config.mlp_ratio * config.d_model}
    if vocab:
        sizes["vocab_size"] = config.vocab_size
    for name, size in sizes.items():
        if model_size is not None and size % model_size:
            hint = " or leave the vocabulary whole with vocab=False" if name == "vocab_size" else ""
            raise ValueError(
                f"{name}={size} does not split over the {model_size} devices of the model axis: "
                f"choose a multiple of {model_size}{hint}"
            )
    unsharded, columns, rows = PartitionSpec(), PartitionSpec(None, "model"), PartitionSpec("model", None)
    block = {"attention_norm": unsharded, "mlp_norm": unsharded, "out": rows, "down": rows}
    block |= dict.fromkeys(("query", "key", "value", "up"), columns)
    specs: Params = {"embed": rows if vocab else unsharded, "final_norm": unsharded}
    if config.position == "learned":
        specs["position"] = unsharded
    if config.scan:
        specs["blocks"] = {name: PartitionSpec(None, *spec) for name, spec in block.items()}
    else:
        specs["blocks"] = [block] * config.num_layers
    return specs


def apply(config: GPTConfig, params: Params, tokens_BT: Array, segments_BT: Array | None = None) -> Array:
    """Returns the logits `[B, T, V]` of the next token at every place, in the params' dtype."""
    return hidden(config, params, tokens_BT, segments_BT) @ params["embed"].T


def hidden(
    config: GPTConfig,
    params: Params,
    tokens_BT: Array,
    segments_BT: Array | None = None,
    *,
    place: PlaceFn = leave,
    attend: Attend = causal_attention,
) -> Array:
    """Returns the last hidden states `[B, T, D]`, which the transposed embedding makes logits of.

    Args:
      config: The model's shape.
      params: Its params.
      tokens_BT: The tokens.
      segments_BT: Which document each token belongs to; tokens then see their own document only. None: one document.
      place: `place(x_BTD, kind)` may shard activations: `residual` is what is added to the residual stream,
        `gathered` what goes into the matrices of a block or of the head, which need every token.
      attend: causal attention `attend(q_BTHK, k_BTHK, v_BTHK, segments_BT)`, as `causal_attention`.
    """
    x_BTD = params["embed"][tokens_BT]
    if config.position == "learned":
        x_BTD += params["position"][places(tokens_BT, segments_BT)]
    x_BTD = place(x_BTD, "residual")
    block = functools.partial(apply_block, config, segments_BT=segments_BT, place=place, attend=attend)
    if config.remat:
        # Inside a scan XLA cannot merge the recomputation with the forward pass, so barriers against it only cost.
        block = jax.checkpoint(block, prevent_cse=not config.scan)
    if config.scan:
        x_BTD, _ = jax.lax.scan(lambda x_BTD, p: (block(x_BTD, p), None), x_BTD, params["blocks"])
    else:
        for block_params in params["blocks"]:
            x_BTD = block(x_BTD, block_params)
    return place(rms_norm(x_BTD, params["final_norm"]), "gathered")


def places(tokens_BT: Array, segments_BT: Array | None) -> slice | Array:
    """Returns the places of tokens: a slice, or `[B, T]`, from 0 in each segment."""
    if segments_BT is None:
        return slice(tokens_BT.shape[1])
    places_T = jnp.arange(tokens_BT.shape[1])
    begins_BT = jnp.diff(segments_BT, axis=1, prepend=segments_BT[:, :1] - 1) != 0
    return places_T - jax.lax.cummax(jnp.where(begins_BT, places_T, 0), axis=1)


def apply_block(
    config: GPTConfig,
    x_BTD: Array,
    params: Params,
    segments_BT: Array | None = None,
    *,
    place: PlaceFn = leave,
    attend: Attend = causal_attention,
) -> Array:
    """Runs one transformer block: attention, then an MLP, each added to the residual stream."""
    y_BTD = place(rms_norm(x_BTD, params["attention_norm"]), "gathered")
    q_BTD, k_BTD, v_BTD = (y_BTD @ params[name] for name in ("query", "key", "value"))
    x_BTD += place(attention(config, q_BTD, k_BTD, v_BTD, segments_BT, attend=attend) @ params["out"], "residual")
    y_BTD = place(rms_norm(x_BTD, params["mlp_norm"]), "gathered")
    return x_BTD + place(jax.nn.gelu(y_BTD @ params["up"]) @ params["down"], "residual")


def whole_logits(hidden_BTD: Array, head_DV: Array, targets_BT: Array) -> Array:
    """Returns the cross-entropy `[B, T]` in nats, in float32, of logits that are all made at once."""
    logits_BTV = (hidden_BTD @ head_DV).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)


def loss_fn(
    config: GPTConfig,
    *,
    place: PlaceFn = leave,
    token_losses: TokenLosses = whole_logits,
    attend: Attend = causal_attention,
) -> LossFn:
    """Makes `loss_fn(params, batch) -> (loss, aux)`.

    A batch has int `inputs` and `targets`, both `[B, T]`; it may have `weights`, how much each target counts, and
    `segments`, which document each input belongs to.

    Args:
      config: The model's shape.
      place: As for `hidden`.
      token_losses: `token_losses(hidden_BTD, head_DV, targets_BT)` returns the losses `[B, T]`, float32; a function
        that makes the logits in parts saves the memory of the whole.
      attend: As for `hidden`.
    """

    def loss(params: Params, batch: Batch) -> tuple[Array, dict[str, Array]]:
        hidden_BTD = hidden(config, params, batch["inputs"], batch.get("segments"), place=place, attend=attend)
        return mean_loss(token_losses(hidden_BTD, params["embed"].T, batch["targets"]), batch.get("weights"))

    return loss


def mean_loss(losses_BT: Array, weights_BT: Array | None = None) -> tuple[Array, dict[str, Array]]:
    """Returns the (weighted) mean of losses in nats, and the same in bits as `aux`."""
    if weights_BT is None:
        loss = losses_BT.mean()
    else:
        # An empty batch has no weight; its loss is nothing.
        loss = (losses_BT * weights_BT).sum() / jnp.maximum(weights_BT.sum(), 1e-6)
    return loss, {"bits_per_token": loss / jnp.log(2.0)}


def attention(
    config: GPTConfig,
    q_BTD: Array,
    k_BTD: Array,
    v_BTD: Array,
    segments_BT: Array | None = None,
    *,
    attend: Attend = causal_attention,
) -> Array:
    """Returns causal self-attention `[B, T, D]` over `num_heads` heads, within segments, with a float32 softmax."""
    shape_BTHK = (*q_BTD.shape[:2], config.num_heads, config.head_dim)
    q_BTHK, k_BTHK, v_BTHK = (x_BTD.reshape(shape_BTHK) for x_BTD in (q_BTD, k_BTD, v_BTD))
    if config.position == "rotary":
        q_BTHK, k_BTHK = rotate(q_BTHK), rotate(k_BTHK)
    return attend(q_BTHK, k_BTHK, v_BTHK, segments_BT).reshape(q_BTD.shape)


def generate(config: GPTConfig, params: Params, prompt_T: Array, key: Array, **settings: Any) -> Array:
    """Samples tokens that follow a prompt; arguments as for `sampling.generate_tokens`."""
    sizes = {"seq_len": config.seq_len, "vocab_size": config.vocab_size}
    return generate_tokens(functools.partial(apply, config, params), prompt_T, key, **sizes, **settings)


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
