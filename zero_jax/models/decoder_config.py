"""The shapes of decoders, from GPT-2 to DeepSeek-V3, with the published sizes."""

import dataclasses
import importlib.resources
import math
import tomllib
from collections.abc import Mapping
from typing import Any, Literal

from zero_jax.models.experts import SigmoidRouting
from zero_jax.models.fields import check_fields, check_num_params, short
from zero_jax.models.latent_attention import LatentAttention
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
      head_dim: width of a head, of queries and keys.
      latent: the sizes of latent attention (DeepSeek-V3), which has as many key and value heads as query heads; None:
        keys and values are projections of the residual stream.
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
      num_shared_experts: experts that every token goes to besides, as one MLP that is so many times as wide.
      num_dense_layers: the first layers, which have one MLP for all tokens.
      d_hidden_dense: hidden width of that; None is `d_hidden`.
      routing: how tokens choose experts by sigmoids (DeepSeek-V3); None: by a softmax over all of them.
      experts_per_token: experts that a token goes to.
      normalize_expert_weights: whether the weights of a token's experts add up to 1.
      expert_capacity: tokens that an expert takes of a sequence, as a multiple of an even share; the rest of its tokens
        skip it. None: every expert computes every token, which drops none and costs
        `num_experts / experts_per_token` times the FLOPs.
      expert_balance: weight of the loss that balances the experts of each sequence (DeepSeek-V3, equation 17).
      num_extra_tokens: tokens after the next one that the model also learns to predict, each by a block of its own on
        top (DeepSeek-V3's multi-token prediction). They are in the loss alone: logits do not depend on them.
      extra_token_weight: weight of the mean loss of these predictions.
      remat: recompute the inside of blocks in the backward pass.
    """

    vocab_size: int = 256
    seq_len: int = 128
    num_layers: int = 4
    d_model: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    latent: LatentAttention | None = None
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
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    d_hidden_dense: int | None = None
    routing: SigmoidRouting | None = None
    experts_per_token: int = 2
    normalize_expert_weights: bool = True
    expert_capacity: float | None = None
    expert_balance: float = 0.0
    num_extra_tokens: int = 0
    extra_token_weight: float = 0.3
    remat: bool = True

    def __post_init__(self) -> None:
        """Refuses shapes that cannot be built."""
        check_fields(self, may_be_zero=_MAY_BE_ZERO)
        for name, record in RECORDS.items():
            if not isinstance(getattr(self, name), record | None):
                raise ValueError(f"{name}={short(getattr(self, name))}: give a {record.__name__} or None")
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
        if self.num_extra_tokens and (self.norm != "rms" or self.window is not None):
            raise ValueError(
                f"num_extra_tokens={self.num_extra_tokens} is for decoders with norm='rms' and no window: leave it out"
            )
        if self.num_extra_tokens >= self.seq_len:
            raise ValueError(f"num_extra_tokens={self.num_extra_tokens} leaves none of seq_len={self.seq_len}")
        self._check_experts()
        self._check_latent()
        if self.num_experts and self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} is more than num_experts={self.num_experts}")
        # Last: the shapes of a config that the checks above refuse may not exist.
        check_num_params(self, "d_model", "num_layers", "d_hidden", "num_heads", "num_experts", "vocab_size")

    def _check_experts(self) -> None:
        if self.num_experts and (self.mlp_bias or not self.gated_mlp):
            raise ValueError("experts have a gate and no bias: give gated_mlp=True and mlp_bias=False")
        if self.num_experts and self.routing is not None:
            self.routing.check(self.num_experts, self.experts_per_token)
        names = ("num_shared_experts", "num_dense_layers", "d_hidden_dense", "routing")
        others = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name)]
        if others and not self.num_experts:
            raise ValueError(f"{', '.join(others)}: give num_experts, or leave it out")
        if self.num_dense_layers >= self.num_layers:
            raise ValueError(
                f"num_dense_layers={self.num_dense_layers} leaves none of num_layers={self.num_layers}: give fewer"
            )
        if self.num_dense_layers and self.window is not None:
            raise ValueError(
                f"window={self.window} is for layers of one kind: leave out num_dense_layers or the window"
            )

    def _check_latent(self) -> None:
        if self.latent is None:
            return
        if self.latent.rotary_dim >= self.head_dim or self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"head_dim={self.head_dim}, rotary_dim={self.latent.rotary_dim}, num_heads={self.num_heads}, "
                f"num_kv_heads={self.num_kv_heads}: latent attention turns a part of a head's features, and has as "
                "many key heads as query heads"
            )
        wrong = [name for name in ("qk_norm", "qkv_bias", "learned_positions", "window") if getattr(self, name)]
        if wrong or self.rotary_fraction != 1 or self.norm != "rms":
            raise ValueError(
                f"latent attention has RMS norms and turns rotary_dim features: leave out {', '.join(wrong)}"
                f"{', ' if wrong else ''}rotary_fraction and norm"
            )

    @property
    def num_rotary(self) -> int:
        """Features of a head that rotary positions turn; 0 where positions are learned."""
        if self.latent is not None:
            return self.latent.rotary_dim
        # Rounded down, as in transformers.
        return 0 if self.learned_positions else int(self.head_dim * self.rotary_fraction)

    @property
    def stacks(self) -> dict[str, tuple[int, dict[str, tuple[int, ...]]]]:
        """The stacks of layers in their order: the number of layers, and the shapes of a layer's params."""
        width, blocks = self.d_model, self._layer_shapes(self.num_experts)
        stacks = {"dense_blocks": (self.num_dense_layers, self._layer_shapes(0))} if self.num_dense_layers else {}
        stacks["blocks"] = (self.num_layers - self.num_dense_layers, blocks)
        if self.num_extra_tokens:
            of_pairs = {"embed_norm": (width,), "hidden_norm": (width,), "project": (2 * width, width)}
            stacks["extra_blocks"] = (self.num_extra_tokens, blocks | of_pairs | {"final_norm": (width,)})
        return stacks

    @property
    def expert_params(self) -> str | None:
        """The stacks of experts among the params, as a regular expression of their paths; None without experts."""
        layers = [(stack, name, shape) for stack, (_, shapes) in self.stacks.items() for name, shape in shapes.items()]
        # Of a layer's params experts alone have three dims.
        return "|".join(f"{stack}/{name}" for stack, name, shape in layers if len(shape) == 3) or None

    def _layer_shapes(self, num_experts: int) -> dict[str, tuple[int, ...]]:
        d_model, head_dim = self.d_model, self.head_dim
        queries, keys = self.num_heads * head_dim, self.num_kv_heads * head_dim
        lead = (num_experts,) if num_experts else ()
        d_hidden = self.d_hidden if num_experts else self.d_hidden_dense or self.d_hidden
        # In this order `decoder.init` draws them: another one makes other params of the same key.
        shapes: dict[str, tuple[int, ...]] = {
            "query": (d_model, queries),
            "key": (d_model, keys),
            "value": (d_model, keys),
            "out": (queries, d_model),
        }
        if self.latent is not None:
            shapes = self.latent.shapes(d_model, self.num_heads, head_dim)
        shapes |= {
            "gate": (*lead, d_model, d_hidden),
            "up": (*lead, d_model, d_hidden),
            "down": (*lead, d_hidden, d_model),
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
        return shapes | (self._router_shapes if num_experts else {})

    @property
    def _router_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"router": (self.d_model, self.num_experts)}
        if self.routing is not None:
            shapes["router_bias"] = (self.num_experts,)
        if self.num_shared_experts:
            d_shared = self.num_shared_experts * self.d_hidden
            shapes |= {"shared_gate": (self.d_model, d_shared), "shared_up": (self.d_model, d_shared)}
            shapes["shared_down"] = (d_shared, self.d_model)
        return shapes

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all params, by path."""
        stacks = self.stacks.items()
        shapes = {f"{stack}/{name}": (n, *shape) for stack, (n, each) in stacks for name, shape in each.items()}
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


_MAY_BE_ZERO = (
    *("num_experts", "num_shared_experts", "num_dense_layers", "num_extra_tokens"),
    *("expert_balance", "extra_token_weight", "learned_positions"),
)
# The fields that are records, and the classes of these.
RECORDS = {"rope_scaling": RopeScaling, "latent": LatentAttention, "routing": SigmoidRouting}


def _read_presets() -> dict[str, Any]:
    """Returns the models of `presets.toml` by kind and name."""
    table = tomllib.loads(importlib.resources.files("zero_jax.models").joinpath("presets.toml").read_text("utf-8"))
    return {kind: {name: _fields(table, row) for name, row in table[kind].items()} for kind in ("gpts", "decoders")}


def _fields(table: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a model: of what it is `like`, its `sizes` and its own."""
    fields = {name: value for name, value in row.items() if name not in ("like", "sizes")}
    # Not strict: a row that is `like` another may have no `sizes`.
    sizes = dict(zip(table["sizes"], row.get("sizes", ()), strict=False))
    like = _fields(table, table["like"][row["like"]]) if "like" in row else {}
    records = {name: record(**fields[name]) for name, record in RECORDS.items() if name in fields}
    return like | sizes | fields | records


PRESETS = _read_presets()
DECODERS = {name: DecoderConfig(**fields) for name, fields in PRESETS["decoders"].items()}
