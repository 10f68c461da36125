"""The families of the Hugging Face hub as tables: keys of `config.json`, what missing ones mean, names of tensors."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A `model_type` of the hub."""

    architecture: str  # the class of transformers
    # Keys of `config.json` by the names of `DecoderConfig`, where they are not those of Llama
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Keys that Llama does not have, by the names of the same; `latent.key_rank` is a field of `latent`. Of two fields
    # with one key both are what it says.
    own: Mapping[str, str] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)  # keys by what Llama calls the same
    # What a missing key means, where that is not what it means for Llama
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # What a decoder cannot do, by key: the values that mean it is not asked for. An empty tuple: any will do.
    must_be: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what all models of the family have
    layer: str = "model.layers.{layer}."  # how the names of a layer's tensors begin
    tensors: Mapping[str, str]  # the rest of these names, by param. The bias of a param has the name of its weight.
    experts: Mapping[str, str] = dataclasses.field(default_factory=dict)  # the same of a mixture of experts
    others: Mapping[str, str]  # the names of the tensors outside the layers
    are_transposed: bool = True  # whether matrices are `[out, in]`
    # Whether query, key and value are one tensor: by groups of heads, or one after the other
    fused: Literal["groups", "blocks"] | None = None


# Keys by our names of the same: sizes, which every config has, and settings.
SIZES = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "d_model": "hidden_size",
    "seq_len": "max_position_embeddings",
    "d_hidden": "intermediate_size",
}
_EXPERT_SIZES = {"num_experts": "num_experts", "experts_per_token": "num_experts_per_tok"}
SETTINGS = {"norm_eps": "rms_norm_eps", "activation": "hidden_act"}
DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
MUST_BE: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_bidirectional_attention": (False, None),
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}

_LLAMA_TENSORS = {
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "out": "self_attn.o_proj.weight",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_GEMMA_TENSORS = _LLAMA_TENSORS | {
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
_EXPERTS = {
    "gate": "mlp.experts.{expert}.gate_proj.weight",
    "up": "mlp.experts.{expert}.up_proj.weight",
    "down": "mlp.experts.{expert}.down_proj.weight",
    "router": "mlp.gate.weight",
}
_MIXTRAL_EXPERTS = {
    "gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "up": "block_sparse_moe.experts.{expert}.w3.weight",
    "down": "block_sparse_moe.experts.{expert}.w2.weight",
    "router": "block_sparse_moe.gate.weight",
}
_DEEPSEEK_TENSORS = _LLAMA_TENSORS | {
    "query_latent": "self_attn.q_a_proj.weight",
    "query_latent_norm": "self_attn.q_a_layernorm.weight",
    **dict.fromkeys(("latent", "key_turned"), "self_attn.kv_a_proj_with_mqa.weight"),
    "latent_norm": "self_attn.kv_a_layernorm.weight",
    **dict.fromkeys(("key", "value"), "self_attn.kv_b_proj.weight"),
    # Of the layers that predict tokens after the next one.
    "embed_norm": "enorm.weight",
    "hidden_norm": "hnorm.weight",
    "project": "eh_proj.weight",
    "final_norm": "shared_head.norm.weight",
}
_DEEPSEEK_EXPERTS = _EXPERTS | {
    "router_bias": "mlp.gate.e_score_correction_bias",
    "shared_gate": "mlp.shared_experts.gate_proj.weight",
    "shared_up": "mlp.shared_experts.up_proj.weight",
    "shared_down": "mlp.shared_experts.down_proj.weight",
}
_LLAMA_OTHERS = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
_LLAMA: dict[str, Any] = {"tensors": _LLAMA_TENSORS, "others": _LLAMA_OTHERS}
_GEMMA: dict[str, Any] = {
    "tensors": _GEMMA_TENSORS,
    "others": _LLAMA_OTHERS,
    "own": {"attention_soft_cap": "attn_logit_softcapping", "logits_soft_cap": "final_logit_softcapping"},
    "settings": {"norm_offset": True, "post_norms": True, "scale_embedding": True},
}
_GEMMA_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "head_dim": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", **_LLAMA),
    "mistral": Family(architecture="MistralForCausalLM", defaults={"sliding_window": 4096}, **_LLAMA),
    "qwen2": Family(architecture="Qwen2ForCausalLM", settings={"qkv_bias": True}, **_LLAMA),
    "qwen3": Family(architecture="Qwen3ForCausalLM", settings={"qk_norm": True}, **_LLAMA),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        defaults=_GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        **_GEMMA,
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        defaults=_GEMMA_DEFAULTS | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        **_GEMMA | {"settings": _GEMMA["settings"] | {"qk_norm": True}},
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        keys=_EXPERT_SIZES | {"num_experts": "num_local_experts"},
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        settings={"normalize_expert_weights": True},
        experts=_MIXTRAL_EXPERTS,
        **_LLAMA,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        keys=_EXPERT_SIZES | {"d_hidden": "moe_intermediate_size"},
        own={"normalize_expert_weights": "norm_topk_prob"},
        settings={"qk_norm": True},
        experts=_EXPERTS,
        **_LLAMA,
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        keys={
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "d_model": "n_embd",
            "seq_len": "n_positions",
            "d_hidden": "n_inner",
            "norm_eps": "layer_norm_epsilon",
            "activation": "activation_function",
        },
        own={"learned_positions": "n_positions"},
        defaults={
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "n_positions": 1024,
            "tie_word_embeddings": True,
        },
        must_be={
            "scale_attn_weights": (True, None),
            "scale_attn_by_inverse_layer_idx": (False, None),
            "add_cross_attention": (False, None),
        },
        settings=dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True) | {"gated_mlp": False, "norm": "layer"},
        layer="transformer.h.{layer}.",
        tensors={
            **dict.fromkeys(("query", "key", "value"), "attn.c_attn.weight"),
            "out": "attn.c_proj.weight",
            "attention_norm": "ln_1.weight",
            "mlp_norm": "ln_2.weight",
            "up": "mlp.c_fc.weight",
            "down": "mlp.c_proj.weight",
        },
        others={
            "embed": "transformer.wte.weight",
            "position": "transformer.wpe.weight",
            "final_norm": "transformer.ln_f.weight",
            "head": "lm_head.weight",
        },
        are_transposed=False,
        fused="blocks",
    ),
    "gpt_neox": Family(
        architecture="GPTNeoXForCausalLM",
        keys={"norm_eps": "layer_norm_eps"},
        own={
            "parallel": "use_parallel_residual",
            **dict.fromkeys(("qkv_bias", "out_bias"), "attention_bias"),
        },
        aliases={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": True,
            "attention_bias": True,
        },
        must_be={"attention_bias": (), "partial_rotary_factor": ()},
        settings={"mlp_bias": True, "gated_mlp": False, "norm": "layer"},
        layer="gpt_neox.layers.{layer}.",
        tensors={
            **dict.fromkeys(("query", "key", "value"), "attention.query_key_value.weight"),
            "out": "attention.dense.weight",
            "attention_norm": "input_layernorm.weight",
            "mlp_norm": "post_attention_layernorm.weight",
            "up": "mlp.dense_h_to_4h.weight",
            "down": "mlp.dense_4h_to_h.weight",
        },
        others={
            "embed": "gpt_neox.embed_in.weight",
            "final_norm": "gpt_neox.final_layer_norm.weight",
            "head": "embed_out.weight",
        },
        fused="groups",
    ),
    "falcon": Family(
        architecture="FalconForCausalLM",
        keys={"d_hidden": "ffn_hidden_size", "norm_eps": "layer_norm_epsilon", "activation": "activation"},
        own={"parallel": "parallel_attn", **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), "bias")},
        defaults={
            "activation": "gelu",
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "multi_query": True,
            "parallel_attn": True,
        },
        must_be={"alibi": (False, None)},
        settings={"gated_mlp": False, "norm": "layer"},
        layer="transformer.h.{layer}.",
        tensors={
            **dict.fromkeys(("query", "key", "value"), "self_attention.query_key_value.weight"),
            "out": "self_attention.dense.weight",
            "up": "mlp.dense_h_to_4h.weight",
            "down": "mlp.dense_4h_to_h.weight",
        },
        others={
            "embed": "transformer.word_embeddings.weight",
            "final_norm": "transformer.ln_f.weight",
            "head": "lm_head.weight",
        },
        fused="groups",
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        keys=_EXPERT_SIZES
        | {
            "d_hidden": "moe_intermediate_size",
            "d_hidden_dense": "intermediate_size",
            "num_experts": "n_routed_experts",
        },
        own={
            "latent.query_rank": "q_lora_rank",
            "latent.key_rank": "kv_lora_rank",
            "latent.rotary_dim": "qk_rope_head_dim",
            "latent.value_dim": "v_head_dim",
            "latent.interleaved": "rope_interleave",
            "num_shared_experts": "n_shared_experts",
            "num_dense_layers": "first_k_dense_replace",
            "normalize_expert_weights": "norm_topk_prob",
            "routing.num_groups": "n_group",
            "routing.num_kept": "topk_group",
            "routing.scale": "routed_scaling_factor",
        },
        defaults={
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "rope_interleave": True,
        },
        must_be={
            "scoring_func": ("sigmoid", None),
            "topk_method": ("noaux_tc", None),
            "moe_layer_freq": (1, None),
        },
        tensors=_DEEPSEEK_TENSORS,
        experts=_DEEPSEEK_EXPERTS,
        others=_LLAMA_OTHERS,
    ),
}
