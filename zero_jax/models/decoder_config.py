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


def _llama(**shape: Any) -> DecoderConfig:
    return DecoderConfig(**{"vocab_size": 32000, "seq_len": 4096, "head_dim": 128, **shape})


def _llama3(*, stretch: float | None = None, **shape: Any) -> DecoderConfig:
    scaling = None if stretch is None else RopeScaling(factor=stretch, low_freq_factor=1.0)
    return _llama(
        **{"vocab_size": 128256, "seq_len": 8192, "num_kv_heads": 8, "rope_theta": 5e5, "rope_scaling": scaling} | shape
    )


def _qwen(**shape: Any) -> DecoderConfig:
    return DecoderConfig(
        **{"vocab_size": 151936, "seq_len": 4096, "head_dim": 128, "norm_eps": 1e-6, "rope_theta": 1e6} | shape
    )


def _gemma(**shape: Any) -> DecoderConfig:
    return DecoderConfig(
        seq_len=8192,
        activation="gelu",
        norm_eps=1e-6,
        norm_offset=True,
        post_norms=True,
        scale_embedding=True,
        tie_embedding=True,
        **shape,
    )


def _gemma2(**shape: Any) -> DecoderConfig:
    caps = {"attention_soft_cap": 50.0, "logits_soft_cap": 30.0}
    return _gemma(**{"vocab_size": 256000, "window": 4096, "window_period": 2, "head_dim": 256} | caps | shape)


def _gemma3(**shape: Any) -> DecoderConfig:
    rope = {"rope_theta": 1e6, "window_rope_theta": 1e4}
    return _gemma(
        **{"vocab_size": 262144, "window": 1024, "window_period": 6, "head_dim": 256, "qk_norm": True} | rope | shape
    )


DECODERS: dict[str, DecoderConfig] = {
    "llama-2-7b": _llama(num_layers=32, d_model=4096, num_heads=32, num_kv_heads=32, d_hidden=11008),
    "llama-2-13b": _llama(num_layers=40, d_model=5120, num_heads=40, num_kv_heads=40, d_hidden=13824),
    "llama-2-70b": _llama(num_layers=80, d_model=8192, num_heads=64, num_kv_heads=8, d_hidden=28672),
    "llama-3-8b": _llama3(num_layers=32, d_model=4096, num_heads=32, d_hidden=14336),
    "llama-3-70b": _llama3(num_layers=80, d_model=8192, num_heads=64, d_hidden=28672),
    "llama-3.1-8b": _llama3(num_layers=32, d_model=4096, num_heads=32, d_hidden=14336, stretch=8.0),
    "llama-3.1-405b": _llama3(num_layers=126, d_model=16384, num_heads=128, d_hidden=53248, stretch=8.0),
    "llama-3.2-1b": _llama3(
        num_layers=16, d_model=2048, num_heads=32, head_dim=64, d_hidden=8192, tie_embedding=True, stretch=32.0
    ),
    "llama-3.2-3b": _llama3(num_layers=28, d_model=3072, num_heads=24, d_hidden=8192, tie_embedding=True, stretch=32.0),
    "qwen-2.5-0.5b": _qwen(
        num_layers=24,
        d_model=896,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        d_hidden=4864,
        qkv_bias=True,
        tie_embedding=True,
    ),
    "qwen-2.5-7b": _qwen(
        vocab_size=152064, num_layers=28, d_model=3584, num_heads=28, num_kv_heads=4, d_hidden=18944, qkv_bias=True
    ),
    "qwen-3-0.6b": _qwen(
        num_layers=28, d_model=1024, num_heads=16, num_kv_heads=8, d_hidden=3072, qk_norm=True, tie_embedding=True
    ),
    "qwen-3-8b": _qwen(num_layers=36, d_model=4096, num_heads=32, num_kv_heads=8, d_hidden=12288, qk_norm=True),
    "qwen-3-30b-a3b": _qwen(
        num_layers=48,
        d_model=2048,
        num_heads=32,
        num_kv_heads=4,
        d_hidden=768,
        qk_norm=True,
        num_experts=128,
        experts_per_token=8,
        expert_capacity=2.0,
    ),
    "gemma-2-2b": _gemma2(num_layers=26, d_model=2304, num_heads=8, num_kv_heads=4, d_hidden=9216),
    "gemma-2-9b": _gemma2(num_layers=42, d_model=3584, num_heads=16, num_kv_heads=8, d_hidden=14336),
    "gemma-2-27b": _gemma2(
        num_layers=46, d_model=4608, num_heads=32, num_kv_heads=16, head_dim=128, d_hidden=36864, query_scale=144**-0.5
    ),
    "gemma-3-1b": _gemma3(num_layers=26, d_model=1152, num_heads=4, num_kv_heads=1, d_hidden=6912, window=512),
    "gemma-3-4b": _gemma3(
        vocab_size=262208,
        num_layers=34,
        d_model=2560,
        num_heads=8,
        num_kv_heads=4,
        d_hidden=10240,
        rope_scaling=RopeScaling(factor=8.0),
    ),
    "mistral-7b": _llama(
        num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, d_hidden=14336, window=4096, seq_len=8192
    ),
    "mixtral-8x7b": _llama(
        num_layers=32,
        d_model=4096,
        num_heads=32,
        num_kv_heads=8,
        d_hidden=14336,
        rope_theta=1e6,
        num_experts=8,
        expert_capacity=2.0,
    ),
}
