"""The shapes of decoders: GPT-2's, GPT-NeoX, Falcon, Llama, Qwen, Gemma, Mistral and Mixtral, with published sizes."""

import dataclasses
import math
from typing import Any, Literal

from zero_jax.models.fields import check_fields, check_num_params
from zero_jax.models.rope import RopeScaling


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
      d_hidden: hidden width of the MLP, or of each expert.
      gated_mlp: whether the hidden features are multiplied by a gate, to which the activation is applied.
      activation: of the MLP: `silu`, `gelu` (its tanh approximation) or `gelu_exact`.
      norm: `rms`, or `layer` (LayerNorm, with a bias).
      norm_eps: added to the mean square in norms.
      norm_offset: norms multiply by 1 + scale (Gemma), and scales start at 0.
      post_norms: whether the outputs of attention and MLP are normalized too (Gemma).
      qk_norm: whether queries and keys are normalized per head (Qwen 3, Gemma 3).
      parallel: whether attention and MLP read the same residual stream (GPT-NeoX, Falcon).
      shared_norm: whether these two read it through one norm.
      qkv_bias: whether the query, key and value projections have a bias (Qwen 2).
      out_bias: whether the output projection of attention has one.
      mlp_bias: whether the projections of the MLP have one.
      query_scale: what logits of attention are multiplied by; None is `head_dim ** -0.5`.
      learned_positions: rows of a table of learned positions (GPT-2); 0: positions are rotary.
      rotary_fraction: share of a head's features that rotary positions turn, the first ones.
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
    gated_mlp: bool = True
    activation: Literal["silu", "gelu", "gelu_exact"] = "silu"
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    norm_offset: bool = False
    post_norms: bool = False
    qk_norm: bool = False
    parallel: bool = False
    shared_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    query_scale: float | None = None
    learned_positions: int = 0
    rotary_fraction: float = 1.0
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
        check_fields(self, may_be_zero=("num_experts", "expert_balance", "learned_positions"))
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise ValueError(f"rope_scaling={self.rope_scaling!r}: give a RopeScaling or None")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}: query heads share "
                "key and value heads in groups of one size"
            )
        has_pairs = self.num_rotary % 2 == 0 and (self.num_rotary > 0 or self.learned_positions > 0)
        if not has_pairs or self.num_rotary > self.head_dim:
            raise ValueError(
                f"head_dim={self.head_dim} is odd: rotary positions rotate pairs of features"
                if self.rotary_fraction == 1
                else f"rotary_fraction={self.rotary_fraction} of head_dim={self.head_dim} are {self.num_rotary} "
                "features: give a share of at most 1 that makes pairs of them"
            )
        if 0 < self.learned_positions < self.seq_len:
            raise ValueError(
                f"seq_len={self.seq_len} is more than learned_positions={self.learned_positions}: give shorter "
                "sequences, or a longer table"
            )
        if self.shared_norm and not self.parallel:
            raise ValueError("shared_norm=True is for attention and MLP in parallel: give parallel=True too")
        if self.norm_offset and self.norm != "rms":
            raise ValueError(f"norm_offset=True is of norm='rms', not {self.norm!r}: leave it out")
        if self.num_experts and (self.mlp_bias or not self.gated_mlp):
            raise ValueError("experts have a gate and no bias: give gated_mlp=True and mlp_bias=False")
        if self.num_experts and self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} is more than num_experts={self.num_experts}")
        check_num_params(self, "d_model", "num_layers", "d_hidden", "num_heads", "num_experts", "vocab_size")

    @property
    def num_rotary(self) -> int:
        """Features of a head that rotary positions turn; 0 where positions are learned."""
        return 0 if self.learned_positions else int(self.head_dim * self.rotary_fraction)

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
        if not self.gated_mlp:
            del shapes["gate"]
        if self.shared_norm:
            del shapes["mlp_norm"]
        if self.post_norms:
            shapes |= {"attention_post_norm": (d_model,), "mlp_post_norm": (d_model,)}
        if self.qk_norm:
            shapes |= {"query_norm": (head_dim,), "key_norm": (head_dim,)}
        with_bias = [name for name in shapes if name.endswith("_norm")] if self.norm == "layer" else []
        with_bias += ["query", "key", "value"] * self.qkv_bias + ["out"] * self.out_bias
        with_bias += [name for name in ("gate", "up", "down") if self.mlp_bias and name in shapes]
        shapes |= {f"{name}_bias": shapes[name][-1:] for name in with_bias}
        if experts:
            shapes["router"] = (d_model, experts)
        return shapes

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all params, by path."""
        shapes = {f"blocks/{name}": (self.num_layers, *shape) for name, shape in self.block_shapes.items()}
        shapes |= {"embed": (self.vocab_size, self.d_model), "final_norm": (self.d_model,)}
        if self.norm == "layer":
            shapes["final_norm_bias"] = (self.d_model,)
        if self.learned_positions:
            shapes["position"] = (self.learned_positions, self.d_model)
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

# Dense transformers with LayerNorm: Megatron's GPT-2, GPT-NeoX and Falcon.
_PLAIN = {"norm": "layer", "gated_mlp": False, "activation": "gelu"}
_BIASED = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)
_MEGATRON = {**_PLAIN, **_BIASED, "tie_embedding": True}
_NEOX = {**_PLAIN, **_BIASED, "parallel": True, "seq_len": 2048, "rotary_fraction": 0.25}
_FALCON = {**_PLAIN, "activation": "gelu_exact", "parallel": True, "vocab_size": 65024, "seq_len": 2048, "head_dim": 64}


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
    # GPT-2's vocabulary of 50,257 tokens, padded to what the devices of tensor parallelism divide, as Megatron does.
    "turing-nlg-17b": _sized(
        _MEGATRON, 78, 4256, 28, 28, 17024, head_dim=152, vocab_size=50688, seq_len=1024, learned_positions=1024
    ),
    "mt-nlg-530b": _sized(
        _MEGATRON, 105, 20480, 128, 128, 81920, head_dim=160, vocab_size=51200, seq_len=2048, learned_positions=2048
    ),
    "gpt-neox-20b": _sized(_NEOX, 44, 6144, 64, 64, 24576, head_dim=96, vocab_size=50432),
    "falcon-40b": _sized(_FALCON | _TIED, 60, 8192, 128, 8, 32768),
    "falcon-180b": _sized(_FALCON, 80, 14848, 232, 8, 59392),
}
