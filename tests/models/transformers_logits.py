"""Writes `transformers_logits.npz`: what transformers' PyTorch models answer for small configs.

Run it where `transformers` and `torch` are installed: `python tests/models/transformers_logits.py`.
"""

import json
import pathlib
import tempfile
import zlib
from typing import Any

import numpy as np

PATH = pathlib.Path(__file__).with_suffix(".npz")
VOCAB, TOKENS = 48, 24
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}
_CLASSIC = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_DEEPSEEK = _CLASSIC | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
_GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 6,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"model_type": "llama", "rms_norm_eps": 1e-5},
    "llama-3.1": _SIZES | {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": _LLAMA3, "head_dim": 16},
    "mistral": _SIZES | {"model_type": "mistral", "sliding_window": 5},
    "mixtral": _SIZES | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": _SIZES | {"model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen3": _SIZES | {"model_type": "qwen3", "head_dim": 16},
    "qwen3-moe": _SIZES
    | {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "gemma2": _SIZES
    | _GEMMA
    | {
        "model_type": "gemma2",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": _SIZES
    | _GEMMA
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 8,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2),
    },
    "llama-yarn": _SIZES | {"model_type": "llama", "rope_scaling": _YARN, "head_dim": 16},
    "llama-yarn-mscale": _SIZES
    | {"model_type": "llama", "rope_scaling": _YARN | {"mscale": 1.5, "mscale_all_dim": 0.5, "truncate": False}},
    "gpt2": {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32},
    "gpt-neox": _CLASSIC | {"model_type": "gpt_neox", "intermediate_size": 40, "hidden_act": "gelu_fast"},
    "gpt-neox-sequential": _CLASSIC
    | {
        "model_type": "gpt_neox",
        "intermediate_size": 40,
        "use_parallel_residual": False,
        "attention_bias": False,
        "rotary_pct": 1.0,
        "rotary_emb_base": 5e4,
        "tie_word_embeddings": True,
    },
    "falcon-7b": _CLASSIC | {"model_type": "falcon"},
    "falcon-40b": _CLASSIC | {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-180b": _CLASSIC
    | {
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
        "bias": True,
        "ffn_hidden_size": 40,
        "tie_word_embeddings": False,
        "rope_theta": 5e5,
    },
    "deepseek-v3": _DEEPSEEK,
    "deepseek-v3-plain": _DEEPSEEK
    | {
        "q_lora_rank": None,
        "rope_scaling": None,
        "rope_interleave": False,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
    },
    "falcon-sequential": _CLASSIC | {"model_type": "falcon", "parallel_attn": False, "multi_query": False},
}


EXTRA = "deepseek-v3-extra"  # of the layer on top that predicts the token after the next one


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the values of a tensor, which its name decides; norms multiply by about 1."""
    values = 0.15 * np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    is_scale = name.endswith(".weight") and ("norm" in name or ".ln_" in name)
    return (values + (1 if is_scale else 0)).astype(np.float32)


def tokens() -> np.ndarray:
    """Returns the tokens `[2, TOKENS]`."""
    return np.random.default_rng(0).integers(0, VOCAB, (2, TOKENS))


def _answer_and_model(config: dict[str, Any]) -> tuple[np.ndarray, Any]:
    import safetensors.numpy
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    from zero_jax.models import hub_families, huggingface
    from zero_jax.pretrained.mapping import tensor_shape

    shape = huggingface.decoder_config(config)
    tensors = {}
    for path, name in hub_families.tensor_names(shape, model_type=config["model_type"]).items():
        leaf = shape.shapes[path]
        for index in np.ndindex(*leaf[: name.num_indices]):
            key = name.of(index)
            tensors[key] = tensor(key, tensor_shape(path, leaf, name))
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(config))
        safetensors.numpy.save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    if any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise ValueError(f"{config['model_type']}: {info}")
    with torch.no_grad():
        return model(torch.tensor(tokens())).logits.numpy(), model


def _extra_answer() -> np.ndarray:
    """Returns the logits of multi-token prediction, which `from_pretrained` makes of layer 61 alone."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers.modeling_layers import MtpModel  # pyright: ignore[reportMissingImports]

    config = CONFIGS["deepseek-v3"]
    logits, model = _answer_and_model(config)
    del logits
    extra, num_layers = MtpModel(model, 1).eval(), config["num_hidden_layers"]
    states = {}
    for key, x in extra.layers[0].state_dict().items():
        name = key.replace("mtp_block.", "").replace("post_norm", "shared_head.norm")
        start = f"model.layers.{num_layers}."
        if ".experts." in name:
            matrices = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            shape = (x.shape[1] // len(matrices), x.shape[2])
            values = [
                [tensor(f"{start}mlp.experts.{i}.{matrix}.weight", shape) for matrix in matrices]
                for i in range(x.shape[0])
            ]
            states[key] = torch.tensor(np.asarray(values).reshape(x.shape))
        else:
            states[key] = torch.tensor(tensor(start + name, tuple(x.shape)))
    extra.layers[0].load_state_dict(states)
    inputs = torch.tensor(tokens())
    with torch.no_grad():
        hidden = model.model(inputs).last_hidden_state
        embedded = model.model.embed_tokens(torch.roll(inputs, -1, dims=1))
        positions = torch.arange(TOKENS)[None]
        mask = torch.full((TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1)[None, None]
        turns = extra.rotary_emb(embedded, position_ids=positions)
        hidden = extra.layers[0](embedded, hidden, turns, mask, positions, None)
        return model.lm_head(hidden).numpy()


if __name__ == "__main__":
    answers = {name: _answer_and_model(config)[0] for name, config in CONFIGS.items()} | {EXTRA: _extra_answer()}
    np.savez_compressed(PATH, **answers)  # pyright: ignore[reportArgumentType]
    print(f"wrote {PATH}")
