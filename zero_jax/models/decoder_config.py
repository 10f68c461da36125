"""The shapes of decoders: Llama, Qwen, Gemma, Mistral and Mixtral by config, with the published sizes."""

import dataclasses
import math
from typing import Any, Literal

from zero_jax.models.fields import check_fields, check_num_params


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those of the pretraining.

    Attributes:
      factor: what wavelengths are multiplied by.
      low_freq_factor: wavelengths over `original_seq_len / low_freq_factor` are stretched by the full factor; None
        stretches all wavelengths (linear scaling).
      high_freq_factor: wavelengths under `original_seq_len / high_freq_factor` stay; those between are interpolated.
      original_seq_len: context length of the pretraining.
    """

    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float = 4.0
    original_seq_len: int = 8192

    def __post_init__(self) -> None:
        """Refuses factors that cannot be applied."""
        check_fields(self)
        if self.low_freq_factor is not None and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} is not below high_freq_factor={self.high_freq_factor}: give "
                "a smaller one, or None for linear scaling"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder; the defaults are those of a small Llama.

    Attributes:
      vocab_size: number of tokens in the vocabulary.
      seq_len: tokens in a sequence.
      num_layers: number of transformer blocks.
      d_model: width of the residual stream.
      num_heads: query heads.
      num_kv_heads: key and value heads; `num_heads / num_kv_heads` query heads share each.
      head_dim: width of a head.
      d_hidden: hidden width of the gated MLP, or of each expert.
      activation: of the MLP's gate: `silu` or `gelu` (its tanh approximation).
      norm_eps: added to the mean square in RMS norms.
      norm_offset: norms multiply by 1 + scale (Gemma), and scales start at 0.
      post_norms: whether the outputs of attention and MLP are normalized too (Gemma).
      qk_norm: whether queries and keys are normalized per head (Qwen 3, Gemma 3).
      qkv_bias: whether the query, key and value projections have a bias (Qwen 2).
      query_scale: what logits of attention are multiplied by; None is `head_dim ** -0.5`.
      rope_theta: base of the rotary frequencies.
      rope_scaling: how those are stretched, in layers without a sliding window.
      window_rope_theta: base in layers with a sliding window; None is `rope_theta`.
      window: tokens that a layer with a sliding window attends to, itself included; None: no layer has one.
      window_period: of this many layers the last one has no window; 1: all layers have one.
      attention_soft_cap: logits of attention become `cap * tanh(logits / cap)`.
      logits_soft_cap: the same for the logits of tokens.
      scale_embedding: multiply embeddings by `sqrt(d_model)` (Gemma).
      tie_embedding: the output layer is the transposed embedding.
      num_experts: experts of a mixture; 0: one MLP for all tokens.
      experts_per_token: experts that a token goes to.
      normalize_expert_weights: whether the weights of a token's experts add up to 1.
      expert_capacity: tokens that an expert takes of a sequence, as a multiple of an even share; the rest of its tokens
        skip it. None: every expert computes every token, which drops none and costs
        `num_experts / experts_per_token` times the FLOPs.
      expert_balance: weight of the loss that balances the experts of each sequence (DeepSeek-V3, equation 17).
      remat: recompute the inside of blocks in the backward pass.
    """

    vocab_size: int = 256
    seq_len: int = 128
    num_layers: int = 4
    d_model: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    d_hidden: int = 384
    activation: Literal["silu", "gelu"] = "silu"
    norm_eps: float = 1e-5
    norm_offset: bool = False
    post_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    query_scale: float | None = None
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    window_rope_theta: float | None = None
    window: int | None = None
    window_period: int = 1
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    scale_embedding: bool = False
    tie_embedding: bool = False
    num_experts: int = 0
    experts_per_token: int = 2
    normalize_expert_weights: bool = True
    expert_capacity: float | None = None
    expert_balance: float = 0.0
    remat: bool = True

    def __post_init__(self) -> None:
        """Refuses shapes that cannot be built."""
        check_fields(self, may_be_zero=("num_experts", "expert_balance"))
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise ValueError(f"rope_scaling={self.rope_scaling!r}: give a RopeScaling or None")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}: query heads share "
                "key and value heads in groups of one size"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd: rotary positions rotate pairs of features")
        if self.num_experts and self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} is more than num_experts={self.num_experts}")
        check_num_params(self, "d_model", "num_layers", "d_hidden", "num_heads", "num_experts", "vocab_size")

    @property
    def block_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's params, by name."""
        d_model, head_dim, experts = self.d_model, self.head_dim, self.num_experts
        queries, keys = self.num_heads * head_dim, self.num_kv_heads * head_dim
        lead = (experts,) if experts else ()
        shapes: dict[str, tuple[int, ...]] = {
            "query": (d_model, queries),
            "key": (d_model, keys),
            "value": (d_model, keys),
            "out": (queries, d_model),
            "gate": (*lead, d_model, self.d_hidden),
            "up": (*lead, d_model, self.d_hidden),
            "down": (*lead, self.d_hidden, d_model),
            "attention_norm": (d_model,),
            "mlp_norm": (d_model,),
        }
        if self.post_norms:
            shapes |= {"attention_post_norm": (d_model,), "mlp_post_norm": (d_model,)}
        if self.qk_norm:
            shapes |= {"query_norm": (head_dim,), "key_norm": (head_dim,)}
        if self.qkv_bias:
            shapes |= {"query_bias": (queries,), "key_bias": (keys,), "value_bias": (keys,)}
        if experts:
            shapes["router"] = (d_model, experts)
        return shapes

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all params, by path."""
        shapes = {f"blocks/{name}": (self.num_layers, *shape) for name, shape in self.block_shapes.items()}
        shapes |= {"embed": (self.vocab_size, self.d_model), "final_norm": (self.d_model,)}
        return shapes if self.tie_embedding else shapes | {"head": (self.d_model, self.vocab_size)}

    @property
    def num_params(self) -> int:
        """Number of parameters, from the shapes alone."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def has_window(self, layer: int) -> bool:
        """Returns whether a layer has a sliding window."""
        return self.window is not None and (self.window_period == 1 or (layer + 1) % self.window_period != 0)


# What the decoders of a family have in common.
_LLAMA = {"vocab_size": 32000, "seq_len": 4096, "head_dim": 128}
_LLAMA3 = {"vocab_size": 128256, "seq_len": 8192, "head_dim": 128, "rope_theta": 5e5}
_QWEN = {"vocab_size": 151936, "seq_len": 4096, "head_dim": 128, "norm_eps": 1e-6, "rope_theta": 1e6}
_GEMMA = {"seq_len": 8192, "head_dim": 256, "activation": "gelu", "norm_eps": 1e-6, "norm_offset": True}
_GEMMA |= {"post_norms": True, "scale_embedding": True, "tie_embedding": True}
_GEMMA2 = _GEMMA | {"vocab_size": 256000, "window": 4096, "window_period": 2}
_GEMMA2 |= {"attention_soft_cap": 50.0, "logits_soft_cap": 30.0}
_GEMMA3 = _GEMMA | {"vocab_size": 262144, "window": 1024, "window_period": 6, "qk_norm": True}
_GEMMA3 |= {"rope_theta": 1e6, "window_rope_theta": 1e4}


def _sized(
    family: dict[str, Any], num_layers: int, d_model: int, num_heads: int, num_kv_heads: int, d_hidden: int, **rest: Any
) -> DecoderConfig:
    sizes = {"num_layers": num_layers, "d_model": d_model, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    return DecoderConfig(**{**family, **sizes, "d_hidden": d_hidden, **rest})


def _stretched(factor: float) -> RopeScaling:
    return RopeScaling(factor=factor, low_freq_factor=1.0)


_TIED = {"tie_embedding": True}
# By family: layers, width, query heads, key and value heads, hidden width, and what else is its own.
DECODERS: dict[str, DecoderConfig] = {
    "llama-2-7b": _sized(_LLAMA, 32, 4096, 32, 32, 11008),
    "llama-2-13b": _sized(_LLAMA, 40, 5120, 40, 40, 13824),
    "llama-2-70b": _sized(_LLAMA, 80, 8192, 64, 8, 28672),
    "llama-3-8b": _sized(_LLAMA3, 32, 4096, 32, 8, 14336),
    "llama-3-70b": _sized(_LLAMA3, 80, 8192, 64, 8, 28672),
    "llama-3.1-8b": _sized(_LLAMA3, 32, 4096, 32, 8, 14336, rope_scaling=_stretched(8.0)),
    "llama-3.1-405b": _sized(_LLAMA3, 126, 16384, 128, 8, 53248, rope_scaling=_stretched(8.0)),
    "llama-3.2-1b": _sized(_LLAMA3 | _TIED, 16, 2048, 32, 8, 8192, head_dim=64, rope_scaling=_stretched(32.0)),
    "llama-3.2-3b": _sized(_LLAMA3 | _TIED, 28, 3072, 24, 8, 8192, rope_scaling=_stretched(32.0)),
    "qwen-2.5-0.5b": _sized(_QWEN | _TIED, 24, 896, 14, 2, 4864, head_dim=64, qkv_bias=True),
    "qwen-2.5-7b": _sized(_QWEN, 28, 3584, 28, 4, 18944, vocab_size=152064, qkv_bias=True),
    "qwen-3-0.6b": _sized(_QWEN | _TIED, 28, 1024, 16, 8, 3072, qk_norm=True),
    "qwen-3-8b": _sized(_QWEN, 36, 4096, 32, 8, 12288, qk_norm=True),
    "qwen-3-30b-a3b": _sized(
        _QWEN, 48, 2048, 32, 4, 768, qk_norm=True, num_experts=128, experts_per_token=8, expert_capacity=2.0
    ),
    "gemma-2-2b": _sized(_GEMMA2, 26, 2304, 8, 4, 9216),
    "gemma-2-9b": _sized(_GEMMA2, 42, 3584, 16, 8, 14336),
    "gemma-2-27b": _sized(_GEMMA2, 46, 4608, 32, 16, 36864, head_dim=128, query_scale=144**-0.5),
    "gemma-3-1b": _sized(_GEMMA3, 26, 1152, 4, 1, 6912, window=512),
    "gemma-3-4b": _sized(_GEMMA3, 34, 2560, 8, 4, 10240, vocab_size=262208, rope_scaling=RopeScaling(factor=8.0)),
    "mistral-7b": _sized(_LLAMA, 32, 4096, 32, 8, 14336, window=4096, seq_len=8192),
    "mixtral-8x7b": _sized(_LLAMA, 32, 4096, 32, 8, 14336, rope_theta=1e6, num_experts=8, expert_capacity=2.0),
}
