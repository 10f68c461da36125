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
    "falcon-sequential": _CLASSIC | {"model_type": "falcon", "parallel_attn": False, "multi_query": False},
}


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the values of a tensor, which its name decides; norms multiply by about 1."""
    values = 0.15 * np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    is_scale = name.endswith(".weight") and ("norm" in name or ".ln_" in name)
    return (values + (1 if is_scale else 0)).astype(np.float32)


def tokens() -> np.ndarray:
    """Returns the tokens `[2, TOKENS]`."""
    return np.random.default_rng(0).integers(0, VOCAB, (2, TOKENS))


def _answer(config: dict[str, Any]) -> np.ndarray:
    import safetensors.numpy
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    from zero_jax.models import huggingface
    from zero_jax.pretrained.mapping import tensor_shape

    shape = huggingface.decoder_config(config)
    tensors = {}
    for path, name in huggingface.tensor_names(shape, model_type=config["model_type"]).items():
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
        return model(torch.tensor(tokens())).logits.numpy()


if __name__ == "__main__":
    answers = {name: _answer(config) for name, config in CONFIGS.items()}
    np.savez_compressed(PATH, **answers)  # pyright: ignore[reportArgumentType]
    print(f"wrote {PATH}")
